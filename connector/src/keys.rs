//! The cluster's keys and this node's certificates, read again when their files change.

use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use kvferry_protocol::wire::{ClusterKey, ClusterKeys};
use kvferry_transport::{Credentials, Transport};

use crate::config::{ConfigError, KeyFiles, Network, PreSharedKey};
use crate::error::ConnectorError;

/// How often the files are looked at.
const LOOK: Duration = Duration::from_secs(1);

/// The keys and certificates that a configuration gives.
pub(crate) fn credentials(network: &Network) -> Result<Credentials, ConnectorError> {
    let keys = network.psk.as_ref().map(|own| keys(network, own)).transpose()?;
    match (&network.tls, keys) {
        (Some(files), keys) => {
            let refuse = |error| ConnectorError::Config { key: "tls_certificate_file", problem: chain(&error) };
            Ok(Credentials::Tls { identity: files.read().map_err(refuse)?, keys })
        }
        (None, Some(keys)) => Ok(keys.into()),
        (None, None) => {
            let problem = "tcp needs the cluster's key; name its file, or set KVFERRY_PSK".to_owned();
            Err(ConnectorError::Config { key: "psk_file", problem })
        }
    }
}

fn keys(network: &Network, own: &PreSharedKey) -> Result<ClusterKeys, ConnectorError> {
    let also = network.psk_also.iter().map(|psk| key("psk_also_file", psk)).collect::<Result<_, _>>()?;
    Ok(ClusterKeys::new(key("psk_file", own)?, also))
}

fn key(name: &'static str, psk: &PreSharedKey) -> Result<ClusterKey, ConnectorError> {
    ClusterKey::new(psk.expose()).map_err(|error| ConnectorError::Config { key: name, problem: error.to_string() })
}

/// Gives the transport new keys and certificates when the files hold others, until it is gone. What cannot be read or used changes
/// nothing; a certificate and its key that are replaced one after the other are taken with the second.
pub(crate) fn watch(transport: &Arc<dyn Transport>, network: &Network) -> std::io::Result<()> {
    if network.psk_files == KeyFiles::default() && network.tls.is_none() {
        return Ok(());
    }
    let (transport, mut network) = (Arc::downgrade(transport), network.clone());
    let mut seen = stamps(&network);
    let look = move || {
        while let Some(transport) = after(&transport, LOOK) {
            let found = stamps(&network);
            if seen == found {
                continue;
            }
            seen = found;
            match read(&mut network)
                .map_err(|error| chain(&error))
                .and_then(|()| credentials(&network).map_err(|error| chain(&error)))
            {
                Ok(credentials) => {
                    transport.set_credentials(credentials);
                    tracing::info!("keys and certificates were read again; sessions that are up stay");
                }
                Err(error) => {
                    tracing::warn!(error, "keys or certificates changed and cannot be used; the old ones stay");
                }
            }
        }
    };
    std::thread::Builder::new().name("kvferry-keys".to_owned()).spawn(look).map(drop)
}

/// The transport, if it is still there after a while.
fn after(transport: &Weak<dyn Transport>, wait: Duration) -> Option<Arc<dyn Transport>> {
    std::thread::sleep(wait);
    transport.upgrade()
}

fn read(network: &mut Network) -> Result<(), ConfigError> {
    let files = &network.psk_files;
    let own = files.own.as_deref().map(|path| KeyFiles::read("psk_file", path)).transpose()?;
    network.psk_also = files.also.as_deref().map(KeyFiles::read_other).transpose()?.flatten();
    network.psk = own.or(network.psk.take());
    Ok(())
}

/// When a file was changed, and how long it is.
type Stamp = Option<(SystemTime, u64)>;

fn stamps(network: &Network) -> Vec<Stamp> {
    let stamp = |path: &Path| {
        let metadata = std::fs::metadata(path).ok()?;
        Some((metadata.modified().ok()?, metadata.len()))
    };
    let keys = [&network.psk_files.own, &network.psk_files.also].into_iter().flatten().map(|path| &**path);
    let certificates = network.tls.iter().flat_map(|files| files.paths());
    keys.chain(certificates).map(stamp).collect()
}

fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_a_key_in_it_changes_nothing() {
        let folder = std::env::temp_dir().join(format!("kvferry-read-keys-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let own = folder.join("own");
        std::fs::write(&own, "a key that is long enough").unwrap();
        let toml = format!("engine_id = 'a'\nrole = 'both'\npsk_file = {own:?}");
        let raw = crate::config::RawConfig::from_toml(&toml).unwrap();
        let config = crate::config::ConnectorConfig::try_from((raw, kvferry_protocol::Incarnation::new(1))).unwrap();
        let mut network = config.network().clone();
        let (before, first) = (network.psk.clone(), stamps(&network));
        std::fs::write(&own, "short").unwrap();
        assert_ne!(stamps(&network), first);
        assert!(read(&mut network).unwrap_err().to_string().contains("5 bytes"));
        assert_eq!(network.psk, before);
        std::fs::write(&own, "another key, long enough").unwrap();
        read(&mut network).unwrap();
        assert_ne!(network.psk, before);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
