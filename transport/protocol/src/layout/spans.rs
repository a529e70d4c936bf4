//! Cutting a range of tokens at the block edges of two sides.

use super::view::{CacheView, PlanError, Side};
use crate::ids::BlockId;
use std::ops::Range;

/// Where a span lies: the longest stretch of tokens inside one source block and one destination block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pair {
    /// The block that is read.
    pub src_block: BlockId,
    /// The span's first token in that block.
    pub src_token: u32,
    /// The block that is written.
    pub dst_block: BlockId,
    /// The span's first token in that block.
    pub dst_token: u32,
    /// The span's first token in the sequence.
    pub token: u32,
}

/// The spans of equal length, in the order of the sequence.
pub(super) struct SpanGroup {
    /// Tokens of each span.
    pub(super) tokens: u32,
    pub(super) pairs: Vec<Pair>,
}

/// Cuts `tokens` into spans and groups them by length, in the order of each length's first span.
pub(super) fn cut(src: &CacheView<'_>, dst: &CacheView<'_>, tokens: &Range<u32>) -> Result<Vec<SpanGroup>, PlanError> {
    let mut groups: Vec<SpanGroup> = Vec::new();
    let (src_size, dst_size) = (src.layout.shape().tokens_per_block, dst.layout.shape().tokens_per_block);
    let mut token = tokens.start;
    while token < tokens.end {
        let (src_block, src_token) = locate(src, Side::Source, token)?;
        let (dst_block, dst_token) = locate(dst, Side::Destination, token)?;
        let length = (src_size - src_token).min(dst_size - dst_token).min(tokens.end - token);
        let pair = Pair { src_block, src_token, dst_block, dst_token, token };
        match groups.iter_mut().find(|group| group.tokens == length) {
            Some(group) => group.pairs.push(pair),
            None => groups.push(SpanGroup { tokens: length, pairs: vec![pair] }),
        }
        token += length;
    }
    Ok(groups)
}

/// The block that holds a token and the token's place in it; the token is one of the view's.
fn locate(view: &CacheView<'_>, side: Side, token: u32) -> Result<(BlockId, u32), PlanError> {
    let shape = view.layout.shape();
    let place = token - view.first_token;
    let block = view.blocks[(place / shape.tokens_per_block) as usize];
    if block.get() >= shape.blocks {
        return Err(PlanError::Block { side, block, blocks: shape.blocks });
    }
    Ok((block, place % shape.tokens_per_block))
}

/// Checks that no two of the selected tokens' blocks are the same.
pub(super) fn check_written_once(dst: &CacheView<'_>, tokens: &Range<u32>) -> Result<(), PlanError> {
    if tokens.is_empty() {
        return Ok(());
    }
    let size = dst.layout.shape().tokens_per_block;
    let first = ((tokens.start - dst.first_token) / size) as usize;
    let last = ((tokens.end - 1 - dst.first_token) / size) as usize;
    let touched = &dst.blocks[first..=last];
    if touched.is_sorted_by(|a, b| a < b) {
        return Ok(());
    }
    let mut sorted = touched.to_vec();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(PlanError::Twice { block: pair[0] }),
        None => Ok(()),
    }
}
