//! The configuration that cannot be invalid.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::num::{NonZeroU16, NonZeroU32};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvferry_protocol::{EngineId, Incarnation, PeerId, PpRank, TpRank};
use kvferry_transport::PathKind;

use super::{ConfigError, PreSharedKey, RawConfig, TlsFiles, read_limited};

/// A connector's configuration, checked. Made from a [`RawConfig`] and the incarnation that the caller drew.
#[derive(Clone, Debug, PartialEq)]
pub struct ConnectorConfig {
    peer: PeerId,
    tp_size: NonZeroU16,
    role: Role,
    order: TransferOrder,
    load_failure_policy: LoadFailurePolicy,
    layerwise: bool,
    layer_group: Option<NonZeroU16>,
    network: Network,
    deadlines: Deadlines,
    limits: Limits,
}

impl ConnectorConfig {
    /// Who this worker is: engine, incarnation, ranks.
    #[must_use]
    pub fn peer(&self) -> &PeerId {
        &self.peer
    }

    /// Ranks in the tensor-parallel group; above the worker's own rank.
    #[must_use]
    pub fn tp_size(&self) -> NonZeroU16 {
        self.tp_size
    }

    /// What this engine does.
    #[must_use]
    pub fn role(&self) -> Role {
        self.role
    }

    /// Who speaks first.
    #[must_use]
    pub fn order(&self) -> TransferOrder {
        self.order
    }

    /// What happens after a failed load.
    #[must_use]
    pub fn load_failure_policy(&self) -> LoadFailurePolicy {
        self.load_failure_policy
    }

    /// Whether decode uses a layer while later ones still land.
    #[must_use]
    pub fn layerwise(&self) -> bool {
        self.layerwise
    }

    /// Layers that prefill hands over together; `None`: as many as the measured rates of compute and link ask for.
    #[must_use]
    pub fn layer_group(&self) -> Option<NonZeroU16> {
        self.layer_group
    }

    /// How peers are reached.
    #[must_use]
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// How long each thing may take.
    #[must_use]
    pub fn deadlines(&self) -> &Deadlines {
        &self.deadlines
    }

    /// How much there may be of each thing.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }
}

