//! Attention of new tokens over a paged KV cache: prefill in chunks and decode in batches, by one entry.

mod kernel;
mod rows;
mod simd;
mod softmax;
mod threads;
mod widen;
mod work;

#[cfg(test)]
mod tests;

use std::num::NonZeroU32;
use std::ops::Range;

use kvferry_protocol::BlockId;

pub use threads::Threads;

use crate::error::KernelError;
use crate::memory::{CacheShape, GuardMode, HostKvCache, KvCacheView};

/// One sequence of a batch.
#[derive(Clone, Debug)]
pub struct AttentionSequence<'a> {
    /// Its block table: token `i` lies in block `blocks[i / tokens_per_block]`. Blocks that a sliding window has left behind
    /// are not read, and need not exist.
    pub blocks: &'a [BlockId],
    /// Tokens whose keys and values are stored, those of `queries` among them.
    pub context_len: usize,
    /// Its rows of the batch's query tensor: the last `queries.len()` tokens of the context, in order. One row is a decode
    /// step, more are a chunk of a prompt.
    pub queries: Range<usize>,
}

/// The new tokens of some sequences.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBatch<'a> {
    /// f32 `[tokens, q_heads, key_dim]`.
    pub queries: &'a [f32],
    /// Query heads; a multiple of the cache's KV heads. Query head `h` reads KV head `h / (q_heads / kv_heads)`.
    pub q_heads: usize,
    /// The sequences, in ascending order of their query rows. They may share blocks.
    pub sequences: &'a [AttentionSequence<'a>],
}

/// Where values come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Values {
    /// The cache's second plane.
    Plane,
    /// The first `value_dim` elements of each key: MLA's one plane holds `[latent, rope]` and values are the latent.
    /// Source: DeepSeek-V2, arXiv 2405.04434, section 2.1, with the up-projections absorbed.
    KeyPrefix {
        /// Elements of a value; at most the key's.
        value_dim: usize,
    },
}

/// What the model asks of attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionOptions<'a> {
    /// What scores are multiplied by, usually `1 / sqrt(key_dim)`.
    pub scale: f32,
    /// How many positions a token sees, its own among them; all before it if `None`.
    pub window: Option<NonZeroU32>,
    /// One logit for each query head that joins the softmax's denominator and has no value. Source: gpt-oss,
    /// `eager_attention_forward` in transformers `models/gpt_oss/modeling_gpt_oss.py`.
    pub sinks: Option<&'a [f32]>,
    /// Scores become `cap * tanh(score / cap)`, before sinks join.
    pub soft_cap: Option<f32>,
    /// Where values come from.
    pub values: Values,
}

impl AttentionOptions<'_> {
    /// Causal attention over two planes, without window, sinks or cap.
    #[must_use]
    pub const fn causal(scale: f32) -> Self {
        Self { scale, window: None, sinks: None, soft_cap: None, values: Values::Plane }
    }
}

/// Most query heads; keeps products of sizes far from overflow.
const MAX_Q_HEADS: usize = 1 << 16;

/// Largest head dimension, of keys and of values.
pub(crate) const MAX_HEAD_DIM: usize = 1024;

/// Computes causal attention of a batch's new tokens over one layer of a paged cache, which already holds their keys and values.
///
/// `layer` counts within this worker. `out`: f32 `[tokens, q_heads, value_dim]`; rows that belong to no sequence are left as they
/// are. Pages that a query sees are held for reading while the call lasts; slots that none sees may hold anything.
///
/// A row's bits depend on its query, the keys and values that it sees and the options: not on the chunking of the prompt, the
/// batch, the block size, the layout, `threads`, or the CPU (where every backend has fused multiply-add).
///
/// # Errors
/// [`KernelError`] if the layer or a block does not exist, shapes do not match, an option has no meaning, or a page is being
/// written ([`KernelError::PageBusy`]). Nothing is written then.
#[expect(unsafe_code, reason = "the guards are what the kernels ask for")]
pub fn paged_attention(
    cache: &HostKvCache,
    layer: u16,
    batch: &AttentionBatch<'_>,
    options: &AttentionOptions<'_>,
    threads: &Threads,
    out: &mut [f32],
) -> Result<(), KernelError> {
    check(cache.view().shape(), layer, batch, options, out)?;
    let tokens_per_block = cache.layout().shape().tokens_per_block as usize;
    let blocks =
        batch.sequences.iter().flat_map(|sequence| &sequence.blocks[seen_blocks(sequence, options, tokens_per_block)]);
    let _pages = cache.guard_layer(GuardMode::Read, layer, blocks.copied())?;
    // SAFETY: `check` passed, and the pages are held for reading until the end of this function.
    unsafe { work::attend(cache.view(), layer, batch, options, threads, out) };
    Ok(())
}

/// [`paged_attention`] over memory whose pages nobody guards.
///
/// # Errors
/// As [`paged_attention`], except that no page is ever busy.
///
/// # Safety
/// While the call lasts nobody writes the pages of this layer that the batch sees, in any process.
#[expect(unsafe_code, reason = "the caller must keep writers off the pages")]
pub unsafe fn paged_attention_unguarded(
    view: &KvCacheView,
    layer: u16,
    batch: &AttentionBatch<'_>,
    options: &AttentionOptions<'_>,
    threads: &Threads,
    out: &mut [f32],
) -> Result<(), KernelError> {
    check(view.shape(), layer, batch, options, out)?;
    // SAFETY: `check` passed, and the caller keeps writers off the pages.
    unsafe { work::attend(view, layer, batch, options, threads, out) };
    Ok(())
}

