//! One transfer on the receiving side: begins it, performs what its machine asks for, and ends it.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use kvferry_kernels::PageGuards;
use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::window_pages;
use kvferry_protocol::message::{EngineBytes, Message, OpaqueKey, Reason, Verdict};
use kvferry_protocol::transfer::{
    Coverage, GrantRefusal, InputError, Receiver, ReceiverConfig, ReceiverEnd, ReceiverOutput, Rect, Time,
};
use kvferry_protocol::{BlockId, Generation, PeerId, TransferId};
use kvferry_transport::{GrantKey, PeerAddress, Transport};

use super::driver::{Driver, Side};
use super::jobs::{Job, WriteKey};
use super::progress::Ended;
use super::window::{GrantedWindow, Windows};
use crate::contract::{Load, LoadFailure, RequestId};
use crate::metrics;
use crate::pd::caches::Caches;

/// One request's KV on its way into this worker's pages.
#[derive(Debug)]
pub(super) struct Receiving {
    pub(super) machine: Receiver,
    pub(super) request: RequestId,
    pub(super) from: PeerAddress,
    /// Who answers at `from`; stays known while a session is down.
    pub(super) peer: Option<PeerId>,
    /// Why the peer will not have us, or we it.
    pub(super) refusal: Option<String>,
    /// The engine was told of the end, and nothing touches the pages; only the machine's last words are left.
    pub(super) over: bool,
    /// What asks the prefill engine to compute; sent with each new session until something landed.
    ask: Bytes,
    /// The blocks from the one that holds `tokens.start`.
    blocks: Vec<BlockId>,
    tokens: Range<u32>,
    layerwise: bool,
    started: bool,
    /// Write guards over the pages that are not verified yet.
    guards: Option<PageGuards>,
    /// Verified tokens of each of this worker's layers.
    verified: Vec<u32>,
    /// The transport's grants of each generation.
    grants: BTreeMap<Generation, Vec<GrantKey>>,
    /// Digests that are with a mover.
    verifying: usize,
    /// The end, while it waits for the movers to let go of the pages.
    end: Option<ReceiverEnd>,
    began: Time,
    span: tracing::Span,
}

impl Receiving {
    /// Whether a session with this peer, or one at this address, is what the transfer waits for.
    pub(super) fn waits_for(&self, peer: &PeerId, address: Option<PeerAddress>) -> bool {
        match &self.peer {
            Some(known) => known == peer,
            None => Some(self.from) == address,
        }
    }

    /// Grants the missing rectangles to the peer, a window each. On an error nothing stays granted.
    fn grant(
        &self,
        caches: &Caches,
        transport: &dyn Transport,
        missing: &[Rect],
    ) -> Result<Vec<GrantedWindow>, GrantRefusal> {
        let peer = self.peer.as_ref().ok_or(GrantRefusal::NotConnected)?;
        let mut windows: Vec<GrantedWindow> = Vec::new();
        for &rect in missing {
            match self.grant_one(caches, transport, peer, rect) {
                Ok(window) => windows.push(window),
                Err(refusal) => {
                    windows.iter().for_each(|window| transport.revoke(window.key));
                    return Err(refusal);
                }
            }
        }
        Ok(windows)
    }

    fn grant_one(
        &self,
        caches: &Caches,
        transport: &dyn Transport,
        peer: &PeerId,
        rect: Rect,
    ) -> Result<GrantedWindow, GrantRefusal> {
        let per_block = caches.tokens_per_block();
        let (start, end) = (rect.tokens().start - self.tokens.start, rect.tokens().end - self.tokens.start);
        let blocks = (start / per_block) as usize..end.div_ceil(per_block) as usize;
        let first_token = self.tokens.start + blocks.start as u32 * per_block;
        let (layout, shard) = (caches.layout(), caches.shard());
        let window = window_pages(layout, shard, &self.blocks[blocks], first_token, rect.layers(), caches.heads());
        let (shape, pages) = window.map_err(|error| GrantRefusal::Impossible(error.to_string()))?;
        match transport.grant(peer, pages) {
            Ok(key) => Ok(GrantedWindow { key, rect, shape }),
            Err(kvferry_transport::TransportError::NotConnected { .. }) => Err(GrantRefusal::NotConnected),
            Err(error) => Err(GrantRefusal::Impossible(error.to_string())),
        }
    }

