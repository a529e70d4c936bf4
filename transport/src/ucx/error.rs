//! What can go wrong with UCX.

use ucx_sys::{LIBRARY_VARIABLE, LoadError};

use super::node::LinkId;

/// Why a call, a post or a link failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum UcxError {
    /// There is no libucp that could be used.
    #[error("{LIBRARY_VARIABLE} or the system's libucp")]
    Library(#[source] &'static LoadError),
    /// A call of UCX failed.
    #[error("UCX: {operation}: {status}")]
    Call {
        /// What was tried, and on whom.
        operation: &'static str,
        /// UCX's word.
        status: String,
    },
    /// UCX did not take a setting.
    #[error("UCX: the setting UCX_{key}={value} was not taken: {status}")]
    Setting {
        /// Which, without `UCX_`.
        key: String,
        /// Its value.
        value: String,
        /// UCX's word.
        status: String,
    },
    /// No transport is left that may carry puts: one that the receiver can shut alone, and over which UCX puts natively, or, if
    /// that was asked for, emulates puts. Emulated ones have to be asked for because UCX ends the receiver's whole process if
    /// the sender dies while its puts arrive.
    #[error(
        "UCX has no transport here that may carry puts: it found {found}, UCX_TLS allows {allowed}. rc and dc may; tcp and ud only \
         with emulated_puts = true, since UCX aborts the receiving process if a sender dies amid emulated puts; shared memory, cma \
         and the device-to-device copies never, since the receiver cannot stop them. Use kvferry's own tcp"
    )]
    NoTransport {
        /// What UCX found.
        found: String,
        /// What UCX_TLS says.
        allowed: String,
    },
    /// An endpoint has no lane by which a device puts.
    #[error(
        "{link}: UCX would emulate puts over {found}, and abort the receiving process if the sender dies; look why rc and dc were \
         not chosen (UCX_NET_DEVICES, UCX_TLS on both sides), or set emulated_puts = true"
    )]
    Emulated {
        /// Which link.
        link: LinkId,
        /// Its lanes.
        found: String,
    },
    /// An endpoint uses a transport whose writes the receiver could not stop.
    #[error(
        "{link}: UCX chose {found}, whose writes the receiver cannot stop alone; it was told to use only {allowed}"
    )]
    Unfenced {
        /// Which link.
        link: LinkId,
        /// Its lanes.
        found: String,
        /// What UCX was told to use.
        allowed: String,
    },
    /// What a peer told of itself cannot be used.
    #[error("{what} of the peer: {problem}")]
    Parameters {
        /// What was read.
        what: &'static str,
        /// What is wrong with it.
        problem: &'static str,
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
    /// A write that makes no sense.
    #[error("the write does not fit")]
    Write(#[source] crate::TransportError),
    /// Memory that cannot be registered.
    #[error("memory of {bytes} bytes cannot be registered with UCX: {problem}")]
    Memory {
        /// Its length.
        bytes: usize,
        /// Why not.
        problem: String,
    },
    /// The peer broke the rules.
    #[error("{link}: {problem}")]
    Protocol {
        /// Which link.
        link: LinkId,
        /// What it did.
        problem: &'static str,
    },
    /// The peer is gone, as UCX says.
    #[error("{link}: the peer is gone: {status}")]
    Gone {
        /// Which link.
        link: LinkId,
        /// UCX's word.
        status: String,
    },
    /// Nothing moved for too long.
    #[error("{link}: no progress in {operation} for {waited_ms} ms; {advice}")]
    Stalled {
        /// Which link.
        link: LinkId,
        /// What stood still.
        operation: &'static str,
        /// For how long.
        waited_ms: u64,
        /// What to look at.
        advice: &'static str,
    },
    /// The post was cancelled by this side.
    #[error("cancelled")]
    Cancelled,
    /// The link was closed by this side.
    #[error("{link} was closed: {reason}")]
    Closed {
        /// Which link.
        link: LinkId,
        /// Why.
        reason: String,
    },
    /// No such link: it never was, or it is over.
    #[error("there is no {link}")]
    NoLink {
        /// Which.
        link: LinkId,
    },
    /// The thread that drives UCX is over.
    #[error("UCX was shut down: {reason}")]
    Stopped {
        /// Why.
        reason: String,
    },
    /// The operating system refused something that is no call of UCX.
    #[error("{operation} for UCX")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// The system's word.
        #[source]
        source: std::sync::Arc<std::io::Error>,
    },
}

impl UcxError {
    pub(super) fn io(operation: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { operation, source: std::sync::Arc::new(source) }
    }
}
