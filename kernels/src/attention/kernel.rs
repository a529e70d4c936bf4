//! The two inner loops: queries times keys, and probabilities times values, for up to four rows that share each load of K or V.
//!
//! What a row gets does not depend on the rows beside it: each dot product is one sum of sixteen lanes over the head dimension
//! followed by a fixed tree, and each output element adds its positions one by one in ascending order.
#![expect(unsafe_code, reason = "reads KV runs in place through raw pointers")]
#![expect(clippy::needless_range_loop, reason = "indices over register tiles say more than iterators")]

use std::marker::PhantomData;

use super::simd::{Element, LANES, Simd, Work};

/// Positions that are worked on together; a tile begins at a multiple of it.
pub(super) const TILE: usize = 64;

/// Where the run of each position of a tile begins, of the first head: blocks may lie in memory of their own.
pub(super) type Starts = [*const u8; TILE];

/// The runs of one head in a tile; only those in the visible range are read.
#[derive(Clone, Copy)]
pub(super) struct Runs<'a> {
    /// Bytes from the first head to this one.
    pub(super) skip: usize,
    pub(super) starts: &'a Starts,
}

impl Runs<'_> {
    #[inline(always)]
    pub(super) fn at(&self, j: usize) -> *const u8 {
        self.starts[j].wrapping_add(self.skip)
    }
}

/// The runs of a tile for several heads, in about the order in which they lie in memory. Asking for them one after another while
/// other work goes on hides the memory's latency, and the CPU's own prefetcher recognises the order and runs ahead.
pub(super) struct Ahead<'a> {
    runs: Runs<'a>,
    heads: usize,
    head_stride: usize,
    /// Bytes of each run.
    bytes: usize,
    /// Whether a token's heads lie closer together than a head's tokens.
    tokens_outside: bool,
    token: usize,
    head: usize,
}

impl<'a> Ahead<'a> {
    /// The runs of `heads` heads, the first of them that of `runs`. `token_stride`: bytes from a token to the next in a block.
    pub(super) fn new(runs: Runs<'a>, heads: usize, head_stride: usize, token_stride: usize, bytes: usize) -> Self {
        let tokens_outside = head_stride < token_stride;
        Self { runs, heads, head_stride, bytes, tokens_outside, token: 0, head: 0 }
    }

    /// Asks for the next run, if one is left.
    #[inline(always)]
    pub(super) fn step<S: Simd>(&mut self, s: S) {
        if self.head >= self.heads || self.token >= TILE {
            return;
        }
        let run = self.runs.at(self.token).wrapping_add(self.head * self.head_stride);
        for offset in (0..self.bytes).step_by(64) {
            s.prefetch(run.wrapping_add(offset));
        }
        if self.tokens_outside {
            self.head += 1;
            if self.head == self.heads {
                (self.head, self.token) = (0, self.token + 1);
            }
        } else {
            self.token += 1;
            if self.token == TILE {
                (self.token, self.head) = (0, self.head + 1);
            }
        }
    }
}

/// One to four rows that see the same positions `from..to` of a tile.
pub(super) struct Band<'a, 'r> {
    pub(super) rows: usize,
    pub(super) from: usize,
    pub(super) to: usize,
    /// f32 `[rows, TILE]`.
    pub(super) scores: *mut f32,
    /// What is asked for on the way: one run for each position, if the band is its unit's first.
    pub(super) ahead: Option<&'a mut Ahead<'r>>,
}

/// Scores of a band: `scores[r][j] = queries[r] . keys[j]`.
pub(super) struct Score<'a, 'r, E> {
    band: Band<'a, 'r>,
    keys: Runs<'a>,
    queries: *const f32,
    vectors: usize,
    element: PhantomData<E>,
}

impl<'a, 'r, E: Element> Score<'a, 'r, E> {
    /// `queries`: f32 `[rows, vectors * 16]`, already scaled.
    ///
    /// # Safety
    /// The band's scores and `queries` have the stated shapes, and the keys in the band's range each have `vectors * 16` readable
    /// elements `E`, until the work has run.
    #[inline(always)]
    pub(super) unsafe fn new(band: Band<'a, 'r>, keys: Runs<'a>, queries: *const f32, vectors: usize) -> Self {
        Self { band, keys, queries, vectors, element: PhantomData }
    }
}

impl<E: Element> Work for Score<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        match self.band.rows {
            // SAFETY: promised to `new`.
            1 => unsafe { dots::<S, E, 1>(s, &mut self.band, &self.keys, self.queries, self.vectors) },
            // SAFETY: as above.
            2 => unsafe { dots::<S, E, 2>(s, &mut self.band, &self.keys, self.queries, self.vectors) },
            // SAFETY: as above.
            3 => unsafe { dots::<S, E, 3>(s, &mut self.band, &self.keys, self.queries, self.vectors) },
            // SAFETY: as above.
            _ => unsafe { dots::<S, E, 4>(s, &mut self.band, &self.keys, self.queries, self.vectors) },
        }
    }
}

