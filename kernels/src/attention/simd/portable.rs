//! Plain Rust, for CPUs without another backend and as the others' reference.

use super::{LANES, Simd, Work};

/// Needs nothing. Fused multiply-adds are library calls where the target has no such instruction.
#[derive(Clone, Copy, Debug)]
pub(in crate::attention) struct Portable;

type V = [f32; LANES];

#[inline(always)]
fn map2(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Simd for Portable {
    type V = V;
    const WIDE: bool = false;

    #[inline(never)]
    fn vectorize<W: Work>(self, work: W) -> W::Output {
        work.run(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        [x; LANES]
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        map2(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn zero_below(self, x: V, limit: V, r: V) -> V {
        std::array::from_fn(|i| if x[i] < limit[i] { 0.0 } else { r[i] })
    }

    #[inline(always)]
    fn pow2(self, t: V) -> V {
        t.map(|t| f32::from_bits((t.to_bits() << 23).wrapping_add(0x3F80_0000)))
    }

    #[inline(always)]
    fn sum(self, v: V) -> f32 {
        let a: [f32; 8] = std::array::from_fn(|i| v[i] + v[i + 8]);
        let b: [f32; 4] = std::array::from_fn(|i| a[i] + a[i + 4]);
        (b[0] + b[2]) + (b[1] + b[3])
    }

    #[inline(always)]
    fn largest(self, v: V) -> f32 {
        // The same tree as the others', because a maximum with NaN depends on the order.
        let larger = |a: f32, b: f32| if a > b { a } else { b };
        let a: [f32; 8] = std::array::from_fn(|i| larger(v[i], v[i + 8]));
        let b: [f32; 4] = std::array::from_fn(|i| larger(a[i], a[i + 4]));
        larger(larger(b[0], b[2]), larger(b[1], b[3]))
    }

    #[inline(always)]
    fn sums4(self, v: [V; 4]) -> [f32; 4] {
        v.map(|v| self.sum(v))
    }

    #[inline(always)]
    fn sums16(self, v: [V; 16]) -> [f32; 16] {
        std::array::from_fn(|i| self.sum(v[4 * (i % 4) + i / 4]))
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V {
        // SAFETY: the caller's promise; a vector is 16 f32.
        unsafe { p.cast::<V>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: V) {
        // SAFETY: the caller's promise; a vector is 16 f32.
        unsafe { p.cast::<V>().write_unaligned(v) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> V {
        // SAFETY: the caller's promise; these are 16 u16.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|bits| half::f16::from_bits(bits).to_f32_const())
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> V {
        // SAFETY: the caller's promise; these are 16 u16.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }

    #[inline(always)]
    fn prefetch(self, _: *const u8) {}
}
