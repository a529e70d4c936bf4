//! One part of what is kept for a decode engine: the transfer to one of its ranks. Performs what its machine asks for, and ends it.

use std::ops::Range;
use std::sync::Arc;

use kvferry_kernels::PageGuards;
use kvferry_kernels::device::Event;
use kvferry_protocol::layout::{CacheView, CopyPlan, Selection, plan};
use kvferry_protocol::message::{Grant, Message, Verdict};
use kvferry_protocol::transfer::{InputError, Rect, Sender, SenderOutput, Time};
use kvferry_protocol::{BlockId, Generation, PeerId, TpRank, TransferId};

use super::device::After;
use super::driver::{Driver, Side};
use super::overlap::Overlap;
use super::step::Handed;
use super::window::{GrantedWindow, Windows};
use crate::contract::{RequestId, Save};
use crate::metrics;
use crate::pd::caches::Caches;
use crate::trace::{Kind, Span};

/// What one decode rank reads of a request's KV.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) machine: Sender,
    /// What it is a part of, in [`Driver::leases`].
    pub(super) lease: TransferId,
    pub(super) request: RequestId,
    /// The rank that reads, and how many its engine has.
    pub(super) reader: TpRank,
    pub(super) readers: u16,
    /// Which heads it carries.
    heads: Range<u16>,
    /// The receiver, once it is known.
    pub(super) peer: Option<PeerId>,
    /// The lease was told of the end, and nothing of this part reads the pages.
    pub(super) over: bool,
    /// It goes back to a peer's tier, rather than on to a decode engine.
    pub(super) returns: bool,
    /// The lease is over and drained: nothing reads the pages, though the receiver's word may still be awaited.
    pub(super) released: bool,
    /// All blocks of the request so far, from token 0.
    pub(super) blocks: Vec<BlockId>,
    /// When what was handed to the machine is in the pages, where a device computes it; events of one stream, in order.
    computed: Vec<(Rect, Arc<dyn Event>)>,
    /// Read guards over what was handed to the machine, until the lease is released.
    guards: Vec<PageGuards>,
    /// The windows of the grant in use. A post is planned when its machine asks for it, so no other grant's are looked up again.
    windows: Option<(Generation, Vec<GrantedWindow>)>,
    began: Time,
    /// When the first write was asked for, and when the engine handed over the last part.
    first_post: Option<Time>,
    last_computed: Time,
    pub(super) overlap: Overlap,
    span: tracing::Span,
}

/// Who reads a part, and which heads it carries.
#[derive(Debug)]
pub(super) struct PartTo {
    pub(super) transfer: TransferId,
    pub(super) rank: TpRank,
    pub(super) heads: Range<u16>,
}

impl Sending {
    pub(super) fn new(machine: Sender, part: &PartTo, save: &Save, began: Time) -> Self {
        let request = save.request.clone();
        let span = tracing::debug_span!("send", %request, transfer = %part.transfer, to_rank = %part.rank);
        Self {
            machine,
            lease: save.transfer,
            request,
            reader: part.rank,
            readers: save.readers,
            heads: part.heads.clone(),
            peer: None,
            over: false,
            returns: false,
            released: false,
            blocks: save.blocks.clone(),
            computed: Vec::new(),
            guards: Vec::new(),
            windows: None,
            began,
            first_post: None,
            last_computed: began,
            overlap: Overlap::default(),
            span,
        }
    }

    /// Whether a peer that speaks of the part is its receiver, who was not known.
    pub(super) fn may_be(&self, peer: &PeerId) -> bool {
        self.peer.is_none() && self.reader == peer.tp_rank
    }

    /// What must be passed before a rectangle's pages may be read: of one stream's events the last covers those before it.
    pub(super) fn after(&self, rect: Rect) -> After {
        self.computed.iter().rev().find(|(of, _)| of.overlaps(rect)).map(|(_, event)| Arc::clone(event))
    }

    /// The window that holds a rectangle of a grant.
    pub(super) fn window(&self, generation: Generation, rect: Rect) -> Option<&GrantedWindow> {
        let (of, windows) = self.windows.as_ref()?;
        windows.iter().find(|window| *of == generation && window.rect.contains(rect))
    }

