//! The two nodes: what the binaries `prefill` and `decode` do, and `pair` in the processes that it starts.

mod decode;
mod prefill;

pub use decode::{DecodeOptions, run_decode};
pub use prefill::{PrefillOptions, run_prefill};
