//! One item of work: some query rows of one sequence that share a KV head, over a range of positions.
//!
//! Why the bits never vary. Each row (one query token, one query head) is computed by a sequence of operations that depends on
//! its own absolute position alone:
//!
//! 1. Positions are cut into tiles of [`TILE`], beginning at multiples of it. In a tile each score is one dot product (fixed
//!    lanes, fixed tree); positions that the row does not see are left out of every operation, whatever they hold.
//! 2. A tile joins the row's running maximum, denominator and weighted sum (online softmax), tiles in ascending order.
//! 3. Tiles are grouped in segments of [`SEGMENT`] positions, beginning at multiples of it. Each segment starts afresh, and
//!    segments are merged in ascending order; so they may be computed on different threads.
//!
//! Where blocks begin, which rows are computed beside it, what else is in the batch and who computes a segment changes which
//! addresses are read and when, but no operand and no order.
#![expect(unsafe_code, reason = "hands scratch rows and KV runs to the inner loops, and writes rows of the output")]

use std::cell::RefCell;
use std::ops::Range;

use kvferry_protocol::BlockId;

use super::kernel::{Ahead, Band, Runs, TILE, dots, weigh};
use super::simd::{Bf16, Element, F16, F32, LANES, Simd, Work, exp, exp_one};
use crate::dtype::KvDtype;
use crate::memory::PlanePages;

/// Positions of one segment, a multiple of [`TILE`].
pub(super) const SEGMENT: usize = 1024;

/// From this many rows on, 16-bit tiles are widened to f32 once instead of once for every four rows.
const WIDEN_FROM_ROWS: usize = 16; // benches/attention.rs

/// Replaces each vector of a slice, whose length is a multiple of [`LANES`]. A macro, because a closure is compiled without the
/// backend's instructions.
macro_rules! for_each_vector {
    ($s:expr, $slice:expr, |$v:ident| $new:expr) => {
        for lanes in $slice.chunks_exact_mut(LANES) {
            // SAFETY: a chunk is 16 f32.
            let $v = unsafe { $s.load(lanes.as_ptr()) };
            let new = $new;
            // SAFETY: as above, and it is borrowed mutably.
            unsafe { $s.store(lanes.as_mut_ptr(), new) };
        }
    };
}

/// What all items of one call share.
pub(super) struct Job<'a> {
    pub(super) keys: PlanePages,
    pub(super) values: PlanePages,
    pub(super) dtype: KvDtype,
    pub(super) tokens_per_block: usize,
    /// f32 `[tokens, q_heads, keys.dim]`.
    pub(super) queries: &'a [f32],
    pub(super) q_heads: usize,
    /// Query heads that share a KV head.
    pub(super) group: usize,
    /// Elements of a value.
    pub(super) value_dim: usize,
    /// Whether a value is the first part of its key's run.
    pub(super) values_in_keys: bool,
    pub(super) scale: f32,
    pub(super) window: usize,
    pub(super) sinks: Option<&'a [f32]>,
    pub(super) soft_cap: Option<f32>,
}

/// Some rows: `tokens` of one sequence's queries x the group of one KV head, over some segments.
#[derive(Clone, Debug)]
pub(super) struct Item<'a> {
    pub(super) blocks: &'a [BlockId],
    pub(super) kv_head: usize,
    /// Rows of the batch's query tensor.
    pub(super) tokens: Range<usize>,
    /// Absolute position of the first of them.
    pub(super) first_position: usize,
    pub(super) segments: Range<usize>,
}

/// Where an item's result goes.
#[derive(Clone, Copy)]
pub(super) enum Target {
    /// The output tensor, f32 `[tokens, q_heads, value_dim]`; the item covers all its rows' segments.
    Output(*mut f32),
    /// One partial state, [`partial_len`] elements; the item covers one segment.
    Partial(*mut f32),
}