    /// A rectangle is verified: counts it, and returns this worker's layers that are now complete.
    fn verified(&mut self, caches: &Caches, rect: Rect) -> Vec<u16> {
        let first_layer = caches.shard().first_layer.get();
        let mut complete = Vec::new();
        for layer in rect.layers() {
            let local = layer - first_layer;
            let done = &mut self.verified[usize::from(local)];
            *done += rect.tokens().len() as u32;
            if *done as usize == self.tokens.len() {
                complete.push(local);
                if let Some(guards) = &mut self.guards {
                    guards.release_layers(local..local + 1);
                }
            }
        }
        complete
    }
}

impl Driver {
    /// Begins a load.
    pub(super) fn load(&mut self, load: Load) {
        if load.tokens.is_empty() {
            return self.nothing_to_load(&load);
        }
        let began = self.now();
        match self.receiving(&load, began) {
            Ok(entry) => {
                self.board.metrics.transfers_started_total.at(metrics::Side::Receive).add(1);
                self.receiving.insert(load.transfer, entry);
            }
            Err(problem) => {
                tracing::warn!(request = %load.request, transfer = %load.transfer, problem, "load refused");
                return self.report_failure(&load.request, load.tokens.start, &[], problem);
            }
        }
        self.count_live();
        self.dial(load.from);
        if let Some((peer, session)) = self.peers.at(load.from) {
            self.attach(load.transfer, &peer, session);
        } else {
            self.turn(load.transfer, Side::Receiving);
        }
    }

    fn receiving(&self, load: &Load, began: Time) -> Result<Receiving, String> {
        if self.receiving.contains_key(&load.transfer) {
            return Err(format!("transfer {} is being received already; draw a new id for each", load.transfer));
        }
        let limit = self.config.limits().max_transfers.get() as usize;
        if self.receiving.len() >= limit {
            return Err(format!("{limit} transfers are under way; raise max_transfers or send less"));
        }
        let layers = self.caches.layers();
        let wanted = Rect::new(load.tokens.clone(), layers.clone()).map_err(|error| error.to_string())?;
        let guards = self.caches.guard_write(&load.blocks, layers.clone())?;
        let deadlines = self.config.deadlines();
        let config = ReceiverConfig {
            transfer: load.transfer,
            wanted: Coverage::from(wanted),
            order: self.config.order().into(),
            deadline: deadlines.transfer,
            progress: deadlines.progress,
            absent: deadlines.absent,
            lease_ttl: deadlines.lease_ttl,
            ask_before_revoke: None,
            linger: deadlines.verdict,
            max_cuts: MAX_CUTS,
        };
        let machine = Receiver::new(began, config).map_err(|error| error.to_string())?;
        Ok(Receiving {
            machine,
            request: load.request.clone(),
            from: load.from,
            peer: None,
            refusal: None,
            over: false,
            ask: Bytes::copy_from_slice(&load.ask),
            blocks: load.blocks.clone(),
            tokens: load.tokens.clone(),
            layerwise: load.layerwise,
            started: false,
            guards,
            verified: vec![0; layers.len()],
            grants: BTreeMap::new(),
            verifying: 0,
            end: None,
            began,
            span: tracing::debug_span!("load", request = %load.request, transfer = %load.transfer),
        })
    }

    /// Everything is here already: the prefill side, if it was asked by somebody else, may let go.
    fn nothing_to_load(&mut self, load: &Load) {
        self.dial(load.from);
        if let Some((peer, _)) = self.peers.at(load.from) {
            let ended = kvferry_protocol::message::Ended { transfer: load.transfer, verdict: Verdict::Done };
            self.send(&peer, &Message::Ended(ended));
        }
        self.board.progress.ended(&load.request, Ended::Loaded);
        self.board.results().loaded.push(load.request.clone());
        self.board.progress.forget(&load.request);
    }

    /// A session with the transfer's peer is up.
    pub(super) fn attach(&mut self, transfer: TransferId, peer: &PeerId, session: u64) {
        let early = self.early.take(peer, transfer);
        let Some(entry) = self.receiving.get_mut(&transfer) else { return };
        if entry.over {
            return self.with_receiving(transfer, |entry, now| entry.machine.peer_up(now, session));
        }
        entry.peer = Some(peer.clone());
        if !entry.ask.is_empty() && entry.verified.iter().all(|&tokens| tokens == 0) {
            match EngineBytes::new(entry.ask.to_vec()) {
                Ok(ask) => self.send(peer, &Message::Engine(ask)),
                Err(error) => tracing::warn!(%transfer, %error, "the request to the prefill engine cannot be sent"),
            }
        }
        self.with_receiving(transfer, |entry, now| entry.machine.peer_up(now, session));
        if let Some(early) = early {
            self.with_receiving(transfer, |entry, now| entry.machine.message(now, early));
        }
    }

