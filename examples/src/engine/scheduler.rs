//! The scheduler half: which tokens are computed in the next step, and in which blocks.
//!
//! A request is *waiting* (no blocks), *loading* (blocks, but the connector still brings its KV or owes a verdict), *running*, or
//! *held* (over, but the connector still uses its blocks). It is given blocks for all that is known of its text when it is admitted, and one
//! more whenever a token needs it. Complete blocks that were computed or verified can be found by later requests, by hash or by tokens as
//! the configuration says.

mod admission;
mod loads;
mod request;
mod submission;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use kvferry::contract::{self, Applied, EngineFinish, Hold, RequestId, ScheduledRequest, ScheduledStep};
use kvferry::events::{KvEvent, Medium};
use kvferry::pool::{BlockHasher, PoolError, PrefixCache, PrefixLease, Text};

use super::step::{Sampled, SequenceStep, StepOutput, StepPlan};
use request::{Request, take_out};

pub use submission::{Event, FinishReason, SchedulerConfig, Snapshot, Submission, SubmitError};

/// Decides what is computed next; `C` is the connector's half beside it.
pub struct Scheduler<C> {
    config: SchedulerConfig,
    connector: C,
    cache: PrefixCache,
    /// Names blocks.
    hasher: Option<Arc<BlockHasher>>,
    waiting: VecDeque<Request>,
    loading: Vec<Request>,
    running: Vec<Request>,
    held: BTreeMap<RequestId, PrefixLease>,
    next_request: u64,
    step: u64,
    recomputed: u64,
    failed_loads: u64,
    computed_prompt: u64,
    local_prompt: u64,
    preempted: u64,
}

impl<C: contract::Scheduler> Scheduler<C> {
    /// An idle scheduler over an empty cache.
    ///
    /// # Errors
    /// [`PoolError::Size`] if the cache has no blocks, or more than a pool can number; [`PoolError::NoTokens`] if they are of no tokens.
    pub fn new(config: SchedulerConfig, connector: C) -> Result<Self, PoolError> {
        let cache = PrefixCache::new(config.prefix, config.blocks as usize, config.tokens_per_block as usize)?;
        let (waiting, loading, running, held) = Default::default();
        Ok(Self {
            config,
            connector,
            cache,
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
            local_prompt: 0,
            preempted: 0,
        })
    }

    /// Names blocks, for a cache that finds them by hash, for tiers that keep them, and for events. Without names a cache finds prefixes
    /// by tokens or not at all.
    #[must_use]
    pub fn with_names(mut self, hasher: BlockHasher) -> Self {
        self.hasher = Some(Arc::new(hasher));
        self
    }

    /// Notes from now on which blocks can be found, for [`take_kv_events`](Self::take_kv_events). Blocks without names are not told.
    #[must_use]
    pub fn with_kv_events(mut self) -> Self {
        if let Some(hasher) = &self.hasher {
            // In routers' words an engine's own cache is its device's memory, whatever computes there.
            self.cache.record_events(hasher, Some(Medium::Device));
        }
        self
    }

    /// What can be found since the last call, and what no longer can, in order.
    pub fn take_kv_events(&mut self) -> Vec<KvEvent> {
        self.cache.take_events()
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
        let number = self.next_request;
        self.next_request += 1;
        let id = RequestId::new(&number.to_string());
        let text = Text::new(self.hasher.as_ref(), submission.prompt.clone());
        let (params, hashes) = (submission.transfer.clone(), text.names().into());
        let seen = contract::Request { id: id.clone(), prompt_tokens: prompt as u32, params, hashes };
        self.waiting.push_back(Request::new(number, seen, submission, text));
        Ok(id)
    }

    /// Ends a request; its blocks go when the connector lets them. Unknown and finished requests are ignored.
    pub fn cancel(&mut self, id: &RequestId) -> Option<Event> {
        self.finish(id, FinishReason::Cancelled)
    }

    /// Plans the next step. It has no sequence if nothing can be computed now.
    pub fn plan(&mut self) -> (StepPlan, Vec<Event>) {
        // Whoever was put back is not overtaken in the same step.
        let events = if self.make_room() { self.admit() } else { Vec::new() };
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
        let Applied { loaded, failed, void: more, missed, released, unwanted } = self.connector.apply(output.connector);
        for id in more {
            self.loading.extend(take_out(&mut self.running, &id));
            void.push(id);
        }
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
        for id in &released {
            // Dropping a lease gives its blocks back.
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
        let filled = |request: &&Request| request.submission.max_tokens == 0 && request.computed == request.tokens();
        let filled: Vec<_> = self.running.iter().filter(filled).map(|request| request.seen.id.clone()).collect();
        events.extend(filled.iter().filter_map(|id| self.finish(id, FinishReason::Length)));
        // A transfer may be over before the step that computed its last tokens is: what is complete is done, and can be shared.
        for id in unwanted {
            events.extend(self.finish(&id, FinishReason::Failed("nobody takes its KV any more".into())));
        }
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
            pool: self.cache.counts(),
            steps: self.step,
            recomputed_tokens: self.recomputed,
            failed_requests: self.failed_loads,
            computed_prompt_tokens: self.computed_prompt,
            local_prompt_tokens: self.local_prompt,
            preempted_requests: self.preempted,
        }
    }

