//! The pool: per block a count of its holders, its hash if its content can be shared, and its place in the free list.

mod places;

use std::ops::Range;
use std::sync::Arc;

use kvferry_protocol::BlockId;

use super::PoolError;
use super::free_list::{FreeList, Turn};
use super::hash::BlockHash;
use super::index::{PrefixChange, PrefixIndex};
use super::state::{CompleteBlock, MutableBlock, OneBlock, RegisteredBlock};
use super::table::{BlockTable, Held, HeldBy, Lease, Pin, ReturnedBlocks};

/// The physical blocks of one engine's KV cache, as metadata.
///
/// One thread owns it (an engine's scheduler); tables and leases may be dropped on any thread. A block is in exactly one of three
/// states: *held* by one or more tables and leases; *cached*, free but registered, so that a prefix can still revive it; *empty*,
/// free without content that anyone could ask for. Empty blocks are reused first, the last freed one first; then cached ones, the
/// least recently freed one first, which loses its hash only then; then, if there is nothing else, those that are soft-pinned.
///
/// Of a table that is freed the last block is reused first. The order is vLLM's: `free_blocks` in `v1/core/block_pool.py`, 0.32.0.
/// There, two blocks of the same content may both be cached; here the second one stays unregistered ([`Registered::Duplicate`]).
pub struct BlockPool {
    blocks: Vec<Block>,
    free: FreeList,
    by_hash: PrefixIndex,
    returns: Arc<ReturnedBlocks>,
    counts: PoolCounts,
    null: Option<BlockId>,
    /// Empty blocks of the table that is being freed; kept for its memory.
    emptied: Vec<u32>,
}

#[derive(Clone, Copy, Default)]
struct Block {
    /// References by tables and leases.
    holders: u32,
    /// Those by leases.
    leases: u32,
    /// Those by pins.
    pins: u32,
    /// Reused only when nothing else is free. Registered blocks alone are.
    soft_pinned: bool,
    hash: Option<BlockHash>,
}

/// What [`BlockPool::register`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Registered {
    /// Later requests can share the block.
    New,
    /// It was registered under this hash before.
    Already,
    /// Another block has the same content and is the one that is shared; the table keeps its own, unregistered.
    Duplicate(BlockId),
}

/// How the blocks are used, and what happened to them since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PoolCounts {
    /// All blocks but the null block.
    pub total: usize,
    /// Blocks without a holder, cached ones among them.
    pub free: usize,
    /// Free blocks whose content a prefix can still revive.
    pub cached: usize,
    /// Blocks that have a hash, held or free.
    pub registered: usize,
    /// Blocks held by at least one lease.
    pub leased: usize,
    /// Blocks held by at least one pin.
    pub pinned: usize,
    /// Registered blocks that are reused last.
    pub soft_pinned: usize,
    /// Since the start: cached blocks whose content was given up for a new one.
    pub evicted_total: u64,
    /// Since the start: blocks that opened tables asked for by hash.
    pub queried_total: u64,
    /// Since the start: those that were found.
    pub hit_total: u64,
}

impl BlockPool {
    /// The most blocks in one pool.
    pub const MAX_BLOCKS: usize = 1 << 28;

    /// Makes a pool of empty blocks, numbered from 0.
    ///
    /// # Errors
    /// [`PoolError::Size`] for no blocks, or more than [`MAX_BLOCKS`](Self::MAX_BLOCKS).
    pub fn new(blocks: usize) -> Result<Self, PoolError> {
        Self::with(blocks, None)
    }

    /// Makes a pool whose block 0 is the null block: never given out, it stands in tables for KV that nobody needs any more.
    ///
    /// Source: `null_block` in vLLM's `v1/core/block_pool.py`.
    ///
    /// # Errors
    /// [`PoolError::Size`] for fewer than 2 blocks, or more than [`MAX_BLOCKS`](Self::MAX_BLOCKS).
    pub fn with_null(blocks: usize) -> Result<Self, PoolError> {
        Self::with(blocks, Some(BlockId::new(0)))
    }

    fn with(blocks: usize, null: Option<BlockId>) -> Result<Self, PoolError> {
        let first = usize::from(null.is_some());
        let limit = u32::try_from(blocks).ok().filter(|_| (1 + first..=Self::MAX_BLOCKS).contains(&blocks));
        let limit = limit.ok_or(PoolError::Size { blocks })?;
        Ok(Self {
            blocks: vec![Block::default(); blocks],
            free: FreeList::full(first as u32, limit),
            by_hash: PrefixIndex::default(),
            returns: Arc::default(),
            counts: PoolCounts { total: blocks - first, ..PoolCounts::default() },
            null,
            emptied: Vec::new(),
        })
    }

