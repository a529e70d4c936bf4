//! One item of work: some query tokens of one sequence, for some KV heads, over a range of positions.
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
use std::ptr;

use kvferry_protocol::BlockId;

use super::kernel::{Ahead, Band, Runs, Score, Starts, TILE, Weigh};
use super::simd::{Bf16, F16, F32, LANES, Simd, Work};
use super::softmax::{State, exp_each, refill, soft_cap};
use super::widen::Widen;
use crate::dtype::KvDtype;
use crate::memory::PlanePages;

/// Positions of one segment, a multiple of [`TILE`].
pub(super) const SEGMENT: usize = 1024;

/// From this many rows on, 16-bit tiles are widened to f32 once instead of once for every four rows.
const WIDEN_FROM_ROWS: usize = 16; // benches/attention.rs

/// What all items of one call share.
pub(super) struct Job<'a> {
    pub(super) keys: PlanePages<'a>,
    pub(super) values: PlanePages<'a>,
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

/// Some rows: KV heads x `tokens` of one sequence's queries x the group of one KV head, over some segments.
#[derive(Clone, Debug)]
pub(super) struct Item<'a> {
    pub(super) blocks: &'a [BlockId],
    pub(super) kv_heads: Range<usize>,
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
    /// One partial state, [`Job::partial_len`] elements; the item covers one segment.
    Partial(*mut f32),
}

impl Job<'_> {
    /// Elements of a row of weighted sums: a value, padded to whole vectors.
    fn width(&self) -> usize {
        self.value_dim.next_multiple_of(LANES)
    }

    /// Elements of a row of queries, padded to whole vectors.
    fn key_width(&self) -> usize {
        self.keys.dim.next_multiple_of(LANES)
    }

    /// Rows of an item that share one KV head.
    fn rows_per_head(&self, item: &Item<'_>) -> usize {
        item.tokens.len() * self.group
    }

    /// Rows of an item.
    fn rows(&self, item: &Item<'_>) -> usize {
        item.kv_heads.len() * self.rows_per_head(item)
    }

    /// Positions that the query at `position` sees.
    pub(super) fn visible(&self, position: usize) -> Range<usize> {
        (position + 1).saturating_sub(self.window)..position + 1
    }

    /// Elements of an item's partial state: maximum, denominator and weighted sums of each row.
    pub(super) fn partial_len(&self, item: &Item<'_>) -> usize {
        self.rows(item) * (2 + self.width())
    }
}

/// Memory that a thread keeps between items.
#[derive(Default)]
pub(super) struct Scratch {
    /// `[rows, key_width]`.
    queries: Vec<f32>,
    /// `[rows_per_head, TILE]`.
    scores: Vec<f32>,
    /// `[rows_per_head]`.
    decay: Vec<f32>,
    segment: State,
    total: State,
    keys: Vec<f32>,
    values: Vec<f32>,
    bands: Vec<RowBand>,
}

/// Up to four consecutive rows of a head that see the same positions of a tile.
#[derive(Clone)]
struct RowBand {
    row: usize,
    rows: usize,
    range: Range<usize>,
}

thread_local! {
    /// This thread's, for [`Compute`] and [`Merge`].
    pub(super) static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// An item to compute.
pub(super) struct Compute<'a> {
    pub(super) job: &'a Job<'a>,
    pub(super) item: &'a Item<'a>,
    pub(super) target: Target,
    pub(super) scratch: &'a RefCell<Scratch>,
}

/// One head's part of a tile.
struct Unit<'a> {
    /// The head's first row in the item.
    first_row: usize,
    /// Positions of the tile that any row sees.
    range: &'a Range<usize>,
    keys: Runs<'a>,
    values: Runs<'a>,
}

/// What the next tile needs of memory.
struct Next<'a> {
    keys: Ahead<'a>,
    values: Ahead<'a>,
}

impl Work for Compute<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (job, item) = (self.job, self.item);
        let scratch = &mut *self.scratch.borrow_mut();
        let (rows, width) = (job.rows(item), job.width());
        self.scale_queries(&mut scratch.queries);
        refill(&mut scratch.scores, job.rows_per_head(item) * TILE, 0.0);
        scratch.total.reset(rows, width);
        self.start_at_sinks(&mut scratch.total);
        for segment in item.segments.clone() {
            let positions = segment * SEGMENT..(segment + 1) * SEGMENT;
            scratch.segment.reset(rows, width);
            self.tiles(s, &positions, scratch);
            match self.target {
                Target::Output(_) => self.merge(s, &positions, scratch),
                Target::Partial(to) => {
                    let State { largest, denominator, sums } = &scratch.segment;
                    copy_to(largest, to);
                    copy_to(denominator, to.wrapping_add(rows));
                    copy_to(sums, to.wrapping_add(2 * rows));
                }
            }
        }
        if let Target::Output(out) = self.target {
            self.write(s, &mut scratch.total, out);
        }
    }
}

