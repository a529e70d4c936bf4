//! What was written, before anything is checked but its form.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::Path;

use serde::Deserialize;

use super::{ConfigError, PreSharedKey, read_limited};

/// A key that can be configured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Key {
    /// Its name in the file.
    pub name: &'static str,
    /// What holds if it is not set, in words.
    pub default: &'static str,
    /// What it says, with its unit.
    pub meaning: &'static str,
}

impl Key {
    /// Its name in the environment.
    #[must_use]
    pub fn variable(&self) -> String {
        format!("{PREFIX}{}", self.name.to_uppercase())
    }
}

/// Where the values of a [`RawConfig`] were written. It says nothing of what they are: any two are equal.
#[derive(Clone, Debug, Default)]
pub struct Origins(BTreeMap<&'static str, Origin>);

impl PartialEq for Origins {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

#[derive(Clone, Debug)]
struct Origin {
    /// The key as an error names it: with file and line, or as a variable.
    place: String,
    /// The value that was read there; a program may have set another one since.
    read: String,
}

macro_rules! keys {
    ($($name:ident: $type:ty, $default:literal, $meaning:literal;)+) => {
        /// A configuration as it was written; a key that is `None` was not. Becomes a
        /// [`ConnectorConfig`](super::ConnectorConfig) by `TryFrom`, which is where values are checked.
        #[derive(Clone, Debug, Default, PartialEq, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct RawConfig {
            $(#[doc = $meaning] pub $name: Option<$type>,)+
            /// The pre-shared key itself, which wins over `psk_file`; never read from a configuration file.
            #[serde(skip)]
            pub psk: Option<PreSharedKey>,
            /// Where the values stand, for errors.
            #[serde(skip)]
            pub origins: Origins,
        }

        /// All keys, in the order of the documentation.
        pub const KEYS: &[Key] = &[$(Key { name: stringify!($name), default: $default, meaning: $meaning },)+];

        impl RawConfig {
            /// Sets the key of an environment variable from its text.
            fn set(&mut self, name: &str, text: &str) -> Result<(), &'static str> {
                match name {
                    $(stringify!($name) => self.$name = Some(FromText::from_text(text)?),)+
                    _ => {}
                }
                Ok(())
            }

            /// What a key is set to, to see whether it is still what was read.
            fn shown(&self, name: &str) -> String {
                match name {
                    $(stringify!($name) => format!("{:?}", self.$name),)+
                    _ => String::new(),
                }
            }
        }
    };
}

keys! {
    engine_id: String, "required", "Name of this serving instance: 1 to 64 characters out of `A-Z a-z 0-9 . _ -`.";
    role: String, "required", "`prefill`, `decode` or `both`.";
    order: String, "`decode-first`", "Who speaks first: `decode-first` (decode asks) or `prefill-first` (prefill offers).";
    tp_size: u64, "1", "Ranks in the tensor-parallel group, 1 to 1024; it divides the model's KV heads, or is a multiple of them.";
    tp_rank: u64, "0", "This worker's place in the tensor-parallel group.";
    pp_rank: u64, "0", "This worker's place in the pipeline-parallel group.";
    transport: String, "`tcp`", "`tcp`, or `loopback` (both engines in one process).";
    listen: String, "`127.0.0.1:0`", "IP and port on which peers are accepted; port 0 takes a free one.";
    advertise: String, "what is bound", "IP and port that peers are told; needed if `listen` is 0.0.0.0 or `[::]`.";
    rails: Vec<String>, "none", "IPs of more network cards of this node that carry K/V beside the one of `listen`, at ports that the system chooses; lanes are spread over all of them, each to the nearest of a peer's.";
    peers: Vec<String>, "none", "IP and port of each engine to reach at the start.";
    psk_file: String, "none", "File with the pre-shared key (or set `KVFERRY_PSK` to the key itself); `tcp` needs it, or certificates, or both. A file that changes is read again, so the key can be changed without a restart.";
    psk_also_file: String, "none", "File with another key that peers may prove themselves with, while keys are changed; an empty file holds none.";
    tls_certificate_file: String, "none", "File with this node's certificate chain (PEM, its own certificate first): every connection then goes through mutual TLS, on all nodes or none. It serves both ways, so its extended key usage, if it has one, says client and server. Read again when it changes, as the next two.";
    tls_key_file: String, "none", "File with the certificate's private key (PEM).";
    tls_authority_file: String, "none", "File with the certificates of the cluster's own authorities (PEM), several while one is replaced. Whoever has a certificate of one of them is a member: no public authority belongs here.";
    tls_names: String, "`any`", "What a peer's certificate must say: `any` (nothing: every certificate of the authority admits), or `engine` (the peer's `engine_id` is a DNS name among its alternative names).";
    plain_payload: bool, "false", "Whether a path whose K/V is not encrypted (`rdma`, `ucx`) may be named beside TLS.";
    lanes: u64, "2 on one host, 4 to others", "Data connections to each peer, 1 to 64.";
    paths: Vec<String>, "all but `rdma` and `ucx`", "Ways that K/V may go: `shm` (shared memory), `cma` (read out of the peer's process), `uds` (Unix sockets), all three on one host, and `tcp`; beside `tcp` also `rdma` (verbs, tested with a pattern in each session) and `ucx`, where they are named. The best that both sides have is taken.";
    same_host: String, "`copy`", "How K/V of a peer on this host is taken where memory is shared (`shm`): `copy` (once, into this engine's own blocks), or `in-place` (read where prefill has it, which keeps the blocks until decode is done with them); for engines that can, and both sides say it.";
    rdma_devices: Vec<String>, "all with an active port", "RDMA devices by name, as `ibv_devices` lists them, if `paths` has `rdma`.";
    rdma_gid_index: u64, "the best", "Entry of the GID table of the RDMA ports, 0 to 255, if the one that is chosen does not reach the peers.";
    link_gbps: f64, "no limit", "Most gigabits a second sent over one link, in all its lanes.";
    layerwise: bool, "true", "Whether decode uses a layer while later ones still land.";
    load_failure_policy: String, "`recompute`", "After a failed load: `recompute` what is missing, or `fail` the request.";
    transfer_deadline_ms: u64, "30000", "Longest transfer, from its start to its verdict, in milliseconds.";
    progress_deadline_ms: u64, "5000", "Longest time in which nothing more of a running transfer is verified, in milliseconds; the link must carry a chunk (`chunk_bytes`) in it.";
    lease_ttl_ms: u64, "30000", "How long prefill keeps a finished request's blocks for a peer that is silent, in milliseconds.";
    verdict_timeout_ms: u64, "5000", "How long a sender waits for the receiver's verdict after its last byte, in milliseconds.";
    absent_deadline_ms: u64, "5000", "How long a peer may be without a session, at the start of a transfer and after a cut, in milliseconds.";
    layer_group: u64, "as measured", "Layers that prefill hands over together, 1 to 1024; without it as many as the measured rates of compute and link ask for.";
    silence_deadline_ms: u64, "10000", "How long a peer may say nothing, not even that it is there, before its session is given up, in milliseconds, from 20 on.";
    max_transfers: u64, "1024", "Most transfers at once, 1 to 65536; more are refused.";
    chunk_bytes: u64, "4194304", "Bytes that one completion should cover, 4096 to 2^30.";
    packed_run_bytes: u64, "the transport's", "Runs shorter than this are packed into a slab first, in bytes; 0 never packs.";
    movers: u64, "2", "Threads that gather and digest K/V, 1 to 64; more take cores from the model.";
    posts_in_flight: u64, "8", "Writes of one transfer that are under way at once, from packing to acknowledgement, 1 to 1024.";
    slab_pool_bytes: u64, "67108864", "Memory of all slabs, in bytes; at least two chunks.";
    tier_bytes: u64, "0", "Host memory of each worker for blocks that prompts may share, in bytes; 0 keeps none.";
    write_back_blocks: u64, "0", "Complete blocks of an answer that decode sends back to prefill's tier at once, 1 to 64; 0 sends none.";
    staging_bytes: u64, "268435456", "Host memory of each worker whose cache is on a device, in which K/V lands on its way there, in bytes; a load waits for room in it, and one that is larger is refused.";
}

impl RawConfig {
    /// Reads a TOML file of at most 1 MiB.
    ///
    /// # Errors
    /// [`ConfigError::Read`] or [`ConfigError::Syntax`].
    pub fn from_file(path: &Path) -> Result<Self, ConfigError> {
        let refuse = |source| ConfigError::Read { key: "the command line", path: path.to_owned(), source };
        let bytes = read_limited(path, MAX_FILE_BYTES).map_err(refuse)?;
        let text = String::from_utf8(bytes).map_err(|error| refuse(std::io::Error::other(error)))?;
        Self::parse(&text, &path.display().to_string())
    }

    /// Reads TOML text.
    ///
    /// # Errors
    /// [`ConfigError::Syntax`] for what is not TOML, an unknown key, or a value of another type.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        Self::parse(text, "configuration")
    }

    fn parse(text: &str, origin: &str) -> Result<Self, ConfigError> {
        let mut raw: Self = toml::from_str(text).map_err(|error: toml::de::Error| {
            let at = error.span().map_or(0, |span| span.start).min(text.len());
            let before = text.get(..at).unwrap_or_default();
            let line = before.lines().count().max(1) + usize::from(before.ends_with('\n'));
            let written = text.lines().nth(line - 1).unwrap_or_default();
            let key = written.split('=').next().unwrap_or_default().trim().to_owned();
            let problem = match key.as_str() {
                "psk" => "a secret does not belong here: name a file with psk_file, or set KVFERRY_PSK".to_owned(),
                _ => in_words(error.message()),
            };
            ConfigError::Syntax { origin: origin.to_owned(), line, key, problem }
        })?;
        for (index, line) in text.lines().enumerate() {
            let Some((written, _)) = line.split_once('=') else { continue };
            if let Some(key) = KEYS.iter().find(|key| key.name == written.trim().trim_matches(['"', '\''])) {
                raw.came_from(key.name, format!("{origin}, line {}: {}", index + 1, key.name));
            }
        }
        Ok(raw)
    }

    fn came_from(&mut self, key: &'static str, place: String) {
        let read = self.shown(key);
        self.origins.0.insert(key, Origin { place, read });
    }

    /// The error, which says where its value was written if that is known.
    pub(super) fn placed(&self, error: ConfigError) -> ConfigError {
        match error {
            ConfigError::Value { key, found, fix } => {
                let origin = self.origins.0.get(key.as_str()).filter(|origin| origin.read == self.shown(&key));
                let key = origin.map_or(key, |origin| origin.place.clone());
                ConfigError::Value { key, found, fix }
            }
            other => other,
        }
    }

    /// Sets what the environment says; each variable wins over what was set before. Variables that start with `KVFERRY_` but
    /// are no key are warned of and left alone, since others (container schedulers among them) make such names too.
    ///
    /// # Errors
    /// [`ConfigError::Value`] for a text that its key cannot have; [`ConfigError::Psk`].
    pub fn overlay_env(&mut self, env: impl IntoIterator<Item = (OsString, OsString)>) -> Result<(), ConfigError> {
        let mut psk_sources = 0;
        for (variable, value) in env {
            let Some(variable) = variable.to_str().filter(|name| name.starts_with(PREFIX)) else { continue };
            if variable == PSK_VARIABLE {
                self.psk = Some(PreSharedKey::new(value.as_encoded_bytes(), PSK_VARIABLE)?);
                psk_sources += 1;
                continue;
            }
            let Some(key) = KEYS.iter().find(|key| key.variable() == variable) else {
                tracing::warn!(variable, "environment variable is no configuration key and was left alone");
                continue;
            };
            let refuse = |found: String, fix: &str| ConfigError::Value { key: variable.into(), found, fix: fix.into() };
            let Some(text) = value.to_str() else {
                return Err(refuse(format!("{value:?}"), "write it in UTF-8"));
            };
            self.set(key.name, text).map_err(|fix| refuse(format!("{text:?}"), fix))?;
            self.came_from(key.name, variable.to_owned());
            psk_sources += usize::from(key.name == "psk_file");
            if psk_sources > 1 {
                return Err(refuse(format!("{text:?}"), "unset this or KVFERRY_PSK: each gives a pre-shared key"));
            }
        }
        Ok(())
    }
}

