//! The engine's options for its connector, as kvferry's one validated configuration.

use std::net::SocketAddr;
use std::path::Path;

use kvferry::config::{ConfigError, ConnectorConfig, KEYS, RawConfig, Role, SameHost, TransferOrder, TransportKind};
use kvferry_protocol::Incarnation;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use crate::error::BindingError;
use crate::words::nearest;

/// kvferry's configuration inside an engine.
///
/// `options` are kvferry's keys as an engine's users write them, beside `config_file`, a TOML file with the same keys. The later wins:
/// defaults, file, environment (`KVFERRY_...`), options. What the engine knows itself is told by the other arguments, and refused
/// anywhere else. Rank n listens `port_offset` + n above the configured port.
#[pyclass(frozen, module = "kvferry._kvferry")]
#[derive(Debug)]
pub(crate) struct Config {
    raw: RawConfig,
    checked: ConnectorConfig,
}

#[pymethods]
impl Config {
    #[new]
    #[pyo3(signature = (options, *, engine_id, role, load_failure_policy, tp_rank = 0, tp_size = 1, port_offset = 0))]
    fn new(
        options: &Bound<'_, PyDict>,
        engine_id: &str,
        role: &str,
        load_failure_policy: &str,
        tp_rank: u16,
        tp_size: u16,
        port_offset: u16,
    ) -> PyResult<Self> {
        let mut raw = written(options)?;
        refuse_what_the_engine_says(&raw)?;
        raw.engine_id = Some(engine_id.to_owned());
        raw.role = Some(role.to_owned());
        raw.load_failure_policy = Some(load_failure_policy.to_owned());
        (raw.tp_rank, raw.tp_size) = (Some(tp_rank.into()), Some(tp_size.into()));
        // Loads are asynchronous: a request runs when all its layers are in.
        raw.layerwise = Some(false);
        let offset = port_offset.saturating_add(tp_rank);
        raw.listen = raw.listen.as_deref().map(|address| own_port("listen", address, offset)).transpose()?;
        raw.advertise = raw.advertise.as_deref().map(|address| own_port("advertise", address, offset)).transpose()?;
        // Whatever the incarnation, what is wrong is wrong: the scheduler's process hears of it, too.
        let checked = ConnectorConfig::try_from((raw.clone(), Incarnation::new(0))).map_err(placed_here)?;
        if raw.psk.is_some() && raw.psk_file.is_some() {
            tracing::warn!("psk_file and KVFERRY_PSK both give a key: that of KVFERRY_PSK is used; unset one of them");
        }
        refuse_what_cannot_be_here(&checked)?;
        Ok(Self { raw, checked })
    }
}

impl Config {
    /// The configuration of an engine's start.
    pub(crate) fn of_start(&self, incarnation: u64) -> Result<ConnectorConfig, BindingError> {
        Ok(ConnectorConfig::try_from((self.raw.clone(), Incarnation::new(incarnation)))?)
    }

    /// The name of the engine.
    pub(crate) fn engine_id(&self) -> &str {
        self.checked.peer().engine.as_str()
    }

    /// What this engine does.
    pub(crate) fn role(&self) -> Role {
        self.checked.role()
    }

    /// Whether somebody said where peers reach this engine.
    pub(crate) const fn says_listen(&self) -> bool {
        self.raw.listen.is_some()
    }

    /// Ranks in the tensor-parallel group.
    pub(crate) fn tp_size(&self) -> u16 {
        self.checked.tp_size().get()
    }
}

/// What stands in the file, the environment and the options.
fn written(options: &Bound<'_, PyDict>) -> PyResult<RawConfig> {
    let mut raw = match options.get_item("config_file")? {
        Some(path) => RawConfig::from_file(Path::new(&path.extract::<String>()?)).map_err(placed_here)?,
        None => RawConfig::default(),
    };
    raw.overlay_env(std::env::vars_os()).map_err(BindingError::from)?;
    for (key, value) in options.iter() {
        let key: String = key.extract()?;
        if key != "config_file" {
            refuse_unknown(&key)?;
            raw.set_from(ORIGIN, &key, &text_of(&key, &value)?).map_err(BindingError::from)?;
        }
    }
    Ok(raw)
}

/// A value as it would stand in the environment.
fn text_of(key: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    if let Ok(value) = value.cast::<PyBool>() {
        return Ok(value.is_true().to_string());
    }
    if value.is_instance_of::<PyString>() || value.is_instance_of::<PyInt>() || value.is_instance_of::<PyFloat>() {
        return Ok(value.str()?.to_string());
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        let items: Vec<String> = value.extract()?;
        return Ok(items.join(","));
    }
    let fix = "write a string, a number, true or false, or a list of strings".to_owned();
    let found = value.get_type().name()?.to_string();
    Err(BindingError::Option { key: format!("{ORIGIN}: {key}"), found, fix }.into())
}

/// A key that is none is answered with the one that was meant, or with those that can be set here. Its value is not shown: somebody may
/// have written a secret there.
fn refuse_unknown(key: &str) -> Result<(), BindingError> {
    if key == "psk" || KEYS.iter().any(|known| known.name == key) {
        return Ok(()); // What is wrong with it, the configuration says.
    }
    let fix = meant(key, &["config_file"]);
    Err(BindingError::Option { key: format!("{ORIGIN}: {key}"), found: "(not shown)".to_owned(), fix })
}

