//! The scheduler half: which tokens are computed in the next step, and in which blocks.
//!
//! A request is *waiting* (no blocks), *loading* (blocks, but the connector still brings its KV or owes a verdict), *running*, or
//! *held* (over, but the connector still uses its blocks). Complete blocks that were computed or verified are shared with later
//! requests of the same prefix, if the scheduler has a hasher. Blocks for prompt and answer are taken at admission, so a running
//! request never lacks one and nothing is preempted.

use std::collections::{BTreeMap, VecDeque};

use kvferry::config::LoadFailurePolicy;
use kvferry::contract::{
    self, Applied, EngineFinish, Hold, LoadFailure, Match, RequestId, ScheduledRequest, ScheduledStep, TransferParams,
};
use kvferry::pool::{BlockHash, BlockHasher, BlockPool, BlockTable, PoolCounts, PoolError};
use kvferry_protocol::BlockId;

use super::step::{Sampled, Sampling, SequenceStep, StepOutput, StepPlan};

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

/// Decides what is computed next; `C` is the connector's half beside it.
pub struct Scheduler<C> {
    config: SchedulerConfig,
    connector: C,
    pool: BlockPool,
    /// Names blocks, so that requests can share them; without one none is shared.
    hasher: Option<BlockHasher>,
    waiting: VecDeque<Request>,
    loading: Vec<Request>,
    running: Vec<Request>,
    held: BTreeMap<RequestId, BlockTable>,
    next_request: u64,
    step: u64,
    recomputed: u64,
    failed_loads: u64,
    computed_prompt: u64,
}

struct Request {
    seen: contract::Request,
    submission: Submission,
    /// Prompt and generated tokens.
    tokens: Vec<u32>,
    /// Names of its complete blocks, as far as its tokens are known.
    hashes: Vec<BlockHash>,
    /// Tokens whose KV is in the cache, or will be when the load is over.
    computed: usize,
    /// So many of them were in the cache when it was admitted.
    local: usize,
    /// So many of the next ones are the connector's, until they were lost.
    brought: usize,
    /// So many of its blocks can be shared.
    registered: usize,
    /// None while the request waits.
    blocks: Option<BlockTable>,
}

impl<C: contract::Scheduler> Scheduler<C> {
    /// An idle scheduler over an empty cache.
    ///
    /// # Errors
    /// [`PoolError::Size`] if the cache has no blocks, or more than a pool can number.
    pub fn new(config: SchedulerConfig, connector: C) -> Result<Self, PoolError> {
        let pool = BlockPool::new(config.blocks as usize)?;
        let (waiting, loading, running, held) = Default::default();
        Ok(Self {
            config,
            connector,
            pool,
            hasher: None,
            waiting,
            loading,
            running,
            held,
            next_request: 0,
            step: 0,
            recomputed: 0,
            failed_loads: 0,
            computed_prompt: 0,
        })
    }

    /// Lets requests share blocks of the same prefix: those that `hasher` gives the same name.
    #[must_use]
    pub fn with_prefix_cache(mut self, hasher: BlockHasher) -> Self {
        self.hasher = Some(hasher);
        self
    }

    /// Queues a request.
    ///
    /// # Errors
    /// [`SubmitError`] if it can never be computed, or the queue is full.
    pub fn submit(&mut self, submission: Submission) -> Result<RequestId, SubmitError> {
        let (prompt, max_tokens) = (submission.prompt.len(), submission.max_tokens);
        let (context, vocab) = (self.config.context, self.config.vocab);
        if prompt == 0 {
            return Err(SubmitError::Empty);
        }
        if let Some(&token) = submission.prompt.iter().find(|&&token| token as usize >= vocab) {
            return Err(SubmitError::Token { token, vocab });
        }
        if prompt.saturating_add(max_tokens) > context {
            return Err(SubmitError::Context { prompt, max_tokens, context });
        }
        let (needed, blocks) = (self.blocks_for(prompt + max_tokens), self.config.blocks as usize);
        if needed > blocks {
            return Err(SubmitError::Cache { needed, blocks });
        }
        if self.waiting.len() >= self.config.max_waiting {
            return Err(SubmitError::Busy { waiting: self.waiting.len() });
        }
        let id = RequestId::new(&self.next_request.to_string());
        self.next_request += 1;
        let params = submission.transfer.clone();
        let hashes = self.hasher.as_ref().map(|hasher| hasher.chain(&submission.prompt)).unwrap_or_default();
        let seen = contract::Request {
            id: id.clone(),
            prompt_tokens: prompt as u32,
            params,
            hashes: hashes.as_slice().into(),
        };
        let tokens = submission.prompt.clone();
        let (computed, local, brought, registered) = (0, 0, 0, 0);
        let blocks = None;
        self.waiting.push_back(Request {
            seen,
            submission,
            tokens,
            hashes,
            computed,
            local,
            brought,
            registered,
            blocks,
        });
        Ok(id)
    }