/// Weighted sums of a band: `sums[r] = sums[r] * decay[r] + scores[r][j] * values[j]`, `j` ascending.
pub(super) struct Weigh<'a, 'r, E> {
    band: Band<'a, 'r>,
    values: Runs<'a>,
    decay: &'a [f32],
    sums: *mut f32,
    vectors: usize,
    element: PhantomData<E>,
}

impl<'a, 'r, E: Element> Weigh<'a, 'r, E> {
    /// `decay`: one a row. `sums`: f32 `[rows, vectors * 16]`.
    ///
    /// # Safety
    /// The band's scores and `sums` have the stated shapes, and the values in the band's range each have `vectors * 16` readable
    /// elements `E`, until the work has run.
    #[inline(always)]
    pub(super) unsafe fn new(
        band: Band<'a, 'r>,
        values: Runs<'a>,
        decay: &'a [f32],
        sums: *mut f32,
        vectors: usize,
    ) -> Self {
        Self { band, values, decay, sums, vectors, element: PhantomData }
    }
}

impl<E: Element> Work for Weigh<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        match self.band.rows {
            // SAFETY: promised to `new`.
            1 => unsafe { weigh::<S, E, 1>(s, &mut self) },
            // SAFETY: as above.
            2 => unsafe { weigh::<S, E, 2>(s, &mut self) },
            // SAFETY: as above.
            3 => unsafe { weigh::<S, E, 3>(s, &mut self) },
            // SAFETY: as above.
            _ => unsafe { weigh::<S, E, 4>(s, &mut self) },
        }
    }
}

/// The keys at a time that keep as many sums in flight as the backend has registers for.
///
/// # Safety
/// As [`Score::new`].
#[inline(always)]
unsafe fn dots<S: Simd, E: Element, const R: usize>(
    s: S,
    band: &mut Band<'_, '_>,
    keys: &Runs<'_>,
    queries: *const f32,
    vectors: usize,
) {
    match (S::WIDE, R) {
        // SAFETY: the caller's promise is passed on.
        (true, 1) => unsafe { dots_by::<S, E, R, 16>(s, band, keys, queries, vectors) },
        // SAFETY: as above.
        (true, 2) => unsafe { dots_by::<S, E, R, 8>(s, band, keys, queries, vectors) },
        // SAFETY: as above.
        (true, _) | (false, 1) => unsafe { dots_by::<S, E, R, 4>(s, band, keys, queries, vectors) },
        // SAFETY: as above.
        (false, 2) => unsafe { dots_by::<S, E, R, 2>(s, band, keys, queries, vectors) },
        // SAFETY: as above.
        (false, _) => unsafe { dots_by::<S, E, R, 1>(s, band, keys, queries, vectors) },
    }
}

/// `J` keys at a time. The last step repeats its last key where fewer are left.
///
/// # Safety
/// As [`Score::new`].
#[inline(always)]
unsafe fn dots_by<S: Simd, E: Element, const R: usize, const J: usize>(
    s: S,
    band: &mut Band<'_, '_>,
    keys: &Runs<'_>,
    queries: *const f32,
    vectors: usize,
) {
    let stride = vectors * LANES;
    let mut from = band.from;
    while from < band.to {
        let mut key = [std::ptr::null(); J];
        for j in 0..J {
            key[j] = keys.at((from + j).min(band.to - 1));
        }
        let mut sums = [[s.splat(0.0); J]; R];
        for vector in 0..vectors {
            let mut k = [s.splat(0.0); J];
            for j in 0..J {
                // SAFETY: `vector < vectors`, and the caller promises that many elements of this run.
                k[j] = unsafe { E::load(s, key[j].wrapping_add(vector * LANES * E::BYTES)) };
            }
            for r in 0..R {
                // SAFETY: row `r` of the queries has `stride` elements.
                let q = unsafe { s.load(queries.wrapping_add(r * stride + vector * LANES)) };
                for j in 0..J {
                    sums[r][j] = s.fma(q, k[j], sums[r][j]);
                }
            }
        }
        if let Some(ahead) = &mut band.ahead {
            for _ in from..band.to.min(from + J) {
                ahead.step(s);
            }
        }
        let dots = add_lanes::<S, R, J>(s, &sums);
        for r in 0..R {
            for j in 0..J.min(band.to - from) {
                // SAFETY: `from + j < to <= TILE`.
                unsafe { band.scores.wrapping_add(r * TILE + from + j).write(dots[r][j]) };
            }
        }
        from += J;
    }
}