/// Which entries of a block table any of the sequence's queries sees; the sequence was checked.
pub(crate) fn seen_blocks(
    sequence: &AttentionSequence<'_>,
    options: &AttentionOptions<'_>,
    tokens_per_block: usize,
) -> Range<usize> {
    if sequence.queries.is_empty() {
        return 0..0;
    }
    let first_position = sequence.context_len - sequence.queries.len();
    let seen_from = (first_position + 1).saturating_sub(window(options));
    seen_from / tokens_per_block..sequence.context_len.div_ceil(tokens_per_block)
}

/// How many positions a token sees at most.
fn window(options: &AttentionOptions<'_>) -> usize {
    options.window.map_or(usize::MAX, |window| window.get() as usize)
}

fn value_dim(shape: CacheShape<'_>, options: &AttentionOptions<'_>) -> usize {
    match options.values {
        Values::Plane => shape.dim(1),
        Values::KeyPrefix { value_dim } => value_dim,
    }
}

pub(crate) fn check(
    shape: CacheShape<'_>,
    layer: u16,
    batch: &AttentionBatch<'_>,
    options: &AttentionOptions<'_>,
    out: &[f32],
) -> Result<(), KernelError> {
    shape.check_layer(layer)?;
    let planes = shape.planes();
    if options.values == Values::Plane && planes < 2 {
        return Err(KernelError::Planes { planes, mend: "set values to KeyPrefix" });
    }
    let (q_heads, kv_heads) = (batch.q_heads, shape.heads());
    if q_heads == 0 || q_heads > MAX_Q_HEADS || !q_heads.is_multiple_of(kv_heads) {
        return Err(KernelError::Heads { q_heads, kv_heads });
    }
    check_options(shape, q_heads, options)?;
    let (key_dim, value_dim) = (shape.dim(0), value_dim(shape, options));
    for dim in [key_dim, value_dim] {
        if dim == 0 || dim > MAX_HEAD_DIM {
            return Err(KernelError::HeadDim { dim, max: MAX_HEAD_DIM });
        }
    }
    let tokens = batch.queries.len() / (q_heads * key_dim);
    let what = "queries f32 [tokens, q_heads, key_dim]";
    check_len(what, batch.queries.len(), tokens * q_heads * key_dim)?;
    check_len("out f32 [tokens, q_heads, value_dim]", out.len(), tokens * q_heads * value_dim)?;
    let mut free_from = 0;
    for (index, sequence) in batch.sequences.iter().enumerate() {
        check_sequence(shape, options, index, sequence, free_from..tokens)?;
        free_from = sequence.queries.end.max(free_from);
    }
    Ok(())
}

fn check_options(shape: CacheShape<'_>, q_heads: usize, options: &AttentionOptions<'_>) -> Result<(), KernelError> {
    let refuse = |option, value: String, mend| Err(KernelError::Option { option, value, mend });
    if !options.scale.is_finite() {
        return refuse("scale", options.scale.to_string(), "use a finite number such as 1 / sqrt(key_dim)");
    }
    if let Some(cap) = options.soft_cap
        && !(cap.is_finite() && cap > 0.0)
    {
        return refuse("soft_cap", cap.to_string(), "use a positive number, or none");
    }
    if let Values::KeyPrefix { value_dim } = options.values
        && value_dim > shape.dim(0)
    {
        return refuse("value_dim", value_dim.to_string(), "a value is a part of its key and cannot be longer");
    }
    if let Some(sinks) = options.sinks {
        check_len("sinks f32 [q_heads]", sinks.len(), q_heads)?;
        if let Some(sink) = sinks.iter().find(|sink| sink.is_nan() || **sink == f32::INFINITY) {
            return refuse("sinks", sink.to_string(), "use finite logits, or -inf for a head without a sink");
        }
    }
    Ok(())
}

fn check_sequence(
    shape: CacheShape<'_>,
    options: &AttentionOptions<'_>,
    index: usize,
    sequence: &AttentionSequence<'_>,
    free: Range<usize>,
) -> Result<(), KernelError> {
    let refuse = |problem| Err(KernelError::Sequence { sequence: index, problem });
    let AttentionSequence { blocks, context_len, queries } = sequence;
    if queries.start > queries.end || (!queries.is_empty() && (queries.start < free.start || queries.end > free.end)) {
        return refuse(format!("query rows {queries:?} are not inside {free:?}; order sequences by their rows"));
    }
    if queries.len() > *context_len {
        let problem = format!("{} queries but a context of {context_len}; count the queries in", queries.len());
        return refuse(problem);
    }
    let tokens_per_block = shape.tokens_per_block();
    let needed = context_len.div_ceil(tokens_per_block);
    if blocks.len() < needed {
        let problem = format!("a context of {context_len} needs {needed} blocks; the table has {}", blocks.len());
        return refuse(problem);
    }
    blocks[seen_blocks(sequence, options, tokens_per_block)].iter().try_for_each(|&block| shape.check_block(block))
}

fn check_len(what: &'static str, found: usize, expected: usize) -> Result<(), KernelError> {
    if found == expected { Ok(()) } else { Err(KernelError::Length { what, found, expected }) }
}
