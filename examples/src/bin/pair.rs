//! Prefills in one process, decodes in another, and compares with a single process.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use kvferry_examples::cli::{PairOptions, start_log};
use kvferry_examples::pair;

#[tokio::main(worker_threads = 1)]
async fn main() -> anyhow::Result<ExitCode> {
    let options = PairOptions::parse();
    start_log();
    let report = pair::run(&options).await?;
    match options.json {
        true => println!("{}", serde_json::to_string_pretty(&report)?),
        false => println!("{report}"),
    }
    Ok(if report.all_identical() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
