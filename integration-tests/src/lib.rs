//! What whole-system tests need: nodes as processes, their answers and counters, and what a single process would have said.

mod http;
mod node;
mod reference;

pub use http::{Answer, HttpError};
pub use node::{Node, PATIENCE, Setup, wait_until};
pub use reference::Reference;
