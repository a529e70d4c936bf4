//! Requests, and the transfers that each of them takes: one for each decode rank and prefill rank that share heads.
//!
//! Most bring a prompt from prefill to decode. Some bring an answer's blocks back, from decode to prefill's tier: those are offered, and
//! the receiving engine begins when it hears of them.

use std::ops::Range;

use crate::ids::{TpRank, TransferId};
use crate::layout::sources_of;
use crate::transfer::{Order, Rect};

use super::faults::Ambush;
use super::{LAYERS, LinkPlan, MS, Plan, Rng, Size, Weather, index};

#[derive(Debug, Clone)]
pub(in crate::sim) struct Request {
    /// The engine that sends, and the one that receives.
    pub(in crate::sim) from: usize,
    pub(in crate::sim) to: usize,
    /// It goes back from decode to prefill.
    pub(in crate::sim) returns: bool,
    pub(in crate::sim) parts: Range<usize>,
    /// What its bytes are made of.
    pub(in crate::sim) salt: u64,
    pub(in crate::sim) order: Order,
    /// Tokens that the receiver has already: whole blocks.
    pub(in crate::sim) local: u32,
    /// Tokens that the receiver wants in the end.
    pub(in crate::sim) tokens: u32,
    /// Tokens that the sender has in the end.
    pub(in crate::sim) held: u32,
    /// When the receiver begins, if it does by itself, and the sender.
    pub(in crate::sim) to_at: u64,
    pub(in crate::sim) from_at: u64,
    pub(in crate::sim) tokens_per_chunk: u32,
    /// How long one chunk, or one layer of the last chunk, is computed.
    pub(in crate::sim) compute: u64,
    /// What the two engines do to it beside: when, whether the receiver does, and what.
    pub(in crate::sim) whims: Vec<(u64, bool, Whim)>,
    /// How long the receiver reads its blocks.
    pub(in crate::sim) hold: u64,
    pub(in crate::sim) posts_in_flight: u32,
    pub(in crate::sim) cells_per_post: u64,
}

/// What an engine does to a request of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sim) enum Whim {
    Cancel,
    /// Wants the blocks back, for another use at once.
    Preempt,
    /// The computation fails.
    Fail,
}

/// One transfer of a request: what one rank takes from one rank.
#[derive(Debug, Clone)]
pub(in crate::sim) struct Part {
    pub(in crate::sim) transfer: TransferId,
    pub(in crate::sim) request: usize,
    pub(in crate::sim) link: usize,
    /// Ranks.
    pub(in crate::sim) sender: usize,
    pub(in crate::sim) receiver: usize,
    /// KV heads of the model.
    pub(in crate::sim) heads: Range<u16>,
    pub(in crate::sim) ambushes: Vec<Ambush>,
}

impl Request {
    pub(in crate::sim) fn wanted(&self) -> Rect {
        Rect::new(self.local..self.tokens, 0..LAYERS).expect("local is less than tokens")
    }

    pub(in crate::sim) fn held(&self) -> Rect {
        Rect::new(0..self.held, 0..LAYERS).expect("at least one token is held")
    }

    /// What the n-th step computes: chunks of tokens over all layers, the last chunk layer by layer.
    pub(in crate::sim) fn step(&self, step: usize) -> Option<Rect> {
        if self.returns {
            return (step == 0).then(|| self.held());
        }
        let chunks = self.held.div_ceil(self.tokens_per_chunk);
        let last_first = (chunks - 1) * self.tokens_per_chunk;
        let step = u32::try_from(step).ok()?;
        if step < chunks - 1 {
            let first = step * self.tokens_per_chunk;
            return Rect::new(first..first + self.tokens_per_chunk, 0..LAYERS).ok();
        }
        let layer = u16::try_from(step - (chunks - 1)).ok().filter(|&layer| layer < LAYERS)?;
        Rect::new(last_first..self.held, layer..layer + 1).ok()
    }

