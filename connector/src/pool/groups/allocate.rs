//! Slots for a request's next step, in every group or in none.
//!
//! What windows have passed is freed first. Then it is counted what each group takes, and only if all of it is there are blocks taken: first
//! those that were found, in all groups, so that none of them is evicted for another; then those for loaded tokens; then new ones.
//!
//! Source: `allocate_slots` in vLLM's `v1/core/kv_cache_manager.py`, 0.32.0, and what it calls.

use kvferry_protocol::BlockId;

use super::table::GroupBlocks;
use super::{Ask, GroupError, GroupPool, GroupTable, Hit, LayerKind, Slots, StateKeeping};

/// A request's tokens after a step, as groups count them.
pub(super) struct Extent {
    /// All that need a slot.
    pub(super) tokens: usize,
    /// Without those of a drafter.
    pub(super) main_tokens: usize,
    /// Those that are there before: computed, found and loaded.
    pub(super) total_computed: usize,
    pub(super) encoder_tokens: usize,
    /// Whether to count no more than a request holds at a time.
    capped: bool,
}

impl GroupPool {
    /// Gives a table slots for its request's next step, if there are enough. That there are not is an answer, not an error.
    ///
    /// Nothing enters the prefix cache by it: that is [`cache_full_blocks`](Self::cache_full_blocks), which vLLM calls in the same breath
    /// unless the tokens are loaded.
    ///
    /// # Errors
    /// [`GroupError::Begun`], [`GroupError::StaleHit`], [`GroupError::ForeignTable`]; [`GroupError::Pool`] if blocks were fewer than counted.
    pub fn allocate_slots(&mut self, table: &mut GroupTable, ask: &Ask<'_>) -> Result<Slots, GroupError> {
        self.own(table)?;
        let hit = ask.hit.filter(|hit| hit.tokens > 0);
        let begins = hit.is_some() || ask.external_tokens > 0;
        if begins && table.begun {
            return Err(GroupError::Begun);
        }
        self.check_fresh(hit)?;
        let most = self.config.max_tokens;
        let total_computed = (ask.computed_tokens + hit.map_or(0, |hit| hit.tokens) + ask.external_tokens).min(most);
        let watermark = if ask.keep_watermark { self.config.watermark_blocks } else { 0 };
        let encoder_tokens = ask.encoder_tokens;
        if let Some(whole) = ask.whole_tokens {
            let tokens = whole.min(most);
            let extent = Extent { tokens, main_tokens: tokens, total_computed, encoder_tokens, capped: true };
            if let Some(short) = self.short(table, hit, &extent, watermark) {
                return Ok(short);
            }
        }
        self.pass(table, total_computed.saturating_sub(ask.in_flight_tokens))?;

        let main_tokens = total_computed + ask.new_tokens;
        let tokens = (main_tokens + ask.lookahead_tokens).min(most);
        let extent = Extent { tokens, main_tokens, total_computed, encoder_tokens, capped: false };
        if let Some(short) = self.short(table, hit, &extent, ask.reserved_blocks.saturating_add(watermark)) {
            return Ok(short);
        }
        if begins {
            self.begin(table, hit, ask.external_tokens, total_computed)?;
        }
        table.begun = true;
        for (group, blocks) in table.groups.iter_mut().enumerate() {
            self.grow(group, blocks, &extent)?;
        }
        Ok(Slots::Given)
    }

    /// Frees what windows, chunks and states do not need when `settled_tokens` are computed, and no step under way reads it.
    ///
    /// [`allocate_slots`](Self::allocate_slots) does it too; a request that ended and is still read by a transfer needs it on its own.
    ///
    /// # Errors
    /// [`GroupError::ForeignTable`] or [`GroupError::Pool`].
    pub fn pass(&mut self, table: &mut GroupTable, settled_tokens: usize) -> Result<(), GroupError> {
        self.own(table)?;
        for (group, blocks) in table.groups.iter_mut().enumerate() {
            let spec = &self.config.groups[group].spec;
            let size = spec.tokens_per_block as usize;
            let passed = (spec.passed_tokens(settled_tokens) / size).min(blocks.table.len());
            let refused = |source| GroupError::Pool { group, source };
            if passed > blocks.passed {
                self.pool.skip(&mut blocks.table, blocks.passed..passed).map_err(refused)?;
                blocks.passed = passed;
            }
            // The state of the step before is copied from in this one, and not needed in the next.
            if let Some(last) = blocks.state.last.filter(|last| last + 1 < settled_tokens.div_ceil(size)) {
                self.pool.skip(&mut blocks.table, last..last + 1).map_err(refused)?;
            }
        }
        Ok(())
    }

