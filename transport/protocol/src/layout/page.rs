//! One layer of one span: what a processor cache holds, and where each token's run lies in it.

use std::ops::Range;

use super::nest::walk;
use super::plan::{CopyPlan, LayerPiece, PlanGroup};
use super::spans::Pair;
use super::strides::Place;
use super::view::Side;
use crate::ids::LayerId;

/// One layer of one span of a plan.
#[derive(Clone, Copy, Debug)]
pub struct PageCopy<'a> {
    pub(super) plan: &'a CopyPlan,
    pub(super) group: &'a PlanGroup,
    pub(super) pair: Pair,
    /// Counted from the selection's first layer.
    pub(super) layer: usize,
}

/// The runs of one plane of a page on one side: the run of head `h` and token `n` (counted from the page's first) begins at
/// `place.offset + h * head_stride + n * token_stride`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Strip {
    /// Where the first run begins.
    pub place: Place,
    /// Bytes from one head to the next.
    pub head_stride: u64,
    /// Bytes from one token to the next.
    pub token_stride: u64,
    /// Bytes of each run.
    pub run_bytes: u32,
}

impl PageCopy<'_> {
    /// The model layer.
    #[must_use]
    pub fn layer(&self) -> LayerId {
        LayerId::new(self.plan.selection.layers.start + self.layer as u16)
    }

    /// The KV heads of the model.
    #[must_use]
    pub fn heads(&self) -> Range<u16> {
        self.plan.selection.heads.clone()
    }

    /// Places in the sequence.
    #[must_use]
    pub const fn tokens(&self) -> Range<u32> {
        self.pair.token..self.pair.token + self.group.tokens
    }

    /// How many planes there are: one strip each.
    #[must_use]
    pub fn planes(&self) -> usize {
        self.plan.src.planes.len()
    }

    /// The runs of one plane.
    ///
    /// # Panics
    /// If `plane` is not below [`PageCopy::planes`].
    #[must_use]
    pub fn strip(&self, plane: usize, side: Side) -> Strip {
        let (map, block, token) = match side {
            Side::Source => (&self.plan.src, self.pair.src_block, self.pair.src_token),
            Side::Destination => (&self.plan.dst, self.pair.dst_block, self.pair.dst_token),
        };
        let strides = &map.planes[plane];
        let base = map.layer_place(self.layer, strides.layer);
        let in_layer = strides.offset + u64::from(block.get()) * strides.block + u64::from(token) * strides.token;
        Strip {
            place: Place { region: base.region, offset: base.offset + in_layer },
            head_stride: strides.head,
            token_stride: strides.token,
            run_bytes: strides.run_bytes,
        }
    }

    /// Calls `run(src, dst, bytes)` for each run of the page.
    #[inline]
    pub fn for_each_run(&self, mut run: impl FnMut(Place, Place, u64)) {
        for LayerPiece { piece, src_layer, dst_layer } in &self.group.page {
            let src = self.plan.src.layer_place(self.layer, *src_layer);
            let dst = self.plan.dst.layer_place(self.layer, *dst_layer);
            let (src_at, dst_at) =
                (piece.src.at(&self.pair, Side::Source), piece.dst.at(&self.pair, Side::Destination));
            walk(src.offset + src_at, dst.offset + dst_at, &piece.loops, &mut |src_offset, dst_offset| {
                run(
                    Place { region: src.region, offset: src_offset },
                    Place { region: dst.region, offset: dst_offset },
                    piece.run_bytes,
                );
            });
        }
    }
}
