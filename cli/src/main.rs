//! The command `kvferry`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    kvferry_cli::run()
}
