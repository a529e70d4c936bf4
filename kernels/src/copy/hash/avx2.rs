//! AVX2: a stripe at a time.

use std::arch::x86_64::*;
use std::ptr::NonNull;

use kvferry_protocol::digest::{Digest, KEY_STEP, LANE_KEYS, RunKey, STRIPE_BYTES};

use super::{Hash, Runs, digest_with};

/// Proves that the CPU has AVX2.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    #[inline]
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi2")).then_some(Self(()))
    }
}

struct State {
    keys: __m256i,
    products: __m256i,
    sums: __m256i,
}

#[target_feature(enable = "avx2,bmi2")]
#[inline]
fn begin(key: RunKey) -> State {
    let [a, b, c, d] = LANE_KEYS;
    let above = _mm256_set_epi64x(d.cast_signed(), c.cast_signed(), b.cast_signed(), a.cast_signed());
    let zero = _mm256_setzero_si256();
    State { keys: _mm256_add_epi64(above, _mm256_set1_epi64x(key.get().cast_signed())), products: zero, sums: zero }
}

/// Step 3 of the specification.
#[target_feature(enable = "avx2,bmi2")]
#[inline]
fn stripe(state: &mut State, words: __m256i) {
    let x = _mm256_xor_si256(words, state.keys);
    state.products = _mm256_add_epi64(state.products, _mm256_mul_epu32(x, _mm256_srli_epi64::<32>(x)));
    state.sums = _mm256_add_epi64(state.sums, words);
    state.keys = _mm256_add_epi64(state.keys, _mm256_set1_epi64x(KEY_STEP.cast_signed()));
}

#[target_feature(enable = "avx2,bmi2")]
#[inline]
fn lanes(of: __m256i) -> [u64; 4] {
    let (low, high) = (_mm256_castsi256_si128(of), _mm256_extracti128_si256::<1>(of));
    [
        _mm_cvtsi128_si64(low).cast_unsigned(),
        _mm_extract_epi64::<1>(low).cast_unsigned(),
        _mm_cvtsi128_si64(high).cast_unsigned(),
        _mm_extract_epi64::<1>(high).cast_unsigned(),
    ]
}

/// # Safety
/// As [`Hash::run`].
#[target_feature(enable = "avx2,bmi2")]
#[inline]
unsafe fn run(run: NonNull<u8>, bytes: usize, key: RunKey) -> u64 {
    let mut state = begin(key);
    let (whole, rest) = (bytes / STRIPE_BYTES, bytes % STRIPE_BYTES);
    let mut next = run.as_ptr();
    for _ in 0..whole {
        // SAFETY: `whole` stripes lie in the run; the load needs no alignment.
        stripe(&mut state, unsafe { _mm256_loadu_si256(next.cast()) });
        // SAFETY: the end of a stripe that lies in the run.
        next = unsafe { next.add(STRIPE_BYTES) };
    }
    if rest > 0 {
        let mut last = [0; STRIPE_BYTES];
        // SAFETY: `rest` bytes are left in the run, fewer than `last` has, in memory of its own.
        unsafe { next.copy_to_nonoverlapping(last.as_mut_ptr(), rest) };
        // SAFETY: a load of all of `last`; it needs no alignment.
        stripe(&mut state, unsafe { _mm256_loadu_si256(last.as_ptr().cast()) });
    }
    // Step 4 takes each lane's product with the sum of its neighbour: adding them here spares half of the way out.
    let swapped = _mm256_shuffle_epi32::<0x4E>(state.sums);
    key.finish(lanes(_mm256_add_epi64(state.products, swapped)), bytes)
}

impl Hash for Avx2 {
    #[inline(always)]
    unsafe fn run(self, at: NonNull<u8>, bytes: usize, key: RunKey) -> u64 {
        // SAFETY: `self` proves that the CPU has the instructions; the rest is the caller's promise.
        unsafe { run(at, bytes, key) }
    }

    #[inline]
    unsafe fn digest(self, runs: &Runs<'_>) -> Digest {
        #[target_feature(enable = "avx2,bmi2")]
        unsafe fn vectorized(backend: Avx2, runs: &Runs<'_>) -> Digest {
            // SAFETY: the caller's promise.
            unsafe { digest_with(backend, runs) }
        }
        // SAFETY: as above.
        unsafe { vectorized(self, runs) }
    }
}
