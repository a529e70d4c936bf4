//! The other side as a process that this command starts.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use serde::Deserialize;

use super::credentials;
use crate::args::BenchArgs;
use crate::error::CliError;

/// Ends with the value.
pub(crate) struct OtherSide {
    child: Child,
    /// Where it listens.
    pub(crate) address: String,
}

#[derive(Deserialize)]
struct Ready {
    address: String,
}

impl OtherSide {
    /// Starts this program again, to serve what `options` asks for.
    pub(crate) fn start(options: &BenchArgs, key: &str) -> Result<Self, CliError> {
        let program = std::env::current_exe().map_err(CliError::io("the path of this program"))?;
        let mut command = Command::new(program);
        command.args(["bench", "--until-input-ends", "--listen", super::endpoint::NEAR]);
        command.args(["--transport", options.transport.name()]);
        command.args(["--lanes", &options.lanes.to_string(), "--memory", &options.memory.0.to_string()]);
        command.args(options.tls.then_some("--tls"));
        command.env(credentials::VARIABLE, key).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(CliError::io("the other side cannot be started"))?;
        let mut line = String::new();
        let output = child.stdout.take().map(BufReader::new);
        let read = output.map_or(Ok(0), |mut output| output.read_line(&mut line));
        let mut other_side = Self { child, address: String::new() };
        read.map_err(CliError::io("the other side's output"))?;
        if line.is_empty() {
            return Err(CliError::Refused { why: "it ended at once; the lines above say why".to_owned() });
        }
        let ready: Ready = serde_json::from_str(&line)
            .map_err(|source| CliError::Json { what: "the other side's first line", source })?;
        other_side.address = ready.address;
        Ok(other_side)
    }
}

impl Drop for OtherSide {
    fn drop(&mut self) {
        // It ends with its input; a kill is for one that does not.
        drop(self.child.stdin.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
