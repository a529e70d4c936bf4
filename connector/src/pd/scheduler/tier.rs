//! The tier's part of the scheduler half: which blocks of which requests are kept, which are brought, and who waits for it.
//!
//! A block is kept once per tier: its frame is reserved when the step that completes it is built, and committed when every rank
//! has reported it stored. A request whose blocks are still being copied is busy; the engine gets them back when that is over,
//! which depends on kvferry's own threads and a short deadline, never on the tier.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_protocol::{BlockId, TpRank};

use crate::contract::{
    Kept, LoadFailure, Offered, Refuse, RequestId, Restore, Restored, ScheduledRequest, Spoken, Store, StoreStage,
    Take, TierMeta,
};
use crate::metrics::{Metrics, ReturnRefusal};
use crate::pool::BlockHash;
use crate::tier::{PinId, TierCounts, TierIndex};

/// The tier beside one scheduler half.
#[derive(Debug)]
pub(super) struct TierHalf {
    index: Box<dyn TierIndex>,
    metrics: Arc<Metrics>,
    reporters: usize,
    tokens_per_block: u32,
    following: BTreeMap<RequestId, Following>,
    stores: BTreeMap<u64, StoreState>,
    /// Stores of each request that still read its blocks.
    reading: BTreeMap<RequestId, usize>,
    restores: BTreeMap<u64, RestoreState>,
    next_order: u64,
    next: TierMeta,
}

/// A request whose blocks are kept as they are completed.
#[derive(Debug)]
struct Following {
    hashes: Vec<BlockHash>,
    /// The first block that was not looked at yet.
    next: usize,
}

#[derive(Debug)]
struct StoreState {
    /// Whose blocks are read; `None` for what a peer sends.
    request: Option<RequestId>,
    frame: BlockId,
    copied: Spoken,
    ended: Spoken,
    dropped: bool,
    /// A rank's tier does not answer: nobody steps for its sake.
    late: bool,
}

#[derive(Debug)]
struct RestoreState {
    request: RequestId,
    pin: PinId,
    ended: Spoken,
    failure: Option<LoadFailure>,
    spoiled: Vec<BlockId>,
    aborted: bool,
}

impl StoreState {
    fn new(request: Option<RequestId>, frame: BlockId) -> Self {
        Self { request, frame, copied: Spoken::new(), ended: Spoken::new(), dropped: false, late: false }
    }
}

/// How a restore ended over all ranks.
pub(super) enum RestoreEnd {
    /// All blocks are there.
    Complete(RequestId),
    /// Some are not.
    Short(LoadFailure),
    /// Its request was over before.
    Aborted(RequestId),
}

impl TierHalf {
    pub(super) fn new(index: Box<dyn TierIndex>, metrics: Arc<Metrics>, reporters: u16, tokens_per_block: u32) -> Self {
        let (following, stores, reading, restores, next) = Default::default();
        let reporters = reporters.into();
        Self { index, metrics, reporters, tokens_per_block, following, stores, reading, restores, next_order: 0, next }
    }

    /// Tokens beyond `local_tokens` that the tier has. One token at least is left to the engine: the step that computes it is
    /// the one that hands a request's blocks over, and whose logits choose the next token.
    pub(super) fn matched(&self, hashes: &[BlockHash], prompt_tokens: u32, local_tokens: u32) -> u32 {
        let per_block = self.tokens_per_block;
        let (first, most) = (local_tokens / per_block, prompt_tokens.saturating_sub(1) / per_block);
        let wanted = hashes.get(first as usize..(most as usize).min(hashes.len())).unwrap_or_default();
        self.index.lookup(wanted) as u32 * per_block
    }

    /// A request was admitted: its blocks are kept from now on.
    pub(super) fn follow(&mut self, request: &RequestId, hashes: &[BlockHash]) {
        if !hashes.is_empty() {
            let following = || Following { hashes: hashes.to_vec(), next: 0 };
            self.following.entry(request.clone()).or_insert_with(following);
        }
    }

    /// A request's text grew.
    pub(super) fn hashed(&mut self, request: &RequestId, more: &[BlockHash]) {
        if let Some(following) = self.following.get_mut(request) {
            following.hashes.extend(more);
        }
    }

    /// Brings `blocks` of a request, whose first token is `first_token`.
    pub(super) fn restore(&mut self, request: &RequestId, hashes: &[BlockHash], blocks: &[BlockId], first_token: u32) {
        let first = (first_token / self.tokens_per_block) as usize;
        let wanted = hashes.get(first..(first + blocks.len()).min(hashes.len())).unwrap_or_default();
        let (pin, frames) = self.index.pin(wanted);
        self.metrics.tier_hit_blocks_total.add(frames.len() as u64);
        let order = self.order();
        let (request, blocks) = (request.clone(), blocks.to_vec());
        let state = RestoreState {
            request: request.clone(),
            pin,
            ended: Spoken::new(),
            failure: None,
            spoiled: vec![],
            aborted: false,
        };
        self.restores.insert(order, state);
        self.next.restores.push(Restore { order, request, blocks, frames, first_token });
    }

    /// So many of a request's blocks were asked for.
    pub(super) fn queried(&self, blocks: usize) {
        self.metrics.tier_queried_blocks_total.add(blocks as u64);
    }

    /// A step computes some tokens of a request: the blocks that it completes are kept.
    pub(super) fn scheduled(&mut self, request: &ScheduledRequest) {
        let per_block = self.tokens_per_block;
        let Some(following) = self.following.get_mut(&request.id) else { return };
        let complete =
            ((request.tokens.end / per_block) as usize).min(following.hashes.len()).min(request.blocks.len());
        let from = following.next;
        following.next = from.max(complete);
        for position in from..complete {
            let hash = self.following[&request.id].hashes[position];
            let Some(frame) = self.index.reserve(hash) else { continue };
            let order = self.order();
            self.stores.insert(order, StoreState::new(Some(request.id.clone()), frame));
            *self.reading.entry(request.id.clone()).or_default() += 1;
            self.next.stores.push(Store {
                order,
                request: request.id.clone(),
                block: request.blocks[position],
                first_token: position as u32 * per_block,
                frame,
            });
        }
    }

