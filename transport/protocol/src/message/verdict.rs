//! How a transfer ends.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::bounded::Text;

/// The one end of a transfer on one side.
///
/// Legal pairs (receiver, sender): (Done, Done), (Done, Failed(no word)), (Failed, Failed), (Cancelled, Cancelled or Failed).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Verdict {
    /// Everything wanted is in place and verified.
    Done,
    /// It failed; what was verified before may still be good.
    Failed(Failure),
    /// Somebody asked to end it.
    Cancelled,
}

/// Why a transfer failed: a reason to act on and a text to read.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Failure {
    /// What kind of failure.
    pub reason: Reason,
    /// What exactly, for a person; at most [`Text::MAX_BYTES`] bytes, longer ones are cut.
    pub text: Text,
}

/// The kinds of failure. The order is the wire format: append only.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Reason {
    /// The receiver's deadline for the whole transfer passed.
    Deadline,
    /// Nothing arrived for longer than the receiver waits.
    Stalled,
    /// The peer was away for too long.
    PeerAbsent,
    /// The peer's engine restarted: what it granted or leased is gone.
    PeerRestarted,
    /// Bytes arrived with another digest than the sender's.
    Digest,
    /// The peer did what the protocol does not allow.
    Protocol,
    /// The receiver could not grant its memory.
    Grant,
    /// The sender's lease ran out.
    LeaseExpired,
    /// The sender posted all or asked for an end, and the receiver's word never came.
    NoWord,
    /// The engine gave up, e.g. the computation of the blocks failed.
    Engine,
    /// The peer knows no such transfer.
    Unknown,
    /// A limit of this side was reached.
    Limit,
    /// The session was cut more often than this side grants anew.
    Cuts,
    /// The two sides disagree about the tokens or layers of the transfer.
    Range,
}

impl Verdict {
    /// A failure with a text.
    #[must_use]
    pub fn failed(reason: Reason, text: impl Into<Text>) -> Self {
        Self::Failed(Failure { reason, text: text.into() })
    }

    /// Its name, for errors, logs and metrics.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Done => "Done",
            Self::Failed(_) => "Failed",
            Self::Cancelled => "Cancelled",
        }
    }

    /// Whether this receiver's verdict and that sender's may stand together.
    #[must_use]
    pub const fn may_pair_with_sender(&self, sender: &Self) -> bool {
        match (self, sender) {
            (Self::Done | Self::Failed(_) | Self::Cancelled, Self::Failed(Failure { reason: Reason::NoWord, .. }))
            | (Self::Done, Self::Done)
            | (Self::Failed(_) | Self::Cancelled, Self::Failed(_))
            | (Self::Cancelled, Self::Cancelled) => true,
            (Self::Done, Self::Failed(_) | Self::Cancelled)
            | (Self::Failed(_), Self::Done | Self::Cancelled)
            | (Self::Cancelled, Self::Done) => false,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => f.write_str("done"),
            Self::Failed(failure) => write!(f, "failed: {failure}"),
            Self::Cancelled => f.write_str("cancelled"),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason, self.text.as_str())
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Deadline => "deadline",
            Self::Stalled => "stalled",
            Self::PeerAbsent => "peer absent",
            Self::PeerRestarted => "peer restarted",
            Self::Digest => "digest",
            Self::Protocol => "protocol",
            Self::Grant => "grant",
            Self::LeaseExpired => "lease expired",
            Self::NoWord => "no word",
            Self::Engine => "engine",
            Self::Unknown => "unknown transfer",
            Self::Limit => "limit",
            Self::Cuts => "cuts",
            Self::Range => "range",
        })
    }
}
