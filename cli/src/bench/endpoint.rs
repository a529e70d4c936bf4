//! The one place that knows how an endpoint of each transport is opened, and how its addresses are written.

use std::net::SocketAddr;

use bytes::Bytes;
use kvferry::config::PreSharedKey;
use kvferry_protocol::wire::ClusterKey;
use kvferry_protocol::{EngineId, Incarnation, PeerId, PpRank, TpRank};
use kvferry_transport::{PeerAddress, Tcp, TcpConfig, TcpConfigFile, Transport};

use crate::args::Kind;
use crate::error::CliError;

/// The address of any free place on this host.
pub(crate) const NEAR: &str = "near";

/// What an endpoint is opened with.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) kind: Kind,
    /// Where to listen; without it, or with [`NEAR`], somewhere on this host.
    pub(crate) listen: Option<String>,
    /// Data lanes.
    pub(crate) lanes: u16,
    /// Threads that carry payload.
    pub(crate) data_threads: u16,
    /// The most peers.
    pub(crate) peers: u32,
    pub(crate) key: PreSharedKey,
    /// What this side calls itself.
    pub(crate) name: Option<String>,
}

impl Setup {
    /// One peer, as the connector has it.
    pub(crate) fn new(kind: Kind, lanes: u16, key: PreSharedKey) -> Self {
        let defaults = TcpConfigFile::default();
        Self {
            kind,
            listen: None,
            lanes,
            data_threads: defaults.data_threads,
            peers: defaults.max_peers,
            key,
            name: None,
        }
    }
}

/// Opens an endpoint that calls itself `name`.
pub(crate) fn open(setup: &Setup, name: &str) -> Result<Box<dyn Transport>, CliError> {
    let peer = peer(name)?;
    match setup.kind {
        Kind::Tcp => open_tcp(setup, peer),
        other => Err(unavailable(other)),
    }
}

/// Reads an address as [`address_text`] writes it.
pub(crate) fn parse_address(kind: Kind, argument: &'static str, text: &str) -> Result<PeerAddress, CliError> {
    match kind {
        Kind::Tcp => Ok(PeerAddress::Tcp(socket_address(argument, text)?)),
        other => Err(unavailable(other)),
    }
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

fn open_tcp(setup: &Setup, peer: PeerId) -> Result<Box<dyn Transport>, CliError> {
    let defaults = TcpConfigFile::default();
    let listen = setup.listen.as_deref().filter(|text| *text != NEAR);
    let listen = listen.map(|text| socket_address("--listen", text)).transpose()?;
    let file = TcpConfigFile {
        listen: listen.unwrap_or(defaults.listen),
        lanes_same_host: setup.lanes,
        lanes_remote: setup.lanes,
        data_threads: setup.data_threads,
        max_peers: setup.peers.max(defaults.max_peers),
        // A crowd dials at once.
        max_unauthenticated: setup.peers.max(defaults.max_unauthenticated),
        redial_seed: peer.incarnation.get(),
        ..defaults
    };
    let config = TcpConfig::try_from(file).map_err(|error| {
        let argument = if error.key.starts_with("lanes") { "--lanes" } else { "--peers" };
        CliError::argument(argument, &error.found, error.fix)
    })?;
    let what = format!("cannot listen on {}", setup.listen.as_deref().unwrap_or("the loopback address"));
    let tcp = Tcp::bind(config, cluster_key(&setup.key)?, peer, Bytes::new()).map_err(CliError::transport(what))?;
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

fn cluster_key(psk: &PreSharedKey) -> Result<ClusterKey, CliError> {
    ClusterKey::new(psk.expose()).map_err(|error| CliError::argument("--key", "(not shown)", error.to_string()))
}

fn unavailable(kind: Kind) -> CliError {
    CliError::Unavailable {
        transport: kind.name(),
        why: "this build does not have it".to_owned(),
        fix: "this build measures tcp only".to_owned(),
    }
}
