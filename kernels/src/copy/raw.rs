//! The only place of this module that follows a pointer.
#![allow(unsafe_code, reason = "regions are an engine's memory: addresses, not slices")]

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

    /// # Safety
    /// `at.offset + bytes` is at most the length of `at.region`, which the table has, for the bytes that the caller touches.
    #[inline(always)]
    unsafe fn pointer(&self, at: Place) -> *mut u8 {
        // SAFETY: the caller checked that the table has the region.
        let &(start, _) = unsafe { self.regions.get_unchecked(at.region.get() as usize) };
        // SAFETY: the caller checked that the offset lies in the region, which is one mapped stretch of memory.
        unsafe { start.as_ptr().add(at.offset as usize) }
    }
}

/// Copies one run. The two may overlap; then the destination gets what the source held.
///
/// # Safety
/// Both runs, `bytes` long, lie in regions of their tables.
#[inline(always)]
pub(super) unsafe fn copy_run(src: (&RegionTable, Place), dst: (&RegionTable, Place), bytes: u64) {
    // SAFETY: the run lies in a region of the table, says the caller.
    let from = unsafe { src.0.pointer(src.1) };
    // SAFETY: as above.
    let to = unsafe { dst.0.pointer(dst.1) };
    // SAFETY: both stretches lie in mapped regions, readable and writable, as the table's maker promised.
    unsafe { from.copy_to(to, bytes as usize) };
}

/// Hashes one run in place.
///
/// # Safety
/// The run, `bytes` long, lies in a region of the table.
#[inline(always)]
pub(super) unsafe fn hash_run(table: &RegionTable, at: Place, bytes: u32, key: RunKey) -> u64 {
    let bytes = bytes as usize;
    // SAFETY: the run lies in a region of the table, says the caller.
    let start = unsafe { table.pointer(at) }.cast_const();
    let mut state = RunState::new(key);
    let whole = bytes / STRIPE_BYTES * STRIPE_BYTES;
    let mut offset = 0;
    while offset < whole {
        // SAFETY: `offset + STRIPE_BYTES <= bytes`, so the stripe lies in the run.
        let stripe = unsafe { start.add(offset) }.cast::<[u64; 4]>();
        // SAFETY: the stripe is mapped and readable; no alignment is assumed.
        state.stripe(unsafe { stripe.read_unaligned() }.map(u64::from_le));
        offset += STRIPE_BYTES;
    }
    if whole < bytes {
        let mut last = [0_u64; 4];
        // SAFETY: `whole < bytes`, so the rest begins in the run.
        let rest = unsafe { start.add(whole) };
        // SAFETY: fewer than STRIPE_BYTES bytes are left in the run, and `last` has STRIPE_BYTES, in memory of its own.
        unsafe { rest.copy_to_nonoverlapping(last.as_mut_ptr().cast(), bytes - whole) };
        state.stripe(last.map(u64::from_le));
    }
    state.finish(bytes)
}
