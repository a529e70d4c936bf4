//! Blocks on their way to the tier and back.
//!
//! A store is *queued* (its pages guarded for reading), *copying* (pieces of it are with the movers, in their second queue), *with
//! the tier*, or over. It is queued and copied only while no transfer has work to hand out, in pieces small enough that one which
//! was begun holds nobody up. Whatever is full drops it: the queue here, the tier's berths, the queue before the tier.
//!
//! A restore's blocks are asked of the tier one by one, copied into the request's guarded pages by the movers, and compared with
//! the digest that was stored.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kvferry_kernels::PageGuards;
use kvferry_protocol::BlockId;
use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::{CacheView, CopyPlan, Selection, plan};
use kvferry_protocol::transfer::Time;

use super::driver::Driver;
use super::jobs::{Direction, TierJob};
use super::tier_threads::{TierAnswer, TierThreads};
use crate::contract::{Kept, LoadFailure, RequestId, Restore, Restored, Store, StoreStage};
use crate::metrics::TierDrop;
use crate::pd::caches::Caches;
use crate::tier::{Tier, TierError};

/// A worker's tier and all that is on its way to it or from it.
#[derive(Debug)]
pub(super) struct Keeping {
    tier: Arc<dyn Tier>,
    threads: TierThreads,
    /// The tier's memory, as a cache of the same part of the model.
    pub(super) memory: Caches,
    stores: BTreeMap<u64, Storing>,
    /// Pieces that wait for the movers, in order.
    pieces: VecDeque<TierJob>,
    restores: BTreeMap<u64, Restoring>,
}

/// One block on its way to the tier.
#[derive(Debug)]
struct Storing {
    store: Store,
    berth: BlockId,
    /// The engine's pages, and the tier's.
    guards: Option<(Option<PageGuards>, Option<PageGuards>)>,
    /// Pieces that are queued or with a mover.
    left: u32,
    /// Pieces that are with a mover.
    copying: u32,
    digest: Digest,
    /// Why it will not be stored; it still waits for its last piece.
    dropped: Option<TierDrop>,
    /// When it is given up while it is queued, or called late while it is with the tier.
    deadline: Option<Time>,
    late: bool,
}

/// Blocks on their way back.
#[derive(Debug)]
struct Restoring {
    restore: Restore,
    guards: Option<PageGuards>,
    /// What is known of each block: `None` while it is under way.
    done: Vec<Option<bool>>,
    /// How many were asked for, and how many are with a mover.
    asked: usize,
    copying: usize,
    want: BTreeMap<usize, (Digest, BlockId, Option<PageGuards>)>,
    failure: Option<String>,
    spoiled: Vec<BlockId>,
    deadline: Time,
}

impl Keeping {
    pub(super) fn new(tier: Arc<dyn Tier>, threads: TierThreads, memory: Caches) -> Self {
        let (stores, pieces, restores) = Default::default();
        Self { tier, threads, memory, stores, pieces, restores }
    }

    /// Whether pages of some requests are read or written.
    pub(super) fn touches(&self, requests: &[RequestId]) -> bool {
        let reads = |storing: &Storing| storing.guards.is_some() && requests.contains(&storing.store.request);
        self.stores.values().any(reads)
            || self.restores.values().any(|restoring| requests.contains(&restoring.restore.request))
    }

    /// Whether any engine page is read or written.
    pub(super) fn is_busy(&self) -> bool {
        !self.restores.is_empty() || self.stores.values().any(|storing| storing.guards.is_some())
    }

    /// The next moment at which something is given up.
    pub(super) fn deadline(&self) -> Option<Time> {
        let stores = self.stores.values().filter_map(|storing| storing.deadline);
        stores.chain(self.restores.values().map(|restoring| restoring.deadline)).min()
    }

    /// Bytes of the tier's memory, and blocks that wait for a mover.
    pub(super) fn usage(&self) -> (u64, u64) {
        let shape = self.memory.layout().shape();
        let queued = self.stores.values().filter(|storing| storing.guards.is_some()).count();
        (shape.block_bytes() * u64::from(shape.blocks), queued as u64)
    }

    /// Makes room for frames, or for none.
    pub(super) fn enter(&self, frames: &[BlockId]) -> Result<Vec<BlockId>, String> {
        let mut berths = Vec::with_capacity(frames.len());
        for &frame in frames {
            match self.tier.enter(frame) {
                Ok(berth) => berths.push(berth),
                Err(error) => {
                    self.leave(&berths);
                    return Err(error.to_string());
                }
            }
        }
        Ok(berths)
    }

