//! How a TCP endpoint is set up.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use kvferry_protocol::wire::{MAX_LANES, MAX_PAYLOAD_BYTES, MAX_RAILS, VERSIONS, VersionRange};
use serde::Deserialize;

use crate::api::PathKind;
use crate::rdma::{RdmaConfig, RdmaConfigFile};
use crate::ucx::{UcxConfig, UcxConfigFile};

/// The keys of a configuration file's `[tcp]` table; every key has a default.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TcpConfigFile {
    /// Where to listen; port 0 lets the system choose.
    pub listen: SocketAddr,
    /// What peers are told, if it is not where we listen (NAT, a wildcard address); port 0 stands for the port that we listen on.
    pub advertise: Option<SocketAddr>,
    /// More local addresses that carry payload, one for each network card; port 0 lets the system choose. Lanes are spread over
    /// them and the main address, each to the nearest rail of a peer that has some.
    pub rails: Vec<SocketAddr>,
    /// The ways that payload may go; the best that both sides have is taken.
    pub paths: Vec<PathKind>,
    /// Whether paths whose payload is not encrypted (`rdma`, `ucx`) may be named beside lanes that are.
    pub plain_payload: bool,
    /// How RDMA devices are used, if `paths` allows them.
    pub rdma: RdmaConfigFile,
    /// How UCX is set up, if `paths` names it.
    pub ucx: UcxConfigFile,
    /// Data lanes to a peer on this host.
    pub lanes_same_host: u16,
    /// Data lanes to a peer on another host.
    pub lanes_remote: u16,
    /// Threads that carry payload, for all peers together.
    pub data_threads: u16,
    /// Kernel buffers of a data lane, each way; without it 512 KiB on this host and the system's choice to others.
    pub socket_buffer_bytes: Option<u32>,
    /// The most payload bytes of a frame.
    pub frame_bytes: u32,
    /// How long a handshake may take.
    pub handshake_ms: u64,
    /// How often a peer that says nothing on the control lane is asked whether it is there; one that dialled asks itself, and is asked if
    /// it was silent for half as long again.
    pub keepalive_ms: u64,
    /// How long nothing may move before the session is given up.
    pub stall_ms: u64,
    /// The wait before the first new attempt; it doubles with each.
    pub redial_first_ms: u64,
    /// The longest wait between attempts.
    pub redial_longest_ms: u64,
    /// Where the jitter of those waits begins; give each endpoint another.
    pub redial_seed: u64,
    /// The most peers, and the most addresses to reach.
    pub max_peers: u32,
    /// The most connections at once that have not proved themselves. For one more, the oldest of the address that holds most is let go.
    pub max_unauthenticated: u32,
    /// The most of them from one address (IPv6: from one /64).
    pub max_unauthenticated_per_address: u32,
    /// The most grants at once.
    pub max_grants: u32,
    /// The most posts to one peer at once.
    pub max_posts: u32,
    /// Whether memory is read where it lies, of peers on this host that do so, too: theirs by this endpoint, and its own by them.
    pub in_place: bool,
    /// The most bytes of this endpoint's memory that peers of this host may hold in place at once; 0 lets none.
    pub max_held_bytes: u64,
    /// How long a peer may hold a write in place before it is asked to let go. It is never made to: what it holds stays as it is until it has
    /// let go, or its process is gone.
    pub hold_ms: u64,
    /// The most events that wait to be polled before nothing more is read from peers.
    pub max_events: u32,
    /// The most bytes of messages that wait for one peer.
    pub max_queued_message_bytes: u32,
    /// What a link carries at most, each way, in 10^9 bits of payload a second; for showing slow networks on one machine.
    pub link_gbps: Option<f64>,
    /// The newest protocol version to speak: write an older one while some engines of the cluster run an older release.
    pub newest_version: u16,
}

impl Default for TcpConfigFile {
    fn default() -> Self {
        Self {
            listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
            advertise: None,
            rails: Vec::new(),
            paths: PathKind::ALL.to_vec(),
            plain_payload: false,
            rdma: RdmaConfigFile::default(),
            ucx: UcxConfigFile::default(),
            lanes_same_host: 2,
            lanes_remote: 4,
            data_threads: 2,
            socket_buffer_bytes: None,
            frame_bytes: 1 << 20,
            handshake_ms: 5_000,
            keepalive_ms: 1_000,
            stall_ms: 10_000,
            redial_first_ms: 50,
            redial_longest_ms: 2_000,
            redial_seed: 0,
            max_peers: 64,
            max_unauthenticated: 128,
            max_unauthenticated_per_address: 64,
            max_grants: 1 << 16,
            max_posts: 4096,
            in_place: true,
            max_held_bytes: 64 << 30,
            hold_ms: 60_000,
            max_events: 1 << 16,
            max_queued_message_bytes: 16 << 20,
            link_gbps: None,
            newest_version: VERSIONS.max,
        }
    }
}

