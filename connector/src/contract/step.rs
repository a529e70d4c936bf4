//! What crosses between the two halves: metadata down, results up. Versioned, and serialisable by the protocol's codec.

use std::ops::Range;

use kvferry_protocol::codec::{self, CodecError};
use kvferry_protocol::{BlockId, EngineId, PeerId, TpRank, TransferId};
use kvferry_transport::PeerAddress;
use serde::{Deserialize, Serialize};

use super::request::RequestId;
use super::tier::{TierMeta, TierResults};

/// What the engine runs in one step.
#[derive(Clone, Debug, Default)]
pub struct ScheduledStep {
    /// Each request with the tokens that the step computes for it.
    pub requests: Vec<ScheduledRequest>,
}

/// One request's part of a step.
#[derive(Clone, Debug)]
pub struct ScheduledRequest {
    /// Which.
    pub id: RequestId,
    /// Positions that the step computes.
    pub tokens: Range<u32>,
    /// All blocks of the request, in order from token 0.
    pub blocks: Vec<BlockId>,
}

/// Work of one step, scheduler to workers; the same for every rank.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct StepMeta {
    /// [`StepMeta::VERSION`] of the sender.
    pub version: u16,
    /// Loads to start.
    pub loads: Vec<Load>,
    /// Tokens that this step computes and a peer wants.
    pub saves: Vec<Save>,
    /// Requests that run in this step while their last layers still land.
    pub reading: Vec<RequestId>,
    /// Transfers to end: their request was aborted.
    pub cancels: Vec<Cancel>,
    /// Loads whose end the scheduler has taken: no later step reads while they land.
    pub settled: Vec<RequestId>,
    /// Blocks to keep and to bring.
    pub tier: TierMeta,
    /// Requests that lost their blocks since the last step: the engine calls [`Worker::preempted`](super::Worker::preempted) with
    /// them before anything of this step is written to the cache.
    pub preempted: Vec<RequestId>,
    /// Requests that have no blocks any more, or whose load failed: what they read in place is let go of before anything else of the step.
    pub finished: Vec<RequestId>,
    /// The engine is short of blocks: what peers hold in place of its own is asked back.
    pub recall: bool,
}

/// A transfer to end.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Cancel {
    /// Of which request.
    pub request: RequestId,
    /// The hand-over.
    pub transfer: TransferId,
    /// Which end of it.
    pub side: Side,
    /// For a keep of which nothing was computed yet, who waits for it: they must hear of the end, and nothing else would tell them.
    pub waiting: Option<Readers>,
}

/// Who reads a keep.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Readers {
    /// A worker of the decode engine, if the request named it.
    pub to: Option<PeerId>,
    /// How many ranks the decode engine has.
    pub count: u16,
}

/// Which end of a hand-over this engine is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Side {
    /// It loads.
    Load,
    /// It keeps what a peer loads.
    Keep,
}

/// One load: a decode side's receive.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Load {
    /// For which request.
    pub request: RequestId,
    /// The hand-over.
    pub transfer: TransferId,
    /// Where the prefill workers listen, by tensor-parallel rank.
    pub from: Vec<PeerAddress>,
    /// The prefill engine's name, where it is known.
    pub engine: Option<EngineId>,
    /// What its engine is asked, if the router did not ask it.
    pub ask: Vec<u8>,
    /// The request's blocks from the one that holds `tokens.start`.
    pub blocks: Vec<BlockId>,
    /// Positions to load; `start` is block-aligned. If there are none, the peer only hears that it may let go.
    pub tokens: Range<u32>,
    /// Whether the request may run as soon as its first layer is in.
    pub layerwise: bool,
}

/// One save: what a prefill step computes for a peer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Save {
    /// For which request.
    pub request: RequestId,
    /// The hand-over.
    pub transfer: TransferId,
    /// A worker of the decode engine, where prefill speaks first.
    pub to: Option<PeerId>,
    /// The decode engine's `tp_size`.
    pub readers: u16,
    /// All blocks of the request so far, from token 0.
    pub blocks: Vec<BlockId>,
    /// Positions whose KV is complete after this step (all of `0..computed` is).
    pub computed: u32,
    /// Tokens in the prompt; the save is the last one when `computed` reaches it.
    pub prompt_tokens: u32,
    /// Leading positions whose KV was in the cache before this step: computed by an earlier one, shared, or brought by a tier.
    pub ready: u32,
    /// Leading positions that this step does not compute for this request: `ready` or more, since an engine may share what another
    /// request of the same step computes.
    pub cached: u32,
    /// Whether this is the request's first save, which begins the transfer. A later one whose transfer is over is void: the
    /// scheduler has not heard of the end yet.
    pub first: bool,
}

