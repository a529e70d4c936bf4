//! What can go wrong between two endpoints.

use std::io;
use std::sync::Arc;

/// Why a call, a post or a session failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// No session with this peer.
    #[error("no session with {peer}: it never came up, or it ended")]
    NotConnected {
        /// The peer, as text.
        peer: String,
    },
    /// The peer did not prove that it belongs to the cluster, or we did not prove it to the peer.
    #[error("{peer}: {problem}; give both sides the same key, or certificates of the same authority")]
    Authentication {
        /// The peer's address.
        peer: String,
        /// What failed.
        problem: String,
    },
    /// The peer sent what the protocol does not allow.
    #[error("{peer}: {problem}")]
    Protocol {
        /// The peer.
        peer: String,
        /// What, and where in the frame.
        problem: String,
    },
    /// The operating system refused an operation on a connection.
    #[error("{peer}: {operation}")]
    Io {
        /// The peer or address.
        peer: String,
        /// What was tried.
        operation: &'static str,
        /// The system's word.
        #[source]
        source: Arc<io::Error>,
    },
    /// A path whose payload is not encrypted, beside lanes that are.
    #[error(
        "payload over {path} is not encrypted, as the lanes are: leave it out of the paths, or allow plain payload"
    )]
    Plain {
        /// The path.
        path: &'static str,
    },
    /// A limit was reached.
    #[error("{what}: {found} is over the limit of {limit}")]
    Limit {
        /// What is limited.
        what: &'static str,
        /// How much was asked.
        found: u64,
        /// How much is allowed.
        limit: u64,
    },
    /// Bytes outside a region or a window.
    #[error("{what}: bytes {start}..{end} are outside 0..{limit}")]
    Range {
        /// What was addressed.
        what: String,
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// Length of the region or window.
        limit: u64,
    },
    /// Memory that cannot be registered.
    #[error("memory of {bytes} bytes cannot be registered: {problem}")]
    Memory {
        /// Its length.
        bytes: usize,
        /// Why not.
        problem: String,
    },
    /// Memory of a device, where only processors could carry the bytes.
    #[error("{what} is memory of a device, which only RDMA devices read and write: {problem}")]
    DeviceMemory {
        /// What lies there: granted pages, or a source.
        what: &'static str,
        /// Why no RDMA device carries it, and how to mend that.
        problem: String,
    },
    /// The receiver refused a write.
    #[error("the receiver refused the write: {reason}")]
    Refused {
        /// Its word.
        reason: String,
    },
    /// The post was cancelled by this side.
    #[error("cancelled")]
    Cancelled,
    /// Nothing moved for too long.
    #[error("{peer}: no progress in {operation} for {waited_ms} ms")]
    Stalled {
        /// The peer.
        peer: String,
        /// What stood still.
        operation: &'static str,
        /// For how long.
        waited_ms: u64,
    },
    /// The session was ended by the peer.
    #[error("{peer} ended the session: {reason}")]
    Ended {
        /// The peer.
        peer: String,
        /// Its word.
        reason: String,
    },
    /// The session was ended by this side.
    #[error("disconnected: {reason}")]
    Disconnected {
        /// Why.
        reason: String,
    },
}

impl TransportError {
    /// What is limited where all peers together hold as much in place as they may.
    pub const HELD_BYTES: &str = "bytes that peers hold in place";
}
