//! The files with certificates.

use std::path::{Path, PathBuf};

use kvferry_transport::tls::{TlsError, TlsIdentity, TlsNames, TlsPem};

use super::typed::{Names, choose};
use super::{ConfigError, RawConfig, read_limited};

/// Where a node's certificates are, and what is asked of a peer's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// `tls_certificate_file`.
    pub certificate: PathBuf,
    /// `tls_key_file`.
    pub key: PathBuf,
    /// `tls_authority_file`.
    pub authority: PathBuf,
    /// `tls_names`.
    pub names: Names,
}

impl TlsFiles {
    /// The files that a configuration names, if it names any. They can be used, as they are now.
    pub(super) fn named(raw: &RawConfig) -> Result<Option<Self>, ConfigError> {
        let names = choose("tls_names", raw.tls_names.as_deref(), Names::from_word, Names::TEXTS)?;
        let files = [&raw.tls_certificate_file, &raw.tls_key_file, &raw.tls_authority_file];
        if files.iter().all(|file| file.is_none()) {
            return match names {
                Some(_) => Err(missing(CERTIFICATE)),
                None => Ok(None),
            };
        }
        let path = |key, file: &Option<String>| file.as_ref().map(PathBuf::from).ok_or_else(|| missing(key));
        let files = Self {
            certificate: path(CERTIFICATE, files[0])?,
            key: path(KEY, files[1])?,
            authority: path(AUTHORITY, files[2])?,
            names: names.unwrap_or(Names::Any),
        };
        files.read()?;
        Ok(Some(files))
    }

    /// Reads the certificates, as the files are now.
    ///
    /// # Errors
    /// [`ConfigError::Read`], or [`ConfigError::Tls`] if the texts cannot be used.
    pub fn read(&self) -> Result<TlsIdentity, ConfigError> {
        let [certificate, key, authority] =
            [bytes(CERTIFICATE, &self.certificate)?, bytes(KEY, &self.key)?, bytes(AUTHORITY, &self.authority)?];
        let names = match self.names {
            Names::Any => TlsNames::Any,
            Names::Engine => TlsNames::Engine,
        };
        let pem = TlsPem { certificate: &certificate, key: &key, authority: &authority, names };
        TlsIdentity::new(&pem).map_err(|source| {
            let (key, path) = match source {
                TlsError::Key { .. } => (KEY, &self.key),
                TlsError::Authority { .. } => (AUTHORITY, &self.authority),
                _ => (CERTIFICATE, &self.certificate),
            };
            ConfigError::Tls { key, path: path.clone(), source }
        })
    }

    /// All of them.
    pub(crate) fn paths(&self) -> [&Path; 3] {
        [&self.certificate, &self.key, &self.authority]
    }
}

fn missing(key: &'static str) -> ConfigError {
    let fix = "TLS takes tls_certificate_file, tls_key_file and tls_authority_file, all three";
    ConfigError::Missing { key, fix }
}

fn bytes(key: &'static str, path: &Path) -> Result<Vec<u8>, ConfigError> {
    read_limited(path, MAX_FILE_BYTES).map_err(|source| ConfigError::Read { key, path: path.to_owned(), source })
}

const CERTIFICATE: &str = "tls_certificate_file";
const KEY: &str = "tls_key_file";
const AUTHORITY: &str = "tls_authority_file";
const MAX_FILE_BYTES: u64 = 1 << 20;
