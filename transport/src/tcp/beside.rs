//! What carries payload beside the lanes, as an endpoint starts it, or why it does not.

use std::sync::Arc;

use super::config::TcpConfig;
use super::ucx::Ucx;
use super::verbs::Verbs;
use crate::api::PathKind;
use crate::credentials::Credentials;
use crate::error::TransportError;

/// Encrypted lanes are a promise that paths beside them break, unless the configuration says that they may.
pub(super) fn refuse_plain(config: &TcpConfig, credentials: &Credentials) -> Result<(), TransportError> {
    let plain = config.paths.iter().find(|path| matches!(path, PathKind::Rdma | PathKind::Ucx));
    match plain.filter(|_| credentials.is_tls() && !config.plain_payload) {
        Some(path) => Err(TransportError::Plain { path: path.name() }),
        None => Ok(()),
    }
}

/// RDMA devices, if the configuration names them; else, or if there are none, why not.
pub(super) fn start_verbs(config: &TcpConfig) -> Result<Arc<Verbs>, String> {
    if !config.paths.contains(&PathKind::Rdma) {
        return Err("this side's configuration does not allow it".to_owned());
    }
    Verbs::open(&config.rdma).map(Arc::new).map_err(|error| {
        let problem = with_cause(&error);
        tracing::warn!(problem, "RDMA is allowed and cannot be used");
        problem
    })
}

/// An error and what is behind it, in one line.
pub(super) fn with_cause(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", with_cause(source)),
        None => error.to_string(),
    }
}

/// UCX, if the configuration names it; else, or if it is not there, why not.
pub(super) fn start_ucx(config: &TcpConfig) -> Result<Ucx, String> {
    if !config.paths.contains(&PathKind::Ucx) {
        return Err("this side's configuration does not allow it".to_owned());
    }
    Ucx::start(&config.ucx, config.frame_bytes).map_err(|error| {
        let problem = with_cause(&error);
        tracing::warn!(problem, "UCX is not used");
        problem
    })
}
