//! By what metrics are told apart: small closed sets, so that a page cannot grow.

use kvferry_protocol::message::Reason;
use kvferry_transport::PathKind;

/// A closed set of label values, or of combinations of them.
pub trait Labels: Copy + 'static {
    /// All of them, in the order of the exporter's page.
    const ALL: &'static [Self];

    /// Its place in [`ALL`](Self::ALL).
    fn index(self) -> usize;

    /// Its label pairs, name and value.
    fn pairs(self) -> Vec<(&'static str, &'static str)>;
}

macro_rules! label {
    ($(#[$doc:meta])+ $name:ident as $label:literal { $($(#[$variant_doc:meta])+ $variant:ident = $word:literal,)+ }) => {
        $(#[$doc])+
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum $name { $($(#[$variant_doc])+ $variant,)+ }

        impl $name {
            /// The label's value.
            #[must_use]
            pub const fn word(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }
        }

        impl Labels for $name {
            const ALL: &'static [Self] = &[$(Self::$variant,)+];

            fn index(self) -> usize {
                self as usize
            }

            fn pairs(self) -> Vec<(&'static str, &'static str)> {
                vec![($label, self.word())]
            }
        }
    };
}

label! {
    /// Which side of a transfer this worker is.
    Side as "side" {
        /// The prefill side, whose leased bytes leave.
        Send = "send",
        /// The decode side, whose granted memory is filled.
        Receive = "receive",
    }
}

label! {
    /// A way for K/V to go.
    Path as "path" {
        /// Inside one process.
        Loopback = "loopback",
        /// Memory that both processes map.
        SharedMemory = "shm",
        /// Out of the sender's process.
        ProcessMemory = "cma",
        /// Unix sockets.
        UnixSocket = "uds",
        /// An RDMA device.
        Rdma = "rdma",
        /// UCX.
        Ucx = "ucx",
        /// TCP.
        Tcp = "tcp",
        /// One that this release does not know.
        Other = "other",
    }
}

impl From<PathKind> for Path {
    fn from(kind: PathKind) -> Self {
        match kind {
            PathKind::Loopback => Self::Loopback,
            PathKind::SharedMemory => Self::SharedMemory,
            PathKind::ProcessMemory => Self::ProcessMemory,
            PathKind::UnixSocket => Self::UnixSocket,
            PathKind::Rdma => Self::Rdma,
            PathKind::Ucx => Self::Ucx,
            PathKind::Tcp => Self::Tcp,
            _ => Self::Other,
        }
    }
}

label! {
    /// Why a transfer failed.
    FailureReason as "reason" {
        /// The deadline for the whole transfer passed.
        Deadline = "deadline",
        /// Nothing arrived for longer than the receiver waits.
        Stalled = "stalled",
        /// The peer was away for too long.
        PeerAbsent = "peer_absent",
        /// The peer's engine restarted.
        PeerRestarted = "peer_restarted",
        /// Bytes arrived with another digest than the sender's.
        Digest = "digest",
        /// The peer did what the protocol does not allow.
        Protocol = "protocol",
        /// The receiver could not grant its memory.
        Grant = "grant",
        /// The sender's lease ran out.
        LeaseExpired = "lease_expired",
        /// The receiver's verdict never came.
        NoWord = "no_word",
        /// The engine gave up on the computation.
        Engine = "engine",
        /// The peer knows no such transfer.
        Unknown = "unknown",
        /// A limit of this side was reached.
        Limit = "limit",
        /// The session was cut more often than this side grants anew.
        Cuts = "cuts",
        /// The sides disagree about the tokens or layers of the transfer.
        Range = "range",
    }
}

label! {
    /// Why a message or report was dropped.
    DropReason as "reason" {
        /// Its transfer had ended.
        Late = "late",
        /// It had come before.
        Duplicate = "duplicate",
        /// It names nothing that exists here.
        Unknown = "unknown",
        /// It cannot be decoded.
        Malformed = "malformed",
        /// Nobody took those before it.
        Overflow = "overflow",
    }
}

label! {
    /// Why a tier did not keep a block that it was given.
    TierDrop as "reason" {
        /// A queue or the tier's own memory was full.
        Full = "full",
        /// The request's blocks were wanted back first.
        Ended = "ended",
        /// The tier failed, or a page could not be read.
        Failed = "failed",
    }
}

label! {
    /// Why a tier did not take blocks that a peer offered.
    ReturnRefusal as "reason" {
        /// It has them, or they are on their way.
        Present = "present",
        /// Nothing can be given up for them.
        Full = "full",
        /// The peer's blocks have another size.
        BlockSize = "block_size",
        /// The peer holds another part of the model.
        Part = "part",
        /// There is no tier.
        NoTier = "no_tier",
    }
}

label! {
    /// Why a peer was refused.
    RefusalReason as "reason" {
        /// It does not know the pre-shared key.
        Key = "key",
        /// No common protocol version.
        Version = "version",
        /// A field of its manifest differs: model, dtype, layout.
        Manifest = "manifest",
        /// There are too many peers.
        Limit = "limit",
    }
}

impl Labels for (Side, FailureReason) {
    const ALL: &'static [Self] = &{
        let mut all = [(Side::Send, FailureReason::Deadline); Side::ALL.len() * FailureReason::ALL.len()];
        let mut at = 0;
        while at < all.len() {
            all[at] = (Side::ALL[at / FailureReason::ALL.len()], FailureReason::ALL[at % FailureReason::ALL.len()]);
            at += 1;
        }
        all
    };

    fn index(self) -> usize {
        self.0.index() * FailureReason::ALL.len() + self.1.index()
    }

    fn pairs(self) -> Vec<(&'static str, &'static str)> {
        [self.0.pairs(), self.1.pairs()].concat()
    }
}

impl From<Reason> for FailureReason {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::Deadline => Self::Deadline,
            Reason::Stalled => Self::Stalled,
            Reason::PeerAbsent => Self::PeerAbsent,
            Reason::PeerRestarted => Self::PeerRestarted,
            Reason::Digest => Self::Digest,
            Reason::Grant => Self::Grant,
            Reason::LeaseExpired => Self::LeaseExpired,
            Reason::NoWord => Self::NoWord,
            Reason::Engine => Self::Engine,
            Reason::Unknown => Self::Unknown,
            Reason::Limit => Self::Limit,
            Reason::Cuts => Self::Cuts,
            Reason::Range => Self::Range,
            // `Reason` may grow; what this build does not know is a breach of what it knows.
            _ => Self::Protocol,
        }
    }
}
