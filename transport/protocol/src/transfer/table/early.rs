//! What [`Early`](crate::transfer::Early) does with which input, by what it knows of the transfer.

use super::{MessageKind, kinds};

kinds! {
    /// What is known early of one transfer with one peer.
    EarlyState {
        /// Nothing.
        Unknown = "Unknown",
        /// Nothing, and there is no room to keep anything.
        Full = "Full",
        /// The sender offered.
        KeptOffer = "Kept(Offer)",
        /// The receiver granted.
        KeptGrant = "Kept(Grant)",
        /// The sender gave up.
        KeptAbort = "Kept(Abort)",
        /// This side will not take it, or its peer ended it.
        Declined = "Declined",
    }
}

kinds! {
    /// An input about one transfer with one peer.
    EarlyInput {
        /// A message.
        Offer = "Offer",
        /// A message.
        Grant = "Grant",
        /// A message.
        Renew = "Renew",
        /// A message; its generation is at least that of a grant that is kept.
        Stop = "Stop",
        /// A message.
        Stopped = "Stopped",
        /// A message.
        Abort = "Abort",
        /// A message.
        Ended = "Ended",
        /// A message.
        Working = "Working",
        /// A message.
        Manifest = "Manifest",
        /// A message.
        Engine = "Engine",
        /// A message.
        Spare = "Spare",
        /// A machine begins.
        Take = "take",
        /// The engine will not take the transfer.
        Decline = "decline",
        /// The session with the peer ended.
        PeerDown = "peer_down",
        /// Its time has come; where it has none, any time.
        Timeout = "timeout",
    }
}

impl From<MessageKind> for EarlyInput {
    fn from(kind: MessageKind) -> Self {
        match kind {
            MessageKind::Manifest => Self::Manifest,
            MessageKind::Offer => Self::Offer,
            MessageKind::Grant => Self::Grant,
            MessageKind::Renew => Self::Renew,
            MessageKind::Stop => Self::Stop,
            MessageKind::Stopped => Self::Stopped,
            MessageKind::Abort => Self::Abort,
            MessageKind::Ended => Self::Ended,
            MessageKind::Engine => Self::Engine,
            MessageKind::Working => Self::Working,
            MessageKind::Spare => Self::Spare,
        }
    }
}

/// What comes of an input: what is known afterwards, and whether something goes back to the peer or to the engine.
#[cfg(feature = "sim")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EarlyFit {
    /// What is known afterwards; `Unknown` stands for `Full`, too.
    pub then: EarlyState,
    /// The peer is answered, or the engine is handed what was kept.
    pub answers: bool,
}

#[cfg(feature = "sim")]
impl EarlyState {
    /// What comes of an input in this state.
    #[must_use]
    pub const fn fit(self, input: EarlyInput) -> EarlyFit {
        use EarlyInput as I;
        let stays = match self {
            Self::Full => Self::Unknown,
            Self::Unknown | Self::KeptOffer | Self::KeptGrant | Self::KeptAbort | Self::Declined => self,
        };
        let (then, answers) = match input {
            I::Offer => self.keeps(Self::KeptOffer),
            I::Grant => self.keeps(Self::KeptGrant),
            I::Abort => self.keeps(Self::KeptAbort),
            I::Renew => (stays, true),
            I::Stop => match self {
                Self::KeptGrant => (Self::Unknown, true),
                Self::Unknown | Self::Full | Self::KeptOffer | Self::KeptAbort | Self::Declined => (stays, true),
            },
            I::Ended => match self {
                Self::KeptOffer | Self::KeptAbort => (Self::KeptAbort, false),
                Self::Unknown | Self::Full | Self::KeptGrant | Self::Declined => (Self::Declined, false),
            },
            I::Stopped | I::Working | I::Manifest | I::Engine | I::Spare => (stays, false),
            I::Take => match self {
                Self::KeptOffer | Self::KeptGrant | Self::KeptAbort => (Self::Unknown, true),
                Self::Unknown | Self::Full | Self::Declined => (stays, false),
            },
            I::Decline => match self {
                Self::KeptOffer | Self::KeptGrant | Self::KeptAbort => (Self::Declined, true),
                Self::Unknown | Self::Full | Self::Declined => (Self::Declined, false),
            },
            I::PeerDown => (Self::Unknown, false),
            I::Timeout => match self {
                Self::KeptOffer | Self::KeptGrant | Self::KeptAbort => (Self::Unknown, true),
                Self::Unknown | Self::Full | Self::Declined => (Self::Unknown, false),
            },
        };
        EarlyFit { then, answers }
    }

    const fn keeps(self, kept: Self) -> (Self, bool) {
        match self {
            Self::Unknown | Self::KeptOffer | Self::KeptGrant | Self::KeptAbort => (kept, false),
            Self::Full => (Self::Unknown, true),
            Self::Declined => (Self::Declined, true),
        }
    }

    /// Whether a rule-abiding driver, with peers that keep to their role, brings the pair about.
    #[must_use]
    pub const fn is_reached(self, input: EarlyInput) -> bool {
        use EarlyInput as I;
        // A peer sends, or it receives; never both in one transfer.
        let (from_sender, from_receiver) = match self {
            Self::Unknown | Self::Full | Self::Declined => (true, true),
            Self::KeptOffer | Self::KeptAbort => (true, false),
            Self::KeptGrant => (false, true),
        };
        match input {
            // Who gave up offers no more.
            I::Offer => from_sender && !matches!(self, Self::KeptAbort),
            I::Abort => from_sender,
            I::Grant | I::Renew | I::Stop => from_receiver,
            I::Ended => true,
            // A sender answers a receiver only: who offered or gave up has heard nothing of one.
            I::Stopped | I::Working => matches!(self, Self::Unknown | Self::Full | Self::Declined),
            I::Manifest | I::Engine | I::Spare => false,
            I::Take | I::Decline => true,
            I::PeerDown | I::Timeout => !matches!(self, Self::Unknown | Self::Full),
        }
    }
}
