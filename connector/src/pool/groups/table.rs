//! What a request has in the groups: a block table each.

use std::fmt;

use kvferry_protocol::BlockId;

use super::super::{BlockHash, BlockTable, Lease};

/// One request's blocks in every group.
///
/// Dropping it, on any thread, frees them at the pool's next call: group after group, of each the last block first.
/// [`GroupPool::free`](super::GroupPool::free) does the same at once.
pub struct GroupTable {
    pub(super) groups: Vec<GroupBlocks>,
    /// Whether it was given slots: from then on no hit can begin it.
    pub(super) begun: bool,
}

pub(super) struct GroupBlocks {
    pub(super) table: BlockTable,
    /// So many of its first blocks were offered to the prefix cache, or came from it.
    pub(super) cached: usize,
    /// So many of its first blocks are null.
    pub(super) passed: usize,
    /// Of a state that is kept at the ends of steps.
    pub(super) state: StateBlocks,
}

/// Where the states of a request are.
#[derive(Default)]
pub(super) struct StateBlocks {
    /// The block of the step before, which the next step copies from.
    pub(super) last: Option<usize>,
    /// Whether the running state has a block.
    pub(super) allocated: bool,
}

impl GroupTable {
    /// A group's blocks, in the order of the request's tokens; null (0) where nothing is kept.
    ///
    /// # Panics
    /// If there is no such group.
    #[must_use]
    pub fn ids(&self, group: usize) -> &[BlockId] {
        self.groups[group].table.ids()
    }

    /// How many groups it has.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.groups.len()
    }
}

impl fmt::Debug for GroupTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.groups.iter().map(|group| group.table.ids())).finish()
    }
}

/// The longest prefix that all groups can go on behind.
///
/// Nobody holds its blocks yet: a table that begins with it does. If they were evicted meanwhile that is refused.
#[derive(Clone, Debug)]
pub struct Hit {
    /// Per group: blocks in the order of the tokens, null where nothing is needed.
    pub(super) blocks: Vec<Vec<BlockId>>,
    /// Their hashes in the pool.
    pub(super) hashes: Vec<Vec<Option<BlockHash>>>,
    pub(super) tokens: usize,
    pub(super) junction: usize,
}

impl Hit {
    /// How many tokens need not be computed.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Where this request parts from one before whose prefix is longer, but not kept so far in every group; 0 if there is none. It is worth
    /// keeping the next time: see [`Filled::junction`].
    #[must_use]
    pub fn junction(&self) -> usize {
        self.junction
    }

    /// A group's blocks.
    ///
    /// # Panics
    /// If there is no such group.
    #[must_use]
    pub fn ids(&self, group: usize) -> &[BlockId] {
        &self.blocks[group]
    }
}

/// What a request needs in the next step.
///
/// Its tokens, in their order: `computed_tokens` that its table has already; those of `hit`; `external_tokens` that a peer or a tier loads;
/// `new_tokens` that are computed; `lookahead_tokens` that a drafter may write.
#[derive(Clone, Copy, Default, Debug)]
pub struct Ask<'a> {
    /// Tokens whose KV its blocks hold, or will when the steps under way end.
    pub computed_tokens: usize,
    /// What was found for it; only for a table that has not begun.
    pub hit: Option<&'a Hit>,
    /// Tokens behind those that are loaded from elsewhere; only for a table that has not begun. Their blocks have no hash until
    /// [`GroupPool::cache_full_blocks`](super::GroupPool::cache_full_blocks) is told that they are verified.
    ///
    /// A prompt's last token is computed here for its logits, so it is none of them: a window is clipped for the token behind these, and that
    /// of the last one begins a token earlier, perhaps in a block before.
    pub external_tokens: usize,
    /// Tokens to compute, guessed ones among them.
    pub new_tokens: usize,
    /// Slots behind those, for a drafter.
    pub lookahead_tokens: usize,
    /// Of the computed ones, those whose step is not over: what it reads is not freed.
    pub in_flight_tokens: usize,
    /// The encoder's tokens, when it runs; else 0.
    pub encoder_tokens: usize,
    /// All tokens of the request, if it should only begin when all of them fit.
    pub whole_tokens: Option<usize>,
    /// Free blocks to leave for sequences that are under way.
    pub reserved_blocks: usize,
    /// Whether to leave the watermark free, too: for a request that is not running yet beside others that are.
    pub keep_watermark: bool,
}

/// What became of an [`Ask`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Slots {
    /// The table has slots for all of it.
    Given,
    /// It does not fit: wait, or preempt a request. Only what its windows have passed was freed.
    Short {
        /// Free blocks that it would take, or leave free.
        wanted: usize,
        /// Free blocks.
        free: usize,
    },
    /// The state that it would begin with is computed in this very step: ask again in the next.
    NextStep,
}

/// How far a request's KV is there.
#[derive(Clone, Copy, Debug)]
pub struct Filled<'a> {
    /// Its hashes, one for each [`hash_tokens`](super::GroupPool::hash_tokens) tokens, as far as it has any.
    pub hashes: &'a [BlockHash],
    /// Tokens whose KV is in place: computed, or loaded and verified. None that are only guessed.
    pub tokens: usize,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// [`Hit::junction`] of its lookup.
    pub junction: usize,
}

/// Blocks of one group that a transfer reads.
#[derive(Debug)]
pub struct Shipment {
    /// The group.
    pub group: usize,
    /// The place of the first block in the request's table; none of them is null.
    pub first: usize,
    /// The blocks, held until this is dropped.
    pub lease: Lease,
}
