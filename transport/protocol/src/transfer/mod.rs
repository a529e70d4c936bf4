//! The two machines of a transfer: [`Receiver`] and [`Sender`], one pair for each (transfer, peer endpoint); and [`Parts`], which makes
//! one load of several transfers.
//!
//! Sans-io: a driver hands in one input with the time, then performs every output until `poll_output` is `None`, then sleeps
//! until `poll_timeout` and calls `timeout`. An input that does not fit the state is a typed error, is counted, and changes
//! nothing; it never panics.
//!
//! # What a receiving driver does
//! | output | the driver |
//! |---|---|
//! | [`ReceiverOutput::MakeGrant`] | grants the pages of the missing rectangles to the peer, answers `granted` or `grant_refused` |
//! | [`ReceiverOutput::Send`] | sends it on the control lane |
//! | [`ReceiverOutput::Verify`] | hashes the rectangle's bytes, answers `digested`, or `digest_failed` |
//! | [`ReceiverOutput::Verified`] | makes the rectangle visible to attention |
//! | [`ReceiverOutput::Revoke`] | revokes the grant; when that returned, hands in what landed before it, then answers `fenced` |
//! | [`ReceiverOutput::Finished`] | tells the engine; only now may the blocks be used for anything else |
//!
//! # What a sending driver does
//! | output | the driver |
//! |---|---|
//! | [`SenderOutput::Adopt`] | reads the grant's window and keeps it for the posts of this generation |
//! | [`SenderOutput::Post`] | posts the rectangle with a [`Wrote`](crate::message::Wrote), answers `posted` when the transport ended it |
//! | [`SenderOutput::CancelPosts`] | cancels the generation's posts; each still ends in its `posted` |
//! | [`SenderOutput::Send`] | sends it on the control lane |
//! | [`SenderOutput::ReleaseLease`] | gives the blocks back to their pool |
//! | [`SenderOutput::Finished`] | tells the engine |

mod coverage;
mod early;
mod input;
mod lease;
mod output;
mod parts;
mod planted;
mod receiver;
mod rect;
mod sender;
mod sequences;
mod table;
mod time;

pub use coverage::{Coverage, TooFragmented};
pub use early::{Early, EarlyConfig, EarlyStats};
pub use input::{InputCounts, InputError};
#[cfg(feature = "sim")]
pub use lease::LeaseVisits;
pub use lease::{Lease, LeaseOver};
pub use output::{Order, PostOutcome, ReceiverEnd, ReceiverOutput, SenderOutput};
pub use parts::{Parts, PartsEnd, PartsError, PartsStep};
#[cfg(feature = "sim")]
pub use planted::Planted;
pub use receiver::{GrantRefusal, Receiver, ReceiverConfig, ReceiverConfigError, ReceiverStats};
pub use rect::{EmptyRect, Rect};
pub use sender::{Sender, SenderConfig, SenderStats};
#[cfg(feature = "sim")]
pub use table::EarlyFit;
pub use table::{
    EarlyInput, EarlyState, LeaseInput, LeaseState, MessageKind, ReceiverInput, ReceiverState, SenderInput, SenderState,
};
pub use time::Time;
