//! AVX-512: two stripes at a time, the run's end by mask.

use std::arch::x86_64::*;
use std::ptr::NonNull;

use kvferry_protocol::digest::{Digest, KEY_STEP, LANE_KEYS, RunKey, STRIPE_BYTES};

use super::{Hash, Runs, digest_with};

/// Bytes of a vector: two stripes.
const VECTOR_BYTES: usize = 2 * STRIPE_BYTES;

/// The keys of both stripes' lanes, above the run's.
const KEYS: [i64; 8] = {
    let mut keys = [0; 8];
    let mut at = 0;
    while at < 8 {
        let steps = KEY_STEP.wrapping_mul(at as u64 / 4);
        keys[at] = LANE_KEYS[at % 4].wrapping_add(steps).cast_signed();
        at += 1;
    }
    keys
};

/// Proves that the CPU has AVX-512 with byte masks.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    #[inline]
    pub(super) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("bmi2");
        found.then_some(Self(()))
    }
}

/// What is kept of a run: two stripes' lanes side by side.
struct State {
    keys: __m512i,
    products: __m512i,
    sums: __m512i,
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,bmi2")]
#[inline]
fn begin(key: RunKey) -> State {
    let [a, b, c, d, e, f, g, h] = KEYS;
    let above = _mm512_set_epi64(h, g, f, e, d, c, b, a);
    let zero = _mm512_setzero_si512();
    State { keys: _mm512_add_epi64(above, _mm512_set1_epi64(key.get().cast_signed())), products: zero, sums: zero }
}

/// Step 3 of the specification for two stripes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,bmi2")]
#[inline]
fn two_stripes(state: &mut State, words: __m512i) {
    let x = _mm512_xor_si512(words, state.keys);
    let product = _mm512_mul_epu32(x, _mm512_srli_epi64::<32>(x));
    state.products = _mm512_add_epi64(state.products, product);
    state.sums = _mm512_add_epi64(state.sums, words);
    state.keys = _mm512_add_epi64(state.keys, _mm512_set1_epi64(KEY_STEP.wrapping_mul(2).cast_signed()));
}

/// The same for what is left, fewer bytes than two stripes; `words` has zeroes behind them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,bmi2")]
#[inline]
fn last_stripes(state: &mut State, words: __m512i, rest: usize) {
    // A stripe that is begun counts whole, the one behind it not at all.
    let lanes = if rest > STRIPE_BYTES { 0xff } else { 0x0f };
    let x = _mm512_xor_si512(words, state.keys);
    let product = _mm512_maskz_mul_epu32(lanes, x, _mm512_srli_epi64::<32>(x));
    state.products = _mm512_add_epi64(state.products, product);
    state.sums = _mm512_add_epi64(state.sums, words);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,bmi2")]
#[inline]
fn halves(lanes: __m512i) -> [u64; 4] {
    let sum = _mm256_add_epi64(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64::<1>(lanes));
    let mut out = [0; 4];
    // SAFETY: a store of 32 bytes into as many; it needs no alignment.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), sum) };
    out
}

/// # Safety
/// As [`Hash::run`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,bmi2")]
#[inline]
unsafe fn run(run: NonNull<u8>, bytes: usize, key: RunKey) -> u64 {
    let mut state = begin(key);
    let (whole, rest) = (bytes / VECTOR_BYTES, bytes % VECTOR_BYTES);
    let mut next = run.as_ptr();
    for _ in 0..whole {
        // SAFETY: `whole` vectors lie in the run; the loads need no alignment.
        two_stripes(&mut state, unsafe { _mm512_loadu_si512(next.cast()) });
        // SAFETY: the end of a vector that lies in the run.
        next = unsafe { next.add(VECTOR_BYTES) };
    }
    if rest > 0 {
        // SAFETY: the mask keeps the load to the `rest` bytes that are left of the run.
        let words = unsafe { _mm512_maskz_loadu_epi8((1 << rest) - 1, next.cast()) };
        last_stripes(&mut state, words, rest);
    }
    // Step 4 takes each lane's product with the sum of its neighbour: adding them here spares half of the way out.
    let swapped = _mm512_shuffle_epi32::<0x4E>(state.sums);
    key.finish(halves(_mm512_add_epi64(state.products, swapped)), bytes)
}

impl Hash for Avx512 {
    #[inline(always)]
    unsafe fn run(self, at: NonNull<u8>, bytes: usize, key: RunKey) -> u64 {
        // SAFETY: `self` proves that the CPU has the instructions; the rest is the caller's promise.
        unsafe { run(at, bytes, key) }
    }

    #[inline]
    unsafe fn digest(self, runs: &Runs<'_>) -> Digest {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,bmi2")]
        unsafe fn vectorized(backend: Avx512, runs: &Runs<'_>) -> Digest {
            // SAFETY: the caller's promise.
            unsafe { digest_with(backend, runs) }
        }
        // SAFETY: as above.
        unsafe { vectorized(self, runs) }
    }
}