    fn draw(rng: &mut Rng, plan: &Plan, span: u64) -> Self {
        let (fair, rough) = (plan.weather == Weather::Fair, plan.weather == Weather::Rough);
        let prefill = index(rng, 0..plan.prefills);
        let decode = index(rng, plan.prefills..plan.engines.len());
        let room = |engine: usize| plan.engines[engine].blocks * plan.engines[engine].tokens_per_block;
        let most = u64::from(room(prefill).min(room(decode)).min(31));
        let block = plan.engines[decode].tokens_per_block;
        let tokens = rng.within(1..most + 1) as u32;
        let local = if rng.once_in(2) { 0 } else { (rng.within(0..tokens.into()) as u32) / block * block };
        // Now and then the two sides disagree about the tokens.
        let held = if !fair && rng.once_in(25) { rng.within(1..most + 1) as u32 } else { tokens };
        let first = rng.within(0..span);
        let apart = if !fair && rng.once_in(8) { 900 } else { 60 };
        let second = first + rng.within(0..apart) * MS;
        let (to_at, from_at) = if rng.once_in(2) { (first, second) } else { (second, first) };
        let mut whims = Vec::new();
        for (once_in, decode, whim) in [
            (8, true, Whim::Cancel),
            (9, false, Whim::Cancel),
            (14, true, Whim::Preempt),
            (20, false, Whim::Preempt),
            (20, false, Whim::Fail),
        ] {
            if rough && rng.once_in(once_in) {
                whims.push((first + rng.within(0..700) * MS, decode, whim));
            }
        }
        Self {
            from: prefill,
            to: decode,
            returns: false,
            parts: 0..0,
            salt: rng.next(),
            order: if rng.once_in(2) { Order::DecodeFirst } else { Order::PrefillFirst },
            local,
            tokens,
            held,
            to_at,
            from_at,
            tokens_per_chunk: rng.within(1..17) as u32,
            compute: rng.within(1..if fair { 10 } else { 60 }) * MS,
            whims,
            hold: rng.within(1..200) * MS,
            posts_in_flight: rng.within(1..6) as u32,
            cells_per_post: rng.within(1..40),
        }
    }
}

impl Request {
    /// What may come back of a request: some blocks of its answer.
    fn draw_return(rng: &mut Rng, plan: &Plan, load: usize) -> Self {
        let load = &plan.requests[load];
        let (from, to) = (load.to, load.from);
        let block = plan.engines[from].tokens_per_block;
        let room = |engine: usize| plan.engines[engine].blocks * plan.engines[engine].tokens_per_block;
        let most = (room(from).min(room(to)) / block).clamp(1, 6);
        let blocks = rng.within(1..u64::from(most) + 1) as u32;
        let first = rng.within(0..blocks.into()) as u32;
        Self {
            from,
            to,
            returns: true,
            parts: 0..0,
            salt: rng.next(),
            order: Order::DecodeFirst,
            local: first * block,
            tokens: blocks * block,
            held: blocks * block,
            from_at: load.to_at + rng.within(0..900) * MS,
            compute: MS,
            whims: load.whims.iter().filter(|_| rng.once_in(2)).map(|&(at, _, whim)| (at, false, whim)).collect(),
            hold: rng.within(1..50) * MS,
            posts_in_flight: 2,
            ..load.clone()
        }
    }
}

/// Draws the requests of a plan, with their parts and the links that they need.
pub(super) fn draw(rng: &mut Rng, plan: &mut Plan, size: Size, heads: u16, span: u64) {
    let count = match size {
        Size::Small => rng.within(1..7),
        Size::Middle => rng.within(6..20),
        Size::Large => rng.within(50..130),
    };
    for _ in 0..count {
        let request = Request::draw(rng, plan, span);
        add(rng, plan, request, heads);
    }
    for load in 0..count as usize {
        let (decode, prefill) = (plan.requests[load].to, plan.requests[load].from);
        // A rank gives back to its twin.
        let twins = plan.engines[decode].nodes.len() == plan.engines[prefill].nodes.len();
        if twins && rng.once_in(3) {
            let request = Request::draw_return(rng, plan, load);
            add(rng, plan, request, heads);
        }
    }
}

fn add(rng: &mut Rng, plan: &mut Plan, mut request: Request, heads: u16) {
    let (number, first) = (plan.requests.len(), plan.parts.len());
    let (from, to) = (plan.engines[request.from].nodes.clone(), plan.engines[request.to].nodes.clone());
    for (rank, receiver) in (0u16..).zip(to.clone()) {
        let sources = if request.returns {
            vec![(usize::from(rank), plan.nodes[receiver].heads.clone())]
        } else {
            let sources = sources_of(TpRank::new(rank), to.len() as u16, from.len() as u16, heads);
            let sources = sources.expect("the sizes divide one another").into_iter();
            sources.map(|source| (usize::from(source.tp_rank.get()), source.heads)).collect()
        };
        for (rank, heads) in sources {
            let (sender, part) = (from.start + rank, plan.parts.len());
            let link = link_between(plan, if request.returns { [receiver, sender] } else { [sender, receiver] });
            plan.links[link].parts.push(part);
            // The low half is the part's number, so that the driver finds it.
            let transfer = TransferId::new(u128::from(rng.next()) << 64 | part as u128);
            let ambushes = if plan.weather == Weather::Rough { Ambush::draw(rng) } else { Vec::new() };
            plan.parts.push(Part { transfer, request: number, link, sender, receiver, heads, ambushes });
        }
    }
    request.parts = first..plan.parts.len();
    plan.requests.push(request);
}

fn link_between(plan: &mut Plan, ends: [usize; 2]) -> usize {
    if let Some(&known) = plan.nodes[ends[0]].links.iter().find(|&&link| plan.links[link].ends == ends) {
        return known;
    }
    let link = plan.links.len();
    plan.links.push(LinkPlan { ends, parts: Vec::new() });
    for end in ends {
        plan.nodes[end].links.push(link);
    }
    link
}
