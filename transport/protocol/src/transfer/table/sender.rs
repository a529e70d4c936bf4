//! Which input fits a [`Sender`](crate::transfer::Sender) in which state.

use super::{MessageKind, kinds};

kinds! {
    /// The state of a sender, as far as it decides which input fits.
    SenderState {
        /// There is no grant to post under.
        Waiting = "Waiting",
        /// The same, and it is for the receiver to speak.
        WaitingWord = "Waiting(word)",
        /// Computed and missing cells are posted.
        Granted = "Granted",
        /// All that was asked for is posted, and the posts ended: it is for the receiver to speak.
        GrantedPosted = "Granted(all posted)",
        /// No more is sent, the receiver's word is awaited.
        Aborting = "Aborting",
        /// The verdict is known, posts drain.
        Ending = "Ending",
        /// All is over.
        Closed = "Closed",
    }
}

kinds! {
    /// An input of a sender.
    SenderInput {
        /// A newer session is up.
        PeerUp = "peer_up",
        /// The session ended.
        PeerDown = "peer_down",
        /// The receiver's engine restarted.
        PeerRestarted = "peer_restarted",
        /// Cells of the transfer are computed.
        Computed = "computed",
        /// A post in flight ended with all its bytes taken.
        PostedTaken = "posted(taken)",
        /// A post in flight ended otherwise.
        PostedLost = "posted(lost)",
        /// The engine gives up.
        Fail = "fail",
        /// The engine wants the transfer no more.
        Cancel = "cancel",
        /// The time of `poll_timeout` has come; where there is none, any time.
        Timeout = "timeout",
        /// A message of the receiver.
        Grant = "Grant",
        /// A message of the receiver.
        Renew = "Renew",
        /// A message of the receiver.
        Stop = "Stop",
        /// A message of the receiver.
        Ended = "Ended",
        /// A message that is never for a sender.
        Manifest = "Manifest",
        /// A message that is never for a sender.
        Offer = "Offer",
        /// A message that is never for a sender.
        Working = "Working",
        /// A message that is never for a sender.
        Stopped = "Stopped",
        /// A message that is never for a sender.
        Abort = "Abort",
        /// A message that is never for a sender.
        Engine = "Engine",
        /// A message that is never for a sender.
        Spare = "Spare",
    }
}

impl From<MessageKind> for SenderInput {
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
impl SenderState {
    /// Whether a sender in this state, with a session or without, takes the input.
    #[must_use]
    pub const fn takes(self, up: bool, input: SenderInput) -> bool {
        use SenderInput as I;
        match input {
            I::PeerUp => !up && self.is_not_closed(),
            I::PeerDown => up && self.is_not_closed(),
            I::PeerRestarted | I::Stop => self.is_not_closed(),
            I::Computed | I::Fail | I::Cancel | I::Renew => self.sends(),
            I::PostedTaken | I::PostedLost => match self {
                Self::Waiting | Self::WaitingWord | Self::Granted | Self::Aborting | Self::Ending => true,
                // By its definition nothing is in flight.
                Self::GrantedPosted | Self::Closed => false,
            },
            I::Timeout | I::Grant | I::Ended => match self {
                Self::Waiting | Self::WaitingWord | Self::Granted | Self::GrantedPosted | Self::Aborting => true,
                Self::Ending | Self::Closed => false,
            },
            I::Manifest | I::Offer | I::Working | I::Stopped | I::Abort | I::Engine | I::Spare => false,
        }
    }

    /// Whether a rule-abiding driver can give the input in this state, with a session or without.
    #[must_use]
    pub const fn is_reached(self, up: bool, input: SenderInput) -> bool {
        use SenderInput as I;
        let exists = match self {
            // It needs the session, and loses the state with it.
            Self::WaitingWord | Self::Granted | Self::GrantedPosted => up,
            Self::Waiting | Self::Aborting | Self::Ending => true,
            // It is dropped at once.
            Self::Closed => false,
        };
        exists
            && match input {
                I::PeerUp | I::PeerDown | I::PeerRestarted | I::Computed | I::Fail | I::Cancel | I::Timeout => true,
                // Who has a session and waits for no word has not heard of a grant yet.
                I::PostedTaken | I::PostedLost => !(up && matches!(self, Self::Waiting)),
                // A newer grant comes after a session's end; under an older one nothing is taken, so all is never posted.
                I::Grant => up && !matches!(self, Self::GrantedPosted),
                // They come in a session that is up.
                I::Renew | I::Stop | I::Ended | I::Offer | I::Working | I::Stopped | I::Abort => up,
                // They belong to the session, not to a transfer.
                I::Manifest | I::Engine | I::Spare => false,
            }
    }

    const fn is_not_closed(self) -> bool {
        match self {
            Self::Waiting | Self::WaitingWord | Self::Granted | Self::GrantedPosted | Self::Aborting | Self::Ending => {
                true
            }
            Self::Closed => false,
        }
    }

    const fn sends(self) -> bool {
        match self {
            Self::Waiting | Self::WaitingWord | Self::Granted | Self::GrantedPosted => true,
            Self::Aborting | Self::Ending | Self::Closed => false,
        }
    }
}
