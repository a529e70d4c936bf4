//! What the two ends of a transfer say to each other on the control lane, and the notification that a write carries.
//!
//! | message | from | to | meaning |
//! |---|---|---|---|
//! | [`Manifest`] | both | both | what the KV cache is; compared before the first transfer |
//! | [`Offer`] | sender | receiver | "I lease this"; prefill speaks first |
//! | [`Grant`] | receiver | sender | "write these rectangles, under this generation" |
//! | [`Renew`] | receiver | sender | "I still want it: keep the lease this long from now" |
//! | [`Working`] | sender | receiver | "nothing to send yet: the engine computes, or the request waits for it"; answers a Renew |
//! | [`Stop`] | receiver | sender | "post nothing more under this generation, and tell me when nothing is posted" |
//! | [`Stopped`] | sender | receiver | "nothing is posted under that generation, and nothing will be" |
//! | [`Abort`] | sender | receiver | "I shall send no more, because ...; what is your word?" |
//! | [`Ended`] | receiver | sender | the receiver's word; it decides |
//! | [`Ended`] | sender | receiver | the sender ended, too; nothing more will come from it |
//! | [`Spare`] | sender | receiver | "your tier may keep these blocks": answered by a Grant, or by Ended |
//! | [`Engine`](Message::Engine) | both | both | opaque to kvferry |
//!
//! A session carries what its version has ([`Message::since`]). Only durations cross the wire. Every length is limited, see the constants of each type.

mod bounded;
mod verdict;

use serde::{Deserialize, Serialize};

pub use bounded::{EngineBytes, HashBytes, Missing, OpaqueKey, Text, TooLong, WindowBytes};
pub use verdict::{Failure, Reason, Verdict};

use crate::digest::Digest;
use crate::ids::{Generation, TransferId};
use crate::manifest::Manifest;
use crate::transfer::Rect;

/// One message on the control lane. The order of the variants is the wire format: append only.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Message {
    /// What this side's KV cache is.
    Manifest(Box<Manifest>),
    /// The sender leases blocks for a transfer.
    Offer(Offer),
    /// The receiver permits writes.
    Grant(Grant),
    /// The receiver still wants the transfer.
    Renew(Renew),
    /// The receiver withdraws a grant.
    Stop(Stop),
    /// Nothing is posted under a withdrawn grant.
    Stopped(Stopped),
    /// The sender will send no more.
    Abort(Abort),
    /// One side's verdict.
    Ended(Ended),
    /// Bytes between the two engines; kvferry carries them in order and does not read them.
    Engine(EngineBytes),
    /// The sender has nothing to send yet.
    Working(Working),
    /// The sender has blocks that the receiver's tier may keep.
    Spare(Spare),
}

/// The sender's blocks for a transfer: what is leased, computed or still to be computed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Offer {
    /// Which transfer.
    pub transfer: TransferId,
    /// All tokens and layers that the sender will have.
    pub held: Rect,
}

/// The receiver's permission to write exactly the missing rectangles, until revoked.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Grant {
    /// Which transfer.
    pub transfer: TransferId,
    /// Which grant of it; each is made once, and a higher one replaces a lower one.
    pub generation: Generation,
    /// The transport's key of the window.
    pub key: OpaqueKey,
    /// How long from its arrival the receiver wants the sender to keep its lease, in milliseconds.
    pub ttl_ms: u32,
    /// How the window is laid out; opaque here, the layout algebra reads it.
    pub window: WindowBytes,
    /// What is still wanted; each cell of it is written at most once under this generation.
    pub missing: Missing,
}

/// The receiver still wants the transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Renew {
    /// Which transfer.
    pub transfer: TransferId,
    /// How long from its arrival the sender is asked to keep its lease, in milliseconds.
    pub ttl_ms: u32,
}

/// The sender has nothing to send yet, but its engine has the request: silence is not a stall.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Working {
    /// Which transfer.
    pub transfer: TransferId,
}

