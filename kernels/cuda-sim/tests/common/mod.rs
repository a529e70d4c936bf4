//! Numbers, and what a cache's bits mean, worked out in another way than the kernels do.
#![allow(dead_code, reason = "each test file uses its own part")]

use half::{bf16, f16};
use kvferry_kernels::cuda::Element;

/// Numbers from a seed.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() >> 16) as usize % limit
    }

    /// Between -1 and 1.
    pub(crate) fn real(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(crate) fn shuffled(&mut self, count: u32) -> Vec<u32> {
        let mut out: Vec<u32> = (0..count).collect();
        for at in (1..out.len()).rev() {
            out.swap(at, self.below(at + 1));
        }
        out
    }
}

/// What bits mean.
pub(crate) fn decode(element: Element, bits: u32) -> f64 {
    let small = |mantissa: u32, bias: i32| {
        let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
        let (exponent, fraction) = ((bits & 0x7f) >> mantissa, f64::from(bits & ((1 << mantissa) - 1)));
        let ones = f64::from(1 << mantissa);
        match exponent {
            0 => sign * fraction / ones * 2_f64.powi(1 - bias),
            _ => sign * (1.0 + fraction / ones) * 2_f64.powi(exponent as i32 - bias),
        }
    };
    match element {
        Element::F32 => f64::from(f32::from_bits(bits)),
        Element::F16 => f16::from_bits(bits as u16).to_f64(),
        Element::Bf16 => bf16::from_bits(bits as u16).to_f64(),
        Element::E4m3 if bits & 0x7f == 0x7f => f64::NAN,
        Element::E4m3 => small(3, 7),
        Element::E5m2 if bits & 0x7f > 0x7c => f64::NAN,
        Element::E5m2 if bits & 0x7f == 0x7c => {
            if bits & 0x80 == 0 {
                f64::INFINITY
            } else {
                f64::NEG_INFINITY
            }
        }
        Element::E5m2 => small(2, 15),
    }
}

/// The nearest bits, ties to even; FP8 by a search of all its numbers, saturating.
pub(crate) fn encode(element: Element, x: f32) -> u32 {
    match element {
        Element::F32 => x.to_bits(),
        Element::F16 => f16::from_f32(x).to_bits().into(),
        Element::Bf16 => bf16::from_f32(x).to_bits().into(),
        Element::E4m3 | Element::E5m2 if x.is_nan() => 0x7f,
        Element::E4m3 | Element::E5m2 => {
            let finite = (0..0x7f).filter(|&bits| decode(element, bits).is_finite());
            let largest = decode(element, finite.clone().next_back().unwrap());
            let magnitude = f64::from(x.abs()).min(largest);
            let distance = |bits: u32| (decode(element, bits) - magnitude).abs();
            let nearer = |best: u32, bits: u32| match distance(bits).total_cmp(&distance(best)) {
                std::cmp::Ordering::Less => bits,
                std::cmp::Ordering::Equal if bits.is_multiple_of(2) => bits,
                _ => best,
            };
            let best = finite.reduce(nearer);
            best.unwrap() | if x.is_sign_negative() { 0x80 } else { 0 }
        }
    }
}

/// Elements as they lie in memory.
pub(crate) fn bytes_of(element: Element, bits: impl IntoIterator<Item = u32>) -> Vec<u8> {
    bits.into_iter().flat_map(|bits| bits.to_le_bytes()[..element.bytes() as usize].to_vec()).collect()
}

/// The bits of an element in memory.
pub(crate) fn bits_at(element: Element, bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    let size = element.bytes() as usize;
    word[..size].copy_from_slice(&bytes[at..at + size]);
    u32::from_le_bytes(word)
}
