//! What happens to cached blocks, told to whoever routes requests: stored, removed, cleared.
//!
//! An event names blocks as an engine's own events do, so that a router that knows vLLM or SGLang needs nothing new. A batch is encoded
//! in one [`Dialect`], numbered and kept for a while by an [`EventLog`], and published by whoever owns a socket.
//!
//! **Events reveal prompts.** A stored block is told with its token ids, which anybody who has the tokenizer can read, and unsalted hashes
//! say which known prompts were seen. So nothing is published unless it is asked for, and then only where the configuration says.

mod encode;
mod log;
#[cfg(feature = "zmq")]
mod publisher;
#[cfg(test)]
mod tests;

use std::time::Duration;

use crate::pool::EventId;

pub use encode::Dialect;
pub use log::{EventLog, Numbered};
#[cfg(feature = "zmq")]
pub use publisher::{EventPublisher, EventsConfig, EventsError};

/// Events of one step, of one data-parallel rank.
#[derive(Clone, PartialEq, Debug)]
pub struct EventBatch {
    /// When, since the Unix epoch.
    pub at: Duration,
    /// In order.
    pub events: Vec<KvEvent>,
    /// The data-parallel rank that they are of, where there are several.
    pub dp_rank: Option<u32>,
}

/// What happened to blocks.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum KvEvent {
    /// Blocks can be found by their hashes.
    Stored(Stored),
    /// They cannot any more.
    Removed(Removed),
    /// None can.
    Cleared,
}

/// Blocks that follow one another in a sequence and can be found from now on.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Stored {
    /// Their names, in order.
    pub blocks: Vec<BlockName>,
    /// The name of the block before the first; none if that is the sequence's first.
    pub parent: Option<BlockName>,
    /// Their tokens, `tokens_per_block` of each.
    pub tokens: Vec<u32>,
    /// Tokens in a block.
    pub tokens_per_block: u32,
    /// The adapter that they are of.
    pub lora: Option<LoraName>,
    /// Where they are.
    pub medium: Option<Medium>,
    /// What else is in each block's name, one entry a block; empty: nothing in any.
    pub extra_keys: Vec<Vec<ExtraKey>>,
    /// The cache group that they are of, in an engine that has several.
    pub group: Option<GroupOf>,
    /// Whether they are the publisher's own.
    pub locality: Option<Locality>,
    /// What separates tenants, for SGLang, which tells it beside the name.
    pub salt: Option<String>,
}

/// Blocks that cannot be found any more.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Removed {
    /// Their names.
    pub blocks: Vec<BlockName>,
    /// Where they were; they may still be elsewhere.
    pub medium: Option<Medium>,
    /// The number of their cache group.
    pub group: Option<u32>,
    /// Whether they were the publisher's own.
    pub locality: Option<Locality>,
}

/// How an event names a block.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum BlockName {
    /// By 64 bits of its hash, as engines do unless they are told otherwise.
    Id(EventId),
    /// By all of it: vLLM with `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`.
    Digest(Vec<u8>),
}

/// An adapter.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LoraName {
    /// Its number in the engine, which older routers go by.
    pub id: Option<u32>,
    /// Its name.
    pub name: Option<String>,
}

/// A part of a block's name besides its tokens. Source: `BlockStored.extra_keys` in vLLM's `distributed/kv_events.py`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ExtraKey {
    /// An adapter's name or a salt.
    Text(String),
    /// A medium's identifier, and where it begins against the block's first token.
    Media(String, i64),
    /// A digest of prompt embeddings.
    Digest(Vec<u8>),
}

/// Which cache group blocks are of, and what kind of cache it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupOf {
    /// Its number.
    pub index: u32,
    /// vLLM's word for its kind, as `full_attention` or `sliding_window`.
    pub kind: Option<String>,
    /// The window in tokens, if it has one.
    pub window: Option<u32>,
}

/// Where blocks are. Each engine has words of its own; see [`Dialect`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Medium {
    /// An accelerator's memory.
    Device,
    /// Host memory.
    Host,
    /// A disk.
    Disk,
    /// A store that others share.
    External,
}

/// Whose blocks are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Locality {
    /// The publisher's.
    Local,
    /// Another's, that the publisher can reach.
    Remote,
}

impl From<EventId> for BlockName {
    fn from(id: EventId) -> Self {
        Self::Id(id)
    }
}
