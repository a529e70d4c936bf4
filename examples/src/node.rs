//! A model, its tokenizer and an engine on a thread: what each binary starts.

use std::path::Path;
use std::sync::Arc;

use kvferry::config::LoadFailurePolicy;
use kvferry::pool::{BlockHasher, HashScope, PoolError, PrefixKind};
use kvferry_kernels::KvDtype;
use kvferry_protocol::layout::LayoutOrder;
use sha2::{Digest, Sha256};

use crate::cli::Bar;
use crate::engine::{
    CacheConfig, DeviceKind, EngineHandle, EngineService, NoConnector, Publish, Runner, RunnerError, Sampling,
    Scheduler, SchedulerConfig, ServiceError, Submission, Update,
};
use crate::model::{Model, ModelError, Tokenizer};

/// Why a node does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The model cannot be used.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The cache cannot be made.
    #[error(transparent)]
    Runner(#[from] RunnerError),
    /// The block pool cannot be made.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The system gives no thread.
    #[error("the engine's thread cannot be started")]
    Thread(#[source] std::io::Error),
}

/// How a node's engine is shaped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeConfig {
    /// Order of the cache's axes.
    pub order: LayoutOrder,
    /// Element type of the cache.
    pub dtype: KvDtype,
    /// Blocks in the cache.
    pub blocks: u32,
    /// Tokens in a block.
    pub tokens_per_block: u32,
    /// Tensor-parallel ranks.
    pub tp_size: u16,
    /// Where KV lies and attention is computed.
    pub device: DeviceKind,
    /// The most prompt tokens in one step.
    pub chunk_tokens: usize,
    /// The most requests that are computed at the same time.
    pub max_running: usize,
    /// What happens to a request whose KV could not be brought.
    pub on_load_failure: LoadFailurePolicy,
    /// How requests find what earlier ones computed.
    pub prefix: PrefixKind,
    /// Whether it reads peers' blocks where they lie, and lets them read its own.
    pub in_place: bool,
}

impl NodeConfig {
    /// The most requests that wait for their turn.
    pub const MAX_WAITING: usize = 1024;

    /// The shape of the runner's cache.
    #[must_use]
    pub const fn cache(&self) -> CacheConfig {
        let Self { order, dtype, blocks, tokens_per_block, tp_size, in_place: shareable, device, .. } = *self;
        CacheConfig { order, dtype, blocks, tokens_per_block, tp_size, shareable, device }
    }

    /// How the scheduler fills its steps for a model.
    #[must_use]
    pub fn scheduler(&self, model: &Model) -> SchedulerConfig {
        SchedulerConfig {
            chunk_tokens: self.chunk_tokens,
            max_running: self.max_running,
            max_waiting: Self::MAX_WAITING,
            blocks: self.blocks,
            tokens_per_block: self.tokens_per_block,
            context: model.config().context,
            vocab: model.config().vocab,
            on_load_failure: self.on_load_failure,
            prefix: self.prefix,
            in_place: self.in_place,
            watermark_blocks: self.blocks as usize / WATERMARK,
        }
    }

    /// Names blocks: equal names mean equal bytes, on every node with the same model, dtype and block size.
    ///
    /// # Errors
    /// [`PoolError`] if a block would have no tokens.
    pub fn hasher(&self, model: &LoadedModel) -> Result<BlockHasher, PoolError> {
        let fingerprint: String = model.fingerprint.iter().map(|byte| format!("{byte:02x}")).collect();
        let name = format!("{fingerprint} {}", self.dtype);
        let tokens_per_block = self.tokens_per_block as usize;
        BlockHasher::new(&HashScope { model: &name, tokens_per_block, adapter: None, salt: b"" })
    }
}

/// Of so many blocks one stays free when a request is admitted beside others: vLLM's watermark, 0.01.
const WATERMARK: usize = 100;

/// A loaded model and its tokenizer, shared by the engines of a process.
#[derive(Clone)]
pub struct LoadedModel {
    /// The weights.
    pub model: Arc<Model>,
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// SHA-256 of the model's file; two nodes with equal ones compute the same KV.
    pub fingerprint: [u8; 32],
}

