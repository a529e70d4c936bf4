//! A request's place in a radix cache: its blocks, its slots, and the lock on those that it shares.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use kvferry_protocol::BlockId;

use super::tree::NodeId;
use super::{BlockTable, PoolError, Returns};

/// A lock on a node and all above it.
pub(super) struct Lock {
    pub(super) node: NodeId,
    pub(super) unlocks: Arc<Returns<NodeId>>,
}

impl Drop for Lock {
    fn drop(&mut self) {
        self.unlocks.push(self.node);
    }
}

/// One request's tokens in a [`RadixCache`](super::RadixCache).
///
/// Its first blocks belong to the tree, which may not evict them as long as this lives; the rest is its own. Dropping it, on any thread,
/// frees its own blocks, the last one first, and unlocks the others at the cache's next call.
pub struct Sequence {
    pub(super) namespace: Box<[u8]>,
    pub(super) lock: Lock,
    /// So many of its blocks are the tree's.
    pub(super) shared: usize,
    pub(super) own: BlockTable,
    /// Blocks of its own that the tree's replaced, and that something may still read.
    pub(super) twins: BlockTable,
    /// All blocks: the tree's, then its own.
    pub(super) blocks: Vec<BlockId>,
    pub(super) tokens_per_block: usize,
    pub(super) epoch: u64,
}

impl Sequence {
    /// Its block table, in the order of its tokens.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// How many blocks it holds beside those: the tree's replaced them, and a transfer may still read them.
    #[must_use]
    pub fn replaced_blocks(&self) -> usize {
        self.twins.len()
    }

    /// How many of its first tokens are in blocks that others may share, and nobody writes.
    #[must_use]
    pub fn shared_tokens(&self) -> usize {
        self.shared * self.tokens_per_block
    }

    /// How many tokens have a slot.
    #[must_use]
    pub fn capacity_tokens(&self) -> usize {
        self.blocks.len() * self.tokens_per_block
    }

    /// Appends the slots of the tokens at `positions`: where the next step stores their KV (SGLang's `out_cache_loc`, vLLM's
    /// `slot_mapping`).
    ///
    /// # Errors
    /// [`PoolError::Position`] for tokens without a slot.
    pub fn slots(&self, positions: Range<usize>, slots: &mut Vec<u64>) -> Result<(), PoolError> {
        let (Range { start, end }, len) = (positions, self.capacity_tokens());
        if start > end || end > len {
            return Err(PoolError::Position { start, end, len });
        }
        let tokens = self.tokens_per_block;
        slots.extend(
            (start..end).map(|at| u64::from(self.blocks[at / tokens].get()) * tokens as u64 + (at % tokens) as u64),
        );
        Ok(())
    }
}

impl fmt::Debug for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sequence({} shared of {:?})", self.shared, self.blocks)
    }
}