    /// Gives berths back.
    pub(super) fn leave(&self, berths: &[BlockId]) {
        berths.iter().for_each(|&berth| self.tier.leave(berth));
    }

    fn plan(
        &self,
        caches: &Caches,
        store: &Store,
        berth: BlockId,
        layers: std::ops::Range<u16>,
    ) -> Result<CopyPlan, String> {
        copy_plan((caches, store.block), (&self.memory, berth), store.first_token, layers)
    }
}

/// One block from one cache to another of the same block size and part of the model.
fn copy_plan(
    (from, source): (&Caches, BlockId),
    (to, target): (&Caches, BlockId),
    first_token: u32,
    layers: std::ops::Range<u16>,
) -> Result<CopyPlan, String> {
    let (source, target) = ([source], [target]);
    let source = CacheView { layout: from.layout(), shard: from.shard(), blocks: &source, first_token };
    let target = CacheView { layout: to.layout(), shard: to.shard(), blocks: &target, first_token };
    let tokens = first_token..first_token + from.tokens_per_block();
    plan(&source, &target, &Selection { layers, heads: from.heads(), tokens }).map_err(|error| error.to_string())
}

impl Driver {
    /// A step is complete: these of its blocks shall be kept.
    pub(super) fn keep(&mut self, stores: Vec<Store>) {
        for store in stores {
            let order = store.order;
            if let Err((why, problem)) = self.begin_store(store) {
                tracing::debug!(order, why = why.word(), problem, "block is not kept");
                self.drop_store(order, why);
            }
        }
    }

    fn begin_store(&mut self, store: Store) -> Result<(), (TierDrop, String)> {
        let Some(keeping) = &mut self.keeping else { return Err((TierDrop::Full, "this worker has no tier".into())) };
        if keeping.stores.len() >= STORES {
            return Err((TierDrop::Full, format!("{STORES} blocks are on their way")));
        }
        let failed = |problem| (TierDrop::Failed, problem);
        let berth = keeping.tier.enter(store.frame).map_err(|error| (drop_of(&error), error.to_string()))?;
        let layers = self.caches.layers();
        let guards = self.caches.guard_read(&[store.block], layers.clone()).and_then(|source| {
            let target = keeping.memory.guard_write(&[berth], layers.clone())?;
            Ok((source, target))
        });
        let guards = guards.inspect_err(|_| keeping.tier.leave(berth)).map_err(failed)?;
        let bytes = self.caches.bytes_per_cell(&self.caches.heads()) * u64::from(self.caches.tokens_per_block());
        let step = u16::try_from(PIECE_BYTES / bytes.max(1)).unwrap_or(u16::MAX).clamp(1, layers.len() as u16);
        let parts: Result<Vec<_>, _> = layers
            .clone()
            .step_by(step.into())
            .map(|first| keeping.plan(&self.caches, &store, berth, first..first.saturating_add(step).min(layers.end)))
            .collect();
        let parts = parts.inspect_err(|_| keeping.tier.leave(berth)).map_err(failed)?;
        let (order, left) = (store.order, parts.len() as u32);
        let piece = |plan| TierJob { order, block: 0, plan, direction: Direction::Store };
        keeping.pieces.extend(parts.into_iter().map(piece));
        let storing = Storing {
            store,
            berth,
            guards: Some(guards),
            left,
            copying: 0,
            digest: Digest::ZERO,
            dropped: None,
            deadline: None,
            late: false,
        };
        keeping.stores.insert(order, storing);
        Ok(())
    }

    /// A peer's block landed in a berth and was verified: its own digest is all that is missing.
    pub(super) fn keep_landed(&mut self, order: u64, (frame, berth): (BlockId, BlockId), first_token: u32) {
        let Some(keeping) = &mut self.keeping else { return };
        let layers = self.caches.layers();
        let made = keeping.memory.guard_read(&[berth], layers.clone()).and_then(|guards| {
            let tokens = first_token..first_token + self.caches.tokens_per_block();
            let selection = Selection { layers, heads: keeping.memory.heads(), tokens };
            Ok((guards, keeping.memory.plan_in_place(berth, first_token, &selection)?))
        });
        let (guards, plan) = match made {
            Ok(made) => made,
            Err(problem) => {
                tracing::error!(problem, "a block that came cannot be kept");
                keeping.tier.leave(berth);
                return self.drop_store(order, TierDrop::Failed);
            }
        };
        let store = Store { order, request: RequestId::new(""), block: berth, first_token, frame };
        keeping.pieces.push_back(TierJob { order, block: 0, plan, direction: Direction::Stay });
        let guards = Some((None, guards));
        let (left, copying, digest, dropped, deadline, late) = (1, 0, Digest::ZERO, None, None, false);
        keeping.stores.insert(order, Storing { store, berth, guards, left, copying, digest, dropped, deadline, late });
    }

