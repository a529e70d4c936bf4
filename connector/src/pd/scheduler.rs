//! The scheduler half of the prefill/decode connector: bookkeeping only, no I/O.
//!
//! A request may owe two things, a load and a keep. Each is an obligation of its own with its own set of reporting ranks; blocks
//! are the engine's again when no obligation is left. A report about an obligation that does not exist is counted and dropped.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;

use kvferry_protocol::{BlockId, TpRank, TransferId};

use crate::contract::{
    Applied, Cancel, EngineFinish, Hold, Load, LoadFailure, Match, Request, RequestId, ScheduledStep, Scheduler, Side,
    StepMeta, StepResults, TierResults, TransferParams,
};
use crate::error::ConnectorError;
use crate::metrics::Metrics;
use crate::pool::BlockHash;
use crate::tier::TierIndex;

mod keep;
mod returning;
mod tier;

use keep::{KeepState, SaveRules};
use returning::Returning;
use tier::{RestoreEnd, TierHalf};

/// What the scheduler half must know beside the requests.
#[derive(Clone, Copy, Debug)]
pub struct SchedulerOptions {
    /// Tokens in one block of this engine.
    pub tokens_per_block: NonZeroU32,
    /// How many ranks report each result.
    pub reporters: u16,
    /// Whether a request may run once its first layer is in.
    pub layerwise: bool,
}

/// The scheduler half of the prefill/decode connector.
#[derive(Debug)]
pub struct PdScheduler {
    options: SchedulerOptions,
    rules: SaveRules,
    /// The engine reads peers' blocks where they lie.
    reads_in_place: bool,
    loads: BTreeMap<RequestId, LoadState>,
    keeps: BTreeMap<RequestId, KeepState>,
    /// Requests whose one load is behind them, until the engine finishes them.
    fetched: BTreeSet<RequestId>,
    /// The same for keeps.
    kept: BTreeSet<RequestId>,
    /// Requests that the engine has finished and whose blocks it left here.
    held: BTreeSet<RequestId>,
    tier: Option<TierHalf>,
    returning: Option<Returning>,
    next: StepMeta,
    unknown_results: u64,
}

#[derive(Debug)]
struct LoadState {
    transfer: TransferId,
    /// Tokens of the local prefix, before the first that is loaded.
    local: u32,
    started: BTreeSet<TpRank>,
    ended: BTreeSet<TpRank>,
    failure: Option<LoadFailure>,
    surfaced: bool,
    aborted: bool,
}

impl PdScheduler {
    /// An idle scheduler half.
    #[must_use]
    pub fn new(options: SchedulerOptions) -> Self {
        Self {
            options,
            rules: SaveRules { granule: 1, shares_early: false },
            reads_in_place: false,
            loads: BTreeMap::new(),
            keeps: BTreeMap::new(),
            fetched: BTreeSet::new(),
            kept: BTreeSet::new(),
            held: BTreeSet::new(),
            tier: None,
            returning: None,
            next: StepMeta::default(),
            unknown_results: 0,
        }
    }

    /// Carries whole blocks only, the last one with what follows the prompt in it: for an engine whose kernels pack a block's tokens
    /// in an order of their own. Both sides must pack alike, which is for their manifests to say.
    #[must_use]
    pub const fn with_whole_blocks(mut self) -> Self {
        self.rules.granule = self.options.tokens_per_block.get();
        self
    }

    /// For an engine that registers a block's hash when it schedules it, not when it is computed: what a request finds in the cache may be
    /// what another request of the same step computes, so it is handed over after the step and not before.
    #[must_use]
    pub const fn with_early_sharing(mut self) -> Self {
        self.rules.shares_early = true;
        self
    }

    /// For an engine that can read peers' blocks where they lie, and whose workers do if they are configured so (`same_host = "in-place"`).
    ///
    /// Such an engine has its workers' attention read an aliased block where its alias says ([`HostKvCache`](kvferry_kernels::HostKvCache)),
    /// writes into no block of a load but the last, takes what [`Applied::failed`] and [`Applied::void`] say of a step before it uses what the
    /// step computed, and lets no other request find blocks that were loaded.
    #[must_use]
    pub const fn with_reading_in_place(mut self) -> Self {
        self.reads_in_place = true;
        self
    }

