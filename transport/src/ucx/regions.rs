//! The registered regions, on the thread that drives UCX.

use super::ffi::Mapped;
use crate::raw::RawRun;

/// Regions by address, to spare UCX the search for what it registered itself.
#[derive(Default)]
pub(super) struct Regions {
    /// First address, one past the last, and the region; by address.
    by_address: Vec<(usize, usize, Mapped)>,
}

impl Regions {
    pub(super) fn add(&mut self, start: usize, bytes: usize, mapped: Mapped) {
        let at = self.by_address.partition_point(|(other, ..)| *other <= start);
        self.by_address.insert(at, (start, start + bytes, mapped));
    }

    /// A region that holds all of `run`; none for a slab. Where regions overlap it may miss one, and UCX searches then.
    pub(super) fn find(&self, run: RawRun) -> Option<&Mapped> {
        let start = run.start().addr();
        let at = self.by_address.partition_point(|(other, ..)| *other <= start).checked_sub(1)?;
        let (_, end, mapped) = &self.by_address[at];
        (start + run.bytes() <= *end).then_some(mapped)
    }
}
