//! The prefill/decode connector: both objects of the contract, in both orders.

mod caches;
mod scheduler;
mod worker;

pub use caches::KvCache;
pub use scheduler::{PdScheduler, SchedulerOptions};
#[cfg(feature = "testing")]
pub use worker::decoders;
pub use worker::{PdHandle, PdWorker, PdWorkerParts, Refusal, greeting};
