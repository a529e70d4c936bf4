//! What a machine asks of its queue pairs, and what they say: requests, completions, and the trait between the two.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;

/// Names registered memory, on either side: the queue pair's owner knows the key of each device for it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Key(pub(crate) u32);

impl Key {
    /// The memory of a peer's queue pairs that a test pattern is read from, or written to.
    pub(crate) const PATTERN: Self = Self(u32::MAX);
}

/// Bytes that are contiguous on both sides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Run {
    /// Where they are read.
    pub(crate) local: u64,
    pub(crate) local_key: Key,
    /// Where they go.
    pub(crate) remote: u64,
    pub(crate) remote_key: Key,
    pub(crate) bytes: u64,
}

/// One write: its runs in order, and the word that tells the receiver what it is.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    /// The caller's name for it, which its end carries.
    pub(crate) id: u64,
    /// What the receiver gets with the landing.
    pub(crate) head: Bytes,
    pub(crate) runs: Vec<Run>,
    /// Whether it goes over all lanes, however short it is.
    pub(crate) is_spread: bool,
}

/// A contiguous local source of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Segment {
    pub(crate) address: u64,
    pub(crate) bytes: u32,
    pub(crate) key: Key,
}

/// What a queue pair does for one request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Request {
    /// Writes segments of the chain into the peer's memory, and with a tag consumes one of its receives.
    Write { remote: u64, remote_key: Key, segments: Range<usize>, tag: Option<u32> },
    /// Sends the first bytes of a staged word.
    Word { slot: usize, bytes: usize },
    /// Sends no bytes and a count.
    Credit { count: u32 },
}

/// A request with its number in its lane.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Posting {
    pub(crate) number: u64,
    pub(crate) request: Request,
    /// Whether its success makes a completion; a failure always does.
    pub(crate) is_signalled: bool,
}

/// Requests that are posted with one call.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    pub(crate) postings: Vec<Posting>,
    pub(crate) segments: Vec<Segment>,
    /// Of each posting how many bytes it has, and which write it ends a part of.
    pub(crate) books: Vec<(u64, Option<u32>)>,
}

impl Chain {
    pub(crate) fn clear(&mut self) {
        self.postings.clear();
        self.segments.clear();
        self.books.clear();
    }
}

/// Which queue of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    Send,
    Receive,
}

/// The end of a request.
#[derive(Clone, Debug)]
pub(crate) struct Completion {
    pub(crate) lane: usize,
    pub(crate) direction: Direction,
    /// The request's number in its lane and direction.
    pub(crate) number: u64,
    pub(crate) outcome: Result<Done, Fault>,
}

/// What a request that succeeded did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Done {
    /// The peer's device has taken a send request and those before it.
    Sent,
    /// A word came.
    Word(Bytes),
    /// A count came.
    Credit(u32),
    /// A write with a tag landed, and those before it in its lane.
    Tag(u32),
}

/// Why queue pairs do not go on.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// This side asked for it.
    #[error("fenced by this side")]
    Fenced,
    /// The queue pair went to error before this request, for a reason that another completion says.
    #[error("flushed: the queue pair is in error")]
    Flushed,
    /// The peer had posted no receive, for as long as the device tried.
    #[error("the peer has no receive posted: it is stuck, or does not keep to the window")]
    ReceiverNotReady,
    /// The peer's device did not answer.
    #[error(
        "the peer's device does not answer: the peer ended, or the path to it is cut (see that both GIDs reach each other)"
    )]
    Unreachable,
    /// The peer's device refused the address, the key or the length.
    #[error("the peer's device refused the access: the memory is not registered there for remote writes any more")]
    RemoteAccess,
    /// The own device refused the address, the key or the length.
    #[error("the device refused a local address: the source is not registered")]
    LocalAccess,
    /// Another failure that the device reports.
    #[error("the device reports {text} (status {status})")]
    Device {
        /// The status, as in `ibv_wc_status`.
        status: u32,
        /// The library's word for it.
        text: String,
    },
    /// A call on a queue pair failed.
    #[error("{call} failed: {text}")]
    Call {
        /// What was called.
        call: &'static str,
        /// The system's word.
        text: String,
    },
    /// A completion that must have come did not come before a later one.
    #[error("a completion was lost in queue pair {lane}")]
    Lost {
        /// Which of the peer's queue pairs.
        lane: usize,
    },
    /// Requests made no progress.
    #[error("no progress in queue pair {lane} for {waited:?}")]
    Stalled {
        /// Which of the peer's queue pairs.
        lane: usize,
        /// For how long.
        waited: Duration,
    },
    /// The peer did what the protocol does not allow.
    #[error("the peer broke the protocol: {0}")]
    Protocol(&'static str),
}

/// A chain or receives that were not posted, or not all.
#[derive(Clone, Debug)]
pub(crate) struct NotPosted {
    /// How many were.
    pub(crate) posted: usize,
    pub(crate) fault: Fault,
}

/// The queue pairs of one peer. Lane 0 carries words, the others payload.
pub(crate) trait Lanes {
    /// Fills the send buffer `slot`; its last use has ended.
    fn stage(&mut self, slot: usize, prefix: &[u8], head: &[u8]);

    /// Posts the chain, in order.
    fn post(&mut self, lane: usize, chain: &Chain) -> Result<(), NotPosted>;

    /// Posts receives `from..from + count`.
    fn receive(&mut self, lane: usize, from: u64, count: usize) -> Result<(), NotPosted>;

    /// Puts the queue pair into error: what is posted is flushed, and the peer can place nothing more once that completed.
    fn fail(&mut self, lane: usize);

    /// Ends all queue pairs. After this returns no device reads or writes anything for them.
    fn close(&mut self);
}
