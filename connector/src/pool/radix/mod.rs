//! Prefixes by their tokens, as SGLang shares them: a radix tree over blocks, and per request a table of slots.
//!
//! What SGLang calls a page is a block of a [`BlockPool`], of 1 token or more; a token's slot is `block * tokens_per_block + offset`. A
//! request is a [`Sequence`]: its first blocks are the tree's, locked for it, the rest its own. Each block thus has one owner: the
//! pool, the tree or one sequence. What hashes are to a block pool, tokens are to the tree, so nothing is
//! hashed and a prefix may end at any block.
//!
//! Source: SGLang's `srt/mem_cache/radix_cache.py`, `chunk_cache.py` and `schedule_batch.py`, and mini-sglang's `scheduler`.
//!
//! ```
//! use kvferry::pool::{RadixCache, Sharing};
//!
//! let mut cache = RadixCache::new(16, 4, Sharing::Radix)?;
//! let prompt: Vec<u32> = (0..10).collect();
//! let mut first = cache.admit(b"tenant 7", &prompt);
//! cache.extend(&mut first, 10)?; // slots for 10 tokens, in 3 blocks
//! let kept = cache.finish(first, &prompt).map_err(|refused| refused.1)?;
//! assert_eq!((kept.registered, kept.returned), (2, 1)); // the third block is not whole
//!
//! let second = cache.admit(b"tenant 7", &prompt);
//! assert_eq!(second.shared_tokens(), 8);
//! # Ok::<(), kvferry::pool::PoolError>(())
//! ```

mod sequence;
mod tree;

use std::collections::HashMap;
use std::sync::Arc;

use kvferry_protocol::BlockId;

use super::hash::BlockHash;
use super::returns::Returns;
use super::{BlockPool, BlockTable, PoolError, PrefixChange};
use sequence::Lock;
use tree::{NodeId, Tree, TreeCounts};

pub use sequence::Sequence;

/// Whether sequences share prefixes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Sharing {
    /// What is finished is kept, and found again by its tokens.
    #[default]
    Radix,
    /// Nothing is kept: SGLang's chunk cache (`--disable-radix-cache`).
    Off,
}

/// Blocks of one engine, and the tree of those that hold a known prefix.
///
/// One thread owns it; sequences may be dropped on any thread, and what they held comes back at the next call. When blocks are short the
/// least recently used leaves are evicted, whole nodes at a time, and never one that a sequence has locked, or above it.
pub struct RadixCache {
    pool: BlockPool,
    tree: Tree,
    unlocks: Arc<Returns<NodeId>>,
    tokens_per_block: usize,
    sharing: Sharing,
    /// Sequences from before the last [`clear`](Self::clear) are not kept.
    epoch: u64,
    counts: RadixCounts,
    /// What changed since it was taken; none if nobody asked for it.
    changes: Option<Changes>,
}

/// What happened to blocks that have a name.
#[derive(Default)]
struct Changes {
    noted: Vec<PrefixChange>,
    /// Of the tree's blocks.
    names: HashMap<BlockId, BlockHash>,
}

/// How the blocks are used, and what happened to them since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RadixCounts {
    /// All blocks.
    pub total: usize,
    /// Blocks that nobody holds.
    pub free: usize,
    /// Blocks in the tree.
    pub cached: usize,
    /// Blocks in the tree that a sequence has locked.
    pub locked: usize,
    /// Nodes of the tree, one root per namespace among them.
    pub nodes: usize,
    /// Since the start: blocks that were evicted.
    pub evicted_total: u64,
    /// Since the start: tokens that admitted sequences asked for.
    pub queried_tokens_total: u64,
    /// Since the start: those that were found.
    pub hit_tokens_total: u64,
}

/// What became of a sequence's blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Kept {
    /// Blocks that were the tree's before, and the sequence's by a lock.
    pub matched: usize,
    /// The sequence's own blocks that the tree took.
    pub registered: usize,
    /// Its own blocks that are free again: those whose tokens came into the tree meanwhile, and behind the last whole block.
    pub returned: usize,
}

impl RadixCache {
    /// Makes a cache of `blocks` empty blocks.
    ///
    /// # Errors
    /// [`PoolError::Size`], or [`PoolError::NoTokens`] for blocks of no tokens.
    pub fn new(blocks: usize, tokens_per_block: usize, sharing: Sharing) -> Result<Self, PoolError> {
        if tokens_per_block == 0 {
            return Err(PoolError::NoTokens);
        }
        let pool = BlockPool::new(blocks)?;
        let (unlocks, counts) = Default::default();
        let (tree, epoch, changes) = (Tree::new(tokens_per_block), 0, None);
        Ok(Self { pool, tree, unlocks, tokens_per_block, sharing, epoch, counts, changes })
    }

