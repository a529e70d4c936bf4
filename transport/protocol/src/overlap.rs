//! Whether two nests of runs share a byte.

use crate::pages::{Extent, Loop};

impl Extent {
    /// Whether the two share a byte. Both are nests that do not overlap themselves, as a receiver checks of each extent of a
    /// frame.
    ///
    /// The answer costs a handful of steps where loops have the same strides, as parts of one window have. Nests that are made to
    /// be hard may cost more; after 65,536 steps the answer is yes, which refuses a write and never permits one.
    #[must_use]
    pub fn meets(&self, other: &Self) -> bool {
        let (a, b) = (Nest::of(self), Nest::of(other));
        let mut steps = MAX_STEPS;
        meets(&a.at(0), &b.at(0), &mut steps)
    }
}

/// Steps of one comparison.
const MAX_STEPS: u32 = 1 << 16;

/// A nest with its loops by falling stride.
struct Nest {
    start: i128,
    loops: Vec<Loop>,
    /// Bytes from the first to the last byte of what is inside the first `i` loops.
    spans: Vec<i128>,
}

/// What is inside some of the loops, at one step of each.
#[derive(Clone, Copy)]
struct Part<'a> {
    start: i128,
    loops: &'a [Loop],
    /// Of the loops, then of the run.
    spans: &'a [i128],
}

impl Nest {
    fn of(extent: &Extent) -> Self {
        let mut loops: Vec<_> = extent.loops.iter().copied().filter(|l| l.count > 1).collect();
        loops.sort_unstable_by_key(|l| std::cmp::Reverse(l.stride));
        let mut spans = vec![i128::from(extent.run_bytes)];
        for l in loops.iter().rev() {
            spans.push(spans[spans.len() - 1] + i128::from(l.count - 1) * i128::from(l.stride));
        }
        spans.reverse();
        Self { start: extent.offset.into(), loops, spans }
    }

    fn at(&self, shift: i128) -> Part<'_> {
        Part { start: self.start + shift, loops: &self.loops, spans: &self.spans }
    }
}

impl<'a> Part<'a> {
    fn end(&self) -> i128 {
        self.start + self.spans[0]
    }

    fn stride(&self) -> i128 {
        self.loops.first().map_or(0, |l| l.stride.into())
    }

    /// One step of the outermost loop.
    fn step(&self, index: i128) -> Self {
        Part { start: self.start + index * self.stride(), loops: &self.loops[1..], spans: &self.spans[1..] }
    }

    fn last_step(&self) -> i128 {
        self.loops.first().map_or(0, |l| i128::from(l.count) - 1)
    }
}

fn meets(a: &Part<'_>, b: &Part<'_>, steps: &mut u32) -> bool {
    if *steps == 0 {
        return true;
    }
    *steps -= 1;
    if a.end() <= b.start || b.end() <= a.start {
        return false;
    }
    if a.loops.is_empty() && b.loops.is_empty() {
        return true;
    }
    if a.stride() == b.stride() {
        // Only how many steps the two are apart counts, and few distances bring them close enough.
        let (inner_a, inner_b) = (a.step(0), b.step(0));
        let distances = steps_between(&inner_a, a.stride(), inner_b.start, inner_b.end());
        let (first, last) = (distances.0.max(-b.last_step()), distances.1.min(a.last_step()));
        return (first..=last).any(|distance| meets(&a.step(distance), &inner_b, steps));
    }
    let (outer, other) = if a.stride() > b.stride() { (a, b) } else { (b, a) };
    let (first, last) = steps_between(&outer.step(0), outer.stride(), other.start, other.end());
    (first.max(0)..=last.min(outer.last_step())).any(|index| meets(&outer.step(index), other, steps))
}

/// The first and the last number of strides by which `part` must move to share a byte with `start..end`.
fn steps_between(part: &Part<'_>, stride: i128, start: i128, end: i128) -> (i128, i128) {
    let first = (start - part.end()).div_euclid(stride) + 1;
    let last = (end - 1 - part.start).div_euclid(stride);
    (first, last)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn bytes(extent: &Extent) -> BTreeSet<u64> {
        let mut set = BTreeSet::new();
        extent.for_each_run(|start| set.extend(start..start + extent.run_bytes));
        set
    }

    /// Loops in any order, each stride at least what is inside it.
    fn any_nest() -> impl Strategy<Value = Extent> {
        let loops = prop::collection::vec((1..4_u32, 0..5_u64), 0..4);
        (0..60_u64, 1..5_u64, loops, any::<bool>()).prop_map(|(offset, run_bytes, gaps, turned)| {
            let mut span = run_bytes;
            let mut loops = Vec::new();
            for (count, gap) in gaps {
                let stride = span + gap;
                loops.push(Loop { count, stride });
                span += u64::from(count - 1) * stride;
            }
            if !turned {
                loops.reverse();
            }
            Extent { offset, loops, run_bytes }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn nests_meet_where_they_share_a_byte(a in any_nest(), b in any_nest()) {
            let shared = !bytes(&a).is_disjoint(&bytes(&b));
            prop_assert_eq!(a.meets(&b), shared);
            prop_assert_eq!(b.meets(&a), shared);
        }

        #[test]
        fn nests_of_one_shape_meet_where_they_share_a_byte(a in any_nest(), shift in 0..80_u64) {
            let b = Extent { offset: a.offset + shift, ..a.clone() };
            prop_assert_eq!(a.meets(&b), !bytes(&a).is_disjoint(&bytes(&b)));
        }
    }

    #[test]
    fn layers_of_a_large_window_are_told_apart_at_once() {
        // 4096 blocks of 32 layers, heads outside layers: one layer beside the next, and beside itself.
        let layer = |first: u64, count: u32| Extent {
            offset: first * 4096,
            loops: vec![
                Loop { count: 4096, stride: 8 * 32 * 4096 },
                Loop { count: 8, stride: 32 * 4096 },
                Loop { count, stride: 4096 },
            ],
            run_bytes: 4096,
        };
        let (a, b) = (Nest::of(&layer(0, 20)), Nest::of(&layer(20, 12)));
        let mut steps = 100;
        assert!(!meets(&a.at(0), &b.at(0), &mut steps));
        assert!(layer(19, 1).meets(&layer(0, 20)) && !layer(20, 1).meets(&layer(0, 20)));
    }

    #[test]
    fn what_is_made_to_be_hard_is_answered_with_yes() {
        let comb = |offset, stride| Extent { offset, loops: vec![Loop { count: 1 << 30, stride }], run_bytes: 1 };
        assert!(comb(0, 1 << 20).meets(&comb(1, (1 << 20) - 2)), "odd and even bytes, but too many steps to know");
    }
}
