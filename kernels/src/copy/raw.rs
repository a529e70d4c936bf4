//! The only place of this module that follows a pointer.
#![expect(unsafe_code, reason = "regions are an engine's memory: addresses, not slices")]

use std::ops::Range;
use std::ptr::NonNull;

use kvferry_protocol::RegionId;
use kvferry_protocol::digest::{Digest, HeadKey};
use kvferry_protocol::layout::{Place, Strip};

use super::hash::{self, Runs};

/// Where regions lie in this process: [`RegionId`] 0, 1, 2, ... by their place in the table.
#[derive(Debug)]
pub struct RegionTable {
    regions: Vec<(NonNull<u8>, usize)>,
}

// SAFETY: the table owns no memory and has no interior state; who made it promised that its regions may be used from any thread.
unsafe impl Send for RegionTable {}
// SAFETY: as above; a shared table only reads its own entries, and what the copies may touch is promised to `new`.
unsafe impl Sync for RegionTable {}

impl RegionTable {
    /// Takes the start and the length in bytes of each region.
    ///
    /// # Safety
    /// For as long as the table lives, the caller keeps each region mapped and readable from any thread, and writable if the
    /// table is the destination of a copy. While a copy or a digest of this module runs, nobody else writes the bytes that it
    /// reads, nor reads or writes the bytes that it writes: the caller holds the blocks' leases, or owns the memory.
    #[must_use]
    pub const unsafe fn new(regions: Vec<(NonNull<u8>, usize)>) -> Self {
        Self { regions }
    }

    /// The length of a region in bytes, if the table has it.
    #[must_use]
    pub fn region_bytes(&self, region: RegionId) -> Option<usize> {
        self.regions.get(region.get() as usize).map(|&(_, bytes)| bytes)
    }

    /// Where a stretch of bytes lies. Plans are checked as a whole before the first byte moves, so that a panic here means a
    /// plan that lied about its bounds; memory stays safe even then.
    #[inline(always)]
    fn resolve(&self, at: Place, bytes: u64) -> NonNull<u8> {
        let (start, length) = self.regions[at.region.get() as usize];
        let fits = at.offset.checked_add(bytes).is_some_and(|end| end <= length as u64);
        assert!(fits, "{at:?} and {bytes} bytes are outside a region of {length} bytes");
        // SAFETY: the offset is within the region, which is one mapped stretch of memory.
        unsafe { start.add(at.offset as usize) }
    }
}

/// A table of one region: a buffer that the caller lends for as long as the table is used.
pub(super) fn table_of(buffer: &mut [u8]) -> RegionTable {
    RegionTable { regions: vec![(NonNull::from(&mut *buffer).cast(), buffer.len())] }
}

/// Copies one run. The two may overlap; then the destination gets what the source held.
///
/// # Panics
/// If a run lies outside its region.
#[inline(always)]
pub(super) fn copy_run(src: &RegionTable, from: Place, dst: &RegionTable, to: Place, bytes: u64) {
    let (from, to) = (src.resolve(from, bytes), dst.resolve(to, bytes));
    // SAFETY: both stretches lie in mapped regions, readable and writable, and nobody else uses them meanwhile, as the tables'
    // maker promised.
    unsafe { from.copy_to(to, bytes as usize) };
}

/// Digests a strip in the order in which it lies in memory: a run for each of `keys` and `tokens`.
///
/// # Panics
/// If a run lies outside the strip's region.
pub(super) fn strip_digest(table: &RegionTable, strip: &Strip, keys: &[HeadKey], tokens: Range<u32>) -> Digest {
    let Strip { place, head_stride, token_stride, run_bytes } = *strip;
    let (heads, count) = (keys.len() as u64, tokens.len() as u64);
    if heads == 0 || count == 0 {
        return Digest::ZERO;
    }
    let last = (heads - 1) * head_stride + (count - 1) * token_stride;
    let start = table.resolve(place, last + u64::from(run_bytes));
    let runs = Runs {
        start,
        head_stride: head_stride as usize,
        token_stride: token_stride as usize,
        run_bytes: run_bytes as usize,
        keys,
        tokens,
    };
    // SAFETY: the last run's end was found to lie in the region, so all runs do: mapped, readable, and nobody writes them
    // meanwhile, as the table's maker promised.
    unsafe { hash::digest(&runs) }
}

#[cfg(test)]
impl RegionTable {
    /// A table of vectors numbered from 0 without gaps. The tests keep them alive and use them from one thread.
    pub(super) fn over(memory: &mut std::collections::BTreeMap<RegionId, Vec<u8>>) -> Self {
        let region = |bytes: &mut Vec<u8>| (NonNull::from(bytes.as_mut_slice()).cast(), bytes.len());
        let regions = memory.values_mut().map(region).collect();
        // SAFETY: each test drops its table, or stops using it, before it touches the vectors again.
        unsafe { Self::new(regions) }
    }
}