impl RawConfig {
    /// Sets one key as a program was told it, from the text that it would have in the environment; `origin` is what an error calls
    /// the place. Wins over what was set before.
    ///
    /// # Errors
    /// [`ConfigError::Value`] for a name that is no key, or a text that its key cannot have.
    pub fn set_from(&mut self, origin: &str, name: &str, text: &str) -> Result<(), ConfigError> {
        let place = format!("{origin}: {name}");
        let Some(key) = KEYS.iter().find(|key| key.name == name) else {
            // The text is not shown: somebody may have written a secret there.
            let fix = match name {
                "psk" => "a secret does not belong here: name a file with psk_file, or set KVFERRY_PSK".to_owned(),
                _ => format!(
                    "no such key; the keys are {}",
                    KEYS.iter().map(|key| key.name).collect::<Vec<_>>().join(", ")
                ),
            };
            return Err(ConfigError::Value { key: place, found: "(not shown)".to_owned(), fix });
        };
        self.set(key.name, text).map_err(|fix| {
            let (key, found, fix) = (place.clone(), format!("{text:?}"), fix.to_owned());
            ConfigError::Value { key, found, fix }
        })?;
        self.came_from(key.name, place);
        Ok(())
    }
}

/// The parser's message without the names of Rust's types.
fn in_words(message: &str) -> String {
    let words = [
        ("expected u64", "expected a whole number, not negative"),
        ("expected f64", "expected a number"),
        ("expected a sequence", "expected a list, such as ['10.0.0.7:7400']"),
        ("expected a boolean", "expected true or false"),
    ];
    words.iter().fold(message.to_owned(), |message, (rust, plain)| message.replace(rust, plain))
}

