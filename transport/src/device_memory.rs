//! Memory of another device, as a GPU's: how RDMA devices reach it, and when what they wrote there is seen.
//!
//! No processor touches such memory. What only processors could carry is refused, with the reason: see
//! [`TransportError::DeviceMemory`](crate::TransportError::DeviceMemory).

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// How RDMA devices reach memory of another device.
#[derive(Clone, Default)]
pub struct DeviceAccess {
    /// A dma-buf of the memory, as its owner exports it (`cuMemGetHandleForAddressRange`). Without one the memory is registered by its
    /// address, which works where a module of its owner's (nvidia_peermem) teaches the kernel such addresses.
    pub dma_buf: Option<DmaBuf>,
    /// Makes what RDMA devices wrote visible to the owner's kernels. `None` is the caller's word that nothing is needed for that: of a CUDA
    /// device, that its attribute `GPU_DIRECT_RDMA_WRITES_ORDERING` is `OWNER` or more.
    pub flush: Option<Arc<dyn Flush>>,
}

/// A descriptor of a device's memory, which RDMA drivers take.
#[derive(Clone, Debug)]
pub struct DmaBuf {
    /// The dma-buf.
    pub file: Arc<OwnedFd>,
    /// Where in it the memory begins, in bytes. It lies in its page as the memory's address does in its own.
    pub offset: u64,
}

/// Makes what RDMA devices wrote into a device's memory visible to the kernels that read it next.
///
/// A completion says that the bytes have left the card; a device's memory may still be behind (CUDA's `cuFlushGPUDirectRDMAWrites`, or a small
/// read of that memory by the card). It is called after the completions of a batch of writes, once for all of them, and before any of
/// them is told as [`Event::Landed`](crate::Event::Landed).
pub trait Flush: Send + Sync {
    /// After this returns, kernels that are launched see all that had completed before it was called.
    ///
    /// It runs on the thread that serves all RDMA sessions of the endpoint: it must not wait for anything that this transport does, and what
    /// it needs of that thread, as a current CUDA context, it sets itself.
    ///
    /// # Errors
    /// What went wrong. The session ends with it, and nothing of the batch is told as landed.
    fn flush(&self) -> Result<(), String>;
}

impl fmt::Debug for DeviceAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_flushed = self.flush.is_some();
        f.debug_struct("DeviceAccess").field("dma_buf", &self.dma_buf).field("is_flushed", &is_flushed).finish()
    }
}