impl LoadedModel {
    /// Loads `embedded` or a GGUF file; shows a progress bar if it takes longer than a second.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn load(path: &Path) -> Result<Self, ModelError> {
        let mut bar = Bar::new("loading the model");
        let (model, tokenizer) = Model::load(path, &mut |done, all| bar.at(done, all))?;
        let fingerprint = fingerprint(path).map_err(|source| ModelError::Open { path: path.into(), source })?;
        Ok(Self { model: Arc::new(model), tokenizer: Arc::new(tokenizer), fingerprint })
    }

    /// Starts an engine without a connector.
    ///
    /// # Errors
    /// [`NodeError`].
    pub fn start_local(&self, config: &NodeConfig) -> Result<EngineService, NodeError> {
        self.start_publishing(config, None)
    }

    /// The same, and tells what its cache came to have and to lose.
    ///
    /// # Errors
    /// [`NodeError`].
    pub fn start_publishing(&self, config: &NodeConfig, publish: Option<Publish>) -> Result<EngineService, NodeError> {
        let runner = Runner::new(Arc::clone(&self.model), config.cache())?;
        let scheduler = Scheduler::new(config.scheduler(&self.model), NoConnector)?.with_names(config.hasher(self)?);
        let connectors = vec![NoConnector; runner.ranks().len()];
        EngineService::start_publishing(scheduler, runner, connectors, publish).map_err(NodeError::Thread)
    }

    /// A submission of a prompt's tokens, greedy, that ends where the model ends its text.
    #[must_use]
    pub fn greedy(&self, prompt: Vec<u32>, max_tokens: usize) -> Submission {
        Submission {
            prompt,
            max_tokens,
            sampling: Sampling::Greedy,
            ends: self.tokenizer.ends(),
            keep_first_logits: false,
            transfer: None,
        }
    }
}

/// What an engine generated for one prompt.
#[derive(Clone, PartialEq, Debug)]
pub struct Generation {
    /// The tokens, without the prompt.
    pub tokens: Vec<u32>,
    /// The logits of the first one, if they were asked for.
    pub first_logits: Option<Vec<f32>>,
    /// From submission to the first token, in milliseconds.
    pub ttft_ms: f64,
    /// From submission to the end, in milliseconds.
    pub total_ms: f64,
    /// Why it ended.
    pub reason: crate::engine::FinishReason,
}

/// Submits a prompt and waits for all of its tokens.
///
/// # Errors
/// [`ServiceError`] if the engine refuses it or stops.
pub async fn generate(engine: &EngineHandle, submission: Submission) -> Result<Generation, ServiceError> {
    let mut ticket = engine.submit(submission).await?;
    let submitted = ticket.submitted;
    let ms = |at: std::time::Instant| at.duration_since(submitted).as_secs_f64() * 1e3;
    let (mut tokens, mut first_logits, mut ttft_ms) = (Vec::new(), None, 0.0);
    while let Some(update) = ticket.next().await {
        match update {
            Update::Token { token, at, logits } => {
                if tokens.is_empty() {
                    ttft_ms = ms(at);
                    first_logits = logits;
                }
                tokens.push(token);
            }
            Update::Finished { reason, at } => {
                return Ok(Generation { tokens, first_logits, ttft_ms, total_ms: ms(at), reason });
            }
        }
    }
    Err(ServiceError::Stopped)
}

/// The embedded model has no file; its name is that of its numbers.
fn fingerprint(path: &Path) -> std::io::Result<[u8; 32]> {
    let mut hash = Sha256::new();
    if path == Path::new(Model::EMBEDDED) {
        hash.update(Model::embedded().config().name.as_bytes());
    } else {
        let mut file = std::fs::File::open(path)?;
        let mut buffer = vec![0; 1 << 20];
        loop {
            match std::io::Read::read(&mut file, &mut buffer)? {
                0 => break,
                count => hash.update(&buffer[..count]),
            }
        }
    }
    Ok(hash.finalize().into())
}

/// A digest of logits' bits: SHA-256 over the little-endian bytes, in hexadecimal. Equal digests mean equal bits.
#[must_use]
pub fn logits_digest(logits: &[f32]) -> String {
    let mut hash = Sha256::new();
    for logit in logits {
        hash.update(logit.to_bits().to_le_bytes());
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
