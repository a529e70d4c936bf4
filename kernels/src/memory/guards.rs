//! Who may touch which page: for each (layer, block) nobody, some readers, or one writer.
//!
//! Lock order: pages are taken one after another without waiting. The first that is busy gives back all that were taken before
//! it, so nobody waits for anybody and no order can deadlock.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kvferry_protocol::BlockId;

use super::cache::Inner;
use crate::error::{Held, KernelError};

/// What a guard allows: reading its pages beside other readers, or writing them alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GuardMode {
    /// Shared with other readers.
    Read,
    /// Alone.
    Write,
}

/// The state of every page of a cache: 0 free, `WRITER`, or the number of readers.
#[derive(Debug)]
pub(super) struct PageStates {
    blocks: u32,
    /// `[layer][block]`.
    states: Box<[AtomicU32]>,
}

const WRITER: u32 = u32::MAX;
const MAX_READERS: u32 = u32::MAX - 1;

impl PageStates {
    pub(super) fn new(layers: u16, blocks: u32) -> Self {
        let pages = usize::from(layers) * blocks as usize;
        Self { blocks, states: (0..pages).map(|_| AtomicU32::new(0)).collect() }
    }

    fn state(&self, layer: u16, block: BlockId) -> &AtomicU32 {
        &self.states[usize::from(layer) * self.blocks as usize + block.get() as usize]
    }

    fn acquire(&self, mode: GuardMode, layer: u16, block: BlockId) -> Result<(), KernelError> {
        let state = self.state(layer, block);
        // Acquire pairs with the release of whoever held the page before: its accesses are over before ours begin.
        let taken = match mode {
            GuardMode::Write => state.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).map(|_| ()),
            GuardMode::Read => state
                .fetch_update(Ordering::Acquire, Ordering::Relaxed, |now| (now < MAX_READERS).then(|| now + 1))
                .map(|_| ()),
        };
        taken.map_err(|now| {
            let held = if now == WRITER { Held::Writer } else { Held::Reader };
            KernelError::PageBusy { layer, block, held }
        })
    }

    fn release(&self, mode: GuardMode, layer: u16, block: BlockId) {
        let state = self.state(layer, block);
        match mode {
            GuardMode::Write => state.store(0, Ordering::Release),
            GuardMode::Read => {
                state.fetch_sub(1, Ordering::Release);
            }
        }
    }
}

/// Pages of one layer, held for the time of one kernel call. A block may stand more than once where it is read.
#[derive(Debug)]
pub(crate) struct LayerPages<'a> {
    states: &'a PageStates,
    mode: GuardMode,
    layer: u16,
    blocks: Vec<BlockId>,
}

impl<'a> LayerPages<'a> {
    /// Takes the page of every block, or none. The caller checked that layer and blocks exist.
    pub(super) fn acquire(
        states: &'a PageStates,
        mode: GuardMode,
        layer: u16,
        blocks: impl Iterator<Item = BlockId>,
    ) -> Result<Self, KernelError> {
        let mut pages = Self { states, mode, layer, blocks: Vec::with_capacity(blocks.size_hint().0) };
        for block in blocks {
            // On an error `pages` is dropped, which gives back what was taken.
            states.acquire(mode, layer, block)?;
            pages.blocks.push(block);
        }
        Ok(pages)
    }
}

impl Drop for LayerPages<'_> {
    fn drop(&mut self) {
        for &block in &self.blocks {
            self.states.release(self.mode, self.layer, block);
        }
    }
}

/// Pages (some blocks x some layers) that their owner may read, or write alone, through raw pointers.
///
/// Owned, so that it can sit beside an operation in flight, and it keeps the cache's memory mapped. Released page range by page
/// range as the operation completes ([`release`](Self::release)), and what is left on drop.
#[derive(Debug)]
pub struct PageGuards {
    cache: Arc<Inner>,
    mode: GuardMode,
    layers: Range<u16>,
    /// Ascending, each once.
    blocks: Vec<BlockId>,
    /// `[layer][block]`, one bit a page that is still held.
    held: Vec<u64>,
    held_pages: usize,
}