/// A setup that was checked; see [`TcpConfigFile`] for its meaning.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "TcpConfigFile")]
pub struct TcpConfig {
    pub(crate) listen: SocketAddr,
    pub(crate) advertise: Option<SocketAddr>,
    pub(crate) rails: Vec<SocketAddr>,
    pub(crate) paths: Vec<PathKind>,
    pub(crate) plain_payload: bool,
    pub(crate) rdma: RdmaConfig,
    pub(crate) ucx: UcxConfig,
    pub(crate) lanes_same_host: u16,
    pub(crate) lanes_remote: u16,
    pub(crate) data_threads: usize,
    pub(crate) socket_buffer_bytes: Option<usize>,
    pub(crate) frame_bytes: u64,
    pub(crate) handshake: Duration,
    pub(crate) keepalive: Duration,
    pub(crate) stall: Duration,
    pub(crate) redial_first: Duration,
    pub(crate) redial_longest: Duration,
    pub(crate) redial_seed: u64,
    pub(crate) max_peers: usize,
    pub(crate) max_unauthenticated: usize,
    pub(crate) max_unauthenticated_per_address: usize,
    pub(crate) max_grants: usize,
    pub(crate) max_posts: usize,
    pub(crate) in_place: bool,
    pub(crate) max_held_bytes: u64,
    pub(crate) hold: Duration,
    pub(crate) max_events: usize,
    pub(crate) max_queued_message_bytes: usize,
    pub(crate) link_bytes_per_second: Option<f64>,
    pub(crate) versions: VersionRange,
}

/// A value that cannot be.
#[derive(Debug, Clone, thiserror::Error)]
#[error("tcp.{key} = {found}: {fix}")]
pub struct ConfigError {
    /// Which key.
    pub key: &'static str,
    /// Its value.
    pub found: String,
    /// What it may be.
    pub fix: String,
}

impl Default for TcpConfig {
    fn default() -> Self {
        // The defaults pass their own checks: a test says so.
        Self::unchecked(&TcpConfigFile::default())
    }
}

impl TryFrom<TcpConfigFile> for TcpConfig {
    type Error = ConfigError;

    fn try_from(file: TcpConfigFile) -> Result<Self, Self::Error> {
        let within = |key, found: u64, least: u64, most: u64| {
            let fix = || format!("give {least} to {most}");
            let wrong = found < least || found > most;
            if wrong { Err(ConfigError { key, found: found.to_string(), fix: fix() }) } else { Ok(()) }
        };
        const HOUR_MS: u64 = 3_600_000;
        within("lanes_same_host", file.lanes_same_host.into(), 1, MAX_LANES.into())?;
        within("lanes_remote", file.lanes_remote.into(), 1, MAX_LANES.into())?;
        within("data_threads", file.data_threads.into(), 1, 64)?;
        within("frame_bytes", file.frame_bytes.into(), 4 << 10, MAX_PAYLOAD_BYTES as u64)?;
        within("handshake_ms", file.handshake_ms, 1, HOUR_MS)?;
        within("keepalive_ms", file.keepalive_ms, 1, HOUR_MS)?;
        within("stall_ms", file.stall_ms, file.keepalive_ms.saturating_mul(2), HOUR_MS)?;
        within("redial_first_ms", file.redial_first_ms, 1, HOUR_MS)?;
        within("redial_longest_ms", file.redial_longest_ms, file.redial_first_ms, HOUR_MS)?;
        within("max_peers", file.max_peers.into(), 1, 4096)?;
        within("max_unauthenticated", file.max_unauthenticated.into(), 1, 4096)?;
        let per_address = file.max_unauthenticated_per_address;
        within("max_unauthenticated_per_address", per_address.into(), 1, 4096)?;
        within("max_grants", file.max_grants.into(), 1, 1 << 24)?;
        within("max_posts", file.max_posts.into(), 1, 1 << 20)?;
        within("max_held_bytes", file.max_held_bytes, 0, 1 << 50)?;
        within("hold_ms", file.hold_ms, 1, HOUR_MS)?;
        within("max_events", file.max_events.into(), 1, 1 << 24)?;
        within("max_queued_message_bytes", file.max_queued_message_bytes.into(), 1 << 10, 1 << 30)?;
        within("newest_version", file.newest_version.into(), VERSIONS.min.into(), VERSIONS.max.into())?;
        if file.paths.is_empty() || file.paths.contains(&PathKind::Loopback) {
            let fix = "name one or more of shm, cma, uds, rdma and tcp, or leave it out".to_owned();
            return Err(ConfigError { key: "paths", found: format!("{:?}", file.paths), fix });
        }
        check_rails(&file)?;
        if let Some(bytes) = file.socket_buffer_bytes {
            within("socket_buffer_bytes", bytes.into(), 4 << 10, 1 << 30)?;
        }
        if let Some(gbps) = file.link_gbps
            && !(0.001..=10_000.0).contains(&gbps)
        {
            let fix = "give 0.001 to 10000, or leave it out".to_owned();
            return Err(ConfigError { key: "link_gbps", found: gbps.to_string(), fix });
        }
        let rdma = RdmaConfig::try_from(file.rdma.clone()).map_err(|error| {
            let (found, fix) = (error.to_string(), "give what it says".to_owned());
            ConfigError { key: "rdma", found, fix }
        })?;
        let ucx = UcxConfig::try_from(file.ucx.clone()).map_err(|error| {
            let (found, fix) = (error.to_string(), "give what it says".to_owned());
            ConfigError { key: "ucx", found, fix }
        })?;
        Ok(Self { rdma, ucx, ..Self::unchecked(&file) })
    }
}