    /// The null block, if the pool has one.
    #[must_use]
    pub fn null(&self) -> Option<BlockId> {
        self.null
    }

    /// Notes from now on what happens to the prefix cache, for [`take_changes`](Self::take_changes).
    pub fn record_changes(&mut self) {
        self.by_hash.record();
    }

    /// What happened to the prefix cache since the last call, in order; nothing if it is not recorded. Taken once a step: it grows until
    /// then.
    pub fn take_changes(&mut self) -> Vec<PrefixChange> {
        self.settle();
        self.by_hash.take_changes()
    }

    /// Counts how many of a sequence's first blocks are in the prefix cache. Changes nothing, not even their order of reuse.
    #[must_use]
    pub fn lookup(&self, hashes: &[BlockHash]) -> usize {
        hashes.iter().take_while(|hash| self.by_hash.get(hash).is_some()).count()
    }

    /// Opens a request's table: the longest prefix of `hashes` that is cached, shared with whoever else holds it, then `fresh`
    /// blocks of its own. All or nothing.
    ///
    /// Whoever must compute at least one token of the prompt leaves the hash of its last block out when the prompt ends there.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`] if the free list is too short for the new blocks and the cached ones that it must revive.
    pub fn open(&mut self, hashes: &[BlockHash], fresh: usize) -> Result<BlockTable, PoolError> {
        self.settle();
        let mut ids: Vec<BlockId> = hashes.iter().map_while(|hash| self.by_hash.get(hash)).collect();
        let revived = ids.iter().filter(|id| self.block(**id).holders == 0).count();
        self.reserve(revived.saturating_add(fresh))?;
        self.counts.queried_total += hashes.len() as u64;
        self.counts.hit_total += ids.len() as u64;
        ids.iter().for_each(|id| self.hold(*id, HeldBy::Request));
        self.take_free(fresh, &mut ids);
        Ok(BlockTable(Held::new(HeldBy::Request, ids, &self.returns)))
    }

    /// Appends `fresh` blocks to a table. All or nothing.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`], or [`PoolError::ForeignTable`].
    pub fn extend(&mut self, table: &mut BlockTable, fresh: usize) -> Result<(), PoolError> {
        self.settle();
        self.own(&table.0)?;
        self.reserve(fresh)?;
        self.take_free(fresh, &mut table.0.ids);
        Ok(())
    }

    /// Frees the blocks of a table after the first `len`, the last one first; a shorter table stays as it is.
    ///
    /// # Errors
    /// [`PoolError::ForeignTable`].
    pub fn truncate(&mut self, table: &mut BlockTable, len: usize) -> Result<(), PoolError> {
        self.settle();
        self.own(&table.0)?;
        let cut = table.0.ids.split_off(len.min(table.len()));
        self.give_back_all(&cut, HeldBy::Request);
        Ok(())
    }

    /// Frees blocks in the midst of a table, the last one first, and puts the null block in their place: what a window has passed.
    /// Returns how many were freed; null blocks among them stay.
    ///
    /// # Errors
    /// [`PoolError::NoNull`], [`PoolError::Position`] or [`PoolError::ForeignTable`].
    pub fn skip(&mut self, table: &mut BlockTable, range: Range<usize>) -> Result<usize, PoolError> {
        self.settle();
        let null = self.null.ok_or(PoolError::NoNull)?;
        let skipped: Vec<BlockId> = self.ids(table, range.clone())?.iter().copied().filter(|id| *id != null).collect();
        table.0.ids[range].fill(null);
        self.give_back_all(&skipped, HeldBy::Request);
        Ok(skipped.len())
    }

    /// Opens a second table over a part of a request's blocks, which both hold from now on.
    ///
    /// # Errors
    /// [`PoolError::Position`] or [`PoolError::ForeignTable`].
    pub fn share(&mut self, table: &BlockTable, range: Range<usize>) -> Result<BlockTable, PoolError> {
        Ok(BlockTable(self.hold_range(table, range, HeldBy::Request)?))
    }

    /// Leases a part of a request's blocks to a transfer, which holds them on its own from now on: the request may end.
    ///
    /// # Errors
    /// [`PoolError::Position`] or [`PoolError::ForeignTable`].
    pub fn lease(&mut self, table: &BlockTable, range: Range<usize>) -> Result<Lease, PoolError> {
        Ok(Lease(self.hold_range(table, range, HeldBy::Transfer)?))
    }

