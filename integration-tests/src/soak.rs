//! A long run at full load with faults at random: every answer is compared with the reference, and what the nodes hold of the system
//! is compared between its beginning and its end.

mod report;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvferry_transport::testing::{Flow, Proxy, Towards};

pub use report::{Latency, NodeReport, Pools, SoakReport, Usage};

use crate::{Asks, Chance, Cluster, HttpError, Idle, Node, Reference, Setup, Shape, Watch, http};

/// How long, from which seed, with how many clients, on which nodes.
#[derive(Clone, Copy, Debug)]
pub struct SoakOptions {
    /// How long faults and load last.
    pub duration: Duration,
    /// What chance starts from.
    pub seed: u64,
    /// Clients that wait for their answers; as many again come and hang up.
    pub clients: u64,
    /// How the nodes are configured.
    pub shape: Shape,
}

/// What the clients share.
struct Shared {
    options: SoakOptions,
    reference: Arc<Reference>,
    asks: Arc<Asks>,
    limit: Duration,
    began: Instant,
    is_over: AtomicBool,
    /// Each decode node as it is now.
    decode: Mutex<Vec<Place>>,
    /// When each answer came, and how long it took.
    latencies: Mutex<Vec<(Duration, Duration)>>,
    lost_with_node: AtomicU64,
    hung_up: AtomicU64,
}

/// Where a decode node serves, and how often it was started anew.
#[derive(Clone)]
struct Place {
    address: SocketAddr,
    starts: u64,
    watch: Watch,
}

impl Place {
    fn of(node: &Node, starts: u64) -> Self {
        Self { address: node.http_address(), starts, watch: node.watch() }
    }
}

/// Runs two prefill and two decode nodes. The first of each lives through all of it; the others are killed, too.
///
/// # Panics
/// If a token is wrong, an answer is missing or came later than the deadlines allow, a node holds something in the end, has more of
/// its system than at first, or has logged at ERROR.
#[must_use]
pub fn soak(setup: &Setup, options: SoakOptions) -> SoakReport {
    let reference = Arc::new(Reference::new(kvferry_kernels::KvDtype::F16));
    let mut cluster = Cluster::new(setup, options.shape, 2, 2, Arc::clone(&reference));
    let before: Vec<_> = survivors(&cluster).map(|(_, node)| (Usage::of(node), Pools::of(node))).collect();
    let shared = Arc::new(Shared {
        options,
        reference,
        asks: Arc::clone(cluster.asks()),
        limit: cluster.decode()[0].limits().answer,
        began: Instant::now(),
        is_over: AtomicBool::new(false),
        decode: Mutex::new(cluster.decode().iter().map(|node| Place::of(node, 0)).collect()),
        latencies: Mutex::default(),
        lost_with_node: AtomicU64::new(0),
        hung_up: AtomicU64::new(0),
    });
    let chance = Chance::new(options.seed);
    let clients: Vec<_> = (0..2 * options.clients)
        .map(|number| {
            let (shared, chance) = (Arc::clone(&shared), chance.part(number));
            std::thread::spawn(move || {
                let _ends = EndsOnPanic(&shared);
                match number % 2 {
                    0 => shared.ask(chance),
                    _ => shared.hang_up(chance),
                }
            })
        })
        .collect();
    let (faults, warm) = break_things(&mut cluster, &shared, chance.part(u64::MAX));
    shared.is_over.store(true, Ordering::SeqCst);
    for client in clients {
        client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
    cluster.settle(&mut chance.part(u64::MAX - 1));
    let survivors = survivors(&cluster).zip(before).zip(warm);
    let nodes = survivors.map(|(((name, node), before), warm)| NodeReport::of(name, node, before, warm)).collect();
    let (right, refused) = shared.asks.counts();
    let report = SoakReport {
        right,
        refused,
        lost_with_node: shared.lost_with_node.load(Ordering::SeqCst),
        hung_up: shared.hung_up.load(Ordering::SeqCst),
        longest_idle: (shared.asks.longest_idle(), shared.limit),
        faults,
        nodes,
        window: shared.window(),
        latency: shared.latency_of_windows(),
        tally: crate::Tally::of(&cluster),
    };
    report.check();
    report
}

/// Ends the run when a client finds something: nobody waits an hour for what is known.
struct EndsOnPanic<'a>(&'a Shared);

impl Drop for EndsOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.is_over.store(true, Ordering::SeqCst);
        }
    }
}

impl Shared {
    /// Asks and waits, again and again.
    fn ask(&self, mut chance: Chance) {
        while !self.is_over() {
            let (index, place) = self.pick(&mut chance);
            let ask = self.asks.draw(&mut chance);
            let (began, idle) = (Instant::now(), Idle::begin([place.watch]));
            let answer = http::complete(place.address, &ask.prompt, ask.max_tokens);
            let (took, idle) = (began.elapsed(), idle.so_far());
            match answer {
                // Its process was killed meanwhile, or is about to be replaced.
                Err(HttpError { status: 0, .. }) if self.was_started_anew(index, place.starts) => {
                    self.lost_with_node.fetch_add(1, Ordering::SeqCst);
                }
                answer => {
                    self.asks.check(&ask, &self.reference, answer);
                    self.asks.check_idle(idle, self.limit);
                    lock(&self.latencies).push((self.began.elapsed(), took));
                }
            }
        }
    }

