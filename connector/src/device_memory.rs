//! Memory of a CUDA device for a transport whose cards carry it themselves.

use std::ptr::NonNull;
use std::sync::Arc;

use kvferry_kernels::cuda::{CudaDevice, DevicePtr, RemoteWrites};
use kvferry_transport::{DeviceAccess, DmaBuf, Flush, Memory, MemoryKind, TransportError};

/// Flushes a device after RDMA writes.
struct RemoteFlush(Arc<CudaDevice>);

impl Flush for RemoteFlush {
    fn flush(&self) -> Result<(), String> {
        self.0.flush_remote_writes().map_err(|error| with_cause(&error))
    }
}

/// What to register of a device's memory with [`Transport::register`](kvferry_transport::Transport::register): `bytes` bytes from `start` on, of
/// one allocation.
///
/// They are exported as a dma-buf; if the driver makes none they are registered by their address, which takes nvidia_peermem. Where kernels
/// do not see other cards' writes by themselves the device is flushed before they are told. Has never run beside a GPU: its test is
/// `connector/tests/device_memory.rs`.
///
/// # Errors
/// [`TransportError::Memory`] if the device cannot tell when its kernels see what a card wrote.
pub fn device_memory(device: &Arc<CudaDevice>, start: DevicePtr, bytes: usize) -> Result<Memory, TransportError> {
    let refuse = |problem: String| TransportError::Memory { bytes, problem };
    let flush: Option<Arc<dyn Flush>> = match device.remote_writes().map_err(|error| refuse(with_cause(&error)))? {
        RemoteWrites::Ordered => None,
        RemoteWrites::Flushed => Some(Arc::new(RemoteFlush(Arc::clone(device)))),
        RemoteWrites::Unordered => {
            return Err(refuse("nothing tells when the device's kernels see what a card wrote; stage it".to_owned()));
        }
    };
    let dma_buf = match device.export(start, bytes as u64) {
        Ok(exported) => Some(DmaBuf { file: Arc::new(exported.file), offset: exported.offset }),
        Err(error) => {
            let problem = with_cause(&error);
            tracing::warn!(problem, "device memory has no dma-buf; it is registered by its address");
            None
        }
    };
    let address = NonNull::new(std::ptr::without_provenance_mut(start.get() as usize));
    let address = address.ok_or_else(|| refuse("it begins at address 0".to_owned()))?;
    Ok(Memory { address, bytes, kind: MemoryKind::Device(DeviceAccess { dma_buf, flush }), file: None })
}

fn with_cause(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", with_cause(source)),
        None => error.to_string(),
    }
}
