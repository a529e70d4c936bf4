//! One part of a load: the transfer from one prefill rank. Begins it, performs what its machine asks for, and ends it.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::window_pages;
use kvferry_protocol::message::{EngineBytes, Message, OpaqueKey, Reason, Verdict};
use kvferry_protocol::transfer::{GrantRefusal, InputError, Receiver, ReceiverEnd, ReceiverOutput, Rect, Time};
use kvferry_protocol::{BlockId, EngineId, Generation, PeerId, TpRank, TransferId};
use kvferry_transport::{Adopted, PeerAddress, Transport, TransportError};

use super::device::Staged;
use super::driver::{Driver, Side};
use super::in_place::Lent;
use super::jobs::{Job, WriteKey};
use super::loading::Loading;
use super::peers::is_rank;
use super::reading::Look;
use super::uploading::spoiled_end;
use super::watching::LandingDigests;
use super::window::{GrantedWindow, Windows};
use crate::contract::RequestId;
use crate::metrics;
use crate::pd::caches::Caches;
use crate::raw::ForeignPage;
use crate::trace::{Kind, Span};

/// What one prefill rank sends into this worker's pages.
#[derive(Debug)]
pub(super) struct Receiving {
    pub(super) machine: Receiver,
    /// The load that it is a part of, in [`Driver::loads`].
    pub(super) load: TransferId,
    pub(super) request: RequestId,
    /// Where the sender listens, and which rank must answer there, of which engine if that is known.
    pub(super) from: PeerAddress,
    pub(super) engine: Option<EngineId>,
    pub(super) rank: TpRank,
    /// KV heads of the model.
    pub(super) heads: Range<u16>,
    /// Who answers at `from`; stays known while a session is down.
    pub(super) peer: Option<PeerId>,
    /// Why the peer will not have us, or we it.
    pub(super) refusal: Option<String>,
    /// The load was told of the end, and nothing of this part touches the pages; only the machine's last words are left.
    pub(super) over: bool,
    /// The transport's grants of each generation.
    grants: BTreeMap<Generation, Granted>,
    /// Its sender was granted to hand over in place.
    in_place: bool,
    /// Pages of the write whose digest is being told, to be read where they lie if it is right.
    pub(super) found: Option<FoundPages>,
    /// Digests that are with a mover, and what is on its way to a device's pages.
    pub(super) verifying: usize,
    /// What landed in frames and is being digested.
    judging: BTreeMap<(Generation, u32), (Rect, Arc<Staged>)>,
    /// Why what landed is not in a device's pages.
    pub(super) spoiled: Option<String>,
    /// The end, while it waits for the movers to let go of the pages.
    end: Option<ReceiverEnd>,
    began: Time,
    span: tracing::Span,
}

/// The windows of one generation, and the digests of what landed in each, where they can be taken then.
#[derive(Debug, Default)]
struct Granted {
    windows: Vec<GrantedWindow>,
    landings: Vec<Option<Arc<LandingDigests>>>,
    /// The frames under each window, if the pages are on a device.
    staged: Vec<Arc<Staged>>,
    /// What the peer lends, by the number of its write.
    lent: BTreeMap<u32, Arc<Adopted>>,
    /// Why nothing is to be lent, though that was wanted.
    not_lent: Option<String>,
}

/// Where a write's pages lie in the peer's memory.
#[derive(Debug)]
pub(super) struct FoundPages {
    pub(super) rect: Rect,
    pub(super) pages: Vec<ForeignPage>,
    pub(super) lent: Lent,
}

/// Where a part comes from, and which heads it carries.
#[derive(Debug)]
pub(super) struct PartFrom {
    pub(super) transfer: TransferId,
    pub(super) rank: TpRank,
    pub(super) address: PeerAddress,
    pub(super) engine: Option<EngineId>,
    pub(super) heads: Range<u16>,
}

impl Receiving {
    pub(super) fn new(machine: Receiver, part: &PartFrom, load: TransferId, request: &RequestId, began: Time) -> Self {
        let span = tracing::debug_span!("load", %request, transfer = %part.transfer, from_rank = %part.rank);
        Self {
            machine,
            load,
            request: request.clone(),
            from: part.address,
            engine: part.engine.clone(),
            rank: part.rank,
            heads: part.heads.clone(),
            peer: None,
            refusal: None,
            over: false,
            grants: BTreeMap::new(),
            in_place: false,
            found: None,
            verifying: 0,
            judging: BTreeMap::new(),
            spoiled: None,
            end: None,
            began,
            span,
        }
    }