    /// Gives a table's blocks back at once, the last one first, so that a prefix outlives what follows it. A table of another
    /// pool goes back to that pool.
    pub fn release(&mut self, table: BlockTable) {
        drop(table);
        self.settle();
    }

    /// Pins the longest prefix of `hashes` that is cached: those blocks stay registered and are not reused until the pin is dropped.
    pub fn pin(&mut self, hashes: &[BlockHash]) -> Pin {
        self.settle();
        let ids: Vec<BlockId> = hashes.iter().map_while(|hash| self.by_hash.get(hash)).collect();
        ids.iter().for_each(|id| self.hold(*id, HeldBy::Pin));
        Pin(Held::new(HeldBy::Pin, ids, &self.returns))
    }

    /// Soft-pins the longest prefix of `hashes` that is cached: those blocks are reused only when nothing else is free, and are like
    /// others then. Returns how many they are.
    pub fn soft_pin(&mut self, hashes: &[BlockHash]) -> usize {
        self.settle();
        let found = self.lookup(hashes);
        hashes[..found].iter().rev().for_each(|hash| self.set_soft_pin(hash, true));
        found
    }

    /// Takes soft pins off, wherever in the sequence; what is free becomes as if just used. Returns how many were soft-pinned.
    pub fn soft_unpin(&mut self, hashes: &[BlockHash]) -> usize {
        self.settle();
        let before = self.counts.soft_pinned;
        hashes.iter().rev().for_each(|hash| self.set_soft_pin(hash, false));
        before - self.counts.soft_pinned
    }

    /// Takes one empty block, which only its holder can reach.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`].
    pub fn mutable(&mut self) -> Result<MutableBlock, PoolError> {
        Ok(MutableBlock(self.open(&[], 1)?.0))
    }

    /// Finds a registered block, and holds it.
    pub fn find(&mut self, hash: BlockHash) -> Option<RegisteredBlock> {
        self.settle();
        let id = self.by_hash.get(&hash)?;
        self.hold(id, HeldBy::Request);
        Some(RegisteredBlock { held: Held::new(HeldBy::Request, vec![id], &self.returns), hash })
    }

    /// Puts a complete block into the prefix cache. If another block of the same content is there, that one is returned, and the block
    /// that was given is freed ([`Registered::Duplicate`] names the one that stays).
    ///
    /// # Errors
    /// The block with [`PoolError::ForeignTable`].
    pub fn publish(
        &mut self,
        block: CompleteBlock,
    ) -> Result<(RegisteredBlock, Registered), (CompleteBlock, PoolError)> {
        self.settle();
        if let Err(error) = self.own(&block.held) {
            return Err((block, error));
        }
        let hash = block.hash;
        if let Some(shared) = self.find(hash) {
            let done = Registered::Duplicate(shared.id());
            drop(block);
            self.settle();
            return Ok((shared, done));
        }
        // A mutable block has no hash, and nobody but its holder can give it one.
        self.by_hash.insert(hash, block.id());
        self.block_mut(block.id()).hash = Some(hash);
        Ok((RegisteredBlock { held: block.held, hash }, Registered::New))
    }

    /// Appends a block to a request's table, which holds it from then on.
    ///
    /// # Errors
    /// The block with [`PoolError::ForeignTable`], if it or the table is another pool's.
    pub fn adopt(&mut self, table: &mut BlockTable, block: impl Into<OneBlock>) -> Result<(), (OneBlock, PoolError)> {
        self.settle();
        let block = block.into();
        if let Err(error) = self.own(&table.0).and_then(|()| self.own(block.held())) {
            return Err((block, error));
        }
        table.0.ids.append(&mut block.into_held().ids);
        Ok(())
    }

    /// Ends a lease at once. A lease of another pool goes back to that pool.
    pub fn end(&mut self, lease: Lease) {
        drop(lease);
        self.settle();
    }

    /// Puts a block into the prefix cache. The caller vouches that all its tokens are in place, computed here or verified by
    /// digest, and that nobody writes it from now on.
    ///
    /// # Errors
    /// [`PoolError::AlreadyRegistered`] if the block has another hash; [`PoolError::Position`]; [`PoolError::ForeignTable`].
    pub fn register(&mut self, table: &BlockTable, position: usize, hash: BlockHash) -> Result<Registered, PoolError> {
        self.settle();
        let id = self.at(table, position)?;
        match self.block(id).hash {
            Some(registered) if registered == hash => return Ok(Registered::Already),
            Some(registered) => return Err(PoolError::AlreadyRegistered { block: id, registered }),
            None => {}
        }
        if let Some(shared) = self.by_hash.get(&hash) {
            return Ok(Registered::Duplicate(shared));
        }
        self.by_hash.insert(hash, id);
        self.block_mut(id).hash = Some(hash);
        Ok(Registered::New)
    }

