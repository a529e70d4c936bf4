//! Prefills prompts for decode nodes: computes their KV and hands it over.
#![forbid(unsafe_code)]

use clap::Parser;
use kvferry_examples::cli::start_log;
use kvferry_examples::nodes::{PrefillOptions, run_prefill};

#[tokio::main(worker_threads = 1)]
async fn main() -> anyhow::Result<()> {
    let options = PrefillOptions::parse();
    start_log();
    run_prefill(&options).await
}
