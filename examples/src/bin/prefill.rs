//! Prefills prompts for decode nodes: computes their KV and hands it over.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use kvferry_examples::cli::{exit, start_log};
use kvferry_examples::nodes::{PrefillOptions, run_prefill};

#[tokio::main(worker_threads = 1)]
async fn main() -> ExitCode {
    let options = PrefillOptions::parse();
    start_log();
    exit(run_prefill(&options).await.map(|()| ExitCode::SUCCESS))
}
