//! What the scheduler half knows of one request whose KV is kept for a decode engine.
//!
//! A keep may begin more than once: a preempted request loses its blocks, and the workers end what they began of it; admitted
//! again under another transfer, it begins anew. Workers report ends by request, so each rank owes one report for each beginning,
//! and the keep is over when none is owed.

use std::collections::BTreeMap;

use kvferry_protocol::{PeerId, TpRank, TransferId};

use crate::contract::{Cancel, Readers, RequestId, Save, ScheduledRequest, Side};

/// One request's keep.
#[derive(Debug)]
pub(super) struct KeepState {
    pub(super) transfer: TransferId,
    to: Option<PeerId>,
    readers: u16,
    prompt_tokens: u32,
    computed: u32,
    /// How often the workers were told to begin it, or to report that they never did.
    begun: u32,
    /// How many ends each rank has reported.
    ended: BTreeMap<TpRank, u32>,
    /// Its blocks are gone; nothing begins under this transfer any more.
    preempted: bool,
    /// Nobody will come for it.
    unread: bool,
    /// The engine has finished the request and left its blocks here.
    pub(super) held: bool,
}

/// How saves of an engine are told.
#[derive(Clone, Copy, Debug)]
pub(super) struct SaveRules {
    /// Tokens are told in whole multiples of this.
    pub(super) granule: u32,
    /// The engine shares blocks that are still to be computed by the same step.
    pub(super) shares_early: bool,
}

impl KeepState {
    pub(super) const fn new(transfer: TransferId, to: Option<PeerId>, readers: u16, prompt_tokens: u32) -> Self {
        Self {
            transfer,
            to,
            readers,
            prompt_tokens,
            computed: 0,
            begun: 0,
            ended: BTreeMap::new(),
            preempted: false,
            unread: false,
            held: false,
        }
    }

    /// Whether a step must tell what it computes of the request.
    pub(super) const fn is_open(&self) -> bool {
        !self.preempted && !self.unread && self.computed < self.prompt_tokens
    }

    /// The request was given blocks again.
    pub(super) fn readmitted(&mut self, transfer: TransferId, to: Option<&PeerId>) {
        if self.preempted && transfer != self.transfer {
            (self.transfer, self.to, self.preempted) = (transfer, to.cloned(), false);
        }
    }

    /// Its blocks are the engine's; returns whether the workers have something to end.
    pub(super) const fn preempt(&mut self) -> bool {
        let has_begun = self.computed > 0;
        (self.computed, self.preempted) = (0, true);
        has_begun
    }

    /// A step computes some of it.
    pub(super) fn save(&mut self, request: &ScheduledRequest, how: SaveRules) -> Option<Save> {
        let SaveRules { granule, shares_early } = how;
        let computed = request.tokens.end.min(self.prompt_tokens);
        if self.preempted || self.unread || computed <= self.computed {
            return None;
        }
        let first = self.computed == 0;
        let cached = request.tokens.start.min(computed);
        let ready = if shares_early { self.computed } else { cached };
        self.begun += u32::from(first);
        self.computed = computed;
        let prompt_tokens = self.prompt_tokens.next_multiple_of(granule);
        Some(Save {
            request: request.id.clone(),
            transfer: self.transfer,
            to: self.to.clone(),
            readers: self.readers,
            blocks: request.blocks.clone(),
            computed: if computed == self.prompt_tokens { prompt_tokens } else { computed },
            prompt_tokens,
            ready,
            cached,
            first,
        })
    }

    /// The engine has finished the request; returns what the workers must be told.
    pub(super) fn finish(&mut self, id: &RequestId, is_aborted: bool) -> Option<Cancel> {
        let cut_short = !self.preempted && !self.unread && (is_aborted || self.computed < self.prompt_tokens);
        // Once it has begun, the worker knows whom it is with, and whether it is over.
        let waiting = (self.computed == 0).then(|| Readers { to: self.to.clone(), count: self.readers });
        let cancel = Cancel { request: id.clone(), transfer: self.transfer, side: Side::Keep, waiting };
        if cut_short && self.computed == 0 {
            self.begun += 1;
        }
        cut_short.then_some(cancel)
    }

    /// Nobody will come for it; returns what the workers must be told.
    pub(super) fn unread(&mut self, id: &RequestId) -> Option<Cancel> {
        if std::mem::replace(&mut self.unread, true) || self.preempted || self.computed == 0 {
            return None;
        }
        let (request, transfer) = (id.clone(), self.transfer);
        Some(Cancel { request, transfer, side: Side::Keep, waiting: None })
    }

    /// A rank reports an end; returns whether one was owed.
    pub(super) fn report(&mut self, rank: TpRank) -> bool {
        let ended = self.ended.entry(rank).or_default();
        let is_owed = *ended < self.begun;
        *ended += u32::from(is_owed);
        is_owed
    }

    /// Whether no worker owes a report, of so many.
    pub(super) fn is_over(&self, reporters: usize) -> bool {
        let all_spoke = self.ended.values().filter(|&&ended| ended == self.begun).count() >= reporters;
        if self.begun == 0 { self.preempted || self.unread } else { all_spoke }
    }

    /// Whether somebody may come for it.
    pub(super) const fn is_offered(&self) -> bool {
        !self.preempted && !self.unread
    }

    /// Whether the request may still be kept anew.
    pub(super) const fn may_begin_again(&self) -> bool {
        self.preempted && !self.unread && !self.held
    }
}