fn check_rails(file: &TcpConfigFile) -> Result<(), ConfigError> {
    let refuse = |found: String, fix: &str| Err(ConfigError { key: "rails", found, fix: fix.to_owned() });
    if file.rails.len() > MAX_RAILS {
        return refuse(file.rails.len().to_string(), &format!("give at most {MAX_RAILS}"));
    }
    let told = file.advertise.unwrap_or(file.listen).ip();
    for (at, rail) in file.rails.iter().enumerate() {
        if rail.ip().is_unspecified() {
            return refuse(rail.to_string(), "give the address of one network card");
        }
        if rail.ip().is_loopback() != told.is_loopback() {
            return refuse(rail.to_string(), &format!("give one that who reaches {told} can reach, too"));
        }
        if file.rails[..at].iter().any(|other| other.ip() == rail.ip()) {
            return refuse(rail.to_string(), "give each network card once");
        }
    }
    Ok(())
}

impl TcpConfig {
    fn unchecked(file: &TcpConfigFile) -> Self {
        Self {
            listen: file.listen,
            advertise: file.advertise,
            rails: file.rails.clone(),
            paths: file.paths.clone(),
            plain_payload: file.plain_payload,
            rdma: RdmaConfig::default(),
            ucx: UcxConfig::default(),
            lanes_same_host: file.lanes_same_host,
            lanes_remote: file.lanes_remote,
            data_threads: file.data_threads.into(),
            socket_buffer_bytes: file.socket_buffer_bytes.map(|bytes| bytes as usize),
            frame_bytes: file.frame_bytes.into(),
            handshake: Duration::from_millis(file.handshake_ms),
            keepalive: Duration::from_millis(file.keepalive_ms),
            stall: Duration::from_millis(file.stall_ms),
            redial_first: Duration::from_millis(file.redial_first_ms),
            redial_longest: Duration::from_millis(file.redial_longest_ms),
            redial_seed: file.redial_seed,
            max_peers: file.max_peers as usize,
            max_unauthenticated: file.max_unauthenticated as usize,
            max_unauthenticated_per_address: file.max_unauthenticated_per_address as usize,
            max_grants: file.max_grants as usize,
            max_posts: file.max_posts as usize,
            in_place: file.in_place,
            max_held_bytes: file.max_held_bytes,
            hold: Duration::from_millis(file.hold_ms),
            max_events: file.max_events as usize,
            max_queued_message_bytes: file.max_queued_message_bytes as usize,
            link_bytes_per_second: file.link_gbps.map(|gbps| gbps * 1e9 / 8.0),
            versions: VERSIONS.up_to(file.newest_version),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_pass_their_own_checks() {
        TcpConfig::try_from(TcpConfigFile::default()).unwrap();
    }

    #[test]
    fn a_wrong_value_is_named_with_its_key_and_the_fix() {
        let base = TcpConfigFile::default;
        for (key, file) in [
            ("lanes_same_host", TcpConfigFile { lanes_same_host: 0, ..base() }),
            ("lanes_remote", TcpConfigFile { lanes_remote: 17, ..base() }),
            ("frame_bytes", TcpConfigFile { frame_bytes: 1, ..base() }),
            ("stall_ms", TcpConfigFile { keepalive_ms: 10, stall_ms: 19, ..base() }),
            ("redial_longest_ms", TcpConfigFile { redial_longest_ms: 1, ..base() }),
            ("socket_buffer_bytes", TcpConfigFile { socket_buffer_bytes: Some(1), ..base() }),
            ("paths", TcpConfigFile { paths: Vec::new(), ..base() }),
            ("rails", TcpConfigFile { rails: vec!["0.0.0.0:0".parse().unwrap()], ..base() }),
            ("rails", TcpConfigFile { rails: vec!["10.0.0.7:0".parse().unwrap()], ..base() }),
            ("rails", TcpConfigFile { rails: vec!["127.0.0.2:0".parse().unwrap(); 2], ..base() }),
            (
                "rails",
                TcpConfigFile { rails: (1..=9).map(|at| SocketAddr::from(([127, 0, 0, at], 0))).collect(), ..base() },
            ),
            ("link_gbps", TcpConfigFile { link_gbps: Some(f64::NAN), ..base() }),
            ("link_gbps", TcpConfigFile { link_gbps: Some(0.0), ..base() }),
            ("newest_version", TcpConfigFile { newest_version: VERSIONS.max + 1, ..base() }),
        ] {
            let error = TcpConfig::try_from(file).unwrap_err();
            assert_eq!(error.key, key);
            assert!(error.to_string().contains("give") || key == "paths", "{error}");
        }
    }
}
