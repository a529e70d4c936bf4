//! Nodes whose engines hand over KV: kvferry's two objects beside an engine, and what a prefill node does with what it is asked.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use crossbeam_channel::{Receiver, RecvTimeoutError};
use kvferry::config::{ConfigError, ConnectorConfig, RawConfig};
use kvferry::contract::TransferParams;
use kvferry::metrics::Metrics;
use kvferry::pd::{PdHandle, PdScheduler, PdWorker, PdWorkerParts, SchedulerOptions, greeting};
use kvferry::{ConnectorError, open_transport};
use kvferry_kernels::KvDtype;
use kvferry_protocol::layout::Shard;
use kvferry_protocol::manifest::{self, Manifest, Planes, Rope, RopeStyle, ScalePer, Scales};
use kvferry_protocol::{Incarnation, PeerId, TransferId};
use kvferry_transport::PeerAddress;

use crate::engine::{EngineHandle, EngineService, Runner, Scheduler, Submission, Ticket, Update};
use crate::http::{RouteError, Router};
use crate::messages::Ask;
use crate::node::{LoadedModel, NodeConfig, NodeError};

/// An engine with kvferry beside it.
pub struct PdNode {
    /// The engine.
    pub engine: EngineService,
    /// kvferry's metrics.
    pub metrics: Arc<Metrics>,
    /// Where peers reach this node's worker.
    pub address: PeerAddress,
    /// What peers' engines ask of this one.
    pub messages: Receiver<(PeerId, Bytes)>,
    /// kvferry, for other threads than the engine's.
    pub connector: PdHandle,
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
    /// The system gives no random numbers.
    #[error("the system gives no random numbers: {0}")]
    Random(getrandom::Error),
}

impl PdNode {
    /// Starts an engine and its connector. The prefill nodes at `peers` are reached ahead of requests.
    ///
    /// # Errors
    /// [`PdError`].
    pub fn start(
        model: &LoadedModel,
        node: &NodeConfig,
        raw: RawConfig,
        peers: &[SocketAddr],
    ) -> Result<Self, PdError> {
        let config = ConnectorConfig::try_from((raw, Incarnation::new(random_bits()? as u64)))?;
        let node = NodeConfig { on_load_failure: config.load_failure_policy(), ..*node };
        let layerwise = config.layerwise();
        let runner = Runner::new(Arc::clone(&model.model), node.cache()).map_err(NodeError::from)?;
        let (manifest, shard, cache) = (manifest_of(model, node.dtype), Shard::default(), runner.cache().clone());
        let transport = open_transport(&config, greeting(&config, &manifest, shard, cache.layout())?)?;
        let metrics = Arc::new(Metrics::new());
        let parts = PdWorkerParts { config, manifest, shard, cache: cache.into(), metrics: Arc::clone(&metrics) };
        let worker = PdWorker::start(parts, transport)?;
        for &peer in peers {
            worker.handle().connect(PeerAddress::Tcp(peer))?;
        }
        let (address, messages, connector) = (worker.local_address(), worker.messages().clone(), worker.handle());
        let tokens_per_block = NonZeroU32::new(node.tokens_per_block).unwrap_or(NonZeroU32::MIN);
        let half = PdScheduler::new(SchedulerOptions { tokens_per_block, reporters: 1, layerwise });
        let scheduler = Scheduler::new(node.scheduler(&model.model), half).map_err(NodeError::from)?;
        let engine = EngineService::start(scheduler, runner, worker).map_err(NodeError::Thread)?;
        Ok(Self { engine, metrics, address, messages, connector })
    }

    /// Prefills what peers ask for until `stop` is set; blocks the calling thread.
    pub fn serve_prefill(&self, stop: &AtomicBool) {
        let mut desk = PrefillDesk::of(self);
        while !stop.load(Ordering::Acquire) {
            match self.messages.recv_timeout(DESK_WAIT) {
                Ok((peer, message)) => desk.hear(&peer, &message),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
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
    connector: PdHandle,
    /// Dropping a ticket would cancel its request.
    running: HashMap<TransferId, Ticket>,
    seen: HashSet<TransferId>,
    oldest: VecDeque<TransferId>,
}

impl PrefillDesk {
    fn of(node: &PdNode) -> Self {
        let (running, seen, oldest) = Default::default();
        let (engine, connector) = (node.engine.handle(), node.connector.clone());
        Self { engine, connector, running, seen, oldest }
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
        let transfer = ask.transfer;
        let submission = Submission {
            prompt: ask.tokens,
            max_tokens: 0,
            sampling: crate::engine::Sampling::Greedy,
            ends: Vec::new(),
            keep_first_logits: false,
            transfer: Some(TransferParams::Keep { transfer, to }),
        };
        match self.engine.submit_blocking(submission) {
            Ok(ticket) => {
                self.running.insert(transfer, ticket);
            }
            Err(error) => {
                tracing::warn!(%peer, %transfer, %error, "a prompt was refused");
                // Fails only when the connector has ended, and then the decode node hears that.
                let _ = self.connector.decline(peer.clone(), transfer, &error.to_string());
            }
        }
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

/// Sends prompts to prefill nodes in turn, and passes over one that has no session while another has.
#[derive(Debug)]
pub struct PrefillRouter {
    prefill: Vec<SocketAddr>,
    connector: PdHandle,
    turns: AtomicUsize,
}

impl PrefillRouter {
    /// A router to the workers that listen at `prefill`, for the engine beside `connector`.
    #[must_use]
    pub fn new(prefill: Vec<SocketAddr>, connector: PdHandle) -> Self {
        Self { prefill, connector, turns: AtomicUsize::new(0) }
    }

    /// The next node in turn; if none is reached at this moment, one that may be soon.
    fn next(&self) -> Option<PeerAddress> {
        let first = self.turns.fetch_add(1, Ordering::Relaxed) % self.prefill.len().max(1);
        let mut in_turn = self.prefill[first..].iter().chain(&self.prefill[..first]).map(|&at| PeerAddress::Tcp(at));
        in_turn.clone().find(|&at| self.connector.reaches(at)).or_else(|| in_turn.next())
    }
}

impl Router for PrefillRouter {
    fn route(&self, prompt: &[u32]) -> Result<Option<TransferParams>, RouteError> {
        let refuse = |problem: String| RouteError { problem };
        let Some(from) = self.next() else { return Ok(None) };
        let transfer = TransferId::new(random_bits().map_err(|error| refuse(error.to_string()))?);
        let ask = Ask { transfer, tokens: prompt.to_vec() }.encode().map_err(|error| refuse(error.to_string()))?;
        Ok(Some(TransferParams::Fetch { transfer, from, ask }))
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
        hash_scheme: "none".into(),
        digest_scheme: "kvferry-1".into(),
        // Another quantisation of the same weights computes other keys.
        options: manifest::Options::default(),
    }
}
