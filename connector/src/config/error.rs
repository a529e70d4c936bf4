//! What is wrong with a configuration, where, and how to mend it.

use std::io;
use std::path::PathBuf;

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A file could not be read.
    #[error("{key} names {}, which cannot be read: check that it exists and that this user may read it", path.display())]
    Read {
        /// The key, or `the configuration file`.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The text is not TOML, or a key or type in it is wrong. Only the key and the line's number are shown, since somebody may
    /// have written a secret there.
    #[error("{origin}, line {line}, key {key:?}: {problem}")]
    Syntax {
        /// The file, or `configuration` for text from elsewhere.
        origin: String,
        /// Which line, from 1.
        line: usize,
        /// The text before its first `=`.
        key: String,
        /// What the parser says, with what it expects.
        problem: String,
    },
    /// A key without a default is missing.
    #[error("{key} is missing: {fix}; set it in the file, or as KVFERRY_{} in the environment", key.to_uppercase())]
    Missing {
        /// The key.
        key: &'static str,
        /// What to write.
        fix: &'static str,
    },
    /// A key has a value that cannot be used.
    #[error("{key} = {found}: {fix}")]
    Value {
        /// The key, after the file and line that it stands in; or its environment variable, if that gave the value.
        key: String,
        /// Its value.
        found: String,
        /// What to write instead.
        fix: String,
    },
    /// Certificates cannot be used.
    #[error("{key} names {}, which cannot be used for TLS", path.display())]
    Tls {
        /// The key.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: kvferry_transport::tls::TlsError,
    },
    /// The pre-shared key is too short or too long.
    #[error(
        "the pre-shared key from {origin} has {bytes} bytes: use {min} to {max} random bytes, \
         such as the output of `openssl rand -hex 32`",
        min = super::PreSharedKey::MIN_BYTES, max = super::PreSharedKey::MAX_BYTES
    )]
    Psk {
        /// `psk_file` and the file, or the environment variable.
        origin: String,
        /// How long it is, without the end of the line.
        bytes: usize,
    },
}
