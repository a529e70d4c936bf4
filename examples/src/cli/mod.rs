//! What the three binaries share: options, prompts, progress bars, how they end.

mod lifetime;
mod options;
mod progress;
mod prompts;

pub use lifetime::{exit, start_log, until_end};
pub use options::{
    EngineOptions, EventOptions, LinkOptions, Order, PairOptions, Switch, TraceOptions, TransportKind, address, count,
    listen_on,
};
pub use progress::Bar;
pub use prompts::{PromptsError, parse_prompts, read_prompts};
