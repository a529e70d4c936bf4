//! Moves bytes between nodes under revocable grants, and does not know what a layer is.
//!
//! The receiver grants a *window*: an ordered space of bytes mapped onto its registered memory. The sender posts writes into
//! that window by offset and never learns an address. `revoke` returns only when no byte of the grant can land any more.
#![deny(unsafe_code)]

pub mod api;
mod error;

pub use api::*;
pub use error::TransportError;
