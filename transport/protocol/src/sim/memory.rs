//! A rank's pages as a model: every page knows who uses it, every head of it the grant it is open for, every cell what it holds.

use std::ops::Range;

use crate::digest::Digest;
use crate::ids::Generation;
use crate::transfer::Rect;

use super::plan::LAYERS;
use super::rng::mix;

/// One token of one layer of one KV head of the model.
pub(super) type Cell = (u32, u16, u16);

/// What every cell of a request must hold.
pub(super) const fn content(salt: u64, cell: Cell) -> u64 {
    mix(salt ^ place(cell))
}

/// The digest of cells: a sum of mixes, each keyed by its place.
pub(super) fn digest(cells: impl Iterator<Item = (Cell, u64)>) -> Digest {
    Digest::new(cells.fold(0, |sum, (cell, value)| sum.wrapping_add(mix(value ^ place(cell)))))
}

/// All cells of a rectangle over some heads.
pub(super) fn cells(rect: Rect, heads: Range<u16>) -> impl Iterator<Item = Cell> {
    rect.tokens().flat_map(move |token| {
        let heads = heads.clone();
        rect.layers().flat_map(move |layer| heads.clone().map(move |head| (token, layer, head)))
    })
}

const fn place((token, layer, head): Cell) -> u64 {
    mix((token as u64) << 32 | (layer as u64) << 16 | head as u64)
}

/// The blocks of one request in an engine's pool, from its first token on; the same on every rank.
#[derive(Debug, Clone)]
pub(super) struct Blocks {
    pub(super) request: usize,
    pub(super) first_block: u32,
    pub(super) ids: Vec<u32>,
}

#[derive(Debug)]
pub(super) struct Memory {
    tokens_per_block: u32,
    heads: Range<u16>,
    /// By page.
    users: Vec<User>,
    /// By page and head: the part and the grant under which bytes may land.
    open: Vec<Option<(usize, Generation)>>,
    /// By page, token, layer and head: what it holds, and whether attention may read it, so that it must not change any more.
    cells: Vec<u64>,
    visible: Vec<bool>,
}

/// Who uses a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum User {
    Nobody,
    /// Transfers of a request write or read it.
    Transfers(usize),
    /// The engine alone, for a request.
    Engine(usize),
    /// The engine, for something else.
    Other,
}

impl Memory {
    pub(super) fn new(blocks: u32, tokens_per_block: u32, heads: Range<u16>) -> Self {
        let pages = blocks as usize;
        let cells = pages * (tokens_per_block * u32::from(LAYERS)) as usize * heads.len();
        Self {
            tokens_per_block,
            users: vec![User::Nobody; pages],
            open: vec![None; pages * heads.len()],
            cells: vec![0; cells],
            visible: vec![false; cells],
            heads,
        }
    }

    /// Transfers of a request begin to use its blocks.
    pub(super) fn take(&mut self, blocks: &Blocks) -> Result<(), String> {
        self.turn(blocks, User::Nobody, User::Transfers(blocks.request))
    }

    /// No transfer uses the blocks any more, and none will.
    pub(super) fn settle(&mut self, blocks: &Blocks) -> Result<(), String> {
        self.turn(blocks, User::Transfers(blocks.request), User::Engine(blocks.request))?;
        for &id in &blocks.ids {
            let open = self.open_of(id);
            self.open[open].fill(None);
        }
        Ok(())
    }

    /// The engine gives the blocks back.
    pub(super) fn free(&mut self, blocks: &Blocks) -> Result<(), String> {
        self.turn(blocks, User::Engine(blocks.request), User::Nobody)?;
        for &id in &blocks.ids {
            let cells = self.cells_of(id);
            self.visible[cells].fill(false);
        }
        Ok(())
    }

    /// The engine uses free blocks for something else, and writes all over them.
    pub(super) fn poison(&mut self, blocks: &Blocks) -> Result<(), String> {
        self.turn(blocks, User::Nobody, User::Other)?;
        for &id in &blocks.ids {
            let cells = self.cells_of(id);
            self.cells[cells].fill(POISON);
        }
        Ok(())
    }

    /// The engine gives poisoned blocks back: nobody else may have written them.
    pub(super) fn clean(&mut self, blocks: &Blocks) -> Result<(), String> {
        self.turn(blocks, User::Other, User::Nobody)?;
        let written = |id: &&u32| self.cells[self.cells_of(**id)].iter().any(|&cell| cell != POISON);
        match blocks.ids.iter().find(written) {
            Some(id) => Err(format!("invariant 1: late byte: page {id} was written after it was given back")),
            None => Ok(()),
        }
    }

