//! Nodes whose engines hand over KV: kvferry's two objects beside an engine, and what a prefill node does with what it is asked.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use crossbeam_channel::{Receiver, select};
use kvferry::config::{ConfigError, ConnectorConfig, RawConfig, SameHost};
use kvferry::contract::TransferParams;
use kvferry::metrics::Metrics;
use kvferry::pd::{PdHandle, PdScheduler, PdWorker, PdWorkerParts, SchedulerOptions, greeting};
use kvferry::tier::{FrameIndex, HostTier};
use kvferry::trace::Tracer;
use kvferry::{ConnectorError, open_transport};
use kvferry_kernels::KvDtype;
use kvferry_protocol::layout::sources_of;
use kvferry_protocol::manifest::{self, Manifest, Planes, Rope, RopeStyle, ScalePer, Scales};
use kvferry_protocol::{Incarnation, PeerId, TpRank, TransferId};
use kvferry_transport::PeerAddress;

use crate::engine::{EngineHandle, EngineService, Publish, Runner, Scheduler, Submission, Ticket, Update};
use crate::messages::Ask;
use crate::node::{LoadedModel, NodeConfig, NodeError};
use crate::prefills::{PrefillAddress, PrefillRouter, PrefillsError};

/// An engine with kvferry beside it: a connector for each of its tensor-parallel ranks.
pub struct PdNode {
    /// The engine.
    pub engine: EngineService,
    /// kvferry's metrics, by rank.
    pub metrics: Vec<Arc<Metrics>>,
    /// Where peers reach this node's workers, by rank.
    pub addresses: Vec<PeerAddress>,
    /// What peers' engines ask of this one.
    pub messages: Receiver<(PeerId, Bytes)>,
    /// Says that a peer waits for a step of this engine.
    pub wakes: Receiver<()>,
    /// kvferry, for other threads than the engine's, by rank.
    pub connectors: Vec<PdHandle>,
    kv_heads: u16,
}

