//! The scheduler half of the prefill/decode connector: bookkeeping only, no I/O.
//!
//! A request may owe two things, a load and a keep. Each is an obligation of its own with its own set of reporting ranks; blocks
//! are the engine's again when no obligation is left. A report about an obligation that does not exist is counted and dropped.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use kvferry_protocol::{BlockId, PeerId, TpRank, TransferId};

use crate::contract::{
    Applied, Cancel, EngineFinish, Hold, Load, LoadFailure, Match, Readers, Request, RequestId, Save, ScheduledStep,
    Scheduler, Side, StepMeta, StepResults, TransferParams,
};
use crate::error::ConnectorError;

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
    loads: BTreeMap<RequestId, LoadState>,
    keeps: BTreeMap<RequestId, KeepState>,
    /// Requests whose one load is behind them, until the engine finishes them.
    fetched: BTreeSet<RequestId>,
    next: StepMeta,
    unknown_results: u64,
}

#[derive(Debug)]
struct LoadState {
    transfer: TransferId,
    started: BTreeSet<TpRank>,
    ended: BTreeSet<TpRank>,
    failure: Option<LoadFailure>,
    surfaced: bool,
    aborted: bool,
}

#[derive(Debug)]
struct KeepState {
    transfer: TransferId,
    to: Option<PeerId>,
    readers: u16,
    prompt_tokens: u32,
    computed: u32,
    ended: BTreeSet<TpRank>,
    /// The engine has finished the request and left its blocks here.
    held: bool,
}

impl PdScheduler {
    /// An idle scheduler half.
    #[must_use]
    pub fn new(options: SchedulerOptions) -> Self {
        Self {
            options,
            loads: BTreeMap::new(),
            keeps: BTreeMap::new(),
            fetched: BTreeSet::new(),
            next: StepMeta::default(),
            unknown_results: 0,
        }
    }

    /// Results about requests that owed nothing: late or duplicate, counted and dropped.
    #[must_use]
    pub const fn unknown_results(&self) -> u64 {
        self.unknown_results
    }

    fn start_load(
        &mut self,
        request: &Request,
        blocks: &[BlockId],
        local_tokens: u32,
        external_tokens: u32,
    ) -> Result<(), ConnectorError> {
        let Some(TransferParams::Fetch { transfer, from, ask }) = &request.params else {
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
        self.fetched.insert(request.id.clone());
        self.loads.insert(
            request.id.clone(),
            LoadState {
                transfer: *transfer,
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
            ask: ask.clone(),
            blocks: blocks[first_block.min(needed)..needed].to_vec(),
            tokens: local_tokens..end,
            layerwise: self.options.layerwise,
        });
        Ok(())
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
            self.release_if_free(id, applied);
        } else if let Some(failure) = load.failure {
            applied.failed.push(failure);
        } else if !load.surfaced {
            applied.loaded.push(id);
        }
    }

    fn apply_sent(&mut self, rank: TpRank, id: RequestId, applied: &mut Applied) {
        let reporters = usize::from(self.options.reporters);
        let Some(keep) = self.keeps.get_mut(&id) else {
            self.unknown_results += 1;
            return;
        };
        if !keep.ended.insert(rank) {
            self.unknown_results += 1;
            return;
        }
        if keep.ended.len() < reporters {
            return;
        }
        let keep = self.keeps.remove(&id).expect("looked up above");
        if keep.held {
            self.release_if_free(id, applied);
        } else {
            applied.unwanted.push(id);
        }
    }

    fn release_if_free(&mut self, id: RequestId, applied: &mut Applied) {
        if !self.keeps.contains_key(&id) && !self.loads.contains_key(&id) {
            applied.released.push(id);
        }
    }
}

impl Scheduler for PdScheduler {
    fn matched_tokens(&self, request: &Request, local_tokens: u32) -> Match {
        if self.fetched.contains(&request.id) || !matches!(request.params, Some(TransferParams::Fetch { .. })) {
            return Match::None;
        }
        NonZeroU32::new(request.prompt_tokens.saturating_sub(local_tokens)).map_or(Match::None, Match::Async)
    }

    fn allocated(
        &mut self,
        request: &Request,
        blocks: &[BlockId],
        local_tokens: u32,
        external_tokens: u32,
    ) -> Result<(), ConnectorError> {
        match &request.params {
            None => Ok(()),
            Some(TransferParams::Fetch { .. }) => self.start_load(request, blocks, local_tokens, external_tokens),
            Some(TransferParams::Keep { transfer, to, readers }) => {
                self.keeps.entry(request.id.clone()).or_insert_with(|| KeepState {
                    transfer: *transfer,
                    to: to.clone(),
                    readers: *readers,
                    prompt_tokens: request.prompt_tokens,
                    computed: 0,
                    ended: BTreeSet::new(),
                    held: false,
                });
                Ok(())
            }
        }
    }

    fn build_step(&mut self, step: &ScheduledStep) -> StepMeta {
        let mut meta = std::mem::take(&mut self.next);
        for request in &step.requests {
            if self.loads.contains_key(&request.id) {
                meta.reading.push(request.id.clone());
            }
            let Some(keep) = self.keeps.get_mut(&request.id) else { continue };
            let computed = request.tokens.end.min(keep.prompt_tokens);
            if computed <= keep.computed {
                continue;
            }
            let first = keep.computed == 0;
            keep.computed = computed;
            meta.saves.push(Save {
                request: request.id.clone(),
                transfer: keep.transfer,
                to: keep.to.clone(),
                readers: keep.readers,
                blocks: request.blocks.clone(),
                computed,
                prompt_tokens: keep.prompt_tokens,
                first,
            });
        }
        meta
    }

    fn finished(&mut self, request: &RequestId, blocks: &[BlockId], how: EngineFinish) -> Hold {
        self.fetched.remove(request);
        let mut held = None;
        if let Some(load) = self.loads.get_mut(request) {
            load.aborted = true;
            held = Some(load.transfer);
            let (request, transfer) = (request.clone(), load.transfer);
            self.next.cancels.push(Cancel { request, transfer, side: Side::Load, waiting: None });
        }
        if let Some(keep) = self.keeps.get_mut(request) {
            let incomplete = keep.computed < keep.prompt_tokens;
            if how == EngineFinish::Aborted || incomplete {
                let (request, transfer) = (request.clone(), keep.transfer);
                // Once it has begun, the worker knows whom it is with, and whether it is over.
                let readers = || Readers { to: keep.to.clone(), count: keep.readers };
                let waiting = (keep.computed == 0).then(readers);
                self.next.cancels.push(Cancel { request, transfer, side: Side::Keep, waiting });
            }
            keep.held = true;
            held = Some(keep.transfer);
        }
        held.map_or(Hold::Free, |transfer| Hold::Until { transfer, blocks: blocks.to_vec() })
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
            for id in result.sent {
                self.apply_sent(rank, id, &mut applied);
            }
        }
        applied
    }

    fn has_pending(&self) -> bool {
        !self.loads.is_empty() || !self.keeps.is_empty() || !self.next.is_empty()
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