    /// Why an extent does not fit, if so many blocks are to stay free.
    fn short(&mut self, table: &GroupTable, hit: Option<&Hit>, extent: &Extent, spare: usize) -> Option<Slots> {
        let mut wanted = spare;
        for (group, blocks) in table.groups.iter().enumerate() {
            let found = hit.map_or(&[][..], |hit| hit.ids(group));
            if let (LayerKind::State { .. }, Some(hit)) = (self.config.groups[group].spec.kind, hit)
                && let Some(Some(name)) = hit.hashes[group].last()
                && self.this_step.contains(name)
            {
                return Some(Slots::NextStep);
            }
            wanted = wanted.saturating_add(self.needed(group, blocks, found, extent));
        }
        let free = self.pool.free_blocks();
        (wanted > free).then_some(Slots::Short { wanted, free })
    }

    /// How many free blocks a group takes, those among `found` that nobody holds among them.
    fn needed(&self, group: usize, blocks: &GroupBlocks, found: &[BlockId], extent: &Extent) -> usize {
        let spec = &self.config.groups[group].spec;
        let size = spec.tokens_per_block as usize;
        let has = blocks.table.len();
        if let LayerKind::State { keeping: StateKeeping::StepEnds, speculative_blocks } = spec.kind {
            return self.needed_states(blocks, found, extent.main_tokens.div_ceil(size), speculative_blocks as usize);
        }
        let (tokens, passed) = match spec.kind {
            LayerKind::Cross => (extent.encoder_tokens, 0),
            LayerKind::State { speculative_blocks, .. } => {
                (extent.tokens + size * speculative_blocks as usize, spec.passed_tokens(extent.total_computed))
            }
            _ => (extent.tokens, spec.passed_tokens(extent.total_computed)),
        };
        let mut required = tokens.div_ceil(size);
        if extent.capped
            && let Some(most) = spec.most_blocks(self.config.max_tokens, self.config.in_flight_tokens)
        {
            required = required.min(most);
        }
        let passed = passed / size;
        let fresh = required.saturating_sub(passed.max(has + found.len()));
        fresh + self.revived(found.get(passed.saturating_sub(has)..).unwrap_or_default())
    }

    /// Blocks that were found and nobody holds: taking them takes free ones.
    pub(super) fn revived(&self, found: &[BlockId]) -> usize {
        found.iter().filter(|id| **id != self.null && self.pool.is_free(**id)).count()
    }

    fn check_fresh(&self, hit: Option<&Hit>) -> Result<(), GroupError> {
        let Some(hit) = hit else { return Ok(()) };
        let groups = hit.blocks.iter().zip(&hit.hashes);
        let same = |(ids, names): (&Vec<BlockId>, &Vec<_>)| {
            ids.iter().zip(names).all(|(id, name)| *id == self.null || self.pool.hash_of(*id) == *name)
        };
        let fits = hit.blocks.len() == self.config.groups.len();
        if fits && groups.into_iter().all(same) { Ok(()) } else { Err(GroupError::StaleHit) }
    }

    /// Begins a table with what was found, then gives blocks to tokens that are loaded.
    fn begin(
        &mut self,
        table: &mut GroupTable,
        hit: Option<&Hit>,
        external: usize,
        total: usize,
    ) -> Result<(), GroupError> {
        for (group, blocks) in table.groups.iter_mut().enumerate() {
            let spec = &self.config.groups[group].spec;
            let passed = spec.passed_tokens(total) / spec.tokens_per_block as usize;
            let found = hit.and_then(|hit| hit.ids(group).get(passed..)).unwrap_or_default();
            self.pool.append(&mut blocks.table, &vec![self.null; passed]);
            self.pool.append(&mut blocks.table, found);
            (blocks.passed, blocks.cached) = (passed, blocks.table.len());
        }
        for (group, blocks) in table.groups.iter_mut().enumerate() {
            let spec = &self.config.groups[group].spec;
            let loaded = external.min(total - spec.passed_tokens(total).min(total));
            if loaded > 0 && spec.kind != LayerKind::Cross {
                let fresh = total.div_ceil(spec.tokens_per_block as usize).saturating_sub(blocks.table.len());
                self.extend(group, blocks, fresh)?;
            }
        }
        Ok(())
    }

    fn grow(&mut self, group: usize, blocks: &mut GroupBlocks, extent: &Extent) -> Result<(), GroupError> {
        let spec = &self.config.groups[group].spec;
        let size = spec.tokens_per_block as usize;
        let tokens = match spec.kind {
            LayerKind::Cross => extent.encoder_tokens,
            LayerKind::State { keeping: StateKeeping::StepEnds, speculative_blocks } => {
                let required = extent.main_tokens.div_ceil(size);
                return self.grow_states(group, blocks, required, speculative_blocks as usize);
            }
            LayerKind::State { speculative_blocks, .. } => extent.tokens + size * speculative_blocks as usize,
            _ => extent.tokens,
        };
        let fresh = tokens.div_ceil(size).saturating_sub(blocks.table.len());
        self.extend(group, blocks, fresh)
    }

    pub(super) fn extend(&mut self, group: usize, blocks: &mut GroupBlocks, fresh: usize) -> Result<(), GroupError> {
        self.pool.extend(&mut blocks.table, fresh).map_err(|source| GroupError::Pool { group, source })
    }
}
