//! A small Llama engine that prefills in one process and decodes in another.
#![forbid(unsafe_code)]

pub mod cli;
pub mod engine;
pub mod http;
pub mod model;
pub mod node;