    /// Takes a block out of the prefix cache, because its content turned out wrong; those that hold it keep it.
    /// Returns whether it was registered.
    ///
    /// # Errors
    /// [`PoolError::Position`] or [`PoolError::ForeignTable`].
    pub fn unregister(&mut self, table: &BlockTable, position: usize) -> Result<bool, PoolError> {
        self.settle();
        let id = self.at(table, position)?;
        Ok(self.drop_hash(id))
    }

    /// Empties the prefix cache, because the weights changed: no block that exists now is ever shared again. Returns how many
    /// blocks were registered. Those that are held stay so.
    pub fn clear_cache(&mut self) -> usize {
        self.settle();
        let registered = self.by_hash.len();
        self.by_hash.clear();
        self.counts.cached = 0;
        for (id, block) in (0..).zip(&mut self.blocks) {
            if block.hash.take().is_some() && self.free.contains(id) {
                // It is empty now, and empty blocks are reused before cached ones.
                self.free.remove(id);
                self.free.push_front_all(std::iter::once(id));
            }
            block.soft_pinned = false;
        }
        self.counts.soft_pinned = 0;
        registered
    }

    /// Marks the cached blocks of a sequence as just used, so that they are reused last: for a request that will open a table
    /// soon. Returns how many of its first blocks were found.
    pub fn touch(&mut self, hashes: &[BlockHash]) -> usize {
        self.settle();
        let found = self.lookup(hashes);
        for hash in hashes[..found].iter().rev() {
            if let Some(id) = self.by_hash.get(hash) {
                self.requeue(id);
            }
        }
        found
    }

    /// Checks that blocks may be granted to a peer for writing: nobody else holds them, and no prefix can reach them.
    ///
    /// # Errors
    /// [`PoolError::Shared`] for the first block that may not; [`PoolError::Position`]; [`PoolError::ForeignTable`].
    pub fn check_writable(&self, table: &BlockTable, range: Range<usize>) -> Result<(), PoolError> {
        let start = range.start;
        for (position, id) in (start..).zip(self.ids(table, range)?) {
            if Some(*id) == self.null {
                return Err(PoolError::Null { position });
            }
            let Block { holders, hash, .. } = *self.block(*id);
            if holders != 1 || hash.is_some() {
                return Err(PoolError::Shared { block: *id, holders, registered: hash.is_some() });
            }
        }
        Ok(())
    }

    /// How the blocks are used. What was dropped elsewhere is taken in first.
    pub fn counts(&mut self) -> PoolCounts {
        self.settle();
        PoolCounts { free: self.free.len(), registered: self.by_hash.len(), ..self.counts }
    }

    /// Takes in what was dropped without the pool at hand.
    fn settle(&mut self) {
        for (by, ids) in self.returns.take() {
            self.give_back_all(&ids, by);
        }
    }

    pub(super) fn own(&self, held: &Held) -> Result<(), PoolError> {
        match Arc::ptr_eq(&self.returns, &held.returns) {
            true => Ok(()),
            false => Err(PoolError::ForeignTable { len: held.ids.len() }),
        }
    }

