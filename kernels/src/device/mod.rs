//! Devices that hold KV pages: their memory, streams, events and copies.
//!
//! [`Device`] is the seam between the connector's pipeline and what executes it. There are two behind it: the CUDA driver
//! (`CudaGpu`, feature `cuda`), and the crate kvferry-cuda-sim, where everything runs late, in any order that streams and events
//! allow, and an access that is not ordered after the one it conflicts with is an error that names both. Launches go through the
//! streams, which are [`Launcher`]s.
//!
//! A call that queues work returns before the work has run, so what it names must stay: memory until the stream is past it, and
//! bytes until an event says so. That is what the unsafe calls ask for.
#![expect(unsafe_code, reason = "who queues work on a device vouches for the memory that it names")]

mod cache;
#[cfg(feature = "cuda")]
mod cuda;
mod desk;
mod error;
mod lane;

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

pub use cache::DeviceKvCache;
#[cfg(feature = "cuda")]
pub use cuda::CudaGpu;
pub use desk::RowDesk;
pub use error::DeviceError;
pub use lane::{Lane, StagedRun};

use crate::cuda::{DevicePtr, Launcher};
use crate::memory::HostRegion;

/// What keeps a piece of memory as it is until it is dropped.
pub type Keeper = Box<dyn Any + Send + Sync>;

/// A device. Any thread may call.
pub trait Device: fmt::Debug + Send + Sync {
    /// What it is called in logs.
    fn name(&self) -> String;

    /// Allocates device memory, aligned to 256 bytes, whose bytes are undefined. It is freed when it is dropped, once nothing that
    /// is queued can use it.
    ///
    /// # Errors
    /// The device has not so much memory left.
    fn allocate(&self, bytes: usize) -> Result<DeviceMemory, DeviceError>;

    /// Locks host memory in place, so that streams copy to and from it without waiting. The region stays mapped until the result is
    /// dropped.
    ///
    /// # Errors
    /// The system locks no more memory.
    fn pin(&self, region: Arc<HostRegion>) -> Result<PinnedRegion, DeviceError>;

    /// Makes a stream. `name` is what errors call it.
    ///
    /// # Errors
    /// The device's.
    fn stream(&self, name: &str) -> Result<Arc<dyn Stream>, DeviceError>;

    /// Says that the host, or a network card, reads these bytes of pinned memory from here on. Nothing happens on a real device; a
    /// simulated one checks that what was copied there is there.
    fn host_reads(&self, start: NonNull<u8>, bytes: usize) {
        let _ = (start, bytes);
    }

    /// The same for bytes that are written.
    fn host_writes(&self, start: NonNull<u8>, bytes: usize) {
        let _ = (start, bytes);
    }
}

/// A queue of one device: launches and copies run one after the other, in the order in which they were queued.
pub trait Stream: Launcher<Error = DeviceError> + fmt::Debug + Send + Sync {
    /// Queues a copy; returns before it has run. One end at least is in device memory.
    ///
    /// # Errors
    /// The device's, also of what was queued before.
    ///
    /// # Safety
    /// Both ends are `bytes` long and of this device, host memory is pinned, and all of it stays so until the stream is past the
    /// copy. Meanwhile nobody writes what is read, nor uses what is written.
    unsafe fn copy(&self, from: CopyEnd, to: CopyEnd, bytes: usize) -> Result<(), DeviceError>;

    /// Marks the place that the queue ends at now.
    ///
    /// # Errors
    /// The device's.
    fn record(&self) -> Result<Arc<dyn Event>, DeviceError>;

    /// What is queued here from now on runs after the event. The host does not wait.
    ///
    /// # Errors
    /// [`DeviceError::Foreign`] for an event of another device.
    fn wait(&self, event: &dyn Event) -> Result<(), DeviceError>;
}

/// A place in a stream, which is passed once all that was queued before it has run.
pub trait Event: fmt::Debug + Send + Sync {
    /// Whether it is passed; does not wait.
    ///
    /// # Errors
    /// What was queued before it failed.
    fn is_done(&self) -> Result<bool, DeviceError>;

    /// Waits until it is passed, without keeping a processor busy.
    ///
    /// # Errors
    /// What was queued before it failed.
    fn wait(&self) -> Result<(), DeviceError>;

    /// For the streams of its device.
    fn as_any(&self) -> &dyn Any;
}

/// Where a copy begins or ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyEnd {
    /// Device memory.
    Device(DevicePtr),
    /// Pinned host memory.
    Host(NonNull<u8>),
}

// SAFETY: an address may be known to any thread; who follows it was given the promise of `Stream::copy`.
unsafe impl Send for CopyEnd {}
// SAFETY: as above.
unsafe impl Sync for CopyEnd {}

/// Device memory; freed on drop.
pub struct DeviceMemory {
    start: DevicePtr,
    bytes: usize,
    _keeper: Keeper,
}

/// Host memory that is locked in place until it is dropped.
pub struct PinnedRegion {
    // Before the region: what unlocks it must find it mapped.
    _keeper: Keeper,
    region: Arc<HostRegion>,
}

impl DeviceMemory {
    /// Wraps what a device allocated; dropping `keeper` frees it.
    ///
    /// # Safety
    /// So many bytes from `start` on are allocated, and nobody else frees or uses them, until `keeper` is dropped.
    #[must_use]
    pub unsafe fn new(start: DevicePtr, bytes: usize, keeper: Keeper) -> Self {
        Self { start, bytes, _keeper: keeper }
    }

    /// Its address.
    #[must_use]
    pub const fn ptr(&self) -> DevicePtr {
        self.start
    }

    /// Its length in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

impl PinnedRegion {
    /// Wraps a region that a device locked; dropping `keeper` unlocks it.
    #[must_use]
    pub fn new(region: Arc<HostRegion>, keeper: Keeper) -> Self {
        Self { _keeper: keeper, region }
    }

    /// The memory.
    #[must_use]
    pub const fn region(&self) -> &Arc<HostRegion> {
        &self.region
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemory({} bytes at {})", self.bytes, self.start)
    }
}

impl fmt::Debug for PinnedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedRegion({} bytes)", self.region.len())
    }
}