    /// Whether its end is still to come.
    pub(super) const fn is_live(&self) -> bool {
        !self.over && self.end.is_none()
    }

    /// Whether a session with this peer, or one at this address, is what the transfer waits for.
    pub(super) fn waits_for(&self, peer: &PeerId, address: Option<PeerAddress>) -> bool {
        match &self.peer {
            Some(known) => known == peer,
            None => {
                let is_named = |engine: &EngineId| is_rank(peer, engine, self.rank);
                Some(self.from) == address || self.engine.as_ref().is_some_and(is_named)
            }
        }
    }

    /// Grants the missing rectangles to the peer, a window each, over the load's pages or the frames that are staged for them. On an
    /// error nothing stays granted.
    fn grant(
        &self,
        load: &Loading,
        caches: &Caches,
        transport: &dyn Transport,
        missing: &[Rect],
        (staged, in_place): (Vec<Arc<Staged>>, bool),
    ) -> Result<Granted, GrantRefusal> {
        let peer = self.peer.as_ref().ok_or(GrantRefusal::NotConnected)?;
        let mut granted = Granted { staged, ..Granted::default() };
        let mut in_place = in_place;
        for (index, &rect) in missing.iter().enumerate() {
            let onto = match granted.staged.get(index) {
                Some(staged) => (&staged.caches, &staged.frames[..], staged.first_token),
                None => {
                    let (blocks, first_token) = load.blocks_of(rect, caches.tokens_per_block());
                    (caches, blocks, first_token)
                }
            };
            let mut one = None;
            if in_place {
                match self.grant_in_place(onto, transport, peer, rect) {
                    Ok(window) => one = Some(Ok((window, None))),
                    Err(TransportError::NotConnected { .. }) => one = Some(Err(GrantRefusal::NotConnected)),
                    Err(error) => (granted.not_lent, in_place) = (Some(error.to_string()), false),
                }
            }
            match one.unwrap_or_else(|| self.grant_one(onto, transport, peer, rect)) {
                Ok((window, landing)) => {
                    granted.windows.push(window);
                    granted.landings.push(landing);
                }
                Err(refusal) => {
                    granted.windows.iter().for_each(|window| transport.revoke(window.key));
                    return Err(refusal);
                }
            }
        }
        Ok(granted)
    }

    /// A window of which the peer lends the bytes. Nothing lands there, so nothing is to be sealed.
    fn grant_in_place(
        &self,
        (caches, blocks, first_token): (&Caches, &[BlockId], u32),
        transport: &dyn Transport,
        peer: &PeerId,
        rect: Rect,
    ) -> Result<GrantedWindow, TransportError> {
        let (layout, shard) = (caches.layout(), caches.shard());
        let window = window_pages(layout, shard, blocks, first_token, rect.layers(), self.heads.clone());
        let (shape, _) = window.map_err(|error| TransportError::Refused { reason: error.to_string() })?;
        let key = transport.grant_in_place(peer, shape.bytes())?;
        Ok(GrantedWindow { key, rect, shape })
    }

    fn grant_one(
        &self,
        (caches, blocks, first_token): (&Caches, &[BlockId], u32),
        transport: &dyn Transport,
        peer: &PeerId,
        rect: Rect,
    ) -> Result<(GrantedWindow, Option<Arc<LandingDigests>>), GrantRefusal> {
        let (layout, shard) = (caches.layout(), caches.shard());
        let window = window_pages(layout, shard, blocks, first_token, rect.layers(), self.heads.clone());
        let (shape, pages) = window.map_err(|error| GrantRefusal::Impossible(error.to_string()))?;
        let landing = LandingDigests::new(caches, &shape, blocks, first_token).map(Arc::new);
        let key = match &landing {
            Some(landing) => transport.grant_watched(peer, pages, Arc::clone(landing) as _),
            None => transport.grant(peer, pages),
        };
        let key = match key {
            Ok(key) => key,
            Err(TransportError::NotConnected { .. }) => return Err(GrantRefusal::NotConnected),
            Err(error) => return Err(GrantRefusal::Impossible(error.to_string())),
        };
        let window = GrantedWindow { key, rect, shape };
        match window.margins() {
            Ok(margins) => transport.seal(key, &margins),
            Err(error) => {
                transport.revoke(key);
                return Err(GrantRefusal::Impossible(error.to_string()));
            }
        }
        Ok((window, landing))
    }