    /// Puts a tier beside it: blocks of requests with hashes are kept there, and brought from there. The workers must have one of
    /// as many frames; the index is a [`FrameIndex`](crate::tier::FrameIndex) or another's.
    #[must_use]
    pub fn with_tier(mut self, index: Box<dyn TierIndex>, metrics: Arc<Metrics>) -> Self {
        let SchedulerOptions { tokens_per_block, reporters, .. } = self.options;
        self.tier = Some(TierHalf::new(index, metrics, reporters, tokens_per_block.get()));
        self
    }

    /// Sends complete blocks of answers back to the tier of the engine that computed their prompts: `every` so many, and the rest
    /// at the end. For a decode engine that calls [`Scheduler::hashed`] and names blocks as that engine does.
    #[must_use]
    pub fn with_returns(mut self, every: u32) -> Self {
        let SchedulerOptions { tokens_per_block, reporters, .. } = self.options;
        self.returning = (every > 0).then(|| Returning::new(every, reporters, tokens_per_block.get()));
        self
    }

    /// Results about requests that owed nothing: late or duplicate, counted and dropped.
    #[must_use]
    pub const fn unknown_results(&self) -> u64 {
        self.unknown_results
    }

    /// Requests that are kept and not computed to their end: of these [`Scheduler::build_step`] must hear.
    pub fn unsaved(&self) -> impl Iterator<Item = &RequestId> {
        self.keeps.iter().filter(|(_, keep)| keep.is_open()).map(|(id, _)| id)
    }

    /// Nobody will come for what a request keeps: it ends, and its blocks are the engine's when nothing reads them any more.
    pub fn unread(&mut self, request: &RequestId) {
        let cancel = self.keeps.get_mut(request).and_then(|keep| keep.unread(request));
        self.next.cancels.extend(cancel);
    }

    fn start_load(
        &mut self,
        request: &Request,
        blocks: &[BlockId],
        local_tokens: u32,
        external_tokens: u32,
    ) -> Result<(), ConnectorError> {
        let Some(TransferParams::Fetch { transfer, from, engine, ask }) = &request.params else {
            return Ok(());
        };
        if self.fetched.contains(&request.id) {
            return Ok(()); // The second call of an asynchronous load: the request is admitted.
        }
        let refuse = |problem: String| ConnectorError::Request { request: request.id.clone(), problem };
        if from.is_empty() {
            return Err(refuse("no address to load from; name every worker of the prefill engine, by rank".to_owned()));
        }
        let per_block = self.options.tokens_per_block.get();
        if !local_tokens.is_multiple_of(per_block) {
            return Err(refuse(format!(
                "{local_tokens} local tokens are not a multiple of {per_block}, the block size"
            )));
        }
        let first_block = (local_tokens / per_block) as usize;
        // Nothing to load (a full local hit) is a load of no tokens: the prefill side must still hear that it is over.
        let end = local_tokens + external_tokens;
        let needed = end.div_ceil(per_block) as usize;
        if blocks.len() < needed {
            return Err(refuse(format!("{} blocks cannot hold {end} tokens; {needed} are needed", blocks.len())));
        }
        if let Some(returning) = &mut self.returning {
            returning.follow(&request.id, (*transfer, from), &request.hashes, request.prompt_tokens);
        }
        self.fetched.insert(request.id.clone());
        self.loads.insert(
            request.id.clone(),
            LoadState {
                transfer: *transfer,
                local: local_tokens,
                started: BTreeSet::new(),
                ended: BTreeSet::new(),
                failure: None,
                surfaced: external_tokens == 0,
                aborted: false,
            },
        );
        self.next.loads.push(Load {
            request: request.id.clone(),
            transfer: *transfer,
            from: from.clone(),
            engine: engine.clone(),
            ask: ask.clone(),
            blocks: blocks[first_block.min(needed)..needed].to_vec(),
            tokens: local_tokens..if external_tokens == 0 { end } else { end.next_multiple_of(self.rules.granule) },
            layerwise: self.options.layerwise,
        });
        Ok(())
    }

