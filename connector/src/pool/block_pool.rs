//! The pool: per block a count of its holders, its hash if its content can be shared, and its place in the free list.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use kvferry_protocol::BlockId;

use super::PoolError;
use super::free_list::FreeList;
use super::hash::BlockHash;
use super::table::{BlockTable, Held, HeldBy, Lease, Returns};

/// The physical blocks of one engine's KV cache, as metadata.
///
/// One thread owns it (an engine's scheduler); tables and leases may be dropped on any thread. A block is in exactly one of three
/// states: *held* by one or more tables and leases; *cached*, free but registered, so that a prefix can still revive it; *empty*,
/// free without content that anyone could ask for. Empty blocks are reused first, the last freed one first; then cached ones, the
/// least recently freed one first, which loses its hash only then.
pub struct BlockPool {
    blocks: Vec<Block>,
    free: FreeList,
    by_hash: HashMap<BlockHash, BlockId>,
    returns: Arc<Returns>,
    counts: PoolCounts,
}

#[derive(Clone, Copy, Default)]
struct Block {
    /// References by tables and leases.
    holders: u32,
    /// Those by leases.
    leases: u32,
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
    /// All blocks.
    pub total: usize,
    /// Blocks without a holder, cached ones among them.
    pub free: usize,
    /// Free blocks whose content a prefix can still revive.
    pub cached: usize,
    /// Blocks that have a hash, held or free.
    pub registered: usize,
    /// Blocks held by at least one lease.
    pub leased: usize,
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
        let limit = u32::try_from(blocks).ok().filter(|_| (1..=Self::MAX_BLOCKS).contains(&blocks));
        let limit = limit.ok_or(PoolError::Size { blocks })?;
        Ok(Self {
            blocks: vec![Block::default(); blocks],
            free: FreeList::full(limit),
            by_hash: HashMap::new(),
            returns: Arc::default(),
            counts: PoolCounts { total: blocks, ..PoolCounts::default() },
        })
    }

    /// Counts how many of a sequence's first blocks are in the prefix cache. Changes nothing, not even their order of reuse.
    #[must_use]
    pub fn lookup(&self, hashes: &[BlockHash]) -> usize {
        hashes.iter().take_while(|hash| self.by_hash.contains_key(hash)).count()
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
        let mut ids: Vec<BlockId> = hashes.iter().map_while(|hash| self.by_hash.get(hash).copied()).collect();
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
        self.own(table)?;
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
        self.own(table)?;
        while table.len() > len
            && let Some(id) = table.0.ids.pop()
        {
            self.give_back(id, HeldBy::Request);
        }
        Ok(())
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
            return Ok(Registered::Duplicate(*shared));
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
                self.free.push_front(id);
            }
        }
        registered
    }

    /// Marks the cached blocks of a sequence as just used, so that they are reused last: for a request that will open a table
    /// soon. Returns how many of its first blocks were found.
    pub fn touch(&mut self, hashes: &[BlockHash]) -> usize {
        self.settle();
        let found = self.lookup(hashes);
        for hash in hashes[..found].iter().rev() {
            if let Some(id) = self.by_hash.get(hash)
                && self.free.contains(id.get())
            {
                self.free.remove(id.get());
                self.free.push_back(id.get());
            }
        }
        found
    }

    /// Checks that blocks may be granted to a peer for writing: nobody else holds them, and no prefix can reach them.
    ///
    /// # Errors
    /// [`PoolError::Shared`] for the first block that may not; [`PoolError::Position`]; [`PoolError::ForeignTable`].
    pub fn check_writable(&self, table: &BlockTable, range: Range<usize>) -> Result<(), PoolError> {
        for id in self.ids(table, range)? {
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
            ids.into_iter().rev().for_each(|id| self.give_back(id, by));
        }
    }

    fn own(&self, table: &BlockTable) -> Result<(), PoolError> {
        match Arc::ptr_eq(&self.returns, &table.0.returns) {
            true => Ok(()),
            false => Err(PoolError::ForeignTable { len: table.len() }),
        }
    }

    fn ids<'t>(&self, table: &'t BlockTable, range: Range<usize>) -> Result<&'t [BlockId], PoolError> {
        self.own(table)?;
        let Range { start, end } = range;
        table.ids().get(start..end).ok_or(PoolError::Position { start, end, len: table.len() })
    }

    fn at(&self, table: &BlockTable, position: usize) -> Result<BlockId, PoolError> {
        Ok(self.ids(table, position..position.saturating_add(1))?[0])
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
        ids.reserve(fresh);
        for id in std::iter::from_fn(|| self.free.pop_front()).take(fresh).map(BlockId::new) {
            let block = &mut self.blocks[id.get() as usize];
            block.holders = 1;
            if let Some(hash) = block.hash.take() {
                self.by_hash.remove(&hash);
                self.counts.cached -= 1;
                self.counts.evicted_total += 1;
            }
            ids.push(id);
        }
    }

    fn hold(&mut self, id: BlockId, by: HeldBy) {
        if self.free.contains(id.get()) {
            // Only a registered block can be reached while it is free.
            self.free.remove(id.get());
            self.counts.cached -= 1;
        }
        let block = self.block_mut(id);
        block.holders += 1;
        if by == HeldBy::Transfer {
            block.leases += 1;
            self.counts.leased += usize::from(self.block(id).leases == 1);
        }
    }

    fn give_back(&mut self, id: BlockId, by: HeldBy) {
        let block = self.block_mut(id);
        block.holders -= 1;
        let Block { holders, hash, .. } = *block;
        if by == HeldBy::Transfer {
            block.leases -= 1;
            self.counts.leased -= usize::from(self.block(id).leases == 0);
        }
        match (holders, hash) {
            (0, Some(_)) => {
                self.counts.cached += 1;
                self.free.push_back(id.get());
            }
            (0, None) => self.free.push_front(id.get()),
            _ => {}
        }
    }

    fn drop_hash(&mut self, id: BlockId) -> bool {
        let hash = self.block_mut(id).hash.take();
        hash.is_some_and(|hash| self.by_hash.remove(&hash).is_some())
    }

    fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id.get() as usize]
    }

    fn block_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.blocks[id.get() as usize]
    }
}