    /// Hands pieces of stores to the movers while no transfer waits for them.
    pub(super) fn push_stores(&mut self) {
        let Some(keeping) = &mut self.keeping else { return };
        while !self.posting.has_jobs()
            && let Some(piece) = keeping.pieces.pop_front()
        {
            let order = piece.order;
            if let Some(piece) = self.movers.submit_small(piece) {
                keeping.pieces.push_front(piece);
                return;
            }
            if let Some(storing) = keeping.stores.get_mut(&order) {
                storing.copying += 1;
            }
        }
    }

    /// A mover copied a piece.
    pub(super) fn tier_job_done(&mut self, job: &TierJob, digest: Result<Digest, String>) {
        match job.direction {
            Direction::Store | Direction::Stay => self.piece_stored(job, digest),
            Direction::Bring => self.block_restored(job.order, job.block, digest),
        }
    }

    fn piece_stored(&mut self, job: &TierJob, digest: Result<Digest, String>) {
        let now = self.now();
        let Some(keeping) = &mut self.keeping else { return };
        let Some(storing) = keeping.stores.get_mut(&job.order) else { return };
        storing.copying -= 1;
        storing.left -= 1;
        match digest {
            Ok(digest) => storing.digest += digest,
            Err(problem) => {
                tracing::error!(problem, "a block cannot be copied to the tier");
                storing.dropped = Some(TierDrop::Failed);
            }
        }
        if let Some(why) = storing.dropped {
            if storing.copying == 0 {
                self.drop_store(job.order, why);
            }
            return;
        }
        if storing.left > 0 {
            return;
        }
        storing.guards = None;
        storing.deadline = Some(now + PATIENCE);
        let (frame, berth, digest) = (storing.store.frame, storing.berth, storing.digest);
        if !keeping.threads.store(job.order, frame, berth, digest) {
            return self.drop_store(job.order, TierDrop::Full);
        }
        let bytes = self.caches.layout().shape().block_bytes();
        self.board.metrics.tier_stored_bytes_total.add(bytes);
        self.report_store(job.order, StoreStage::Copied);
    }

    /// Ends a store that was not taken over by the tier; its movers are done with it.
    pub(super) fn drop_store(&mut self, order: u64, why: TierDrop) {
        if let Some(keeping) = &mut self.keeping {
            keeping.pieces.retain(|piece| piece.order != order);
            if let Some(storing) = keeping.stores.remove(&order) {
                keeping.tier.leave(storing.berth);
            }
        }
        self.board.metrics.tier_dropped_blocks_total.at(why).add(1);
        self.report_store(order, StoreStage::Dropped);
    }

    fn report_store(&mut self, order: u64, stage: StoreStage) {
        self.board.results().tier.kept.push(Kept { order, stage });
        self.answer_waiting();
    }

    /// The tier answered.
    pub(super) fn tier_answer(&mut self, answer: TierAnswer) {
        match answer {
            TierAnswer::Stored { order, outcome } => {
                if self.keeping.as_mut().and_then(|keeping| keeping.stores.remove(&order)).is_none() {
                    return;
                }
                let stage = match outcome {
                    Ok(()) => StoreStage::Stored,
                    Err(error) => {
                        tracing::warn!(%error, "a block was not kept");
                        self.board.metrics.tier_dropped_blocks_total.at(drop_of(&error)).add(1);
                        StoreStage::Dropped
                    }
                };
                self.report_store(order, stage);
            }
            TierAnswer::Fetched { order, block, outcome } => self.fetched(order, block, outcome),
        }
    }

    /// Requests are over, and their blocks wait for their stores: they get a moment more.
    pub(super) fn hurry(&mut self, requests: &[RequestId]) {
        let by = self.now() + GRACE;
        let Some(keeping) = &mut self.keeping else { return };
        for storing in keeping.stores.values_mut() {
            if storing.guards.is_some() && requests.contains(&storing.store.request) {
                storing.deadline = Some(by);
            }
        }
    }

