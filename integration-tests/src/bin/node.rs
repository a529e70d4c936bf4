//! A prefill or a decode node as a process of its own: `node prefill ...`, `node decode ...`.

use std::process::ExitCode;

use anyhow::bail;
use clap::Parser;
use kvferry_examples::cli::{exit, start_log};
use kvferry_examples::nodes::{DecodeOptions, PrefillOptions, run_decode, run_prefill};

fn main() -> ExitCode {
    start_log();
    exit(run())
}

fn run() -> anyhow::Result<ExitCode> {
    let rest = || std::env::args_os().skip(1);
    match std::env::args().nth(1).as_deref() {
        Some("prefill") => {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
            runtime.block_on(run_prefill(&PrefillOptions::parse_from(rest())))?;
            Ok(ExitCode::SUCCESS)
        }
        Some("decode") => run_decode(&DecodeOptions::parse_from(rest())),
        other => bail!("the first argument is {other:?}; write prefill or decode"),
    }
}
