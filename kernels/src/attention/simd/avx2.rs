//! AVX2, FMA and F16C: a vector is two registers.

use std::arch::x86_64::*;

use super::{Simd, Work};

/// Proves that the CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(in crate::attention) struct Avx2(());

impl Avx2 {
    pub(in crate::attention) fn detect() -> Option<Self> {
        let found =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }
}

/// Lanes 0 to 7, then 8 to 15.
type V = (__m256, __m256);

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn sum(v: V) -> f32 {
    let v = _mm256_add_ps(v.0, v.1);
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps::<0x55>(v, v)))
}

/// The four sums of `sum`, by the same tree.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn sums4(v: [V; 4]) -> __m128 {
    // Spelled out, because a closure (of `array::from_fn`) is compiled without these instructions.
    let mut a = [_mm256_setzero_ps(); 4];
    for i in 0..4 {
        a[i] = _mm256_add_ps(v[i].0, v[i].1);
    }
    // Lanes 4 apart: vectors 0 and 1 side by side, then 2 and 3.
    let mut b = [_mm256_setzero_ps(); 2];
    for i in 0..2 {
        let (x, y) = (a[2 * i], a[2 * i + 1]);
        b[i] = _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(x, y), _mm256_permute2f128_ps::<0x31>(x, y));
    }
    let c = _mm256_add_ps(_mm256_shuffle_ps::<0x44>(b[0], b[1]), _mm256_shuffle_ps::<0xEE>(b[0], b[1]));
    // Vectors 0 and 2 in the lower half, 1 and 3 in the upper.
    let d = _mm256_add_ps(_mm256_shuffle_ps::<0x88>(c, c), _mm256_shuffle_ps::<0xDD>(c, c));
    _mm_unpacklo_ps(_mm256_castps256_ps128(d), _mm256_extractf128_ps::<1>(d))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn largest(v: V) -> f32 {
    let v = _mm256_max_ps(v.0, v.1);
    let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_max_ss(v, _mm_shuffle_ps::<0x55>(v, v)))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn zero_below(x: __m256, limit: __m256, r: __m256) -> __m256 {
    _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, limit), r)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn pow2(t: __m256) -> __m256 {
    let n = _mm256_slli_epi32::<23>(_mm256_castps_si256(t));
    _mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(0x3F80_0000)))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn widen_bf16(bits: __m128i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
fn call<W: Work>(simd: Avx2, work: W) -> W::Output {
    work.run(simd)
}

/// Applies an instruction to both halves.
macro_rules! both {
    ($op:path, $($a:ident),+) => {{
        // SAFETY: the token proves that the CPU has the instruction.
        let low = unsafe { $op($($a.0),+) };
        // SAFETY: as above.
        let high = unsafe { $op($($a.1),+) };
        (low, high)
    }};
}

impl Simd for Avx2 {
    type V = V;
    const WIDE: bool = false;

    #[inline(always)]
    fn vectorize<W: Work>(self, work: W) -> W::Output {
        // SAFETY: the token proves that the CPU has the instruction.
        unsafe { call(self, work) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        // SAFETY: the token proves that the CPU has the instruction.
        let half = unsafe { _mm256_set1_ps(x) };
        (half, half)
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        both!(_mm256_add_ps, a, b)
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        both!(_mm256_sub_ps, a, b)
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        both!(_mm256_mul_ps, a, b)
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        both!(_mm256_div_ps, a, b)
    }

    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        both!(_mm256_fmadd_ps, a, b, c)
    }

    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        both!(_mm256_max_ps, a, b)
    }

    #[inline(always)]
    fn zero_below(self, x: V, limit: V, r: V) -> V {
        both!(zero_below, x, limit, r)
    }

    #[inline(always)]
    fn pow2(self, t: V) -> V {
        both!(pow2, t)
    }

    #[inline(always)]
    fn sum(self, v: V) -> f32 {
        // SAFETY: the token proves that the CPU has the instruction.
        unsafe { sum(v) }
    }

    #[inline(always)]
    fn largest(self, v: V) -> f32 {
        // SAFETY: the token proves that the CPU has the instruction.
        unsafe { largest(v) }
    }

    #[inline(always)]
    fn sums4(self, v: [V; 4]) -> [f32; 4] {
        // SAFETY: the token proves that the CPU has the instructions.
        let sums = unsafe { sums4(v) };
        let mut out = [0.0; 4];
        // SAFETY: `out` is 16 bytes.
        unsafe { _mm_storeu_ps(out.as_mut_ptr(), sums) };
        out
    }

    #[inline(always)]
    fn sums16(self, v: [V; 16]) -> [f32; 16] {
        let mut out = [0.0; 16];
        for q in 0..4 {
            let sums = self.sums4([v[4 * q], v[4 * q + 1], v[4 * q + 2], v[4 * q + 3]]);
            for k in 0..4 {
                out[4 * k + q] = sums[k];
            }
        }
        out
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V {
        // SAFETY: the caller's promise, and the token proves that the CPU has the instruction.
        let low = unsafe { _mm256_loadu_ps(p) };
        // SAFETY: as above.
        let high = unsafe { _mm256_loadu_ps(p.wrapping_add(8)) };
        (low, high)
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: V) {
        // SAFETY: the caller's promise, and the token proves that the CPU has the instruction.
        unsafe { _mm256_storeu_ps(p, v.0) };
        // SAFETY: as above.
        unsafe { _mm256_storeu_ps(p.wrapping_add(8), v.1) };
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> V {
        // SAFETY: the caller's promise, and the token proves that the CPU has the instruction.
        let low = unsafe { _mm_loadu_si128(p.cast()) };
        // SAFETY: as above.
        let high = unsafe { _mm_loadu_si128(p.wrapping_add(16).cast()) };
        let bits = (low, high);
        both!(_mm256_cvtph_ps, bits)
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> V {
        // SAFETY: the caller's promise, and the token proves that the CPU has the instruction.
        let low = unsafe { _mm_loadu_si128(p.cast()) };
        // SAFETY: as above.
        let high = unsafe { _mm_loadu_si128(p.wrapping_add(16).cast()) };
        let bits = (low, high);
        both!(widen_bf16, bits)
    }

    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
}