/// Why a node with a connector does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PdError {
    /// The engine does not start.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The connector does not start.
    #[error(transparent)]
    Connector(#[from] ConnectorError),
    /// The prefill nodes do not fit this engine.
    #[error(transparent)]
    Prefills(#[from] PrefillsError),
    /// The transport is one that other processes do not reach.
    #[error("{address:?} is no TCP address; write transport = \"tcp\"")]
    Address {
        /// What it listens at.
        address: PeerAddress,
    },
    /// The system gives no random numbers.
    #[error("the system gives no random numbers: {0}")]
    Random(getrandom::Error),
}

impl PdNode {
    /// Starts an engine and a connector for each of its ranks. All ranks are one engine: they share its name and its incarnation.
    /// Rank n listens at `raw`'s port and n more, or at a free one where that is 0.
    ///
    /// # Errors
    /// [`PdError`].
    pub fn start(model: &LoadedModel, node: &NodeConfig, raw: RawConfig) -> Result<Self, PdError> {
        Self::start_traced(model, node, raw, &Tracer::off(), None)
    }

    /// The same, and records what happens to K/V, and tells what its cache came to have and to lose.
    ///
    /// # Errors
    /// [`PdError`].
    pub fn start_traced(
        model: &LoadedModel,
        node: &NodeConfig,
        raw: RawConfig,
        tracer: &Tracer,
        publish: Option<Publish>,
    ) -> Result<Self, PdError> {
        let incarnation = Incarnation::new(random_bits()? as u64);
        let rank_config = |rank| ConnectorConfig::try_from((of_rank(&raw, rank, node.tp_size), incarnation));
        let first = rank_config(0)?;
        let in_place = first.network().same_host == SameHost::InPlace;
        let node = NodeConfig { on_load_failure: first.load_failure_policy(), in_place, ..*node };
        let runner = Runner::new(Arc::clone(&model.model), node.cache()).map_err(NodeError::from)?;
        let manifest = manifest_of(model, node.dtype);
        let mut workers = Vec::new();
        let mut metrics = Vec::new();
        for (number, rank) in (0..).zip(runner.ranks()) {
            let (config, shard, cache) = (rank_config(number)?, rank.shard(), rank.cache());
            let transport = open_transport(&config, greeting(&config, &manifest, shard, cache.layout())?)?;
            metrics.push(Arc::new(Metrics::new()));
            let (manifest, metrics) = (manifest.clone(), Arc::clone(&metrics[usize::from(number)]));
            let parts = PdWorkerParts { config, manifest, shard, cache, metrics };
            let tracer = if node.tp_size == 1 { tracer.clone() } else { tracer.labelled(&format!("rank {number}")) };
            workers.push(PdWorker::start_traced(parts, transport, tracer)?);
        }
        let addresses = workers.iter().map(PdWorker::local_address).collect();
        // Rank 0 asks and is asked, for all ranks.
        let (messages, wakes) = (workers[0].messages().clone(), workers[0].wakes().clone());
        let connectors = workers.iter().map(PdWorker::handle).collect();
        let tokens_per_block = NonZeroU32::new(node.tokens_per_block).unwrap_or(NonZeroU32::MIN);
        let (reporters, layerwise) = (workers.len() as u16, first.layerwise());
        let options = SchedulerOptions { tokens_per_block, reporters, layerwise };
        let mut half = PdScheduler::new(options).with_returns(first.limits().write_back_blocks);
        if in_place {
            half = half.with_reading_in_place();
        }
        // Every rank holds as many: heads spread evenly.
        let frames =
            runner.ranks().first().map_or(0, |rank| HostTier::frames(rank.cache().layout(), first.limits().tier_bytes));
        if frames > 0 {
            let index = FrameIndex::new(frames).map_err(NodeError::from)?;
            half = half.with_tier(Box::new(index), Arc::clone(&metrics[0]));
        }
        let hasher = node.hasher(model).map_err(NodeError::from)?;
        let scheduler = Scheduler::new(node.scheduler(&model.model), half).map_err(NodeError::from)?;
        let scheduler = scheduler.with_names(hasher);
        let engine = EngineService::start_publishing(scheduler, runner, workers, publish).map_err(NodeError::Thread)?;
        Ok(Self { engine, metrics, addresses, messages, wakes, connectors, kv_heads: manifest.kv_heads })
    }

    /// Reaches prefill nodes, and sends prompts to them in turn.
    ///
    /// # Errors
    /// [`PdError::Prefills`].
    pub fn router(&self, nodes: &[PrefillAddress]) -> Result<PrefillRouter, PdError> {
        Ok(PrefillRouter::new(nodes, &self.connectors, self.kv_heads)?)
    }

    /// Where another node's `--prefill` finds this one.
    ///
    /// # Errors
    /// [`PdError::Address`] if a rank is not reached over TCP.
    pub fn prefill_address(&self) -> Result<PrefillAddress, PdError> {
        let tcp = |&address: &PeerAddress| match address {
            PeerAddress::Tcp(address) => Ok(address),
            _ => Err(PdError::Address { address }),
        };
        Ok(PrefillAddress::from(self.addresses.iter().map(tcp).collect::<Result<Vec<_>, _>>()?))
    }

    /// Prefills what peers ask for until `stop` is set; blocks the calling thread.
    pub fn serve_prefill(&self, stop: &AtomicBool) {
        let mut desk = PrefillDesk::of(self);
        while !stop.load(Ordering::Acquire) {
            select! {
                recv(self.messages) -> message => match message {
                    Ok((peer, message)) => desk.hear(&peer, &message),
                    Err(_) => return,
                },
                recv(self.wakes) -> wake => match wake {
                    Ok(()) => desk.engine.wake(),
                    Err(_) => return,
                },
                default(DESK_WAIT) => {}
            }
            desk.put_away_finished();
        }
    }
}

/// How long a prefill node waits for messages before it looks whether requests have finished.
const DESK_WAIT: Duration = Duration::from_millis(20);
/// Hand-overs that are remembered, so that a question that is asked again is not answered twice.
const REMEMBERED: usize = 8192;

/// What a prefill node is computing, and for whom.
struct PrefillDesk {
    engine: EngineHandle,
    /// Rank 0's, which is asked.
    connector: PdHandle,
    tp_size: u16,
    kv_heads: u16,
    /// Dropping a ticket would cancel its request.
    running: HashMap<TransferId, Ticket>,
    seen: HashSet<TransferId>,
    oldest: VecDeque<TransferId>,
}

impl PrefillDesk {
    fn of(node: &PdNode) -> Self {
        let (running, seen, oldest) = Default::default();
        let (engine, connector) = (node.engine.handle(), node.connectors[0].clone());
        let (tp_size, kv_heads) = (node.connectors.len() as u16, node.kv_heads);
        Self { engine, connector, tp_size, kv_heads, running, seen, oldest }
    }

    fn hear(&mut self, peer: &PeerId, message: &[u8]) {
        let ask = match Ask::decode(message) {
            Ok(ask) => ask,
            Err(error) => return tracing::warn!(%peer, %error, "a message was not understood"),
        };
        if !self.remember(ask.transfer) {
            return;
        }
        // Known from the start, so that its end ends the transfer, whoever speaks first.
        let to = Some(peer.clone());
        let (transfer, readers) = (ask.transfer, ask.ranks);
        if let Err(error) = sources_of(TpRank::new(0), readers, self.tp_size, self.kv_heads) {
            return self.decline(peer, transfer, &error);
        }
        let submission = Submission {
            prompt: ask.tokens,
            max_tokens: 0,
            sampling: crate::engine::Sampling::Greedy,
            ends: Vec::new(),
            keep_first_logits: false,
            transfer: Some(TransferParams::Keep { transfer, to, readers }),
        };
        match self.engine.submit_blocking(submission) {
            Ok(ticket) => {
                self.running.insert(transfer, ticket);
            }
            Err(error) => self.decline(peer, transfer, &error),
        }
    }

    fn decline(&self, peer: &PeerId, transfer: TransferId, error: &dyn std::error::Error) {
        tracing::warn!(%peer, %transfer, %error, "a prompt was refused");
        // Fails only when the connector has ended, and then the decode node hears that.
        let _ = self.connector.decline(peer.clone(), transfer, &error.to_string());
    }

    /// Whether the hand-over is new.
    fn remember(&mut self, transfer: TransferId) -> bool {
        if !self.seen.insert(transfer) {
            return false;
        }
        self.oldest.push_back(transfer);
        if self.oldest.len() > REMEMBERED
            && let Some(oldest) = self.oldest.pop_front()
        {
            self.seen.remove(&oldest);
        }
        true
    }

    fn put_away_finished(&mut self) {
        self.running.retain(|transfer, ticket| match ticket.try_next() {
            Some(Update::Finished { reason, .. }) => {
                tracing::debug!(%transfer, ?reason, "a prompt is computed");
                false
            }
            _ => true,
        });
    }
}

/// The configuration of one rank: its place, and ports of its own.
fn of_rank(raw: &RawConfig, rank: u16, tp_size: u16) -> RawConfig {
    let own_port = |address: &String| match address.parse::<SocketAddr>() {
        Ok(mut address) if address.port() != 0 => {
            // Past the last port there is none: the rank then takes a free one and says which.
            address.set_port(address.port().checked_add(rank).unwrap_or(0));
            address.to_string()
        }
        // What is wrong with it, the configuration says.
        _ => address.clone(),
    };
    RawConfig {
        tp_rank: Some(rank.into()),
        tp_size: Some(tp_size.into()),
        listen: raw.listen.as_ref().map(own_port),
        advertise: raw.advertise.as_ref().map(own_port),
        ..raw.clone()
    }
}

/// 128 bits that nobody can guess.
///
/// # Errors
/// [`PdError::Random`].
pub fn random_bits() -> Result<u128, PdError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(PdError::Random)?;
    Ok(u128::from_le_bytes(bytes))
}