impl PageGuards {
    pub(super) fn acquire(
        cache: Arc<Inner>,
        mode: GuardMode,
        blocks: &[BlockId],
        layers: Range<u16>,
    ) -> Result<Self, KernelError> {
        for &block in blocks {
            cache.view.shape().check_block(block)?;
        }
        if let Some(last) = layers.clone().next_back() {
            cache.view.shape().check_layer(last)?;
        }
        let mut blocks = blocks.to_vec();
        blocks.sort_unstable();
        blocks.dedup();
        let pages = layers.len() * blocks.len();
        let mut guards = Self { cache, mode, layers, blocks, held: vec![0; pages.div_ceil(64)], held_pages: 0 };
        for page in 0..pages {
            let (layer, block) = guards.page(page);
            // On an error `guards` is dropped, which gives back what was taken.
            guards.cache.states.acquire(mode, layer, block)?;
            guards.held[page / 64] |= 1 << (page % 64);
            guards.held_pages += 1;
            // Who takes guards goes to the cache's own memory, which lies idle behind an alias.
            if guards.cache.view.aliases().is_aliased(layer, block) {
                return Err(KernelError::PageAliased { layer, block });
            }
        }
        Ok(guards)
    }

    pub(super) fn cache(&self) -> &Inner {
        &self.cache
    }

    /// What the guard allows.
    #[must_use]
    pub const fn mode(&self) -> GuardMode {
        self.mode
    }

    /// The layers that it was taken for.
    #[must_use]
    pub fn layers(&self) -> Range<u16> {
        self.layers.clone()
    }

    /// The blocks that it was taken for, ascending, each once.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// How many pages are still held.
    #[must_use]
    pub const fn held_pages(&self) -> usize {
        self.held_pages
    }

    /// Whether this guard still holds a page.
    #[must_use]
    pub fn holds(&self, layer: u16, block: BlockId) -> bool {
        match (self.layers.contains(&layer), self.blocks.binary_search(&block)) {
            (true, Ok(index)) => {
                let page = self.page_index(layer, index);
                self.held[page / 64] >> (page % 64) & 1 == 1
            }
            _ => false,
        }
    }

    /// Gives back the pages of `blocks` in `layers`, before the rest. Pages that are not held are skipped, so that a
    /// completion which arrives twice does no harm. Returns how many were given back.
    ///
    /// The caller's last access to these pages must be over.
    pub fn release(&mut self, blocks: &[BlockId], layers: Range<u16>) -> usize {
        let before = self.held_pages;
        for layer in layers.start.max(self.layers.start)..layers.end.min(self.layers.end) {
            for block in blocks {
                if let Ok(index) = self.blocks.binary_search(block) {
                    self.release_page(self.page_index(layer, index));
                }
            }
        }
        before - self.held_pages
    }

    /// Gives back all pages of some layers; else as [`release`](Self::release).
    pub fn release_layers(&mut self, layers: Range<u16>) -> usize {
        let before = self.held_pages;
        for layer in layers.start.max(self.layers.start)..layers.end.min(self.layers.end) {
            for index in 0..self.blocks.len() {
                self.release_page(self.page_index(layer, index));
            }
        }
        before - self.held_pages
    }

    /// Gives back all pages of some blocks; else as [`release`](Self::release).
    pub fn release_blocks(&mut self, blocks: &[BlockId]) -> usize {
        self.release(blocks, self.layers())
    }

    fn page_index(&self, layer: u16, block_index: usize) -> usize {
        usize::from(layer - self.layers.start) * self.blocks.len() + block_index
    }

    fn page(&self, index: usize) -> (u16, BlockId) {
        let layer = index / self.blocks.len();
        (self.layers.start + layer as u16, self.blocks[index % self.blocks.len()])
    }

    fn release_page(&mut self, page: usize) {
        let bit = 1 << (page % 64);
        if self.held[page / 64] & bit != 0 {
            self.held[page / 64] &= !bit;
            self.held_pages -= 1;
            let (layer, block) = self.page(page);
            self.cache.states.release(self.mode, layer, block);
        }
    }
}

impl Drop for PageGuards {
    fn drop(&mut self) {
        for page in 0..self.layers.len() * self.blocks.len() {
            self.release_page(page);
        }
    }
}