    /// The peer lends a write of a grant. Returns whether it is one of ours.
    pub(super) fn lend(&mut self, generation: Generation, sequence: u32, adopted: Adopted) -> bool {
        let Some(granted) = self.grants.get_mut(&generation) else { return false };
        let Entry::Vacant(none) = granted.lent.entry(sequence) else { return false };
        none.insert(Arc::new(adopted));
        true
    }

    /// How a write is looked at that the peer lends; `None` if it landed.
    fn look(&mut self, load: &Loading, write: WriteKey, rect: Rect) -> Option<Look> {
        let granted = self.grants.get_mut(&write.generation)?;
        // Whatever becomes of the grant: what is looked at is let go with what was found.
        let adopted = granted.lent.remove(&write.sequence)?;
        let window = granted.windows.iter().find(|window| window.rect.contains(rect))?.clone();
        let (blocks, first_token) = load.pages();
        Some(Look { write, adopted, window, blocks, first_token, rect })
    }

    /// Closes a rectangle that a write is said to have filled, so that what is verified there stays as it was verified. Returns the
    /// digest of what the write left there, if it was taken when that landed.
    fn seal(
        &mut self,
        transport: &dyn Transport,
        generation: Generation,
        sequence: u32,
        rect: Rect,
    ) -> Result<Option<Digest>, String> {
        // Nothing lands under a revoked grant.
        let Some(Granted { windows, landings, staged, .. }) = self.grants.get(&generation) else { return Ok(None) };
        let (index, extents) = Windows::seal(windows, transport, rect)?;
        if let Some(staged) = staged.get(index) {
            self.judging.insert((generation, sequence), (rect, Arc::clone(staged)));
        }
        let landing = landings.get(index).and_then(Option::as_ref);
        Ok(landing.and_then(|landing| landing.take(sequence, &extents)))
    }
}

impl Driver {
    /// A session with the peer at a part's address is up.
    pub(super) fn attach(&mut self, transfer: TransferId, peer: &PeerId, session: u64) {
        let early = self.early.take(peer, transfer);
        let Some(entry) = self.receiving.get_mut(&transfer) else { return };
        if entry.over {
            // It ended while nobody answered: the sender must hear that.
            entry.peer.get_or_insert_with(|| peer.clone());
            return self.with_receiving(transfer, |entry, now| entry.machine.peer_up(now, session));
        }
        if let Some(problem) = self.misplaced(transfer, peer) {
            tracing::warn!(%transfer, %peer, problem, "this peer cannot send the part");
            return self.refuse_part(transfer, problem);
        }
        let Some(entry) = self.receiving.get_mut(&transfer) else { return };
        entry.peer = Some(peer.clone());
        // Rank 0 asks rank 0, for all ranks: that part has the hand-over's own id.
        let speaks = entry.load == transfer;
        if let Some(ask) = self.loads.get(&entry.load).filter(|_| speaks).and_then(Loading::ask) {
            match EngineBytes::new(ask) {
                Ok(ask) => self.send(peer, &Message::Engine(ask)),
                Err(error) => tracing::warn!(%transfer, %error, "the request to the prefill engine cannot be sent"),
            }
        }
        self.with_receiving(transfer, |entry, now| entry.machine.peer_up(now, session));
        if let Some(early) = early {
            self.with_receiving(transfer, |entry, now| entry.machine.message(now, early));
        }
    }

    /// A part cannot come from where it was to come from.
    pub(super) fn refuse_part(&mut self, transfer: TransferId, problem: String) {
        if let Some(entry) = self.receiving.get_mut(&transfer).filter(|entry| entry.is_live()) {
            entry.refusal = Some(problem);
            self.with_receiving(transfer, |entry, now| entry.machine.cancel(now));
        }
    }

