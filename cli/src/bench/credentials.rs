//! By what both sides prove themselves: a key, certificates, or both.

use std::path::Path;

use kvferry::config::{PreSharedKey, TlsFiles};
use kvferry_protocol::wire::ClusterKey;
use kvferry_transport::Credentials;
use kvferry_transport::tls::{TlsError, TlsIdentity, TlsNames, TlsPem};

use crate::error::CliError;

/// The variable in which the key may stand, as for engines.
pub(crate) const VARIABLE: &str = "KVFERRY_PSK";

/// The key from a file, or from the environment.
pub(crate) fn given(file: Option<&Path>) -> Result<ClusterKey, CliError> {
    found(file)?.ok_or_else(|| {
        let fix = format!("name a file with 16 random bytes or more (openssl rand -hex 32), or set {VARIABLE}");
        CliError::argument("--key", "is missing", fix)
    })
}

/// The same, where certificates may do without.
fn found(file: Option<&Path>) -> Result<Option<ClusterKey>, CliError> {
    let (bytes, place) = match (file, std::env::var_os(VARIABLE)) {
        (Some(path), _) => {
            let place = format!("--key {}", path.display());
            (std::fs::read(path).map_err(CliError::io(format!("{place} cannot be read")))?, place)
        }
        (None, Some(text)) => (text.into_encoded_bytes(), VARIABLE.to_owned()),
        (None, None) => return Ok(None),
    };
    let key = PreSharedKey::new(&bytes, &place).map_err(|source| CliError::Credentials { source })?;
    cluster_key(&key).map(Some)
}

/// A new one, and in hexadecimal, for a pair that this command starts itself.
pub(crate) fn drawn() -> Result<(ClusterKey, String), CliError> {
    let mut random = [0_u8; 32];
    getrandom::fill(&mut random).map_err(|error| CliError::Io {
        what: "the system gives no random bytes".to_owned(),
        source: std::io::Error::other(error),
    })?;
    let text: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let key = PreSharedKey::new(text.as_bytes(), "a random key").map_err(|source| CliError::Credentials { source })?;
    Ok((cluster_key(&key)?, text))
}

/// The key alone, or inside TLS under the certificate that every build of this command has.
pub(crate) fn of_key(key: ClusterKey, tls: bool) -> Result<Credentials, CliError> {
    if !tls {
        return Ok(key.into());
    }
    let pem = TlsPem {
        certificate: include_bytes!("tls/node.pem"),
        key: include_bytes!("tls/node.key.pem"),
        authority: include_bytes!("tls/authority.pem"),
        names: TlsNames::Any,
    };
    let refuse = |error: TlsError| CliError::argument("--tls", "cannot be used here", error.to_string());
    Ok(Credentials::Tls { identity: TlsIdentity::new(&pem).map_err(refuse)?, keys: Some(key.into()) })
}

/// What a cluster's nodes have: its certificates, if files are named, and its key, which they may do without.
pub(crate) fn of_cluster(key: Option<&Path>, tls: Option<&TlsFiles>) -> Result<Credentials, CliError> {
    match tls {
        None => given(key).map(Into::into),
        Some(files) => {
            let identity = files.read().map_err(|source| CliError::Credentials { source })?;
            Ok(Credentials::Tls { identity, keys: found(key)?.map(Into::into) })
        }
    }
}

fn cluster_key(psk: &PreSharedKey) -> Result<ClusterKey, CliError> {
    ClusterKey::new(psk.expose()).map_err(|error| CliError::argument("--key", "(not shown)", error.to_string()))
}
