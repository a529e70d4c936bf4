//! Which blocks of each group a transfer carries: of a window what it has not passed, of a state one block.
//!
//! Source: the NIXL connector of vLLM: clipping to the window, no placeholders, one block of a state.

use std::ops::Range;

use super::{GroupError, GroupPool, GroupTable, LayerKind, Shipment};

impl GroupPool {
    /// Leases what a peer needs to go on behind `tokens` tokens. A group of which nothing is needed is left out.
    ///
    /// # Errors
    /// [`GroupError::ForeignTable`] or [`GroupError::Pool`].
    pub fn ship(&mut self, table: &GroupTable, tokens: usize) -> Result<Vec<Shipment>, GroupError> {
        self.own(table)?;
        let mut shipments = vec![];
        for (group, places) in self.to_fill(0, tokens).into_iter().enumerate() {
            let blocks = &table.groups[group].table;
            let end = match self.config.groups[group].spec.kind {
                LayerKind::Cross => blocks.len(),
                _ => places.end.min(blocks.len()),
            };
            let start = places.start.min(end);
            // What a window keeps for longer than it is needed may have gone before.
            let nulls = blocks.ids()[start..end].iter().rposition(|id| *id == self.null);
            let first = nulls.map_or(start, |at| start + at + 1);
            if first < end {
                let lease = self.pool.lease(blocks, first..end).map_err(|source| GroupError::Pool { group, source })?;
                shipments.push(Shipment { group, first, lease });
            }
        }
        Ok(shipments)
    }

    /// Per group the places of a table that must be filled from elsewhere, if its first `local_tokens` are there and it is to go on behind
    /// `total_tokens`. A [`Shipment`] covers them, place for place. An encoder's tokens are none of these.
    #[must_use]
    pub fn to_fill(&self, local_tokens: usize, total_tokens: usize) -> Vec<Range<usize>> {
        let of_group = |rule: &super::GroupRule| {
            let spec = &rule.spec;
            let size = spec.tokens_per_block as usize;
            let end = if local_tokens < total_tokens { total_tokens.div_ceil(size) } else { 0 };
            let local = local_tokens / size;
            let first = match spec.kind {
                LayerKind::State { .. } => end.saturating_sub(1),
                LayerKind::Cross | LayerKind::EncoderOnly => end,
                _ => local.max(spec.passed_tokens(total_tokens) / size),
            };
            first.min(end)..end
        };
        self.config.groups.iter().map(of_group).collect()
    }
}
