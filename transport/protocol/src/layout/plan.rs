//! Copying a selection from one layout to another, as few nested loops.
//!
//! A plan is factored: the spans of tokens that lie in one block on both sides, grouped by length, and for each length the few
//! pieces (nested loops around one run) that every such span consists of. Its size grows with the number of spans, not with
//! layers or heads; layers that were allocated one by one without an even distance add a piece each.

use super::build::{all_layers, page_pieces};
use super::nest::{PieceEnd, PlanPiece, settle, walk};
use super::page::PageCopy;
use super::spans::{self, Pair};
use super::strides::{LayerBase, Place, PlaneStrides};
use super::view::{self, CacheView, PlanError, Selection, Side};
use crate::ids::RegionId;

/// Which bytes go where; see [`plan`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CopyPlan {
    pub(super) groups: Vec<PlanGroup>,
    pub(super) src: SideMap,
    pub(super) dst: SideMap,
    pub(super) selection: Selection,
}

/// All spans of one length.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlanGroup {
    /// Tokens of each span.
    pub tokens: u32,
    /// Where the spans lie, in the order of the sequence.
    pub pairs: Vec<Pair>,
    /// What each span consists of, by rising destination offset.
    pub pieces: Vec<PlanPiece>,
    /// What one layer of a span consists of, before the layer's base is added.
    pub(super) page: Vec<LayerPiece>,
}

/// One side's strides, with the selection's first layer and head folded into the planes' offsets.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct SideMap {
    pub(super) planes: Vec<PlaneStrides>,
    /// One entry, or one for each selected layer.
    pub(super) bases: Vec<LayerBase>,
}

/// A piece of one layer, and where the next layer's is; 0 where layers have a base each.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct LayerPiece {
    pub(super) piece: PlanPiece,
    pub(super) src_layer: u64,
    pub(super) dst_layer: u64,
}

/// Plans the copy of a selection; an empty one gives an empty plan.
///
/// The two sides may differ in everything but the bytes of one token of one head: order of axes, padding, tokens a block,
/// layers and heads held, and where in the sequence their blocks begin.
///
/// # Errors
/// [`PlanError`] if a side does not hold the selection, the bytes of a token differ, a block lies outside its pool, or the
/// destination names a block twice.
pub fn plan(src: &CacheView<'_>, dst: &CacheView<'_>, selection: &Selection) -> Result<CopyPlan, PlanError> {
    let plan = lay_out(src, dst, selection)?;
    spans::check_written_once(dst, &selection.tokens)?;
    Ok(plan)
}

/// Plans a pass over one view's own bytes, for digests and the like: source and destination are the same places, and nothing is
/// to be written, so a block may stand twice in the view's list.
///
/// # Errors
/// [`PlanError`] if the view does not hold the selection, or a block lies outside its pool.
pub fn plan_in_place(view: &CacheView<'_>, selection: &Selection) -> Result<CopyPlan, PlanError> {
    lay_out(view, view, selection)
}

fn lay_out(src: &CacheView<'_>, dst: &CacheView<'_>, selection: &Selection) -> Result<CopyPlan, PlanError> {
    view::check(src, dst, selection)?;
    let mut plan = CopyPlan {
        groups: Vec::new(),
        src: SideMap::new(src, selection),
        dst: SideMap::new(dst, selection),
        selection: selection.clone(),
    };
    if selection.is_empty() {
        return Ok(plan);
    }
    for spans::SpanGroup { tokens, pairs } in spans::cut(src, dst, &selection.tokens)? {
        let page = page_pieces(&plan.src, &plan.dst, selection, tokens, &pairs);
        let pieces = all_layers(&plan.src, &plan.dst, selection.layers.len(), &page);
        plan.groups.push(PlanGroup { tokens, pairs, pieces, page });
    }
    Ok(plan)
}

impl CopyPlan {
    /// The spans, grouped by length.
    #[must_use]
    pub fn groups(&self) -> &[PlanGroup] {
        &self.groups
    }

    /// What is copied.
    #[must_use]
    pub const fn selection(&self) -> &Selection {
        &self.selection
    }

