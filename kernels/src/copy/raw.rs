//! The only place of this module that follows a pointer.
#![expect(unsafe_code, reason = "regions are an engine's memory: addresses, not slices")]

use std::ptr::NonNull;

use kvferry_protocol::RegionId;
use kvferry_protocol::digest::{RunKey, RunState, STRIPE_BYTES};
use kvferry_protocol::layout::Place;

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

/// Hashes one run in place.
///
/// # Panics
/// If the run lies outside its region.
#[inline(always)]
pub(super) fn hash_run(table: &RegionTable, at: Place, run_bytes: u32, key: RunKey) -> u64 {
    let start = table.resolve(at, run_bytes.into());
    let bytes = run_bytes as usize;
    let (whole, rest) = (bytes / STRIPE_BYTES, bytes % STRIPE_BYTES);
    let mut state = RunState::new(key);
    let mut next = start.cast::<[u8; STRIPE_BYTES]>();
    // SAFETY: `whole` stripes lie in the run, so their end is at most the run's.
    let end = unsafe { next.add(whole) };
    // Byte arrays by a moving pointer: in this form the compiler keeps a stripe's lanes in vectors (benches/copy.rs).
    while next != end {
        // SAFETY: `next` is one of the `whole` stripes: mapped and readable, and nobody writes it meanwhile.
        state.stripe(unsafe { next.read() });
        // SAFETY: `next` is below `end`, so the step ends at `end` at most.
        next = unsafe { next.add(1) };
    }
    if rest > 0 {
        let mut last = [0; STRIPE_BYTES];
        let filled = NonNull::from(&mut last).cast::<u8>();
        // SAFETY: `rest` bytes are left in the run, fewer than `last` has, in memory of its own.
        unsafe { next.cast::<u8>().copy_to_nonoverlapping(filled, rest) };
        state.stripe(last);
    }
    state.finish(bytes)
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
