//! What a peer lends is looked at where it lies: digested, and found page by page, so that attention can read it there.
//!
//! The last block of a load is copied, since the engine writes into it: the rest of its tokens, and the prompt's last one again. So is each
//! block that does not lie in the peer's memory as it would here.

use std::ops::Range;
use std::sync::Arc;

use kvferry_kernels::copy::{self, digest_strip};
use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::{CacheView, KvLayout, Place, Selection, Strip, plan};
use kvferry_protocol::transfer::Rect;
use kvferry_protocol::{BlockId, LayerId, RegionId};
use kvferry_transport::{Adopted, AdoptedRun};

use super::jobs::WriteKey;
use super::window::GrantedWindow;
use crate::pd::caches::Caches;
use crate::raw::{self, ForeignPage};

/// A write that is to be looked at.
#[derive(Debug)]
pub(super) struct Look {
    pub(super) write: WriteKey,
    pub(super) adopted: Arc<Adopted>,
    pub(super) window: GrantedWindow,
    /// All blocks of the load.
    pub(super) blocks: Vec<BlockId>,
    /// The place in the sequence of the first block's first token.
    pub(super) first_token: u32,
    pub(super) rect: Rect,
}

/// What was found.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) digest: Digest,
    /// Pages to be read where they lie, in this worker's layers.
    pub(super) pages: Vec<ForeignPage>,
    /// Blocks that were copied, but for the last one.
    pub(super) unlike: usize,
}

impl Look {
    /// Digests all of it; what is not to be read where it lies is copied to this worker's own pages, which the load holds for writing.
    pub(super) fn run(&self, caches: &Caches) -> Result<Found, String> {
        let per_block = caches.tokens_per_block();
        let last = self.blocks.len().saturating_sub(1);
        let tokens = self.rect.tokens();
        let runs: Vec<AdoptedRun> = self.adopted.runs().collect();
        let mut found = Found { digest: Digest::ZERO, pages: Vec::new(), unlike: 0 };
        let mut strips = Strips::default();
        let first = ((tokens.start - self.first_token) / per_block) as usize;
        for (index, &block) in self.blocks.iter().enumerate().skip(first) {
            let start = self.first_token + index as u32 * per_block;
            if start >= tokens.end {
                break;
            }
            let own = tokens.start.max(start)..tokens.end.min(start + per_block);
            let is_whole = own.len() == per_block as usize;
            let pages = if is_whole && index < last { self.pages(caches, &runs, block, start) } else { None };
            match pages {
                Some(pages) => pages.into_iter().for_each(|page| strips.push(page, start, &mut found.pages)),
                None => {
                    found.unlike += usize::from(is_whole && index < last);
                    found.digest += self.copy(caches, block, start, own)?;
                }
            }
        }
        found.digest += strips.digest(&self.adopted, caches)?;
        // What was looked at is what was posted.
        if !self.adopted.is_intact() {
            return Err("the sender gave up its memory while it was looked at".to_owned());
        }
        Ok(found)
    }

    /// A block's pages in the peer's memory, if they lie there as they would here.
    fn pages(&self, caches: &Caches, runs: &[AdoptedRun], block: BlockId, start: u32) -> Option<Vec<PageAt>> {
        let shape = caches.layout().shape();
        let window = self.window.shape.layout();
        let first_layer = caches.shard().first_layer.get();
        let at = |layer: u16, plane: usize| {
            let strides = &window.planes()[plane];
            let own = &caches.layout().planes()[plane];
            let first = self.offset(&window, start, layer, plane);
            let (heads, tokens) = (u64::from(shape.heads), u64::from(shape.tokens_per_block));
            let base = address(runs, first, own.run_bytes.into())?;
            let step = |head: u64, token: u64, by: (u64, u64)| head * by.0 + token * by.1;
            let ours = (own.head, own.token);
            let theirs = (strides.head, strides.token);
            let span = step(heads - 1, tokens - 1, theirs) + u64::from(own.run_bytes);
            let abuts = ours == theirs && address(runs, first, span).is_some();
            let is_alike = abuts
                || (0..heads).all(|head| {
                    (0..tokens).all(|token| {
                        let run = address(runs, first + step(head, token, theirs), own.run_bytes.into());
                        run.is_some_and(|run| {
                            run.addr().get() as u64 == base.addr().get() as u64 + step(head, token, ours)
                        })
                    })
                });
            is_alike.then_some(base)
        };
        let layers = self.rect.layers();
        let page = |layer: u16| {
            let planes = (0..shape.run_bytes.len()).map(|plane| at(layer, plane)).collect::<Option<Vec<_>>>()?;
            Some(PageAt { layer, page: ForeignPage::new(layer - first_layer, block, planes) })
        };
        layers.map(page).collect()
    }

