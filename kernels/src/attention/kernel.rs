//! The two inner loops: queries times keys, and probabilities times values, for up to four rows that share each load of K or V.
//!
//! What a row gets does not depend on the rows beside it: each dot product is one sum of sixteen lanes over the head dimension
//! followed by a fixed tree, and each output element adds its positions one by one in ascending order.
#![expect(unsafe_code, reason = "reads KV runs in place through raw pointers")]
#![expect(clippy::needless_range_loop, reason = "indices over register tiles say more than iterators")]

use super::simd::{Element, LANES, Simd};

/// Positions that are worked on together; a tile begins at a multiple of it.
pub(super) const TILE: usize = 64;

/// Where the run of each position of a tile begins; only those in the visible range are read.
pub(super) type Runs = [*const u8; TILE];

/// Runs that are needed soon. Asking for them while other work goes on hides the memory's latency, which the CPU's own
/// prefetcher cannot where runs are short and blocks lie scattered.
#[derive(Clone, Copy)]
pub(super) struct Ahead<'a> {
    pub(super) runs: &'a Runs,
    /// Bytes of each run; 0 asks for nothing.
    pub(super) bytes: usize,
}

impl Ahead<'_> {
    #[inline(always)]
    fn prefetch<S: Simd>(self, s: S, j: usize) {
        for offset in (0..self.bytes).step_by(64) {
            s.prefetch(self.runs[j].wrapping_add(offset));
        }
    }
}

/// Rows that see the same positions `from..to` of a tile, and where their data begins.
pub(super) struct Band<'a> {
    pub(super) from: usize,
    pub(super) to: usize,
    /// f32 `[R, vectors * 16]`, already scaled.
    pub(super) queries: *const f32,
    /// f32 `[R, TILE]`.
    pub(super) scores: *mut f32,
    /// What is needed after this band; positions as in the band.
    pub(super) ahead: Ahead<'a>,
}

/// `scores[r][j] = queries[r] . keys[j]` for `j` in the band's range.
///
/// # Safety
/// The band's pointers have the stated shapes, and `keys[from..to]` each have `vectors * 16` readable elements `E`.
#[inline(always)]
pub(super) unsafe fn dots<S: Simd, E: Element, const R: usize>(s: S, band: &Band<'_>, keys: &Runs, vectors: usize) {
    match (S::WIDE, R) {
        // SAFETY: the caller's promise is passed on.
        (true, 1) => unsafe { dots_by::<S, E, R, 16>(s, band, keys, vectors) },
        // SAFETY: as above.
        (true, 2) => unsafe { dots_by::<S, E, R, 8>(s, band, keys, vectors) },
        // SAFETY: as above.
        (true, _) | (false, 1) => unsafe { dots_by::<S, E, R, 4>(s, band, keys, vectors) },
        // SAFETY: as above.
        (false, 2) => unsafe { dots_by::<S, E, R, 2>(s, band, keys, vectors) },
        // SAFETY: as above.
        (false, _) => unsafe { dots_by::<S, E, R, 1>(s, band, keys, vectors) },
    }
}

/// `J` keys at a time. The last step repeats its last key where fewer are left.
///
/// # Safety
/// As [`dots`].
#[inline(always)]
unsafe fn dots_by<S: Simd, E: Element, const R: usize, const J: usize>(
    s: S,
    band: &Band<'_>,
    keys: &Runs,
    vectors: usize,
) {
    let stride = vectors * LANES;
    let mut from = band.from;
    while from < band.to {
        let key: [*const u8; J] = std::array::from_fn(|j| keys[(from + j).min(band.to - 1)]);
        let mut sums = [[s.splat(0.0); J]; R];
        for vector in 0..vectors {
            let mut k = [s.splat(0.0); J];
            for j in 0..J {
                // SAFETY: `vector < vectors`, and the caller promises that many elements of this run.
                k[j] = unsafe { E::load(s, key[j].wrapping_add(vector * LANES * E::BYTES)) };
            }
            for r in 0..R {
                // SAFETY: row `r` of the queries has `stride` elements.
                let q = unsafe { s.load(band.queries.wrapping_add(r * stride + vector * LANES)) };
                for j in 0..J {
                    sums[r][j] = s.fma(q, k[j], sums[r][j]);
                }
            }
        }
        for j in from..band.to.min(from + J) {
            band.ahead.prefetch(s, j);
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

/// `sums[r] = sums[r] * decay[r] + scores[r][j] * values[j]`, for `j` in the band's range in ascending order.
///
/// `sums`: f32 `[R, vectors * 16]`.
///
/// # Safety
/// The pointers have the stated shapes, and `values[from..to]` each have `vectors * 16` readable elements `E`.
#[inline(always)]
pub(super) unsafe fn weigh<S: Simd, E: Element, const R: usize>(
    s: S,
    band: &Band<'_>,
    values: &Runs,
    decay: &[f32; R],
    sums: *mut f32,
    vectors: usize,
) {
    let mut at = 0;
    while at < vectors {
        let left = vectors - at;
        let step = match (S::WIDE, R) {
            // SAFETY: `step` vectors are left, and the caller's promise is passed on.
            (true, 1 | 2) if left >= 8 => unsafe { weigh_by::<S, E, R, 8>(s, band, values, decay, sums, vectors, at) },
            // SAFETY: as above.
            (true, _) | (false, 1) if left >= 4 => unsafe {
                weigh_by::<S, E, R, 4>(s, band, values, decay, sums, vectors, at)
            },
            // SAFETY: as above.
            (true, _) | (false, 1 | 2) if left >= 2 => unsafe {
                weigh_by::<S, E, R, 2>(s, band, values, decay, sums, vectors, at)
            },
            // SAFETY: as above.
            _ => unsafe { weigh_by::<S, E, R, 1>(s, band, values, decay, sums, vectors, at) },
        };
        at += step;
    }
}

/// `C` vectors of the head dimension, beginning at vector `at`; returns `C`.
///
/// # Safety
/// As [`weigh`], and `at + C <= vectors`.
#[inline(always)]
unsafe fn weigh_by<S: Simd, E: Element, const R: usize, const C: usize>(
    s: S,
    band: &Band<'_>,
    values: &Runs,
    decay: &[f32; R],
    sums: *mut f32,
    vectors: usize,
    at: usize,
) -> usize {
    let place = |r: usize, c: usize| sums.wrapping_add((r * vectors + at + c) * LANES);
    let mut sum = [[s.splat(0.0); C]; R];
    for r in 0..R {
        for c in 0..C {
            // SAFETY: `r < R` and `at + c < vectors`, inside `sums`.
            let before = unsafe { s.load(place(r, c)) };
            sum[r][c] = s.mul(before, s.splat(decay[r]));
        }
    }
    for j in band.from..band.to {
        if at == 0 {
            band.ahead.prefetch(s, j);
        }
        let mut v = [s.splat(0.0); C];
        for c in 0..C {
            // SAFETY: `j` is in range and `at + c < vectors`, inside the run.
            v[c] = unsafe { E::load(s, values[j].wrapping_add((at + c) * LANES * E::BYTES)) };
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
            unsafe { s.store(place(r, c), sum[r][c]) };
        }
    }
    C
}
