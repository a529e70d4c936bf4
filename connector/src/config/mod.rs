//! One validated configuration, from a TOML file and the environment.
//!
//! Every key can stand in the file under its name and in the environment as `KVFERRY_` and the name in capitals
//! (`lease_ttl_ms`, `KVFERRY_LEASE_TTL_MS`; lists are separated by commas). The later of these wins:
//!
//! 1. the default (see [`KEYS`]),
//! 2. the file,
//! 3. the environment,
//! 4. what the program sets in [`RawConfig`] itself, from its command line.
//!
//! The pre-shared key never stands in the file: it comes from the file that `psk_file` names, or from `KVFERRY_PSK`, and is not
//! shown by any `Debug` or error. Certificates are files, too, named by `tls_certificate_file` and its two fellows. The incarnation is no key: whoever starts the engine draws it at random, since a restarted
//! engine that kept its old one would be taken for the old one.
//!
//! ```
//! use kvferry::config::{ConnectorConfig, RawConfig};
//! use kvferry_protocol::Incarnation;
//!
//! let mut raw = RawConfig::from_toml("engine_id = 'decode-0'\nrole = 'decode'\ntransport = 'loopback'")?;
//! raw.overlay_env([("KVFERRY_LEASE_TTL_MS".into(), "2000".into())])?;
//! let config = ConnectorConfig::try_from((raw, Incarnation::new(0x5eed)))?;
//! assert_eq!(config.deadlines().lease_ttl.as_secs(), 2);
//! # Ok::<(), kvferry::config::ConfigError>(())
//! ```

mod error;
mod psk;
mod raw;
mod tls;
mod typed;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use kvferry_protocol::Incarnation;

pub use error::ConfigError;
pub use psk::PreSharedKey;
pub use raw::{KEYS, Key, Origins, RawConfig, table};
pub use tls::TlsFiles;
pub use typed::{
    ConnectorConfig, Deadlines, KeyFiles, Limits, LoadFailurePolicy, Names, Network, Role, SameHost, TransferOrder,
    TransportKind,
};

impl ConnectorConfig {
    /// Reads the file, if there is one, lays the environment over it (`std::env::vars_os()`), and checks the whole.
    ///
    /// # Errors
    /// [`ConfigError`], which names the key, what was found, and what to write instead.
    pub fn load(
        file: Option<&Path>,
        env: impl IntoIterator<Item = (OsString, OsString)>,
        incarnation: Incarnation,
    ) -> Result<Self, ConfigError> {
        let mut raw = file.map_or_else(|| Ok(RawConfig::default()), RawConfig::from_file)?;
        raw.overlay_env(env)?;
        Self::try_from((raw, incarnation))
    }
}

/// Reads a whole file of at most `limit` bytes.
fn read_limited(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {limit} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