    /// Why the peer that answers at a part's address cannot be its sender.
    fn misplaced(&self, transfer: TransferId, peer: &PeerId) -> Option<String> {
        let entry = self.receiving.get(&transfer)?;
        let load = self.loads.get(&entry.load)?;
        let (heads, ranks) = self.peers.place(peer)?;
        if peer.tp_rank != entry.rank {
            return Some(format!(
                "{peer} answers at the address of tp_rank {}; list the prefill engine's addresses by rank",
                entry.rank
            ));
        }
        if let Some(engine) = entry.engine.as_ref().filter(|engine| **engine != peer.engine) {
            return Some(format!(
                "{peer} answers, but the request names engine {engine}; pass on what that engine said last"
            ));
        }
        if usize::from(ranks) != load.ranks {
            return Some(format!(
                "{peer} is one of {ranks} ranks, but {} addresses were given; list one for each rank of the prefill engine",
                load.ranks
            ));
        }
        if heads.start > entry.heads.start || heads.end < entry.heads.end {
            return Some(format!(
                "{peer} holds heads {heads:?}, but tp_rank {} of {ranks} should hold {:?}; check the peer's tp_rank, tp_size and shard",
                entry.rank, entry.heads
            ));
        }
        let siblings = load.parts.iter().filter_map(|part| self.receiving.get(part)?.peer.as_ref());
        let other = siblings.into_iter().find(|known| known.engine != peer.engine)?;
        Some(format!("{peer} and {other} are two engines; list the addresses of one engine's ranks"))
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
            ReceiverOutput::MakeGrant { generation, missing } => self.grant_or_wait(transfer, generation, missing),
            ReceiverOutput::Send(message) => {
                if let Some(peer) = entry.peer.clone() {
                    self.send(&peer, &message);
                }
            }
            ReceiverOutput::Verify { generation, sequence, rect } => {
                let Some(load) = self.loads.get(&entry.load) else { return };
                entry.verifying += 1;
                if let Some(look) = entry.look(load, WriteKey { transfer, generation, sequence }, rect) {
                    return self.verify(Job::Look(look));
                }
                let began = Instant::now();
                let sealed = entry.seal(&*self.transport, generation, sequence, rect);
                let staged = entry.judging.get(&(generation, sequence)).map(|(_, staged)| Arc::clone(staged));
                let write = WriteKey { transfer, generation, sequence };
                let (blocks, first_token) = load.pages();
                let heads = entry.heads.clone();
                match sealed {
                    Ok(Some(digest)) => {
                        let bytes = rect.cells() * self.caches.bytes_per_cell(&heads);
                        let span = || Span::since(began, Kind::Verify).transfer(transfer).chunk(generation, sequence);
                        self.board.tracer.record(|| span().rect(rect).bytes(bytes));
                        self.digested(write, Ok(digest));
                    }
                    Ok(None) if staged.is_none() && self.staging.is_some() => {
                        self.digested(write, Err("its grant was revoked before it was told".to_owned()));
                    }
                    Ok(None) => self.verify(Job::Verify { write, staged, blocks, first_token, rect, heads }),
                    Err(problem) => self.digested(write, Err(problem)),
                }
            }
            // What landed in frames counts when it is on its way to the pages.
            ReceiverOutput::Verified(_) if self.staging.is_some() => {}
            ReceiverOutput::Verified(rect) => {
                let (load, heads) = (entry.load, entry.heads.clone());
                if let Some(found) = entry.found.take_if(|found| found.rect == rect)
                    && let Err(problem) = self.read_in_place(load, found)
                {
                    return self.refuse_part(transfer, problem);
                }
                self.verified(load, transfer, &heads, rect);
            }
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

    /// Makes the grant that a machine asked for, and tells it.
    pub(super) fn make_grant(
        &mut self,
        transfer: TransferId,
        generation: Generation,
        missing: &[Rect],
        staged: Vec<Arc<Staged>>,
    ) {
        let now = self.now();
        let in_place = self.receiving.get(&transfer).is_some_and(|entry| self.may_read_in_place(entry));
        let Some(entry) = self.receiving.get_mut(&transfer) else { return };
        let Some(load) = self.loads.get(&entry.load) else { return };
        let version = entry.peer.as_ref().and_then(|peer| self.peers.version(peer));
        let how = (staged, in_place);
        let granted = version
            .ok_or(GrantRefusal::NotConnected)
            .and_then(|version| Ok((version, entry.grant(load, &self.caches, &*self.transport, missing, how)?)));
        let mut not_lent = None;
        let taken = match granted {
            Ok((version, mut granted)) => {
                entry.in_place |= in_place && granted.not_lent.is_none();
                not_lent = granted.not_lent.take().zip(entry.peer.clone());
                let keys: Vec<_> = granted.windows.iter().map(|window| window.key).collect();
                self.granted.extend(keys.iter().map(|&key| (key, transfer)));
                let first = OpaqueKey::new(keys.first().map_or(0, |key| key.0));
                let encoded = Windows::encode(version, &granted.windows);
                entry.grants.insert(generation, granted);
                match encoded {
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
        if let Some((reason, peer)) = not_lent {
            self.copy_from_now_on(&peer, &reason);
        }
        self.note(taken);
    }

    fn revoke(&mut self, transfer: TransferId, generation: Generation) {
        let granted = self.receiving.get_mut(&transfer).and_then(|entry| entry.grants.remove(&generation));
        for GrantedWindow { key, .. } in granted.into_iter().flat_map(|granted| granted.windows) {
            self.transport.revoke(key);
            self.granted.remove(&key);
            self.recalled.retain(|(grant, _)| *grant != key);
        }
    }

    /// A mover hashed what a write left.
    pub(super) fn digested(&mut self, write: WriteKey, digest: Result<Digest, String>) {
        let WriteKey { transfer, generation, sequence } = write;
        let Some(entry) = self.receiving.get_mut(&transfer) else { return };
        // What goes on to a device's pages stays counted: a load does not end before that.
        let judging = entry.judging.remove(&(generation, sequence));
        entry.verifying -= usize::from(judging.is_none());
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
        match judging {
            Some(landed) => self.judged(write, landed),
            None => self.finish_receiving(transfer),
        }
    }

    /// Tells the load of the end once no mover reads the pages, or writes them.
    pub(super) fn finish_receiving(&mut self, transfer: TransferId) {
        let now = self.now();
        let Some(entry) = self.receiving.get_mut(&transfer).filter(|entry| entry.verifying == 0) else { return };
        let Some(end) = entry.end.take() else { return };
        entry.over = true;
        let (load, began, elapsed) = (entry.load, entry.began, now.since(entry.began));
        let entry = &self.receiving[&transfer];
        // What was verified after its end was decided is good, but it was not made to be read where it lies.
        let is_done = end.verdict == Verdict::Done && !(entry.in_place && entry.refusal.is_some());
        let kept = self.loads.get(&load).filter(|_| entry.in_place && !is_done).map(Loading::first_token);
        let good_until_token = kept.unwrap_or(end.good_until_token);
        let (reason, good_until) = match (&end.verdict, &entry.refusal, &entry.spoiled) {
            (verdict, _, Some(spoiled)) => (Some(spoiled_end(verdict, spoiled)), 0),
            (_, _, None) if is_done => (None, good_until_token),
            (_, Some(refusal), None) => (Some(refusal.clone()), good_until_token),
            (verdict, None, None) => (Some(self.why(verdict, transfer, entry)), good_until_token),
        };
        // The sender could not hand over what it was asked for: the next load is asked for as ever.
        let is_refused = entry.in_place && matches!(&end.verdict, Verdict::Failed(why) if why.reason == Reason::Engine);
        let refused = entry.peer.clone().filter(|_| is_refused);
        self.count_end(metrics::Side::Receive, &end.verdict, elapsed);
        tracing::debug!(verdict = %end.verdict, elapsed_us = elapsed.as_micros(), "part ended");
        if let Some(peer) = refused {
            self.copy_from_now_on(&peer, reason.as_deref().unwrap_or_default());
        }
        if let Some(load) = self.loads.get(&load) {
            let span = || Span::since(self.instant(began), Kind::Load).transfer(transfer).request(&load.request);
            self.board.tracer.record(span);
        }
        self.part_landed(load, transfer, good_until, reason);
    }

    /// Why a part ended, with what is known of a peer that never came, or that came and sent nothing.
    fn why(&self, verdict: &Verdict, transfer: TransferId, entry: &Receiving) -> String {
        let Verdict::Failed(failure) = verdict else { return verdict.to_string() };
        match (failure.reason, &entry.peer) {
            (Reason::PeerAbsent, _) => match self.peers.why_missed(entry.from) {
                Some(why) => format!("{verdict}; the last attempt: {why}"),
                None => verdict.to_string(),
            },
            (Reason::Deadline | Reason::Stalled, Some(peer)) if entry.machine.stats().writes == 0 => format!(
                "{verdict}; {peer} was asked for transfer {transfer} and sent nothing: either it was never given the prefill leg of \
                 this transfer and prompt, or it did not come to compute it"
            ),
            (_, Some(peer)) => format!("{verdict} (transfer {transfer} from {peer})"),
            (_, None) => verdict.to_string(),
        }
    }
}
