//! `kvferry doctor`: what this machine offers, row by row, and what a pair of machines offers.
//!
//! Rows come from files under a root (tests give a root of their own), from calls, and from trials in a process of their own where the
//! trial may take its process down. Nothing is changed.

mod device_memory;
mod machine;
mod network;
mod pair;
mod probes;
mod rdma;
mod root;
mod row;
#[cfg(test)]
mod tests;
mod ucx;

use std::process::ExitCode;

use serde::Serialize;

use crate::args::DoctorArgs;
use crate::calls;
use crate::error::CliError;
pub(crate) use device_memory::survey as survey_rdma;
use pair::Pair;
pub(crate) use probes::{try_library, try_memory};
use root::Root;
use row::{Row, State};
pub(crate) use ucx::survey as survey_ucx;

/// All that was looked at.
#[derive(Serialize)]
struct Report {
    machine: Vec<Row>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pair: Option<Pair>,
}

/// Looks at this machine, at a pair, or answers those who do.
pub(crate) fn run(options: &DoctorArgs) -> Result<ExitCode, CliError> {
    if options.listen.is_some() {
        return pair::answer(options);
    }
    let machine = machine_rows(&Root::machine());
    if !options.json {
        print!("{}", row::table(&machine));
    }
    let pair = options.address.map(|address| pair::examine(options, address)).transpose()?;
    let report = Report { machine, pair };
    if options.json {
        let text =
            serde_json::to_string_pretty(&report).map_err(|source| CliError::Json { what: "the report", source })?;
        println!("{text}");
    } else if let Some(pair) = &report.pair {
        print!("\n{}", pair.table());
    }
    let rows = report.machine.iter().chain(report.pair.iter().flat_map(|pair| &pair.rows));
    let is_broken = rows.into_iter().any(|row| row.state == State::Broken);
    Ok(if is_broken { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn machine_rows(root: &Root) -> Vec<Row> {
    let usable = std::thread::available_parallelism().map_or(1, Into::into);
    let addresses = calls::addresses().unwrap_or_default();
    let mut rows = vec![machine::cores(root, usable), machine::simd()];
    rows.extend(machine::memory(root));
    rows.extend(machine::limits(root));
    rows.extend(machine::clock(root));
    rows.extend(network::interfaces(root, &addresses));
    rows.extend(network::buffers(root));
    rows.extend(probes::sharing());
    rows.push(probes::other_memory(root));
    rows.extend(rdma::devices(root));
    rows.extend(device_memory::rows(root));
    rows.extend(probes::libraries());
    rows.push(ucx::row());
    rows
}