    /// Feeds a receiving machine one input and performs what it asks for.
    pub(super) fn with_receiving(
        &mut self,
        transfer: TransferId,
        input: impl FnOnce(&mut Receiving, Time) -> Result<(), InputError>,
    ) {
        let now = self.now();
        if let Some(entry) = self.receiving.get_mut(&transfer) {
            let taken = input(entry, now);
            self.note(taken);
            self.turn(transfer, Side::Receiving);
        }
    }

    /// Performs all outputs of a receiving machine; returns its next deadline.
    pub(super) fn turn_receiving(&mut self, transfer: TransferId) -> Option<Time> {
        let _span = self.receiving.get(&transfer)?.span.clone().entered();
        loop {
            let entry = self.receiving.get_mut(&transfer)?;
            match entry.machine.poll_output() {
                Some(output) => self.perform_receiving(transfer, output),
                None if entry.machine.is_closed() && entry.over => {
                    self.receiving.remove(&transfer);
                    return None;
                }
                None => return entry.machine.poll_timeout().map(|(at, _)| at),
            }
        }
    }

    fn perform_receiving(&mut self, transfer: TransferId, output: ReceiverOutput) {
        let now = self.now();
        let Some(entry) = self.receiving.get_mut(&transfer) else { return };
        match output {
            ReceiverOutput::MakeGrant { generation, missing } => {
                let taken = match entry.grant(&self.caches, &*self.transport, &missing) {
                    Ok(windows) => {
                        let keys: Vec<_> = windows.iter().map(|window| window.key).collect();
                        self.granted.extend(keys.iter().map(|&key| (key, transfer)));
                        let first = OpaqueKey::new(keys.first().map_or(0, |key| key.0));
                        entry.grants.insert(generation, keys);
                        match Windows::encode(&windows) {
                            Ok(bytes) => entry.machine.granted(now, generation, first, bytes),
                            Err(problem) => {
                                let refusal = GrantRefusal::Impossible(problem);
                                let taken = entry.machine.grant_refused(now, generation, refusal);
                                self.revoke(transfer, generation);
                                taken
                            }
                        }
                    }
                    Err(refusal) => entry.machine.grant_refused(now, generation, refusal),
                };
                self.note(taken);
            }
            ReceiverOutput::Send(message) => {
                if let Some(peer) = entry.peer.clone() {
                    self.send(&peer, &message);
                }
            }
            ReceiverOutput::Verify { generation, sequence, rect } => {
                entry.verifying += 1;
                let write = WriteKey { transfer, generation, sequence };
                let (blocks, first_token) = (entry.blocks.clone(), entry.tokens.start);
                let heads = self.caches.heads();
                self.verify(Job::Verify { write, blocks, first_token, rect, heads });
            }
            ReceiverOutput::Verified(rect) => self.verified(transfer, rect),
            ReceiverOutput::Revoke { generation, .. } => {
                self.revoke(transfer, generation);
                if let Some(entry) = self.receiving.get_mut(&transfer) {
                    let taken = entry.machine.fenced(now, generation);
                    self.note(taken);
                }
            }
            ReceiverOutput::Finished(end) => {
                entry.end = Some(end);
                self.finish_receiving(transfer);
            }
        }
    }

    fn revoke(&mut self, transfer: TransferId, generation: Generation) {
        let keys = self.receiving.get_mut(&transfer).and_then(|entry| entry.grants.remove(&generation));
        for key in keys.into_iter().flatten() {
            self.transport.revoke(key);
            self.granted.remove(&key);
        }
    }

    fn verified(&mut self, transfer: TransferId, rect: Rect) {
        let Some(entry) = self.receiving.get_mut(&transfer) else { return };
        let complete = entry.verified(&self.caches, rect);
        let request = entry.request.clone();
        let start = entry.layerwise && !entry.started && complete.contains(&0);
        entry.started |= start;
        let metrics = &self.board.metrics;
        metrics.chunks_total.at(metrics::Side::Receive).add(1);
        metrics.transfer_bytes_total.at(metrics::Side::Receive).add(rect.cells() * self.caches.bytes_per_cell());
        for layer in complete {
            self.board.progress.verified(&request, layer.into());
        }
        if start {
            self.board.results().started.push(request);
        }
    }

