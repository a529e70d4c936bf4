//! Which input fits a [`Receiver`](crate::transfer::Receiver) in which state.

use super::{MessageKind, kinds};

kinds! {
    /// The state of a receiver, as far as it decides which input fits.
    ReceiverState {
        /// For a session, or for the offer.
        Waiting = "Waiting",
        /// The driver makes a grant.
        Granting = "Granting",
        /// The driver makes a grant whose session is gone: it is fenced at once, and another one follows.
        GrantingRegrant = "Granting(regrant)",
        /// The driver makes a grant, but the transfer's end is decided: it is fenced at once.
        GrantingEnd = "Granting(end)",
        /// Writes land.
        Granted = "Granted",
        /// The sender is asked to stop.
        Stopping = "Stopping",
        /// The grant is being revoked; another one follows.
        FencingRegrant = "Fencing(regrant)",
        /// The grant is being revoked; then all is over.
        FencingEnd = "Fencing(end)",
        /// The grant is dead, and what landed under it is hashed; another one follows.
        JudgingRegrant = "Judging(regrant)",
        /// The grant is dead, and what landed under it is hashed; then all is over.
        JudgingEnd = "Judging(end)",
        /// Finished; the sender may not have heard the word.
        Lingering = "Lingering",
        /// All is over.
        Closed = "Closed",
    }
}

kinds! {
    /// An input of a receiver.
    ReceiverInput {
        /// A newer session is up.
        PeerUp = "peer_up",
        /// The session ended.
        PeerDown = "peer_down",
        /// The sender's engine restarted.
        PeerRestarted = "peer_restarted",
        /// The grant that was asked for is made.
        Granted = "granted",
        /// The grant that was asked for cannot be made.
        GrantRefused = "grant_refused",
        /// The grant is revoked.
        Fenced = "fenced",
        /// A write landed for the first time.
        Landed = "landed",
        /// The digest that was asked for.
        Digested = "digested",
        /// The digest that was asked for cannot be made.
        DigestFailed = "digest_failed",
        /// The engine wants the transfer no more.
        Cancel = "cancel",
        /// The time of `poll_timeout` has come; where there is none, any time.
        Timeout = "timeout",
        /// A message of the sender.
        Offer = "Offer",
        /// A message of the sender.
        Working = "Working",
        /// A message of the sender.
        Stopped = "Stopped",
        /// A message of the sender.
        Abort = "Abort",
        /// A message of the sender.
        Ended = "Ended",
        /// A message that is never for a receiver.
        Manifest = "Manifest",
        /// A message that is never for a receiver.
        Grant = "Grant",
        /// A message that is never for a receiver.
        Renew = "Renew",
        /// A message that is never for a receiver.
        Stop = "Stop",
        /// A message that is never for a receiver.
        Engine = "Engine",
        /// A message that is never for a receiver.
        Spare = "Spare",
    }
}

impl From<MessageKind> for ReceiverInput {
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

#[cfg(feature = "sim")]
impl ReceiverState {
    /// Whether a receiver in this state, with a session or without, takes the input.
    #[must_use]
    pub const fn takes(self, up: bool, input: ReceiverInput) -> bool {
        use ReceiverInput as I;
        match input {
            I::PeerUp => !up && self.is_open_or_lingers(),
            I::PeerDown => up && self.is_open_or_lingers(),
            I::PeerRestarted | I::Abort | I::Ended => self.is_open_or_lingers(),
            I::Granted | I::GrantRefused => self.makes_a_grant(),
            I::Fenced => self.fences(),
            I::Landed => self.fences() || self.is_posted_under(),
            I::Digested | I::DigestFailed => self.fences() || self.judges() || self.is_posted_under(),
            I::Cancel => self.has_open_end(),
            I::Timeout => match self {
                Self::Stopping | Self::Lingering => true,
                Self::GrantingEnd | Self::FencingEnd | Self::JudgingEnd | Self::Closed => false,
                Self::Waiting
                | Self::Granting
                | Self::GrantingRegrant
                | Self::Granted
                | Self::FencingRegrant
                | Self::JudgingRegrant => true,
            },
            I::Offer => match self {
                Self::Waiting | Self::Lingering => true,
                Self::Granting
                | Self::GrantingRegrant
                | Self::GrantingEnd
                | Self::Granted
                | Self::Stopping
                | Self::FencingRegrant
                | Self::FencingEnd
                | Self::JudgingRegrant
                | Self::JudgingEnd
                | Self::Closed => false,
            },
            I::Working => matches!(self, Self::Granted),
            I::Stopped => matches!(self, Self::Stopping),
            I::Manifest | I::Grant | I::Renew | I::Stop | I::Engine | I::Spare => false,
        }
    }

