//! Opens the transport that a configuration asks for.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use kvferry_transport::rdma::RdmaConfigFile;
use kvferry_transport::{Tcp, TcpConfig, TcpConfigFile, Transport, TransportError};

use crate::config::{ConnectorConfig, SameHost, TransportKind};
use crate::error::ConnectorError;
use crate::keys;

/// Opens a worker's transport: binds its listener, and proves itself to peers with `greeting`
/// ([`greeting`](crate::pd::greeting) of the worker's cache).
///
/// # Errors
/// [`ConnectorError::Config`] for what no process of its own can use (loopback, a missing key, files that changed and are no
/// certificates any more);
/// [`ConnectorError::Transport`] if the address cannot be bound.
pub fn open_transport(config: &ConnectorConfig, greeting: Bytes) -> Result<Arc<dyn Transport>, ConnectorError> {
    let network = config.network();
    let refuse = |key, problem: String| ConnectorError::Config { key, problem };
    if network.transport == TransportKind::Loopback {
        let problem = "it joins workers of one process; make one with LoopbackNetwork, or write \"tcp\"".to_owned();
        return Err(refuse("transport", problem));
    }
    let credentials = keys::credentials(network)?;
    let defaults = TcpConfigFile::default();
    // At most an hour, so it fits. Four words are due in the time after which silence is believed.
    let silence_ms = config.deadlines().silence.as_millis() as u64;
    let file = TcpConfigFile {
        listen: network.listen,
        advertise: network.advertise,
        rails: network.rails.iter().map(|&card| SocketAddr::new(card, 0)).collect(),
        lanes_same_host: network.lanes.map_or(defaults.lanes_same_host, Into::into),
        lanes_remote: network.lanes.map_or(defaults.lanes_remote, Into::into),
        // Restarts, replicas and ranks must not dial in step: the incarnation is drawn anew by each engine.
        redial_seed: config.peer().incarnation.get().rotate_left(config.peer().tp_rank.get().into()),
        paths: network.paths.clone(),
        rdma: RdmaConfigFile {
            devices: network.rdma_devices.clone(),
            gid_index: network.rdma_gid_index,
            // With the usual silence these are the defaults; a longer one is for links or devices that are slow.
            stall_ms: (silence_ms / 2).clamp(100, 600_000),
            ask_ms: (silence_ms / 10).clamp(10, 600_000),
            prove_ms: (silence_ms * 3 / 10).clamp(10, 600_000),
            ..defaults.rdma
        },
        in_place: network.same_host == SameHost::InPlace,
        plain_payload: network.plain_payload,
        link_gbps: network.link_gbps,
        stall_ms: silence_ms,
        keepalive_ms: defaults.keepalive_ms.min(silence_ms / 4),
        handshake_ms: defaults.handshake_ms.min(silence_ms),
        ..defaults
    };
    let tcp =
        TcpConfig::try_from(file).map_err(|error| refuse(error.key, format!("{}: {}", error.found, error.fix)))?;
    let endpoint = Tcp::bind(tcp, credentials, config.peer().clone(), greeting);
    let what = |source: &TransportError| format!("cannot listen on {}{}", network.listen, mend(source));
    let endpoint: Arc<dyn Transport> =
        Arc::new(endpoint.map_err(|source| ConnectorError::Transport { what: what(&source), source })?);
    keys::watch(&endpoint, network).map_err(|error| refuse("psk_file", format!("no thread to watch it: {error}")))?;
    Ok(endpoint)
}

/// What to do about an address that cannot be bound.
fn mend(error: &TransportError) -> &'static str {
    let TransportError::Io { source, .. } = error else { return "" };
    match source.kind() {
        io::ErrorKind::AddrInUse => " (another process has that port: write another in `listen`, or port 0 for any)",
        io::ErrorKind::AddrNotAvailable => " (this host has no such address: write one of its own in `listen`)",
        _ => "",
    }
}
