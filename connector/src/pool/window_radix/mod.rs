//! Prefixes by their tokens for models of which some layers keep a window, as SGLang shares them: two pools and one tree.
//!
//! Layers that keep all have blocks of the *full pool*, layers with a window blocks of the *window pool*, which can be far smaller: what the
//! window has passed is freed there at once. A node of the tree has a block of each, or is a *tombstone*: then it has given its
//! window part up, because the window pool was short, and is still part of every prefix that has a whole window behind it. Window parts
//! are given up first, and on their own; full parts only from the ends of prefixes, by an order of their own.
//!
//! Source: SGLang's `srt/mem_cache/swa_radix_cache.py` and `allocator`. There nodes are runs of pages; here a node is one block.
//!
//! ```
//! use kvferry::pool::WindowRadixCache;
//!
//! // 32 blocks for layers that keep all, 8 for those with a window of 8 tokens.
//! let mut cache = WindowRadixCache::new(32, 8, 4, 8)?;
//! let prompt: Vec<u32> = (0..40).collect();
//! let mut first = cache.admit(b"tenant 7", &prompt);
//! for (computed, end) in [(0, 16), (16, 32), (32, 40)] {
//!     cache.pass(&mut first, computed)?; // the chunk before is computed: the window has moved on
//!     cache.extend(&mut first, end)?; // a chunk of the prompt
//! }
//! cache.finish(first, &prompt).map_err(|refused| refused.1)?;
//! let second = cache.admit(b"tenant 7", &prompt);
//! assert_eq!(second.shared_tokens(), 36);
//! assert_eq!(second.window_blocks().iter().filter(|id| id.get() != 0).count(), 2); // of 9 blocks
//! # Ok::<(), kvferry::pool::PoolError>(())
//! ```

mod sequence;
mod tree;

use std::sync::Arc;

use kvferry_protocol::BlockId;

use super::returns::Returns;
use super::{BlockPool, Kept, PoolError};
use sequence::PathLock;
use tree::{Freed, NodeId, Tree, TreeCounts};

pub use sequence::WindowSequence;

/// The blocks of one engine with windows, and the tree of those that hold a known prefix.
///
/// One thread owns it; sequences may be dropped on any thread, and what they held comes back at the next call.
pub struct WindowRadixCache {
    full: BlockPool,
    window: BlockPool,
    null: BlockId,
    tree: Tree,
    unlocks: Arc<Returns<(Vec<NodeId>, usize)>>,
    tokens_per_block: usize,
    window_tokens: usize,
    /// Sequences from before the last [`clear`](Self::clear) are not kept.
    epoch: u64,
    counts: WindowRadixCounts,
}

/// How the blocks are used, and what happened to them since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WindowRadixCounts {
    /// Blocks of the full pool.
    pub total: usize,
    /// Of them, those that nobody holds.
    pub free: usize,
    /// Blocks of the window pool, without its null block.
    pub window_total: usize,
    /// Of them, those that nobody holds.
    pub window_free: usize,
    /// Blocks of the full pool that the tree has: its nodes.
    pub cached: usize,
    /// Nodes that have given their window part up.
    pub tombstones: usize,
    /// Nodes that a sequence has locked.
    pub locked: usize,
    /// Nodes whose window part a sequence has locked.
    pub window_locked: usize,
    /// Since the start: blocks of the full pool that were evicted.
    pub evicted_total: u64,
    /// Since the start: blocks of the window pool that were evicted.
    pub window_evicted_total: u64,
    /// Since the start: tokens that admitted sequences asked for.
    pub queried_tokens_total: u64,
    /// Since the start: those that were found.
    pub hit_tokens_total: u64,
}

