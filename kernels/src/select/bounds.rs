//! Of each page and head the least and the largest element of its keys, dimension by dimension.

use kvferry_protocol::BlockId;

use super::{check_blocks, check_len, check_slots};
use crate::Slot;
use crate::error::KernelError;

/// Bounds of one layer's keys, page by page.
///
/// `2 * heads * dim` f32 a page, whatever its tokens. A query's score against a page is never less than its largest score against a key of
/// it, so a page without a good key may be chosen, and one with the best key of all is not passed over for a page whose bound is lower.
#[derive(Clone, Debug)]
pub struct KeyBounds {
    /// f32 `[blocks, heads, dim]`.
    least: Vec<f32>,
    most: Vec<f32>,
    blocks: u32,
    heads: usize,
    dim: usize,
    tokens_per_block: u32,
}

impl KeyBounds {
    /// Bounds of pages without tokens.
    #[must_use]
    pub fn new(blocks: u32, heads: usize, dim: usize, tokens_per_block: u32) -> Self {
        let len = blocks as usize * heads * dim;
        let (least, most) = (vec![f32::INFINITY; len], vec![f32::NEG_INFINITY; len]);
        Self { least, most, blocks, heads, dim, tokens_per_block }
    }

    /// Takes in keys that are stored: f32 `[slots, heads, dim]`. A token in a block's first slot begins the block anew. A slot that is stored
    /// twice leaves bounds that are too wide, which costs a choice and no result. [`Slot::SKIP`] is skipped.
    ///
    /// # Errors
    /// [`KernelError::Length`] or [`KernelError::SlotOutOfRange`]; nothing is noted then.
    pub fn note(&mut self, slots: &[Slot], keys: &[f32]) -> Result<(), KernelError> {
        let row = self.heads * self.dim;
        check_len("keys f32 [slots, heads, dim]", keys.len(), slots.len() * row)?;
        check_slots(slots, u64::from(self.blocks) * u64::from(self.tokens_per_block))?;
        let stored = slots.iter().zip(keys.chunks_exact(row.max(1))).filter(|(slot, _)| **slot != Slot::SKIP);
        for (slot, key) in stored {
            let tokens = u64::from(self.tokens_per_block);
            let (block, offset) = ((slot.get() / tokens) as usize, slot.get() % tokens);
            let (least, most) = (&mut self.least[block * row..][..row], &mut self.most[block * row..][..row]);
            if offset == 0 {
                least.fill(f32::INFINITY);
                most.fill(f32::NEG_INFINITY);
            }
            for ((least, most), element) in least.iter_mut().zip(most).zip(key) {
                *least = least.min(*element);
                *most = most.max(*element);
            }
        }
        Ok(())
    }

    /// Scores each of a sequence's pages for one row of queries, f32 `[q_heads, dim]`: the largest of any head, as head `h` reads KV head
    /// `h / (q_heads / heads)`. Pages without tokens score minus infinity.
    ///
    /// # Errors
    /// [`KernelError::Heads`], [`KernelError::Length`] or [`KernelError::BlockOutOfRange`].
    pub fn scores(&self, blocks: &[BlockId], q_heads: usize, query: &[f32]) -> Result<Vec<f32>, KernelError> {
        if self.heads == 0 || q_heads == 0 || !q_heads.is_multiple_of(self.heads) {
            return Err(KernelError::Heads { q_heads, kv_heads: self.heads });
        }
        check_len("query f32 [q_heads, dim]", query.len(), q_heads * self.dim)?;
        check_blocks(blocks, self.blocks)?;
        let group = q_heads / self.heads;
        let head = |block: &BlockId, head: usize| {
            let at = (block.get() as usize * self.heads + head / group) * self.dim;
            let bounds = self.least[at..at + self.dim].iter().zip(&self.most[at..at + self.dim]);
            let query = &query[head * self.dim..(head + 1) * self.dim];
            let empty = self.least[at..at + self.dim].first().is_some_and(|least| *least == f32::INFINITY);
            if empty {
                f32::NEG_INFINITY
            } else {
                bounds.zip(query).map(|((least, most), q)| (q * least).max(q * most)).sum()
            }
        };
        let page = |block: &BlockId| (0..q_heads).map(|at| head(block, at)).fold(f32::NEG_INFINITY, best);
        Ok(blocks.iter().map(page).collect())
    }
}

/// The larger one, or NaN if either is.
pub(super) fn best(left: f32, right: f32) -> f32 {
    if left.is_nan() || left > right { left } else { right }
}
