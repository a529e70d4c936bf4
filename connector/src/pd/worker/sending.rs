//! One transfer on the sending side: begins it, performs what its machine asks for, and ends it.

use std::collections::BTreeMap;
use std::num::{NonZeroU32, NonZeroU64};

use kvferry_kernels::PageGuards;
use kvferry_protocol::layout::{CacheView, CopyPlan, Selection, plan};
use kvferry_protocol::message::{Grant, Message, Verdict};
use kvferry_protocol::transfer::{InputError, Rect, Sender, SenderConfig, SenderOutput, Time};
use kvferry_protocol::{BlockId, Generation, PeerId, TransferId};

use super::driver::{Driver, Side};
use super::overlap::Overlap;
use super::step::Handed;
use super::window::{GrantedWindow, Windows};
use crate::contract::{RequestId, Save};
use crate::metrics;
use crate::pd::caches::Caches;
use crate::trace::{Kind, Span};

/// One request's KV on its way to a peer.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) machine: Sender,
    pub(super) request: RequestId,
    /// The receiver, once it is known.
    pub(super) peer: Option<PeerId>,
    /// The engine was told of the end, and nothing reads the pages.
    pub(super) over: bool,
    /// All blocks of the request so far, from token 0.
    pub(super) blocks: Vec<BlockId>,
    /// Read guards over what was handed to the machine, until the lease is released.
    guards: Vec<PageGuards>,
    /// The windows of each grant that was adopted.
    windows: BTreeMap<Generation, Vec<GrantedWindow>>,
    began: Time,
    /// When the first write was asked for, and when the engine handed over the last part.
    first_post: Option<Time>,
    last_computed: Time,
    pub(super) overlap: Overlap,
    span: tracing::Span,
}

impl Sending {
    /// The window that holds a rectangle of a grant, and the plan from our pages to it.
    pub(super) fn plan(
        &self,
        caches: &Caches,
        generation: Generation,
        rect: Rect,
    ) -> Result<(&GrantedWindow, CopyPlan), String> {
        let windows = self.windows.get(&generation).ok_or("the grant's windows are not known")?;
        let window = windows.iter().find(|window| window.rect.contains(rect)).ok_or("no window holds the rectangle")?;
        let (layout, blocks) = (window.shape.layout(), window.shape.block_ids());
        let source = CacheView { layout: caches.layout(), shard: caches.shard(), blocks: &self.blocks, first_token: 0 };
        let target = window.shape.view(&layout, &blocks);
        let heads = window.shape.selection().heads;
        let selection = Selection { layers: rect.layers(), heads, tokens: rect.tokens() };
        let plan = plan(&source, &target, &selection).map_err(|error| error.to_string())?;
        Ok((window, plan))
    }
}

impl Driver {
    /// The engine computes a request whose KV a peer wants.
    pub(super) fn lease(&mut self, save: Save) {
        if let Some(entry) = self.sending.get_mut(&save.transfer) {
            entry.blocks = save.blocks;
            return;
        }
        if !save.first {
            return; // It ended while the engine computed; the report is on its way to the scheduler.
        }
        let peer = save.to.clone().or_else(|| self.early.peer_of(save.transfer).cloned());
        if peer.as_ref().is_some_and(|peer| self.early.is_declined(peer, save.transfer)) {
            // The receiver gave up before its turn came.
            self.board.results().sent.push(save.request);
            return;
        }
        let began = self.now();
        let entry = match self.sending(&save, began) {
            Ok(entry) => entry,
            Err(problem) => {
                tracing::warn!(request = %save.request, transfer = %save.transfer, problem, "transfer refused");
                self.board.results().sent.push(save.request);
                if let Some(peer) = peer {
                    self.decline(&peer, save.transfer, &problem);
                }
                return;
            }
        };
        self.board.metrics.transfers_started_total.at(metrics::Side::Send).add(1);
        self.sending.insert(save.transfer, entry);
        self.count_live();
        match peer {
            Some(peer) => self.begin_with(save.transfer, peer),
            None => self.turn(save.transfer, Side::Sending),
        }
    }

    fn sending(&self, save: &Save, began: Time) -> Result<Sending, String> {
        let limit = self.config.limits().max_transfers.get() as usize;
        if self.sending.len() >= limit {
            return Err(format!("{limit} transfers are under way; raise max_transfers or send less"));
        }
        let layers = self.caches.layers();
        let held = Rect::new(0..save.prompt_tokens, layers).map_err(|error| error.to_string())?;
        let deadlines = self.config.deadlines();
        let cells = self.config.limits().chunk_bytes / self.caches.bytes_per_cell().max(1);
        let config = SenderConfig {
            transfer: save.transfer,
            held,
            order: self.config.order().into(),
            lease_ttl: deadlines.lease_ttl,
            lease_max: deadlines.transfer + deadlines.lease_ttl,
            absent: deadlines.absent,
            word: deadlines.verdict,
            max_posts_in_flight: self.config.limits().posts_in_flight.into(),
            max_cells_per_post: NonZeroU64::new(cells).unwrap_or(NonZeroU64::MIN),
            align_tokens: NonZeroU32::new(self.caches.tokens_per_block()).unwrap_or(NonZeroU32::MIN),
        };
        Ok(Sending {
            machine: Sender::new(began, config),
            request: save.request.clone(),
            peer: None,
            over: false,
            blocks: save.blocks.clone(),
            guards: Vec::new(),
            windows: BTreeMap::new(),
            began,
            first_post: None,
            last_computed: began,
            overlap: Overlap::default(),
            span: tracing::debug_span!("send", request = %save.request, transfer = %save.transfer),
        })
    }