impl WindowRadixCache {
    /// Makes a cache of empty blocks: `blocks` for layers that keep all, `window_blocks` for those that attend to `window_tokens` tokens, the
    /// one that is computed among them.
    ///
    /// # Errors
    /// [`PoolError::Size`], or [`PoolError::NoTokens`] for blocks or windows of no tokens.
    pub fn new(
        blocks: usize,
        window_blocks: usize,
        tokens_per_block: usize,
        window_tokens: usize,
    ) -> Result<Self, PoolError> {
        if tokens_per_block == 0 || window_tokens == 0 {
            return Err(PoolError::NoTokens);
        }
        let full = BlockPool::new(blocks)?;
        let window = BlockPool::with_null(window_blocks.saturating_add(1))?;
        let null = window.null().ok_or(PoolError::NoNull)?;
        let (tree, unlocks, counts) = Default::default();
        Ok(Self { full, window, null, tree, unlocks, tokens_per_block, window_tokens, epoch: 0, counts })
    }

    /// Counts the tokens of a prompt that are there. The prompt's last token is never one of them. Changes nothing.
    #[must_use]
    pub fn lookup(&self, namespace: &[u8], prompt: &[u32]) -> usize {
        let path = self.tree.path(namespace, without_last(prompt), self.tokens_per_block);
        self.tree.usable(&path, self.needed()) * self.tokens_per_block
    }

    /// Begins a sequence: finds the longest prefix of whole blocks of its prompt that both kinds of layers can go on behind, and locks it.
    /// The prompt's last token is left out, since it must be computed for its logits.
    ///
    /// Sequences of different namespaces (an adapter, a tenant's salt) never share a block.
    pub fn admit(&mut self, namespace: &[u8], prompt: &[u32]) -> WindowSequence {
        self.settle();
        let mut path = self.tree.path(namespace, without_last(prompt), self.tokens_per_block);
        path.truncate(self.tree.usable(&path, self.needed()));
        let window_from = path.len().saturating_sub(self.needed());
        self.tree.touch(&path, window_from);
        self.tree.lock(&path, window_from);
        self.counts.queried_tokens_total += prompt.len() as u64;
        self.counts.hit_tokens_total += (path.len() * self.tokens_per_block) as u64;
        let window = |(at, id): (usize, &NodeId)| if at < window_from { None } else { self.tree.window(*id) };
        WindowSequence {
            namespace: namespace.into(),
            own: self.full.empty_table(),
            own_window: self.window.empty_table(),
            blocks: path.iter().map(|id| self.tree.full(*id)).collect(),
            window_blocks: path.iter().enumerate().map(|at| window(at).unwrap_or(self.null)).collect(),
            lock: PathLock { path, window_from, unlocks: Arc::clone(&self.unlocks) },
            passed: window_from,
            tokens_per_block: self.tokens_per_block,
            epoch: self.epoch,
        }
    }

    /// Gives a sequence slots for its first `tokens` tokens in both pools, evicting what it must. All or nothing; those that it has stay.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`] if not even eviction makes room in one of the pools: retract a sequence then. [`PoolError::ForeignTable`].
    pub fn extend(&mut self, sequence: &mut WindowSequence, tokens: usize) -> Result<(), PoolError> {
        self.settle();
        self.own(sequence)?;
        let wanted = tokens.div_ceil(self.tokens_per_block).saturating_sub(sequence.blocks.len());
        let TreeCounts { nodes, tombstones, locked, window_locked } = self.tree.counts();
        let (full_free, window_free) = (self.full.free_blocks(), self.window.free_blocks());
        for (free, total) in [
            (full_free + nodes - locked, self.full.counts().total),
            (window_free + nodes - tombstones - window_locked, self.window.counts().total),
        ] {
            if wanted > free {
                return Err(PoolError::Exhausted { wanted, free, total });
            }
        }
        self.evict_windows(wanted.saturating_sub(window_free));
        let full_free = self.full.free_blocks();
        self.evict(wanted.saturating_sub(full_free));
        let (had, had_window) = (sequence.own.len(), sequence.own_window.len());
        self.full.extend(&mut sequence.own, wanted)?;
        self.window.extend(&mut sequence.own_window, wanted)?;
        sequence.blocks.extend_from_slice(&sequence.own.ids()[had..]);
        sequence.window_blocks.extend_from_slice(&sequence.own_window.ids()[had_window..]);
        Ok(())
    }