    /// Notes from now on what happens to blocks that come into the tree with a name ([`keep_named`](Self::keep_named)), for
    /// [`take_changes`](Self::take_changes).
    pub fn record_changes(&mut self) {
        self.changes.get_or_insert_default();
    }

    /// What happened to named blocks since the last call, in order; nothing if it is not recorded. Taken once a step: it grows until then.
    pub fn take_changes(&mut self) -> Vec<PrefixChange> {
        self.changes.as_mut().map(|changes| std::mem::take(&mut changes.noted)).unwrap_or_default()
    }

    /// Counts the tokens of a prompt that are there. The prompt's last token is never one of them: it is computed for its logits.
    /// Changes nothing, not even their order of eviction.
    #[must_use]
    pub fn lookup(&self, namespace: &[u8], prompt: &[u32]) -> usize {
        self.tree.lookup(namespace, without_last(prompt)) * self.tokens_per_block
    }

    /// Begins a sequence: finds the longest prefix of whole blocks of its prompt and locks it. The prompt's last token is left out, since
    /// it must be computed for its logits.
    ///
    /// Sequences of different namespaces (an adapter, a tenant's salt) never share a block. The empty one is shared by all who name it.
    pub fn admit(&mut self, namespace: &[u8], prompt: &[u32]) -> Sequence {
        self.settle();
        let wanted = match self.sharing {
            Sharing::Radix => without_last(prompt),
            Sharing::Off => &[],
        };
        let mut blocks = Vec::new();
        let node = self.tree.reach(namespace, wanted, &mut blocks);
        self.tree.lock(node);
        self.counts.queried_tokens_total += prompt.len() as u64;
        self.counts.hit_tokens_total += (blocks.len() * self.tokens_per_block) as u64;
        Sequence {
            namespace: namespace.into(),
            lock: Lock { node, unlocks: Arc::clone(&self.unlocks) },
            shared: blocks.len(),
            own: self.pool.empty_table(),
            twins: self.pool.empty_table(),
            blocks,
            tokens_per_block: self.tokens_per_block,
            epoch: self.epoch,
        }
    }

    /// Gives a sequence slots for its first `tokens` tokens, evicting what it must. All or nothing; those that it has stay.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`] if not even eviction makes room: retract a sequence then. [`PoolError::ForeignTable`].
    pub fn extend(&mut self, sequence: &mut Sequence, tokens: usize) -> Result<(), PoolError> {
        self.settle();
        self.pool.own(&sequence.own.0)?;
        let wanted = tokens.div_ceil(self.tokens_per_block).saturating_sub(sequence.blocks.len());
        let TreeCounts { blocks, locked_blocks, .. } = self.tree.counts();
        let unowned = self.pool.free_blocks();
        let free = unowned + blocks - locked_blocks;
        if wanted > free {
            return Err(PoolError::Exhausted { wanted, free, total: self.pool.counts().total });
        }
        self.evict(wanted.saturating_sub(unowned));
        let had = sequence.own.len();
        self.pool.extend(&mut sequence.own, wanted)?;
        sequence.blocks.extend_from_slice(&sequence.own.ids()[had..]);
        Ok(())
    }

    /// Lets others share what a running sequence has computed, between two chunks of its prompt: `tokens` are all whose KV is there.
    ///
    /// Blocks whose tokens came into the tree meanwhile are replaced by the tree's, so the block table must be read again.
    ///
    /// # Errors
    /// [`PoolError::Position`] for more tokens than slots; [`PoolError::OtherTokens`]; [`PoolError::ForeignTable`].
    pub fn keep(&mut self, sequence: &mut Sequence, tokens: &[u32]) -> Result<Kept, PoolError> {
        let kept = self.keep_named(sequence, tokens, &[])?;
        let twins = std::mem::take(&mut sequence.twins.0.ids);
        self.pool.give_back_taken(&twins);
        Ok(kept)
    }

    /// As [`keep`](Self::keep), with the names of the sequence's blocks from the first one on, as far as they are known, for
    /// [`take_changes`](Self::take_changes). What the tree's blocks replace stays the sequence's until that is dropped, since a transfer may
    /// still read it.
    ///
    /// # Errors
    /// As [`keep`](Self::keep).
    pub fn keep_named(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        names: &[BlockHash],
    ) -> Result<Kept, PoolError> {
        self.settle();
        self.check(sequence, tokens)?;
        let matched = sequence.shared;
        if !self.is_kept(sequence) {
            return Ok(Kept { matched, ..Kept::default() });
        }
        let (there, node, whole) = self.reach(sequence, tokens)?;
        let own = &mut sequence.own.0.ids;
        let rest = own.split_off(whole - matched);
        let new = own.split_off(there.len() - matched);
        let twins = std::mem::replace(own, rest);
        let end =
            self.tree.attach(node, &tokens[there.len() * self.tokens_per_block..whole * self.tokens_per_block], &new);
        self.tree.lock(end);
        let before = std::mem::replace(&mut sequence.lock.node, end);
        self.tree.unlock(before);
        sequence.blocks[..there.len()].copy_from_slice(&there);
        sequence.shared = whole;
        if let Some(changes) = &mut self.changes {
            for (block, name) in new.iter().zip(names.iter().skip(there.len())) {
                changes.names.insert(*block, *name);
                changes.noted.push(PrefixChange::Stored(*name));
            }
        }
        let kept = Kept { matched, registered: new.len(), returned: twins.len() };
        sequence.twins.0.ids.extend(twins);
        Ok(kept)
    }

