//! What can be wrong with bytes from a peer.

use std::fmt;

/// Why bytes are not what the wire allows. The connection cannot go on after it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// Not ours at all.
    #[error(
        "{what} begins with {found:08x} instead of {want:08x}: the peer does not speak this protocol, or the stream is torn"
    )]
    Magic {
        /// Which structure.
        what: &'static str,
        /// What came.
        found: u32,
        /// What had to come.
        want: u32,
    },
    /// Bits changed on the way.
    #[error("the checksum of {what} is {found:08x}, its bytes say {want:08x}")]
    Checksum {
        /// Which structure.
        what: &'static str,
        /// What came.
        found: u32,
        /// What the bytes give.
        want: u32,
    },
    /// A number that has no meaning in its place.
    #[error("{what}: {found} has no meaning here")]
    Value {
        /// Which field.
        what: &'static str,
        /// What came.
        found: u64,
    },
    /// A length over its limit.
    #[error("{what}: {found} is over the limit of {limit}")]
    Limit {
        /// Which length.
        what: &'static str,
        /// What came.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// Fewer or more bytes than the structure takes.
    #[error("{what}: {found} bytes where {want} belong")]
    Length {
        /// Which structure.
        what: &'static str,
        /// How many came.
        found: u64,
        /// How many it takes.
        want: u64,
    },
}

/// Where in the handshake something failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandshakeStep {
    /// The dialler's first message.
    Hello,
    /// The listener's answer to it.
    Challenge,
    /// The dialler's proof that it holds the key.
    DiallerProof,
    /// The listener's proof that it holds the key.
    ListenerProof,
    /// Who the dialler is.
    Identity,
    /// What the listener says to it.
    Verdict,
}

impl fmt::Display for HandshakeStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hello => "hello",
            Self::Challenge => "challenge",
            Self::DiallerProof => "the dialler's proof",
            Self::ListenerProof => "the listener's proof",
            Self::Identity => "identity",
            Self::Verdict => "verdict",
        })
    }
}

/// Why a handshake ended without a lane.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The bytes of one step are not what the wire allows.
    #[error("handshake, {step}")]
    Malformed {
        /// Which step.
        step: HandshakeStep,
        /// What is wrong.
        #[source]
        source: WireError,
    },
    /// The other side does not hold our key.
    #[error("handshake, {step}: the proof is wrong, the keys differ")]
    Proof {
        /// Which step.
        step: HandshakeStep,
    },
    /// The connection ended in the middle.
    #[error("handshake: the other side hung up before {step}{}", hung_up_hint(*step))]
    HungUp {
        /// What was expected next.
        step: HandshakeStep,
    },
    /// The other side is too slow.
    #[error("handshake: {step} did not come within the deadline")]
    Deadline {
        /// What was expected next.
        step: HandshakeStep,
    },
    /// No protocol version in common.
    #[error(
        "handshake: this side speaks versions {our_min}..={our_max}, the other one {their_min}..={their_max}; upgrade the older one"
    )]
    Version {
        /// Our oldest.
        our_min: u16,
        /// Our newest.
        our_max: u16,
        /// Their oldest.
        their_min: u16,
        /// Their newest.
        their_max: u16,
    },
    /// The listener has too many handshakes going on.
    #[error("handshake: the listener is busy with other handshakes; it will be tried again")]
    Busy,
    /// The listener knows who we are and does not want this lane.
    #[error("handshake: declined, {0}")]
    Declined(crate::wire::Declined),
}

fn hung_up_hint(step: HandshakeStep) -> &'static str {
    match step {
        HandshakeStep::ListenerProof => " (it does so when it holds another key)",
        _ => "",
    }
}

/// Why bytes cannot be a cluster key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a pre-shared key has {min} to {max} bytes, not {found}; `openssl rand 32` makes one", min = crate::wire::ClusterKey::MIN_BYTES, max = crate::wire::ClusterKey::MAX_BYTES)]
pub struct ClusterKeyError {
    /// How many were given.
    pub found: usize,
}
