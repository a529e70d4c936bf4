//! A long run at full load with faults at random: every answer is compared with the reference, and what the nodes hold of the system
//! is compared between its beginning and its end.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvferry_transport::testing::{Flow, Proxy, Towards};

use crate::{Ask, Chance, Cluster, HttpError, Node, Reference, Setup, http};

/// How long, from which seed, with how many clients.
#[derive(Clone, Copy, Debug)]
pub struct SoakOptions {
    /// How long faults and load last.
    pub duration: Duration,
    /// What chance starts from.
    pub seed: u64,
    /// Clients that wait for their answers; as many again come and hang up.
    pub clients: u64,
}

/// What came of it.
#[derive(Debug)]
pub struct SoakReport {
    /// Answers that were right.
    pub right: u64,
    /// Clients whose decode node was killed under them.
    pub lost_with_node: u64,
    /// Clients that hung up.
    pub hung_up: u64,
    /// How often each fault was done.
    pub faults: Vec<(&'static str, u64)>,
    /// The nodes that lived from the beginning to the end: warm, and at the end.
    pub nodes: Vec<(String, Usage, Usage)>,
    /// Latencies of the first and the last tenth.
    pub latency: [Latency; 2],
    /// Transfers and losses that the surviving nodes counted.
    pub tally: crate::Tally,
}

/// What a process has of its system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Usage {
    /// Memory, in KiB.
    pub resident_kib: u64,
    /// File descriptors.
    pub descriptors: usize,
    /// Threads.
    pub threads: usize,
}

/// How long answers took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Latency {
    /// How many.
    pub count: usize,
    /// The median, in milliseconds.
    pub p50_ms: f64,
    /// What one in a hundred exceeds, in milliseconds.
    pub p99_ms: f64,
}

/// What the clients share.
struct Shared {
    options: SoakOptions,
    reference: Arc<Reference>,
    began: Instant,
    is_over: AtomicBool,
    /// Where each decode node serves, and how often it was started.
    decode: Mutex<Vec<(SocketAddr, u64)>>,
    latencies: Mutex<Vec<(Duration, Duration)>>,
    lost_with_node: AtomicU64,
    hung_up: AtomicU64,
}

/// Runs two prefill and two decode nodes. The first of each lives through all of it; the others are killed, too.
///
/// # Panics
/// If a token is wrong, an answer is missing, a node holds something in the end, has more of its system than at first, or has logged
/// at ERROR.
#[must_use]
pub fn soak(setup: &Setup, options: SoakOptions) -> SoakReport {
    let reference = Arc::new(Reference::new(kvferry_kernels::KvDtype::F16));
    let mut cluster = Cluster::new(setup, 2, 2, Arc::clone(&reference));
    let shared = Arc::new(Shared {
        options,
        reference,
        began: Instant::now(),
        is_over: AtomicBool::new(false),
        decode: Mutex::new(cluster.decode().iter().map(|node| (node.http_address(), 0)).collect()),
        latencies: Mutex::default(),
        lost_with_node: AtomicU64::new(0),
        hung_up: AtomicU64::new(0),
    });
    let chance = Chance::new(options.seed);
    let clients: Vec<_> = (0..2 * options.clients)
        .map(|number| {
            let (shared, chance) = (Arc::clone(&shared), chance.part(number));
            std::thread::spawn(move || match number % 2 {
                0 => shared.ask(chance),
                _ => shared.hang_up(chance),
            })
        })
        .collect();
    let (faults, warm) = break_things(&mut cluster, &shared, chance.part(u64::MAX));
    shared.is_over.store(true, Ordering::SeqCst);
    for client in clients {
        client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
    cluster.settle(&mut chance.part(u64::MAX - 1));
    let nodes = survivors(&cluster).zip(warm).map(|((name, node), warm)| (name, warm, Usage::of(node))).collect();
    let right = lock(&shared.latencies).len() as u64;
    let report = SoakReport {
        right,
        lost_with_node: shared.lost_with_node.load(Ordering::SeqCst),
        hung_up: shared.hung_up.load(Ordering::SeqCst),
        faults,
        nodes,
        latency: shared.latency_of_tenths(),
        tally: crate::Tally::of(&cluster),
    };
    report.check();
    report
}

impl std::fmt::Display for SoakReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { right, lost_with_node, hung_up, faults, nodes, latency, tally } = self;
        writeln!(f, "answers: {right} right, {lost_with_node} lost with their node, {hung_up} clients hung up")?;
        let faults: Vec<_> = faults.iter().map(|(fault, count)| format!("{fault} {count}")).collect();
        writeln!(f, "faults: {}", faults.join(", "))?;
        for (name, warm, end) in nodes {
            writeln!(
                f,
                "{name}: {} then {} KiB, {} then {} descriptors, {} then {} threads",
                warm.resident_kib, end.resident_kib, warm.descriptors, end.descriptors, warm.threads, end.threads
            )?;
        }
        for (latency, when) in latency.iter().zip(["first", "last"]) {
            let Latency { count, p50_ms, p99_ms } = latency;
            writeln!(f, "{when} tenth: {count} answers, p50 {p50_ms:.0} ms, p99 {p99_ms:.0} ms")?;
        }
        write!(f, "{tally:?}")
    }
}

