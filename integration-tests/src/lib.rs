//! What whole-system tests need: nodes as processes, links between them that break, their answers and counters, and what a single
//! process would have said.

mod chance;
mod cluster;
mod http;
mod node;
mod reference;
mod soak;
mod storm;

pub use chance::Chance;
pub use cluster::{Ask, Cluster, Load};
pub use http::{Answer, HttpError};
pub use node::{Node, PATIENCE, Setup, wait_until};
pub use reference::Reference;
pub use soak::{Latency, SoakOptions, SoakReport, Usage, soak};
pub use storm::{Round, Rounds, Tally};