/// The sender has complete blocks of a sequence that the receiver's tier may keep. The receiver grants the part that it wants, or
/// answers with Ended: a refusal is normal, and cheap.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Spare {
    /// Which transfer carries them.
    pub transfer: TransferId,
    /// The place in the sequence of the first block's first token.
    pub first_token: u32,
    /// Tokens in one of the blocks; the hashes say nothing about blocks of another size.
    pub tokens_per_block: u32,
    /// The blocks' chained hashes, [`HashBytes::EACH`] bytes each.
    pub hashes: HashBytes,
}

impl Spare {
    /// One past the last token of so many blocks; `None` if there is no such place, whatever the peer says.
    #[must_use]
    pub fn end_token(&self, blocks: usize) -> Option<u32> {
        let tokens = u32::try_from(blocks).ok()?.checked_mul(self.tokens_per_block)?;
        self.first_token.checked_add(tokens)
    }
}

/// The receiver withdraws a grant and asks for the sender's word that nothing is posted under it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Stop {
    /// Which transfer.
    pub transfer: TransferId,
    /// Which grant of it; all lower ones are meant, too.
    pub generation: Generation,
}

/// The sender's word that nothing is posted under a grant, and nothing will be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Stopped {
    /// Which transfer.
    pub transfer: TransferId,
    /// As in the [`Stop`] that this answers.
    pub generation: Generation,
}

/// The sender will send no more and waits for the receiver's word.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Abort {
    /// Which transfer.
    pub transfer: TransferId,
    /// `Failed` or `Cancelled`; a receiver that is not done yet takes it as its own verdict.
    pub why: Verdict,
}

/// One side's verdict, final.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Ended {
    /// Which transfer.
    pub transfer: TransferId,
    /// How it ended on the side that says so.
    pub verdict: Verdict,
}

/// The notification of one write: it travels with the payload and arrives after all its bytes landed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Wrote {
    /// Which transfer.
    pub transfer: TransferId,
    /// Under which grant of it.
    pub generation: Generation,
    /// Which write of the grant, numbered from 0.
    pub sequence: u32,
    /// The tokens and layers that the write fills.
    pub rect: Rect,
    /// Of the bytes, made where they left the device.
    pub digest: Digest,
}

impl Message {
    /// The transfer that it belongs to; `None` for what belongs to the session.
    #[must_use]
    pub const fn transfer(&self) -> Option<TransferId> {
        match self {
            Self::Manifest(_) | Self::Engine(_) => None,
            Self::Offer(m) => Some(m.transfer),
            Self::Grant(m) => Some(m.transfer),
            Self::Renew(m) => Some(m.transfer),
            Self::Working(m) => Some(m.transfer),
            Self::Stop(m) => Some(m.transfer),
            Self::Stopped(m) => Some(m.transfer),
            Self::Abort(m) => Some(m.transfer),
            Self::Ended(m) => Some(m.transfer),
            Self::Spare(m) => Some(m.transfer),
        }
    }

    /// The first version of the protocol that has it.
    #[must_use]
    pub const fn since(&self) -> u16 {
        match self {
            Self::Manifest(_)
            | Self::Offer(_)
            | Self::Grant(_)
            | Self::Renew(_)
            | Self::Stop(_)
            | Self::Stopped(_)
            | Self::Abort(_)
            | Self::Ended(_)
            | Self::Engine(_)
            | Self::Working(_) => 1,
            Self::Spare(_) => 2,
        }
    }

    /// Its name, for errors, logs and metrics.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Manifest(_) => "Manifest",
            Self::Offer(_) => "Offer",
            Self::Grant(_) => "Grant",
            Self::Renew(_) => "Renew",
            Self::Stop(_) => "Stop",
            Self::Stopped(_) => "Stopped",
            Self::Abort(_) => "Abort",
            Self::Ended(_) => "Ended",
            Self::Engine(_) => "Engine",
            Self::Working(_) => "Working",
            Self::Spare(_) => "Spare",
        }
    }
}
