//! Sparse decode: which pages of a long context a new token attends to.
//!
//! Beside the pages something small is kept of each: the bounds of its keys ([`KeyBounds`], Quest), or an indexer's keys ([`IndexKeys`], DSA).
//! A query is scored against that, [`PageChoice`] takes the best pages, the first ones (attention sinks) and the last ones (the window), and
//! [`SelectedPages`] is a block table of those alone, with which [`paged_attention`](crate::paged_attention) computes the row as it does
//! any other: keys carry their positions already, and one row sees all before it. If all pages are chosen it is the whole table, and the
//! result is the same to the bit.
//!
//! All heads of a layer read the same pages, as with an indexer; Quest's own choice, one a head, is not here. Rows of a prompt, which see
//! different pages each, are not selected for.
//!
//! Source: Quest, arXiv 2406.10774, section 3.3; DeepSeek-V3.2, "lightning indexer"; NSA, arXiv 2502.11089, section 3.3.

mod bounds;
mod index;

#[cfg(test)]
mod tests;

use kvferry_protocol::BlockId;

pub use bounds::KeyBounds;
pub use index::IndexKeys;

use crate::Slot;
use crate::error::KernelError;

/// How many pages are read, whatever the context's length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageChoice {
    /// Pages with the best scores, among those that are not read anyway.
    pub best: usize,
    /// Pages at the start, which attention falls back on.
    pub first: usize,
    /// Pages at the end, that of the new token among them: 1 and above.
    pub last: usize,
}

impl PageChoice {
    /// Chooses among pages with these scores, one a page; ascending. Of equal scores the earlier page is taken, and NaN counts as the best, so
    /// that it is not hidden.
    #[must_use]
    pub fn choose(&self, scores: &[f32]) -> Vec<usize> {
        let pages = scores.len();
        let tail = pages.saturating_sub(self.last.max(1));
        let first = self.first.min(tail);
        let mut between: Vec<usize> = (first..tail).collect();
        let key = |page: &usize| if scores[*page].is_nan() { f32::INFINITY } else { scores[*page] };
        let order = |left: &usize, right: &usize| key(right).total_cmp(&key(left)).then(left.cmp(right));
        if self.best < between.len() {
            if self.best > 0 {
                between.select_nth_unstable_by(self.best - 1, order);
            }
            between.truncate(self.best);
            between.sort_unstable();
        }
        (0..first).chain(between).chain(tail..pages).collect()
    }
}

/// A block table of some of a sequence's pages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SelectedPages {
    /// The chosen blocks, in the order of the tokens.
    pub blocks: Vec<BlockId>,
    /// Tokens in them: the context length to attend with.
    pub context_len: usize,
}

impl SelectedPages {
    /// Of a sequence's block table and context length, the pages at `chosen`, ascending.
    ///
    /// # Errors
    /// [`KernelError::Option`] for pages that are not there or not ascending, or without the last one, in which the new token is.
    pub fn of(
        blocks: &[BlockId],
        context_len: usize,
        tokens_per_block: usize,
        chosen: &[usize],
    ) -> Result<Self, KernelError> {
        let pages = context_len.div_ceil(tokens_per_block.max(1));
        let refuse = |mend| KernelError::Option { option: "pages", value: format!("{chosen:?} of {pages}"), mend };
        if pages == 0 || pages > blocks.len() || chosen.last() != Some(&(pages - 1)) {
            return Err(refuse("the last page holds the new token and is always chosen"));
        }
        if chosen.windows(2).any(|pair| pair[0] >= pair[1]) {
            return Err(refuse("give each page once, in ascending order"));
        }
        let missing = (pages - chosen.len()) * tokens_per_block;
        Ok(Self { blocks: chosen.iter().map(|page| blocks[*page]).collect(), context_len: context_len - missing })
    }
}

/// Slots whose keys are noted, checked as [`store_kv`](crate::store_kv) checks them.
fn check_slots(slots: &[Slot], limit: u64) -> Result<(), KernelError> {
    match slots.iter().position(|slot| *slot != Slot::SKIP && slot.get() >= limit) {
        None => Ok(()),
        Some(token) => Err(KernelError::SlotOutOfRange { token, slot: slots[token].get(), slots: limit }),
    }
}

fn check_len(what: &'static str, found: usize, expected: usize) -> Result<(), KernelError> {
    if found == expected { Ok(()) } else { Err(KernelError::Length { what, found, expected }) }
}

fn check_blocks(blocks: &[BlockId], limit: u32) -> Result<(), KernelError> {
    match blocks.iter().find(|block| block.get() >= limit) {
        None => Ok(()),
        Some(block) => Err(KernelError::BlockOutOfRange { block: *block, blocks: limit }),
    }
}