#[inline(always)]
fn add_lanes<S: Simd, const R: usize, const J: usize>(s: S, sums: &[[S::V; J]; R]) -> [[f32; J]; R] {
    let mut dots = [[0.0; J]; R];
    if S::WIDE {
        // Sum (r, j) goes where the transposed result has it in order.
        let mut square = [s.splat(0.0); 16];
        for r in 0..R {
            for j in 0..J {
                let at = r * J + j;
                square[at % 4 * 4 + at / 4] = sums[r][j];
            }
        }
        let added = s.sums16(square);
        for r in 0..R {
            dots[r].copy_from_slice(&added[r * J..(r + 1) * J]);
        }
    } else {
        let mut four = [s.splat(0.0); 4];
        for r in 0..R {
            for j in 0..J {
                four[r * J + j] = sums[r][j];
            }
        }
        let added = s.sums4(four);
        for r in 0..R {
            dots[r].copy_from_slice(&added[r * J..(r + 1) * J]);
        }
    }
    dots
}

/// As many vectors of the head dimension at a time as there are registers for.
///
/// # Safety
/// As [`Weigh::new`].
#[inline(always)]
unsafe fn weigh<S: Simd, E: Element, const R: usize>(s: S, work: &mut Weigh<'_, '_, E>) {
    let passes = passes(S::WIDE, R, work.vectors);
    let (mut at, mut pass) = (0, 0);
    while at < work.vectors {
        let (step, turn) = (vectors_at_once(S::WIDE, R, work.vectors - at), (pass, passes));
        match step {
            // SAFETY: at least as many vectors are left, and the caller's promise is passed on.
            8 => unsafe { weigh_by::<S, E, R, 8>(s, work, at, turn) },
            // SAFETY: as above.
            4 => unsafe { weigh_by::<S, E, R, 4>(s, work, at, turn) },
            // SAFETY: as above.
            2 => unsafe { weigh_by::<S, E, R, 2>(s, work, at, turn) },
            // SAFETY: as above.
            _ => unsafe { weigh_by::<S, E, R, 1>(s, work, at, turn) },
        }
        at += step;
        pass += 1;
    }
}

/// 16 sums in flight on a wide backend, 4 on others; a power of two that is no more than `left`.
#[inline(always)]
const fn vectors_at_once(wide: bool, rows: usize, left: usize) -> usize {
    let most = match (wide, rows) {
        (true, 1 | 2) => 8,
        (true, _) | (false, 1) => 4,
        (false, 2) => 2,
        (false, _) => 1,
    };
    let mut step = most;
    while step > left {
        step /= 2;
    }
    step
}

const fn passes(wide: bool, rows: usize, vectors: usize) -> usize {
    let (mut at, mut passes) = (0, 0);
    while at < vectors {
        at += vectors_at_once(wide, rows, vectors - at);
        passes += 1;
    }
    passes
}

/// `C` vectors of the head dimension, beginning at vector `at`, as pass `turn.0` of `turn.1` over the positions.
///
/// # Safety
/// As [`Weigh::new`], and `at + C <= vectors`.
#[inline(always)]
unsafe fn weigh_by<S: Simd, E: Element, const R: usize, const C: usize>(
    s: S,
    work: &mut Weigh<'_, '_, E>,
    at: usize,
    turn: (usize, usize),
) {
    let (values, decay, sums, vectors) = (work.values, work.decay, work.sums, work.vectors);
    let band = &mut work.band;
    let mut sum = [[s.splat(0.0); C]; R];
    for r in 0..R {
        for c in 0..C {
            // SAFETY: `r < R` and `at + c < vectors`, inside `sums`.
            let before = unsafe { s.load(sums.wrapping_add((r * vectors + at + c) * LANES)) };
            sum[r][c] = s.mul(before, s.splat(decay[r]));
        }
    }
    let (mut wait, passes) = turn;
    for j in band.from..band.to {
        // Evenly over all passes: a burst would fill the CPU's queue of misses and stall the loads of this tile.
        if wait == 0 {
            wait = passes;
            if let Some(ahead) = &mut band.ahead {
                ahead.step(s);
            }
        }
        wait -= 1;
        let run = values.at(j);
        let mut v = [s.splat(0.0); C];
        for c in 0..C {
            // SAFETY: `j` is in range and `at + c < vectors`, inside the run.
            v[c] = unsafe { E::load(s, run.wrapping_add((at + c) * LANES * E::BYTES)) };
        }
        for r in 0..R {
            // SAFETY: `j < TILE`.
            let p = s.splat(unsafe { band.scores.wrapping_add(r * TILE + j).read() });
            for c in 0..C {
                sum[r][c] = s.fma(p, v[c], sum[r][c]);
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            // SAFETY: as for the load above.
            unsafe { s.store(sums.wrapping_add((r * vectors + at + c) * LANES), sum[r][c]) };
        }
    }
}