impl Job<'_> {
    fn value_vectors(&self) -> usize {
        self.value_dim.div_ceil(LANES)
    }

    fn key_vectors(&self) -> usize {
        self.keys.dim.div_ceil(LANES)
    }

    /// Positions that the query at `position` sees.
    pub(super) fn visible(&self, position: usize) -> Range<usize> {
        (position + 1).saturating_sub(self.window)..position + 1
    }

    /// Elements of the partial state of an item of `rows` rows: maximum, denominator, weighted sum a row.
    pub(super) fn partial_len(&self, rows: usize) -> usize {
        rows * (2 + self.value_vectors() * LANES)
    }
}

/// Running softmax of some rows.
#[derive(Default)]
struct State {
    largest: Vec<f32>,
    denominator: Vec<f32>,
    /// `[rows, value_vectors * 16]`.
    sums: Vec<f32>,
}

impl State {
    fn reset(&mut self, rows: usize, width: usize) {
        refill(&mut self.largest, rows, f32::NEG_INFINITY);
        refill(&mut self.denominator, rows, 0.0);
        refill(&mut self.sums, rows * width, 0.0);
    }
}

/// Memory that a thread keeps between items.
#[derive(Default)]
pub(super) struct Scratch {
    queries: Vec<f32>,
    scores: Vec<f32>,
    segment: State,
    total: State,
    keys: Vec<f32>,
    values: Vec<f32>,
    bands: Vec<(usize, usize, Range<usize>)>,
}

thread_local! {
    /// This thread's, for [`Compute`] and [`Merge`].
    pub(super) static SCRATCH: RefCell<Scratch> = RefCell::default();
}

fn refill(vec: &mut Vec<f32>, len: usize, with: f32) {
    vec.clear();
    vec.resize(len, with);
}

/// An item to compute.
pub(super) struct Compute<'a> {
    pub(super) job: &'a Job<'a>,
    pub(super) item: &'a Item<'a>,
    pub(super) target: Target,
    pub(super) scratch: &'a RefCell<Scratch>,
}

impl Work for Compute<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // The scratch is borrowed outside: no closure may stand between here and the kernels, because a closure is compiled
        // without the backend's instructions.
        let scratch = &mut *self.scratch.borrow_mut();
        match self.job.dtype {
            KvDtype::F32 => self.compute::<S, F32>(s, scratch),
            KvDtype::F16 => self.compute::<S, F16>(s, scratch),
            KvDtype::Bf16 => self.compute::<S, Bf16>(s, scratch),
        }
    }
}

