//! Generates text on KV blocks that a prefill node computed.
#![forbid(unsafe_code)]

use clap::Parser;
use kvferry_examples::cli::start_log;
use kvferry_examples::nodes::{DecodeOptions, run_decode};

fn main() -> anyhow::Result<()> {
    let options = DecodeOptions::parse();
    start_log();
    run_decode(&options)
}
