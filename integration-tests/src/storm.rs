//! Faults at moments that chance picks, again and again, on the same processes.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use crate::{Chance, Cluster, Load, Reference, Setup, Shape};

/// How many rounds of a fault, and from which seed; `KVFERRY_FAULT_ROUNDS` and `KVFERRY_FAULT_SEED` say otherwise.
#[derive(Clone, Copy, Debug)]
pub struct Rounds {
    /// Rounds of each fault.
    pub count: u64,
    /// What chance starts from.
    pub seed: u64,
}

/// What nodes counted: transfers by their end, and what went wrong on the way.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Tally {
    /// Transfers received whole.
    pub done: f64,
    /// Transfers that failed for the receiver.
    pub failed: f64,
    /// Transfers that were cancelled, on either side.
    pub cancelled: f64,
    /// Prompt tokens that decode nodes computed after a failed transfer.
    pub recomputed_tokens: f64,
    /// Requests that failed because their transfer did, as the policy `fail` has it.
    pub failed_requests: f64,
    /// Tokens that a tier brought.
    pub restored_tokens: f64,
    /// Blocks of answers that landed in a tier.
    pub taken_blocks: f64,
    /// Sessions that ended.
    pub sessions_lost: f64,
    /// Chunks that did not match their digest.
    pub digest_mismatches: f64,
    /// Chunks that waited for a slab.
    pub slab_waits: f64,
}

/// One round: the nodes, and what chance decides in it.
pub struct Round<'a> {
    /// The nodes and links.
    pub cluster: &'a mut Cluster,
    /// What chance decides.
    pub chance: Chance,
    /// Its number, from 0.
    pub number: u64,
}

impl Rounds {
    /// What the environment says, or 20 rounds from a seed of the clock.
    ///
    /// # Panics
    /// If a variable is no number.
    #[must_use]
    pub fn from_env() -> Self {
        let number = |name: &str| {
            std::env::var(name)
                .ok()
                .map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, no number")))
        };
        let clock = || std::time::UNIX_EPOCH.elapsed().map_or(0, |since| u64::from(since.subsec_nanos()));
        Self {
            count: number("KVFERRY_FAULT_ROUNDS").unwrap_or(20),
            seed: number("KVFERRY_FAULT_SEED").unwrap_or_else(clock),
        }
    }

    /// Runs rounds of a fault on clusters of `prefill` and `decode` nodes, a quarter of them on each of four shapes
    /// ([`Shape::four`]); after each round all must be as it was at first. Returns what the nodes counted, so that a fault which
    /// touched nothing is found out.
    ///
    /// # Panics
    /// If a round fails; a line on standard error says how to run it again.
    pub fn run(
        self,
        name: &str,
        setup: &Setup,
        (prefill, decode): (usize, usize),
        round: impl Fn(&mut Round<'_>) + Sync,
    ) -> Tally {
        eprintln!("KVFERRY_FAULT_SEED={} KVFERRY_FAULT_ROUNDS={} runs {name} again", self.seed, self.count);
        let seed = name.bytes().fold(self.seed, |seed, byte| Chance::new(seed ^ u64::from(byte)).draw());
        let reference = Arc::new(Reference::new(kvferry_kernels::KvDtype::F16));
        let shapes = Shape::four(&mut Chance::new(seed));
        // Rounds mostly wait: two clusters take half the time.
        let tally = std::thread::scope(|scope| {
            let lanes: Vec<_> = (0..LANES)
                .map(|lane| {
                    let (round, reference) = (&round, &reference);
                    scope.spawn(move || {
                        let of_lane = (lane..shapes.len() as u64).step_by(LANES as usize);
                        let run = |number| {
                            let numbers = (number..self.count).step_by(shapes.len());
                            let shape = shapes[number as usize];
                            run_on(Named { name, seed }, setup, (shape, prefill, decode), reference, numbers, round)
                        };
                        of_lane.map(run).fold(Tally::default(), Tally::plus)
                    })
                })
                .collect();
            let of_lane = |lane: std::thread::ScopedJoinHandle<'_, Tally>| {
                lane.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            lanes.into_iter().map(of_lane).fold(Tally::default(), Tally::plus)
        });
        eprintln!("{name}: {tally:?}");
        tally
    }
}

/// A fault and where its chance begins.
#[derive(Clone, Copy)]
struct Named<'a> {
    name: &'a str,
    seed: u64,
}

