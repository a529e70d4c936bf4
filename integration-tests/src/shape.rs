//! What differs between clusters under the same faults.

use std::fmt;

use crate::{Chance, Setup};

/// How the two sides of a cluster are configured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Tensor-parallel ranks of a prefill node.
    pub prefill_tp: u16,
    /// Tensor-parallel ranks of a decode node.
    pub decode_tp: u16,
    /// Whether prefill speaks first.
    pub prefill_first: bool,
    /// Whether a request fails whose KV does not come; otherwise its prompt is computed by the decode node.
    pub fails: bool,
    /// Whether prefill keeps blocks in host memory, and decode sends it those of its answers. Then prompts are repeated, too.
    pub write_back: bool,
    /// How KV may go: `KVFERRY_PATHS` of its nodes.
    pub paths: &'static str,
    /// Whether decode reads prefill's blocks where they lie, where the ranks and the way allow it.
    pub in_place: bool,
}

/// The ways of the shapes. Links break TCP; where memory is shared on one host they break the control lanes only, while nodes are
/// stopped and killed all the same.
const PATHS: [&str; 4] = ["tcp", "shm,uds", "tcp", "cma,uds"];

impl Default for Shape {
    fn default() -> Self {
        Self {
            prefill_tp: 1,
            decode_tp: 1,
            prefill_first: false,
            fails: false,
            write_back: false,
            paths: "tcp",
            in_place: false,
        }
    }
}

impl Shape {
    /// Four of them in which everything is different twice: each choice is in two, and any two choices meet in all their
    /// combinations. Which one has which ranks is left to chance, and whether the one that shares memory reads it in place.
    #[must_use]
    pub fn four(chance: &mut Chance) -> [Self; 4] {
        let flips = chance.draw();
        let flip = |bit: u64| flips >> bit & 1 == 1;
        let mut ranks = [(1, 1), (2, 1), (1, 2), (2, 2)];
        for last in (1..ranks.len()).rev() {
            ranks.swap(last, chance.below(last as u64 + 1) as usize);
        }
        let turn = chance.below(4) as usize;
        [0, 1, 2, 3].map(|number: usize| {
            let (low, high) = (number & 1 == 1, number & 2 == 2);
            let (prefill_tp, decode_tp) = ranks[number];
            let paths = PATHS[(number + turn) % 4];
            Self {
                prefill_tp,
                decode_tp,
                prefill_first: low ^ flip(0),
                fails: high ^ flip(1),
                write_back: low ^ high ^ flip(2),
                paths,
                in_place: paths.contains("shm") && flip(3),
            }
        })
    }

    /// A prefill node of this shape.
    #[must_use]
    pub fn prefill(&self, setup: &Setup) -> Setup {
        let setup = self.both(setup).args(&format!("--tp {}", self.prefill_tp));
        if self.write_back { setup.env("KVFERRY_TIER_BYTES", TIER_BYTES) } else { setup }
    }

    /// A decode node of this shape.
    #[must_use]
    pub fn decode(&self, setup: &Setup) -> Setup {
        let setup = self.both(setup).args(&format!("--tp {}", self.decode_tp));
        let setup = if self.fails { setup.env("KVFERRY_LOAD_FAILURE_POLICY", "fail") } else { setup };
        if self.write_back { setup.env("KVFERRY_WRITE_BACK_BLOCKS", "2") } else { setup }
    }

    fn both(&self, setup: &Setup) -> Setup {
        let order = if self.prefill_first { "prefill-first" } else { "decode-first" };
        let same_host = if self.in_place { "in-place" } else { "copy" };
        let setup = setup.clone().env("KVFERRY_PATHS", self.paths).env("KVFERRY_SAME_HOST", same_host);
        setup.args(&format!("--order {order}"))
    }

    /// Sessions between one prefill and one decode node: each decode rank reads its heads from as few ranks as hold them.
    #[must_use]
    pub fn sessions(&self) -> u16 {
        // The embedded model has two KV heads, and no side has more ranks than that.
        self.prefill_tp.max(self.decode_tp)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { prefill_tp, decode_tp, prefill_first, fails, write_back, paths, in_place } = self;
        let order = if *prefill_first { "prefill-first" } else { "decode-first" };
        let policy = if *fails { "fail" } else { "recompute" };
        let write_back = if *write_back { "on" } else { "off" };
        let same_host = if *in_place { ", in place" } else { "" };
        write!(
            f,
            "TP {prefill_tp} to {decode_tp}, {order}, policy {policy}, write-back {write_back}, paths {paths}{same_host}"
        )
    }
}

/// Some hundred blocks of the embedded model: they are given up for others now and then.
const TIER_BYTES: &str = "4194304";

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn any_two_choices_meet_in_all_combinations() {
        for seed in 0..50 {
            let four = Shape::four(&mut Chance::new(seed));
            let pairs = [
                four.map(|shape| (shape.prefill_first, shape.fails)),
                four.map(|shape| (shape.fails, shape.write_back)),
                four.map(|shape| (shape.prefill_first, shape.write_back)),
            ];
            for pair in pairs {
                assert_eq!(BTreeSet::from(pair).len(), 4, "seed {seed}: {four:?}");
            }
            assert_eq!(BTreeSet::from(four.map(|shape| (shape.prefill_tp, shape.decode_tp))).len(), 4);
        }
    }
}