    /// Ends a sequence: its whole blocks are kept for others, the rest is free at once. `tokens` are all whose KV is there.
    ///
    /// A sequence that is dropped instead keeps nothing of its own: that is how one is retracted when blocks are short.
    ///
    /// # Errors
    /// The sequence, with what [`keep`](Self::keep) refuses.
    pub fn finish(&mut self, mut sequence: Sequence, tokens: &[u32]) -> Result<Kept, Box<(Sequence, PoolError)>> {
        let own = sequence.own.len();
        match self.keep(&mut sequence, tokens) {
            Err(error) => Err(Box::new((sequence, error))),
            Ok(kept) => {
                drop(sequence);
                self.settle();
                Ok(Kept { returned: own - kept.registered, ..kept })
            }
        }
    }

    /// Evicts least recently used leaves until `blocks` are freed, or nothing can be evicted. Returns how many were, which may be more.
    pub fn evict(&mut self, blocks: usize) -> usize {
        self.settle();
        let mut evicted = 0;
        while evicted < blocks
            && let Some(leaf) = self.tree.evict()
        {
            self.pool.give_back_taken(&leaf);
            evicted += leaf.len();
            if let Some(Changes { noted, names }) = &mut self.changes {
                // The last one goes first, as from a block pool: a name that is gone has none behind it.
                noted.extend(leaf.iter().rev().filter_map(|block| names.remove(block)).map(PrefixChange::Removed));
            }
        }
        self.counts.evicted_total += evicted as u64;
        evicted
    }

    /// Forgets every prefix, because the weights changed: nothing that is there now is found again, nor what running sequences computed
    /// before. Returns how many blocks are free by it.
    pub fn clear(&mut self) -> usize {
        self.epoch += 1;
        self.tree.cut_off();
        if let Some(Changes { noted, names }) = &mut self.changes {
            // What was stored before is gone with all else.
            names.clear();
            noted.clear();
            noted.push(PrefixChange::Cleared);
        }
        self.evict(usize::MAX)
    }

    /// How the blocks are used. What was dropped elsewhere is taken in first.
    pub fn counts(&mut self) -> RadixCounts {
        self.settle();
        let TreeCounts { nodes, blocks: cached, locked_blocks: locked } = self.tree.counts();
        let (total, free) = (self.pool.counts().total, self.pool.free_blocks());
        RadixCounts { total, free, cached, locked, nodes, ..self.counts }
    }

    /// Blocks that nobody holds, those among them that can be evicted.
    pub(super) fn available(&mut self) -> usize {
        let RadixCounts { free, cached, locked, .. } = self.counts();
        free + cached - locked
    }

    fn settle(&mut self) {
        for node in self.unlocks.take() {
            self.tree.unlock(node);
        }
    }

    fn check(&self, sequence: &Sequence, tokens: &[u32]) -> Result<(), PoolError> {
        self.pool.own(&sequence.own.0)?;
        let (end, len) = (tokens.len(), sequence.blocks.len() * self.tokens_per_block);
        if end > len { Err(PoolError::Position { start: 0, end, len }) } else { Ok(()) }
    }

    fn is_kept(&self, sequence: &Sequence) -> bool {
        self.sharing == Sharing::Radix && sequence.epoch == self.epoch
    }

    /// The tree's blocks for a sequence's tokens, where they end, and how many whole blocks of tokens there are.
    fn reach(&mut self, sequence: &Sequence, tokens: &[u32]) -> Result<(Vec<BlockId>, NodeId, usize), PoolError> {
        let whole = tokens.len() / self.tokens_per_block;
        let mut there = Vec::with_capacity(whole);
        let node = self.tree.reach(&sequence.namespace, &tokens[..whole * self.tokens_per_block], &mut there);
        // Else the tree would come to own blocks that it owns elsewhere.
        match there.get(..sequence.shared) == sequence.blocks.get(..sequence.shared) {
            true => Ok((there, node, whole)),
            false => Err(PoolError::OtherTokens { blocks: sequence.shared }),
        }
    }
}

fn without_last(prompt: &[u32]) -> &[u32] {
    &prompt[..prompt.len().saturating_sub(1)]
}

#[cfg(test)]
mod tests;
