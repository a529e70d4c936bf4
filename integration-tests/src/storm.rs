//! Faults at moments that chance picks, again and again, on the same processes.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use crate::{Ask, Chance, Cluster, Load, Reference, Setup};

/// How many rounds of a fault, and from which seed; `KVFERRY_FAULT_ROUNDS` and `KVFERRY_FAULT_SEED` say otherwise.
#[derive(Clone, Copy, Debug)]
pub struct Rounds {
    /// Rounds of each fault.
    pub count: u64,
    /// What chance starts from.
    pub seed: u64,
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

    /// Runs rounds of a fault on clusters of `prefill` and `decode` nodes; after each all must be as it was at first.
    ///
    /// # Panics
    /// If a round fails; a line on standard error says how to run it again.
    pub fn run(
        self,
        name: &str,
        setup: &Setup,
        (prefill, decode): (usize, usize),
        round: impl Fn(&mut Round<'_>) + Sync,
    ) {
        eprintln!("KVFERRY_FAULT_SEED={} KVFERRY_FAULT_ROUNDS={} runs {name} again", self.seed, self.count);
        let seed = name.bytes().fold(self.seed, |seed, byte| Chance::new(seed ^ u64::from(byte)).draw());
        let reference = Arc::new(Reference::new(kvferry_kernels::KvDtype::F16));
        // Rounds mostly wait: two clusters take half the time.
        std::thread::scope(|scope| {
            for lane in 0..LANES {
                let (round, reference) = (&round, Arc::clone(&reference));
                scope.spawn(move || {
                    let mut cluster = Cluster::new(setup, prefill, decode, reference);
                    for number in (lane..self.count).step_by(LANES as usize) {
                        let _said = SaidOnPanic { name, number };
                        let chance = Chance::new(seed).part(number);
                        let mut this = Round { cluster: &mut cluster, chance, number };
                        round(&mut this);
                        let mut chance = this.chance;
                        cluster.heal();
                        cluster.settle(&mut chance);
                    }
                });
            }
        });
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
        let ask = Ask::draw(&mut self.chance);
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
}

impl Drop for SaidOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("round {} of {} failed", self.number, self.name);
        }
    }
}

const LANES: u64 = 2;
