//! AVX-512F: a vector is one register.

use std::arch::x86_64::*;

use super::{LANES, Simd, Work};

/// Proves that the CPU has AVX-512F (which implies AVX2, FMA and F16C).
#[derive(Clone, Copy, Debug)]
pub(in crate::attention) struct Avx512(());

impl Avx512 {
    pub(in crate::attention) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }
}

/// Adds lanes `i` of pairs that two shuffles bring together; how sixteen sums become one vector.
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
#[inline]
fn sums16(v: [__m512; 16]) -> __m512 {
    // Spelled out, because a closure (of `array::from_fn`) is compiled without these instructions.
    let zero = _mm512_setzero_ps();
    // Lanes 8 apart: each result holds 8 partial sums of two vectors.
    let mut halves = [zero; 8];
    for i in 0..8 {
        let (x, y) = (v[2 * i], v[2 * i + 1]);
        halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(x, y), _mm512_shuffle_f32x4::<0xEE>(x, y));
    }
    // Lanes 4 apart: each result holds 4 partial sums of four vectors.
    let mut quarters = [zero; 4];
    for i in 0..4 {
        let (x, y) = (halves[2 * i], halves[2 * i + 1]);
        quarters[i] = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(x, y), _mm512_shuffle_f32x4::<0xDD>(x, y));
    }
    let mut pairs = [zero; 2];
    for i in 0..2 {
        let (x, y) = (quarters[2 * i], quarters[2 * i + 1]);
        pairs[i] = _mm512_add_ps(_mm512_shuffle_ps::<0x44>(x, y), _mm512_shuffle_ps::<0xEE>(x, y));
    }
    _mm512_add_ps(_mm512_shuffle_ps::<0x88>(pairs[0], pairs[1]), _mm512_shuffle_ps::<0xDD>(pairs[0], pairs[1]))
}

/// Lanes 8 apart, then 4, 2 and 1.
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
#[inline]
fn sum(v: __m512) -> f32 {
    let v = _mm512_add_ps(v, _mm512_shuffle_f32x4::<0x4E>(v, v));
    let v = _mm512_castps512_ps256(v);
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps::<0x55>(v, v)))
}

#[target_feature(enable = "avx512f,avx2,fma,f16c")]
#[inline]
fn largest(v: __m512) -> f32 {
    let v = _mm512_max_ps(v, _mm512_shuffle_f32x4::<0x4E>(v, v));
    let v = _mm512_castps512_ps256(v);
    let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(_mm_max_ss(v, _mm_shuffle_ps::<0x55>(v, v)))
}

#[target_feature(enable = "avx512f,avx2,fma,f16c")]
#[inline]
fn zero_below(x: __m512, limit: __m512, r: __m512) -> __m512 {
    _mm512_mask_mov_ps(r, _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, limit), _mm512_setzero_ps())
}

#[target_feature(enable = "avx512f,avx2,fma,f16c")]
#[inline]
fn pow2(t: __m512) -> __m512 {
    let n = _mm512_slli_epi32::<23>(_mm512_castps_si512(t));
    _mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(0x3F80_0000)))
}

#[target_feature(enable = "avx512f,avx2,fma,f16c")]
#[inline]
fn widen_bf16(bits: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
}

#[target_feature(enable = "avx512f,avx2,fma,f16c")]
#[inline(never)]
fn call<W: Work>(simd: Avx512, work: W) -> W::Output {
    work.run(simd)
}

impl Simd for Avx512 {
    type V = __m512;
    const WIDE: bool = true;

    #[inline(always)]
    fn vectorize<W: Work>(self, work: W) -> W::Output {
        // SAFETY: the token proves that the CPU has the instruction.
        unsafe { call(self, work) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: the token proves that the CPU has the instruction.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves that the CPU has the instruction.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves that the CPU has the instruction.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves that the CPU has the instruction.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves that the CPU has the instruction.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the token proves that the CPU has the instruction.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves that the CPU has the instruction.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn zero_below(self, x: __m512, limit: __m512, r: __m512) -> __m512 {
        // SAFETY: the token proves that the CPU has the instruction.
        unsafe { zero_below(x, limit, r) }
    }

    #[inline(always)]
    fn pow2(self, t: __m512) -> __m512 {
        // SAFETY: the token proves that the CPU has the instruction.
        unsafe { pow2(t) }
    }

    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        // SAFETY: the token proves that the CPU has the instruction.
        unsafe { sum(v) }
    }

    #[inline(always)]
    fn largest(self, v: __m512) -> f32 {
        // SAFETY: the token proves that the CPU has the instruction.
        unsafe { largest(v) }
    }

    #[inline(always)]
    fn sums4(self, v: [__m512; 4]) -> [f32; 4] {
        [self.sum(v[0]), self.sum(v[1]), self.sum(v[2]), self.sum(v[3])]
    }

    #[inline(always)]
    fn sums16(self, v: [__m512; 16]) -> [f32; 16] {
        // SAFETY: the token proves that the CPU has the instructions.
        let sums = unsafe { sums16(v) };
        let mut out = [0.0; LANES];
        // SAFETY: `out` is 64 bytes.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sums) };
        out
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        // SAFETY: the caller's promise, and the token proves that the CPU has the instruction.
        unsafe { _mm512_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        // SAFETY: the caller's promise, and the token proves that the CPU has the instruction.
        unsafe { _mm512_storeu_ps(p, v) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> __m512 {
        // SAFETY: the caller's promise, and the token proves that the CPU has the instruction.
        let bits = unsafe { _mm256_loadu_si256(p.cast()) };
        // SAFETY: the token proves that the CPU has the instruction.
        unsafe { _mm512_cvtph_ps(bits) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> __m512 {
        // SAFETY: the caller's promise, and the token proves that the CPU has the instruction.
        let bits = unsafe { _mm256_loadu_si256(p.cast()) };
        // SAFETY: the token proves that the CPU has the instruction.
        unsafe { widen_bf16(bits) }
    }

    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
}
