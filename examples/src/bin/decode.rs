//! Generates text on KV blocks that a prefill node computed.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use kvferry_examples::cli::{exit, start_log};
use kvferry_examples::nodes::{DecodeOptions, run_decode};

fn main() -> ExitCode {
    let options = DecodeOptions::parse();
    start_log();
    exit(run_decode(&options))
}
