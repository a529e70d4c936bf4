//! The prefill/decode connector: both objects of the contract, in both orders.

mod scheduler;

pub use scheduler::{PdScheduler, SchedulerOptions};