/// What two caches must have in common, in kvferry's words.
#[must_use]
pub fn manifest_of(model: &LoadedModel, dtype: KvDtype) -> Manifest {
    let config = model.model.config();
    Manifest {
        model: config.name.as_str().into(),
        model_fingerprint: manifest::Fingerprint(model.fingerprint),
        kv_dtype: match dtype {
            KvDtype::F32 => manifest::KvDtype::F32,
            KvDtype::F16 => manifest::KvDtype::F16,
            KvDtype::Bf16 => manifest::KvDtype::Bf16,
        },
        layers: config.layers as u16,
        kv_heads: config.kv_heads as u16,
        head_size_k: config.head_dim as u32,
        head_size_v: config.head_dim as u32,
        planes: Planes::KeyValue,
        rope: Rope {
            style: RopeStyle::Interleaved,
            theta_bits: f64::from(config.rope_theta).to_bits(),
            rotary_elements: config.rope_dims as u32,
            scaling: "none".into(),
        },
        scales: Scales { per: ScalePer::None, fingerprint: manifest::Fingerprint::default() },
        hash_scheme: "kvferry block chain 1".into(),
        digest_scheme: "kvferry-1".into(),
        // Another quantisation of the same weights computes other keys.
        options: manifest::Options::default(),
    }
}
