//! Engines, their ranks, and who may speak with whom.

use std::ops::Range;

use crate::ids::TpRank;
use crate::layout::heads_of;
use crate::wire::{VERSIONS, VersionRange};

use super::{Rng, Size, Weather, index};

/// One serving instance.
#[derive(Debug, Clone)]
pub(in crate::sim) struct EnginePlan {
    /// Its ranks, among all nodes.
    pub(in crate::sim) nodes: Range<usize>,
    pub(in crate::sim) blocks: u32,
    pub(in crate::sim) tokens_per_block: u32,
    /// The protocol versions that it speaks.
    pub(in crate::sim) versions: VersionRange,
    /// The same after a restart: a rolling upgrade.
    pub(in crate::sim) upgraded: VersionRange,
    /// It holds the cluster's key, and says and writes what it likes.
    pub(in crate::sim) lies: bool,
}

/// One rank of an engine: one process with its own memory.
#[derive(Debug)]
pub(in crate::sim) struct NodePlan {
    pub(in crate::sim) engine: usize,
    pub(in crate::sim) rank: u16,
    /// KV heads of the model that it holds.
    pub(in crate::sim) heads: Range<u16>,
    /// How fast its clock runs, in thousandths of the world's.
    pub(in crate::sim) rate: u64,
    /// What its clock shows at the start.
    pub(in crate::sim) offset: u64,
    /// The longest that its driver takes to come to the next input.
    pub(in crate::sim) pace: u64,
    /// What links it has.
    pub(in crate::sim) links: Vec<usize>,
}

/// A prefill rank and a decode rank that a part needs.
#[derive(Debug, Clone)]
pub(in crate::sim) struct LinkPlan {
    /// Prefill, decode.
    pub(in crate::sim) ends: [usize; 2],
    pub(in crate::sim) parts: Vec<usize>,
}

/// Engines, how many of them prefill, their ranks, and the model's KV heads.
pub(super) fn draw(rng: &mut Rng, size: Size, weather: Weather) -> (Vec<EnginePlan>, usize, Vec<NodePlan>, u16) {
    let most = match size {
        Size::Small | Size::Middle => 3,
        Size::Large => 5,
    };
    let least = if size == Size::Large { 2 } else { 1 };
    let prefills = rng.within(least..most) as usize;
    let decodes = rng.within(least..most) as usize;
    let (heads, tp_sizes) = match (size, rng.within(0..10)) {
        (Size::Small, 0..=5) => (1, vec![1]),
        (_, 9) => (3, vec![1, 3]),
        (Size::Small, _) => ([1, 2, 4][index(rng, 0..3)], vec![1, 1, 2]),
        (Size::Middle | Size::Large, _) => ([1, 2, 4][index(rng, 0..3)], vec![1, 2, 4]),
    };
    let mut engines = Vec::new();
    let mut nodes = Vec::new();
    for engine in 0..prefills + decodes {
        let tp_size = tp_sizes[index(rng, 0..tp_sizes.len())];
        let first = nodes.len();
        let slow = weather == Weather::Rough && rng.once_in(12);
        let rate = if weather == Weather::Rough { 700..1401 } else { 900..1101 };
        let pace = match weather {
            Weather::Fair => super::MS / 2,
            Weather::Calm | Weather::Rough => 2 * super::MS,
        };
        for rank in 0..tp_size {
            let heads = heads_of(TpRank::new(rank), tp_size, heads).expect("the sizes divide one another");
            nodes.push(NodePlan {
                engine,
                rank,
                heads,
                rate: rng.within(rate.clone()),
                offset: rng.within(0..1 << 50),
                pace: if slow { rng.within(5..30) * super::MS } else { pace },
                links: Vec::new(),
            });
        }
        let versions = draw_versions(rng, weather);
        engines.push(EnginePlan {
            nodes: first..nodes.len(),
            blocks: match (weather, rng.within(0..5), size) {
                // Enough for all requests at a time.
                (Weather::Fair, _, Size::Large) => 2000,
                (Weather::Fair, _, Size::Small | Size::Middle) => 400,
                (_, 0, _) => 3,
                (_, _, Size::Large) => rng.within(6..60) as u32,
                (_, _, Size::Small | Size::Middle) => rng.within(6..20) as u32,
            },
            tokens_per_block: [2, 4, 8][index(rng, 0..3)],
            versions,
            upgraded: if rng.once_in(3) { draw_versions(rng, weather) } else { versions },
            lies: false,
        });
    }
    (engines, prefills, nodes, heads)
}

/// This release, and the ones before and after it: neighbours share a version, others may not.
fn draw_versions(rng: &mut Rng, weather: Weather) -> VersionRange {
    match rng.within(0..24) {
        0..=1 => range(1, 1),
        2 if weather == Weather::Rough => range(2, 3),
        3 => range(1, 3),
        4 if weather == Weather::Rough => range(3, 4),
        _ => VERSIONS,
    }
}

const fn range(min: u16, max: u16) -> VersionRange {
    VersionRange { min, max }
}
