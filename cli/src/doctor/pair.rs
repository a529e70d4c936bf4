//! What two machines offer together: one answers (`doctor --listen`), the other asks (`doctor ADDRESS`).

use std::fmt::Write as _;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use kvferry_transport::{Credentials, TransportError};
use serde::Serialize;

use super::row::{self, Row};
use crate::args::{DoctorArgs, DoctorTls};
use crate::bench::{self, Figures, credentials, endpoint::Setup};
use crate::error::{CliError, with_causes};

/// How long a connection may take.
const REACH: Duration = Duration::from_secs(5);
const LANES: u16 = 2;

/// A pair, as this side sees it.
#[derive(Serialize)]
pub(crate) struct Pair {
    pub(crate) address: SocketAddr,
    pub(crate) rows: Vec<Row>,
    /// Rate and latency of a verified pattern.
    #[serde(skip_serializing_if = "Option::is_none")]
    figures: Option<Figures>,
}

impl Pair {
    pub(crate) fn table(&self) -> String {
        let mut out = format!("with {}\n{}", self.address, row::table(&self.rows));
        if let Some(figures) = &self.figures {
            let _ = write!(out, "\n{}", figures.table());
        }
        out
    }
}

/// Answers doctors of other machines until the process is ended.
pub(crate) fn answer(options: &DoctorArgs) -> Result<ExitCode, CliError> {
    let listen = options.listen.map(|address| address.to_string());
    let setup = Setup { listen, ..setup(options)? };
    bench::serve_doctor(&setup, &options.engine_id).map(|()| ExitCode::SUCCESS)
}

/// Reaches the other side, proves who this is, and measures.
pub(crate) fn examine(options: &DoctorArgs, address: SocketAddr) -> Result<Pair, CliError> {
    let setup = setup(options)?;
    let mut pair = Pair { address, rows: Vec::new(), figures: None };
    if let Err(row) = reach(&mut pair.rows, address) {
        pair.rows.push(row);
        return Ok(pair);
    }
    match bench::measure_pair(&setup, &options.engine_id, address) {
        Ok(figures) => {
            pair.rows.push(member(&setup));
            pair.rows.push(path(&figures));
            pair.rows.push(pattern(&figures));
            pair.figures = Some(figures);
        }
        Err(error) => pair.rows.push(failed(&setup, &error)),
    }
    Ok(pair)
}

/// What engines are configured with: their key, or certificates.
fn setup(options: &DoctorArgs) -> Result<Setup, CliError> {
    let files = options.tls.as_ref().map(DoctorTls::files);
    Ok(Setup::new(None, LANES, credentials::of_cluster(options.key.as_deref(), files.as_ref())?))
}

/// What the session showed.
fn member(setup: &Setup) -> Row {
    match &setup.credentials {
        Credentials::Keys(_) => Row::ok("key", "both sides have the same"),
        Credentials::Tls { keys: None, .. } => Row::ok("certificates", "both sides are of the same authority"),
        Credentials::Tls { keys: Some(_), .. } => {
            Row::ok("certificates", "both sides are of the same authority, and have the same key")
        }
    }
}

/// A plain connection: tells an address that nobody serves from a key that does not fit.
fn reach(rows: &mut Vec<Row>, address: SocketAddr) -> Result<(), Row> {
    let start = Instant::now();
    match TcpStream::connect_timeout(&address, REACH) {
        Ok(_) => {
            let micros = start.elapsed().as_micros();
            rows.push(Row::ok("address", format!("{address} accepts connections, after {micros} us")));
            Ok(())
        }
        Err(error) => {
            let mend = match error.kind() {
                ErrorKind::ConnectionRefused => "nobody listens there: start kvferry doctor --listen on that machine",
                ErrorKind::TimedOut => "no answer: is the address right, and does a firewall let this port through?",
                ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => {
                    "no route: see ip route get on this machine"
                }
                _ => "see whether the address is right",
            };
            Err(Row::broken("address", format!("{address}: {error}"), mend))
        }
    }
}

fn failed(setup: &Setup, error: &CliError) -> Row {
    let text = with_causes(error);
    match error {
        CliError::Gone { source: TransportError::Authentication { .. }, .. } if setup.credentials.is_tls() => {
            Row::broken(
                "certificates",
                text,
                "give both sides certificates of the same authority, both of them a key or neither; \
             openssl x509 -in FILE -noout -dates -issuer says what one is",
            )
        }
        CliError::Gone { source: TransportError::Authentication { .. }, .. } => {
            Row::broken("key", text, "give both sides the same file with --key, or the same KVFERRY_PSK")
        }
        CliError::Gone { .. } | CliError::Silent { .. } => Row::broken(
            "session",
            text,
            "see that the other side is kvferry doctor --listen of this release, with the same key",
        ),
        _ => Row::broken("session", text, "see what the other side printed"),
    }
}

/// Which path the two chose, and why not the better ones.
fn path(figures: &Figures) -> Row {
    let Some(report) = figures.path() else {
        return Row::broken("path", "none", "nothing was measured: see the rows above");
    };
    let reasons: Vec<String> = report.not.iter().map(|(kind, why)| format!("not {kind}: {why}")).collect();
    let found = report.taken();
    match reasons.is_empty() {
        true => Row::ok("path", format!("{found}, the best there is")),
        false => Row::ok("path", format!("{found}; {}", reasons.join("; "))),
    }
}

fn pattern(figures: &Figures) -> Row {
    match figures.is_verified() {
        true => Row::ok("pattern", "every byte arrived as it was sent, digests agree"),
        false => Row::broken(
            "pattern",
            "bytes arrived otherwise than they were sent",
            "do not use this pair: test the memory of both machines and the cards between them",
        ),
    }
}
