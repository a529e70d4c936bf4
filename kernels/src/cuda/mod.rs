//! Kernels for CUDA devices, and what it takes to launch them.
//!
//! The source is `kernels/cuda/*.cu`. A job ([`CopyJob`] and its like) checks its arguments and works out which kernel runs over
//! which grid; a [`Launcher`] puts it on a queue. There are two: the driver's (feature `cuda`), and the crate kvferry-cuda-sim,
//! which runs the same source on the CPU. Jobs take addresses in device memory from whoever allocated it and the caller's own
//! queue, so an engine with any allocator can use them.

mod copy;
mod decode;
#[cfg(feature = "cuda")]
mod driver;
mod element;
mod error;
mod launch;
mod pages;
#[cfg(feature = "cuda")]
mod remote;
mod store;

pub use copy::CopyJob;
pub use decode::{DecodeBatch, DecodeJob, DecodeOptions};
#[cfg(feature = "cuda")]
pub use driver::{CudaDevice, CudaError, CudaMemory, CudaQueue};
pub use element::Element;
pub use error::JobError;
pub use launch::{Argument, DevicePtr, Geometry, Kernel, Launcher};
pub use pages::{DevicePages, DeviceRegions};
#[cfg(feature = "cuda")]
pub use remote::{ExportedMemory, RemoteWrites};
pub use store::{Rows, StoreJob};
