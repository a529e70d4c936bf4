//! Device memory that is no memory of the host's.
#![expect(unsafe_code, reason = "kernels and the host share allocations through raw pointers")]

use std::alloc::{self, Layout};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use kvferry_kernels::cuda::{DevicePtr, DeviceRegions};

use crate::shared::POISON;
use crate::stream::SimStream;

/// A device that exists on the CPU only.
#[derive(Clone, Debug)]
pub struct SimDevice {
    allocations: Arc<Mutex<Vec<Arc<Allocation>>>>,
}

/// Device memory; freed on drop. What queued launches do to it after that is a fault.
#[derive(Debug)]
pub struct SimMemory {
    allocation: Arc<Allocation>,
    device: SimDevice,
}

/// A stretch of memory, at one address for the host and at another for kernels.
#[derive(Debug)]
pub(crate) struct Allocation {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory belongs to the process, not to a thread, and is reached through raw pointers by who runs a queue.
unsafe impl Send for Allocation {}
// SAFETY: as above; the type itself is never changed.
unsafe impl Sync for Allocation {}

/// What is added to a host's address to make a device's. No user of x86-64 or aarch64 has memory there, so following one on the
/// host crashes at once.
const DEVICE_SPACE: u64 = 1 << 55;

/// Alignment of allocations, as the driver gives it.
const ALIGNMENT: usize = 256;

impl Default for SimDevice {
    fn default() -> Self {
        Self::new()
    }
}

impl SimDevice {
    /// A device without memory.
    #[must_use]
    pub fn new() -> Self {
        Self { allocations: Arc::default() }
    }

    /// Allocates memory whose bytes are undefined. An allocation of 0 bytes has an address that must not be used.
    ///
    /// # Panics
    /// If the host has no memory left.
    #[must_use]
    pub fn allocate(&self, bytes: usize) -> SimMemory {
        let layout = Layout::from_size_align(bytes, ALIGNMENT).expect("a test's allocation is small");
        let room = Layout::from_size_align(bytes.max(1), ALIGNMENT).expect("as above");
        // SAFETY: its size is not 0.
        let start = unsafe { alloc::alloc(room) };
        let start = NonNull::new(start).unwrap_or_else(|| alloc::handle_alloc_error(room));
        // SAFETY: that many bytes were just allocated.
        unsafe { start.write_bytes(POISON, bytes) };
        let allocation = Arc::new(Allocation { start, layout });
        let mut all = self.allocations.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(Arc::clone(&allocation));
        all.sort_unstable_by_key(|allocation| allocation.start);
        drop(all);
        SimMemory { allocation, device: self.clone() }
    }

    /// Makes a queue. The seed decides all schedules of its launches.
    #[must_use]
    pub fn stream(&self, seed: u64) -> SimStream {
        SimStream::new(self.clone(), seed)
    }

    /// The host's address of so many bytes of the device's, if they are all in one allocation.
    pub(crate) fn host_address(&self, at: DevicePtr, bytes: u64) -> Option<*mut u8> {
        let all = self.allocations.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().find_map(|one| one.resolve(at.get(), bytes))
    }

    /// Writes memory that nothing uses; `false` if it is not there.
    pub(crate) fn put(&self, at: DevicePtr, bytes: &[u8]) -> bool {
        let Some(target) = self.host_address(at, bytes.len() as u64) else { return false };
        // SAFETY: so many bytes are allocated there, and who runs the device's queues does not do so meanwhile.
        unsafe { target.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        true
    }

    /// Reads memory that nothing writes; `None` if it is not there.
    pub(crate) fn get(&self, at: DevicePtr, bytes: usize) -> Option<Vec<u8>> {
        let source = self.host_address(at, bytes as u64)?;
        let mut out = vec![0; bytes];
        // SAFETY: as for `put`; allocations are initialised from the first.
        unsafe { source.copy_to_nonoverlapping(out.as_mut_ptr(), bytes) };
        Some(out)
    }

    /// All that is allocated, by rising address.
    pub(crate) fn allocations(&self) -> Vec<Arc<Allocation>> {
        self.allocations.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl SimMemory {
    /// Its address for kernels.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.allocation.ptr()
    }

    /// Its length in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.allocation.layout.size()
    }

    /// The memory of several regions.
    #[must_use]
    pub fn regions(of: &[Self]) -> DeviceRegions {
        DeviceRegions::new(of.iter().map(|memory| (memory.ptr(), memory.bytes() as u64)).collect())
    }

    pub(crate) fn allocation(&self) -> &Arc<Allocation> {
        &self.allocation
    }
}

impl Drop for SimMemory {
    fn drop(&mut self) {
        let mut all = self.device.allocations.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| !Arc::ptr_eq(other, &self.allocation));
    }
}

impl Allocation {
    fn ptr(&self) -> DevicePtr {
        DevicePtr::new(self.start.as_ptr() as u64 + DEVICE_SPACE)
    }

    /// The host's address of some bytes, if they are all in here.
    pub(crate) fn resolve(&self, address: u64, bytes: u64) -> Option<*mut u8> {
        let offset = address.checked_sub(self.ptr().get())?;
        let fits = offset.checked_add(bytes)? <= self.layout.size() as u64;
        fits.then(|| self.start.as_ptr().wrapping_add(offset as usize))
    }

    /// Writes all of it.
    pub(crate) fn fill(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.layout.size(), "an upload fills its memory");
        // SAFETY: that many bytes are allocated, and only who runs the device's queues uses them: this thread.
        unsafe { self.start.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    /// Reads all of it.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = vec![0; self.layout.size()];
        // SAFETY: as for `fill`; allocations are initialised from the first.
        unsafe { self.start.as_ptr().copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
        out
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let room = Layout::from_size_align(self.layout.size().max(1), ALIGNMENT).expect("it was made with this");
        // SAFETY: allocated with the same layout, and nobody else has the allocation.
        unsafe { alloc::dealloc(self.start.as_ptr(), room) };
    }
}