impl Compute<'_> {
    #[inline(always)]
    fn compute<S: Simd, E: Element>(&self, s: S, scratch: &mut Scratch) {
        let (job, item) = (self.job, self.item);
        let (rows, width) = (item.tokens.len() * job.group, job.value_vectors() * LANES);
        self.scale_queries(&mut scratch.queries);
        refill(&mut scratch.scores, rows * TILE, 0.0);
        scratch.total.reset(rows, width);
        self.start_at_sinks(&mut scratch.total);
        let last_position = item.first_position + item.tokens.len() - 1;
        let seen = job.visible(item.first_position).start..last_position + 1;
        for segment in item.segments.clone() {
            let positions = segment * SEGMENT..(segment + 1) * SEGMENT;
            scratch.segment.reset(rows, width);
            let tiles = positions.start.max(seen.start) / TILE..positions.end.min(seen.end).div_ceil(TILE);
            let mut keys = self.runs(&job.keys, tiles.start * TILE, &seen);
            for tile in tiles {
                let next_keys = self.runs(&job.keys, (tile + 1) * TILE, &seen);
                self.tile::<S, E>(s, tile * TILE, &seen, (&keys, &next_keys), scratch);
                keys = next_keys;
            }
            match self.target {
                Target::Output(_) => self.merge(s, &positions, scratch, width),
                Target::Partial(to) => {
                    let State { largest, denominator, sums } = &scratch.segment;
                    copy_to(largest, to);
                    copy_to(denominator, to.wrapping_add(rows));
                    copy_to(sums, to.wrapping_add(2 * rows));
                }
            }
        }
        if let Target::Output(out) = self.target {
            self.write(s, &mut scratch.total, width, out);
        }
    }

    /// Copies this item's query rows, times the scale, padded with zeros to whole vectors.
    fn scale_queries(&self, to: &mut Vec<f32>) {
        let (job, item) = (self.job, self.item);
        let (dim, padded) = (job.keys.dim, job.key_vectors() * LANES);
        to.clear();
        for token in item.tokens.clone() {
            let first = (token * job.q_heads + item.kv_head * job.group) * dim;
            for query in job.queries[first..first + job.group * dim].chunks_exact(dim) {
                to.extend(query.iter().map(|x| x * job.scale));
                to.resize(to.len().next_multiple_of(padded), 0.0);
            }
        }
    }

    /// A sink is a score without a value: it begins the denominator.
    fn start_at_sinks(&self, total: &mut State) {
        let Some(sinks) = self.job.sinks else { return };
        let group = self.job.group;
        let own = &sinks[self.item.kv_head * group..(self.item.kv_head + 1) * group];
        for (row, largest) in total.largest.iter_mut().enumerate() {
            // A sink of -inf takes no part, and must not meet a maximum of -inf.
            *largest = own[row % group];
            total.denominator[row] = if own[row % group] == f32::NEG_INFINITY { 0.0 } else { 1.0 };
        }
    }

    /// Adds one tile to the running segment. `keys`: the runs of this tile and of the next.
    #[inline(always)]
    fn tile<S: Simd, E: Element>(
        &self,
        s: S,
        start: usize,
        seen: &Range<usize>,
        (keys, next_keys): (&Runs, &Runs),
        scratch: &mut Scratch,
    ) {
        let job = self.job;
        let range = in_tile(seen, start);
        self.find_bands(start, &mut scratch.bands);
        let values = if job.values_in_keys { *keys } else { self.runs(&job.values, start, seen) };
        let value_bytes = if job.values_in_keys { 0 } else { job.value_dim * E::BYTES };
        let ahead_of_scores = Ahead { runs: &values, bytes: value_bytes };
        let ahead_of_values = Ahead { runs: next_keys, bytes: job.keys.dim * E::BYTES };
        let many = E::BYTES < 4 && self.item.tokens.len() * job.group >= WIDEN_FROM_ROWS;
        if many || !job.keys.dim.is_multiple_of(LANES) {
            let keys = widen::<S, E>(s, keys, &range, job.keys.dim, &mut scratch.keys);
            self.score::<S, F32>(s, &keys, ahead_of_scores, scratch);
        } else {
            self.score::<S, E>(s, keys, ahead_of_scores, scratch);
        }
        if many || !job.value_dim.is_multiple_of(LANES) {
            let values = widen::<S, E>(s, &values, &range, job.value_dim, &mut scratch.values);
            self.weigh::<S, F32>(s, &values, ahead_of_values, scratch);
        } else {
            self.weigh::<S, E>(s, &values, ahead_of_values, scratch);
        }
    }

    /// Where the runs of a tile's positions begin; null outside `seen`.
    #[inline(always)]
    fn runs(&self, pages: &PlanePages, start: usize, seen: &Range<usize>) -> Runs {
        let mut runs = [std::ptr::null(); TILE];
        let range = in_tile(seen, start);
        let mut at = range.start;
        while at < range.end {
            let (block, token) = ((start + at) / self.job.tokens_per_block, (start + at) % self.job.tokens_per_block);
            let count = (self.job.tokens_per_block - token).min(range.end - at);
            let mut run = pages.run(self.item.blocks[block], self.item.kv_head, token).cast_const();
            for entry in &mut runs[at..at + count] {
                *entry = run;
                run = run.wrapping_add(pages.token_stride());
            }
            at += count;
        }
        runs
    }

    /// Groups rows, four at most, that see the same positions of a tile.
    #[inline(always)]
    fn find_bands(&self, start: usize, bands: &mut Vec<(usize, usize, Range<usize>)>) {
        let (job, item) = (self.job, self.item);
        bands.clear();
        for token in 0..item.tokens.len() {
            let visible = job.visible(item.first_position + token);
            let (from, to) = (visible.start.max(start), visible.end.min(start + TILE));
            if from >= to {
                continue;
            }
            let range = from - start..to - start;
            let (mut row, end) = (token * job.group, (token + 1) * job.group);
            if let Some((first, count, last)) = bands.last_mut()
                && *last == range
                && *first + *count == row
            {
                let more = (end - row).min(4 - *count);
                *count += more;
                row += more;
            }
            while row < end {
                let count = (end - row).min(4);
                bands.push((row, count, range.clone()));
                row += count;
            }
        }
    }

    #[inline(always)]
    fn score<S: Simd, E: Element>(&self, s: S, keys: &Runs, mut ahead: Ahead<'_>, scratch: &mut Scratch) {
        let vectors = self.job.key_vectors();
        for (row, count, range) in &scratch.bands {
            let band = Band {
                from: range.start,
                to: range.end,
                queries: scratch.queries[row * vectors * LANES..].as_ptr(),
                scores: scratch.scores[row * TILE..].as_mut_ptr(),
                ahead,
            };
            // The first band asks for all.
            ahead.bytes = 0;
            match count {
                // SAFETY: rows `row..row + count` exist in the scratch, whose rows have these widths. The keys in range are
                // whole runs of checked blocks, or widened copies, which nobody writes during the call: the caller holds their
                // pages for reading.
                1 => unsafe { dots::<S, E, 1>(s, &band, keys, vectors) },
                // SAFETY: as above.
                2 => unsafe { dots::<S, E, 2>(s, &band, keys, vectors) },
                // SAFETY: as above.
                3 => unsafe { dots::<S, E, 3>(s, &band, keys, vectors) },
                // SAFETY: as above.
                _ => unsafe { dots::<S, E, 4>(s, &band, keys, vectors) },
            }
        }
    }

    /// Turns a tile's scores into probabilities and adds the values they weigh.
    #[inline(always)]
    fn weigh<S: Simd, E: Element>(&self, s: S, values: &Runs, mut ahead: Ahead<'_>, scratch: &mut Scratch) {
        let vectors = self.job.value_vectors();
        for (row, count, range) in &scratch.bands {
            let row = *row;
            let mut decay = [0.0; 4];
            for (r, decay) in decay[..*count].iter_mut().enumerate() {
                let scores = &mut scratch.scores[(row + r) * TILE..(row + r + 1) * TILE];
                let scores = scores.try_into().expect("a row of scores is one tile");
                let (largest, sum) = self.probabilities(s, scores, range, scratch.segment.largest[row + r]);
                let before = std::mem::replace(&mut scratch.segment.largest[row + r], largest);
                // e^0 is exactly 1, so the shortcut changes no bit.
                *decay = if before == largest { 1.0 } else { exp_one(s, before - largest) };
                let denominator = &mut scratch.segment.denominator[row + r];
                *denominator = *denominator * *decay + sum;
            }
            let band = Band {
                from: range.start,
                to: range.end,
                queries: std::ptr::null(),
                scores: scratch.scores[row * TILE..].as_mut_ptr(),
                ahead,
            };
            // The first band asks for all.
            ahead.bytes = 0;
            let sums = scratch.segment.sums[row * vectors * LANES..].as_mut_ptr();
            let [a, b, c, d] = decay;
            match count {
                // SAFETY: as in `score`, for values.
                1 => unsafe { weigh::<S, E, 1>(s, &band, values, &[a], sums, vectors) },
                // SAFETY: as above.
                2 => unsafe { weigh::<S, E, 2>(s, &band, values, &[a, b], sums, vectors) },
                // SAFETY: as above.
                3 => unsafe { weigh::<S, E, 3>(s, &band, values, &[a, b, c], sums, vectors) },
                // SAFETY: as above.
                _ => unsafe { weigh::<S, E, 4>(s, &band, values, &[a, b, c, d], sums, vectors) },
            }
        }
    }

    /// Replaces one row's scores by `e^(score - largest)`, 0 outside `range`; returns the new largest score and their sum.
    #[inline(always)]
    fn probabilities<S: Simd>(&self, s: S, scores: &mut [f32; TILE], range: &Range<usize>, before: f32) -> (f32, f32) {
        if let Some(cap) = self.job.soft_cap {
            for_each_vector!(s, scores, |score| soft_cap(s, score, cap));
        }
        scores[..range.start].fill(f32::NEG_INFINITY);
        scores[range.end..].fill(f32::NEG_INFINITY);
        let mut largest = s.splat(f32::NEG_INFINITY);
        for_each_vector!(s, scores, |score| {
            largest = s.max(score, largest);
            score
        });
        let found = s.largest(largest);
        let largest = if found > before { found } else { before };
        let shift = s.splat(largest);
        let mut sum = s.splat(0.0);
        for_each_vector!(s, scores, |score| {
            let probability = exp(s, s.sub(score, shift));
            sum = s.add(sum, probability);
            probability
        });
        (largest, s.sum(sum))
    }

    /// Adds the finished segment to the rows that saw any of its positions.
    #[inline(always)]
    fn merge<S: Simd>(&self, s: S, positions: &Range<usize>, scratch: &mut Scratch, width: usize) {
        let (total, part) = (&mut scratch.total, &scratch.segment);
        for row in 0..total.largest.len() {
            let visible = self.job.visible(self.item.first_position + row / self.job.group);
            if visible.start < positions.end && positions.start < visible.end {
                let sums = row * width..(row + 1) * width;
                merge_row(s, total, row, (part.largest[row], part.denominator[row], &part.sums[sums]));
            }
        }
    }

    /// Writes `sums / denominator` of each row to the output tensor.
    #[inline(always)]
    fn write<S: Simd>(&self, s: S, total: &mut State, width: usize, out: *mut f32) {
        let (job, item) = (self.job, self.item);
        for (row, sums) in total.sums.chunks_exact_mut(width).enumerate() {
            let denominator = s.splat(total.denominator[row]);
            for_each_vector!(s, sums, |sum| s.div(sum, denominator));
            let token = item.tokens.start + row / job.group;
            let head = item.kv_head * job.group + row % job.group;
            copy_to(&sums[..job.value_dim], out.wrapping_add((token * job.q_heads + head) * job.value_dim));
        }
    }
}