    /// Ends a request; its blocks go when the connector lets them. Unknown and finished requests are ignored.
    pub fn cancel(&mut self, id: &RequestId) -> Option<Event> {
        self.finish(id, FinishReason::Cancelled)
    }

    /// Plans the next step. It has no sequence if nothing can be computed now.
    pub fn plan(&mut self) -> (StepPlan, Vec<Event>) {
        let events = self.admit();
        let mut prompt_budget = self.config.chunk_tokens;
        let mut sequences = Vec::with_capacity(self.running.len());
        for request in &self.running {
            sequences.extend(self.sequence(request, &mut prompt_budget));
        }
        let scheduled = sequences.iter().map(|sequence: &SequenceStep| ScheduledRequest {
            id: sequence.request.clone(),
            tokens: sequence.start..sequence.start + sequence.tokens.len() as u32,
            blocks: sequence.blocks.clone(),
        });
        let connector = self.connector.build_step(&ScheduledStep { requests: scheduled.collect() });
        self.step += 1;
        (StepPlan { number: self.step, sequences, connector }, events)
    }

    /// Takes a step's output.
    pub fn apply(&mut self, plan: &StepPlan, output: StepOutput) -> Vec<Event> {
        let mut events = Vec::new();
        for sequence in &plan.sequences {
            if let Some(request) = self.running.iter_mut().find(|request| request.seen.id == sequence.request) {
                request.computed = sequence.start as usize + sequence.tokens.len();
                let prompt = request.submission.prompt.len().min(request.computed);
                self.computed_prompt += prompt.saturating_sub(sequence.start as usize) as u64;
            }
        }
        // Without a verdict a void request waits for one.
        for id in &output.void {
            if let Some(request) = take_out(&mut self.running, id) {
                self.loading.push(request);
            }
        }
        let mut void = output.void;
        let Applied { loaded, failed, missed, released, unwanted } = self.connector.apply(output.connector);
        for id in loaded {
            events.extend(self.loaded(&id));
        }
        for failure in failed {
            void.push(failure.request.clone());
            events.extend(self.lost(failure));
        }
        for failure in missed {
            self.compute_from(failure);
        }
        for id in unwanted {
            events.extend(self.finish(&id, FinishReason::Failed("nobody takes its KV any more".into())));
        }
        for id in &released {
            // Dropping a table gives its blocks back.
            self.held.remove(id);
        }
        for sequence in &plan.sequences {
            // Its step read every layer of it, so all that was brought is verified.
            if !void.contains(&sequence.request) {
                self.register(&sequence.request);
            }
        }
        for sampled in output.sampled {
            if !void.contains(&sampled.request) {
                self.take(sampled, &mut events);
            }
        }
        let filled =
            |request: &&Request| request.submission.max_tokens == 0 && request.computed == request.tokens.len();
        let filled: Vec<_> = self.running.iter().filter(filled).map(|request| request.seen.id.clone()).collect();
        events.extend(filled.iter().filter_map(|id| self.finish(id, FinishReason::Length)));
        events
    }

    /// Takes a step that could not be computed: its requests fail, the others go on.
    pub fn fail(&mut self, plan: &StepPlan, why: &str) -> Vec<Event> {
        let fail = |sequence: &SequenceStep| self.finish(&sequence.request, FinishReason::Failed(why.to_owned()));
        plan.sequences.iter().filter_map(fail).collect()
    }

