//! What can go wrong between us and a device.

use std::io;
use std::sync::Arc;

use rdma_sys::OpenError;

/// Why RDMA cannot be used here, or a call on a device failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RdmaError {
    /// libibverbs cannot be opened.
    #[error("the verbs library cannot be used")]
    Library {
        /// What is missing and how to mend it.
        #[source]
        source: Arc<OpenError>,
    },
    /// The kernel knows no RDMA device.
    #[error("there is no RDMA device: {problem}; load its driver (ibv_devices lists what is there), or use TCP")]
    NoDevice {
        /// What was found instead.
        problem: String,
    },
    /// No port of the devices can be used.
    #[error("no RDMA port can be used:{}", list(.tried))]
    NoPort {
        /// Each port, and why not.
        tried: Vec<String>,
    },
    /// A port has no GID by which peers can reach it.
    #[error("{device} port {port} has no usable GID:{}\ngive its network interface an IP address and bring it up", list(.rejected))]
    NoGid {
        /// The device.
        device: String,
        /// Its port.
        port: u8,
        /// Each entry of its table, and why not.
        rejected: Vec<String>,
    },
    /// A call on a device failed.
    #[error("{device}: {call} failed; {mend}")]
    Call {
        /// The device.
        device: String,
        /// What was tried, and with what.
        call: String,
        /// What to look at.
        mend: &'static str,
        /// The system's word.
        #[source]
        source: Arc<io::Error>,
    },
    /// Memory of another device that a card does not register.
    #[error("{device} registers no such memory of a device: {problem}")]
    DeviceMemory {
        /// The card.
        device: String,
        /// What it said, and how to mend it.
        problem: String,
    },
    /// The peer's parameters do not fit.
    #[error("the peer's queue pairs do not fit: {problem}")]
    Parameters {
        /// What, on which side.
        problem: String,
    },
    /// Memory that is not registered.
    #[error("bytes {start:#x}..{end:#x} are not registered: register the region that holds them first")]
    NotRegistered {
        /// First address.
        start: u64,
        /// One past the last.
        end: u64,
    },
    /// A setting that cannot be.
    #[error("{key} = {found}: {problem}")]
    Setting {
        /// Which.
        key: &'static str,
        /// Its value.
        found: u64,
        /// What is wrong with it.
        problem: String,
    },
}

fn list(lines: &[String]) -> String {
    lines.iter().map(|line| format!("\n  {line}")).collect()
}