    /// Frees what the window has passed when `computed_tokens` are there, and no step under way reads it: the sequence's own blocks at once,
    /// and its locks on those of the tree. Returns how many window blocks are free by it.
    ///
    /// What was passed before it is kept is not found by its end: a prompt that will be asked for again needs the window before its last
    /// block, so its own end is passed after [`keep`](Self::keep), or never.
    ///
    /// # Errors
    /// [`PoolError::ForeignTable`].
    pub fn pass(&mut self, sequence: &mut WindowSequence, computed_tokens: usize) -> Result<usize, PoolError> {
        self.settle();
        self.own(sequence)?;
        let passed = (computed_tokens + 1).saturating_sub(self.window_tokens) / self.tokens_per_block;
        let before = sequence.passed;
        let passed = passed.clamp(before, sequence.blocks.len().max(before));
        let shared = sequence.lock.path.len();
        let unlocked = passed.min(shared);
        let PathLock { path, window_from, .. } = &mut sequence.lock;
        if unlocked > *window_from {
            self.tree.unlock_windows(path, *window_from, unlocked);
            *window_from = unlocked;
        }
        let own = before.saturating_sub(shared)..passed.saturating_sub(shared);
        let freed = self.window.skip(&mut sequence.own_window, own)?;
        sequence.window_blocks[before..passed].fill(self.null);
        sequence.passed = passed;
        Ok(freed)
    }

    /// Lets others share what a running sequence has computed: `tokens` are all whose KV is there.
    ///
    /// Blocks whose tokens came into the tree meanwhile are replaced by the tree's, so both block tables must be read again. Where the tree
    /// has a tombstone and the sequence a window part, the tree takes that.
    ///
    /// # Errors
    /// [`PoolError::Position`] for more tokens than slots; [`PoolError::OtherTokens`]; [`PoolError::ForeignTable`].
    pub fn keep(&mut self, sequence: &mut WindowSequence, tokens: &[u32]) -> Result<Kept, PoolError> {
        self.settle();
        self.own(sequence)?;
        let (end, len) = (tokens.len(), sequence.capacity_tokens());
        if end > len {
            return Err(PoolError::Position { start: 0, end, len });
        }
        let matched = sequence.lock.path.len();
        if sequence.epoch != self.epoch {
            return Ok(Kept { matched, ..Kept::default() });
        }
        let mut path = self.tree.path(&sequence.namespace, tokens, self.tokens_per_block);
        if path.get(..matched) != Some(&sequence.lock.path[..]) {
            return Err(PoolError::OtherTokens { blocks: matched });
        }
        let whole = end / self.tokens_per_block;
        let there = path.len();
        self.tree.touch(&path, path.len().min(whole.saturating_sub(self.needed())));
        let own: Vec<BlockId> = sequence.own.0.ids.drain(..whole - matched).collect();
        let own_window: Vec<BlockId> = sequence.own_window.0.ids.drain(..whole - matched).collect();
        let (mut twins, mut window_twins) = (vec![], vec![]);
        for (at, (full, window)) in (matched..whole).zip(own.into_iter().zip(own_window)) {
            let live = (window != self.null).then_some(window);
            if at >= there {
                let block = &tokens[at * self.tokens_per_block..(at + 1) * self.tokens_per_block];
                let node = self.tree.attach(&sequence.namespace, &path, block, full, live);
                path.push(node);
                continue;
            }
            twins.push(full);
            match (self.tree.window(path[at]), live) {
                (None, Some(window)) => self.tree.revive(path[at], window),
                (_, Some(window)) => window_twins.push(window),
                (_, None) => {}
            }
        }
        let registered = whole.saturating_sub(there.max(matched));
        // Only `pass` moves the window on: a step under way may still read.
        let window_from = sequence.passed.min(whole);
        sequence.blocks[..whole].iter_mut().zip(&path).for_each(|(block, id)| *block = self.tree.full(*id));
        for (at, (block, id)) in sequence.window_blocks[..whole].iter_mut().zip(&path).enumerate() {
            *block = if at < window_from { self.null } else { self.tree.window(*id).unwrap_or(self.null) };
        }
        self.tree.lock(&path, window_from);
        let before = std::mem::replace(&mut sequence.lock.path, path);
        let before_from = std::mem::replace(&mut sequence.lock.window_from, window_from);
        let freed = self.tree.unlock(&before, before_from);
        self.take_back(freed);
        self.full.give_back_taken(&twins);
        self.window.give_back_taken(&window_twins);
        Ok(Kept { matched, registered, returned: twins.len() })
    }