    /// Whether no request waits, loads or runs, and the connector has nothing under way.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.loading.is_empty() && self.running.is_empty() && !self.connector.has_pending()
    }

    /// The state in numbers.
    #[must_use]
    pub fn snapshot(&mut self) -> Snapshot {
        Snapshot {
            waiting: self.waiting.len(),
            loading: self.loading.len(),
            running: self.running.len(),
            held: self.held.len(),
            pool: self.pool.counts(),
            steps: self.step,
            recomputed_tokens: self.recomputed,
            failed_requests: self.failed_loads,
            computed_prompt_tokens: self.computed_prompt,
        }
    }

    /// The connector's half.
    pub const fn connector(&mut self) -> &mut C {
        &mut self.connector
    }

    /// Gives blocks to waiting requests, in order of arrival.
    fn admit(&mut self) -> Vec<Event> {
        let (mut later, mut events) = (VecDeque::new(), Vec::new());
        while self.loading.len() + self.running.len() < self.config.max_running {
            let Some(mut request) = self.waiting.pop_front() else { break };
            // One token at least is computed here: its logits choose the first of the answer, or its step hands the rest over.
            let most = (request.tokens.len() - 1) / self.config.tokens_per_block as usize;
            let shared = self.pool.lookup(&request.hashes[..most.min(request.hashes.len())]);
            request.local = shared * self.config.tokens_per_block as usize;
            let matched = self.connector.matched_tokens(&request.seen, request.local as u32);
            let brought = match matched {
                Match::Later => {
                    later.push_back(request);
                    continue;
                }
                Match::None => 0,
                Match::Sync(tokens) | Match::Async(tokens) => {
                    tokens.get().min((request.tokens.len() - request.local) as u32)
                }
            };
            let needed = self.blocks_for(request.submission.prompt.len() + request.submission.max_tokens);
            let Ok(blocks) = self.pool.open(&request.hashes[..shared], needed - shared) else {
                self.waiting.push_front(request);
                break;
            };
            let id = request.seen.id.clone();
            let accepted = self.connector.allocated(&request.seen, blocks.ids(), request.local as u32, brought);
            request.blocks = Some(blocks);
            request.brought = brought as usize;
            request.registered = shared;
            request.computed = (request.local + request.brought).min(request.most_brought());
            match matched {
                Match::Async(_) => self.loading.push(request),
                _ => self.running.push(request),
            }
            if let Err(error) = accepted {
                events.extend(self.finish(&id, FinishReason::Failed(error.to_string())));
            }
        }
        // Those that must ask again keep their place in the queue.
        later.append(&mut self.waiting);
        self.waiting = later;
        events
    }

    /// What a running request computes in the next step; `None` if the step has no room for more of its prompt.
    fn sequence(&self, request: &Request, prompt_budget: &mut usize) -> Option<SequenceStep> {
        let left = request.tokens.len() - request.computed;
        // A token that was generated is a decode step; it never waits for prompts.
        let decodes = left == 1 && request.tokens.len() > request.submission.prompt.len();
        let count = if decodes { 1 } else { left.min(*prompt_budget) };
        if count == 0 {
            return None;
        }
        if !decodes {
            *prompt_budget -= count;
        }
        let end = request.computed + count;
        let samples = end == request.tokens.len() && request.submission.max_tokens > 0;
        let first = request.tokens.len() == request.submission.prompt.len();
        Some(SequenceStep {
            request: request.seen.id.clone(),
            start: request.computed as u32,
            tokens: request.tokens[request.computed..end].to_vec(),
            blocks: request.block_ids()[..self.blocks_for(end)].to_vec(),
            sample: samples.then_some(request.submission.sampling),
            keep_logits: samples && first && request.submission.keep_first_logits,
        })
    }

    /// A request's KV is there, or will be by the time that a layer reads it.
    fn loaded(&mut self, id: &RequestId) -> Option<Event> {
        let request = take_out(&mut self.loading, id)?;
        // The contract's second call: the request is admitted now, and nothing more is brought.
        let accepted = self.connector.allocated(&request.seen, request.block_ids(), request.local as u32, 0);
        self.running.push(request);
        accepted.err().and_then(|error| self.finish(id, FinishReason::Failed(error.to_string())))
    }

    /// A request's KV did not come, or not all of it.
    fn lost(&mut self, failure: LoadFailure) -> Option<Event> {
        let LoadFailure { request: id, good_tokens, good_blocks, reason } = failure;
        if self.config.on_load_failure == LoadFailurePolicy::Fail {
            self.failed_loads += 1;
            return self.finish(&id, FinishReason::Failed(reason));
        }
        tracing::warn!(request = %id, good_tokens, reason, "KV was lost in transit; computing the rest here");
        self.recomputed += self.compute_from(LoadFailure { request: id, good_tokens, reason, good_blocks }) as u64;
        None
    }

    /// The rest of a request behind its good prefix is computed here; returns how many tokens were to be brought.
    fn compute_from(&mut self, failure: LoadFailure) -> usize {
        let LoadFailure { request: id, good_tokens, .. } = failure;
        if let Some(request) = take_out(&mut self.loading, &id) {
            self.running.push(request);
        }
        let Some(request) = self.running.iter_mut().find(|request| request.seen.id == id) else { return 0 };
        // The step that this verdict voids may have computed the last token already, and all before it may be good.
        let good = (good_tokens as usize).min(request.computed).min(request.most_brought());
        let lost = (request.local + request.brought).saturating_sub(good);
        request.brought = request.brought.min(good.saturating_sub(request.local));
        request.computed = good;
        lost
    }

    /// Lets later requests share the complete blocks of a request.
    fn register(&mut self, id: &RequestId) {
        let Some(request) = self.running.iter_mut().find(|request| request.seen.id == *id) else { return };
        let Some(blocks) = &request.blocks else { return };
        let complete = (request.computed / self.config.tokens_per_block as usize).min(request.hashes.len());
        for position in request.registered..complete {
            if let Err(error) = self.pool.register(blocks, position, request.hashes[position]) {
                tracing::error!(request = %id, %error, "a block cannot be shared");
            }
        }
        request.registered = complete.max(request.registered);
    }

    fn take(&mut self, sampled: Sampled, events: &mut Vec<Event>) {
        let Sampled { request: id, token, logits } = sampled;
        let Some(request) = self.running.iter_mut().find(|request| request.seen.id == id) else { return };
        request.tokens.push(token);
        if let Some(hasher) = &self.hasher {
            let known = request.hashes.len();
            let per_block = self.config.tokens_per_block as usize;
            let parent = request.hashes.last().copied().unwrap_or_else(|| hasher.root());
            let more = request.tokens.get(known * per_block..(known + 1) * per_block);
            if let Some(Ok(hash)) = more.map(|tokens| hasher.next(parent, tokens)) {
                request.hashes.push(hash);
                self.connector.hashed(&id, &request.hashes[known..]);
            }
        }
        let generated = request.tokens.len() - request.submission.prompt.len();
        let reason = match request.submission.ends.contains(&token) {
            true => Some(FinishReason::End),
            false => (generated >= request.submission.max_tokens).then_some(FinishReason::Length),
        };
        events.push(Event::Token { request: id.clone(), token, logits });
        events.extend(reason.and_then(|reason| self.finish(&id, reason)));
    }

    fn finish(&mut self, id: &RequestId, reason: FinishReason) -> Option<Event> {
        let finished = Some(Event::Finished { request: id.clone(), reason: reason.clone() });
        if let Some(at) = self.waiting.iter().position(|request| request.seen.id == *id) {
            self.waiting.remove(at);
            return finished;
        }
        let request = take_out(&mut self.loading, id).or_else(|| take_out(&mut self.running, id))?;
        let how = match reason {
            FinishReason::End | FinishReason::Length => EngineFinish::Complete,
            FinishReason::Cancelled | FinishReason::Failed(_) => EngineFinish::Aborted,
        };
        let hold = self.connector.finished(id, request.block_ids(), how);
        if let (Hold::Until { .. }, Some(blocks)) = (hold, request.blocks) {
            self.held.insert(id.clone(), blocks);
        }
        finished
    }

    fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.config.tokens_per_block as usize)
    }
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
    /// Tokens of prompts that were computed here.
    pub computed_prompt_tokens: u64,
}

impl Request {
    /// Tokens whose KV may come from elsewhere: the last one is always computed here, since its logits choose the next.
    fn most_brought(&self) -> usize {
        self.tokens.len() - usize::from(self.submission.max_tokens > 0)
    }

    fn block_ids(&self) -> &[BlockId] {
        self.blocks.as_ref().map_or(&[], BlockTable::ids)
    }
}

fn take_out(requests: &mut Vec<Request>, id: &RequestId) -> Option<Request> {
    let at = requests.iter().position(|request| request.seen.id == *id)?;
    Some(requests.remove(at))
}

#[cfg(test)]
mod tests;
