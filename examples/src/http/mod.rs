//! The decode node's HTTP side: OpenAI-style completions over an engine.

mod body;
mod error;
mod server;

pub use body::{CompletionBody, Prompt};
pub use error::ApiError;
pub use server::{Frontend, LocalRouter, RouteError, Router, metrics_router, router};