    /// Where a page begins in the window.
    fn offset(&self, window: &KvLayout, start: u32, layer: u16, plane: usize) -> u64 {
        let held = self.window.shape.selection();
        let block = (start - held.tokens.start) / window.shape().tokens_per_block;
        window.place(layer - held.layers.start, BlockId::new(block), plane, 0, 0).offset
    }

    /// Brings a block's tokens to its own pages, and digests what arrived.
    fn copy(&self, caches: &Caches, block: BlockId, start: u32, tokens: Range<u32>) -> Result<Digest, String> {
        let (layout, shard) = (self.window.shape.layout(), self.window.shape.shard());
        let held = self.window.shape.selection();
        let bytes = layout.shape().block_bytes();
        let from = u64::from((start - held.tokens.start) / layout.shape().tokens_per_block) * bytes;
        let mut buffer = vec![0; usize::try_from(bytes).map_err(|error| error.to_string())?];
        let extents = self.window.extents_of(tokens.clone(), self.rect.layers()).map_err(|error| error.to_string())?;
        let mut is_there = true;
        for extent in &extents {
            let run = extent.run_bytes as usize;
            extent.for_each_run(|at| {
                let to = at.checked_sub(from).and_then(|at| buffer.get_mut(at as usize..at as usize + run));
                is_there &= to.is_some_and(|to| self.adopted.copy(at, to));
            });
        }
        if !is_there {
            return Err("the sender gave up its memory while it was copied".to_owned());
        }
        let source = CacheView { layout: &layout, shard, blocks: &[BlockId::new(0)], first_token: start };
        let selection = Selection { layers: self.rect.layers(), heads: held.heads, tokens };
        let own = CacheView { layout: caches.layout(), shard: caches.shard(), blocks: &[block], first_token: start };
        let plan = plan(&source, &own, &selection).map_err(|error| error.to_string())?;
        copy::gather_with_digest(&plan, &raw::buffer_table(&mut buffer), &caches.table())
            .map_err(|error| error.to_string())
    }
}

/// A page, and its layer in the model.
#[derive(Debug)]
struct PageAt {
    layer: u16,
    page: ForeignPage,
}

/// Pages that are to be digested where they lie.
#[derive(Debug, Default)]
struct Strips {
    /// Layer of the model and first token of each page.
    of: Vec<(u16, u32)>,
    pages: Vec<ForeignPage>,
}

impl Strips {
    fn push(&mut self, page: PageAt, start: u32, pages: &mut Vec<ForeignPage>) {
        self.of.push((page.layer, start));
        self.pages.push(page.page.clone());
        pages.push(page.page);
    }

    fn digest(&self, adopted: &Arc<Adopted>, caches: &Caches) -> Result<Digest, String> {
        let shape = caches.layout().shape();
        let planes = caches.layout().planes();
        let span = |plane: usize| {
            let strides = &planes[plane];
            let (heads, tokens) = (u64::from(shape.heads) - 1, u64::from(shape.tokens_per_block) - 1);
            heads * strides.head + tokens * strides.token + u64::from(strides.run_bytes)
        };
        let table = raw::foreign_table(adopted, &self.pages, span);
        let mut digest = Digest::ZERO;
        for (index, &(layer, start)) in self.of.iter().enumerate() {
            for (plane, strides) in planes.iter().enumerate() {
                let region = RegionId::new((index * planes.len() + plane) as u32);
                let strip = Strip {
                    place: Place { region, offset: 0 },
                    head_stride: strides.head,
                    token_stride: strides.token,
                    run_bytes: strides.run_bytes,
                };
                let tokens = start..start + shape.tokens_per_block;
                let of = (LayerId::new(layer), plane as u8);
                let strip = digest_strip(&strip, of, caches.heads(), tokens, &table);
                digest += strip.map_err(|error| error.to_string())?;
            }
        }
        Ok(digest)
    }
}

/// Where bytes of the window lie, if they lie in one piece.
fn address(runs: &[AdoptedRun], offset: u64, bytes: u64) -> Option<std::ptr::NonNull<u8>> {
    let at = runs.partition_point(|run| run.offset <= offset).checked_sub(1)?;
    let run = runs[at];
    let skip = offset - run.offset;
    (skip + bytes <= run.bytes as u64).then(|| {
        run.address.map_addr(|address| {
            // Inside the piece, so it does not overflow.
            address.saturating_add(skip as usize)
        })
    })
}
