//! What goes into a scheduler and what comes out: work and its limits, events, the state in numbers.

use kvferry::config::LoadFailurePolicy;
use kvferry::contract::{RequestId, TransferParams};
use kvferry::pool::{PoolCounts, PrefixKind};

use crate::engine::step::Sampling;

/// How a scheduler fills its steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SchedulerConfig {
    /// The most prompt tokens in one step, over all requests.
    pub chunk_tokens: usize,
    /// The most requests that are loading or running.
    pub max_running: usize,
    /// The most requests that wait.
    pub max_waiting: usize,
    /// Blocks in the cache.
    pub blocks: u32,
    /// Tokens in a block.
    pub tokens_per_block: u32,
    /// The longest sequence of the model, in tokens.
    pub context: usize,
    /// Entries of the model's vocabulary.
    pub vocab: usize,
    /// What happens to a request whose KV could not be brought.
    pub on_load_failure: LoadFailurePolicy,
    /// How requests find what earlier ones computed.
    pub prefix: PrefixKind,
    /// Whether blocks that the connector brings may lie in a peer's memory: those are not for other requests to find.
    pub in_place: bool,
    /// Blocks that an admission leaves free for the requests that run.
    pub watermark_blocks: usize,
}

/// A piece of work for the engine.
#[derive(Clone, PartialEq, Debug)]
pub struct Submission {
    /// The prompt; at least one token.
    pub prompt: Vec<u32>,
    /// The most tokens to generate; 0 only fills the cache.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens that end the text.
    pub ends: Vec<u32>,
    /// Return the logits of the first generated token.
    pub keep_first_logits: bool,
    /// The request's part in a transfer; `None` if it stays local.
    pub transfer: Option<TransferParams>,
}

/// Why a submission was refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// There is no token.
    #[error("the prompt is empty; send at least one token")]
    Empty,
    /// A token is not in the vocabulary.
    #[error("prompt token {token} is not in the model's vocabulary of {vocab}; tokenize with this model's tokenizer")]
    Token {
        /// The token.
        token: u32,
        /// The vocabulary's size.
        vocab: usize,
    },
    /// Prompt and answer do not fit the model.
    #[error(
        "{prompt} prompt tokens and {max_tokens} to generate exceed the model's context of {context}; shorten one of them"
    )]
    Context {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens to generate.
        max_tokens: usize,
        /// The model's limit.
        context: usize,
    },
    /// Prompt and answer do not fit the cache.
    #[error("the request needs {needed} KV blocks, but the cache has {blocks}; shorten it or start with more --blocks")]
    Cache {
        /// Blocks for prompt and answer.
        needed: usize,
        /// Blocks in the cache.
        blocks: usize,
    },
    /// The queue is full.
    #[error("{waiting} requests are waiting already; try again later")]
    Busy {
        /// How many wait.
        waiting: usize,
    },
}

/// What a client hears of its request.
#[derive(Clone, PartialEq, Debug)]
pub enum Event {
    /// A token was generated.
    Token {
        /// The request.
        request: RequestId,
        /// The token.
        token: u32,
        /// The logits that it was chosen from, if they were asked for and it is the first.
        logits: Option<Vec<f32>>,
    },
    /// The request is over.
    Finished {
        /// The request.
        request: RequestId,
        /// Why.
        reason: FinishReason,
    },
}

/// Why a request is over.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FinishReason {
    /// The model ended the text.
    End,
    /// As many tokens as were asked for.
    Length,
    /// The client gave up.
    Cancelled,
    /// Its KV could not be brought, is wanted by nobody, or could not be computed; why.
    Failed(String),
}

/// A scheduler's state in numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Snapshot {
    /// Requests without blocks.
    pub waiting: usize,
    /// Requests whose KV the connector brings.
    pub loading: usize,
    /// Requests that are computed.
    pub running: usize,
    /// Requests that are over, whose blocks the connector still uses.
    pub held: usize,
    /// The cache's blocks.
    pub pool: PoolCounts,
    /// Steps planned so far.
    pub steps: u64,
    /// Tokens whose KV was lost in transit and computed here instead.
    pub recomputed_tokens: u64,
    /// Requests that failed because their KV did not come.
    pub failed_requests: u64,
    /// Tokens of prompts that were computed here, again where a request was put back.
    pub computed_prompt_tokens: u64,
    /// Tokens of prompts that were in the cache when their request was first admitted.
    pub local_prompt_tokens: u64,
    /// How often a request was put back for want of blocks.
    pub preempted_requests: u64,
}
