//! What will happen in one run: all of it drawn from the seed before the first step.

mod cluster;
mod faults;
mod requests;

use crate::transfer::Rect;

use super::rng::Rng;

pub(super) use cluster::{EnginePlan, LinkPlan, NodePlan};
pub(super) use faults::{Act, Ambush, AmbushState, Fault, Odds};
pub(super) use requests::{Part, Request, Whim};

/// Times are microseconds since the run's start, on the world's own clock.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) engines: Vec<EnginePlan>,
    /// The first so many engines prefill, the others decode.
    pub(super) prefills: usize,
    /// All ranks of all engines.
    pub(super) nodes: Vec<NodePlan>,
    /// Pairs of ranks that a part needs.
    pub(super) links: Vec<LinkPlan>,
    pub(super) requests: Vec<Request>,
    /// Of all requests, in their order.
    pub(super) parts: Vec<Part>,
    pub(super) faults: Vec<(u64, Fault)>,
    pub(super) weather: Weather,
    pub(super) timing: Timing,
    pub(super) odds: Odds,
    /// Receivers ask before they revoke.
    pub(super) ask: bool,
    /// A rank that fails ends the request on the other ranks, too.
    pub(super) cancel_ranks: bool,
    /// Early messages of all peers, and of one peer.
    pub(super) early: (usize, usize),
}

/// Durations of the machines and the transports, in milliseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timing {
    pub(super) deadline: u64,
    pub(super) progress: u64,
    pub(super) absent: u64,
    pub(super) lease_ttl: u64,
    pub(super) lease_max: u64,
    pub(super) word: u64,
    pub(super) ask: u64,
    pub(super) linger: u64,
    pub(super) early: u64,
    /// A session that is silent for so long is ended by the side that hears nothing.
    pub(super) keep_alive: u64,
}

/// How bad it gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Weather {
    /// Only what must be survived: every request is done in the end.
    Fair,
    /// No faults, but changed bytes, long delays, pools that are full, and engines that disagree.
    Calm,
    /// Everything.
    Rough,
}

/// How large a run is: most are small and fast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Size {
    Small,
    Middle,
    Large,
}

pub(super) const MS: u64 = 1000;
pub(super) const LAYERS: u16 = 3;

impl Plan {
    /// All that will happen. With `liars`, an engine of one run in four lies; what else happens is the same without.
    pub(super) fn draw(rng: &mut Rng, liars: bool) -> Self {
        let size = if rng.once_in(250) {
            Size::Large
        } else if rng.once_in(12) {
            Size::Middle
        } else {
            Size::Small
        };
        let weather = match rng.within(0..10) {
            0 => Weather::Fair,
            1 => Weather::Calm,
            _ => Weather::Rough,
        };
        let (engines, prefills, nodes, heads) = cluster::draw(rng, size, weather);
        let span = match size {
            Size::Small => 1500 * MS,
            Size::Middle => 2500 * MS,
            Size::Large => 6000 * MS,
        };
        let mut plan = Self {
            engines,
            prefills,
            nodes,
            links: Vec::new(),
            requests: Vec::new(),
            parts: Vec::new(),
            faults: Vec::new(),
            weather,
            timing: Timing::draw(rng, weather),
            odds: Odds::draw(rng, weather),
            ask: rng.once_in(2),
            cancel_ranks: !rng.once_in(4),
            early: match (weather, rng.within(0..3)) {
                (Weather::Fair, _) => (1000, 1000),
                (Weather::Calm | Weather::Rough, 0) => (3, 2),
                (Weather::Calm | Weather::Rough, _) => (16, 8),
            },
        };
        requests::draw(rng, &mut plan, size, heads, span);
        plan.faults = faults::draw(rng, &plan, size, span);
        let (one_lies, which) = (rng.once_in(4), index(rng, 0..plan.engines.len()));
        plan.engines[which].lies = one_lies && liars;
        plan
    }

    /// Whether a rank is one of an engine that lies.
    pub(super) fn lies(&self, node: usize) -> bool {
        self.engines[self.nodes[node].engine].lies
    }

    /// Whether either end of a request lies: what its bytes are is between the two.
    pub(super) fn has_liar(&self, request: usize) -> bool {
        let Request { from, to, .. } = self.requests[request];
        self.engines[from].lies || self.engines[to].lies
    }

    /// The rank at the other end of a link.
    pub(super) fn peer_of(&self, link: usize, node: usize) -> usize {
        let [a, b] = self.links[link].ends;
        if node == a { b } else { a }
    }

    /// The rank at the other end of a part.
    pub(super) fn peer_in(&self, part: usize, node: usize) -> usize {
        let Part { sender, receiver, .. } = self.parts[part];
        if node == sender { receiver } else { sender }
    }
}

impl Timing {
    fn draw(rng: &mut Rng, weather: Weather) -> Self {
        let usual = Self {
            deadline: 2500,
            progress: 900,
            absent: 500,
            lease_ttl: 1000,
            lease_max: 3000,
            word: 500,
            ask: 120,
            linger: 400,
            early: 500,
            keep_alive: 400,
        };
        if weather == Weather::Fair || !rng.once_in(2) {
            return usual;
        }
        // Each on its own: which one comes first must not matter.
        let mut around = |ms: u64| rng.within(ms / 4..ms * 3 / 2);
        Self {
            deadline: around(usual.deadline),
            progress: around(usual.progress),
            absent: around(usual.absent),
            lease_ttl: around(usual.lease_ttl),
            lease_max: around(usual.lease_max),
            word: around(usual.word),
            ask: around(usual.ask),
            linger: around(usual.linger),
            early: around(usual.early),
            keep_alive: around(usual.keep_alive),
        }
    }
}

/// A rectangle that no transfer holds.
pub(super) fn whole() -> Rect {
    Rect::new(0..u32::MAX, 0..LAYERS).expect("it has tokens and layers")
}

fn index(rng: &mut Rng, range: std::ops::Range<usize>) -> usize {
    rng.within(range.start as u64..range.end as u64) as usize
}