    /// The engine wants these requests' blocks back now. What a mover copies at this moment ends in microseconds.
    pub(super) fn abandon_stores(&mut self, mut which: impl FnMut(&RequestId) -> bool) {
        let Some(keeping) = &mut self.keeping else { return };
        let mut over = Vec::new();
        for (&order, storing) in &mut keeping.stores {
            if storing.guards.is_some() && which(&storing.store.request) {
                storing.dropped = Some(TierDrop::Ended);
                storing.deadline = None;
                over.extend((storing.copying == 0).then_some(order));
            }
        }
        let stores = &keeping.stores;
        keeping.pieces.retain(|piece| stores.get(&piece.order).is_none_or(|storing| storing.dropped.is_none()));
        let mut restores = Vec::new();
        for (&order, restoring) in &mut keeping.restores {
            if which(&restoring.restore.request) {
                restoring.failure.get_or_insert_with(|| "the request's blocks were wanted back".into());
                restores.push(order);
            }
        }
        over.into_iter().for_each(|order| self.drop_store(order, TierDrop::Ended));
        restores.into_iter().for_each(|order| self.finish_restore(order));
    }

    /// Begins to bring blocks.
    pub(super) fn restore(&mut self, restore: Restore) {
        let deadline = self.now() + PATIENCE;
        let guards = self.caches.guard_write(&restore.blocks, self.caches.layers());
        let Some(keeping) = &mut self.keeping else {
            return self.report_restore(&restore, 0, Some("this worker has no tier".into()), vec![]);
        };
        let (guards, failure) = match guards {
            Ok(guards) => (guards, None),
            Err(problem) => (None, Some(problem)),
        };
        let (order, frames) = (restore.order, restore.frames.len());
        let restoring = Restoring {
            restore,
            guards,
            done: vec![None; frames],
            asked: 0,
            copying: 0,
            want: BTreeMap::new(),
            failure,
            spoiled: Vec::new(),
            deadline,
        };
        keeping.restores.insert(order, restoring);
        self.ask_tier(order);
        self.finish_restore(order);
    }

    /// Asks the tier for as many blocks as its queue takes; the rest when it answered.
    fn ask_tier(&mut self, order: u64) {
        let Some(keeping) = &mut self.keeping else { return };
        let Some(restoring) = keeping.restores.get_mut(&order) else { return };
        while restoring.failure.is_none()
            && let Some(&frame) = restoring.restore.frames.get(restoring.asked)
            && keeping.threads.fetch(order, restoring.asked, frame)
        {
            restoring.asked += 1;
        }
    }

    fn fetched(&mut self, order: u64, block: usize, outcome: Result<(BlockId, Digest), TierError>) {
        let Some(keeping) = &mut self.keeping else { return };
        let (berth, digest) = match (keeping.restores.get_mut(&order), outcome) {
            (Some(restoring), Ok(found)) if restoring.failure.is_none() => {
                restoring.copying += 1;
                found
            }
            (restoring, outcome) => {
                match (restoring, outcome) {
                    (Some(restoring), Err(error)) => {
                        restoring.done[block] = Some(false);
                        restoring.failure.get_or_insert_with(|| error.to_string());
                    }
                    // Too late for its request.
                    (_, Ok((berth, _))) => keeping.tier.leave(berth),
                    (None, Err(_)) => {}
                }
                return self.finish_restore(order);
            }
        };
        let restoring = &keeping.restores[&order].restore;
        let first_token = restoring.first_token + block as u32 * self.caches.tokens_per_block();
        let target = restoring.blocks[block];
        let layers = self.caches.layers();
        let made = keeping.memory.guard_read(&[berth], layers.clone()).and_then(|guards| {
            let plan = copy_plan((&keeping.memory, berth), (&self.caches, target), first_token, layers)?;
            Ok((guards, plan))
        });
        let Some(restoring) = keeping.restores.get_mut(&order) else { return };
        match made {
            Ok((guards, plan)) => {
                restoring.want.insert(block, (digest, berth, guards));
                self.posting.tier_job(TierJob { order, block, plan, direction: Direction::Bring });
            }
            Err(problem) => {
                restoring.want.insert(block, (digest, berth, None));
                self.block_restored(order, block, Err(problem));
            }
        }
        self.ask_tier(order);
    }

