//! What the connector refuses or could not do.

use kvferry_transport::TransportError;

use crate::contract::RequestId;

/// Why a call on the connector failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectorError {
    /// A request's numbers do not fit each other or this worker's cache.
    #[error("request {request}: {problem}")]
    Request {
        /// Which request.
        request: RequestId,
        /// What does not fit, with both values.
        problem: String,
    },
    /// Caches that cannot be used.
    #[error("the KV cache cannot be registered: {problem}")]
    Caches {
        /// Why not.
        problem: String,
    },
    /// Metadata of another build.
    #[error(transparent)]
    Step(#[from] crate::contract::BadStep),
    /// The transport refused.
    #[error("{what}")]
    Transport {
        /// What was tried.
        what: String,
        /// Its word.
        #[source]
        source: TransportError,
    },
    /// A limit was reached.
    #[error("{what}: {limit} is the limit; raise {key} or send less")]
    Limit {
        /// What is full.
        what: &'static str,
        /// The limit.
        limit: u64,
        /// The configuration key.
        key: &'static str,
    },
    /// A configuration that is valid, but not here.
    #[error("{key}: {problem}")]
    Config {
        /// The configuration key.
        key: &'static str,
        /// Why not, and how to mend it.
        problem: String,
    },
    /// The system has no thread to spare.
    #[error("a thread of the connector cannot be started")]
    Thread {
        /// The system's word.
        #[source]
        source: std::io::Error,
    },
    /// The worker was shut down, or its driver thread ended.
    #[error("the connector's worker has ended")]
    Ended,
}
