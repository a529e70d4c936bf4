//! What cards of other makers, as RDMA's, need to read and write device memory themselves.
#![expect(unsafe_code, reason = "calls the driver")]

use std::os::fd::{FromRawFd, OwnedFd};

use cudarc::driver::sys;

use super::driver::{CudaDevice, CudaError, failed};
use super::launch::DevicePtr;

/// Device memory as a descriptor that other drivers take.
#[derive(Debug)]
pub struct ExportedMemory {
    /// A dma-buf, over whole pages of the host's size.
    pub file: OwnedFd,
    /// Where in it the exported bytes begin.
    pub offset: u64,
}

/// When kernels see what other cards wrote into device memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RemoteWrites {
    /// With the writer's completion.
    Ordered,
    /// After [`CudaDevice::flush_remote_writes`].
    Flushed,
    /// At no moment that the host can tell.
    Unordered,
}

impl CudaDevice {
    /// Exports device memory, so that another card's driver can register it.
    ///
    /// The memory is of one allocation (`cuMemAlloc`, or mapped addresses). The dma-buf keeps it from being freed under a card. Source:
    /// `cuMemGetHandleForAddressRange` in `cuda.h`; it needs the open kernel modules, and CUDA 11.7.
    ///
    /// # Errors
    /// [`CudaError::Driver`]: the driver, or this memory, knows no dma-buf.
    pub fn export(&self, start: DevicePtr, bytes: u64) -> Result<ExportedMemory, CudaError> {
        self.bind()?;
        // SAFETY: asks for a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let range = whole_pages(start.get(), bytes, u64::try_from(page).unwrap_or(4096));
        let mut file = -1i32;
        let kind = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        let handle = (&raw mut file).cast();
        // SAFETY: a descriptor is written to `file`; the driver checks the range.
        let done = unsafe { sys::cuMemGetHandleForAddressRange(handle, range.start, range.bytes as usize, kind, 0) };
        done.result().map_err(failed("exporting device memory as a dma-buf"))?;
        // SAFETY: the driver has made it, for us.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        Ok(ExportedMemory { file, offset: start.get() - range.start })
    }

    /// When kernels of this device see what other cards wrote into its memory.
    ///
    /// Source: `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING` and `.._FLUSH_WRITES_OPTIONS` in `cuda.h`.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn remote_writes(&self) -> Result<RemoteWrites, CudaError> {
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS as OPTIONS,
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING as ORDERING,
        };
        let ordering = self.attribute(ORDERING, "asking how remote writes are ordered")?;
        let options = self.attribute(OPTIONS, "asking how remote writes are flushed")?;
        Ok(remote_writes(ordering, options))
    }

    /// Makes what other cards wrote into this device's memory visible to kernels that are launched from here on: what had completed before
    /// the call. Any thread may call; the device is its own afterwards.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn flush_remote_writes(&self) -> Result<(), CudaError> {
        self.bind()?;
        let target = sys::CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        let scope = sys::CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER;
        // SAFETY: the device's context is current.
        let done = unsafe { sys::cuFlushGPUDirectRDMAWrites(target, scope) };
        done.result().map_err(failed("flushing the writes of other cards"))
    }
}

#[derive(PartialEq, Eq, Debug)]
struct Range {
    start: u64,
    bytes: u64,
}

/// The whole pages that hold some bytes.
fn whole_pages(start: u64, bytes: u64, page: u64) -> Range {
    let first = start - start % page;
    let end = start.saturating_add(bytes.max(1)).checked_next_multiple_of(page).unwrap_or(u64::MAX);
    Range { start: first, bytes: end - first }
}

fn remote_writes(ordering: i32, options: i32) -> RemoteWrites {
    // `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`: kernels of the memory's owner see them.
    const OWNER: i32 = 100;
    let by_host = sys::CUflushGPUDirectRDMAWritesOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as i32;
    match (ordering >= OWNER, options & by_host != 0) {
        (true, _) => RemoteWrites::Ordered,
        (false, true) => RemoteWrites::Flushed,
        (false, false) => RemoteWrites::Unordered,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_pages_are_exported() {
        for (start, bytes, want) in [
            (0x10_0000, 0x1000, (0x10_0000, 0x1000)),
            (0x10_0200, 0x1000, (0x10_0000, 0x2000)),
            (0x10_0fff, 1, (0x10_0000, 0x1000)),
            (0x10_0fff, 2, (0x10_0000, 0x2000)),
            (0x10_0000, 0, (0x10_0000, 0x1000)),
        ] {
            let want = Range { start: want.0, bytes: want.1 };
            assert_eq!(whole_pages(start, bytes, 0x1000), want, "{start:#x}, {bytes}");
        }
    }

    #[test]
    fn a_flush_is_asked_for_where_the_device_does_not_order_writes() {
        for (ordering, options, want) in [
            (0, 0, RemoteWrites::Unordered),
            (0, 2, RemoteWrites::Unordered),
            (0, 3, RemoteWrites::Flushed),
            (100, 0, RemoteWrites::Ordered),
            (200, 1, RemoteWrites::Ordered),
        ] {
            assert_eq!(remote_writes(ordering, options), want, "{ordering}, {options}");
        }
    }
}