    fn turn(&mut self, blocks: &Blocks, from: User, to: User) -> Result<(), String> {
        for &id in &blocks.ids {
            let user = std::mem::replace(&mut self.users[id as usize], to);
            if user != from {
                return Err(format!("invariant 4: page {id} goes from {from:?} to {to:?}, but {user:?} uses it"));
            }
        }
        Ok(())
    }

    pub(super) fn open(&mut self, blocks: &Blocks, heads: Range<u16>, grant: Option<(usize, Generation)>) {
        let heads = usize::from(heads.start - self.heads.start)..usize::from(heads.end - self.heads.start);
        for &id in &blocks.ids {
            let first = self.open_of(id).start;
            self.open[first + heads.start..first + heads.end].fill(grant);
        }
    }

    /// The engine computes a cell.
    pub(super) fn set(&mut self, blocks: &Blocks, cell: Cell, value: u64) {
        let (_, at) = self.find(blocks, cell);
        self.cells[at] = value;
    }

    /// A byte from the network lands.
    pub(super) fn land(
        &mut self,
        blocks: &Blocks,
        grant: (usize, Generation),
        cell: Cell,
        value: u64,
    ) -> Result<(), String> {
        let (index, at) = self.find(blocks, cell);
        let head = index * self.heads.len() + usize::from(cell.2 - self.heads.start);
        let (user, open) = (self.users[index], self.open[head]);
        if user != User::Transfers(blocks.request) {
            return Err(format!("invariant 1: late byte: {cell:?} under {grant:?} in page {index} of {user:?}"));
        }
        if open != Some(grant) {
            return Err(format!("invariant 1: late byte: {cell:?} under {grant:?} in page {index} open for {open:?}"));
        }
        if self.visible[at] {
            return Err(format!("invariant 3: {cell:?} under {grant:?} lands on bytes that attention reads"));
        }
        self.cells[at] = value;
        Ok(())
    }

    /// A cell's content; fails if the page is not the request's any more.
    pub(super) fn read(&self, blocks: &Blocks, cell: Cell) -> Result<u64, String> {
        let (index, at) = self.find(blocks, cell);
        match self.users[index] {
            User::Transfers(request) | User::Engine(request) if request == blocks.request => Ok(self.cells[at]),
            user => {
                let request = blocks.request;
                Err(format!("invariant 4: {cell:?} of request {request} is read from page {index} of {user:?}"))
            }
        }
    }

    /// A cell's content, for a transfer; fails once no transfer may read the page any more.
    pub(super) fn read_for_transfer(&self, blocks: &Blocks, cell: Cell) -> Result<u64, String> {
        let (index, _) = self.find(blocks, cell);
        match self.users[index] {
            User::Engine(_) => Err(format!("invariant 4: {cell:?} is read from page {index} after the last lease")),
            User::Nobody | User::Transfers(_) | User::Other => self.read(blocks, cell),
        }
    }

    pub(super) fn show(&mut self, blocks: &Blocks, cells: impl Iterator<Item = Cell>) {
        for cell in cells {
            let (_, at) = self.find(blocks, cell);
            self.visible[at] = true;
        }
    }

    pub(super) fn is_visible(&self, blocks: &Blocks, cell: Cell) -> bool {
        let (_, at) = self.find(blocks, cell);
        self.visible[at]
    }

    pub(super) fn is_unused(&self) -> bool {
        self.users.iter().all(|&user| user == User::Nobody)
    }

    /// The page and the cell's place among all cells.
    fn find(&self, blocks: &Blocks, (token, layer, head): Cell) -> (usize, usize) {
        let page = blocks.ids[(token / self.tokens_per_block - blocks.first_block) as usize];
        let row = (token % self.tokens_per_block) as usize * usize::from(LAYERS) + usize::from(layer);
        let cell = row * self.heads.len() + usize::from(head - self.heads.start);
        (page as usize, self.cells_of(page).start + cell)
    }

    fn cells_of(&self, page: u32) -> Range<usize> {
        let cells = self.tokens_per_block as usize * usize::from(LAYERS) * self.heads.len();
        page as usize * cells..(page as usize + 1) * cells
    }

    fn open_of(&self, page: u32) -> Range<usize> {
        page as usize * self.heads.len()..(page as usize + 1) * self.heads.len()
    }
}

const POISON: u64 = 0xdead_beef_dead_beef;
