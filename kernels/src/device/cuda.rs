//! A CUDA device behind the seam.
#![expect(unsafe_code, reason = "calls the driver")]

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{DriverError, result, sys};

use super::{CopyEnd, Device, DeviceError, DeviceMemory, Event, PinnedRegion, Stream};
use crate::cuda::{Argument, CudaDevice, CudaError, CudaQueue, Geometry, Kernel, Launcher};
use crate::memory::HostRegion;

/// A CUDA device as the pipeline uses it.
#[derive(Clone, Debug)]
pub struct CudaGpu {
    device: Arc<CudaDevice>,
}

impl CudaGpu {
    /// Takes a device that was opened.
    #[must_use]
    pub const fn new(device: Arc<CudaDevice>) -> Self {
        Self { device }
    }

    /// Takes a queue of the device, such as one on an engine's own stream ([`CudaDevice::queue_on`]).
    #[must_use]
    pub fn stream_of(&self, queue: CudaQueue) -> Arc<dyn Stream> {
        Arc::new(CudaStream { gpu: self.clone(), queue })
    }

    fn failed(&self, what: &str) -> impl FnOnce(DriverError) -> DeviceError + use<> {
        let (device, what) = (self.name(), what.to_owned());
        move |source| DeviceError::Device { device, what, source: Box::new(source) }
    }

    fn refused(&self, what: &str) -> impl FnOnce(CudaError) -> DeviceError + use<> {
        let (device, what) = (self.name(), what.to_owned());
        move |source| DeviceError::Device { device, what, source: Box::new(source) }
    }

    fn bind(&self) -> Result<(), DeviceError> {
        self.device.bind().map_err(self.refused("making it current"))
    }
}

impl Device for CudaGpu {
    fn name(&self) -> String {
        format!("CUDA device {}", self.device.ordinal())
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceMemory, DeviceError> {
        let memory = self.device.allocate(bytes).map_err(self.refused("allocating memory"))?;
        let (start, bytes) = (memory.ptr(), memory.bytes());
        // SAFETY: the keeper owns the allocation, and is known to nobody else.
        Ok(unsafe { DeviceMemory::new(start, bytes, Box::new(memory)) })
    }

    fn pin(&self, region: Arc<HostRegion>) -> Result<PinnedRegion, DeviceError> {
        self.bind()?;
        let (start, bytes) = (region.as_ptr(), region.len());
        // SAFETY: the region is mapped, and the keeper unlocks it before it lets go of it.
        unsafe { sys::cuMemHostRegister_v2(start.as_ptr().cast(), bytes, sys::CU_MEMHOSTREGISTER_PORTABLE) }
            .result()
            .map_err(self.failed(&format!("locking {bytes} bytes of host memory in place")))?;
        let keeper = Registered { gpu: self.clone(), region: Arc::clone(&region) };
        Ok(PinnedRegion::new(region, Box::new(keeper)))
    }

    fn stream(&self, _name: &str) -> Result<Arc<dyn Stream>, DeviceError> {
        let queue = self.device.queue().map_err(self.refused("making a stream"))?;
        Ok(self.stream_of(queue))
    }
}

/// Host memory that the driver has locked.
struct Registered {
    gpu: CudaGpu,
    region: Arc<HostRegion>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: locked once with this address, and unlocked once. A failure is one that the next call reports.
            let _ = unsafe { sys::cuMemHostUnregister(self.region.as_ptr().as_ptr().cast()) };
        }
    }
}

#[derive(Debug)]
struct CudaStream {
    gpu: CudaGpu,
    queue: CudaQueue,
}

impl Launcher for CudaStream {
    type Error = DeviceError;

    fn multiprocessors(&self) -> u32 {
        self.queue.multiprocessors()
    }

    unsafe fn launch(&self, kernel: Kernel, geometry: Geometry, arguments: &[Argument<'_>]) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.queue.launch(kernel, geometry, arguments) }.map_err(self.gpu.refused("launching a kernel"))
    }
}

impl Stream for CudaStream {
    unsafe fn copy(&self, from: CopyEnd, to: CopyEnd, bytes: usize) -> Result<(), DeviceError> {
        self.gpu.bind()?;
        let stream = self.queue.raw();
        let queued = match (from, to) {
            (CopyEnd::Host(from), CopyEnd::Device(to)) => {
                // SAFETY: the caller vouches for both ends.
                unsafe { sys::cuMemcpyHtoDAsync_v2(to.get(), from.as_ptr().cast_const().cast(), bytes, stream) }
            }
            (CopyEnd::Device(from), CopyEnd::Host(to)) => {
                // SAFETY: as above.
                unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_ptr().cast(), from.get(), bytes, stream) }
            }
            (CopyEnd::Device(from), CopyEnd::Device(to)) => {
                // SAFETY: as above.
                unsafe { sys::cuMemcpyDtoDAsync_v2(to.get(), from.get(), bytes, stream) }
            }
            (CopyEnd::Host(_), CopyEnd::Host(_)) => {
                return Err(DeviceError::Foreign { device: self.gpu.name(), what: "a copy from host to host" });
            }
        };
        queued.result().map_err(self.gpu.failed(&format!("copying {bytes} bytes")))
    }

    fn record(&self) -> Result<Arc<dyn Event>, DeviceError> {
        self.gpu.bind()?;
        // Without a time, so that it costs little; who waits for it sleeps.
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32
            | sys::CUevent_flags_enum::CU_EVENT_BLOCKING_SYNC as u32;
        let mut event = std::ptr::null_mut();
        // SAFETY: the place is ours to be written.
        unsafe { sys::cuEventCreate(&raw mut event, flags) }.result().map_err(self.gpu.failed("making an event"))?;
        let event = CudaEvent { gpu: self.gpu.clone(), event };
        // SAFETY: the event was just made in this context.
        unsafe { result::event::record(event.event, self.queue.raw()) }
            .map_err(self.gpu.failed("recording an event"))?;
        Ok(Arc::new(event))
    }

    fn wait(&self, event: &dyn Event) -> Result<(), DeviceError> {
        let foreign = || DeviceError::Foreign { device: self.gpu.name(), what: "an event" };
        let event = event.as_any().downcast_ref::<CudaEvent>().ok_or_else(foreign)?;
        self.gpu.bind()?;
        let flags = sys::CUevent_wait_flags_enum::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event lives for the call, after which the stream knows the place that it marked.
        unsafe { result::stream::wait_event(self.queue.raw(), event.event, flags) }
            .map_err(self.gpu.failed("making a stream wait"))
    }
}

struct CudaEvent {
    gpu: CudaGpu,
    event: sys::CUevent,
}

// SAFETY: an event belongs to its context, and the driver locks for itself.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl Event for CudaEvent {
    fn is_done(&self) -> Result<bool, DeviceError> {
        self.gpu.bind()?;
        // SAFETY: the event was recorded when it was made.
        match unsafe { result::event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(self.gpu.failed("asking for an event")(error)),
        }
    }

    fn wait(&self) -> Result<(), DeviceError> {
        self.gpu.bind()?;
        // SAFETY: as above.
        unsafe { result::event::synchronize(self.event) }.map_err(self.gpu.failed("waiting for an event"))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: made once and destroyed once; the driver keeps what streams still wait for.
            let _ = unsafe { result::event::destroy(self.event) };
        }
    }
}

impl fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaEvent({:?})", NonNull::new(self.event))
    }
}
