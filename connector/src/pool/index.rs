//! Which hash names which block, and what changed in that.

use std::collections::HashMap;

use kvferry_protocol::BlockId;

use super::hash::BlockHash;

/// What [`BlockPool::take_changes`](super::BlockPool::take_changes) tells, for an engine that publishes [`KvEvent`](crate::events::KvEvent)s:
/// it knows the tokens, the pool does not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PrefixChange {
    /// A block can be found by this hash.
    Stored(BlockHash),
    /// None can any more.
    Removed(BlockHash),
    /// No block can be found by any hash.
    Cleared,
}

/// Registered blocks by their hashes.
#[derive(Debug, Default)]
pub(super) struct PrefixIndex {
    by_hash: HashMap<BlockHash, BlockId>,
    /// What changed since it was taken; none if nobody asked for it.
    changes: Option<Vec<PrefixChange>>,
}

impl PrefixIndex {
    pub(super) fn record(&mut self) {
        self.changes.get_or_insert_default();
    }

    pub(super) fn take_changes(&mut self) -> Vec<PrefixChange> {
        self.changes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub(super) fn get(&self, hash: &BlockHash) -> Option<BlockId> {
        self.by_hash.get(hash).copied()
    }

    pub(super) fn insert(&mut self, hash: BlockHash, block: BlockId) {
        self.by_hash.insert(hash, block);
        self.note(PrefixChange::Stored(hash));
    }

    /// Returns whether it was there.
    pub(super) fn remove(&mut self, hash: &BlockHash) -> bool {
        let was = self.by_hash.remove(hash).is_some();
        if was {
            self.note(PrefixChange::Removed(*hash));
        }
        was
    }

    pub(super) fn clear(&mut self) {
        self.by_hash.clear();
        if let Some(changes) = &mut self.changes {
            // What was stored before is gone with all else.
            changes.clear();
            changes.push(PrefixChange::Cleared);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_hash.len()
    }

    fn note(&mut self, change: PrefixChange) {
        if let Some(changes) = &mut self.changes {
            changes.push(change);
        }
    }
}
