//! What landed and was verified, on its way from staging to a device's pages.

use std::ops::Range;
use std::sync::Arc;

use kvferry_kernels::device::{Event, Lane, StagedRun};
use kvferry_protocol::layout::{CacheView, KvLayout, KvShape, Selection, Shard, plan};
use kvferry_protocol::transfer::Rect;
use kvferry_protocol::{BlockId, LayerId};

use super::staging::{Staged, frame_order};
use super::{After, in_full};
use crate::pd::caches::Caches;
use crate::pd::worker::jobs::WriteKey;

/// A verified write that a mover is to bring to the pages.
#[derive(Debug)]
pub(in crate::pd::worker) struct Upload {
    pub(in crate::pd::worker) write: WriteKey,
    pub(in crate::pd::worker) rect: Rect,
    pub(in crate::pd::worker) staged: Arc<Staged>,
    /// The engine's own work on the pages is over once this is passed.
    pub(in crate::pd::worker) after: After,
}

/// Part of an upload that a lane's slab holds: some layers, and some of the staged blocks.
#[derive(PartialEq, Eq, Debug)]
struct Piece {
    layers: Range<u16>,
    blocks: Range<usize>,
}

impl Upload {
    /// Queues all of it; returns an event that is passed when the pages are written. If it fails, what it queued has run.
    pub(in crate::pd::worker) fn begin(&self, lane: &mut Lane, caches: &Caches) -> Result<Arc<dyn Event>, String> {
        let begun = self.queue(lane, caches);
        if begun.is_err() {
            // A device that fails here has failed: then nothing runs any more.
            let _ = lane.settle();
        }
        begun
    }

    fn queue(&self, lane: &mut Lane, caches: &Caches) -> Result<Arc<dyn Event>, String> {
        let per_block = caches.tokens_per_block();
        let (tokens, first) = (self.rect.tokens(), self.staged.first_token);
        let blocks = ((tokens.start - first) / per_block) as usize..(tokens.end - first).div_ceil(per_block) as usize;
        let page = self.staged.caches.bytes_per_cell(&self.staged.caches.heads()) as usize * per_block as usize;
        let mut last = None;
        for piece in pieces(self.rect.layers(), blocks, lane.slab_bytes() / page) {
            // One after the other on the lane's stream: the last one's event is passed when all are done.
            last = Some(self.queue_piece(lane, caches, &piece)?);
        }
        last.ok_or_else(|| "nothing is to be brought to the device".to_owned())
    }

    fn queue_piece(&self, lane: &mut Lane, caches: &Caches, piece: &Piece) -> Result<Arc<dyn Event>, String> {
        let cache = caches.device().ok_or("the cache is not on a device")?;
        let Piece { layers, blocks } = piece;
        let (per_block, staged) = (caches.tokens_per_block(), &*self.staged);
        let first_token = staged.first_token + blocks.start as u32 * per_block;
        let (from, until) = (self.rect.tokens().start, self.rect.tokens().end);
        let tokens = from.max(first_token)..until.min(first_token + blocks.len() as u32 * per_block);
        let heads = staged.caches.heads();
        let shape = KvShape {
            layers: layers.len() as u16,
            blocks: blocks.len() as u32,
            heads: heads.len() as u16,
            tokens_per_block: per_block,
            run_bytes: staged.caches.layout().shape().run_bytes.clone(),
        };
        let slab = KvLayout::packed(shape, frame_order()).map_err(|error| error.to_string())?;
        let ids: Vec<BlockId> = (0..blocks.len() as u32).map(BlockId::new).collect();
        let shard = Shard { first_layer: LayerId::new(layers.start), first_head: heads.start };
        let source = CacheView { layout: &slab, shard, blocks: &ids, first_token };
        let pages = &staged.blocks[blocks.clone()];
        let target = CacheView { layout: cache.layout(), shard: caches.shard(), blocks: pages, first_token };
        let selection = Selection { layers: layers.clone(), heads, tokens: tokens.clone() };
        let plan = plan(&source, &target, &selection).map_err(|error| error.to_string())?;
        let runs = self.runs(piece, &tokens, per_block);
        crate::raw::scatter(lane, &plan, cache, self.after.as_deref(), &runs).map_err(|error| in_full(&error))
    }

    /// Where a piece's bytes lie in the frames, and where they go in the lane's slab: whole blocks in one run over all layers.
    fn runs(&self, piece: &Piece, tokens: &Range<u32>, per_block: u32) -> Vec<StagedRun> {
        let caches = &self.staged.caches;
        let token = caches.bytes_per_cell(&caches.heads()) as usize;
        let page = token * per_block as usize;
        let (first_layer, layers) = (usize::from(caches.layers().start), piece.layers.len());
        let skipped = (usize::from(piece.layers.start) - first_layer) * page;
        let mut runs: Vec<StagedRun> = Vec::new();
        for (index, block) in piece.blocks.clone().enumerate() {
            let begins = self.staged.first_token + block as u32 * per_block;
            let (from, until) = (tokens.start.max(begins) - begins, tokens.end.min(begins + per_block) - begins);
            let is_whole = until - from == per_block;
            let (count, bytes) = if is_whole { (1, page * layers) } else { (layers, token * (until - from) as usize) };
            for layer in 0..count {
                let within = layer * page + from as usize * token;
                let start = self.staged.at(block, skipped + within);
                let run = StagedRun { start, offset: index * layers * page + within, bytes };
                let abuts = |last: &&mut StagedRun| {
                    let end = last.start.as_ptr().wrapping_add(last.bytes);
                    end == run.start.as_ptr() && last.offset + last.bytes == run.offset
                };
                match runs.last_mut().filter(abuts) {
                    Some(last) => last.bytes += run.bytes,
                    None => runs.push(run),
                }
            }
        }
        runs
    }
}

/// Cuts some layers of some blocks into pieces of at most so many pages: by layers, if a layer of all blocks fits.
fn pieces(layers: Range<u16>, blocks: Range<usize>, most_pages: usize) -> Vec<Piece> {
    let most_pages = most_pages.max(1);
    let (layer_step, block_step) = match most_pages / blocks.len().max(1) {
        0 => (1, most_pages),
        layers => (u16::try_from(layers).unwrap_or(u16::MAX), blocks.len().max(1)),
    };
    let mut pieces = Vec::new();
    for start in layers.clone().step_by(layer_step.into()) {
        for first in blocks.clone().step_by(block_step) {
            let blocks = first..(first + block_step).min(blocks.end);
            pieces.push(Piece { layers: start..start.saturating_add(layer_step).min(layers.end), blocks });
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_all_pages_once_and_fit() {
        for (layers, blocks, most) in [(0..4, 0..3, 100), (2..7, 1..4, 6), (0..5, 0..10, 3), (0..1, 0..1, 0)] {
            let pieces = pieces(layers.clone(), blocks.clone(), most);
            let pages = |piece: &Piece| {
                let blocks = piece.blocks.clone();
                piece.layers.clone().flat_map(move |layer| blocks.clone().map(move |block| (layer, block)))
            };
            assert!(pieces.iter().all(|piece| pages(piece).count() <= most.max(1)), "{pieces:?}");
            let mut seen: Vec<_> = pieces.iter().flat_map(pages).collect();
            seen.sort_unstable();
            let all: Vec<_> = layers.flat_map(|layer| blocks.clone().map(move |block| (layer, block))).collect();
            assert_eq!(seen, all);
        }
    }
}
