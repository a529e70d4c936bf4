//! What holds blocks of a prefix cache: a request's table, and a transfer's lease on what a request left.

use std::fmt;

use kvferry_protocol::BlockId;

use crate::pool::{BlockTable, Kept, Sequence};

/// The blocks of one request in a [`PrefixCache`](super::PrefixCache), in the order of its tokens: those that it shares, then its own.
///
/// Dropping it, on any thread, gives them back at the cache's next call: what was registered can be found until it is evicted, the rest
/// is lost.
pub struct RequestTable {
    pub(super) blocks: Blocks,
    /// So many blocks were found when it was opened.
    pub(super) matched: usize,
    /// So many of its first blocks have been looked at by a registration, or were found.
    pub(super) registered: usize,
    /// So many of its own blocks the cache took.
    pub(super) kept: usize,
    pub(super) epoch: u64,
}

pub(super) enum Blocks {
    Hash(BlockTable),
    Radix(Sequence),
}

impl RequestTable {
    pub(super) fn new(blocks: Blocks, matched: usize, epoch: u64) -> Self {
        Self { blocks, matched, registered: matched, kept: 0, epoch }
    }

    /// The blocks, in the order of the request's tokens.
    #[must_use]
    pub fn ids(&self) -> &[BlockId] {
        match &self.blocks {
            Blocks::Hash(table) => table.ids(),
            Blocks::Radix(sequence) => sequence.blocks(),
        }
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ids().len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ids().is_empty()
    }

    /// How many of its first blocks were found when it was opened.
    #[must_use]
    pub const fn matched(&self) -> usize {
        self.matched
    }

    /// How many of its first blocks nobody may write any more: others can find them, or blocks of the same content.
    #[must_use]
    pub const fn registered(&self) -> usize {
        self.registered
    }

    /// How many blocks it holds beside its table: a radix cache replaced them by others of the same content.
    #[must_use]
    pub fn replaced(&self) -> usize {
        match &self.blocks {
            Blocks::Hash(_) => 0,
            Blocks::Radix(sequence) => sequence.replaced_blocks(),
        }
    }

    pub(super) fn kept(&self) -> Kept {
        let (matched, registered) = (self.matched, self.kept);
        Kept { matched, registered, returned: self.len() - matched - registered }
    }
}

impl fmt::Debug for RequestTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestTable({} registered of {:?})", self.registered, self.ids())
    }
}

/// Blocks of a request that is over, which a transfer still reads.
///
/// None of them is reused before it is dropped, on any thread.
#[derive(Debug)]
pub struct PrefixLease(pub(super) RequestTable);

impl PrefixLease {
    /// The blocks, in the order of the request's tokens.
    #[must_use]
    pub fn ids(&self) -> &[BlockId] {
        self.0.ids()
    }
}

impl From<RequestTable> for PrefixLease {
    /// Registers nothing more.
    fn from(table: RequestTable) -> Self {
        Self(table)
    }
}
