//! A small Llama engine that prefills in one process and decodes in another.
//!
//! `engine` computes, `pd` puts kvferry beside it, `prefills` chooses a prefill node, `http` answers clients; the binaries `prefill`, `decode` and `pair` put them
//! together.
#![forbid(unsafe_code)]

pub mod cli;
pub mod engine;
pub mod http;
pub mod messages;
pub mod model;
pub mod node;
pub mod nodes;
pub mod pair;
pub mod pd;
pub mod prefills;
