//! What whole-system tests need: nodes as processes, links between them that break, their answers and counters, and what a single
//! process would have said.

mod ask;
mod bound;
mod chance;
mod cluster;
mod http;
mod node;
mod reference;
mod shape;
mod soak;
mod storm;

pub use ask::{Ask, Asks};
pub use bound::{Idle, Limits, Watch};
pub use chance::Chance;
pub use cluster::{Cluster, Load};
pub use http::{Answer, HttpError};
pub use node::{Node, PATIENCE, Setup, wait_until};
pub use reference::Reference;
pub use shape::Shape;
pub use soak::{Latency, NodeReport, Pools, SoakOptions, SoakReport, Usage, soak};
pub use storm::{Round, Rounds, Tally};
