//! What the scheduler half and the runner half tell each other: one plan down, one output up, both serialisable.

use kvferry::contract::{RequestId, StepMeta, StepResults};
use kvferry_protocol::BlockId;
use serde::{Deserialize, Serialize};

/// How the next token is chosen from the logits.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub enum Sampling {
    /// The highest logit; of equal ones the lowest token id.
    Greedy,
    /// A draw from the softmax of `logits / temperature`. It depends on the seed and the token's position only.
    Temperature {
        /// Above 0.
        temperature: f32,
        /// The same seed gives the same text.
        seed: u64,
    },
}

/// One step of the engine: tokens of several requests that are computed together. It may be empty, for the connector's sake.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct StepPlan {
    /// Counts the engine's steps.
    pub number: u64,
    /// The requests of this step; each at most once.
    pub sequences: Vec<SequenceStep>,
    /// What the connector's scheduler half tells its worker half.
    pub connector: StepMeta,
}

/// What one request computes in a step: a chunk of its prompt, or its newest token.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SequenceStep {
    /// The request.
    pub request: RequestId,
    /// Position of the first token of this step: so many tokens have their KV in the cache already.
    pub start: u32,
    /// The tokens to compute; at least one.
    pub tokens: Vec<u32>,
    /// The request's blocks in the order of its tokens, enough for `start + tokens.len()`.
    pub blocks: Vec<BlockId>,
    /// Choose the next token after the last one; `None` while a prompt is in the middle.
    pub sample: Option<Sampling>,
    /// Return the logits beside the chosen token.
    pub keep_logits: bool,
}

/// What a step brought.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct StepOutput {
    /// [`StepPlan::number`].
    pub number: u64,
    /// One for each sequence with `sample`, in the plan's order.
    pub sampled: Vec<Sampled>,
    /// Requests whose KV did not come while they were computed: their part of the step is void, and the connector's verdict
    /// follows in this or a later output.
    pub void: Vec<RequestId>,
    /// What the connector's worker halves report, one a rank.
    pub connector: Vec<StepResults>,
}

/// A chosen token.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Sampled {
    /// The request.
    pub request: RequestId,
    /// The token.
    pub token: u32,
    /// f32 `[vocab]`, where the plan asked for them.
    pub logits: Option<Vec<f32>>,
}

impl StepOutput {
    /// Nothing happened.
    #[must_use]
    pub fn empty(number: u64) -> Self {
        Self { number, sampled: Vec::new(), void: Vec::new(), connector: Vec::new() }
    }
}