    /// The connector's half.
    pub const fn connector(&mut self) -> &mut C {
        &mut self.connector
    }

    /// What a running request computes in the next step; `None` if the step has no room for more of its prompt.
    fn sequence(&self, request: &Request, prompt_budget: &mut usize) -> Option<SequenceStep> {
        let left = request.tokens() - request.computed;
        // A token that was generated is a decode step; it never waits for prompts.
        let decodes = left == 1 && request.generated() > 0;
        let count = if decodes { 1 } else { left.min(*prompt_budget) };
        if count == 0 {
            return None;
        }
        if !decodes {
            *prompt_budget -= count;
        }
        let end = request.computed + count;
        let samples = end == request.tokens() && request.submission.max_tokens > 0;
        let first = request.generated() == 0;
        Some(SequenceStep {
            request: request.seen.id.clone(),
            start: request.computed as u32,
            tokens: request.text.tokens()[request.computed..end].to_vec(),
            blocks: request.block_ids()[..self.blocks_for(end)].to_vec(),
            sample: samples.then_some(request.submission.sampling),
            keep_logits: samples && first && request.submission.keep_first_logits,
        })
    }

    /// What a step has computed and read of a request is in place: later requests can share its complete blocks.
    fn register(&mut self, id: &RequestId) {
        let Some(request) = self.running.iter_mut().find(|request| request.seen.id == *id) else { return };
        request.has_stepped = true;
        let is_own = !self.config.in_place || request.brought == 0;
        let Some(table) = request.table.as_mut().filter(|_| is_own) else { return };
        if let Err(error) = self.cache.register(table, &request.text, request.computed) {
            tracing::error!(request = %id, %error, "its blocks cannot be shared");
        }
    }

    fn take(&mut self, sampled: Sampled, events: &mut Vec<Event>) {
        let Sampled { request: id, token, logits } = sampled;
        let Some(request) = self.running.iter_mut().find(|request| request.seen.id == id) else { return };
        if let Some(name) = request.text.push(token) {
            self.connector.hashed(&id, &[name]);
        }
        let reason = match request.submission.ends.contains(&token) {
            true => Some(FinishReason::End),
            false => (request.generated() >= request.submission.max_tokens).then_some(FinishReason::Length),
        };
        events.push(Event::Token { request: id.clone(), token, logits });
        events.extend(reason.and_then(|reason| self.finish(&id, reason)));
    }

    fn finish(&mut self, id: &RequestId, reason: FinishReason) -> Option<Event> {
        let finished = Some(Event::Finished { request: id.clone(), reason: reason.clone() });
        if let Some(at) = self.waiting.iter().position(|request| request.seen.id == *id) {
            if self.waiting.remove(at).is_some_and(|request| request.is_known) {
                // It was put back, so nothing of it is left to be held.
                self.connector.finished(id, &[], EngineFinish::Aborted);
            }
            return finished;
        }
        let request = take_out(&mut self.loading, id).or_else(|| take_out(&mut self.running, id))?;
        let how = match reason {
            FinishReason::End | FinishReason::Length => EngineFinish::Complete,
            FinishReason::Cancelled | FinishReason::Failed(_) => EngineFinish::Aborted,
        };
        let hold = self.connector.finished(id, request.block_ids(), how);
        let Some(table) = request.table else { return finished };
        // Of what was aborted, only what was registered before is known to be good.
        let good = match how {
            // What lies in a peer's memory goes with the request.
            EngineFinish::Complete if self.config.in_place && request.brought > 0 => request.local,
            EngineFinish::Complete => request.computed,
            EngineFinish::Aborted => table.registered() * self.config.tokens_per_block as usize,
        };
        let lease = self.cache.lease(table, &request.text, good).unwrap_or_else(|refused| {
            let (table, error) = *refused;
            tracing::error!(request = %id, %error, "its blocks cannot be shared");
            table.into()
        });
        if let Hold::Until { .. } = hold {
            self.held.insert(id.clone(), lease);
        }
        finished
    }

    fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.config.tokens_per_block as usize)
    }
}

#[cfg(test)]
mod tests;
