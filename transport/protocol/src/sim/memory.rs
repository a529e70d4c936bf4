//! A pool of pages as a model: every page knows its owner and the grant it is open for, every cell what it holds.

use crate::digest::Digest;
use crate::ids::{Generation, TransferId};
use crate::transfer::Rect;

use super::rng::mix;

/// What every cell of a transfer must hold.
pub(super) fn content(transfer: TransferId, token: u32, layer: u16) -> u64 {
    let transfer = transfer.get() as u64;
    mix(transfer ^ mix(u64::from(token) << 16 | u64::from(layer)))
}

/// The digest of cells: a sum of mixes, each keyed by its place.
pub(super) fn digest(cells: impl Iterator<Item = (u32, u16, u64)>) -> Digest {
    Digest::new(cells.fold(0, |sum, (token, layer, value)| {
        sum.wrapping_add(mix(value ^ mix(u64::from(token) << 16 | u64::from(layer))))
    }))
}

/// All (token, layer) pairs of a rectangle.
pub(super) fn cells(rect: Rect) -> impl Iterator<Item = (u32, u16)> {
    rect.tokens().flat_map(move |token| rect.layers().map(move |layer| (token, layer)))
}

#[derive(Debug)]
pub(super) struct Pool {
    tokens_per_block: u32,
    layers: u16,
    pages: Vec<Page>,
    /// The last one freed is the first one used again, so that late bytes hit somebody.
    free: Vec<usize>,
}

#[derive(Debug, Clone)]
struct Page {
    owner: Option<TransferId>,
    /// The grant under which bytes may land.
    open: Option<Generation>,
    cells: Vec<u64>,
    /// Attention may read it: it must not change any more.
    visible: Vec<bool>,
}

/// The blocks of one transfer in a pool, from its first token on.
#[derive(Debug, Clone)]
pub(super) struct Blocks {
    pub(super) transfer: TransferId,
    first_block: u32,
    pages: Vec<usize>,
}

impl Pool {
    pub(super) fn new(blocks: usize, tokens_per_block: u32, layers: u16) -> Self {
        let cells = (tokens_per_block * u32::from(layers)) as usize;
        let page = Page { owner: None, open: None, cells: vec![0; cells], visible: vec![false; cells] };
        Self { tokens_per_block, layers, pages: vec![page; blocks], free: (0..blocks).collect() }
    }

    /// Takes blocks for tokens `first..end`; `None` if there are too few.
    pub(super) fn allocate(&mut self, transfer: TransferId, first: u32, end: u32) -> Option<Blocks> {
        let first_block = first / self.tokens_per_block;
        let count = (end.div_ceil(self.tokens_per_block) - first_block) as usize;
        if self.free.len() < count {
            return None;
        }
        let pages = self.free.split_off(self.free.len() - count);
        for &page in &pages {
            self.pages[page].owner = Some(transfer);
        }
        Some(Blocks { transfer, first_block, pages })
    }

    /// Gives blocks back; fails if they are not the transfer's.
    pub(super) fn free(&mut self, blocks: &Blocks) -> Result<(), String> {
        for &index in &blocks.pages {
            let page = &mut self.pages[index];
            if page.owner != Some(blocks.transfer) {
                return Err(format!("page {index} of {} is freed, but its owner is {:?}", blocks.transfer, page.owner));
            }
            page.owner = None;
            page.open = None;
            page.visible.fill(false);
            self.free.push(index);
        }
        Ok(())
    }

    pub(super) fn open(&mut self, blocks: &Blocks, generation: Option<Generation>) {
        for &page in &blocks.pages {
            self.pages[page].open = generation;
        }
    }

    /// The engine or a check writes a cell.
    pub(super) fn set(&mut self, blocks: &Blocks, token: u32, layer: u16, value: u64) {
        let (page, cell) = self.place(blocks, token, layer);
        self.pages[page].cells[cell] = value;
    }

    /// A byte from the network lands.
    pub(super) fn land(
        &mut self,
        blocks: &Blocks,
        generation: Generation,
        (token, layer): (u32, u16),
        value: u64,
    ) -> Result<(), String> {
        let (index, cell) = self.place(blocks, token, layer);
        let page = &mut self.pages[index];
        let what = || format!("token {token} layer {layer} of {} generation {generation}", blocks.transfer);
        if page.owner != Some(blocks.transfer) {
            return Err(format!("invariant 1: late byte: {} lands in page {index} of {:?}", what(), page.owner));
        }
        if page.open != Some(generation) {
            return Err(format!("invariant 1: late byte: {} lands in a page open for {:?}", what(), page.open));
        }
        if page.visible[cell] {
            return Err(format!("invariant 3: {} lands on bytes that attention reads", what()));
        }
        page.cells[cell] = value;
        Ok(())
    }

    /// A cell's content; fails if the page is not the transfer's any more.
    pub(super) fn read(&self, blocks: &Blocks, token: u32, layer: u16) -> Result<u64, String> {
        let (index, cell) = self.place(blocks, token, layer);
        let page = &self.pages[index];
        if page.owner != Some(blocks.transfer) {
            return Err(format!(
                "invariant 4: token {token} layer {layer} of {} is read from page {index} after its release",
                blocks.transfer
            ));
        }
        Ok(page.cells[cell])
    }

    pub(super) fn show(&mut self, blocks: &Blocks, rect: Rect) {
        for (token, layer) in cells(rect) {
            let (page, cell) = self.place(blocks, token, layer);
            self.pages[page].visible[cell] = true;
        }
    }

    pub(super) fn is_visible(&self, blocks: &Blocks, token: u32, layer: u16) -> bool {
        let (page, cell) = self.place(blocks, token, layer);
        self.pages[page].visible[cell]
    }

    pub(super) fn is_all_free(&self) -> bool {
        self.free.len() == self.pages.len() && self.pages.iter().all(|page| page.owner.is_none())
    }

    fn place(&self, blocks: &Blocks, token: u32, layer: u16) -> (usize, usize) {
        let page = blocks.pages[(token / self.tokens_per_block - blocks.first_block) as usize];
        let cell = (token % self.tokens_per_block) * u32::from(self.layers) + u32::from(layer);
        (page, cell as usize)
    }
}
