//! What will happen in one run: all of it drawn from the seed before the first step.

use crate::ids::TransferId;
use crate::transfer::Order;

use super::rng::Rng;

/// Times are microseconds since the run's start, on the world's own clock.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) nodes: Vec<NodePlan>,
    pub(super) prefills: usize,
    pub(super) requests: Vec<Request>,
    /// When the session of (prefill, decode) is cut.
    pub(super) cuts: Vec<(u64, (usize, usize))>,
    pub(super) crashes: Vec<Crash>,
    /// Receivers ask before they revoke.
    pub(super) ask: bool,
    /// One part of a write in so many is changed in flight; never if 0.
    pub(super) corrupt_once_in: u64,
    /// One message in so many is said again in the next session; never if 0.
    pub(super) repeat_once_in: u64,
    /// One delay in so many is long; never if 0.
    pub(super) slow_once_in: u64,
}

#[derive(Debug)]
pub(super) struct NodePlan {
    /// How fast its clock runs, in thousandths of the world's.
    pub(super) rate: u64,
    /// What its clock shows at the start.
    pub(super) offset: u64,
    pub(super) blocks: usize,
    pub(super) tokens_per_block: u32,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Crash {
    pub(super) at: u64,
    pub(super) node: usize,
    pub(super) away: u64,
}

#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) transfer: TransferId,
    pub(super) prefill: usize,
    pub(super) decode: usize,
    pub(super) order: Order,
    /// Tokens that decode has already: whole blocks.
    pub(super) local: u32,
    /// Tokens that decode wants in the end.
    pub(super) tokens: u32,
    /// Tokens that prefill has in the end.
    pub(super) held: u32,
    pub(super) decode_at: u64,
    pub(super) prefill_at: u64,
    pub(super) tokens_per_chunk: u32,
    /// How long one chunk, or one layer of the last chunk, is computed.
    pub(super) compute: u64,
    pub(super) cancel_decode: Option<u64>,
    pub(super) cancel_prefill: Option<u64>,
    pub(super) fail_prefill: Option<u64>,
    pub(super) posts_in_flight: u32,
    pub(super) cells_per_post: u64,
}

pub(super) const MS: u64 = 1000;
pub(super) const LAYERS: u16 = 3;

/// Requests begin within this time.
const SPAN: u64 = 1500 * MS;

impl Plan {
    pub(super) fn draw(rng: &mut Rng) -> Self {
        let prefills = rng.within(1..4) as usize;
        let decodes = rng.within(1..4) as usize;
        let nodes: Vec<NodePlan> = (0..prefills + decodes).map(|_| NodePlan::draw(rng)).collect();
        let requests = (0..rng.within(2..10)).map(|_| Request::draw(rng, prefills, &nodes)).collect();
        let calm = rng.once_in(6);
        let cuts = (0..if calm { 0 } else { rng.within(0..6) })
            .map(|_| (rng.within(0..2 * SPAN), (index(rng, 0..prefills), index(rng, prefills..nodes.len()))))
            .collect();
        let crashes = (0..if calm { 0 } else { rng.within(0..3) })
            .map(|_| Crash {
                at: rng.within(0..2 * SPAN),
                node: index(rng, 0..nodes.len()),
                away: rng.within(1..600) * MS,
            })
            .collect();
        Self {
            nodes,
            prefills,
            requests,
            cuts,
            crashes,
            ask: rng.once_in(2),
            corrupt_once_in: if rng.once_in(3) { 25 } else { 0 },
            repeat_once_in: if calm { 0 } else { rng.within(0..6) },
            slow_once_in: if rng.once_in(3) { 0 } else { rng.within(8..40) },
        }
    }
}

impl NodePlan {
    fn draw(rng: &mut Rng) -> Self {
        Self {
            rate: rng.within(900..1101),
            offset: rng.within(0..1 << 50),
            blocks: rng.within(6..20) as usize,
            tokens_per_block: [2, 4, 8][index(rng, 0..3)],
        }
    }
}

impl Request {
    fn draw(rng: &mut Rng, prefills: usize, nodes: &[NodePlan]) -> Self {
        let (prefill, decode) = (index(rng, 0..prefills), index(rng, prefills..nodes.len()));
        let block = nodes[decode].tokens_per_block;
        let tokens = rng.within(1..32) as u32;
        let local = if rng.once_in(2) { 0 } else { (rng.within(0..tokens.into()) as u32) / block * block };
        // Now and then the two sides disagree about the tokens.
        let held = if rng.once_in(25) { rng.within(1..32) as u32 } else { tokens };
        let first = rng.within(0..SPAN);
        let apart = if rng.once_in(8) { 900 } else { 60 };
        let second = first + rng.within(0..apart) * MS;
        let (decode_at, prefill_at) = if rng.once_in(2) { (first, second) } else { (second, first) };
        let mut at_times = |once_in| rng.once_in(once_in).then(|| first + rng.within(0..700) * MS);
        let (cancel_decode, cancel_prefill, fail_prefill) = (at_times(6), at_times(7), at_times(20));
        Self {
            transfer: TransferId::new(u128::from(rng.next()) << 64 | u128::from(rng.next())),
            prefill,
            decode,
            order: if rng.once_in(2) { Order::DecodeFirst } else { Order::PrefillFirst },
            local,
            tokens,
            held,
            decode_at,
            prefill_at,
            tokens_per_chunk: rng.within(1..17) as u32,
            compute: rng.within(1..60) * MS,
            cancel_decode,
            cancel_prefill,
            fail_prefill,
            posts_in_flight: rng.within(1..6) as u32,
            cells_per_post: rng.within(1..40),
        }
    }
}

fn index(rng: &mut Rng, range: std::ops::Range<usize>) -> usize {
    rng.within(range.start as u64..range.end as u64) as usize
}
