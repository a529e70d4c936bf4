//! Moves bytes between nodes under revocable grants, and does not know what a layer is.
//!
//! The receiver grants a *window*: an ordered space of bytes mapped onto its registered memory. The sender posts writes into
//! that window by offset and never learns an address. `revoke` returns only when no byte of the grant can land any more.
//!
//! [`Loopback`] moves bytes inside one process and can be told to break them; [`Tcp`] moves them between processes.
#![deny(unsafe_code)]

pub mod api;
mod core;
mod credentials;
mod device_memory;
mod error;
mod ffi;
mod loopback;
mod place;
mod raw;
pub mod rdma;
mod share;
mod tcp;
#[cfg(feature = "testing")]
pub mod testing;
pub mod tls;
pub mod ucx;
mod watch;

#[cfg(feature = "planted")]
pub use self::core::Planted;
pub use api::*;
pub use credentials::Credentials;
pub use device_memory::{DeviceAccess, DmaBuf, Flush};
pub use error::TransportError;
pub use loopback::{FaultPlan, FaultRates, Loopback, LoopbackConfig, LoopbackNetwork};
pub use share::{Adopted, AdoptedRun};
pub use tcp::{ConfigError, Tcp, TcpConfig, TcpConfigFile};
pub use watch::{Landing, Leaving};
