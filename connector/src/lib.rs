//! kvferry: carries KV cache from the engine that computed it to the engine that needs it.
//!
//! An engine links this crate, puts [`pd::PdScheduler`] beside its scheduler and [`pd::PdWorker`] beside its model, and calls the
//! [`contract`] once per step. The rest happens on the connector's own threads.
#![deny(unsafe_code)]

pub mod config;
pub mod contract;
#[cfg(feature = "device-memory")]
mod device_memory;
mod error;
pub mod events;
mod keys;
pub mod metrics;
mod open;
pub mod pd;
pub mod pool;
mod raw;
pub mod sizing;
pub mod tier;
pub mod trace;

#[cfg(feature = "device-memory")]
pub use device_memory::device_memory;
pub use error::ConnectorError;
pub use open::open_transport;
pub use raw::RawKvCache;

#[doc = include_str!("../../README.md")]
#[cfg(doctest)]
struct ReadmeExamples;
