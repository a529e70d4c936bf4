//! The command `kvferry`: `bench` measures transports between two processes or machines, beside the limit of the path in the same
//! run; `doctor` says what this machine, or a pair of them, offers, and how to mend what is missing; `plan` sizes a model's KV cache.
//!
//! Exit codes: 0 all is well; 1 something was measured and found wrong (a byte, a digest, a check of `doctor`); 2 an argument
//! that cannot be; 3 a transport that this build or machine does not have; 4 the other side or the system failed.
#![deny(unsafe_code)]

mod args;
mod bench;
mod calls;
mod doctor;
mod error;
mod figures;
mod plan;
mod size;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

/// Runs the command with this process's arguments.
#[must_use]
pub fn run() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Bench(options) => bench::run(&options),
        Command::Doctor(options) => doctor::run(&options),
        Command::Plan(options) => plan::run(&options),
        Command::TryLibrary { name } => doctor::try_library(&name),
        Command::SurveyUcx => doctor::survey_ucx(),
        Command::SurveyRdma => doctor::survey_rdma(),
        Command::TryMemory { pid, address } => doctor::try_memory(pid, address),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("kvferry: {}", error::with_causes(&error));
            error.code()
        }
    }
}
