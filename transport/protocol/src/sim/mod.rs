//! A seeded simulator: whole clusters of the machines, through cuts, delays, reordering, repeated messages, slow writes, changed
//! bytes, crashes, cancels and skewed clocks. After every step the invariants of a transfer are checked:
//!
//! 1. no byte lands in a page that is not granted to it, and none after the fence;
//! 2. one verdict a side, in a legal pair, within its deadline;
//! 3. bytes are visible only after their digest matched, are right, and do not change after;
//! 4. every block, lease and grant is returned, and none is read or freed while in use;
//! 5. nothing of an old incarnation is accepted, and no generation is used twice;
//! 6. only durations cross the wire (each engine's clock has its own epoch and speed);
//! 7. every queue keeps its limit;
//! 8. what a failed transfer calls good is right.
//!
//! The same seed gives the same run. The drivers here follow the rules in [`transfer`](crate::transfer) to the letter, so they
//! are also the shortest example of one.

mod checks;
mod driver;
mod engine;
mod memory;
mod network;
mod node;
mod plan;
mod rng;
mod world;

pub use crate::transfer::Planted;
pub use world::{DriverBug, Options, Report, Violation, run};
