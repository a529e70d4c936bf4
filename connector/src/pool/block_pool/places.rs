//! What cache groups ask of a pool: blocks found one by one, and put at their places in a table.

use kvferry_protocol::BlockId;

use super::super::hash::BlockHash;
use super::super::table::{BlockTable, HeldBy};
use super::BlockPool;

impl BlockPool {
    /// The registered block of a hash. Changes nothing.
    pub(in crate::pool) fn cached(&self, hash: &BlockHash) -> Option<BlockId> {
        self.by_hash.get(hash)
    }

    /// The hash under which a block is registered; none for the null block.
    pub(in crate::pool) fn hash_of(&self, id: BlockId) -> Option<BlockHash> {
        self.block(id).hash
    }

    /// Whether nobody holds a block.
    pub(in crate::pool) fn is_free(&self, id: BlockId) -> bool {
        self.free.contains(id.get())
    }

    /// Appends blocks that are registered, or null, to a table of this pool, which holds them from then on.
    pub(in crate::pool) fn append(&mut self, table: &mut BlockTable, ids: &[BlockId]) {
        ids.iter().for_each(|id| self.hold(*id, HeldBy::Request));
        table.0.ids.extend_from_slice(ids);
    }
}
