//! `kvferry bench`: a transport between two processes, in turn with the limit of its path.
//!
//! The measuring side orders, the other one serves; both are this command. A *case* is one block size; a *pass* moves all its
//! blocks once, in scattered order on either side; a *request* moves a few. Bytes move through the transport's public interface only:
//! the receiver grants a window of scattered blocks, the sender posts writes of `--batch` blocks out of scattered blocks. With digests
//! each write's bytes are digested where they lie before they are sent, and again where they landed: by the threads that carry them, where
//! the transport has such, or by threads of their own, as the connector does it. In place nothing moves: the receiver is told where the blocks
//! lie, digests them there, and lets go when the request is closed.

mod arena;
mod case;
mod content;
pub(crate) mod credentials;
mod crowd;
mod drive;
pub(crate) mod endpoint;
mod flow;
mod limit;
mod other_side;
mod plot;
mod report;
mod serve;
mod station;
mod words;

use std::process::ExitCode;

use kvferry_protocol::wire::ClusterKey;
use kvferry_transport::PathReport;
use serde::Serialize;

use crate::args::{BenchArgs, DigestBy, Kind, Spoil};
use crate::error::CliError;
use crate::size::Size;
use case::Case;
use drive::Effort;
use endpoint::Setup;
use other_side::OtherSide;
use report::Report;

/// Measures, or serves one that does.
pub(crate) fn run(options: &BenchArgs) -> Result<ExitCode, CliError> {
    let quick = BenchArgs { rounds: 1, requests: 20, memory: QUICK_MEMORY, seconds: 1, ..options.clone() };
    let options = if options.quick { &quick } else { options };
    if let Some(listen) = &options.listen {
        let key = credentials::given(options.key.as_deref())?;
        let setup = Setup { listen: Some(listen.clone()), ..setup(options, key)? };
        return serve::run(&setup, options.memory.0, options.until_input_ends).map(|()| ExitCode::SUCCESS);
    }
    if let Some(counts) = &options.crowd {
        return crowd::be(options, counts).map(|()| ExitCode::SUCCESS);
    }
    if options.peers > 1 || options.idle_peers > 0 {
        let report = crowd::run(options)?;
        print_as(options, &report, || report.table())?;
        return Ok(if report.has_wrong() { ExitCode::FAILURE } else { ExitCode::SUCCESS });
    }
    let cases = cases(options)?;
    let report = match &options.connect {
        Some(address) => {
            let key = credentials::given(options.key.as_deref())?;
            measure(options, cases, setup(options, key)?, address)?
        }
        None => {
            let (key, text) = credentials::drawn()?;
            // Refuses here what it would refuse in the other process.
            let setup = setup(options, key)?;
            drop(endpoint::open(&setup, "bench-measuring")?);
            let other_side = OtherSide::start(options, &text)?;
            measure(options, cases, setup, &other_side.address)?
        }
    };
    print(options, &report)
}

fn setup(options: &BenchArgs, key: ClusterKey) -> Result<Setup, CliError> {
    Ok(Setup::new(Some(options.transport), options.lanes, credentials::of_key(key, options.tls)?))
}

fn cases(options: &BenchArgs) -> Result<Vec<Case>, CliError> {
    if !(1..=1000).contains(&options.rounds) {
        return Err(CliError::argument("--rounds", options.rounds, "write 1 to 1000"));
    }
    if options.in_place && options.transport != Kind::Shm {
        return Err(CliError::argument(
            "--in-place",
            "true",
            "needs --transport shm: only memory that is mapped is read where it lies",
        ));
    }
    if options.in_place && options.spoil == Some(Spoil::Target) {
        return Err(CliError::argument("--spoil", "target", "nothing lands in place: spoil the source"));
    }
    if !(1..=1_000_000).contains(&options.requests) {
        return Err(CliError::argument("--requests", options.requests, "write 1 to 1000000"));
    }
    let case = |block: &Size| {
        let case = Case::new(block.0, options.blocks, options.batch, options.posts, options.memory.0)?;
        let (digest, movers) = (options.digest != DigestBy::Off, options.digest == DigestBy::Movers);
        let in_place = options.in_place;
        Ok(Case {
            direction: options.direction,
            digest,
            in_place,
            movers,
            verify: options.verify,
            spoil: options.spoil,
            ..case
        })
    };
    options.block.iter().map(case).collect()
}

fn measure(options: &BenchArgs, cases: Vec<Case>, setup: Setup, address: &str) -> Result<Report, CliError> {
    let address = endpoint::parse_address("--connect", address)?;
    let effort = Effort { rounds: options.rounds, requests: options.requests, memory: options.memory.0 };
    let sizes =
        cases.into_iter().map(|case| drive::measure(&setup, &address, case, effort)).collect::<Result<_, _>>()?;
    Ok(Report { sizes })
}

fn print(options: &BenchArgs, report: &Report) -> Result<ExitCode, CliError> {
    if let Some(path) = &options.svg {
        let what = format!("--svg {} cannot be written", path.display());
        std::fs::write(path, plot::svg(&report.sizes)).map_err(CliError::io(what))?;
    }
    print_as(options, report, || report.table())?;
    Ok(if report.has_wrong() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn print_as(options: &BenchArgs, report: &impl Serialize, table: impl FnOnce() -> String) -> Result<(), CliError> {
    if options.json {
        let text =
            serde_json::to_string_pretty(report).map_err(|source| CliError::Json { what: "the report", source })?;
        println!("{text}");
    } else {
        print!("{}", table());
    }
    Ok(())
}

/// The figures of a pair, as `doctor` shows them.
#[derive(Serialize)]
#[serde(transparent)]
pub(crate) struct Figures(Report);

impl Figures {
    /// Whether all bytes were compared and none was wrong.
    pub(crate) fn is_verified(&self) -> bool {
        self.0.sizes.iter().all(|row| row.verified)
    }

    /// Which way the session took, and why no better one.
    pub(crate) fn path(&self) -> Option<&PathReport> {
        self.0.sizes.first()?.path.as_ref()
    }

    pub(crate) fn table(&self) -> String {
        self.0.table()
    }
}

/// What `--quick` moves in a pass: a few of the largest usual blocks.
const QUICK_MEMORY: Size = Size(16 << 20);

/// What `doctor` moves: enough for a rate, little enough for any machine.
const DOCTOR_MEMORY: u64 = 64 << 20;
const DOCTOR_BLOCKS: [u64; 2] = [16 << 10, 1 << 20];

/// Measures a short, verified pattern to a `doctor --listen`.
pub(crate) fn measure_pair(setup: &Setup, name: &str, address: std::net::SocketAddr) -> Result<Figures, CliError> {
    let setup = Setup { name: Some(name.to_owned()), ..setup.clone() };
    let effort = Effort { rounds: 3, requests: 200, memory: DOCTOR_MEMORY };
    let address = endpoint::parse_address("the address", &address.to_string())?;
    let mut sizes = Vec::new();
    for block_bytes in DOCTOR_BLOCKS {
        let case = Case { verify: true, ..Case::new(block_bytes, None, None, 8, DOCTOR_MEMORY)? };
        sizes.push(drive::measure(&setup, &address, case, effort)?);
    }
    Ok(Figures(Report { sizes }))
}

/// Serves [`measure_pair`] until the process is ended.
pub(crate) fn serve_doctor(setup: &Setup, name: &str) -> Result<(), CliError> {
    let setup = Setup { name: Some(name.to_owned()), ..setup.clone() };
    serve::run(&setup, DOCTOR_MEMORY, false)
}
