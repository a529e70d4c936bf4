//! What a worker says of itself when a session comes up: its manifest, and which part of the model it holds.

use std::ops::Range;

use bytes::Bytes;
use kvferry_protocol::layout::{KvLayout, Shard, heads_of};
use kvferry_protocol::manifest::{Manifest, Mismatch, compare};
use kvferry_protocol::transfer::Order;
use kvferry_protocol::{PeerId, codec};
use serde::{Deserialize, Serialize};

use crate::config::ConnectorConfig;
use crate::error::ConnectorError;

/// A worker's greeting; crosses the wire.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(super) struct WorkerCard {
    /// [`WorkerCard::VERSION`] of the sender.
    pub(super) version: u16,
    /// What its KV cache is.
    pub(super) manifest: Manifest,
    /// Which layers and heads it begins with.
    pub(super) shard: Shard,
    /// How many layers it holds.
    pub(super) layers: u16,
    /// How many KV heads it holds.
    pub(super) heads: u16,
    /// Of how many tensor-parallel ranks it is one.
    pub(super) tp_size: u16,
    /// Who speaks first, as its configuration says.
    pub(super) order: Order,
}

/// Why a peer's greeting is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The caches differ.
    #[error("{peer} holds another KV cache: {}; give both sides the same model and options", list(mismatches))]
    Mismatch {
        /// Who.
        peer: String,
        /// Every field that differs.
        mismatches: Vec<Mismatch>,
    },
    /// The peer's worker holds other layers.
    #[error("{peer} holds layers {theirs}, but this worker holds {ours}; give both engines the same pipeline stages")]
    Layers {
        /// Who.
        peer: String,
        /// This worker's.
        ours: String,
        /// The peer's.
        theirs: String,
    },
    /// The two wait for each other to speak.
    #[error(
        "{peer} is configured with order {theirs:?}, this worker with {ours:?}; write the same `order` on both sides"
    )]
    Order {
        /// Who.
        peer: String,
        /// This worker's.
        ours: Order,
        /// The peer's.
        theirs: Order,
    },
    /// The greeting cannot be read.
    #[error(
        "{peer} sent a greeting that this build cannot read: {problem}; run builds that are at most one release apart"
    )]
    Unreadable {
        /// Who.
        peer: String,
        /// Why.
        problem: String,
    },
}

/// How the greeting for the transport's handshake is made: it must be known before a transport is built.
///
/// # Errors
/// [`ConnectorError::Caches`] if the shape is not the manifest's.
pub fn greeting(
    config: &ConnectorConfig,
    manifest: &Manifest,
    shard: Shard,
    layout: &KvLayout,
) -> Result<Bytes, ConnectorError> {
    Ok(card(config, manifest, shard, layout)?.encode().into())
}

/// What a worker says of itself.
pub(super) fn card(
    config: &ConnectorConfig,
    manifest: &Manifest,
    shard: Shard,
    layout: &KvLayout,
) -> Result<WorkerCard, ConnectorError> {
    let shape = layout.shape();
    let end = |first: u16, count: u16| u32::from(first) + u32::from(count);
    let refuse = |problem: String| Err(ConnectorError::Caches { problem });
    if end(shard.first_layer.get(), shape.layers) > manifest.layers.into() {
        return refuse(format!(
            "layers from {} on, {} of them, but the model has {}",
            shard.first_layer, shape.layers, manifest.layers
        ));
    }
    let (tp_rank, tp_size) = (config.peer().tp_rank, config.tp_size().get());
    let heads = match heads_of(tp_rank, tp_size, manifest.kv_heads) {
        Ok(heads) => heads,
        Err(error) => return refuse(format!("{error}: tp_size is {tp_size}")),
    };
    if (shard.first_head, shape.heads) != (heads.start, heads.len() as u16) {
        return refuse(format!(
            "heads from {} on, {} of them, but tp_rank {tp_rank} of {tp_size} holds {heads:?} of the model's {}",
            shard.first_head, shape.heads, manifest.kv_heads
        ));
    }
    Ok(WorkerCard {
        version: WorkerCard::VERSION,
        manifest: manifest.clone(),
        shard,
        layers: shape.layers,
        heads: shape.heads,
        tp_size,
        order: config.order().into(),
    })
}

impl WorkerCard {
    pub(super) const VERSION: u16 = 2;

    /// The KV heads of the model that it holds.
    pub(super) const fn held_heads(&self) -> Range<u16> {
        self.shard.first_head..self.shard.first_head.saturating_add(self.heads)
    }

    /// The bytes for the transport's handshake.
    pub(super) fn encode(&self) -> Vec<u8> {
        // It is said before a version is agreed on: in the oldest one, which the release before this one reads, too.
        codec::encode_value("greeting", *codec::VERSIONS.start(), self).expect("a card is far below the codec's limit")
    }

    /// Reads a peer's greeting and compares it with ours.
    pub(super) fn check(&self, peer: &PeerId, greeting: &[u8]) -> Result<Self, Refusal> {
        let theirs: Self = codec::decode_value("greeting", greeting)
            .map_err(|error| Refusal::Unreadable { peer: peer.to_string(), problem: error.to_string() })?;
        if theirs.version != Self::VERSION {
            let problem = format!("version {}, ours is {}", theirs.version, Self::VERSION);
            return Err(Refusal::Unreadable { peer: peer.to_string(), problem });
        }
        compare(&self.manifest, &theirs.manifest)
            .map_err(|mismatches| Refusal::Mismatch { peer: peer.to_string(), mismatches })?;
        let layers = |card: &Self| (card.shard.first_layer.get(), card.layers);
        if layers(self) != layers(&theirs) {
            let show = |card: &Self| {
                let (first, count) = layers(card);
                format!("{first}..{}", u32::from(first) + u32::from(count))
            };
            return Err(Refusal::Layers { peer: peer.to_string(), ours: show(self), theirs: show(&theirs) });
        }
        // Heads may differ: each transfer looks whether the peer holds its part of them.
        if u32::from(theirs.shard.first_head) + u32::from(theirs.heads) > theirs.manifest.kv_heads.into() {
            let problem = format!("heads from {} on, {} of them", theirs.shard.first_head, theirs.heads);
            return Err(Refusal::Unreadable { peer: peer.to_string(), problem });
        }
        if self.order != theirs.order {
            return Err(Refusal::Order { peer: peer.to_string(), ours: self.order, theirs: theirs.order });
        }
        Ok(theirs)
    }
}

fn list(mismatches: &[Mismatch]) -> String {
    mismatches.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