/// The rounds of one cluster.
fn run_on(
    fault: Named<'_>,
    setup: &Setup,
    (shape, prefill, decode): (Shape, usize, usize),
    reference: &Arc<Reference>,
    numbers: impl Iterator<Item = u64>,
    round: &(impl Fn(&mut Round<'_>) + Sync),
) -> Tally {
    let mut numbers = numbers.peekable();
    let Some(&number) = numbers.peek() else { return Tally::default() };
    let mut said = SaidOnPanic { name: fault.name, number, shape };
    let mut cluster = Cluster::new(setup, shape, prefill, decode, Arc::clone(reference));
    for number in numbers {
        said.number = number;
        let chance = Chance::new(fault.seed).part(number);
        let mut this = Round { cluster: &mut cluster, chance, number };
        round(&mut this);
        let mut chance = this.chance;
        cluster.heal();
        cluster.settle(&mut chance);
    }
    let tally = Tally::of(&cluster);
    let (right, refused) = cluster.asks().counts();
    let idle = cluster.asks().longest_idle();
    eprintln!("{} on {shape}: {right} right, {refused} refused, at most {idle:.1?} idle, {tally:?}", fault.name);
    assert!(shape.fails || refused == 0, "nobody asked for this policy");
    tally
}

impl Tally {
    /// What the nodes of a cluster counted since they started.
    #[must_use]
    pub fn of(cluster: &Cluster) -> Self {
        let nodes = || cluster.prefill().iter().chain(cluster.decode());
        let sum = |name: &str, label: &str| nodes().map(|node| node.metric(&format!("kvferry_{name}"), label)).sum();
        Self {
            done: sum("transfers_done_total", "side=\"receive\""),
            failed: sum("transfers_failed_total", "side=\"receive\""),
            cancelled: sum("transfers_cancelled_total", ""),
            recomputed_tokens: sum("recomputed_tokens_total", ""),
            failed_requests: sum("failed_requests_total", ""),
            restored_tokens: sum("tier_restored_tokens_total", ""),
            taken_blocks: sum("taken_blocks_total", ""),
            sessions_lost: sum("sessions_lost_total", ""),
            digest_mismatches: sum("digest_mismatches_total", ""),
            slab_waits: sum("slab_waits_total", ""),
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            done: self.done + other.done,
            failed: self.failed + other.failed,
            cancelled: self.cancelled + other.cancelled,
            recomputed_tokens: self.recomputed_tokens + other.recomputed_tokens,
            failed_requests: self.failed_requests + other.failed_requests,
            restored_tokens: self.restored_tokens + other.restored_tokens,
            taken_blocks: self.taken_blocks + other.taken_blocks,
            sessions_lost: self.sessions_lost + other.sessions_lost,
            digest_mismatches: self.digest_mismatches + other.digest_mismatches,
            slab_waits: self.slab_waits + other.slab_waits,
        }
    }
}

impl Round<'_> {
    /// Starts some requests and waits for a moment in their traffic.
    #[must_use]
    pub fn load_until_moment(&mut self) -> Load {
        let load = self.load();
        self.cluster.wait_for_moment(&load, &mut self.chance);
        load
    }

    /// Sends a request to a decode node; who drops what is returned hangs up.
    #[must_use]
    pub fn begin_one(&mut self, decode: usize) -> TcpStream {
        let ask = self.cluster.asks().draw(&mut self.chance);
        self.cluster.decode()[decode].begin(&ask.prompt, ask.max_tokens)
    }

    /// Starts some requests.
    #[must_use]
    pub fn load(&mut self) -> Load {
        let count = self.chance.within(1..5) as usize;
        self.cluster.load(count, &mut self.chance)
    }

    /// Checks the answers of a load; clients of the decode nodes in `killed` may have none.
    pub fn check(&self, load: Load, killed: &[usize]) {
        load.check(self.cluster.reference(), killed);
    }

    /// Starts requests and checks their answers.
    pub fn serve(&mut self) {
        let load = self.load();
        self.check(load, &[]);
    }

    /// Lets a time pass that chance picks, shorter than `longest`: how long a fault lasts is part of it.
    pub fn last(&mut self, longest: Duration) {
        let until = std::time::Instant::now() + longest.mul_f64(self.chance.below(1000) as f64 / 1000.0);
        loop {
            match until.checked_duration_since(std::time::Instant::now()) {
                Some(left) if !left.is_zero() => std::thread::park_timeout(left),
                _ => return,
            }
        }
    }
}

/// Names the round that failed.
struct SaidOnPanic<'a> {
    name: &'a str,
    number: u64,
    shape: Shape,
}

impl Drop for SaidOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("round {} of {} failed ({})", self.number, self.name, self.shape);
        }
    }
}

const LANES: u64 = 2;
