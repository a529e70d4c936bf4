//! Parts of a grant's window that take no more bytes.

use std::collections::BTreeMap;

use kvferry_protocol::pages::Extent;

/// Whole stretches are merged, so what landed chunk after chunk is one of them.
#[derive(Debug, Default)]
pub(crate) struct Seals {
    /// Stretches that share no byte and do not abut, from start to end.
    stretches: BTreeMap<u64, u64>,
    nests: Vec<Extent>,
    changes: u64,
}

/// With how many seals a frame was compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct SealsSeen {
    nests: usize,
    changes: u64,
}

impl Seals {
    pub(crate) fn add(&mut self, extents: &[Extent]) {
        self.changes += 1;
        for extent in extents {
            if extent.loops.is_empty() {
                self.add_stretch(extent.offset, extent.offset.saturating_add(extent.run_bytes));
            } else {
                self.nests.push(extent.clone());
            }
        }
    }

    fn add_stretch(&mut self, mut start: u64, mut end: u64) {
        while let Some((&first, &last)) = self.stretches.range(..=end).next_back().filter(|&(_, &last)| last >= start) {
            self.stretches.remove(&first);
            (start, end) = (start.min(first), end.max(last));
        }
        self.stretches.insert(start, end);
    }

    /// Whether a frame, whose extents are inside the window, has bytes in what was sealed since it was last asked.
    pub(crate) fn meet(&self, extents: &[Extent], seen: &mut SealsSeen) -> bool {
        if seen.changes == self.changes {
            return false;
        }
        let new = &self.nests[seen.nests..];
        *seen = SealsSeen { nests: self.nests.len(), changes: self.changes };
        extents.iter().any(|extent| self.stretches_meet(extent) || new.iter().any(|nest| nest.meets(extent)))
    }

    fn stretches_meet(&self, extent: &Extent) -> bool {
        // Checked at admission; one without an end would reach into every stretch.
        let end = extent.end().unwrap_or(u64::MAX);
        let near = self.stretches.range(..end).rev().take_while(|&(_, &last)| last > extent.offset);
        near.into_iter().any(|(&start, &last)| Extent::contiguous(start, last - start).meets(extent))
    }
}

#[cfg(test)]
mod tests {
    use kvferry_protocol::pages::Loop;

    use super::*;

    fn meets(seals: &Seals, offset: u64, bytes: u64) -> bool {
        seals.meet(&[Extent::contiguous(offset, bytes)], &mut SealsSeen::default())
    }

    #[test]
    fn chunks_in_any_order_become_one_stretch() {
        let mut seals = Seals::default();
        for chunk in [3_u64, 0, 7, 1, 2, 6, 5, 4] {
            seals.add(&[Extent::contiguous(chunk * 10, 10)]);
            assert!(meets(&seals, chunk * 10 + 9, 5));
            assert!(!meets(&seals, 80, 5));
        }
        assert_eq!(seals.stretches, BTreeMap::from([(0, 80)]));
        seals.add(&[Extent::contiguous(90, 10), Extent::contiguous(85, 20)]);
        assert_eq!(seals.stretches, BTreeMap::from([(0, 80), (85, 105)]));
        assert!(!meets(&seals, 80, 5) && meets(&seals, 80, 6) && meets(&seals, 104, 1) && !meets(&seals, 105, 1));
    }

    #[test]
    fn a_frame_is_compared_with_what_is_new_only_but_with_all_of_that() {
        let (mut seals, mut seen) = (Seals::default(), SealsSeen::default());
        let comb = |offset| Extent { offset, loops: vec![Loop { count: 8, stride: 16 }], run_bytes: 4 };
        assert!(!seals.meet(&[comb(0)], &mut seen));
        seals.add(&[comb(4)]);
        assert!(!seals.meet(&[comb(0)], &mut seen));
        seals.add(&[comb(8), Extent::contiguous(12, 4)]);
        assert!(!seals.meet(&[comb(0)], &mut seen));
        seals.add(&[comb(3)]);
        assert!(seals.meet(&[comb(0)], &mut seen));
        assert!(meets(&seals, 0, 200) && !meets(&seals, 0, 3));
    }
}
