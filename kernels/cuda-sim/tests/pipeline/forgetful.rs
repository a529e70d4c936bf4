//! A device that forgets to order something: what a bug in the pipeline, or in an engine, would do.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use kvferry_cuda_sim::LateDevice;
use kvferry_kernels::HostRegion;
use kvferry_kernels::cuda::{Argument, Geometry, Kernel, Launcher};
use kvferry_kernels::device::{CopyEnd, Device, DeviceError, DeviceMemory, Event, PinnedRegion, Stream};

/// What is forgotten.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Forgets {
    /// Streams do not wait for events.
    StreamWaits,
    /// The host does not wait for events.
    HostWaits,
}

/// A device whose streams forget. An engine's own stream is one only if it is wrapped by itself.
#[derive(Debug)]
pub(crate) struct Forgetful {
    pub(crate) device: LateDevice,
    pub(crate) forgets: Forgets,
}

#[derive(Debug)]
pub(crate) struct ForgetfulStream {
    pub(crate) stream: Arc<dyn Stream>,
    pub(crate) forgets: Forgets,
}

#[derive(Debug)]
struct ForgetfulEvent {
    event: Arc<dyn Event>,
}

impl Device for Forgetful {
    fn name(&self) -> String {
        "a forgetful device".to_owned()
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceMemory, DeviceError> {
        self.device.allocate(bytes)
    }

    fn pin(&self, region: Arc<HostRegion>) -> Result<PinnedRegion, DeviceError> {
        self.device.pin(region)
    }

    fn stream(&self, name: &str) -> Result<Arc<dyn Stream>, DeviceError> {
        Ok(Arc::new(ForgetfulStream { stream: self.device.stream(name)?, forgets: self.forgets }))
    }

    fn host_reads(&self, start: NonNull<u8>, bytes: usize) {
        self.device.host_reads(start, bytes);
    }

    fn host_writes(&self, start: NonNull<u8>, bytes: usize) {
        self.device.host_writes(start, bytes);
    }
}

impl Launcher for ForgetfulStream {
    type Error = DeviceError;

    fn multiprocessors(&self) -> u32 {
        self.stream.multiprocessors()
    }

    unsafe fn launch(&self, kernel: Kernel, geometry: Geometry, arguments: &[Argument<'_>]) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.stream.launch(kernel, geometry, arguments) }
    }
}

impl Stream for ForgetfulStream {
    unsafe fn copy(&self, from: CopyEnd, to: CopyEnd, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.stream.copy(from, to, bytes) }
    }

    fn record(&self) -> Result<Arc<dyn Event>, DeviceError> {
        let event = self.stream.record()?;
        Ok(match self.forgets {
            Forgets::StreamWaits => event,
            Forgets::HostWaits => Arc::new(ForgetfulEvent { event }),
        })
    }

    fn wait(&self, event: &dyn Event) -> Result<(), DeviceError> {
        match self.forgets {
            Forgets::StreamWaits => Ok(()),
            Forgets::HostWaits => self.stream.wait(event),
        }
    }
}

impl Event for ForgetfulEvent {
    fn is_done(&self) -> Result<bool, DeviceError> {
        Ok(true)
    }

    fn wait(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self.event.as_any()
    }
}
