//! Sixteen f32 lanes, on every CPU the same: each backend performs the same IEEE operations in the same order, so all give the
//! same bits (`backends_agree_bit_for_bit`). A fused multiply-add is fused on all of them, a sum over lanes is one fixed tree.
#![expect(unsafe_code, reason = "vector instructions and raw loads")]

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx2;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx512;
mod portable;
#[cfg(test)]
mod tests;

#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) use avx2::Avx2;
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) use avx512::Avx512;
pub(super) use portable::Portable;

/// Lanes of a vector.
pub(super) const LANES: usize = 16;

/// A backend. A value of the type is the proof that this CPU has its instructions.
pub(super) trait Simd: Copy {
    /// Sixteen f32.
    type V: Copy;
    /// Whether there are 32 vector registers of 16 lanes, so that kernels keep 16 sums in flight; else 4.
    const WIDE: bool;

    /// Runs `work`, as a function of its own, with the backend's instructions switched on. A closure in between is compiled
    /// without them, so that its vectors are passed through memory: none may stand on a hot path.
    fn vectorize<W: Work>(self, work: W) -> W::Output;

    fn splat(self, x: f32) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a > b ? a : b` a lane: `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// 0 where `x < limit`, else `r`.
    fn zero_below(self, x: Self::V, limit: Self::V, r: Self::V) -> Self::V;
    /// `2^n`, where `n` (-126..=127) stands in the low bits of `t`'s representation.
    fn pow2(self, t: Self::V) -> Self::V;

    /// The sum of a vector's lanes: lanes 8 apart, then 4, then 2, then 1.
    fn sum(self, v: Self::V) -> f32;
    /// The largest lane.
    fn largest(self, v: Self::V) -> f32;
    /// `sum` of four vectors.
    fn sums4(self, v: [Self::V; 4]) -> [f32; 4];
    /// `sum` of sixteen vectors, transposed as a 4 x 4 square: entry `4 * k + q` is the sum of `v[4 * q + k]`.
    fn sums16(self, v: [Self::V; 16]) -> [f32; 16];

    /// # Safety
    /// 64 bytes are readable at `p`.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// # Safety
    /// 64 bytes are writable at `p`.
    unsafe fn store(self, p: *mut f32, v: Self::V);
    /// # Safety
    /// 32 bytes are readable at `p`.
    unsafe fn load_f16(self, p: *const u8) -> Self::V;
    /// # Safety
    /// 32 bytes are readable at `p`.
    unsafe fn load_bf16(self, p: *const u8) -> Self::V;
    /// Asks for the cache line at `p` ahead of its use; any address is allowed. Into the second level: on Zen 4 that is 2 to 4
    /// times as fast as into the first, which has too few requests in flight (benches/attention.rs).
    fn prefetch(self, p: *const u8);
}

/// What [`Simd::vectorize`] runs.
pub(super) trait Work {
    type Output;
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// The fastest backend of this CPU.
#[derive(Clone, Copy, Debug)]
pub(super) enum Backend {
    Portable(Portable),
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    Avx2(Avx2),
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    Avx512(Avx512),
}

impl Backend {
    /// Every backend that this CPU can run, the fastest first.
    pub(super) fn available() -> impl Iterator<Item = Self> {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        let fast = [Avx512::detect().map(Self::Avx512), Avx2::detect().map(Self::Avx2)];
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let fast: [Option<Self>; 0] = [];
        fast.into_iter().flatten().chain([Self::Portable(Portable)])
    }

    pub(super) fn best() -> Self {
        Self::available().next().expect("the portable backend is always there")
    }

    pub(super) fn run<W: Work>(self, work: W) -> W::Output {
        match self {
            Self::Portable(simd) => simd.vectorize(work),
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            Self::Avx2(simd) => simd.vectorize(work),
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            Self::Avx512(simd) => simd.vectorize(work),
        }
    }
}

/// An element type, as the kernels load it.
pub(super) trait Element: Copy {
    const BYTES: usize;
    /// # Safety
    /// 16 elements are readable at `p`.
    unsafe fn load<S: Simd>(simd: S, p: *const u8) -> S::V;
    /// # Safety
    /// One element is readable at `p`.
    unsafe fn load_one(p: *const u8) -> f32;
}

#[derive(Clone, Copy)]
pub(super) struct F32;
#[derive(Clone, Copy)]
pub(super) struct F16;
#[derive(Clone, Copy)]
pub(super) struct Bf16;

impl Element for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, p: *const u8) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { simd.load(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_one(p: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<f32>().read_unaligned() }
    }
}

impl Element for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, p: *const u8) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { simd.load_f16(p) }
    }
    #[inline(always)]
    unsafe fn load_one(p: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        half::f16::from_bits(unsafe { p.cast::<u16>().read_unaligned() }).to_f32_const()
    }
}

impl Element for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, p: *const u8) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { simd.load_bf16(p) }
    }
    #[inline(always)]
    unsafe fn load_one(p: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        f32::from_bits(u32::from(unsafe { p.cast::<u16>().read_unaligned() }) << 16)
    }
}

/// Below this, `exp` is 0: its results would be subnormal.
const EXP_ZERO_BELOW: f32 = -87.0;

/// `e^x` a lane for x <= 88, within 2 units in the last place; 0 below -87; NaN stays NaN.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`; `e^r` by its Taylor polynomial of degree 7, whose remainder is below 6e-9.
#[inline(always)]
pub(super) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // Adding 1.5 * 2^23 leaves the nearest integer (ties to even) in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts; the first has few bits, so that `n * LN2_HIGH` is exact.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const INVERSE_FACTORIALS: [f32; 6] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0];
    let limit = s.splat(EXP_ZERO_BELOW);
    let clamped = s.max(limit, x);
    let t = s.fma(clamped, s.splat(std::f32::consts::LOG2_E), s.splat(ROUND));
    let n = s.sub(t, s.splat(ROUND));
    let r = s.fma(n, s.splat(-LN2_HIGH), clamped);
    let r = s.fma(n, s.splat(-LN2_LOW), r);
    let mut sum = s.splat(1.0 / 5040.0);
    for c in INVERSE_FACTORIALS {
        sum = s.fma(sum, r, s.splat(c));
    }
    sum = s.fma(sum, r, s.splat(1.0));
    s.zero_below(x, limit, s.mul(sum, s.pow2(t)))
}

/// `e^x` of one number, with the bits of [`exp`].
#[inline(always)]
pub(super) fn exp_one<S: Simd>(s: S, x: f32) -> f32 {
    s.largest(exp(s, s.splat(x)))
}
