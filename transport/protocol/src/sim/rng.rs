//! A small seeded generator: the same seed gives the same run on every machine.

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
#[derive(Debug, Clone)]
pub(super) struct Rng(u64);

impl Rng {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number in `range`, which must not be empty.
    pub(super) const fn within(&mut self, range: std::ops::Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start)
    }

    /// One of some; `None` if there is none.
    pub(super) fn one_of<'a, T>(&mut self, some: &'a [T]) -> Option<&'a T> {
        if some.is_empty() { None } else { some.get(self.within(0..some.len() as u64) as usize) }
    }

    /// True once in `times` on average; never if `times` is 0.
    pub(super) const fn once_in(&mut self, times: u64) -> bool {
        times > 0 && self.next().is_multiple_of(times)
    }
}

/// The finaliser of SplitMix64: a bijection that mixes well.
pub(super) const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
