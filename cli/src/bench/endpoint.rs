//! The one place that knows how an endpoint of each transport is opened, and how its addresses are written.

use std::net::SocketAddr;

use bytes::Bytes;
use kvferry_protocol::{EngineId, Incarnation, PeerId, PpRank, TpRank};
use kvferry_transport::rdma::RdmaConfigFile;
use kvferry_transport::ucx::UcxConfigFile;
use kvferry_transport::{
    Credentials, PathKind, PathReport, PeerAddress, Tcp, TcpConfig, TcpConfigFile, Transport, TransportError,
};

use crate::args::Kind;
use crate::error::CliError;

/// The address of any free place on this host.
pub(crate) const NEAR: &str = "near";

/// What an endpoint is opened with.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// What carries the blocks; the best that both sides have if nothing is said.
    pub(crate) kind: Option<Kind>,
    /// Where to listen; without it, or with [`NEAR`], somewhere on this host.
    pub(crate) listen: Option<String>,
    /// Data lanes.
    pub(crate) lanes: u16,
    /// Threads that carry payload.
    pub(crate) data_threads: u16,
    /// The most peers.
    pub(crate) peers: u32,
    /// By what both sides prove themselves.
    pub(crate) credentials: Credentials,
    /// What this side calls itself.
    pub(crate) name: Option<String>,
}

impl Setup {
    /// One peer, as the connector has it.
    pub(crate) fn new(kind: Option<Kind>, lanes: u16, credentials: Credentials) -> Self {
        let defaults = TcpConfigFile::default();
        Self {
            kind,
            listen: None,
            lanes,
            data_threads: defaults.data_threads,
            peers: defaults.max_peers,
            credentials,
            name: None,
        }
    }
}

impl Setup {
    /// The paths that the endpoint may take.
    fn paths(&self) -> Vec<PathKind> {
        match self.kind {
            // A session streams until the other side has mapped memory, so memory goes with Unix lanes.
            Some(kind @ (Kind::Shm | Kind::Cma)) => vec![kind.path(), PathKind::UnixSocket],
            // The session itself is over TCP, and without the device so are the blocks: then the bench ends and says why.
            Some(kind @ (Kind::Ucx | Kind::Rdma)) => vec![kind.path(), PathKind::Tcp],
            Some(kind) => vec![kind.path()],
            None => PathKind::ALL.to_vec(),
        }
    }

    /// Whether memory is to be such that another process may map it.
    pub(crate) fn is_shareable(&self) -> bool {
        self.kind.is_none_or(|kind| kind == Kind::Shm)
    }
}

/// Reads an address as [`address_text`] writes it: sessions begin over TCP, whatever carries the blocks then.
pub(crate) fn parse_address(argument: &'static str, text: &str) -> Result<PeerAddress, CliError> {
    socket_address(argument, text).map(PeerAddress::Tcp)
}

/// An address as it is given to `--connect`.
pub(crate) fn address_text(address: &PeerAddress) -> String {
    match address {
        PeerAddress::Tcp(address) => address.to_string(),
        PeerAddress::Loopback(number) => format!("loopback-{number}"),
    }
}

/// The IP by which this endpoint is reached, if it has one: where plain sockets of the same path listen and connect.
pub(crate) fn ip_of(address: &PeerAddress) -> Option<std::net::IpAddr> {
    match address {
        PeerAddress::Tcp(address) => Some(address.ip()),
        PeerAddress::Loopback(_) => None,
    }
}