    /// Whether a rule-abiding driver can give the input in this state, with a session or without.
    #[must_use]
    pub const fn is_reached(self, up: bool, input: ReceiverInput) -> bool {
        use ReceiverInput as I;
        let exists = match self {
            // It needs the session, and loses the state with it.
            Self::Granting | Self::Granted | Self::Stopping => up,
            Self::Waiting
            | Self::GrantingRegrant
            | Self::GrantingEnd
            | Self::FencingRegrant
            | Self::FencingEnd
            | Self::JudgingRegrant
            | Self::JudgingEnd
            | Self::Lingering => true,
            // It is dropped at once.
            Self::Closed => false,
        };
        exists
            && match input {
                I::PeerUp
                | I::PeerDown
                | I::PeerRestarted
                | I::Granted
                | I::GrantRefused
                | I::Fenced
                | I::Landed
                | I::Digested
                | I::DigestFailed
                | I::Cancel
                | I::Timeout => true,
                I::Offer | I::Working | I::Stopped | I::Abort | I::Ended => up || self.hears_without_a_session(),
                I::Grant | I::Renew | I::Stop => up || self.hears_without_a_session(),
                // They belong to the session, not to a transfer.
                I::Manifest | I::Engine | I::Spare => false,
            }
    }

    /// After a grant was refused for want of a session, the driver may still hold messages of that session.
    const fn hears_without_a_session(self) -> bool {
        matches!(self, Self::Waiting | Self::Lingering)
    }

    const fn is_open_or_lingers(self) -> bool {
        match self {
            Self::Waiting
            | Self::Granting
            | Self::GrantingRegrant
            | Self::GrantingEnd
            | Self::Granted
            | Self::Stopping
            | Self::FencingRegrant
            | Self::FencingEnd
            | Self::JudgingRegrant
            | Self::JudgingEnd
            | Self::Lingering => true,
            Self::Closed => false,
        }
    }

    /// Whether the transfer's end is not decided yet.
    const fn has_open_end(self) -> bool {
        match self {
            Self::Waiting
            | Self::Granting
            | Self::GrantingRegrant
            | Self::Granted
            | Self::FencingRegrant
            | Self::JudgingRegrant => true,
            Self::GrantingEnd
            | Self::Stopping
            | Self::FencingEnd
            | Self::JudgingEnd
            | Self::Lingering
            | Self::Closed => false,
        }
    }

    const fn makes_a_grant(self) -> bool {
        match self {
            Self::Granting | Self::GrantingRegrant | Self::GrantingEnd => true,
            Self::Waiting
            | Self::Granted
            | Self::Stopping
            | Self::FencingRegrant
            | Self::FencingEnd
            | Self::JudgingRegrant
            | Self::JudgingEnd
            | Self::Lingering
            | Self::Closed => false,
        }
    }

    const fn is_posted_under(self) -> bool {
        match self {
            Self::Granted | Self::Stopping => true,
            Self::Waiting
            | Self::Granting
            | Self::GrantingRegrant
            | Self::GrantingEnd
            | Self::FencingRegrant
            | Self::FencingEnd
            | Self::JudgingRegrant
            | Self::JudgingEnd
            | Self::Lingering
            | Self::Closed => false,
        }
    }

    const fn fences(self) -> bool {
        match self {
            Self::FencingRegrant | Self::FencingEnd => true,
            Self::Waiting
            | Self::Granting
            | Self::GrantingRegrant
            | Self::GrantingEnd
            | Self::Granted
            | Self::Stopping
            | Self::JudgingRegrant
            | Self::JudgingEnd
            | Self::Lingering
            | Self::Closed => false,
        }
    }

    const fn judges(self) -> bool {
        match self {
            Self::JudgingRegrant | Self::JudgingEnd => true,
            Self::Waiting
            | Self::Granting
            | Self::GrantingRegrant
            | Self::GrantingEnd
            | Self::Granted
            | Self::Stopping
            | Self::FencingRegrant
            | Self::FencingEnd
            | Self::Lingering
            | Self::Closed => false,
        }
    }
}