    fn block_restored(&mut self, order: u64, block: usize, digest: Result<Digest, String>) {
        let Some(keeping) = &mut self.keeping else { return };
        let Some(restoring) = keeping.restores.get_mut(&order) else { return };
        let Some((want, berth, guards)) = restoring.want.remove(&block) else { return };
        restoring.copying -= 1;
        drop(guards);
        keeping.tier.leave(berth);
        match digest {
            Ok(found) if found == want => restoring.done[block] = Some(true),
            Ok(found) => {
                let frame = restoring.restore.frames[block];
                tracing::warn!(%frame, %want, %found, "a kept block changed; it is computed instead");
                keeping.tier.forget(frame);
                restoring.done[block] = Some(false);
                restoring.spoiled.push(frame);
                restoring.failure.get_or_insert_with(|| format!("frame {frame} of the tier holds other bytes"));
                self.board.metrics.tier_digest_mismatches_total.add(1);
            }
            Err(problem) => {
                tracing::error!(problem, "a kept block cannot be copied");
                restoring.done[block] = Some(false);
                restoring.failure.get_or_insert(problem);
            }
        }
        self.finish_restore(order);
    }

    /// Reports a restore that is complete or has failed, once no mover touches its pages.
    fn finish_restore(&mut self, order: u64) {
        let Some(keeping) = &mut self.keeping else { return };
        let Some(restoring) = keeping.restores.get(&order).filter(|restoring| restoring.copying == 0) else { return };
        let good = restoring.done.iter().take_while(|done| **done == Some(true)).count();
        let complete = good == restoring.done.len();
        if !complete && restoring.failure.is_none() {
            return;
        }
        let short = restoring.restore.frames.len() < restoring.restore.blocks.len();
        let failure = restoring.failure.clone().or_else(|| short.then(|| "blocks left the tier meanwhile".into()));
        let Some(Restoring { restore, guards, spoiled, .. }) = keeping.restores.remove(&order) else { return };
        drop(guards);
        self.report_restore(&restore, good, failure, spoiled);
        self.answer_waiting();
    }

    fn report_restore(&self, restore: &Restore, good: usize, failure: Option<String>, spoiled: Vec<BlockId>) {
        let good_tokens = good as u32 * self.caches.tokens_per_block();
        self.board.metrics.tier_restored_tokens_total.add(good_tokens.into());
        let failure = failure.map(|reason| LoadFailure {
            request: restore.request.clone(),
            good_tokens: restore.first_token + good_tokens,
            good_blocks: restore.blocks[..good].to_vec(),
            reason,
        });
        self.board.results().tier.restored.push(Restored { order: restore.order, failure, spoiled });
    }

    /// Gives up what took too long.
    pub(super) fn expire_tier(&mut self) {
        let now = self.now();
        let Some(keeping) = &mut self.keeping else { return };
        if keeping.deadline().is_none_or(|at| at > now) {
            return;
        }
        let (mut late, mut queued) = (Vec::new(), std::collections::BTreeSet::new());
        for (&order, storing) in &mut keeping.stores {
            if storing.deadline.is_none_or(|at| at > now) {
                continue;
            }
            storing.deadline = None;
            if storing.guards.is_some() {
                queued.insert(order);
                storing.dropped = Some(TierDrop::Ended);
            } else if !std::mem::replace(&mut storing.late, true) {
                late.push(order);
            }
        }
        keeping.pieces.retain(|piece| !queued.contains(&piece.order));
        queued.retain(|order| keeping.stores[order].copying == 0);
        let mut stuck = Vec::new();
        for (&order, restoring) in &mut keeping.restores {
            if restoring.deadline <= now {
                // Once: what a mover still copies ends it.
                restoring.deadline = now + PATIENCE;
                restoring.failure.get_or_insert_with(|| "the tier did not answer in time".into());
                stuck.push(order);
            }
        }
        self.board.metrics.tier_late_total.add((late.len() + stuck.len()) as u64);
        late.into_iter().for_each(|order| self.report_store(order, StoreStage::Late));
        queued.into_iter().for_each(|order| self.drop_store(order, TierDrop::Ended));
        stuck.into_iter().for_each(|order| self.finish_restore(order));
    }
}

fn drop_of(error: &TierError) -> TierDrop {
    match error {
        TierError::Full { .. } => TierDrop::Full,
        _ => TierDrop::Failed,
    }
}

/// Blocks on their way to the tier at once; more are dropped. Bounds the plans and guards that wait.
const STORES: usize = 4096;
/// Bytes that one job of a mover copies for the tier: some tens of microseconds, which is what a transfer's job may wait for it.
const PIECE_BYTES: u64 = 256 << 10;
/// How long blocks of a request that is over wait to be copied, while transfers leave the movers no time.
const GRACE: Duration = Duration::from_millis(200);
/// How long a tier may take for one call before nobody waits for it.
const PATIENCE: Duration = Duration::from_secs(2);
