//! The names of states and inputs, and the one table of which input fits which state.
//!
//! [`takes`](ReceiverState::takes) is what a machine does with an input whose parameters fit (its generation, sequence and session
//! are the ones that the machine waits for): it takes it, or it refuses it with a typed error and changes nothing. Inputs with other
//! parameters are refused in every state. [`is_reached`](ReceiverState::is_reached) is whether a driver that follows the rules,
//! over a transport that keeps its promises, can bring the pair about at all. Both are matched out in full: a new state or input
//! does not compile until it has its place here. The tests of this module drive each machine into every state and give it every
//! input; the simulator counts which pairs it saw.

mod early;
mod lease;
mod receiver;
mod sender;

use crate::message::Message;

#[cfg(feature = "sim")]
pub use early::EarlyFit;
pub use early::{EarlyInput, EarlyState};
pub use lease::{LeaseInput, LeaseState};
pub use receiver::{ReceiverInput, ReceiverState};
pub use sender::{SenderInput, SenderState};

/// An enum without fields that knows all its values and their names.
macro_rules! kinds {
    ($(#[$doc:meta])* $name:ident { $($(#[$kind_doc:meta])* $kind:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
        pub enum $name {
            $($(#[$kind_doc])* $kind,)+
        }

        impl $name {
            /// All of them, in order.
            pub const ALL: &'static [Self] = &[$(Self::$kind,)+];

            /// Its name, for errors, logs and metrics.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $text,)+
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}
use kinds;

kinds! {
    /// What kind of message it is.
    MessageKind {
        /// [`Message::Manifest`].
        Manifest = "Manifest",
        /// [`Message::Offer`].
        Offer = "Offer",
        /// [`Message::Grant`].
        Grant = "Grant",
        /// [`Message::Renew`].
        Renew = "Renew",
        /// [`Message::Stop`].
        Stop = "Stop",
        /// [`Message::Stopped`].
        Stopped = "Stopped",
        /// [`Message::Abort`].
        Abort = "Abort",
        /// [`Message::Ended`].
        Ended = "Ended",
        /// [`Message::Engine`].
        Engine = "Engine",
        /// [`Message::Working`].
        Working = "Working",
        /// [`Message::Spare`].
        Spare = "Spare",
    }
}

impl From<&Message> for MessageKind {
    fn from(message: &Message) -> Self {
        match message {
            Message::Manifest(_) => Self::Manifest,
            Message::Offer(_) => Self::Offer,
            Message::Grant(_) => Self::Grant,
            Message::Renew(_) => Self::Renew,
            Message::Stop(_) => Self::Stop,
            Message::Stopped(_) => Self::Stopped,
            Message::Abort(_) => Self::Abort,
            Message::Ended(_) => Self::Ended,
            Message::Engine(_) => Self::Engine,
            Message::Working(_) => Self::Working,
            Message::Spare(_) => Self::Spare,
        }
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests;
