//! What the three binaries share: options, prompts, progress bars.

mod options;
mod progress;
mod prompts;

pub use options::{EngineOptions, LinkOptions, Order, PairOptions, TransportKind};
pub use progress::LoadingBar;
pub use prompts::{PromptsError, parse_prompts, read_prompts};