/// Opens an endpoint that calls itself `name`.
pub(crate) fn open(setup: &Setup, name: &str) -> Result<Box<dyn Transport>, CliError> {
    let peer = peer(name)?;
    let defaults = TcpConfigFile::default();
    let listen = setup.listen.as_deref().filter(|text| *text != NEAR);
    let listen = listen.map(|text| socket_address("--listen", text)).transpose()?;
    let file = TcpConfigFile {
        listen: listen.unwrap_or(defaults.listen),
        paths: setup.paths(),
        ucx: ucx_config(),
        rdma: patient_rdma(),
        lanes_same_host: setup.lanes,
        lanes_remote: setup.lanes,
        data_threads: setup.data_threads,
        max_peers: setup.peers.max(defaults.max_peers),
        // A crowd dials at once.
        max_unauthenticated: setup.peers.max(defaults.max_unauthenticated),
        max_unauthenticated_per_address: setup.peers.max(defaults.max_unauthenticated_per_address),
        redial_seed: peer.incarnation.get(),
        ..defaults
    };
    let config = TcpConfig::try_from(file).map_err(|error| {
        let argument = if error.key.starts_with("lanes") { "--lanes" } else { "--peers" };
        CliError::argument(argument, &error.found, error.fix)
    })?;
    let what = format!("cannot listen on {}", setup.listen.as_deref().unwrap_or("the loopback address"));
    let tcp = Tcp::bind(config, setup.credentials.clone(), peer, Bytes::new()).map_err(CliError::transport(what))?;
    Ok(Box::new(tcp))
}

fn socket_address(argument: &'static str, text: &str) -> Result<SocketAddr, CliError> {
    let fix = "write IP:port, such as 10.0.0.7:7400 or [fd00::7]:7400; names are not looked up";
    text.parse().map_err(|_| CliError::argument(argument, text, fix))
}

/// A peer in a new incarnation.
fn peer(name: &str) -> Result<PeerId, CliError> {
    let engine = EngineId::new(name).map_err(|error| CliError::argument("--engine-id", name, error.to_string()))?;
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|error| CliError::Io {
        what: "the system gives no random bytes".to_owned(),
        source: std::io::Error::other(error),
    })?;
    let incarnation = Incarnation::new(u64::from_le_bytes(random));
    Ok(PeerId { engine, incarnation, pp_rank: PpRank::new(0), tp_rank: TpRank::new(0) })
}

/// What the session's path is called, if it is the one that was asked for: a slower one is never taken in silence.
pub(crate) fn taken(setup: &Setup, report: &PathReport) -> Result<Kind, CliError> {
    let found = Kind::of(report.kind);
    match (setup.kind, found) {
        (None, Some(found)) => Ok(found),
        (Some(wanted), Some(found)) if wanted == found => Ok(found),
        (wanted, _) => {
            let why = format!("the session came up over {} ({})", report.kind, report.not_taken());
            let transport = wanted.map_or("any", Kind::name);
            Err(CliError::Unavailable { transport, why, fix: FIX.to_owned() })
        }
    }
}

/// A transport that is not here, and why.
pub(crate) fn unavailable(kind: Kind, why: String) -> CliError {
    CliError::Unavailable { transport: kind.name(), why, fix: FIX.to_owned() }
}

/// The error of a session that did not come up, as one of a transport that is not here if that is why.
pub(crate) fn explained(setup: &Setup, error: CliError) -> CliError {
    match (setup.kind, error) {
        (Some(kind), CliError::Gone { source: TransportError::Protocol { problem, .. }, .. })
            if problem.contains("no common way") =>
        {
            unavailable(kind, problem)
        }
        (_, error) => error,
    }
}

const FIX: &str = "see kvferry doctor on both sides, or name another with --transport";

/// How long a device may take: one that is emulated takes its time, and both sides of a bench are alive.
const PATIENCE_MS: u64 = 60_000;

/// RDMA as it is measured.
fn patient_rdma() -> RdmaConfigFile {
    let (stall_ms, prove_ms, ask_ms) = (PATIENCE_MS, PATIENCE_MS, PATIENCE_MS);
    RdmaConfigFile { stall_ms, prove_ms, ask_ms, ..RdmaConfigFile::default() }
}

/// UCX as it is measured: also over its tcp, which emulates puts and would end a receiver whose sender dies; both are the bench's.
pub(crate) fn ucx_config() -> UcxConfigFile {
    let (connect_ms, stall_ms) = (PATIENCE_MS, PATIENCE_MS);
    UcxConfigFile { emulated_puts: true, connect_ms, stall_ms, ..UcxConfigFile::default() }
}