/// Partial states of one item's segments, in ascending order, to be merged into the output.
pub(super) struct Merge<'a> {
    pub(super) job: &'a Job<'a>,
    /// The rows; its segments are those of `partials`.
    pub(super) item: &'a Item<'a>,
    pub(super) partials: &'a [f32],
    pub(super) out: *mut f32,
    pub(super) scratch: &'a RefCell<Scratch>,
}

impl Work for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.job.value_vectors() * LANES;
        let rows = self.item.tokens.len() * self.job.group;
        let whole = Compute { job: self.job, item: self.item, target: Target::Output(self.out), scratch: self.scratch };
        let scratch = &mut *self.scratch.borrow_mut();
        scratch.total.reset(rows, width);
        whole.start_at_sinks(&mut scratch.total);
        let partials = self.partials.chunks_exact(self.job.partial_len(rows));
        for (segment, partial) in self.item.segments.clone().zip(partials) {
            scratch.segment.largest.clear();
            scratch.segment.largest.extend_from_slice(&partial[..rows]);
            scratch.segment.denominator.clear();
            scratch.segment.denominator.extend_from_slice(&partial[rows..2 * rows]);
            scratch.segment.sums.clear();
            scratch.segment.sums.extend_from_slice(&partial[2 * rows..]);
            whole.merge(s, &(segment * SEGMENT..(segment + 1) * SEGMENT), scratch, width);
        }
        whole.write(s, &mut scratch.total, width, self.out);
    }
}