    /// Bytes that are copied.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.groups.iter().map(|group| group.span_bytes() * group.pairs.len() as u64).sum()
    }

    /// How often [`CopyPlan::for_each_run`] calls back.
    #[must_use]
    pub fn runs(&self) -> u64 {
        let mut runs = 0;
        self.for_each_nest(|_, _, piece| runs += piece.runs());
        runs
    }

    /// Bytes of the shortest run; 0 for an empty plan.
    #[must_use]
    pub fn run_bytes_min(&self) -> u64 {
        let mut shortest = u64::MAX;
        self.for_each_nest(|_, _, piece| shortest = shortest.min(piece.run_bytes));
        if shortest == u64::MAX { 0 } else { shortest }
    }

    /// Calls `run(src, dst, bytes)` for each run, in plan order: a group, a piece, a span, the piece's loops. Where spans that
    /// follow each other abut on both sides, one run covers them all.
    pub fn for_each_run(&self, mut run: impl FnMut(Place, Place, u64)) {
        self.for_each_nest(|src, dst, piece| {
            let (src_region, dst_region) = (piece.src.region, piece.dst.region);
            walk(src, dst, &piece.loops, &mut |src, dst| {
                run(
                    Place { region: src_region, offset: src },
                    Place { region: dst_region, offset: dst },
                    piece.run_bytes,
                );
            });
        });
    }

    /// Calls `page(...)` for each span and each of its layers: a piece of work that a processor cache holds.
    pub fn for_each_page(&self, mut page: impl FnMut(PageCopy<'_>)) {
        for group in &self.groups {
            for &pair in &group.pairs {
                for layer in 0..self.selection.layers.len() {
                    page(PageCopy { plan: self, group, pair, layer });
                }
            }
        }
    }

    /// One side's strides, a plane each, as a kernel wants them beside [`CopyPlan::layer_place`]: where a layer or the selection
    /// begins is not in them.
    #[must_use]
    pub fn strides(&self, side: Side) -> &[PlaneStrides] {
        &self.side(side).planes
    }

    /// Where a plane's run of the selection's first head, block 0 and token 0 lies in a layer, counted from the selection's first.
    /// Any other run of the layer is that far away as [`CopyPlan::strides`] say.
    ///
    /// # Panics
    /// If the selection has no such layer, or the plan no such plane.
    #[must_use]
    pub fn layer_place(&self, side: Side, layer: usize, plane: usize) -> Place {
        assert!(layer < self.selection.layers.len(), "layer {layer} is not selected");
        let map = self.side(side);
        let strides = &map.planes[plane];
        let place = map.layer_place(layer, strides.layer);
        Place { offset: place.offset + strides.offset, ..place }
    }

    fn side(&self, side: Side) -> &SideMap {
        match side {
            Side::Source => &self.src,
            Side::Destination => &self.dst,
        }
    }

    /// One past the highest byte of each region that the copy touches on one side, by rising region.
    #[must_use]
    pub fn ends(&self, side: Side) -> Vec<(RegionId, u64)> {
        let mut ends: Vec<(RegionId, u64)> = Vec::new();
        for group in &self.groups {
            for piece in &group.pieces {
                let end = piece.end(side);
                let first = group.pairs.iter().map(|pair| end.at(pair, side)).max().unwrap_or(0);
                let steps = piece.loops.iter().map(|l| match side {
                    Side::Source => u64::from(l.count - 1) * l.src_stride,
                    Side::Destination => u64::from(l.count - 1) * l.dst_stride,
                });
                let last = first + steps.sum::<u64>() + piece.run_bytes;
                match ends.iter_mut().find(|(region, _)| *region == end.region) {
                    Some((_, highest)) => *highest = last.max(*highest),
                    None => ends.push((end.region, last)),
                }
            }
        }
        ends.sort_unstable();
        ends
    }

    /// Calls `nest(src offset, dst offset, piece)` for each piece of each span, abutting spans taken together.
    fn for_each_nest(&self, mut nest: impl FnMut(u64, u64, &PlanPiece)) {
        for group in &self.groups {
            for piece in &group.pieces {
                let mut rest = group.pairs.as_slice();
                while let [first, ..] = rest {
                    let (src, dst) = (piece.src.at(first, Side::Source), piece.dst.at(first, Side::Destination));
                    let mut bytes = piece.run_bytes;
                    let mut spans = 1;
                    while let Some(next) = rest.get(spans)
                        && piece.src.at(next, Side::Source) == src + bytes
                        && piece.dst.at(next, Side::Destination) == dst + bytes
                    {
                        bytes += piece.run_bytes;
                        spans += 1;
                    }
                    if spans == 1 {
                        nest(src, dst, piece);
                    } else {
                        let mut long = piece.clone();
                        long.run_bytes = bytes;
                        settle(&mut long.loops, &mut long.run_bytes);
                        nest(src, dst, &long);
                    }
                    rest = &rest[spans..];
                }
            }
        }
    }
}

impl PlanGroup {
    /// Bytes of one span.
    #[must_use]
    pub fn span_bytes(&self) -> u64 {
        self.pieces.iter().map(PlanPiece::bytes).sum()
    }
}

impl PieceEnd {
    /// Where the piece begins for a span, on this end's side.
    #[must_use]
    pub fn at(&self, pair: &Pair, side: Side) -> u64 {
        let (block, token) = match side {
            Side::Source => (pair.src_block, pair.src_token),
            Side::Destination => (pair.dst_block, pair.dst_token),
        };
        self.offset + u64::from(block.get()) * self.block_stride + u64::from(token) * self.token_stride
    }
}

impl PlanPiece {
    /// One of the two ends.
    #[must_use]
    pub const fn end(&self, side: Side) -> &PieceEnd {
        match side {
            Side::Source => &self.src,
            Side::Destination => &self.dst,
        }
    }
}
