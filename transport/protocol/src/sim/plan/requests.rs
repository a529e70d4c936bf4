//! Requests, and the transfers that each of them takes: one for each decode rank and prefill rank that share heads.

use std::ops::Range;

use crate::ids::{TpRank, TransferId};
use crate::layout::sources_of;
use crate::transfer::{Order, Rect};

use super::faults::Ambush;
use super::{LAYERS, LinkPlan, MS, Plan, Rng, Size, Weather, index};

#[derive(Debug, Clone)]
pub(in crate::sim) struct Request {
    /// Engines.
    pub(in crate::sim) prefill: usize,
    pub(in crate::sim) decode: usize,
    pub(in crate::sim) parts: Range<usize>,
    /// What its bytes are made of.
    pub(in crate::sim) salt: u64,
    pub(in crate::sim) order: Order,
    /// Tokens that decode has already: whole blocks.
    pub(in crate::sim) local: u32,
    /// Tokens that decode wants in the end.
    pub(in crate::sim) tokens: u32,
    /// Tokens that prefill has in the end.
    pub(in crate::sim) held: u32,
    pub(in crate::sim) decode_at: u64,
    pub(in crate::sim) prefill_at: u64,
    pub(in crate::sim) tokens_per_chunk: u32,
    /// How long one chunk, or one layer of the last chunk, is computed.
    pub(in crate::sim) compute: u64,
    /// What the two engines do to it beside: when, whether decode does, and what.
    pub(in crate::sim) whims: Vec<(u64, bool, Whim)>,
    /// How long decode reads its blocks.
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

/// One transfer of a request: what one decode rank takes from one prefill rank.
#[derive(Debug, Clone)]
pub(in crate::sim) struct Part {
    pub(in crate::sim) transfer: TransferId,
    pub(in crate::sim) request: usize,
    pub(in crate::sim) link: usize,
    /// Ranks.
    pub(in crate::sim) prefill: usize,
    pub(in crate::sim) decode: usize,
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
        let (decode_at, prefill_at) = if rng.once_in(2) { (first, second) } else { (second, first) };
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
            prefill,
            decode,
            parts: 0..0,
            salt: rng.next(),
            order: if rng.once_in(2) { Order::DecodeFirst } else { Order::PrefillFirst },
            local,
            tokens,
            held,
            decode_at,
            prefill_at,
            tokens_per_chunk: rng.within(1..17) as u32,
            compute: rng.within(1..if fair { 10 } else { 60 }) * MS,
            whims,
            hold: rng.within(1..200) * MS,
            posts_in_flight: rng.within(1..6) as u32,
            cells_per_post: rng.within(1..40),
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
    for number in 0..count as usize {
        let mut request = Request::draw(rng, plan, span);
        let first = plan.parts.len();
        let (prefill, decode) = (&plan.engines[request.prefill], &plan.engines[request.decode]);
        let (prefill, decode) = (prefill.nodes.clone(), decode.nodes.clone());
        for (rank, node) in (0u16..).zip(decode.clone()) {
            let sources = sources_of(TpRank::new(rank), decode.len() as u16, prefill.len() as u16, heads);
            for source in sources.expect("the sizes divide one another") {
                let (ends, part) = ([prefill.start + usize::from(source.tp_rank.get()), node], plan.parts.len());
                let link = link_between(plan, ends);
                plan.links[link].parts.push(part);
                // The low half is the part's number, so that the driver finds it.
                let transfer = TransferId::new(u128::from(rng.next()) << 64 | part as u128);
                let ambushes = if plan.weather == Weather::Rough { Ambush::draw(rng) } else { Vec::new() };
                let heads = source.heads;
                plan.parts.push(Part {
                    transfer,
                    request: number,
                    link,
                    prefill: ends[0],
                    decode: node,
                    heads,
                    ambushes,
                });
            }
        }
        request.parts = first..plan.parts.len();
        plan.requests.push(request);
    }
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