    fn ids<'t>(&self, table: &'t BlockTable, range: Range<usize>) -> Result<&'t [BlockId], PoolError> {
        self.own(&table.0)?;
        let Range { start, end } = range;
        table.ids().get(start..end).ok_or(PoolError::Position { start, end, len: table.len() })
    }

    fn at(&self, table: &BlockTable, position: usize) -> Result<BlockId, PoolError> {
        let id = self.ids(table, position..position.saturating_add(1))?[0];
        if Some(id) == self.null { Err(PoolError::Null { position }) } else { Ok(id) }
    }

    fn hold_range(&mut self, table: &BlockTable, range: Range<usize>, by: HeldBy) -> Result<Held, PoolError> {
        self.settle();
        let ids = self.ids(table, range)?.to_vec();
        ids.iter().for_each(|id| self.hold(*id, by));
        Ok(Held::new(by, ids, &self.returns))
    }

    fn reserve(&self, wanted: usize) -> Result<(), PoolError> {
        let free = self.free.len();
        if wanted > free {
            return Err(PoolError::Exhausted { wanted, free, total: self.counts.total });
        }
        Ok(())
    }

    /// Takes `fresh` blocks from the head of the free list, which is long enough.
    fn take_free(&mut self, fresh: usize, ids: &mut Vec<BlockId>) {
        let had = ids.len();
        ids.reserve(fresh);
        self.free.take(fresh, |id| ids.push(BlockId::new(id)));
        for id in &ids[had..] {
            let block = &mut self.blocks[id.get() as usize];
            block.holders = 1;
            if block.hash.is_some() {
                self.drop_hash(*id);
                self.counts.cached -= 1;
                self.counts.evicted_total += 1;
            }
        }
    }

    fn hold(&mut self, id: BlockId, by: HeldBy) {
        if Some(id) == self.null {
            return;
        }
        if self.free.contains(id.get()) {
            // Only a registered block can be reached while it is free.
            self.free.remove(id.get());
            self.counts.cached -= 1;
        }
        let block = &mut self.blocks[id.get() as usize];
        block.holders += 1;
        match by {
            HeldBy::Request => {}
            HeldBy::Transfer => {
                block.leases += 1;
                self.counts.leased += usize::from(block.leases == 1);
            }
            HeldBy::Pin => {
                block.pins += 1;
                self.counts.pinned += usize::from(block.pins == 1);
            }
        }
    }

    /// A table of this pool without blocks.
    pub(super) fn empty_table(&self) -> BlockTable {
        BlockTable(Held::new(HeldBy::Request, Vec::new(), &self.returns))
    }

    /// Free blocks, cached ones among them.
    pub(super) fn free_blocks(&mut self) -> usize {
        self.settle();
        self.free.len()
    }

    /// Of so many first blocks of a sequence, those that nobody holds.
    pub(super) fn idle(&self, hashes: &[BlockHash]) -> usize {
        hashes.iter().filter_map(|hash| self.by_hash.get(hash)).filter(|id| self.block(*id).holders == 0).count()
    }

    /// Takes back what a table held and was taken out of it.
    pub(super) fn give_back_taken(&mut self, ids: &[BlockId]) {
        self.give_back_all(ids, HeldBy::Request);
    }

    /// Takes references back, the last one first. What becomes empty is reused first, and of that the last block.
    fn give_back_all(&mut self, ids: &[BlockId], by: HeldBy) {
        let (mut emptied, null) = (std::mem::take(&mut self.emptied), self.null);
        for id in ids.iter().rev().filter(|id| Some(**id) != null) {
            if self.give_back(*id, by) {
                emptied.push(id.get());
            }
        }
        self.free.push_front_all(emptied.iter().rev().copied());
        emptied.clear();
        self.emptied = emptied;
    }

    /// Returns whether the block is empty and nobody's from now on; then it is in no list yet.
    fn give_back(&mut self, id: BlockId, by: HeldBy) -> bool {
        let block = &mut self.blocks[id.get() as usize];
        block.holders -= 1;
        match by {
            HeldBy::Request => {}
            HeldBy::Transfer => {
                block.leases -= 1;
                self.counts.leased -= usize::from(block.leases == 0);
            }
            HeldBy::Pin => {
                block.pins -= 1;
                self.counts.pinned -= usize::from(block.pins == 0);
            }
        }
        let Block { holders, hash, .. } = *block;
        if holders == 0 && hash.is_some() {
            self.counts.cached += 1;
            self.free.push_back(id.get(), self.turn(id));
        }
        holders == 0 && hash.is_none()
    }

    fn turn(&self, id: BlockId) -> Turn {
        if self.block(id).soft_pinned { Turn::Last } else { Turn::Due }
    }

    /// Moves a free block to the end of its list.
    fn requeue(&mut self, id: BlockId) {
        if self.free.contains(id.get()) {
            self.free.remove(id.get());
            self.free.push_back(id.get(), self.turn(id));
        }
    }

    fn set_soft_pin(&mut self, hash: &BlockHash, pinned: bool) {
        let Some(id) = self.by_hash.get(hash) else { return };
        let was = std::mem::replace(&mut self.block_mut(id).soft_pinned, pinned);
        self.counts.soft_pinned += usize::from(pinned);
        self.counts.soft_pinned -= usize::from(was);
        if pinned || was {
            self.requeue(id);
        }
    }

    fn drop_hash(&mut self, id: BlockId) -> bool {
        let block = &mut self.blocks[id.get() as usize];
        self.counts.soft_pinned -= usize::from(std::mem::take(&mut block.soft_pinned));
        let hash = block.hash.take();
        hash.is_some_and(|hash| self.by_hash.remove(&hash))
    }

    fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id.get() as usize]
    }

    fn block_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.blocks[id.get() as usize]
    }
}