    /// The receiver of a transfer is known: its session, and what it said before the request came.
    fn begin_with(&mut self, transfer: TransferId, peer: PeerId) {
        let early = self.early.take(&peer, transfer);
        let session = self.peers.session(&peer);
        if let Some(entry) = self.sending.get_mut(&transfer) {
            entry.peer = Some(peer);
        }
        match session {
            Some(session) => self.with_sending(transfer, |entry, now| entry.machine.peer_up(now, session)),
            // It asked in a session that is gone: it may come back, within the time that a peer may be away.
            None => {
                self.with_sending(transfer, |entry, now| entry.machine.peer_up(now, 0));
                self.with_sending(transfer, |entry, now| entry.machine.peer_down(now));
            }
        }
        if let Some(early) = early {
            self.with_sending(transfer, |entry, now| entry.machine.message(now, early));
        }
    }

    /// A peer speaks of a transfer whose receiver was not known: it is this one.
    pub(super) fn meet(&mut self, transfer: TransferId, peer: PeerId, message: Message) {
        self.begin_with(transfer, peer);
        self.with_sending(transfer, |entry, now| entry.machine.message(now, message));
    }

    /// Part of a request's KV is in the cache.
    pub(super) fn computed(&mut self, handed: &Handed) {
        let (now, Handed { transfer, rect, compute }) = (self.now(), *handed);
        let Some(entry) = self.sending.get_mut(&transfer).filter(|entry| !entry.over) else { return };
        let per_block = self.caches.tokens_per_block();
        let blocks = (rect.tokens().start / per_block) as usize..rect.tokens().end.div_ceil(per_block) as usize;
        let guards = match entry.blocks.get(blocks) {
            Some(blocks) => self.caches.guard_read(blocks, rect.layers()),
            None => Err(format!("{rect} is beyond the request's {} blocks", entry.blocks.len())),
        };
        match guards {
            Ok(guards) => {
                entry.guards.extend(guards);
                entry.last_computed = now;
                let layer_bytes = rect.tokens().len() as u64 * self.caches.bytes_per_cell();
                entry.overlap.computed(compute, layer_bytes);
                self.with_sending(transfer, |entry, now| entry.machine.computed(now, rect));
            }
            Err(problem) => {
                tracing::error!(%transfer, %rect, problem, "computed pages cannot be leased");
                self.with_sending(transfer, |entry, now| entry.machine.fail(now, &problem));
            }
        }
    }

    /// Feeds a sending machine one input and performs what it asks for.
    pub(super) fn with_sending(
        &mut self,
        transfer: TransferId,
        input: impl FnOnce(&mut Sending, Time) -> Result<(), InputError>,
    ) {
        let now = self.now();
        if let Some(entry) = self.sending.get_mut(&transfer) {
            let taken = input(entry, now);
            self.note(taken);
            self.turn(transfer, Side::Sending);
        }
    }

    /// Performs all outputs of a sending machine; returns its next deadline.
    pub(super) fn turn_sending(&mut self, transfer: TransferId) -> Option<Time> {
        let _span = self.sending.get(&transfer)?.span.clone().entered();
        loop {
            let entry = self.sending.get_mut(&transfer)?;
            match entry.machine.poll_output() {
                Some(output) => self.perform_sending(transfer, output),
                None if entry.over => {
                    self.sending.remove(&transfer);
                    self.count_live();
                    return None;
                }
                None => return entry.machine.poll_timeout().map(|(at, _)| at),
            }
        }
    }

    fn perform_sending(&mut self, transfer: TransferId, output: SenderOutput) {
        let now = self.now();
        let Some(entry) = self.sending.get_mut(&transfer) else { return };
        match output {
            SenderOutput::Adopt(grant) => entry.adopt(&grant),
            SenderOutput::Post { generation, sequence, rect } => {
                entry.first_post.get_or_insert(now);
                self.post(transfer, generation, sequence, rect);
            }
            SenderOutput::CancelPosts { generation } => self.cancel_posts(transfer, generation),
            SenderOutput::Send(message) => {
                if let Some(peer) = entry.peer.clone() {
                    self.send(&peer, &message);
                }
            }
            SenderOutput::ReleaseLease => entry.guards.clear(),
            SenderOutput::Finished(verdict) => self.finish_sending(transfer, &verdict),
        }
    }

    fn finish_sending(&mut self, transfer: TransferId, verdict: &Verdict) {
        let now = self.now();
        let Some(entry) = self.sending.get_mut(&transfer) else { return };
        entry.over = true;
        let (request, elapsed) = (entry.request.clone(), now.since(entry.began));
        if let (Verdict::Done, Some(first)) = (verdict, entry.first_post) {
            let metrics = &self.board.metrics;
            metrics.wire_seconds.observe(now.since(first));
            metrics.exposed_transfer_seconds.observe(now.since(entry.last_computed.max(first)));
            metrics.transfer_compute_seconds.observe(entry.overlap.compute);
            metrics.transfer_link_seconds.observe(entry.overlap.link);
            metrics.unhideable_transfer_seconds.observe(entry.overlap.unhideable());
        }
        self.count_end(metrics::Side::Send, verdict, elapsed);
        tracing::debug!(%verdict, elapsed_us = elapsed.as_micros(), "send ended");
        let began = self.instant(self.sending[&transfer].began);
        self.board.tracer.record(|| Span::since(began, Kind::Send).transfer(transfer).request(&request));
        self.board.results().sent.push(request);
    }
}

impl Sending {
    /// Reads the windows of a grant. A grant that cannot be read gets no windows, so its posts are lost and the receiver hears.
    fn adopt(&mut self, grant: &Grant) {
        match Windows::decode(&grant.window) {
            Ok(windows) => {
                self.windows.insert(grant.generation, windows);
            }
            Err(problem) => tracing::warn!(transfer = %grant.transfer, problem, "a grant's windows cannot be read"),
        }
    }
}