#[inline(always)]
fn merge_row<S: Simd>(s: S, total: &mut State, row: usize, part: (f32, f32, &[f32])) {
    let (part_largest, part_denominator, part_sums) = part;
    let before = total.largest[row];
    let largest = if part_largest > before { part_largest } else { before };
    let (a, b) = (exp_one(s, before - largest), exp_one(s, part_largest - largest));
    total.largest[row] = largest;
    total.denominator[row] = total.denominator[row] * a + part_denominator * b;
    let (a, b) = (s.splat(a), s.splat(b));
    let sums = &mut total.sums[row * part_sums.len()..(row + 1) * part_sums.len()];
    let mut parts = part_sums.chunks_exact(LANES);
    for_each_vector!(s, sums, |sum| {
        let part = parts.next().expect("both have a row's width");
        // SAFETY: a chunk is 16 f32.
        let part = unsafe { s.load(part.as_ptr()) };
        s.fma(part, b, s.mul(sum, a))
    });
}

/// `cap * tanh(score / cap)`, with `tanh(y) = 1 - 2 / (e^2y + 1)`. Source: Gemma 2, arXiv 2408.00118, section 2.
#[inline(always)]
fn soft_cap<S: Simd>(s: S, score: S::V, cap: f32) -> S::V {
    let zero = s.splat(0.0);
    // tanh(20) is 1 to the last bit; the limits keep e^2y in range.
    let twice = s.mul(score, s.splat(2.0 / cap));
    let twice = s.max(s.splat(-40.0), twice);
    let twice = s.sub(zero, s.max(s.splat(-40.0), s.sub(zero, twice)));
    let tanh = s.sub(s.splat(1.0), s.div(s.splat(2.0), s.add(exp(s, twice), s.splat(1.0))));
    s.mul(s.splat(cap), tanh)
}

