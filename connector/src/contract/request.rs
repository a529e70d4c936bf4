//! What the scheduler half says of one request.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use kvferry_protocol::{BlockId, EngineId, PeerId, TransferId};
use kvferry_transport::PeerAddress;
use serde::{Deserialize, Serialize};

use crate::pool::BlockHash;

/// The engine's own id of a piece of work; never leaves the engine as an identity.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(Arc<str>);

impl RequestId {
    /// Takes the engine's id as it is.
    #[must_use]
    pub fn new(id: &str) -> Self {
        Self(id.into())
    }

    /// The engine's id.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What the connector must know of a request.
#[derive(Clone, Debug)]
pub struct Request {
    /// The engine's id.
    pub id: RequestId,
    /// Tokens in the prompt.
    pub prompt_tokens: u32,
    /// What the router said about its transfer; `None` for a request that stays local.
    pub params: Option<TransferParams>,
    /// Identities of the prompt's complete blocks, from token 0 ([`BlockHasher::chain`](crate::pool::BlockHasher::chain)); empty
    /// for a request that no tier shall keep or bring.
    pub hashes: Arc<[BlockHash]>,
}

/// A request's part in a transfer, as the router or the peer engine made it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TransferParams {
    /// On the decode side: fetch the prompt's KV from a prefill engine (vLLM's `do_remote_prefill`).
    Fetch {
        /// The hand-over.
        transfer: TransferId,
        /// Where the prefill engine's workers listen, by tensor-parallel rank: one address a rank, all of them.
        from: Vec<PeerAddress>,
        /// The prefill engine's name, where it is known: nobody else may answer, and a session that its workers dialled, or that
        /// leads to them by another address, is as good as one to `from`.
        engine: Option<EngineId>,
        /// An engine message that asks for the prompt, carried ahead of the grant and again after a cut, so the prefill engine
        /// takes the second one for the first; empty where a router has asked.
        ask: Vec<u8>,
    },
    /// On the prefill side: keep the prompt's KV for a decode engine (vLLM's `do_remote_decode`).
    Keep {
        /// The hand-over.
        transfer: TransferId,
        /// A worker of the decode engine, where prefill speaks first; with decode first its workers make themselves known by their
        /// grants. Its other ranks are those of the same engine and incarnation.
        to: Option<PeerId>,
        /// The decode engine's `tp_size`: from it each rank knows who reads from it.
        readers: u16,
    },
}

/// How many tokens can be loaded from outside. `Async(0)` cannot be built.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Match {
    /// None: compute the prompt.
    None,
    /// Not known yet: ask again in a later step.
    Later,
    /// So many, and the request may be scheduled in this step: `wait_layer` waits for each layer.
    Sync(NonZeroU32),
    /// So many, while other requests run; the request is scheduled once [`Applied::loaded`](super::Applied) names it.
    Async(NonZeroU32),
}

/// How the engine ended a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EngineFinish {
    /// All was computed.
    Complete,
    /// The client or the engine gave up on it.
    Aborted,
}

/// Who owns a finished request's blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Hold {
    /// The engine: free them now.
    Free,
    /// The connector, until [`Applied::released`](super::Applied) names the request.
    Until {
        /// What the router passes to the other side; `None` if only a tier still reads the blocks.
        transfer: Option<TransferId>,
        /// The blocks that are held.
        blocks: Vec<BlockId>,
    },
}