    /// The window that holds a rectangle of a grant, and the plan from our pages to it.
    pub(super) fn plan(
        &self,
        caches: &Caches,
        generation: Generation,
        rect: Rect,
    ) -> Result<(&GrantedWindow, CopyPlan), String> {
        let window = self.window(generation, rect).ok_or("no window that is known holds the rectangle")?;
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
    /// The receiver of a part is known: its session, and what it said before the request came.
    pub(super) fn begin_with(&mut self, transfer: TransferId, peer: PeerId) {
        let early = self.early.take(&peer, transfer);
        let session = self.peers.session(&peer);
        if let Some(entry) = self.sending.get_mut(&transfer) {
            entry.peer = Some(peer);
        }
        match session {
            Some(session) => self.reach(transfer, session),
            // It asked in a session that is gone, or its session is not up yet: it may come within the time that a peer may be away.
            None => {
                self.with_sending(transfer, |entry, now| entry.machine.peer_up(now, 0));
                self.with_sending(transfer, |entry, now| entry.machine.peer_down(now));
            }
        }
        if let Some(early) = early {
            self.with_sending(transfer, |entry, now| entry.machine.message(now, early));
        }
    }

    /// A session with a part's receiver is up.
    pub(super) fn reach(&mut self, transfer: TransferId, session: u64) {
        self.with_sending(transfer, |entry, now| entry.machine.peer_up(now, session));
        let Some(entry) = self.sending.get(&transfer) else { return };
        let Some((peer, (_, ranks))) = entry.peer.as_ref().and_then(|peer| Some((peer, self.peers.place(peer)?)))
        else {
            return;
        };
        if ranks != entry.readers {
            let problem = format!(
                "{peer} is one of {ranks} ranks, but prefill's request says that {} read; give prefill's request the decode engine's \
                 tensor-parallel size (`\"tp_size\": {ranks}` in vLLM's kv_transfer_params, `readers` in Rust)",
                entry.readers
            );
            self.fail_lease(entry.lease, &problem);
        }
    }

    /// A peer speaks of a transfer whose receiver was not known: it is this one.
    pub(super) fn meet(&mut self, transfer: TransferId, peer: PeerId, message: Message) {
        self.begin_with(transfer, peer);
        self.with_sending(transfer, |entry, now| entry.machine.message(now, message));
    }

    /// Part of a request's KV is in the cache, or will be once `after` is passed.
    pub(super) fn part_computed(&mut self, transfer: TransferId, handed: &Handed, after: &After) {
        let (now, Handed { rect, compute, .. }) = (self.now(), *handed);
        // Once the lease is released the engine may have its blocks back at any time: nothing is guarded any more, though the engine
        // still computes what it has not heard of, and the receiver's word is awaited.
        let reads = |entry: &&mut Sending| !entry.over && !entry.released;
        let Some(entry) = self.sending.get_mut(&transfer).filter(reads) else { return };
        let per_block = self.caches.tokens_per_block();
        let blocks = (rect.tokens().start / per_block) as usize..rect.tokens().end.div_ceil(per_block) as usize;
        let guards = match entry.blocks.get(blocks) {
            Some(blocks) => self.caches.guard_read(blocks, rect.layers()),
            None => Err(format!("{rect} is beyond the request's {} blocks", entry.blocks.len())),
        };
        match guards {
            Ok(guards) => {
                entry.guards.extend(guards);
                entry.computed.extend(after.iter().map(|event| (rect, Arc::clone(event))));
                entry.last_computed = now;
                let layer_bytes = rect.tokens().len() as u64 * self.caches.bytes_per_cell(&entry.heads);
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
            SenderOutput::ReleaseLease => {
                let guards = std::mem::take(&mut entry.guards);
                entry.computed.clear();
                entry.released = true;
                let (lease, returns) = (entry.lease, entry.returns);
                if let Some(lease) = self.leases.get_mut(&lease).filter(|_| !returns) {
                    lease.hold.keep(guards);
                }
                if !returns {
                    self.part_released(lease);
                }
            }
            SenderOutput::Finished(verdict) => self.finish_sending(transfer, &verdict),
        }
    }

    fn finish_sending(&mut self, transfer: TransferId, verdict: &Verdict) {
        let now = self.now();
        let Some(entry) = self.sending.get_mut(&transfer) else { return };
        entry.over = true;
        let (lease, returns, request, began) = (entry.lease, entry.returns, entry.request.clone(), entry.began);
        let elapsed = now.since(began);
        if let (Verdict::Done, Some(first), false) = (verdict, entry.first_post, returns) {
            let metrics = &self.board.metrics;
            metrics.wire_seconds.observe(now.since(first));
            metrics.exposed_transfer_seconds.observe(now.since(entry.last_computed.max(first)));
            metrics.transfer_compute_seconds.observe(entry.overlap.compute);
            metrics.transfer_link_seconds.observe(entry.overlap.link);
            metrics.unhideable_transfer_seconds.observe(entry.overlap.unhideable());
        }
        self.count_end(metrics::Side::Send, verdict, elapsed);
        tracing::debug!(%verdict, elapsed_us = elapsed.as_micros(), "part ended");
        let span = || Span::since(self.instant(began), Kind::Send).transfer(transfer).request(&request);
        self.board.tracer.record(span);
        if returns {
            return self.return_ended(transfer, verdict);
        }
        self.ended.insert(transfer, format!("the transfer is over on the side that sends: {verdict}"));
        self.part_sent(lease, transfer);
    }
}

impl Sending {
    /// Reads the windows of a grant. A grant that cannot be read gets no windows, so its posts are lost and the receiver hears.
    fn adopt(&mut self, grant: &Grant) {
        match Windows::decode(&grant.window) {
            Ok(windows) => {
                self.windows = Some((grant.generation, windows));
            }
            Err(problem) => tracing::warn!(transfer = %grant.transfer, problem, "a grant's windows cannot be read"),
        }
    }
}
