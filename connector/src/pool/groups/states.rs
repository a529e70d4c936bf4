//! States that are kept where steps end: a block for the running state, one for that of the step before, null between.
//!
//! A step copies the state of the last block into a new one and goes on there, so that what was registered is never written. Blocks for a
//! drafter's states are always the last ones, and move along.
//!
//! Source: `MambaManager` in vLLM's `v1/core/single_type_kv_cache_manager.py`, 0.32.0, mode `align`; without hits inside a block and
//! without checkpoints that a kernel writes on its way.

use kvferry_protocol::BlockId;

use super::table::GroupBlocks;
use super::{GroupError, GroupPool};

impl GroupPool {
    /// How many free blocks a request takes whose table must reach `required` blocks.
    pub(super) fn needed_states(
        &self,
        blocks: &GroupBlocks,
        found: &[BlockId],
        required: usize,
        speculative: usize,
    ) -> usize {
        let fresh = (required + speculative).saturating_sub(found.len() + blocks.table.len());
        let most = if blocks.state.allocated { 1 } else { 1 + speculative };
        fresh.min(most) + self.revived(found)
    }

    pub(super) fn grow_states(
        &mut self,
        group: usize,
        blocks: &mut GroupBlocks,
        required: usize,
        speculative: usize,
    ) -> Result<(), GroupError> {
        let had = blocks.table.len();
        let was_allocated = std::mem::replace(&mut blocks.state.allocated, true);
        if required + speculative <= had {
            return Ok(());
        }
        if was_allocated {
            blocks.state.last = had.checked_sub(1 + speculative);
        } else if had > 0 {
            blocks.state.last = Some(had - 1);
        }
        // Between the last state and the running one nothing is kept.
        let skipped = required.saturating_sub(1);
        if had < skipped {
            self.pool.append(&mut blocks.table, &vec![self.null; skipped - had]);
        }
        if was_allocated {
            let ids = &mut blocks.table.0.ids;
            for at in (had - speculative.min(had)..had).take_while(|at| *at < skipped) {
                let moved = std::mem::replace(&mut ids[at], self.null);
                ids.push(moved);
            }
        }
        let fresh = (required + speculative).saturating_sub(blocks.table.len());
        self.extend(group, blocks, fresh)
    }
}