macro_rules! choice {
    ($(#[$doc:meta])+ $name:ident { $($(#[$variant_doc:meta])+ $variant:ident = $text:literal,)+ }) => {
        $(#[$doc])+
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum $name { $($(#[$variant_doc])+ $variant,)+ }

        impl $name {
            pub(super) const TEXTS: &[&str] = &[$($text,)+];

            /// Reads the word of the configuration file.
            #[must_use]
            pub fn from_word(word: &str) -> Option<Self> {
                match word {
                    $($text => Some(Self::$variant),)+
                    _ => None,
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self { $(Self::$variant => $text,)+ })
            }
        }
    };
}

choice! {
    /// What an engine does.
    Role {
        /// Computes prompts for others.
        Prefill = "prefill",
        /// Takes prompts that others computed.
        Decode = "decode",
        /// Both.
        Both = "both",
    }
}

choice! {
    /// Who speaks first in a transfer.
    TransferOrder {
        /// Decode asks, with its grant.
        DecodeFirst = "decode-first",
        /// Prefill offers, before or while it computes.
        PrefillFirst = "prefill-first",
    }
}

choice! {
    /// What becomes of a request whose load failed.
    LoadFailurePolicy {
        /// What is missing is computed here.
        Recompute = "recompute",
        /// The request fails with the load's reason.
        Fail = "fail",
    }
}

choice! {
    /// Which transport carries the bytes.
    TransportKind {
        /// Striped TCP connections.
        Tcp = "tcp",
        /// Both engines live in one process.
        Loopback = "loopback",
    }
}

choice! {
    /// What a peer's certificate must say of its holder.
    Names {
        /// Nothing.
        Any = "any",
        /// The engine's id.
        Engine = "engine",
    }
}

choice! {
    /// How K/V of a peer on this host is taken where memory is shared.
    SameHost {
        /// Copied once.
        Copy = "copy",
        /// Read where the peer has it.
        InPlace = "in-place",
    }
}

/// How peers are reached.
#[derive(Clone, Debug, PartialEq)]
pub struct Network {
    /// What carries the bytes.
    pub transport: TransportKind,
    /// Where peers are accepted; port 0 takes a free one.
    pub listen: SocketAddr,
    /// What peers are told; `None`: what was bound.
    pub advertise: Option<SocketAddr>,
    /// More network cards that carry payload.
    pub rails: Vec<IpAddr>,
    /// Engines to reach at the start.
    pub peers: Vec<SocketAddr>,
    /// The cluster's secret; always there for TCP without certificates.
    pub psk: Option<PreSharedKey>,
    /// Another key that peers may prove themselves with.
    pub psk_also: Option<PreSharedKey>,
    /// The files that the keys came from, to be read again when they change.
    pub psk_files: KeyFiles,
    /// Where the certificates are, if connections go through TLS.
    pub tls: Option<TlsFiles>,
    /// Whether paths that are not encrypted may be named beside TLS.
    pub plain_payload: bool,
    /// Data connections to each peer; `None`: what the transport found best.
    pub lanes: Option<NonZeroU16>,
    /// Ways that K/V may go; not empty.
    pub paths: Vec<PathKind>,
    /// How K/V of a peer on this host is taken.
    pub same_host: SameHost,
    /// RDMA devices by name; empty takes each that has an active port.
    pub rdma_devices: Vec<String>,
    /// The entry of the GID table of their ports; `None`: the best one.
    pub rdma_gid_index: Option<u32>,
    /// Most gigabits (10^9 bits) a second sent over one link; finite and above 0.
    pub link_gbps: Option<f64>,
}

/// Where keys came from; `None` for what did not come from a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyFiles {
    /// `psk_file`.
    pub own: Option<PathBuf>,
    /// `psk_also_file`.
    pub also: Option<PathBuf>,
}

impl KeyFiles {
    /// Reads a key from its file.
    ///
    /// # Errors
    /// [`ConfigError::Read`] or [`ConfigError::Psk`].
    pub(crate) fn read(key: &'static str, path: &Path) -> Result<PreSharedKey, ConfigError> {
        PreSharedKey::new(&Self::bytes(key, path)?, &format!("{key} {}", path.display()))
    }

    /// Reads the other key; an empty file holds none.
    ///
    /// # Errors
    /// [`ConfigError::Read`] or [`ConfigError::Psk`].
    pub(crate) fn read_other(path: &Path) -> Result<Option<PreSharedKey>, ConfigError> {
        const KEY: &str = "psk_also_file";
        if Self::bytes(KEY, path)?.trim_ascii().is_empty() { Ok(None) } else { Self::read(KEY, path).map(Some) }
    }

    fn bytes(key: &'static str, path: &Path) -> Result<Vec<u8>, ConfigError> {
        let refuse = |source| ConfigError::Read { key, path: path.to_owned(), source };
        read_limited(path, 2 * PreSharedKey::MAX_BYTES as u64).map_err(refuse)
    }
}

/// How long each thing may take. None is zero, none above an hour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// A transfer, from its start to its verdict.
    pub transfer: Duration,
    /// A running transfer of which nothing more is verified; at most `transfer`.
    pub progress: Duration,
    /// A finished request's blocks, kept for a peer that is silent.
    pub lease_ttl: Duration,
    /// The receiver's verdict, after the sender's last byte; at most `transfer`.
    pub verdict: Duration,
    /// A peer without a session, at the start of a transfer and after a cut; at most `transfer`.
    pub absent: Duration,
    /// A peer that says nothing, not even that it is there, before its session is given up; at least 20 ms.
    pub silence: Duration,
}

/// How much there may be of each thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Transfers at once.
    pub max_transfers: NonZeroU32,
    /// Bytes that one completion should cover.
    pub chunk_bytes: u64,
    /// Runs shorter than this many bytes are packed first; `None`: what the transport says.
    pub packed_run_bytes: Option<u64>,
    /// Memory of all slabs, in bytes; at least two chunks.
    pub slab_pool_bytes: u64,
    /// Threads that gather and digest.
    pub movers: NonZeroU16,
    /// Writes of one transfer that are under way at once, from packing to acknowledgement.
    pub posts_in_flight: NonZeroU16,
    /// Host memory of each worker for kept blocks, in bytes; 0 for none.
    pub tier_bytes: u64,
    /// Complete blocks of an answer that are written back at once; 0 for none.
    pub write_back_blocks: u32,
    /// Host memory in which K/V lands on its way to a device, in bytes.
    pub staging_bytes: u64,
}

impl TryFrom<(RawConfig, Incarnation)> for ConnectorConfig {
    type Error = ConfigError;

    fn try_from((raw, incarnation): (RawConfig, Incarnation)) -> Result<Self, ConfigError> {
        Self::check(raw.clone(), incarnation).map_err(|error| raw.placed(error))
    }
}

impl ConnectorConfig {
    fn check(raw: RawConfig, incarnation: Incarnation) -> Result<Self, ConfigError> {
        let Some(name) = &raw.engine_id else {
            return Err(ConfigError::Missing { key: "engine_id", fix: "give each serving instance a name of its own" });
        };
        let engine = EngineId::new(name).map_err(|error| value("engine_id", format!("{name:?}"), error.to_string()))?;
        let Some(role) = choose("role", raw.role.as_deref(), Role::from_word, Role::TEXTS)? else {
            return Err(ConfigError::Missing { key: "role", fix: "write prefill, decode or both" });
        };
        let tp_size = number("tp_size", raw.tp_size, 1, 1..=1024)?;
        let tp_rank: u16 = number("tp_rank", raw.tp_rank, 0, 0..=1023)?;
        if tp_rank >= tp_size {
            let fix = format!("write less than tp_size, which is {tp_size}: ranks count from 0");
            return Err(value("tp_rank", tp_rank, fix));
        }
        let pp_rank = PpRank::new(number("pp_rank", raw.pp_rank, 0, 0..=1023)?);
        let in_place = raw.same_host.as_deref().and_then(SameHost::from_word) == Some(SameHost::InPlace);
        if let Some(bytes) = raw.tier_bytes.filter(|&bytes| bytes > 0 && in_place && role != Role::Prefill) {
            let fix = "write 0, or same_host = \"copy\": a tier is not filled with blocks that are read in place";
            return Err(value("tier_bytes", bytes, fix.into()));
        }
        let order = choose("order", raw.order.as_deref(), TransferOrder::from_word, TransferOrder::TEXTS)?;
        let policy = raw.load_failure_policy.as_deref();
        let policy = choose("load_failure_policy", policy, LoadFailurePolicy::from_word, LoadFailurePolicy::TEXTS)?;
        Ok(Self {
            peer: PeerId { engine, incarnation, pp_rank, tp_rank: TpRank::new(tp_rank) },
            tp_size: NonZeroU16::new(tp_size).unwrap_or(NonZeroU16::MIN),
            role,
            order: order.unwrap_or(TransferOrder::DecodeFirst),
            load_failure_policy: policy.unwrap_or(LoadFailurePolicy::Recompute),
            layerwise: raw.layerwise.unwrap_or(true),
            layer_group: raw
                .layer_group
                .map(|layers| number("layer_group", Some(layers), 1, 1..=1024))
                .transpose()?
                .and_then(NonZeroU16::new),
            deadlines: Deadlines::try_from(&raw)?,
            limits: Limits::try_from(&raw)?,
            network: Network::try_from(raw)?,
        })
    }
}

impl TryFrom<&RawConfig> for Deadlines {
    type Error = ConfigError;

    fn try_from(raw: &RawConfig) -> Result<Self, ConfigError> {
        let transfer = milliseconds("transfer_deadline_ms", raw.transfer_deadline_ms, 30_000)?;
        let within = |key, found: Option<u64>, default: u64| {
            let longest = u64::try_from(transfer.as_millis()).unwrap_or(u64::MAX);
            // A default gives way to a shorter transfer deadline that was set; a value that was set does not.
            let span = milliseconds(key, found, default.min(longest))?;
            match span > transfer {
                true => Err(value(key, span.as_millis(), format!("write at most transfer_deadline_ms, {longest}"))),
                false => Ok(span),
            }
        };
        Ok(Self {
            transfer,
            progress: within("progress_deadline_ms", raw.progress_deadline_ms, 5_000)?,
            lease_ttl: milliseconds("lease_ttl_ms", raw.lease_ttl_ms, 30_000)?,
            verdict: within("verdict_timeout_ms", raw.verdict_timeout_ms, 5_000)?,
            absent: within("absent_deadline_ms", raw.absent_deadline_ms, 5_000)?,
            silence: number("silence_deadline_ms", raw.silence_deadline_ms, 10_000, 20..=3_600_000)
                .map(Duration::from_millis)?,
        })
    }
}

impl TryFrom<&RawConfig> for Limits {
    type Error = ConfigError;

    fn try_from(raw: &RawConfig) -> Result<Self, ConfigError> {
        let chunk_bytes: u64 = number("chunk_bytes", raw.chunk_bytes, 4 << 20, 4096..=1 << 30)?;
        let slab_pool_bytes = number("slab_pool_bytes", raw.slab_pool_bytes, 64 << 20, 1..=1 << 40)?;
        if slab_pool_bytes < 2 * chunk_bytes {
            let fix = format!("write at least {}, which is two chunks of chunk_bytes = {chunk_bytes}", 2 * chunk_bytes);
            return Err(value("slab_pool_bytes", slab_pool_bytes, fix));
        }
        let packed_run_bytes =
            raw.packed_run_bytes.map(|found| number("packed_run_bytes", Some(found), 0, 0..=chunk_bytes));
        let max_transfers = number("max_transfers", raw.max_transfers, 1024, 1..=65_536)?;
        Ok(Self {
            max_transfers: NonZeroU32::new(max_transfers).unwrap_or(NonZeroU32::MIN),
            chunk_bytes,
            packed_run_bytes: packed_run_bytes.transpose()?,
            slab_pool_bytes,
            movers: NonZeroU16::new(number("movers", raw.movers, 2, 1..=64)?).unwrap_or(NonZeroU16::MIN),
            posts_in_flight: NonZeroU16::new(number("posts_in_flight", raw.posts_in_flight, 8, 1..=1024)?)
                .unwrap_or(NonZeroU16::MIN),
            tier_bytes: number("tier_bytes", raw.tier_bytes, 0, 0..=1 << 44)?,
            write_back_blocks: number("write_back_blocks", raw.write_back_blocks, 0, 0..=64)?,
            staging_bytes: number("staging_bytes", raw.staging_bytes, 256 << 20, 1..=1 << 40)?,
        })
    }
}

impl TryFrom<RawConfig> for Network {
    type Error = ConfigError;

    fn try_from(raw: RawConfig) -> Result<Self, ConfigError> {
        let transport = choose("transport", raw.transport.as_deref(), TransportKind::from_word, TransportKind::TEXTS)?;
        let transport = transport.unwrap_or(TransportKind::Tcp);
        let listen = address("listen", raw.listen.as_deref().unwrap_or("127.0.0.1:0"))?;
        let advertise = raw.advertise.as_deref().map(|text| reachable("advertise", text)).transpose()?;
        if listen.ip().is_unspecified() && advertise.is_none() && transport == TransportKind::Tcp {
            let fix = "set advertise to the IP and port by which peers reach this host, or listen on that IP";
            return Err(value("listen", listen, fix.into()));
        }
        if let Some(told) = advertise.filter(|told| told.ip().is_loopback() && !listen.ip().is_loopback()) {
            let fix =
                "peers on other hosts would find themselves there; write the IP by which they reach this host".into();
            return Err(value("advertise", told, fix));
        }
        let tls = TlsFiles::named(&raw)?;
        let is_read = raw.psk.is_none();
        let psk = match (raw.psk, &raw.psk_file) {
            (Some(psk), _) => Some(psk),
            (None, Some(path)) => Some(KeyFiles::read("psk_file", Path::new(path))?),
            (None, None) if transport == TransportKind::Tcp && tls.is_none() => {
                let fix = "put 16 random bytes or more into a file and name it (openssl rand -hex 32), or set KVFERRY_PSK, \
                           or give certificates (tls_certificate_file)";
                return Err(ConfigError::Missing { key: "psk_file", fix });
            }
            (None, None) => None,
        };
        let psk_also = raw.psk_also_file.map(PathBuf::from);
        let paths = raw.paths.unwrap_or_else(|| PathKind::ALL.map(|path| path.name().to_owned()).to_vec());
        if let Some(gbps) = raw.link_gbps.filter(|gbps| !(*gbps > 0.0 && *gbps <= 100_000.0)) {
            return Err(value("link_gbps", gbps, "write more than 0 and at most 100000, or leave it out".into()));
        }
        let peers = raw.peers.unwrap_or_default();
        if peers.len() > MAX_PEERS {
            return Err(value("peers", peers.len(), format!("name at most {MAX_PEERS}; others can reach this engine")));
        }
        Ok(Self {
            transport,
            listen,
            advertise,
            rails: raw.rails.unwrap_or_default().iter().map(|text| rail(text)).collect::<Result<_, _>>()?,
            peers: peers.iter().map(|text| reachable("peers", text)).collect::<Result<_, _>>()?,
            psk,
            psk_also: psk_also.as_deref().map(KeyFiles::read_other).transpose()?.flatten(),
            psk_files: KeyFiles { own: raw.psk_file.filter(|_| is_read).map(PathBuf::from), also: psk_also },
            tls,
            plain_payload: raw.plain_payload.unwrap_or(false),
            lanes: raw
                .lanes
                .map(|lanes| number("lanes", Some(lanes), 1, 1..=64))
                .transpose()?
                .and_then(NonZeroU16::new),
            paths: ways(&paths)?,
            same_host: choose("same_host", raw.same_host.as_deref(), SameHost::from_word, SameHost::TEXTS)?
                .unwrap_or(SameHost::Copy),
            rdma_devices: raw.rdma_devices.unwrap_or_default(),
            rdma_gid_index: raw.rdma_gid_index.map(|at| number("rdma_gid_index", Some(at), 0, 0..=255)).transpose()?,
            link_gbps: raw.link_gbps,
        })
    }
}

/// The IP of a network card.
fn rail(text: &str) -> Result<IpAddr, ConfigError> {
    text.parse().map_err(|_| value("rails", text, "write the IP of each card, without a port".into()))
}

fn ways(names: &[String]) -> Result<Vec<PathKind>, ConfigError> {
    let fix = || "write one or more of shm, cma, uds, rdma, ucx and tcp, or leave it out".to_owned();
    if names.is_empty() {
        return Err(value("paths", "nothing", fix()));
    }
    let find = |name: &String| PathKind::NAMED.into_iter().find(|path| path.name() == name);
    let ways: Vec<_> =
        names.iter().map(|name| find(name).ok_or_else(|| value("paths", name, fix()))).collect::<Result<_, _>>()?;
    let beside = ways.iter().find(|way| matches!(way, PathKind::Rdma | PathKind::Ucx));
    if let Some(way) = beside.filter(|_| !ways.contains(&PathKind::Tcp)) {
        let fix = format!("write tcp beside {way}: its words and what it cannot carry go over TCP");
        return Err(value("paths", way, fix));
    }
    Ok(ways)
}

fn value(key: &str, found: impl fmt::Display, fix: String) -> ConfigError {
    ConfigError::Value { key: key.to_owned(), found: found.to_string(), fix }
}

/// A number in its range, as the type that holds the range.
fn number<T: TryFrom<u64>>(
    key: &str,
    found: Option<u64>,
    default: u64,
    range: RangeInclusive<u64>,
) -> Result<T, ConfigError> {
    let number = found.unwrap_or(default);
    let typed = T::try_from(number).ok().filter(|_| range.contains(&number));
    typed.ok_or_else(|| value(key, number, format!("write {} to {}", range.start(), range.end())))
}

fn milliseconds(key: &str, found: Option<u64>, default: u64) -> Result<Duration, ConfigError> {
    number(key, found, default, 1..=3_600_000).map(Duration::from_millis)
}

pub(super) fn choose<T>(
    key: &str,
    found: Option<&str>,
    from_word: impl Fn(&str) -> Option<T>,
    words: &[&str],
) -> Result<Option<T>, ConfigError> {
    let refuse = |word: &str| value(key, format!("{word:?}"), format!("write one of {}", words.join(", ")));
    found.map(|word| from_word(word).ok_or_else(|| refuse(word))).transpose()
}

fn address(key: &str, text: &str) -> Result<SocketAddr, ConfigError> {
    let fix = "write IP:port, such as 10.0.0.7:7400 or [fd00::7]:7400; names are not looked up";
    text.parse().map_err(|_| value(key, format!("{text:?}"), fix.into()))
}

/// An address that somebody else can dial.
fn reachable(key: &str, text: &str) -> Result<SocketAddr, ConfigError> {
    let address = address(key, text)?;
    if address.ip().is_unspecified() || address.port() == 0 {
        let fix = "write the one IP and port that are dialled: 0.0.0.0, [::] and port 0 cannot be";
        return Err(value(key, address, fix.into()));
    }
    Ok(address)
}

const MAX_PEERS: usize = 4096;

impl From<TransferOrder> for kvferry_protocol::transfer::Order {
    fn from(order: TransferOrder) -> Self {
        match order {
            TransferOrder::DecodeFirst => Self::DecodeFirst,
            TransferOrder::PrefillFirst => Self::PrefillFirst,
        }
    }
}
