//! Widens a tile's runs to f32, where many rows share them or where they are no whole number of vectors.
#![expect(unsafe_code, reason = "reads KV runs through raw pointers")]

use std::marker::PhantomData;
use std::ops::Range;

use super::kernel::Runs;
use super::simd::{Element, LANES, Simd, Work};

/// Runs to widen.
pub(super) struct Widen<'a, E> {
    runs: Runs<'a>,
    range: &'a Range<usize>,
    /// Elements of a run.
    dim: usize,
    /// f32 `[TILE, dim padded to whole vectors]`.
    to: &'a mut [f32],
    element: PhantomData<E>,
}

impl<'a, E: Element> Widen<'a, E> {
    /// Copies the runs of `range` to their rows of `to` and pads them with zeros; other rows stay as they are.
    ///
    /// # Safety
    /// The runs in range each have `dim` readable elements `E` until the work has run.
    #[inline(always)]
    pub(super) unsafe fn new(runs: Runs<'a>, range: &'a Range<usize>, dim: usize, to: &'a mut [f32]) -> Self {
        Self { runs, range, dim, to, element: PhantomData }
    }
}

impl<E: Element> Work for Widen<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let padded = self.dim.next_multiple_of(LANES);
        for j in self.range.clone() {
            let row = &mut self.to[j * padded..(j + 1) * padded];
            for (vector, lanes) in row.chunks_exact_mut(LANES).enumerate() {
                let from = self.runs.at(j).wrapping_add(vector * LANES * E::BYTES);
                let left = self.dim - vector * LANES;
                if left >= LANES {
                    // SAFETY: sixteen elements are left in this run.
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
        }
    }
}
