//! What the machines ask of their drivers.

use serde::{Deserialize, Serialize};

use super::rect::Rect;
use crate::ids::Generation;
use crate::message::{Grant, Message, Verdict};

/// Who speaks first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Order {
    /// The receiver grants as soon as the peer is up (pull).
    DecodeFirst,
    /// The receiver grants when the sender offered (push).
    PrefillFirst,
}

/// What a [`Receiver`](super::Receiver) asks of its driver.
#[derive(Clone, PartialEq, Debug)]
pub enum ReceiverOutput {
    /// Make a transport grant over the pages of these rectangles, and no others.
    MakeGrant {
        /// Name it by this in the answer.
        generation: Generation,
        /// What the peer may write.
        missing: Vec<Rect>,
    },
    /// Send on the control lane; if there is no session, drop it.
    Send(Message),
    /// Hash the bytes that landed.
    Verify {
        /// Under which grant they landed.
        generation: Generation,
        /// Which write of it.
        sequence: u32,
        /// Which bytes.
        rect: Rect,
    },
    /// The digest matched: attention may read these bytes from now on.
    Verified(Rect),
    /// Withdraw the grant, so that no byte of it lands any more.
    Revoke {
        /// Which grant.
        generation: Generation,
        /// Whether nothing is known to be posted under it: the sender said so, or the session is gone, or all that was asked
        /// for landed. A transport with a costly fence may skip none of it, but need not fear to hit a live write.
        quiet: bool,
    },
    /// The transfer is over on this side and the blocks are fenced. Comes exactly once, and nothing but `Send` after it.
    Finished(ReceiverEnd),
}

/// How a transfer ended on the receiving side.
#[derive(Clone, PartialEq, Debug)]
pub struct ReceiverEnd {
    /// The receiver's word.
    pub verdict: Verdict,
    /// What was verified, within what was wanted.
    pub good: Vec<Rect>,
    /// Tokens before this one are good in all wanted layers; the first wanted token if none is.
    pub good_until_token: u32,
}

/// What a [`Sender`](super::Sender) asks of its driver.
#[derive(Clone, PartialEq, Debug)]
pub enum SenderOutput {
    /// Posts of this grant's generation follow: they go into its window.
    Adopt(Grant),
    /// Write one rectangle into the window of the adopted grant.
    Post {
        /// Under which grant.
        generation: Generation,
        /// Which write of it, numbered from 0.
        sequence: u32,
        /// What to write; it lies inside one rectangle of the grant's `missing`.
        rect: Rect,
    },
    /// Cancel what is posted under this grant; nothing more will be posted under it.
    CancelPosts {
        /// Which grant.
        generation: Generation,
    },
    /// Send on the control lane; if there is no session, drop it.
    Send(Message),
    /// No post reads the blocks any more and none will: they may be used for anything else. Comes exactly once.
    ReleaseLease,
    /// The transfer is over on this side. Comes exactly once, after [`SenderOutput::ReleaseLease`]; only `Send` follows it.
    Finished(Verdict),
}

/// How a post ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PostOutcome {
    /// The receiver took all its bytes.
    Taken,
    /// Refused by the receiver, cancelled, or cut off: nothing more is posted under its grant.
    Lost,
}