impl SoakReport {
    fn check(&self) {
        for (name, warm, end) in &self.nodes {
            let most_kib = warm.resident_kib + warm.resident_kib / 4 + (8 << 10);
            assert!(
                end.resident_kib <= most_kib,
                "{name} grew from {} KiB to {} KiB",
                warm.resident_kib,
                end.resident_kib
            );
        }
    }
}

impl Usage {
    fn of(node: &Node) -> Self {
        Self { resident_kib: node.resident_kib(), descriptors: node.descriptors(), threads: node.threads() }
    }
}

impl Shared {
    /// Asks and waits, again and again.
    fn ask(&self, mut chance: Chance) {
        while !self.is_over() {
            let (index, address, start) = self.pick(&mut chance);
            let ask = Ask::draw(&mut chance);
            let began = Instant::now();
            let answer = http::complete(address, &ask.prompt, ask.max_tokens);
            let took = began.elapsed();
            match answer {
                // Its process was killed meanwhile, or is about to be replaced.
                Err(HttpError { status: 0, .. }) if self.was_started_anew(index, start) => {
                    self.lost_with_node.fetch_add(1, Ordering::SeqCst);
                }
                answer => {
                    ask.check(&self.reference, answer);
                    lock(&self.latencies).push((self.began.elapsed(), took));
                }
            }
        }
    }

    /// Asks and leaves.
    fn hang_up(&self, mut chance: Chance) {
        while !self.is_over() {
            let (_, address, _) = self.pick(&mut chance);
            let ask = Ask::draw(&mut chance);
            // The node may be between two lives.
            if let Ok(stream) = http::try_send_and_hang_up(address, &ask.prompt, 64) {
                pause(Duration::from_millis(chance.below(400)));
                drop(stream);
                self.hung_up.fetch_add(1, Ordering::SeqCst);
            }
            pause(Duration::from_millis(chance.below(600)));
        }
    }

    fn pick(&self, chance: &mut Chance) -> (usize, SocketAddr, u64) {
        let decode = lock(&self.decode);
        let index = chance.below(decode.len() as u64) as usize;
        (index, decode[index].0, decode[index].1)
    }

    /// Whether a node's process ended after its start number `start`; the killer says so right after the deed.
    fn was_started_anew(&self, index: usize, start: u64) -> bool {
        let deadline = Instant::now() + crate::PATIENCE;
        while Instant::now() < deadline {
            if lock(&self.decode)[index].1 > start {
                return true;
            }
            pause(Duration::from_millis(5));
        }
        false
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    fn latency_of_tenths(&self) -> [Latency; 2] {
        let latencies = lock(&self.latencies);
        let tenth = self.options.duration / 10;
        let of = |range: std::ops::Range<Duration>| {
            let mut took: Vec<_> =
                latencies.iter().filter(|(at, _)| range.contains(at)).map(|(_, took)| *took).collect();
            took.sort_unstable();
            let ms = |per_mille: usize| {
                took.get((took.len() * per_mille / 1000).min(took.len().saturating_sub(1)))
                    .map_or(0.0, |took| took.as_secs_f64() * 1e3)
            };
            Latency { count: took.len(), p50_ms: ms(500), p99_ms: ms(990) }
        };
        [of(Duration::ZERO..tenth), of(tenth * 9..tenth * 10)]
    }
}

/// Breaks things until the time is over; returns how often each was, and what the survivors had when a tenth of it was over.
fn break_things(cluster: &mut Cluster, shared: &Shared, mut chance: Chance) -> (Vec<(&'static str, u64)>, Vec<Usage>) {
    let mut counts: Vec<_> = FAULTS.iter().map(|fault| (*fault, 0)).collect();
    let mut warm = None;
    while shared.began.elapsed() < shared.options.duration {
        pause(Duration::from_millis(chance.below(2_000)));
        let fault = chance.below(FAULTS.len() as u64) as usize;
        counts[fault].1 += 1;
        break_one(FAULTS[fault], cluster, shared, &mut chance);
        cluster.heal();
        if warm.is_none() && shared.began.elapsed() > shared.options.duration / 10 {
            warm = Some(survivors(cluster).map(|(_, node)| Usage::of(node)).collect());
        }
    }
    let at_end = || survivors(cluster).map(|(_, node)| Usage::of(node)).collect();
    (counts, warm.unwrap_or_else(at_end))
}

fn break_one(fault: &str, cluster: &mut Cluster, shared: &Shared, chance: &mut Chance) {
    let lasts = Duration::from_millis(chance.below(2_500));
    let index = chance.below(2) as usize;
    let link = chance.below(4) as usize;
    let towards = *chance.pick(&[Towards::Dialler, Towards::Target]);
    match fault {
        "prefill killed" => cluster.restart_prefill(1),
        "decode killed" => {
            cluster.restart_decode(1);
            lock(&shared.decode)[1].0 = cluster.decode()[1].http_address();
            lock(&shared.decode)[1].1 += 1;
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
    cluster.links().nth(link).expect("four links")
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