/// How a key is written in an environment variable; the error says what to write.
trait FromText: Sized {
    fn from_text(text: &str) -> Result<Self, &'static str>;
}

impl FromText for String {
    fn from_text(text: &str) -> Result<Self, &'static str> {
        Ok(text.to_owned())
    }
}

impl FromText for Vec<String> {
    fn from_text(text: &str) -> Result<Self, &'static str> {
        Ok(text.split(',').map(str::trim).filter(|item| !item.is_empty()).map(str::to_owned).collect())
    }
}

macro_rules! from_text_by_parse {
    ($($type:ty: $fix:literal;)+) => {$(
        impl FromText for $type {
            fn from_text(text: &str) -> Result<Self, &'static str> {
                text.trim().parse().map_err(|_| $fix)
            }
        }
    )+};
}

from_text_by_parse! {
    u64: "write a whole number, not negative and without a unit";
    f64: "write a number without a unit, such as 12.5";
    bool: "write true or false";
}

/// The table of all keys, in Markdown, for the documentation.
#[must_use]
pub fn table() -> String {
    let mut table = String::from("| key | default | meaning |\n|---|---|---|\n");
    for Key { name, default, meaning } in KEYS {
        // Writing to a string does not fail.
        let _ = writeln!(table, "| `{name}` | {default} | {meaning} |");
    }
    table
}

const PREFIX: &str = "KVFERRY_";
const PSK_VARIABLE: &str = "KVFERRY_PSK";
const MAX_FILE_BYTES: u64 = 1 << 20;