/// What one rank reports, worker to scheduler.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct StepResults {
    /// [`StepMeta::VERSION`] of the sender.
    pub version: u16,
    /// Who reports.
    pub tp_rank: TpRank,
    /// Layerwise loads whose first layer is verified: they may run, and `wait_layer` waits for the rest.
    pub started: Vec<RequestId>,
    /// Loads that are verified in all layers.
    pub loaded: Vec<RequestId>,
    /// Loads that ended without all their tokens. Nothing writes to their blocks any more.
    pub failed: Vec<LoadFailure>,
    /// Sends that ended, whatever their verdict: nothing reads their blocks any more.
    pub sent: Vec<RequestId>,
    /// Requests of which something was read in place and is not what it was: what was computed with it since the last report is void.
    pub withdrawn: Vec<LoadFailure>,
    /// Blocks that were kept and brought.
    pub tier: TierResults,
}

/// A load that ended without all its tokens: a miss, not a disaster.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct LoadFailure {
    /// Which request.
    pub request: RequestId,
    /// Leading positions, counted from token 0, whose KV is verified in all layers; a multiple of the block size.
    pub good_tokens: u32,
    /// The blocks that hold verified tokens, a prefix of the load's.
    pub good_blocks: Vec<BlockId>,
    /// Why, for a log and for the client.
    pub reason: String,
}

/// What a step's results mean to the engine, over all ranks.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Applied {
    /// Requests to schedule.
    pub loaded: Vec<RequestId>,
    /// Requests to recompute or fail; surfaces also after `loaded` where layers were used while they landed.
    pub failed: Vec<LoadFailure>,
    /// Requests whose part of this step is void, though their verdict is still to come.
    pub void: Vec<RequestId>,
    /// Requests to compute from their good prefix on, whatever the policy for failed loads: the tier had less than it promised.
    pub missed: Vec<LoadFailure>,
    /// Requests whose held blocks are the engine's again.
    pub released: Vec<RequestId>,
    /// Requests that the engine still computes although nobody will take their KV any more: it may abort them.
    pub unwanted: Vec<RequestId>,
}

/// Metadata that another build of kvferry made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "step metadata of version {found}, but this worker reads version {}; run one build in scheduler and workers",
    StepMeta::VERSION
)]
pub struct BadStep {
    /// The version found.
    pub found: u16,
}

impl Load {
    /// Whether the request ended, or was refused, before it had blocks: nobody wants the peer's any more. A request that has all of
    /// them itself ends at its prompt's end, which is not 0.
    #[must_use]
    pub const fn is_unwanted(&self) -> bool {
        self.tokens.end == 0
    }
}

impl StepMeta {
    /// Version of both values; scheduler and workers must agree.
    pub const VERSION: u16 = 5;

    /// The bytes in which it goes to the workers, where they are other processes.
    ///
    /// # Errors
    /// [`CodecError::TooLong`] over [`codec::MAX_LOCAL_BYTES`].
    pub fn to_bytes(&self) -> Result<Vec<u8>, CodecError> {
        codec::encode_local("step metadata", self)
    }

    /// Reads the bytes of [`StepMeta::to_bytes`]. Whoever takes the step compares its version.
    ///
    /// # Errors
    /// [`CodecError`] for bytes that are no step's.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, CodecError> {
        codec::decode_local("step metadata", bytes)
    }

    /// Whether there is nothing to do; what is settled can wait for a later step, and blocks are short only where steps go on.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.loads.is_empty()
            && self.saves.is_empty()
            && self.reading.is_empty()
            && self.cancels.is_empty()
            && self.preempted.is_empty()
            && self.finished.is_empty()
            && self.tier == TierMeta::default()
    }
}

impl Default for StepMeta {
    fn default() -> Self {
        let (loads, saves, reading, cancels, settled, tier, preempted, finished, recall) = Default::default();
        Self { version: Self::VERSION, loads, saves, reading, cancels, settled, tier, preempted, finished, recall }
    }
}

impl StepResults {
    /// Nothing happened.
    #[must_use]
    pub fn empty(tp_rank: TpRank) -> Self {
        let (started, loaded, failed, sent, withdrawn, tier) = Default::default();
        Self { version: StepMeta::VERSION, tp_rank, started, loaded, failed, sent, withdrawn, tier }
    }

    /// Whether nothing happened.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.started.is_empty()
            && self.loaded.is_empty()
            && self.failed.is_empty()
            && self.sent.is_empty()
            && self.withdrawn.is_empty()
            && self.tier == TierResults::default()
    }

    /// The bytes in which it goes to the scheduler half, where that is another process.
    ///
    /// # Errors
    /// [`CodecError::TooLong`] over [`codec::MAX_LOCAL_BYTES`].
    pub fn to_bytes(&self) -> Result<Vec<u8>, CodecError> {
        codec::encode_local("step results", self)
    }

    /// Reads the bytes of [`StepResults::to_bytes`].
    ///
    /// # Errors
    /// [`CodecError`] for bytes that are no results.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, CodecError> {
        codec::decode_local("step results", bytes)
    }
}