    /// Ends a sequence: its whole blocks are kept for others, the rest is free at once. `tokens` are all whose KV is there.
    ///
    /// A sequence that is dropped instead keeps nothing of its own: that is how one is retracted when blocks are short.
    ///
    /// # Errors
    /// The sequence, with what [`keep`](Self::keep) refuses.
    pub fn finish(
        &mut self,
        mut sequence: WindowSequence,
        tokens: &[u32],
    ) -> Result<Kept, Box<(WindowSequence, PoolError)>> {
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

    /// Evicts least recently used ends of prefixes, full and window parts, until `blocks` of the full pool are freed, or nothing can be
    /// evicted. Returns how many were, which may be more.
    pub fn evict(&mut self, blocks: usize) -> usize {
        self.settle();
        let mut evicted = 0;
        while evicted < blocks
            && let Some(freed) = self.tree.evict_leaf()
        {
            evicted += freed.full.len();
            self.count(&freed);
            self.take_back(freed);
        }
        evicted
    }

    /// Evicts least recently used window parts until `blocks` of the window pool are freed, or nothing can be evicted. The prefixes stay, but
    /// for ends that nobody could use. Returns how many were.
    pub fn evict_windows(&mut self, blocks: usize) -> usize {
        self.settle();
        let mut evicted = 0;
        while evicted < blocks
            && let Some(freed) = self.tree.evict_window()
        {
            evicted += freed.window.len();
            self.count(&freed);
            self.take_back(freed);
        }
        evicted
    }

    /// Forgets every prefix, because the weights changed: nothing that is there now is found again, nor what running sequences computed
    /// before. Returns how many blocks of the full pool are free by it.
    pub fn clear(&mut self) -> usize {
        self.epoch += 1;
        self.tree.cut_off();
        self.evict(usize::MAX)
    }

    /// How the blocks are used. What was dropped elsewhere is taken in first.
    pub fn counts(&mut self) -> WindowRadixCounts {
        self.settle();
        let TreeCounts { nodes: cached, tombstones, locked, window_locked } = self.tree.counts();
        let (full, window) = (self.full.counts(), self.window.counts());
        WindowRadixCounts {
            total: full.total,
            free: full.free,
            window_total: window.total,
            window_free: window.free,
            cached,
            tombstones,
            locked,
            window_locked,
            ..self.counts
        }
    }

    /// Whole blocks that a window needs before the next token.
    fn needed(&self) -> usize {
        (self.window_tokens - 1).div_ceil(self.tokens_per_block)
    }

    fn own(&self, sequence: &WindowSequence) -> Result<(), PoolError> {
        self.full.own(&sequence.own.0)
    }

    fn settle(&mut self) {
        for (path, window_from) in self.unlocks.take() {
            let freed = self.tree.unlock(&path, window_from);
            self.take_back(freed);
        }
    }

    fn count(&mut self, freed: &Freed) {
        self.counts.evicted_total += freed.full.len() as u64;
        self.counts.window_evicted_total += freed.window.len() as u64;
    }

    fn take_back(&mut self, freed: Freed) {
        self.full.give_back_taken(&freed.full);
        self.window.give_back_taken(&freed.window);
    }
}

fn without_last(prompt: &[u32]) -> &[u32] {
    &prompt[..prompt.len().saturating_sub(1)]
}

#[cfg(test)]
mod tests;