    /// A mover hashed what a write left.
    pub(super) fn digested(&mut self, write: WriteKey, digest: Result<Digest, String>) {
        let WriteKey { transfer, generation, sequence } = write;
        let Some(entry) = self.receiving.get_mut(&transfer) else { return };
        entry.verifying -= 1;
        match digest {
            Ok(digest) => {
                let before = entry.machine.stats().digest_mismatches;
                self.with_receiving(transfer, |entry, now| entry.machine.digested(now, generation, sequence, digest));
                if let Some(entry) = self.receiving.get(&transfer) {
                    let found = entry.machine.stats().digest_mismatches - before;
                    self.board.metrics.digest_mismatches_total.add(found);
                }
            }
            Err(problem) => {
                // The plan was made here from blocks that were checked when the load began.
                tracing::error!(%transfer, problem, "what landed cannot be digested");
                self.with_receiving(transfer, |entry, now| {
                    entry.machine.digest_failed(now, generation, sequence, &problem)
                });
            }
        }
        self.finish_receiving(transfer);
    }

    /// Tells the engine of the end once no mover reads the pages.
    fn finish_receiving(&mut self, transfer: TransferId) {
        let now = self.now();
        let Some(entry) = self.receiving.get_mut(&transfer).filter(|entry| entry.verifying == 0) else { return };
        let Some(end) = entry.end.take() else { return };
        entry.over = true;
        entry.guards = None;
        let request = entry.request.clone();
        let (began, tokens) = (entry.began, entry.tokens.clone());
        let elapsed = now.since(began);
        self.count_end(metrics::Side::Receive, &end.verdict, elapsed);
        tracing::debug!(verdict = %end.verdict, elapsed_us = elapsed.as_micros(), "load ended");
        let per_block = self.caches.tokens_per_block();
        let Some(good_tokens) = good_prefix(&end, &tokens, per_block) else {
            self.board.metrics.loaded_tokens_total.add(tokens.len() as u64);
            self.board.progress.ended(&request, Ended::Loaded);
            self.board.results().loaded.push(request);
            return;
        };
        let good = (good_tokens.saturating_sub(tokens.start)).div_ceil(per_block) as usize;
        let (blocks, reason) = {
            let entry = &self.receiving[&transfer];
            let reason = entry.refusal.clone().unwrap_or_else(|| self.reason(&end.verdict, entry.from));
            (entry.blocks[..good.min(entry.blocks.len())].to_vec(), reason)
        };
        self.report_failure(&request, good_tokens, &blocks, reason);
    }

    /// Why a load ended, with what is known of a peer that never came.
    fn reason(&self, verdict: &Verdict, from: PeerAddress) -> String {
        let is_absent = matches!(verdict, Verdict::Failed(failure) if failure.reason == Reason::PeerAbsent);
        match self.peers.why_missed(from).filter(|_| is_absent) {
            Some(why) => format!("{verdict}; the last attempt: {why}"),
            None => verdict.to_string(),
        }
    }

    fn report_failure(&self, request: &RequestId, good_tokens: u32, good_blocks: &[BlockId], reason: String) {
        self.board.progress.ended(request, Ended::Failed);
        self.board.results().failed.push(LoadFailure {
            request: request.clone(),
            good_tokens,
            good_blocks: good_blocks.to_vec(),
            reason,
        });
    }
}

/// Leading tokens that are good after a load that misses some, in whole blocks; `None` if it misses none. A deadline may come between
/// the last byte and its digest: the verdict is that of the deadline then, but the engine has all it asked for.
fn good_prefix(end: &ReceiverEnd, tokens: &Range<u32>, per_block: u32) -> Option<u32> {
    // The transfer may have begun behind a local prefix, which is good as it is.
    let misses = end.verdict != Verdict::Done && end.good_until_token < tokens.end;
    misses.then(|| end.good_until_token / per_block * per_block)
}

/// Cuts of the session that one transfer survives; each costs a handshake and what was in flight.
const MAX_CUTS: u32 = 8;

#[cfg(test)]
mod tests {
    use kvferry_protocol::message::Reason;

    use super::*;

    #[test]
    fn a_load_that_misses_nothing_is_loaded_whatever_its_verdict() {
        let stalled = || Verdict::failed(Reason::Stalled, "nothing for a while");
        for (name, verdict, good_until_token, want) in [
            ("done", Verdict::Done, 40, None),
            ("stalled between the last byte and its digest", stalled(), 40, None),
            ("cancelled with all of it there", Verdict::Cancelled, 40, None),
            ("stalled in a block", stalled(), 39, Some(36)),
            ("stalled at a block's end", stalled(), 36, Some(36)),
            ("stalled at once, behind a local prefix", stalled(), 8, Some(8)),
        ] {
            let end = ReceiverEnd { verdict, good: Vec::new(), good_until_token };
            assert_eq!(good_prefix(&end, &(8..40), 4), want, "{name}");
        }
    }
}