    /// Has the tier bring what it promised for a request that no peer's KV is fetched for.
    fn start_restore(
        &mut self,
        request: &Request,
        blocks: &[BlockId],
        local_tokens: u32,
        external_tokens: u32,
    ) -> Result<(), ConnectorError> {
        let Some(tier) = &mut self.tier else { return Ok(()) };
        if !self.fetched.insert(request.id.clone()) {
            return Ok(()); // The second call: the request is admitted.
        }
        let per_block = self.options.tokens_per_block.get();
        let (first, end) = (local_tokens / per_block, (local_tokens + external_tokens) / per_block);
        let refuse = |problem: String| ConnectorError::Request { request: request.id.clone(), problem };
        if !local_tokens.is_multiple_of(per_block) || !external_tokens.is_multiple_of(per_block) {
            let problem =
                format!("{local_tokens} local and {external_tokens} kept tokens are not whole blocks of {per_block}");
            return Err(refuse(problem));
        }
        let Some(blocks) = blocks.get(first as usize..end as usize) else {
            return Err(refuse(format!(
                "{} blocks cannot hold {} tokens",
                blocks.len(),
                local_tokens + external_tokens
            )));
        };
        tier.follow(&request.id, &request.hashes);
        tier.queried(request.hashes.len().saturating_sub(first as usize));
        if !blocks.is_empty() {
            tier.restore(&request.id, &request.hashes, blocks, local_tokens);
        }
        Ok(())
    }

    fn apply_tier(&mut self, rank: TpRank, results: TierResults, applied: &mut Applied) {
        for kept in results.kept {
            let request = self.tier.as_mut().and_then(|tier| tier.kept(rank, kept));
            match request {
                Some(Some(request)) => self.release_if_free(request, applied),
                Some(None) => {}
                None => self.unknown_results += 1,
            }
        }
        if let Some(tier) = &mut self.tier {
            results.offered.into_iter().for_each(|offered| tier.offered(offered));
        }
        for transfer in results.returned {
            match self.returning.as_mut().map_or(Err(()), |returning| returning.returned(rank, transfer)) {
                Ok(Some(request)) => self.release_if_free(request, applied),
                Ok(None) => {}
                Err(()) => self.unknown_results += 1,
            }
        }
        for restored in results.restored {
            match self.tier.as_mut().map_or(Err(()), |tier| tier.restored(rank, restored)) {
                Ok(Some(RestoreEnd::Complete(id))) => applied.loaded.push(id),
                Ok(Some(RestoreEnd::Short(failure))) => applied.missed.push(failure),
                Ok(Some(RestoreEnd::Aborted(id))) => self.release_if_free(id, applied),
                Ok(None) => {}
                Err(()) => self.unknown_results += 1,
            }
        }
    }

    /// Whether a request's blocks are still read or written.
    fn uses(&self, id: &RequestId) -> bool {
        self.keeps.contains_key(id)
            || self.loads.contains_key(id)
            || self.tier.as_ref().is_some_and(|tier| tier.uses(id))
            || self.returning.as_ref().is_some_and(|returning| returning.uses(id))
    }

    fn apply_started(&mut self, rank: TpRank, id: RequestId, applied: &mut Applied) {
        let Some(load) = self.loads.get_mut(&id) else {
            self.unknown_results += 1;
            return;
        };
        load.started.insert(rank);
        let wanted = !load.surfaced && !load.aborted && load.failure.is_none();
        if wanted && load.started.len() >= usize::from(self.options.reporters) {
            load.surfaced = true;
            applied.loaded.push(id);
        }
    }

    fn apply_load_end(&mut self, rank: TpRank, id: RequestId, failure: Option<LoadFailure>, applied: &mut Applied) {
        let reporters = usize::from(self.options.reporters);
        let Some(load) = self.loads.get_mut(&id) else {
            self.unknown_results += 1;
            return;
        };
        if !load.ended.insert(rank) {
            self.unknown_results += 1;
            return;
        }
        // One rank's failure is the request's: the others need not go on.
        let cancel = failure.is_some() && load.failure.is_none() && !load.aborted && load.ended.len() < reporters;
        load.failure = match (load.failure.take(), failure) {
            (Some(first), Some(next)) => Some(shorter(first, next)),
            (first, next) => first.or(next),
        };
        if cancel {
            self.next.cancels.push(Cancel { request: id, transfer: load.transfer, side: Side::Load, waiting: None });
            return;
        }
        if load.ended.len() < reporters {
            return;
        }
        let load = self.loads.remove(&id).expect("looked up above");
        self.next.settled.push(id.clone());
        if load.aborted {
            self.let_go(&id);
            self.release_if_free(id, applied);
        } else if let Some(failure) = load.failure {
            self.fail(failure, load.local, applied);
        } else if !load.surfaced {
            applied.loaded.push(id);
        }
    }