/// What to write instead of a key that is none; beside kvferry's keys, there are some `more`.
fn meant(key: &str, more: &[&str]) -> String {
    let here = || KEYS.iter().map(|key| key.name).filter(|name| !NOT_HERE.contains(name)).chain(more.iter().copied());
    match nearest(key, here()) {
        Some(meant) => format!("no such key; write {meant}, or take it out"),
        None => format!("no such key; the keys are {}", here().collect::<Vec<_>>().join(", ")),
    }
}

/// An error of the configuration in the words of those who write it here.
fn placed_here(error: ConfigError) -> BindingError {
    match error {
        // Only the file itself is named by no key of its own.
        ConfigError::Read { key: "the command line", path, source } => {
            BindingError::Config(ConfigError::Read { key: "config_file in kv_connector_extra_config", path, source })
        }
        ConfigError::Syntax { origin, line, key, problem } if problem.starts_with("unknown field") => {
            let problem = meant(&key, &[]);
            BindingError::Config(ConfigError::Syntax { origin, line, key, problem })
        }
        ConfigError::Missing { key, fix } => {
            let variable = key.to_uppercase();
            let problem = format!(
                "{key} is missing: {fix}; set it in {ORIGIN} or its config_file, or as KVFERRY_{variable} in the environment"
            );
            BindingError::Missing { problem }
        }
        other => BindingError::Config(other),
    }
}

fn refuse_what_the_engine_says(raw: &RawConfig) -> Result<(), BindingError> {
    let said = [
        ("engine_id", raw.engine_id.is_some(), "kv_transfer_config.engine_id"),
        ("role", raw.role.is_some(), "kv_transfer_config.kv_role"),
        ("load_failure_policy", raw.load_failure_policy.is_some(), "kv_transfer_config.kv_load_failure_policy"),
        ("tp_rank", raw.tp_rank.is_some(), "the engine's parallel configuration"),
        ("tp_size", raw.tp_size.is_some(), "the engine's parallel configuration"),
        ("pp_rank", raw.pp_rank.is_some(), "the engine's parallel configuration"),
        (
            "layerwise",
            raw.layerwise.is_some(),
            "nothing: loads are asynchronous here, and complete before they are used",
        ),
    ];
    match said.into_iter().find(|(_, is_set, _)| *is_set) {
        None => Ok(()),
        Some((key, _, source)) => Err(BindingError::Option {
            key: key.to_owned(),
            found: "(set)".to_owned(),
            fix: format!(
                "take it out of kv_connector_extra_config, config_file and the environment; it comes from {source}"
            ),
        }),
    }
}

fn refuse_what_cannot_be_here(config: &ConnectorConfig) -> Result<(), BindingError> {
    let refuse = |key: &str, found: String, fix: &str| {
        Err(BindingError::Option { key: key.to_owned(), found, fix: fix.to_owned() })
    };
    if config.network().transport != TransportKind::Tcp {
        return refuse(
            "transport",
            config.network().transport.to_string(),
            "write tcp: other engines are other processes",
        );
    }
    if config.order() != TransferOrder::DecodeFirst {
        let fix = "write decode-first, or leave it out: prefill hears of decode by decode's own word, whichever of the two the \
                   router asks first";
        return refuse("order", config.order().to_string(), fix);
    }
    if config.network().same_host != SameHost::Copy {
        let fix = "write copy, or leave it out: this engine's attention reads its own cache only";
        return refuse("same_host", config.network().same_host.to_string(), fix);
    }
    let limits = config.limits();
    if limits.tier_bytes > 0 {
        return refuse("tier_bytes", limits.tier_bytes.to_string(), "write 0: tiers are not wired to this engine yet");
    }
    if limits.write_back_blocks > 0 {
        let found = limits.write_back_blocks.to_string();
        return refuse("write_back_blocks", found, "write 0: tiers are not wired to this engine yet");
    }
    Ok(())
}

/// The port of one rank: so much above a port that was named; a free one stays a free one.
fn own_port(key: &str, address: &str, offset: u16) -> Result<String, BindingError> {
    match address.parse::<SocketAddr>() {
        Ok(mut address) if address.port() != 0 => {
            let Some(port) = address.port().checked_add(offset) else {
                let fix = format!("write a lower port: rank {offset} would listen past 65535");
                return Err(BindingError::Option { key: key.to_owned(), found: address.to_string(), fix });
            };
            address.set_port(port);
            Ok(address.to_string())
        }
        // What is wrong with it, the configuration says.
        _ => Ok(address.to_owned()),
    }
}

const ORIGIN: &str = "kv_connector_extra_config";
/// Keys that the engine's own configuration says, or that can have one value only here.
const NOT_HERE: [&str; 13] = [
    "engine_id",
    "role",
    "load_failure_policy",
    "tp_rank",
    "tp_size",
    "pp_rank",
    "layerwise",
    "transport",
    "order",
    "same_host",
    "tier_bytes",
    "write_back_blocks",
    "staging_bytes",
];
