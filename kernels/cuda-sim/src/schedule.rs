//! Which thread goes on.

use std::collections::VecDeque;

/// Numbers from a seed: SplitMix64.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number below `limit`, which is not 0.
    pub(crate) const fn below(&mut self, limit: u32) -> u32 {
        (((self.next() >> 32) * limit as u64) >> 32) as u32
    }
}

/// The threads of a block that can go on, and the order in which they do.
#[derive(Debug)]
pub(crate) struct Ready {
    threads: VecDeque<u32>,
    policy: Policy,
    random: Random,
}

#[derive(Clone, Copy, Debug)]
enum Policy {
    /// Who became ready first: all threads advance alike.
    Oldest,
    /// Who became ready last: one warp runs as far as it can.
    Newest,
    Any,
}

impl Ready {
    /// No thread yet; the seed decides how they will be picked.
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let policy = match random.below(4) {
            0 => Policy::Oldest,
            1 => Policy::Newest,
            _ => Policy::Any,
        };
        Self { threads: VecDeque::new(), policy, random }
    }

    pub(crate) fn push(&mut self, thread: u32) {
        self.threads.push_back(thread);
    }

    pub(crate) fn pick(&mut self) -> Option<u32> {
        match self.policy {
            Policy::Oldest => self.threads.pop_front(),
            Policy::Newest => self.threads.pop_back(),
            Policy::Any => match self.threads.len() as u32 {
                0 => None,
                count => self.threads.swap_remove_back(self.random.below(count) as usize),
            },
        }
    }
}