    /// What a request reads in place is not what it was.
    fn apply_withdrawn(&mut self, failure: LoadFailure, applied: &mut Applied) {
        let id = &failure.request;
        match self.loads.get_mut(id) {
            // Other ranks still load: the end that they wait for is a failure now.
            Some(load) => {
                applied.void.push(id.clone());
                load.failure = Some(match load.failure.take() {
                    Some(first) => shorter(first, failure),
                    None => failure,
                });
            }
            // Once for all ranks: the first one's word is the request's.
            None if self.fetched.contains(id) && !applied.failed.iter().any(|known| known.request == *id) => {
                self.fail(failure, 0, applied);
            }
            None => self.unknown_results += 1,
        }
    }

    /// A load failed on some rank. What others read in place for it is no place to compute into: none of it is kept.
    fn fail(&mut self, failure: LoadFailure, local: u32, applied: &mut Applied) {
        self.let_go(&failure.request);
        applied.failed.push(match self.reads_in_place {
            true => LoadFailure { good_tokens: local, good_blocks: Vec::new(), ..failure },
            false => failure,
        });
    }

    /// Nothing is read in place for a request any more, on any rank.
    fn let_go(&mut self, request: &RequestId) {
        if self.reads_in_place {
            self.next.finished.push(request.clone());
        }
    }

    fn apply_sent(&mut self, rank: TpRank, id: RequestId, applied: &mut Applied) {
        let reporters = usize::from(self.options.reporters);
        let Some(keep) = self.keeps.get_mut(&id) else {
            self.unknown_results += 1;
            return;
        };
        if !keep.report(rank) {
            self.unknown_results += 1;
            return;
        }
        if !keep.is_over(reporters) || keep.may_begin_again() {
            return;
        }
        let keep = self.keeps.remove(&id).expect("looked up above");
        if keep.held {
            self.release_if_free(id, applied);
        } else if keep.is_offered() {
            applied.unwanted.push(id);
        }
    }

    fn release_if_free(&mut self, id: RequestId, applied: &mut Applied) {
        if !self.uses(&id) && self.held.remove(&id) {
            applied.released.push(id);
        }
    }
}

impl Scheduler for PdScheduler {
    fn matched_tokens(&self, request: &Request, local_tokens: u32) -> Match {
        if self.fetched.contains(&request.id) {
            return Match::None;
        }
        let tokens = match (&request.params, &self.tier) {
            // A peer has all of it.
            (Some(TransferParams::Fetch { .. }), _) => request.prompt_tokens.saturating_sub(local_tokens),
            (_, Some(tier)) => tier.matched(&request.hashes, request.prompt_tokens, local_tokens),
            (_, None) => 0,
        };
        NonZeroU32::new(tokens).map_or(Match::None, Match::Async)
    }

    fn allocated(
        &mut self,
        request: &Request,
        blocks: &[BlockId],
        local_tokens: u32,
        external_tokens: u32,
    ) -> Result<(), ConnectorError> {
        match &request.params {
            None => self.start_restore(request, blocks, local_tokens, external_tokens),
            Some(TransferParams::Fetch { .. }) => self.start_load(request, blocks, local_tokens, external_tokens),
            Some(TransferParams::Keep { transfer, to, readers }) => {
                self.start_restore(request, blocks, local_tokens, external_tokens)?;
                if let Some(keep) = self.keeps.get_mut(&request.id) {
                    keep.readmitted(*transfer, to.as_ref());
                } else if self.kept.insert(request.id.clone()) {
                    let keep = KeepState::new(*transfer, to.clone(), *readers, request.prompt_tokens);
                    self.keeps.insert(request.id.clone(), keep);
                }
                Ok(())
            }
        }
    }

    fn preempted(&mut self, requests: &[RequestId]) {
        for id in requests {
            let keeps = self.keeps.get_mut(id).is_some_and(KeepState::preempt);
            let others = self.loads.contains_key(id)
                || (self.reads_in_place && self.fetched.contains(id))
                || self.tier.as_ref().is_some_and(|tier| tier.uses(id))
                || self.returning.as_ref().is_some_and(|returning| returning.uses(id));
            if keeps || others {
                self.next.preempted.push(id.clone());
            }
        }
    }

    fn unadmitted(&mut self, request: &Request) {
        let (id, one) = (&request.id, BTreeSet::new());
        match &request.params {
            Some(TransferParams::Fetch { transfer, from, engine, ask }) if !self.fetched.contains(id) => {
                let (transfer, started, ended) = (*transfer, one.clone(), one);
                let load =
                    LoadState { transfer, local: 0, started, ended, failure: None, surfaced: true, aborted: true };
                self.loads.insert(id.clone(), load);
                let (request, from, engine, ask) = (id.clone(), from.clone(), engine.clone(), ask.clone());
                let (blocks, tokens) = (vec![], 0..0);
                let nothing = Load { request, transfer, from, engine, ask, blocks, tokens, layerwise: false };
                self.next.loads.push(nothing);
            }
            Some(TransferParams::Keep { transfer, to, readers }) if !self.kept.contains(id) => {
                let mut keep = KeepState::new(*transfer, to.clone(), *readers, request.prompt_tokens);
                self.next.cancels.extend(keep.finish(id, true));
                keep.held = true;
                self.keeps.insert(id.clone(), keep);
            }
            _ => {}
        }
    }

