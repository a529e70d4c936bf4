//! What a plan is asked for: one request's blocks on two sides, and which part of them.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::strides::KvLayout;
use crate::ids::{BlockId, LayerId};

/// Which part of the model a worker's layout holds; how many layers and heads is in its [`KvShape`](super::KvShape).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Shard {
    /// The model layer that is the layout's layer 0.
    pub first_layer: LayerId,
    /// The model's KV head (counted over all tensor-parallel ranks) that is the layout's head 0.
    pub first_head: u16,
}

/// One request's blocks on one side, in the order of its sequence.
#[derive(Clone, Copy, Debug)]
pub struct CacheView<'a> {
    /// Where the bytes lie.
    pub layout: &'a KvLayout,
    /// Which part of the model they are.
    pub shard: Shard,
    /// The blocks, consecutive in the sequence.
    pub blocks: &'a [BlockId],
    /// The place in the sequence of the first token of `blocks[0]`: not 0 where a prefix is present already.
    pub first_token: u32,
}

/// Which part of a request's KV is meant, in the model's own numbers: they mean the same on both sides.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Selection {
    /// Model layers.
    pub layers: Range<u16>,
    /// KV heads of the model.
    pub heads: Range<u16>,
    /// Places in the sequence.
    pub tokens: Range<u32>,
}

/// One of the two sides of a copy.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Side {
    /// Where bytes are read.
    Source,
    /// Where bytes are written.
    Destination,
}

/// Why two views cannot be copied into each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// One side has K and V, the other one plane.
    #[error("plan: the source has {src} planes and the destination {dst}; both must be K and V, or both MLA")]
    Planes {
        /// Planes of the source.
        src: usize,
        /// Planes of the destination.
        dst: usize,
    },
    /// A token's bytes differ in length: another dtype or head size.
    #[error(
        "plan: plane {plane} has {src} bytes a token and head at the source, {dst} at the destination; dtype and head size must agree"
    )]
    RunBytes {
        /// The plane's index.
        plane: usize,
        /// Bytes at the source.
        src: u32,
        /// Bytes at the destination.
        dst: u32,
    },
    /// A range ends before it begins.
    #[error("plan: selected {axis} {start}..{end} end before they begin")]
    Backwards {
        /// `layers`, `heads` or `tokens`.
        axis: &'static str,
        /// Where the range begins.
        start: u32,
        /// Where it ends.
        end: u32,
    },
    /// A side does not hold all that is selected.
    #[error("plan: the {side} holds {axis} {held:?}, but {wanted:?} are selected; select what both sides hold")]
    Outside {
        /// `layers`, `heads` or `tokens`.
        axis: &'static str,
        /// The side that lacks it.
        side: Side,
        /// What is selected.
        wanted: Range<u64>,
        /// What the side holds.
        held: Range<u64>,
    },
    /// A block id is not in the pool.
    #[error("plan: block {block} of the {side} is outside its pool of {blocks} blocks")]
    Block {
        /// The side.
        side: Side,
        /// The id.
        block: BlockId,
        /// The pool's size.
        blocks: u32,
    },
    /// Two parts of the sequence would be written to one place.
    #[error("plan: block {block} stands twice in the destination's list")]
    Twice {
        /// The id.
        block: BlockId,
    },
    /// The destination is not a window, so it has no extents.
    #[error("plan: the destination is not a window: its bytes lie in region {region}, a window's in region 0 only")]
    NotAWindow {
        /// A region of the destination.
        region: crate::ids::RegionId,
    },
}

impl CacheView<'_> {
    /// The model layers that this side holds.
    #[must_use]
    pub fn layers(&self) -> Range<u64> {
        let first = u64::from(self.shard.first_layer.get());
        first..first + u64::from(self.layout.shape().layers)
    }

    /// The model's KV heads that this side holds.
    #[must_use]
    pub fn heads(&self) -> Range<u64> {
        let first = u64::from(self.shard.first_head);
        first..first + u64::from(self.layout.shape().heads)
    }

    /// The places in the sequence that `blocks` hold.
    #[must_use]
    pub fn tokens(&self) -> Range<u64> {
        let first = u64::from(self.first_token);
        first..first + self.blocks.len() as u64 * u64::from(self.layout.shape().tokens_per_block)
    }
}

impl Selection {
    /// What both sides hold: empty where they share nothing.
    #[must_use]
    pub fn common(a: &CacheView<'_>, b: &CacheView<'_>) -> Self {
        Self {
            layers: meet(&a.layers(), &b.layers(), u16::MAX),
            heads: meet(&a.heads(), &b.heads(), u16::MAX),
            tokens: meet(&a.tokens(), &b.tokens(), u32::MAX),
        }
    }

    /// Whether nothing is selected.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty() || self.heads.is_empty() || self.tokens.is_empty()
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Destination => "destination",
        })
    }
}

/// Checks that both sides hold the selection and describe its tokens by the same bytes.
pub(super) fn check(src: &CacheView<'_>, dst: &CacheView<'_>, selection: &Selection) -> Result<(), PlanError> {
    let (src_runs, dst_runs) = (&src.layout.shape().run_bytes, &dst.layout.shape().run_bytes);
    if src_runs.len() != dst_runs.len() {
        return Err(PlanError::Planes { src: src_runs.len(), dst: dst_runs.len() });
    }
    for (plane, (&src, &dst)) in src_runs.iter().zip(dst_runs).enumerate() {
        if src != dst {
            return Err(PlanError::RunBytes { plane, src, dst });
        }
    }
    let wanted = [
        ("layers", u32::from(selection.layers.start), u32::from(selection.layers.end)),
        ("heads", selection.heads.start.into(), selection.heads.end.into()),
        ("tokens", selection.tokens.start, selection.tokens.end),
    ];
    if let Some(&(axis, start, end)) = wanted.iter().find(|&&(_, start, end)| start > end) {
        return Err(PlanError::Backwards { axis, start, end });
    }
    for (side, view) in [(Side::Source, src), (Side::Destination, dst)] {
        for ((axis, start, end), held) in wanted.into_iter().zip([view.layers(), view.heads(), view.tokens()]) {
            let wanted = u64::from(start)..u64::from(end);
            if !wanted.is_empty() && (wanted.start < held.start || wanted.end > held.end) {
                return Err(PlanError::Outside { axis, side, wanted, held });
            }
        }
    }
    Ok(())
}

fn meet<T: TryFrom<u64> + Copy>(a: &Range<u64>, b: &Range<u64>, max: T) -> Range<T> {
    let fit = |value: u64| T::try_from(value).unwrap_or(max);
    let start = a.start.max(b.start);
    let end = a.end.min(b.end).max(start);
    fit(start)..fit(end)
}