impl Compute<'_> {
    /// Copies this item's query rows, times the scale, padded with zeros to whole vectors.
    fn scale_queries(&self, to: &mut Vec<f32>) {
        let (job, item) = (self.job, self.item);
        let (dim, width) = (job.keys.dim, job.key_width());
        to.clear();
        for kv_head in item.kv_heads.clone() {
            for token in item.tokens.clone() {
                let first = (token * job.q_heads + kv_head * job.group) * dim;
                for query in job.queries[first..first + job.group * dim].chunks_exact(dim) {
                    to.extend(query.iter().map(|x| x * job.scale));
                    to.resize(to.len().next_multiple_of(width), 0.0);
                }
            }
        }
    }

    /// A sink is a score without a value: it begins the denominator.
    fn start_at_sinks(&self, total: &mut State) {
        let Some(sinks) = self.job.sinks else { return };
        let per_head = self.job.rows_per_head(self.item);
        for (row, largest) in total.largest.iter_mut().enumerate() {
            let kv_head = self.item.kv_heads.start + row / per_head;
            *largest = sinks[kv_head * self.job.group + row % self.job.group];
            // A sink of -inf takes no part.
            total.denominator[row] = if *largest == f32::NEG_INFINITY { 0.0 } else { 1.0 };
        }
    }

    /// All tiles of a segment, each for all heads: so memory is read in about the order in which it lies, whichever of heads and
    /// tokens is the inner axis.
    #[inline(always)]
    fn tiles<S: Simd>(&self, s: S, positions: &Range<usize>, scratch: &mut Scratch) {
        let (job, item) = (self.job, self.item);
        let seen = job.visible(item.first_position).start..item.first_position + item.tokens.len();
        let tiles = positions.start.max(seen.start) / TILE..positions.end.min(seen.end).div_ceil(TILE);
        let mut tables = [self.tables(tiles.start * TILE, &seen), NO_STARTS];
        for tile in tiles {
            let start = tile * TILE;
            tables[1] = self.tables(start + TILE, &seen);
            let [(keys, values), (next_keys, next_values)] = &tables;
            let heads = item.kv_heads.len();
            let mut next = Next {
                keys: self.ahead(&job.keys, next_keys, heads),
                // Where values are parts of keys, they come with them.
                values: self.ahead(&job.values, next_values, if job.values_in_keys { 0 } else { heads }),
            };
            self.find_bands(start, &mut scratch.bands);
            for head in item.kv_heads.clone() {
                let unit = Unit {
                    first_row: (head - item.kv_heads.start) * job.rows_per_head(item),
                    range: &in_tile(&seen, start),
                    keys: Runs { skip: head * job.keys.head_stride(), starts: keys },
                    values: Runs { skip: head * job.values.head_stride(), starts: values },
                };
                self.unit(s, &unit, &mut next, scratch);
            }
            tables.swap(0, 1);
        }
    }

    /// Where a tile's keys and values begin.
    fn tables(&self, start: usize, seen: &Range<usize>) -> (Starts, Starts) {
        let mut tables = NO_STARTS;
        self.find_starts(&self.job.keys, start, seen, &mut tables.0);
        self.find_starts(&self.job.values, start, seen, &mut tables.1);
        tables
    }

    fn ahead<'o>(&self, pages: &PlanePages<'_>, starts: &'o Starts, heads: usize) -> Ahead<'o> {
        let runs = Runs { skip: self.item.kv_heads.start * pages.head_stride(), starts };
        let bytes = pages.dim * self.job.dtype.bytes();
        Ahead::new(runs, heads, pages.head_stride(), pages.token_stride(), bytes)
    }

    /// Where the runs of a tile's positions begin; the cache's first run for those outside `seen`, which are not read.
    fn find_starts(&self, pages: &PlanePages<'_>, start: usize, seen: &Range<usize>, to: &mut Starts) {
        let range = in_tile(seen, start);
        to.fill(pages.first());
        let mut at = range.start;
        while at < range.end {
            let (block, token) = ((start + at) / self.job.tokens_per_block, (start + at) % self.job.tokens_per_block);
            let count = (self.job.tokens_per_block - token).min(range.end - at);
            let mut run = pages.start(self.item.blocks[block], token);
            for entry in &mut to[at..at + count] {
                *entry = run;
                run = run.wrapping_add(pages.token_stride());
            }
            at += count;
        }
    }

    /// Groups a head's rows, four at most, that see the same positions of a tile.
    fn find_bands(&self, start: usize, bands: &mut Vec<RowBand>) {
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
            if let Some(last) = bands.last_mut()
                && last.range == range
                && last.row + last.rows == row
            {
                let more = (end - row).min(4 - last.rows);
                last.rows += more;
                row += more;
            }
            while row < end {
                let rows = (end - row).min(4);
                bands.push(RowBand { row, rows, range: range.clone() });
                row += rows;
            }
        }
    }

    /// Lets one head's part of a tile join its rows.
    #[inline(always)]
    fn unit<S: Simd>(&self, s: S, unit: &Unit<'_>, next: &mut Next<'_>, scratch: &mut Scratch) {
        let job = self.job;
        let many = job.dtype != KvDtype::F32 && job.rows_per_head(self.item) >= WIDEN_FROM_ROWS;
        if many || !job.keys.dim.is_multiple_of(LANES) {
            let mut starts = [ptr::null(); TILE];
            let keys = self.widen(s, unit.keys, unit.range, job.keys.dim, &mut scratch.keys, &mut starts);
            self.score(s, unit, keys, KvDtype::F32, &mut next.keys, scratch);
        } else {
            self.score(s, unit, unit.keys, job.dtype, &mut next.keys, scratch);
        }
        self.join(s, unit, scratch);
        if many || !job.value_dim.is_multiple_of(LANES) {
            let mut starts = [ptr::null(); TILE];
            let values = self.widen(s, unit.values, unit.range, job.value_dim, &mut scratch.values, &mut starts);
            self.weigh(s, unit, values, KvDtype::F32, &mut next.values, scratch);
        } else {
            self.weigh(s, unit, unit.values, job.dtype, &mut next.values, scratch);
        }
    }

    /// Widens the runs of `range` into `to`, padded with zeros to whole vectors.
    #[inline(always)]
    fn widen<'o, S: Simd>(
        &self,
        s: S,
        runs: Runs<'_>,
        range: &Range<usize>,
        dim: usize,
        to: &mut Vec<f32>,
        starts: &'o mut Starts,
    ) -> Runs<'o> {
        let padded = dim.next_multiple_of(LANES);
        to.resize(TILE * padded, 0.0);
        match self.job.dtype {
            // SAFETY: the runs in range are whole runs of checked blocks, whose pages the caller holds for reading.
            KvDtype::F32 => s.vectorize(unsafe { Widen::<F32>::new(runs, range, dim, to) }),
            // SAFETY: as above.
            KvDtype::F16 => s.vectorize(unsafe { Widen::<F16>::new(runs, range, dim, to) }),
            // SAFETY: as above.
            KvDtype::Bf16 => s.vectorize(unsafe { Widen::<Bf16>::new(runs, range, dim, to) }),
        }
        let rows = to.as_ptr();
        for (j, start) in starts.iter_mut().enumerate() {
            *start = rows.wrapping_add(j * padded).cast();
        }
        Runs { skip: 0, starts }
    }

    #[inline(always)]
    fn score<S: Simd>(
        &self,
        s: S,
        unit: &Unit<'_>,
        keys: Runs<'_>,
        dtype: KvDtype,
        ahead: &mut Ahead<'_>,
        scratch: &mut Scratch,
    ) {
        let width = self.job.key_width();
        let mut ahead = Some(ahead);
        for RowBand { row, rows, range } in &scratch.bands {
            let scores = scratch.scores[row * TILE..(row + rows) * TILE].as_mut_ptr();
            let row = unit.first_row + row;
            let queries = scratch.queries[row * width..(row + rows) * width].as_ptr();
            let band = Band { rows: *rows, from: range.start, to: range.end, scores, ahead: ahead.take() };
            let vectors = width / LANES;
            match dtype {
                // SAFETY: scores and queries were cut to these rows. The keys in range are whole runs of checked blocks, whose
                // pages the caller holds for reading, or widened copies.
                KvDtype::F32 => s.vectorize(unsafe { Score::<F32>::new(band, keys, queries, vectors) }),
                // SAFETY: as above.
                KvDtype::F16 => s.vectorize(unsafe { Score::<F16>::new(band, keys, queries, vectors) }),
                // SAFETY: as above.
                KvDtype::Bf16 => s.vectorize(unsafe { Score::<Bf16>::new(band, keys, queries, vectors) }),
            }
        }
    }

    /// Turns a unit's scores into probabilities.
    #[inline(always)]
    fn join<S: Simd>(&self, s: S, unit: &Unit<'_>, scratch: &mut Scratch) {
        refill(&mut scratch.decay, self.job.rows_per_head(self.item), 1.0);
        for RowBand { row, rows, range } in &scratch.bands {
            let mut decay = [0.0; LANES];
            for (r, decay) in decay[..*rows].iter_mut().enumerate() {
                let scores = &mut scratch.scores[(row + r) * TILE..(row + r + 1) * TILE];
                if let Some(cap) = self.job.soft_cap {
                    soft_cap(s, scores, cap);
                }
                let scores = scores.try_into().expect("a row of scores is one tile");
                *decay = scratch.segment.join(s, unit.first_row + row + r, scores, range);
            }
            exp_each(s, &mut decay);
            scratch.decay[*row..row + rows].copy_from_slice(&decay[..*rows]);
        }
    }

    #[inline(always)]
    fn weigh<S: Simd>(
        &self,
        s: S,
        unit: &Unit<'_>,
        values: Runs<'_>,
        dtype: KvDtype,
        ahead: &mut Ahead<'_>,
        scratch: &mut Scratch,
    ) {
        let width = self.job.width();
        let mut ahead = Some(ahead);
        for RowBand { row, rows, range } in &scratch.bands {
            let scores = scratch.scores[row * TILE..(row + rows) * TILE].as_mut_ptr();
            let decay = &scratch.decay[*row..row + rows];
            let row = unit.first_row + row;
            let sums = scratch.segment.sums[row * width..(row + rows) * width].as_mut_ptr();
            let band = Band { rows: *rows, from: range.start, to: range.end, scores, ahead: ahead.take() };
            let vectors = width / LANES;
            match dtype {
                // SAFETY: as in `score`, for values and sums.
                KvDtype::F32 => s.vectorize(unsafe { Weigh::<F32>::new(band, values, decay, sums, vectors) }),
                // SAFETY: as above.
                KvDtype::F16 => s.vectorize(unsafe { Weigh::<F16>::new(band, values, decay, sums, vectors) }),
                // SAFETY: as above.
                KvDtype::Bf16 => s.vectorize(unsafe { Weigh::<Bf16>::new(band, values, decay, sums, vectors) }),
            }
        }
    }

    /// Adds the finished segment to the rows that saw any of its positions.
    #[inline(always)]
    fn merge<S: Simd>(&self, s: S, positions: &Range<usize>, scratch: &mut Scratch) {
        let (job, item) = (self.job, self.item);
        for row in 0..job.rows(item) {
            let token = row % job.rows_per_head(item) / job.group;
            let visible = job.visible(item.first_position + token);
            if visible.start < positions.end && positions.start < visible.end {
                scratch.total.merge_row(s, &scratch.segment, row, job.width());
            }
        }
    }

    /// Writes `sums / denominator` of each row to the output tensor.
    #[inline(always)]
    fn write<S: Simd>(&self, s: S, total: &mut State, out: *mut f32) {
        let (job, item) = (self.job, self.item);
        let (per_head, width) = (job.rows_per_head(item), job.width());
        for row in 0..job.rows(item) {
            total.divide_row(s, row, width);
            let token = item.tokens.start + row % per_head / job.group;
            let head = (item.kv_heads.start + row / per_head) * job.group + row % job.group;
            let value = &total.sums[row * width..][..job.value_dim];
            copy_to(value, out.wrapping_add((token * job.q_heads + head) * job.value_dim));
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
        let Self { job, item, scratch, .. } = self;
        let whole = Compute { job, item, target: Target::Output(self.out), scratch };
        let scratch = &mut *scratch.borrow_mut();
        let rows = job.rows(item);
        scratch.total.reset(rows, job.width());
        whole.start_at_sinks(&mut scratch.total);
        for (segment, partial) in item.segments.clone().zip(self.partials.chunks_exact(job.partial_len(item))) {
            scratch.segment.read(partial, rows);
            whole.merge(s, &(segment * SEGMENT..(segment + 1) * SEGMENT), scratch);
        }
        whole.write(s, &mut scratch.total, self.out);
    }
}

/// Before they are looked up.
const NO_STARTS: (Starts, Starts) = ([ptr::null(); TILE], [ptr::null(); TILE]);

/// The positions of the tile at `start` that are in `seen`, counted from `start`.
fn in_tile(seen: &Range<usize>, start: usize) -> Range<usize> {
    seen.start.clamp(start, start + TILE) - start..seen.end.clamp(start, start + TILE) - start
}

/// Copies a slice to the item's own part of a target.
fn copy_to(from: &[f32], to: *mut f32) {
    // SAFETY: an item writes its own rows of the output, or its own partial, and no other item does: `items` in `work.rs` cuts
    // the batch into disjoint ones. Lengths were checked against the output slice.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
}
