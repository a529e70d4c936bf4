//! Prefills in one process, decodes in another, and compares with a single process.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use kvferry_examples::cli::{PairOptions, exit, start_log};
use kvferry_examples::nodes::{DecodeOptions, PrefillOptions, run_decode, run_prefill};
use kvferry_examples::pair::{self, Role};

fn main() -> ExitCode {
    start_log();
    exit(run())
}

fn run() -> anyhow::Result<ExitCode> {
    // The two nodes are this program again, so that it needs no other binary beside it.
    let child = || std::env::args_os().skip(1);
    match Role::of_this_process() {
        Some(Role::Prefill) => runtime()?.block_on(run_prefill(&PrefillOptions::parse_from(child())))?,
        Some(Role::Decode) => return run_decode(&DecodeOptions::parse_from(child())),
        None => return runtime()?.block_on(compare(&PairOptions::parse())),
    }
    Ok(ExitCode::SUCCESS)
}

async fn compare(options: &PairOptions) -> anyhow::Result<ExitCode> {
    let program = std::env::current_exe().context("the path of this program is unknown")?;
    let report = pair::run(options, &program).await?;
    match options.json {
        true => println!("{}", serde_json::to_string_pretty(&report)?),
        false => println!("{report}"),
    }
    Ok(if report.all_identical() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()
}
