//! A request's place in a cache with a window: its blocks in both pools, and the locks on those that it shares.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use kvferry_protocol::BlockId;

use super::super::returns::Returns;
use super::super::{BlockTable, PoolError};
use super::tree::NodeId;

/// A lock on a path, and on its window parts from a block on.
pub(super) struct PathLock {
    pub(super) path: Vec<NodeId>,
    pub(super) window_from: usize,
    pub(super) unlocks: Arc<Returns<(Vec<NodeId>, usize)>>,
}

impl Drop for PathLock {
    fn drop(&mut self) {
        if !self.path.is_empty() {
            self.unlocks.push((std::mem::take(&mut self.path), self.window_from));
        }
    }
}

/// One request's tokens in a [`WindowRadixCache`](super::WindowRadixCache).
///
/// Its first blocks belong to the tree, which may not evict them as long as this lives; the rest is its own. Dropping it, on any thread,
/// frees its own blocks and unlocks the others at the cache's next call.
pub struct WindowSequence {
    pub(super) namespace: Box<[u8]>,
    pub(super) lock: PathLock,
    pub(super) own: BlockTable,
    /// Null where the window has passed.
    pub(super) own_window: BlockTable,
    /// All blocks of the full layers: the tree's, then its own.
    pub(super) blocks: Vec<BlockId>,
    /// All blocks of the window layers; null where the window has passed.
    pub(super) window_blocks: Vec<BlockId>,
    /// So many of its first blocks the window has passed.
    pub(super) passed: usize,
    pub(super) tokens_per_block: usize,
    pub(super) epoch: u64,
}

impl WindowSequence {
    /// The block table of layers that keep all.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// The block table of layers with a window, numbers of the window pool: null (0) where the window has passed.
    #[must_use]
    pub fn window_blocks(&self) -> &[BlockId] {
        &self.window_blocks
    }

    /// How many of its first tokens are in blocks that others may share, and nobody writes.
    #[must_use]
    pub fn shared_tokens(&self) -> usize {
        self.lock.path.len() * self.tokens_per_block
    }

    /// How many tokens have a slot.
    #[must_use]
    pub fn capacity_tokens(&self) -> usize {
        self.blocks.len() * self.tokens_per_block
    }

    /// Appends the slots of the tokens at `positions` in the full pool, and in the window pool: where the next step stores their KV.
    ///
    /// # Errors
    /// [`PoolError::Position`] for tokens without a slot; [`PoolError::Null`] for a token that the window has passed.
    pub fn slots(&self, positions: Range<usize>, full: &mut Vec<u64>, window: &mut Vec<u64>) -> Result<(), PoolError> {
        let (Range { start, end }, len) = (positions, self.capacity_tokens());
        if start > end || end > len {
            return Err(PoolError::Position { start, end, len });
        }
        let tokens = self.tokens_per_block;
        if let Some(at) = (start..end).find(|at| self.window_blocks[at / tokens].get() == 0) {
            return Err(PoolError::Null { position: at / tokens });
        }
        let slot =
            |blocks: &[BlockId], at: usize| u64::from(blocks[at / tokens].get()) * tokens as u64 + (at % tokens) as u64;
        full.extend((start..end).map(|at| slot(&self.blocks, at)));
        window.extend((start..end).map(|at| slot(&self.window_blocks, at)));
        Ok(())
    }
}

impl fmt::Debug for WindowSequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shared = self.lock.path.len();
        write!(f, "WindowSequence({shared} shared of {:?}, windows {:?})", self.blocks, self.window_blocks)
    }
}
