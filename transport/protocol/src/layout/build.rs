//! From strides to pieces.

use super::nest::{PieceEnd, PlanPiece};
use super::plan::{LayerPiece, SideMap};
use super::spans::Pair;
use super::strides::{LayerBase, Place, PlaneStrides};
use super::view::{CacheView, Selection};
use crate::ids::RegionId;

impl SideMap {
    /// Takes what a selection needs of a view that holds it.
    pub(super) fn new(view: &CacheView<'_>, selection: &Selection) -> Self {
        if selection.is_empty() {
            return Self { planes: Vec::new(), bases: Vec::new() };
        }
        let first_layer = usize::from(selection.layers.start - view.shard.first_layer.get());
        let first_head = u64::from(selection.heads.start - view.shard.first_head);
        let bases = view.layout.bases();
        let shared_base = bases.len() == 1;
        let planes = view.layout.planes().iter().map(|plane| {
            let layer = if shared_base { plane.layer } else { 0 };
            let offset = plane.offset + first_head * plane.head + first_layer as u64 * layer;
            PlaneStrides { offset, layer, ..plane.clone() }
        });
        let layers = if shared_base { 0..1 } else { first_layer..first_layer + selection.layers.len() };
        Self { planes: planes.collect(), bases: bases[layers].to_vec() }
    }

    /// Where a layer begins, counted from the selection's first.
    pub(super) fn layer_place(&self, layer: usize, stride: u64) -> Place {
        match self.bases.as_slice() {
            [base] => Place { region: base.region, offset: base.offset + layer as u64 * stride },
            bases => Place { region: bases[layer].region, offset: bases[layer].offset },
        }
    }

    /// From a layer to the next, if both have a base in one region; `shared` where they share one base.
    fn layer_step(&self, layer: usize, shared: u64) -> Option<u64> {
        let step = |a: &LayerBase, b: &LayerBase| b.offset.checked_sub(a.offset).filter(|_| a.region == b.region);
        match self.bases.as_slice() {
            [_] => Some(shared),
            bases => step(&bases[layer], &bases[layer + 1]),
        }
    }
}

/// What one layer of a span consists of: a piece a plane, joined where both planes walk the same nest.
pub(super) fn page_pieces(
    src: &SideMap,
    dst: &SideMap,
    selection: &Selection,
    tokens: u32,
    pairs: &[Pair],
) -> Vec<LayerPiece> {
    let src_token = common(pairs.iter().map(|pair| pair.src_token));
    let dst_token = common(pairs.iter().map(|pair| pair.dst_token));
    let mut out: Vec<LayerPiece> = Vec::new();
    for (from, to) in src.planes.iter().zip(&dst.planes) {
        let mut piece = PlanPiece {
            src: end(from, src_token),
            dst: end(to, dst_token),
            loops: Vec::new(),
            run_bytes: from.run_bytes.into(),
        };
        piece.add(tokens, from.token, to.token);
        piece.add(selection.heads.len() as u32, from.head, to.head);
        let (src_layer, dst_layer) = (from.layer, to.layer);
        let piece = match out.last_mut().filter(|last| (last.src_layer, last.dst_layer) == (src_layer, dst_layer)) {
            Some(last) => match last.piece.join(piece) {
                Ok(()) => continue,
                Err(piece) => piece,
            },
            None => piece,
        };
        out.push(LayerPiece { piece, src_layer, dst_layer });
    }
    out
}

/// Adds the layers: one loop for layers at an even distance on both sides, else pieces of their own.
pub(super) fn all_layers(src: &SideMap, dst: &SideMap, layers: usize, page: &[LayerPiece]) -> Vec<PlanPiece> {
    let mut out = Vec::new();
    let mut first = 0;
    while first < layers {
        let step = |layer: usize| Some((src.layer_step(layer, 0)?, dst.layer_step(layer, 0)?));
        let even = (first + 1 < layers).then(|| step(first)).flatten();
        let count = match even {
            None => 1,
            Some(_) => 1 + (first..layers - 1).take_while(|&layer| step(layer) == even).count(),
        };
        let mut stretch: Vec<PlanPiece> = Vec::new();
        for LayerPiece { piece, src_layer, dst_layer } in page {
            let mut piece = piece.clone();
            let (src_base, dst_base) = (src.layer_place(first, *src_layer), dst.layer_place(first, *dst_layer));
            (piece.src.region, piece.dst.region) = (src_base.region, dst_base.region);
            piece.src.offset += src_base.offset;
            piece.dst.offset += dst_base.offset;
            if count > 1 {
                let src_step = src.layer_step(first, *src_layer).unwrap_or(0);
                let dst_step = dst.layer_step(first, *dst_layer).unwrap_or(0);
                piece.add(count as u32, src_step, dst_step);
            }
            if let Some(piece) = join_last(&mut stretch, piece) {
                stretch.push(piece);
            }
        }
        out.append(&mut stretch);
        first += count;
    }
    out.sort_by_key(|piece| (piece.dst.region, piece.dst.offset));
    out
}

fn join_last(pieces: &mut [PlanPiece], piece: PlanPiece) -> Option<PlanPiece> {
    match pieces.last_mut() {
        Some(last) => last.join(piece).err(),
        None => Some(piece),
    }
}

/// One side of a plane's piece, before the layer's base is added. A first token that all spans share goes into the offset, so
/// that planes with different token strides still have equal ends.
fn end(plane: &PlaneStrides, token: Option<u32>) -> PieceEnd {
    let (offset, token_stride) = match token {
        Some(token) => (plane.offset + u64::from(token) * plane.token, 0),
        None => (plane.offset, plane.token),
    };
    PieceEnd { region: RegionId::new(0), offset, block_stride: plane.block, token_stride }
}

fn common(mut values: impl Iterator<Item = u32>) -> Option<u32> {
    let first = values.next()?;
    values.all(|value| value == first).then_some(first)
}