    /// Asks and leaves.
    fn hang_up(&self, mut chance: Chance) {
        while !self.is_over() {
            let (_, place) = self.pick(&mut chance);
            let ask = self.asks.draw(&mut chance);
            // The node may be between two lives.
            if let Ok(stream) = http::try_send_and_hang_up(place.address, &ask.prompt, 64) {
                pause(Duration::from_millis(chance.below(400)));
                drop(stream);
                self.hung_up.fetch_add(1, Ordering::SeqCst);
            }
            pause(Duration::from_millis(chance.below(600)));
        }
    }

    fn pick(&self, chance: &mut Chance) -> (usize, Place) {
        let decode = lock(&self.decode);
        let index = chance.below(decode.len() as u64) as usize;
        (index, decode[index].clone())
    }

    /// Whether a node's process ended after its start number `start`; the killer says so right after the deed.
    fn was_started_anew(&self, index: usize, start: u64) -> bool {
        let deadline = Instant::now() + crate::PATIENCE;
        while Instant::now() < deadline {
            if lock(&self.decode)[index].starts > start {
                return true;
            }
            pause(Duration::from_millis(5));
        }
        false
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// How much of the beginning and of the end is compared.
    fn window(&self) -> Duration {
        LONGEST_WINDOW.min(self.options.duration / 2)
    }

    fn latency_of_windows(&self) -> [Latency; 2] {
        let (latencies, window, all) = (lock(&self.latencies), self.window(), self.options.duration);
        let of = |range: std::ops::Range<Duration>| {
            Latency::of(latencies.iter().filter(|(at, _)| range.contains(at)).map(|(_, took)| *took).collect())
        };
        [of(Duration::ZERO..window), of(all - window..all)]
    }
}

/// How often each fault was made.
type FaultCounts = Vec<(&'static str, u64)>;

/// Breaks things until the time is over, or something was found; returns how often each was, and what the survivors had when the first
/// window was over.
fn break_things(cluster: &mut Cluster, shared: &Shared, mut chance: Chance) -> (FaultCounts, Vec<(Usage, Pools)>) {
    let mut counts: Vec<_> = FAULTS.iter().map(|fault| (*fault, 0)).collect();
    let mut warm = None;
    while shared.began.elapsed() < shared.options.duration && !shared.is_over() {
        pause(Duration::from_millis(chance.below(2_000)));
        let fault = chance.below(FAULTS.len() as u64) as usize;
        counts[fault].1 += 1;
        break_one(FAULTS[fault], cluster, shared, &mut chance);
        cluster.heal();
        if warm.is_none() && shared.began.elapsed() > shared.window() {
            warm = Some(survivors(cluster).map(|(_, node)| (Usage::of(node), Pools::of(node))).collect());
        }
    }
    let at_end = || survivors(cluster).map(|(_, node)| (Usage::of(node), Pools::of(node))).collect();
    (counts, warm.unwrap_or_else(at_end))
}

fn break_one(fault: &str, cluster: &mut Cluster, shared: &Shared, chance: &mut Chance) {
    let lasts = Duration::from_millis(chance.below(2_500));
    let index = chance.below(2) as usize;
    let link = chance.below(cluster.links().count() as u64) as usize;
    let towards = *chance.pick(&[Towards::Dialler, Towards::Target]);
    match fault {
        "prefill killed" => cluster.restart_prefill(1),
        "decode killed" => {
            cluster.restart_decode(1);
            let mut decode = lock(&shared.decode);
            decode[1] = Place::of(&cluster.decode()[1], decode[1].starts + 1);
        }
        "prefill stopped" | "decode stopped" => {
            let nodes = if fault == "prefill stopped" { cluster.prefill() } else { cluster.decode() };
            nodes[index].stop();
            pause(lasts);
            nodes[index].go_on();
        }
        "link cut" => {
            let link = nth(cluster, link);
            link.set_refusing(true);
            link.cut_all();
            pause(lasts);
        }
        "bytes held" | "bytes lost" | "crawl" | "delay" => {
            let flow = match fault {
                "bytes held" => Flow::Hold,
                "bytes lost" => Flow::Vanish,
                "crawl" => Flow::Crawl { bytes_per_second: 1 + chance.below(20_000) },
                _ => Flow::Delay(Duration::from_millis(chance.below(300))),
            };
            nth(cluster, link).set_flow(towards, flow);
            pause(lasts);
        }
        "bit flipped" => nth(cluster, link).flip_next(towards),
        other => unreachable!("{other} is no fault"),
    }
}

fn nth(cluster: &Cluster, link: usize) -> &Proxy {
    cluster.links().nth(link).expect("one of them")
}

/// The nodes that are never killed.
fn survivors(cluster: &Cluster) -> impl Iterator<Item = (String, &Node)> {
    [("prefill 0".to_owned(), &cluster.prefill()[0]), ("decode 0".to_owned(), &cluster.decode()[0])].into_iter()
}

/// Lets a time pass: load and faults are spread over it.
fn pause(time: Duration) {
    let until = Instant::now() + time;
    while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        std::thread::park_timeout(left);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The longest part of a run that is compared with another.
const LONGEST_WINDOW: Duration = Duration::from_secs(600);

const FAULTS: [&str; 10] = [
    "prefill killed",
    "decode killed",
    "prefill stopped",
    "decode stopped",
    "link cut",
    "bytes held",
    "bytes lost",
    "crawl",
    "delay",
    "bit flipped",
];