/// Widens the runs of `range` to f32, padded with zeros to whole vectors, and returns where the copies are.
#[inline(always)]
fn widen<S: Simd, E: Element>(s: S, runs: &Runs, range: &Range<usize>, dim: usize, to: &mut Vec<f32>) -> Runs {
    let padded = dim.next_multiple_of(LANES);
    to.resize(TILE * padded, 0.0);
    let mut copies = [std::ptr::null(); TILE];
    for (j, row) in to.chunks_exact_mut(padded).enumerate().take(range.end).skip(range.start) {
        for (vector, lanes) in row.chunks_exact_mut(LANES).enumerate() {
            let from = runs[j].wrapping_add(vector * LANES * E::BYTES);
            let left = dim - vector * LANES;
            if left >= LANES {
                // SAFETY: sixteen elements are left in this run; its page is held for reading.
                let v = unsafe { E::load(s, from) };
                // SAFETY: a chunk is 16 f32, borrowed mutably.
                unsafe { s.store(lanes.as_mut_ptr(), v) };
                continue;
            }
            lanes.fill(0.0);
            for (i, lane) in lanes[..left].iter_mut().enumerate() {
                // SAFETY: `i < left`, so the element is inside the run.
                *lane = unsafe { E::load_one(from.wrapping_add(i * E::BYTES)) };
            }
        }
        copies[j] = row.as_ptr().cast();
    }
    copies
}

/// The positions of the tile at `start` that are in `seen`, counted from `start`.
fn in_tile(seen: &Range<usize>, start: usize) -> Range<usize> {
    seen.start.clamp(start, start + TILE) - start..seen.end.clamp(start, start + TILE) - start
}

/// Copies a slice to the item's own part of a target.
#[inline(always)]
fn copy_to(from: &[f32], to: *mut f32) {
    // SAFETY: an item writes its own rows of the output, or its own partial, and no other item does: `items` in `work.rs` cuts
    // the batch into disjoint ones. Lengths were checked against the output slice.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
}