    /// A peer offers blocks: those that are new are taken, as far as they follow one another and there is room.
    pub(super) fn offered(&mut self, offered: Offered) {
        let Offered { transfer, from, first_token, tokens_per_block, hashes } = offered;
        let frames = if tokens_per_block != self.tokens_per_block || !first_token.is_multiple_of(tokens_per_block) {
            Err(ReturnRefusal::BlockSize)
        } else {
            let new = hashes.iter().position(|hash| self.index.lookup(std::slice::from_ref(hash)) == 0);
            new.ok_or(ReturnRefusal::Present).and_then(|first| {
                let frames: Vec<_> = hashes[first..].iter().map_while(|hash| self.index.reserve(*hash)).collect();
                if frames.is_empty() { Err(ReturnRefusal::Full) } else { Ok((first, frames)) }
            })
        };
        match frames {
            Ok((first, frames)) => {
                let stores = frames.into_iter().map(|frame| {
                    let order = self.order();
                    self.stores.insert(order, StoreState::new(None, frame));
                    (order, frame)
                });
                let stores = stores.collect();
                let first_token = first_token + first as u32 * tokens_per_block;
                self.next.takes.push(Take { transfer, from, first_token, stores });
            }
            Err(why) => {
                self.metrics.returns_refused_total.at(why).add(1);
                self.next.refusals.push(Refuse { transfer, to: from });
            }
        }
    }

    /// A request is over. Whether the tier still uses its blocks: [`TierHalf::uses`].
    pub(super) fn finished(&mut self, request: &RequestId) {
        self.following.remove(request);
        self.restores.values_mut().filter(|state| state.request == *request).for_each(|state| state.aborted = true);
        if self.reading.contains_key(request) {
            self.next.hurried.push(request.clone());
        }
    }

    /// Whether a request's blocks are still read or written for the tier.
    pub(super) fn uses(&self, request: &RequestId) -> bool {
        self.reading.contains_key(request) || self.restores.values().any(|state| state.request == *request)
    }

    /// What the workers shall do.
    pub(super) fn take(&mut self) -> TierMeta {
        std::mem::take(&mut self.next)
    }

    /// Whether a report is awaited that comes by itself.
    pub(super) fn has_pending(&self) -> bool {
        !self.restores.is_empty() || self.stores.values().any(|store| !store.late) || self.next != TierMeta::default()
    }

    /// A rank tells how far a store got; returns the request whose blocks may be free by that, if it reads some. `None` if
    /// it is not known.
    pub(super) fn kept(&mut self, rank: TpRank, kept: Kept) -> Option<Option<RequestId>> {
        let store = self.stores.get_mut(&kept.order)?;
        let request = store.request.clone();
        let reading = store.copied.len() < self.reporters;
        store.late |= kept.stage == StoreStage::Late;
        if kept.stage != StoreStage::Late {
            store.copied.insert(rank);
        }
        if matches!(kept.stage, StoreStage::Stored | StoreStage::Dropped) {
            store.dropped |= kept.stage == StoreStage::Dropped;
            store.ended.insert(rank);
        }
        let copied = reading && store.copied.len() >= self.reporters;
        if store.ended.len() >= self.reporters {
            match store.dropped {
                true => self.index.cancel(store.frame),
                false => {
                    self.index.commit(store.frame);
                    self.metrics.tier_stored_blocks_total.add(1);
                }
            }
            self.stores.remove(&kept.order);
        }
        if copied
            && let Some(request) = &request
            && let Some(left) = self.reading.get_mut(request)
        {
            *left -= 1;
            if *left == 0 {
                self.reading.remove(request);
            }
        }
        Some(request)
    }

    /// A rank tells that a restore ended; the end over all ranks, if this was the last. `Err` if it is not known.
    pub(super) fn restored(&mut self, rank: TpRank, restored: Restored) -> Result<Option<RestoreEnd>, ()> {
        let state = self.restores.get_mut(&restored.order).ok_or(())?;
        if !state.ended.insert(rank) {
            return Err(());
        }
        state.spoiled.extend(restored.spoiled);
        // The shortest good prefix over the ranks is that of the request.
        state.failure = match (state.failure.take(), restored.failure) {
            (Some(a), Some(b)) => Some(if a.good_tokens <= b.good_tokens { a } else { b }),
            (a, b) => a.or(b),
        };
        if state.ended.len() < self.reporters {
            return Ok(None);
        }
        let Some(state) = self.restores.remove(&restored.order) else { return Err(()) };
        self.index.unpin(state.pin, &state.spoiled);
        Ok(Some(match (state.aborted, state.failure) {
            (true, _) => RestoreEnd::Aborted(state.request),
            (false, Some(failure)) => RestoreEnd::Short(failure),
            (false, None) => RestoreEnd::Complete(state.request),
        }))
    }

    /// Sets the gauges that follow the index.
    pub(super) fn set_gauges(&mut self) {
        let TierCounts { frames, filled, evicted_total } = self.index.counts();
        self.metrics.tier_blocks.set(frames as u64);
        self.metrics.tier_blocks_filled.set(filled as u64);
        self.metrics.tier_evictions_total.advance_to(evicted_total);
    }

    fn order(&mut self) -> u64 {
        self.next_order += 1;
        self.next_order
    }
}
