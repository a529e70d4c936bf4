//! RDMA by verbs: the sender's device writes straight into granted pages.
//!
//! An `Adapter` opens the devices (rails) of an endpoint and registers its memory on all of them. Towards each peer it has
//! `Rails`: one reliable queue pair for words and several for payload, made over the authenticated control lane. What they
//! do is decided by a `Machine`, which knows no device; the tests run it over a scripted one. Before they are used, a `Proof`
//! writes a pattern over each of them and looks what came.
//!
//! Revoking means: the queue pairs go to error, everything that was posted comes back, the queue pairs are destroyed. Only
//! then is nothing of the peer's written any more, and the pages may have a new owner.
#![expect(dead_code, reason = "counts and ports are told by those who want to")]

mod config;
mod device;
mod device_memory;
mod error;
pub(crate) mod fences;
mod ffi;
mod gid;
mod hardware;
pub(crate) mod machine;
pub(crate) mod memory;
pub(crate) mod proof;
pub(crate) mod rails;
#[cfg(test)]
mod tests;
mod wire;
pub(crate) mod work;

pub use config::{RdmaConfig, RdmaConfigFile};
pub use device::{PortFacts, RdmaReport, probe};
pub use device_memory::DeviceMemory;
pub use error::RdmaError;
pub use gid::{GidChoice, GidEntry, GidWish, choose_gid};
pub use work::Fault;
