//! Cuts a batch into items and runs them on the threads at hand.
#![expect(unsafe_code, reason = "several threads write disjoint rows of one output")]

use super::kernel::TILE;
use super::rows::{Compute, Item, Job, Merge, SCRATCH, SEGMENT, Target};
use super::simd::Backend;
use super::{AttentionBatch, AttentionOptions, AttentionSequence, Threads, Values, value_dim, window};
use crate::memory::KvCacheView;

/// Rows of one item where a sequence has that many; enough to read a tile of K and V once for many rows.
const ITEM_ROWS: usize = 64;

/// Bytes of one tile's keys over all heads of an item: they and as many of values are asked for one tile ahead, and must stay in
/// a second-level cache until their turn.
const AHEAD_BYTES: usize = 128 << 10;

/// A part of memory that several threads write, each its own elements.
#[derive(Clone, Copy)]
struct Shared(*mut f32);

// SAFETY: items write disjoint elements (see `items`), and the memory is borrowed mutably until all of them are done.
unsafe impl Sync for Shared {}

impl Shared {
    fn at(&self, offset: usize) -> *mut f32 {
        self.0.wrapping_add(offset)
    }
}

/// Runs a batch.
///
/// # Safety
/// The arguments were checked against the view, and while the call lasts nobody writes the pages that the batch sees.
pub(super) unsafe fn attend(
    view: &KvCacheView,
    layer: u16,
    batch: &AttentionBatch<'_>,
    options: &AttentionOptions<'_>,
    threads: &Threads,
    out: &mut [f32],
) {
    // SAFETY: the caller's promise.
    unsafe { attend_by(Backend::best(), view, layer, batch, options, threads, out) };
}

/// [`attend`] on a given backend.
///
/// # Safety
/// As [`attend`].
pub(super) unsafe fn attend_by(
    backend: Backend,
    view: &KvCacheView,
    layer: u16,
    batch: &AttentionBatch<'_>,
    options: &AttentionOptions<'_>,
    threads: &Threads,
    out: &mut [f32],
) {
    let values_in_keys = options.values != Values::Plane;
    let job = Job {
        keys: view.plane(layer, 0),
        values: view.plane(layer, if values_in_keys { 0 } else { 1 }),
        dtype: view.dtype(),
        tokens_per_block: view.layout().shape().tokens_per_block as usize,
        queries: batch.queries,
        q_heads: batch.q_heads,
        group: batch.q_heads / view.heads(),
        value_dim: value_dim(view.shape(), options),
        values_in_keys,
        scale: options.scale,
        window: window(options),
        sinks: options.sinks,
        soft_cap: options.soft_cap,
    };
    let count = threads.count_for(work_of(&job, batch));
    let items = items(&job, view.heads(), batch, count);
    let out = Shared(out.as_mut_ptr());
    // Few long items leave threads idle: then each segment is an item of its own.
    if count > 1 && items.len() < 2 * count && items.iter().any(|item| item.segments.len() > 1) {
        attend_by_segment(backend, &job, &items, threads, count, out);
    } else {
        threads.for_each(count, items.len(), |index| {
            let (item, target) = (&items[index], Target::Output(out.at(0)));
            SCRATCH.with(|scratch| backend.run(Compute { job: &job, item, target, scratch }));
        });
    }
}

/// Disjoint items that together are the batch: sequence x KV heads x some query tokens, each over all segments that it sees.
fn items<'a>(job: &Job<'_>, kv_heads: usize, batch: &AttentionBatch<'a>, threads: usize) -> Vec<Item<'a>> {
    let step = (ITEM_ROWS / job.group).max(1);
    let mut items = Vec::new();
    for sequence in batch.sequences {
        let first_position = sequence.context_len - sequence.queries.len();
        for start in sequence.queries.clone().step_by(step) {
            let tokens = start..sequence.queries.end.min(start + step);
            let first_position = first_position + (start - sequence.queries.start);
            let seen = job.visible(first_position).start..first_position + tokens.len();
            let segments = seen.start / SEGMENT..seen.end.div_ceil(SEGMENT);
            items.push(Item { blocks: sequence.blocks, kv_heads: 0..kv_heads, tokens, first_position, segments });
        }
    }
    // All heads in one item read memory in order; one head an item keeps many rows' state in the nearest cache. Heads are also
    // cut apart where segments alone would not keep all threads busy.
    let parts: usize = items.iter().map(|item| item.segments.len()).sum();
    let busy = if threads > 1 { (2 * threads).div_ceil(parts.max(1)) } else { 1 };
    let heads = |item: &Item<'_>| {
        let many = item.tokens.len() * job.group > ITEM_ROWS / 4;
        let near = AHEAD_BYTES / (TILE * job.keys.dim * job.dtype.bytes());
        let far = job.keys.head_stride() > job.keys.token_stride();
        if many || far { 1 } else { kv_heads.div_ceil(busy).min(near).max(1) }
    };
    let cut = |item: Item<'a>| {
        let heads = heads(&item);
        let starts = (0..kv_heads).step_by(heads);
        starts.map(move |start| Item { kv_heads: start..kv_heads.min(start + heads), ..item.clone() })
    };
    items.into_iter().flat_map(cut).collect()
}

/// Multiply-adds of a batch, roughly.
fn work_of(job: &Job<'_>, batch: &AttentionBatch<'_>) -> usize {
    let seen = |sequence: &AttentionSequence<'_>| sequence.queries.len() * sequence.context_len.min(job.window);
    let seen: usize = batch.sequences.iter().map(seen).sum();
    seen.saturating_mul(job.q_heads * (job.keys.dim + job.value_dim))
}

fn attend_by_segment(
    backend: Backend,
    job: &Job<'_>,
    items: &[Item<'_>],
    threads: &Threads,
    count: usize,
    out: Shared,
) {
    let mut parts = Vec::new();
    let mut starts = Vec::with_capacity(items.len() + 1);
    let mut len = 0;
    for item in items {
        starts.push(len);
        for segment in item.segments.clone() {
            parts.push((Item { segments: segment..segment + 1, ..item.clone() }, len));
            len += job.partial_len(item);
        }
    }
    starts.push(len);
    let mut partials = vec![0.0_f32; len];
    let shared = Shared(partials.as_mut_ptr());
    threads.for_each(count, parts.len(), |index| {
        let (item, start) = &parts[index];
        let target = Target::Partial(shared.at(*start));
        SCRATCH.with(|scratch| backend.run(Compute { job, item, target, scratch }));
    });
    for (index, item) in items.iter().enumerate() {
        let partials = &partials[starts[index]..starts[index + 1]];
        SCRATCH.with(|scratch| backend.run(Merge { job, item, partials, out: out.at(0), scratch }));
    }
}
