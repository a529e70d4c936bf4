//! An indexer's keys: a small vector for each token, with which few small heads say what is worth reading.

use kvferry_protocol::BlockId;

use super::bounds::best;
use super::{check_blocks, check_len, check_slots};
use crate::Slot;
use crate::error::KernelError;

/// One layer's indexer keys, slot by slot beside the pages.
#[derive(Clone, Debug)]
pub struct IndexKeys {
    /// f32 `[blocks, tokens_per_block, dim]`.
    keys: Vec<f32>,
    blocks: u32,
    tokens_per_block: u32,
    dim: usize,
}

impl IndexKeys {
    /// Keys of no tokens.
    #[must_use]
    pub fn new(blocks: u32, tokens_per_block: u32, dim: usize) -> Self {
        Self { keys: vec![0.0; blocks as usize * tokens_per_block as usize * dim], blocks, tokens_per_block, dim }
    }

    /// Takes in the keys of tokens that are stored: f32 `[slots, dim]`. [`Slot::SKIP`] is skipped.
    ///
    /// # Errors
    /// [`KernelError::Length`] or [`KernelError::SlotOutOfRange`]; nothing is noted then.
    pub fn note(&mut self, slots: &[Slot], keys: &[f32]) -> Result<(), KernelError> {
        check_len("index keys f32 [slots, dim]", keys.len(), slots.len() * self.dim)?;
        check_slots(slots, u64::from(self.blocks) * u64::from(self.tokens_per_block))?;
        let stored = slots.iter().zip(keys.chunks_exact(self.dim.max(1))).filter(|(slot, _)| **slot != Slot::SKIP);
        for (slot, key) in stored {
            self.keys[slot.get() as usize * self.dim..][..self.dim].copy_from_slice(key);
        }
        Ok(())
    }

    /// Scores each page of the first `context_len` tokens of a sequence: the largest of its tokens'. A token's is the sum over heads of
    /// `weights[h] * max(0, queries[h] . key)`; `queries` f32 `[heads, dim]`, `weights` f32 `[heads]`.
    ///
    /// # Errors
    /// [`KernelError::Length`] or [`KernelError::BlockOutOfRange`].
    pub fn scores(
        &self,
        blocks: &[BlockId],
        context_len: usize,
        queries: &[f32],
        weights: &[f32],
    ) -> Result<Vec<f32>, KernelError> {
        check_len("index queries f32 [heads, dim]", queries.len(), weights.len() * self.dim)?;
        let tokens = self.tokens_per_block as usize;
        let pages = context_len.div_ceil(tokens.max(1));
        let Some(blocks) = blocks.get(..pages) else {
            return Err(KernelError::Length { what: "block table [pages]", found: blocks.len(), expected: pages });
        };
        check_blocks(blocks, self.blocks)?;
        let token = |slot: usize| -> f32 {
            let key = &self.keys[slot * self.dim..(slot + 1) * self.dim];
            let dot = |query: &[f32]| query.iter().zip(key).map(|(q, k)| q * k).sum::<f32>();
            let heads = queries.chunks_exact(self.dim.max(1)).zip(weights);
            // A NaN stays one, which `max` would hide.
            heads.map(|(query, weight)| weight * best(dot(query), 0.0)).sum()
        };
        let page = |(at, block): (usize, &BlockId)| {
            let first = block.get() as usize * tokens;
            let filled = tokens.min(context_len - at * tokens);
            (first..first + filled).map(token).fold(f32::NEG_INFINITY, best)
        };
        Ok(blocks.iter().enumerate().map(page).collect())
    }
}