    fn hashed(&mut self, request: &RequestId, more: &[BlockHash]) {
        if let Some(tier) = &mut self.tier {
            tier.hashed(request, more);
        }
        if let Some(returning) = &mut self.returning {
            returning.hashed(request, more);
        }
    }

    fn build_step(&mut self, step: &ScheduledStep) -> StepMeta {
        let mut meta = std::mem::take(&mut self.next);
        if let Some(tier) = &mut self.tier {
            step.requests.iter().for_each(|request| tier.scheduled(request));
            tier.set_gauges();
            meta.tier = tier.take();
        }
        if let Some(returning) = &mut self.returning {
            step.requests.iter().for_each(|request| returning.scheduled(request));
            meta.tier.returns = returning.take();
        }
        for request in &step.requests {
            if self.loads.contains_key(&request.id) {
                meta.reading.push(request.id.clone());
            }
            let keep = self.keeps.get_mut(&request.id);
            meta.saves.extend(keep.and_then(|keep| keep.save(request, self.rules)));
        }
        meta
    }

    fn short_of_blocks(&mut self) {
        self.next.recall = true;
    }

    fn finished(&mut self, request: &RequestId, blocks: &[BlockId], how: EngineFinish) -> Hold {
        if self.fetched.remove(request) && !self.loads.contains_key(request) {
            self.let_go(request);
        }
        self.kept.remove(request);
        let mut transfer = None;
        if let Some(load) = self.loads.get_mut(request) {
            load.aborted = true;
            transfer = Some(load.transfer);
            let (request, transfer) = (request.clone(), load.transfer);
            self.next.cancels.push(Cancel { request, transfer, side: Side::Load, waiting: None });
        }
        if let Some(keep) = self.keeps.get_mut(request) {
            self.next.cancels.extend(keep.finish(request, how == EngineFinish::Aborted));
            keep.held = true;
            transfer = Some(keep.transfer).filter(|_| keep.is_offered());
            if keep.is_over(self.options.reporters.into()) {
                self.keeps.remove(request);
            }
        }
        if let Some(tier) = &mut self.tier {
            tier.finished(request);
        }
        if let Some(returning) = &mut self.returning {
            returning.finished(request, how);
        }
        if !self.uses(request) {
            return Hold::Free;
        }
        self.held.insert(request.clone());
        Hold::Until { transfer, blocks: blocks.to_vec() }
    }

    fn apply(&mut self, results: Vec<StepResults>) -> Applied {
        let mut applied = Applied::default();
        for result in results {
            let rank = result.tp_rank;
            for id in result.started {
                self.apply_started(rank, id, &mut applied);
            }
            for id in result.loaded {
                self.apply_load_end(rank, id, None, &mut applied);
            }
            for failure in result.failed {
                self.apply_load_end(rank, failure.request.clone(), Some(failure), &mut applied);
            }
            for failure in result.withdrawn {
                self.apply_withdrawn(failure, &mut applied);
            }
            for id in result.sent {
                self.apply_sent(rank, id, &mut applied);
            }
            self.apply_tier(rank, result.tier, &mut applied);
        }
        if let Some(tier) = &mut self.tier {
            tier.set_gauges();
        }
        applied
    }

    fn has_pending(&self) -> bool {
        let tier = self.tier.as_ref().is_some_and(TierHalf::has_pending)
            || self.returning.as_ref().is_some_and(Returning::has_pending);
        !self.loads.is_empty() || !self.keeps.is_empty() || !self.next.is_empty() || tier
    }
}

/// Two ranks' failures of one load as one: the shortest good prefix is the request's, and the first reason is the cause, since the
/// ranks that follow were cancelled because of it.
fn shorter(first: LoadFailure, next: LoadFailure) -> LoadFailure {
    let reason = first.reason.clone();
    LoadFailure { reason, ..if first.good_tokens <= next.good_tokens { first } else { next } }
}

#[cfg(test)]
mod tests;
