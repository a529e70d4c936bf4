//! Registered memory, of the host or of another device.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::{IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_RELAXED_ORDERING, IBV_ACCESS_REMOTE_WRITE, ibv_mr};

use super::{ProtectionDomain, object};
use crate::place::DeviceRun;
use crate::raw::RawRun;

/// Memory that a device may read, and that its peers may write.
pub(crate) struct MemoryRegion {
    domain: Arc<ProtectionDomain>,
    raw: NonNull<ibv_mr>,
    pub(crate) local_key: u32,
    pub(crate) remote_key: u32,
}

// SAFETY: libibverbs locks what it shares.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers a run of a region's memory, for writes by peers too if `is_target`. It stays registered while this lives.
    pub(crate) fn new(domain: &Arc<ProtectionDomain>, run: RawRun, is_target: bool) -> io::Result<Self> {
        let access = IBV_ACCESS_LOCAL_WRITE | if is_target { IBV_ACCESS_REMOTE_WRITE } else { 0 };
        Self::at(domain, run.start(), run.bytes(), access)
    }

    /// Registers a run of a device's memory by its address, for writes by peers too. It fails where no module knows the address.
    pub(crate) fn of_peer_memory(domain: &Arc<ProtectionDomain>, run: DeviceRun) -> io::Result<Self> {
        // It is passed on as a number: nobody follows it here.
        let start = std::ptr::without_provenance_mut(run.address as usize);
        Self::at(domain, start, run.bytes as usize, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)
    }

    /// Registers a run of a device's memory by its dma-buf, where it lies from `offset` on, for writes by peers too. Requests name it by its
    /// address, as other memory. [`io::ErrorKind::Unsupported`] if the library lacks the call.
    pub(crate) fn of_dma_buf(
        domain: &Arc<ProtectionDomain>,
        run: DeviceRun,
        file: BorrowedFd<'_>,
        offset: u64,
    ) -> io::Result<Self> {
        let verbs = &domain.context.verbs;
        if !verbs.has_dmabuf() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let relaxed = if verbs.has_optional_access() { IBV_ACCESS_RELAXED_ORDERING } else { 0 };
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | relaxed;
        let (fd, bytes) = (file.as_raw_fd(), run.bytes as usize);
        // SAFETY: a live domain and an open descriptor. The driver takes what it needs of the dma-buf and keeps it until the region is
        // dropped; who may use these bytes while a device does is what grants and posts settle. The flags fit.
        let raw =
            unsafe { verbs.ibv_reg_dmabuf_mr(domain.raw.as_ptr(), offset, bytes, run.address, fd, access as c_int) };
        Self::registered(domain, raw)
    }

    fn at(domain: &Arc<ProtectionDomain>, start: *mut u8, bytes: usize, access: u32) -> io::Result<Self> {
        let verbs = &domain.context.verbs;
        let start = start.cast();
        let raw = if verbs.has_optional_access() {
            // A device that cannot relax the order of writes ignores the flag.
            let access = access | IBV_ACCESS_RELAXED_ORDERING;
            // SAFETY: host memory is mapped until its transport is dropped, and this is dropped before; who may touch it while a device
            // does is what grants and posts settle (see `raw`). Any other address is refused, unless a module knows it as a device's.
            unsafe { verbs.ibv_reg_mr_iova2(domain.raw.as_ptr(), start, bytes, start as u64, access) }
        } else {
            // SAFETY: as above. The flags fit.
            unsafe { verbs.ibv_reg_mr(domain.raw.as_ptr(), start, bytes, access as c_int) }
        };
        Self::registered(domain, raw)
    }

    fn registered(domain: &Arc<ProtectionDomain>, raw: *mut ibv_mr) -> io::Result<Self> {
        let raw = object(raw)?;
        // SAFETY: a live region, whose keys do not change.
        let local_key = unsafe { (*raw.as_ptr()).lkey };
        // SAFETY: as above.
        let remote_key = unsafe { (*raw.as_ptr()).rkey };
        Ok(Self { domain: Arc::clone(domain), raw, local_key, remote_key })
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: registered, and not dropped before.
        let _ = unsafe { self.domain.context.verbs.ibv_dereg_mr(self.raw.as_ptr()) };
    }
}
