//! A plan in the data plane's words: the bytes that a sender reads, and where they go in the receiver's window.

use super::nest::{PlanPiece, compress, settle_in_order};
use super::plan::{CopyPlan, PlanGroup};
use super::view::{PlanError, Side};
use crate::ids::RegionId;
use crate::pages::{Extent, Loop, Pages, Piece};

/// Pieces of a group that one [`Pages`] and one nest of extents can name: the same blocks and, at the destination, the same
/// nest at even distances.
struct Bundle<'a> {
    pieces: &'a [PlanPiece],
    /// From a piece to the next, at the destination.
    step: u64,
}

impl CopyPlan {
    /// The source's bytes, in the order in which [`CopyPlan::window_extents`] names their places.
    #[must_use]
    pub fn source_pages(&self) -> Vec<Pages> {
        let mut out = Vec::new();
        for group in &self.groups {
            for bundle in bundles(group) {
                let first = &bundle.pieces[0].src;
                let base = |pair| first.at(pair, Side::Source) - first.offset;
                let bases = group.pairs.iter().map(base).collect();
                out.push(Pages { bases, pieces: bundle.pieces.iter().map(source_piece).collect() });
            }
        }
        out
    }

    /// Where the bytes of [`CopyPlan::source_pages`] go in the receiver's window, in the same order.
    ///
    /// # Errors
    /// [`PlanError::NotAWindow`] if the destination has bytes outside region 0.
    pub fn window_extents(&self) -> Result<Vec<Extent>, PlanError> {
        let mut out: Vec<Extent> = Vec::new();
        for group in &self.groups {
            for bundle in bundles(group) {
                let first = &bundle.pieces[0];
                if first.dst.region != RegionId::new(0) {
                    return Err(PlanError::NotAWindow { region: first.dst.region });
                }
                let starts: Vec<u64> = group.pairs.iter().map(|pair| first.dst.at(pair, Side::Destination)).collect();
                for (offset, mut loops) in compress(&starts) {
                    loops.push(Loop { count: bundle.pieces.len() as u32, stride: bundle.step });
                    loops.extend(first.loops.iter().map(|l| Loop { count: l.count, stride: l.dst_stride }));
                    let mut run_bytes = first.run_bytes;
                    settle_in_order(&mut loops, &mut run_bytes);
                    push_nested(&mut out, Extent { offset, loops, run_bytes });
                }
            }
        }
        Ok(out)
    }
}

/// Appends an extent; one whose loops interleave without nesting is taken apart, outermost loop first, since a receiver cannot
/// tell it from one that overlaps itself.
fn push_nested(out: &mut Vec<Extent>, extent: Extent) {
    if !nests(&extent) {
        let (outer, inner) = (extent.loops[0], extent.loops[1..].to_vec());
        for step in 0..u64::from(outer.count) {
            let offset = extent.offset + step * outer.stride;
            push_nested(out, Extent { offset, loops: inner.clone(), run_bytes: extent.run_bytes });
        }
        return;
    }
    match out.last_mut().filter(|last| last.loops.is_empty() && extent.loops.is_empty()) {
        Some(last) if last.offset + last.run_bytes == extent.offset => last.run_bytes += extent.run_bytes,
        _ => out.push(extent),
    }
}

/// Whether each loop, by rising stride, steps over all that is inside it.
fn nests(extent: &Extent) -> bool {
    let mut loops = extent.loops.clone();
    loops.sort_unstable_by_key(|l| l.stride);
    let mut span = extent.run_bytes;
    loops.iter().filter(|l| l.count > 1).all(|l| {
        let fits = l.stride >= span;
        span += l.stride * u64::from(l.count - 1);
        fits
    })
}

/// One side of a piece, for the data plane.
fn source_piece(piece: &PlanPiece) -> Piece {
    let mut loops = piece.loops.iter().map(|l| Loop { count: l.count, stride: l.src_stride }).collect();
    let mut run_bytes = piece.run_bytes;
    settle_in_order(&mut loops, &mut run_bytes);
    Piece { region: piece.src.region, offset: piece.src.offset, loops, run_bytes }
}

fn bundles(group: &PlanGroup) -> Vec<Bundle<'_>> {
    let mut out = Vec::new();
    let mut rest = group.pieces.as_slice();
    while let [first, tail @ ..] = rest {
        let step = tail.first().and_then(|next| next.dst.offset.checked_sub(first.dst.offset)).unwrap_or(0);
        let alike = |a: &PlanPiece, b: &PlanPiece| {
            let strides = |piece: &PlanPiece, side| (piece.end(side).block_stride, piece.end(side).token_stride);
            // A frame carries only so many loops: two for the spans and one for the pieces must still fit.
            a.loops.len() + 3 <= Extent::MAX_LOOPS
                && a.dst.region == b.dst.region
                && a.run_bytes == b.run_bytes
                && strides(a, Side::Source) == strides(b, Side::Source)
                && strides(a, Side::Destination) == strides(b, Side::Destination)
                && a.loops.len() == b.loops.len()
                && a.loops.iter().zip(&b.loops).all(|(a, b)| (a.count, a.dst_stride) == (b.count, b.dst_stride))
                && b.dst.offset.checked_sub(a.dst.offset) == Some(step)
        };
        let count = 1 + rest.windows(2).take_while(|pair| alike(&pair[0], &pair[1])).count();
        let (pieces, after) = rest.split_at(count);
        out.push(Bundle { pieces, step });
        rest = after;
    }
    out
}
