//! What crosses between the two halves for a tier: blocks to keep and to bring down, what came of it up.

use kvferry_protocol::{BlockId, PeerId, TpRank, TransferId};
use kvferry_transport::PeerAddress;
use serde::{Deserialize, Serialize};

use super::request::RequestId;
use super::step::LoadFailure;
use crate::pool::BlockHash;

/// A tier's work of one step, scheduler to workers; the same for every rank.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct TierMeta {
    /// Blocks to keep once this step's tokens are in the cache.
    pub stores: Vec<Store>,
    /// Blocks to bring.
    pub restores: Vec<Restore>,
    /// Requests that are over and whose blocks wait for their stores: soon, or not at all.
    pub hurried: Vec<RequestId>,
    /// Blocks to send back to the tier of the engine that computed their prompt, once this step's tokens are in the cache.
    pub returns: Vec<Return>,
    /// Blocks of peers to take into the tier.
    pub takes: Vec<Take>,
    /// Peers' blocks that the tier does not take.
    pub refusals: Vec<Refuse>,
}

/// One block to keep.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Store {
    /// Numbers the scheduler's orders to the tier.
    pub order: u64,
    /// Whose block.
    pub request: RequestId,
    /// The complete block in the engine's cache.
    pub block: BlockId,
    /// The place in the sequence of its first token.
    pub first_token: u32,
    /// Where the tier keeps it.
    pub frame: BlockId,
}

/// Blocks to bring for one request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Restore {
    /// Numbers the scheduler's orders to the tier.
    pub order: u64,
    /// For which request.
    pub request: RequestId,
    /// The request's blocks that are filled, consecutive in the sequence.
    pub blocks: Vec<BlockId>,
    /// Where the tier keeps them; fewer than the blocks if some were evicted meanwhile: then the load ends short.
    pub frames: Vec<BlockId>,
    /// The place in the sequence of the first block's first token.
    pub first_token: u32,
}

/// Complete blocks of an answer, to be sent back.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Return {
    /// Whose.
    pub request: RequestId,
    /// The transfer that carries them; never the one that brought the prompt.
    pub transfer: TransferId,
    /// Where the prefill engine's workers listen, by rank; a rank sends to the one of its own number.
    pub to: Vec<PeerAddress>,
    /// All blocks of the request up to the last one that is sent, from token 0.
    pub blocks: Vec<BlockId>,
    /// The place in the sequence of the first token that is sent.
    pub first_token: u32,
    /// Of the blocks that are sent.
    pub hashes: Vec<BlockHash>,
}

/// Blocks of a peer that the tier takes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Take {
    /// The peer's transfer.
    pub transfer: TransferId,
    /// Who sends: the worker of this rank in the peer's engine.
    pub from: PeerId,
    /// The place in the sequence of the first block's first token.
    pub first_token: u32,
    /// A store's number and frame for each block; each is reported as a store is.
    pub stores: Vec<(u64, BlockId)>,
}

/// Blocks of a peer that the tier does not take.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Refuse {
    /// The peer's transfer.
    pub transfer: TransferId,
    /// Who offered them.
    pub to: PeerId,
}

/// Blocks that a peer offers.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Offered {
    /// Its transfer.
    pub transfer: TransferId,
    /// Who.
    pub from: PeerId,
    /// The place in the sequence of the first block's first token.
    pub first_token: u32,
    /// Tokens in one of its blocks.
    pub tokens_per_block: u32,
    /// Of the blocks.
    pub hashes: Vec<BlockHash>,
}

/// What one rank's tier reports, worker to scheduler.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct TierResults {
    /// How far stores got, in order.
    pub kept: Vec<Kept>,
    /// Restores that ended, complete or not.
    pub restored: Vec<Restored>,
    /// Blocks that peers offer.
    pub offered: Vec<Offered>,
    /// Returns that are over, however they ended: nothing reads their blocks any more.
    pub returned: Vec<TransferId>,
}

/// How far one store got on one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Kept {
    /// Which.
    pub order: u64,
    /// How far.
    pub stage: StoreStage,
}

/// How far a store got.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum StoreStage {
    /// The engine's pages are not read any more.
    Copied,
    /// The tier does not answer; the frame stays taken until it does.
    Late,
    /// The tier has it.
    Stored,
    /// The tier has it not, and nothing reads or writes its frame.
    Dropped,
}

/// A restore that ended on one rank: nothing writes to its blocks any more.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Restored {
    /// Which.
    pub order: u64,
    /// What is missing, if something is.
    pub failure: Option<LoadFailure>,
    /// Frames whose bytes did not have their digest.
    pub spoiled: Vec<BlockId>,
}

/// Which ranks have spoken about one thing.
pub(crate) type Spoken = std::collections::BTreeSet<TpRank>;
