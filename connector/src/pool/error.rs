//! What the pool refuses, and how to mend it.

use kvferry_protocol::BlockId;

use super::hash::BlockHash;

/// Why the pool did not do what it was asked; nothing was changed then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// A pool of no blocks, or of more than the metadata can number.
    #[error("a pool of {blocks} blocks cannot be made: use 1 to {max}", max = super::BlockPool::MAX_BLOCKS)]
    Size {
        /// How many were asked for.
        blocks: usize,
    },
    /// Too few blocks are free.
    #[error(
        "{wanted} free blocks are needed and {free} of {total} are free: wait until a request or a transfer ends, \
         preempt one, or give the pool more blocks"
    )]
    Exhausted {
        /// How many the call would take from the free list, cached blocks that it revives among them.
        wanted: usize,
        /// How many are free, cached ones among them.
        free: usize,
        /// How many the pool has.
        total: usize,
    },
    /// The table was made by another pool, whose numbers mean nothing here.
    #[error("the table of {len} blocks belongs to another pool: use the pool that made it")]
    ForeignTable {
        /// How many blocks the table has.
        len: usize,
    },
    /// A position or range outside the table.
    #[error("positions {start}..{end} do not lie in a table of {len} blocks")]
    Position {
        /// The first position.
        start: usize,
        /// One past the last position.
        end: usize,
        /// How many blocks the table has.
        len: usize,
    },
    /// A block that has a hash is not given another one: its bytes would have changed under those who share it.
    #[error("block {block} is registered as {registered}: a registered block never changes, allocate another one")]
    AlreadyRegistered {
        /// The block.
        block: BlockId,
        /// The hash that it has.
        registered: BlockHash,
    },
    /// The block may not be written, since others would see it.
    #[error(
        "block {block} must not be written: it has {holders} holders and is {}registered; allocate another one",
        if *registered { "" } else { "not " }
    )]
    Shared {
        /// The block.
        block: BlockId,
        /// How many tables and leases hold it.
        holders: u32,
        /// Whether the prefix cache can hand it to another request.
        registered: bool,
    },
    /// Only complete blocks have a hash.
    #[error("{found} tokens are not a complete block of {tokens_per_block}: hash it when it is full")]
    IncompleteBlock {
        /// How many tokens were given.
        found: usize,
        /// How many a block has.
        tokens_per_block: usize,
    },
    /// A block has at least one token.
    #[error("blocks of 0 tokens cannot be hashed: tokens_per_block is 1 or more")]
    NoTokens,
}
