//! The vocabulary of kvferry, without any I/O: typed ids, the layout algebra, digests, frames and state machines.
//!
//! Nothing here opens, spawns, sleeps, locks, reads a clock or draws a random number. A machine takes `now` and inputs and
//! yields outputs; a driver in another crate performs them.
#![forbid(unsafe_code)]

pub mod codec;
pub mod digest;
mod ids;
pub mod layout;
pub mod manifest;
pub mod message;
mod overlap;
pub mod pages;
#[cfg(feature = "sim")]
pub mod sim;
pub mod transfer;
pub mod wire;

pub use digest::Digest;
pub use ids::{
    BlockId, EngineId, EngineIdError, Generation, Incarnation, LayerId, PeerId, PpRank, RegionId, TpRank, TransferId,
};
