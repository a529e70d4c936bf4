//! What the pool refuses, and how to mend it.

use kvferry_protocol::BlockId;

use super::hash::BlockHash;

/// Why the pool did not do what it was asked; nothing was changed then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// A pool without blocks to give out, or of more than the metadata can number.
    #[error(
        "a pool of {blocks} blocks cannot be made: use 1 to {max}, or 2 and more with a null block",
        max = super::BlockPool::MAX_BLOCKS
    )]
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
    /// A sequence is kept under other tokens than it was admitted with.
    #[error(
        "{blocks} blocks of the sequence are shared under other tokens than were given now: give its tokens from the first one on,          as it was admitted"
    )]
    OtherTokens {
        /// How many of its blocks are shared.
        blocks: usize,
    },
    /// The null block stands for KV that nobody needs: it has no content.
    #[error("position {position} is the null block, which is never written or registered: skip it")]
    Null {
        /// Where in the table.
        position: usize,
    },
    /// The pool has no null block to put in a table.
    #[error("this pool has no null block: make it with BlockPool::with_null")]
    NoNull,
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
    /// Only vLLM's hashes have extra keys; the others take what they need when the hasher is made.
    #[error("this hash has no extra keys: make a vLLM hasher, or put adapter and salt into the scope")]
    NoExtras,
    /// CPython writes a second reference to one string object otherwise than a second string, and which it is cannot be known.
    #[error(
        "block {block} has two extra keys of the same text: its pickle cannot be foretold, so do not share it, or use CBOR"
    )]
    SameText {
        /// The block's place in its sequence.
        block: usize,
    },
    /// A pickle of more than 64 KiB is in frames.
    #[error(
        "block {block} and its extra keys are {bytes} bytes of pickle: no more than 65536 can be hashed, so shorten its keys"
    )]
    LongExtras {
        /// The block's place in its sequence.
        block: usize,
        /// Bytes of the pickle.
        bytes: usize,
    },
    /// A block of more tokens might not fit a frame of a pickle.
    #[error("blocks of {tokens_per_block} tokens cannot be hashed as pickles: use {limit} at most, or CBOR")]
    LongBlock {
        /// Tokens in a block.
        tokens_per_block: usize,
        /// The most.
        limit: usize,
    },
    /// An engine that hashes without cryptography draws a seed of its own.
    #[error("xxhash needs the engine's seed: set PYTHONHASHSEED there and give the same here, or use sha256")]
    SecretSeed,
    /// A seed or a first parent that cannot be one.
    #[error("a seed of {bytes} bytes cannot be used: a text has at most 4096, the first parent itself 1 to 32")]
    Seed {
        /// Its length.
        bytes: usize,
    },
}
