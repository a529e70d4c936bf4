//! The running softmax of a row, a tile and a segment at a time.
#![expect(unsafe_code, reason = "loads and stores vectors of slices")]

use std::ops::Range;

use super::kernel::TILE;
use super::simd::{LANES, Simd, exp, exp_one};

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

/// Running softmax of some rows.
#[derive(Default)]
pub(super) struct State {
    pub(super) largest: Vec<f32>,
    pub(super) denominator: Vec<f32>,
    /// `[rows, width]`, the width a multiple of [`LANES`].
    pub(super) sums: Vec<f32>,
}

impl State {
    /// No position yet.
    pub(super) fn reset(&mut self, rows: usize, width: usize) {
        refill(&mut self.largest, rows, f32::NEG_INFINITY);
        refill(&mut self.denominator, rows, 0.0);
        refill(&mut self.sums, rows * width, 0.0);
    }

    /// Takes over a partial state of as many rows: maximum, denominator, sums.
    pub(super) fn read(&mut self, partial: &[f32], rows: usize) {
        for (to, from) in [
            (&mut self.largest, &partial[..rows]),
            (&mut self.denominator, &partial[rows..2 * rows]),
            (&mut self.sums, &partial[2 * rows..]),
        ] {
            to.clear();
            to.extend_from_slice(from);
        }
    }

    /// Merges one row of a later segment, which saw at least one position.
    #[inline(always)]
    pub(super) fn merge_row<S: Simd>(&mut self, s: S, part: &Self, row: usize, width: usize) {
        let (before, found) = (self.largest[row], part.largest[row]);
        let largest = if found > before { found } else { before };
        let (a, b) = (exp_one(s, before - largest), exp_one(s, found - largest));
        self.largest[row] = largest;
        self.denominator[row] = self.denominator[row] * a + part.denominator[row] * b;
        let (a, b) = (s.splat(a), s.splat(b));
        let sums = row * width..(row + 1) * width;
        let mut at = part.sums[sums.clone()].as_ptr();
        for_each_vector!(s, self.sums[sums], |sum| {
            // SAFETY: both rows have `width` elements, so a whole vector is left here too.
            let found = unsafe { s.load(at) };
            at = at.wrapping_add(LANES);
            s.fma(found, b, s.mul(sum, a))
        });
    }

    /// Divides a row's weighted sums by its denominator.
    #[inline(always)]
    pub(super) fn divide_row<S: Simd>(&mut self, s: S, row: usize, width: usize) {
        let denominator = s.splat(self.denominator[row]);
        for_each_vector!(s, self.sums[row * width..(row + 1) * width], |sum| s.div(sum, denominator));
    }

    /// Lets one tile's scores of a row join: replaces them by `e^(score - largest)`, 0 outside `range`. Returns how much the
    /// maximum has grown, as `before - after`: the row's sums are due to be multiplied by `e` to the power of it.
    #[inline(always)]
    pub(super) fn join<S: Simd>(&mut self, s: S, row: usize, scores: &mut [f32; TILE], range: &Range<usize>) -> f32 {
        scores[..range.start].fill(f32::NEG_INFINITY);
        scores[range.end..].fill(f32::NEG_INFINITY);
        let mut largest = s.splat(f32::NEG_INFINITY);
        for_each_vector!(s, scores, |score| {
            largest = s.max(score, largest);
            score
        });
        let (before, found) = (self.largest[row], s.largest(largest));
        let largest = if found > before { found } else { before };
        let shift = s.splat(largest);
        let mut sum = s.splat(0.0);
        for_each_vector!(s, scores, |score| {
            let probability = exp(s, s.sub(score, shift));
            sum = s.add(sum, probability);
            probability
        });
        self.largest[row] = largest;
        // Both are -inf only where every score is: then the probabilities are NaN, and 0 keeps the sums' NaN theirs.
        let shrink = if before == largest { 0.0 } else { before - largest };
        self.denominator[row] = self.denominator[row] * exp_one(s, shrink) + s.sum(sum);
        shrink
    }
}

/// Replaces scores by `cap * tanh(score / cap)`, with `tanh(y) = 1 - 2 / (e^2y + 1)`. Source: Gemma 2, arXiv 2408.00118,
/// section 2.
#[inline(always)]
pub(super) fn soft_cap<S: Simd>(s: S, scores: &mut [f32], cap: f32) {
    let (zero, one, two) = (s.splat(0.0), s.splat(1.0), s.splat(2.0));
    // tanh(20) is 1 to the last bit; the limits keep e^2y in range.
    let limit = s.splat(-40.0);
    for_each_vector!(s, scores, |score| {
        let twice = s.max(limit, s.mul(score, s.splat(2.0 / cap)));
        let twice = s.sub(zero, s.max(limit, s.sub(zero, twice)));
        let tanh = s.sub(one, s.div(two, s.add(exp(s, twice), one)));
        s.mul(s.splat(cap), tanh)
    });
}

/// `e^x` of up to 16 numbers.
#[inline(always)]
pub(super) fn exp_each<S: Simd>(s: S, x: &mut [f32; LANES]) {
    for_each_vector!(s, x, |x| exp(s, x));
}

/// Makes a vector `len` long and all `with`.
pub(super) fn refill(vec: &mut Vec<f32>, len: usize, with: f32) {
    vec.clear();
    vec.resize(len, with);
}
