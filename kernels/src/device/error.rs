//! What a device refused, or did wrong.

use kvferry_protocol::layout::LayoutError;

use crate::copy::CopyError;
use crate::cuda::JobError;

/// Why work was not queued on a device, or did not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The driver, or what simulates a device, says so.
    #[error("{device}: {what}")]
    Device {
        /// Which device.
        device: String,
        /// What was tried.
        what: String,
        /// The device's answer.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// An event or a copy that is not this device's.
    #[error("{device}: {what} is not of this device")]
    Foreign {
        /// The device that was asked.
        device: String,
        /// What it was given.
        what: &'static str,
    },
    /// A copy does not fit a plan or its memory; nothing was queued.
    #[error("a copy on a device was refused")]
    Copy(#[source] CopyError),
    /// A cache's shape makes no layout.
    #[error("a cache on a device has no layout")]
    Layout(#[source] LayoutError),
    /// A cache does not fit its memory or its element type.
    #[error("a cache on a device was refused")]
    Cache(#[source] JobError),
    /// Rows do not fit a cache, or ask for what the device's kernels have not; nothing was queued.
    #[error("rows for a device were refused")]
    Rows(#[source] crate::KernelError),
    /// A launch does not suit the kernels; nothing was queued.
    #[error("a launch on a device was refused")]
    Job(#[source] JobError),
    /// Host memory for the device's copies cannot be had.
    #[error("there is no host memory for a device's copies")]
    Host(#[source] crate::KernelError),
    /// Work that is larger than what was set aside for it.
    #[error("{what} take {needed} bytes, and there are {bytes}")]
    Room {
        /// What does not fit.
        what: &'static str,
        /// Its length in bytes.
        needed: u64,
        /// The room for it, in bytes.
        bytes: u64,
    },
}
