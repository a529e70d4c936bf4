//! Blocks of answers on their way back, from a decode worker's pages into the tier of a prefill worker: ordinary transfers whose
//! receiver's pages are the tier's berths.
//!
//! The decode worker says what it has (`Spare`) and waits for a grant, for a moment: a refusal, or silence, ends it. The prefill
//! worker grants the berths that its scheduler took, verifies what lands as for any load, and hands each block to the tier as if
//! it had been copied here.

use std::collections::{BTreeMap, BTreeSet};
use std::num::{NonZeroU32, NonZeroU64};
use std::ops::Range;
use std::time::Duration;

use kvferry_kernels::PageGuards;
use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::window_pages;
use kvferry_protocol::message::{Ended, HashBytes, Message, OpaqueKey, Spare, Verdict, Wrote};
use kvferry_protocol::transfer::{
    Coverage, GrantRefusal, InputError, Order, Receiver, ReceiverConfig, ReceiverEnd, ReceiverOutput, Rect, Sender,
    SenderConfig, Time,
};
use kvferry_protocol::{BlockId, Generation, PeerId, RegionId, TpRank, TransferId, codec};
use kvferry_transport::Transport;

use super::device::After;
use super::driver::{Driver, Side};
use super::jobs::{Job, WriteKey};
use super::sending::{PartTo, Sending};
use super::step::Handed;
use super::window::{GrantedWindow, Windows};
use crate::contract::{Offered, Refuse, RequestId, Return, Save, Take};
use crate::metrics::{self, DropReason, ReturnRefusal, TierDrop};
use crate::pd::caches::Caches;
use crate::pool::BlockHash;

/// What this worker takes into its tier, and what it refused.
#[derive(Debug, Default)]
pub(super) struct Taking {
    pub(super) entries: BTreeMap<TransferId, Taken>,
    /// Refused ones whose sender's last word is still to come, with that sender: nobody else's word is meant.
    refused: BTreeSet<(PeerId, TransferId)>,
}

/// Blocks of one peer on their way into berths.
#[derive(Debug)]
pub(super) struct Taken {
    machine: Receiver,
    pub(super) peer: PeerId,
    stores: Vec<(u64, BlockId)>,
    berths: Vec<BlockId>,
    tokens: Range<u32>,
    /// Write guards over the berths.
    guards: Option<PageGuards>,
    grants: BTreeMap<Generation, Vec<GrantedWindow>>,
    /// Digests that are with a mover.
    verifying: usize,
    /// The end, while it waits for the movers.
    end: Option<ReceiverEnd>,
    /// The tier was told; only the machine's last words are left.
    pub(super) over: bool,
    began: Time,
}

impl Taken {
    fn grant(
        &self,
        memory: &Caches,
        first_region: u32,
        transport: &dyn Transport,
        rect: Rect,
    ) -> Result<GrantedWindow, GrantRefusal> {
        let per_block = memory.tokens_per_block();
        let blocks = (rect.tokens().start - self.tokens.start) / per_block
            ..(rect.tokens().end - self.tokens.start).div_ceil(per_block);
        let first_token = self.tokens.start + blocks.start * per_block;
        let berths = &self.berths[blocks.start as usize..blocks.end as usize];
        let window = window_pages(memory.layout(), memory.shard(), berths, first_token, rect.layers(), memory.heads());
        let (shape, mut pages) = window.map_err(|error| GrantRefusal::Impossible(error.to_string()))?;
        for piece in &mut pages.pieces {
            piece.region = RegionId::new(piece.region.get() + first_region);
        }
        match transport.grant(&self.peer, pages) {
            // What is granted is whole blocks, so the window has no margins.
            Ok(key) => Ok(GrantedWindow { key, rect, shape }),
            Err(kvferry_transport::TransportError::NotConnected { .. }) => Err(GrantRefusal::NotConnected),
            Err(error) => Err(GrantRefusal::Impossible(error.to_string())),
        }
    }

    /// Closes a rectangle that a write is said to have filled, so that it stays as it is verified.
    fn seal(&self, transport: &dyn Transport, generation: Generation, rect: Rect) -> Result<(), String> {
        match self.grants.get(&generation) {
            Some(windows) => Windows::seal(windows, transport, rect).map(drop),
            None => Ok(()), // Nothing lands under a revoked grant.
        }
    }
}

impl Driver {
    /// A step is complete: blocks of its answers go back.
    pub(super) fn give_back(&mut self, returns: Vec<Return>, after: &Result<After, String>) {
        for one in returns {
            let transfer = one.transfer;
            if let Err(problem) = after.clone().and_then(|after| self.begin_return(one, &after)) {
                tracing::debug!(%transfer, problem, "blocks do not go back");
                self.board.results().tier.returned.push(transfer);
            }
        }
    }

    fn begin_return(&mut self, one: Return, after: &After) -> Result<(), String> {
        let rank = self.config.peer().tp_rank;
        let to = one.to.get(usize::from(rank.get())).ok_or("the prefill engine has fewer ranks")?;
        let (peer, _) = self.peers.at(*to).ok_or("there is no session with the prefill worker")?;
        if !self.is_twin(&peer) {
            return Err(format!("{peer} holds another part of the model"));
        }
        let tokens_per_block = self.caches.tokens_per_block();
        let end = one.first_token + one.hashes.len() as u32 * tokens_per_block;
        let rect = Rect::new(one.first_token..end, self.caches.layers()).map_err(|error| error.to_string())?;
        let hashes = one.hashes.iter().flat_map(|hash| *hash.get()).collect();
        let hashes = HashBytes::new(hashes).map_err(|error| error.to_string())?;
        let (transfer, blocks) = (one.transfer, one.hashes.len() as u64);
        let spare = Message::Spare(Spare { transfer, first_token: rect.tokens().start, tokens_per_block, hashes });
        let version = self.peers.version(&peer).ok_or("there is no session with the prefill worker")?;
        codec::check(version, &spare).map_err(|error| format!("{peer} cannot be asked: {error}"))?;
        let entry = self.returned(one, &peer, end)?;
        self.board.metrics.transfers_started_total.at(metrics::Side::Send).add(1);
        self.board.metrics.returned_blocks_total.add(blocks);
        self.sending.insert(transfer, entry);
        self.count_live();
        self.begin_with(transfer, peer.clone());
        self.part_computed(transfer, &Handed { transfer, rect, compute: Duration::ZERO }, after);
        // The peer's rank 0 is asked, for all of them: what it takes, they grant.
        if rank == TpRank::new(0) {
            self.send(&peer, &spare);
        }
        Ok(())
    }

    /// The sending side of a return: the receiver speaks first, soon or not at all.
    fn returned(&self, one: Return, peer: &PeerId, end: u32) -> Result<Sending, String> {
        let limit = self.config.limits().max_transfers.get() as usize;
        if self.sending.len() >= limit || self.sending.contains_key(&one.transfer) {
            return Err(format!("{limit} transfers are under way, or this one is"));
        }
        let (began, deadlines, heads) = (self.now(), self.config.deadlines(), self.caches.heads());
        let cells = self.config.limits().chunk_bytes / self.caches.bytes_per_cell(&heads).max(1);
        let config = SenderConfig {
            transfer: one.transfer,
            held: Rect::new(0..end, self.caches.layers()).map_err(|error| error.to_string())?,
            order: Order::DecodeFirst,
            lease_ttl: deadlines.lease_ttl.min(RETURN_WAIT),
            lease_max: RETURN_TIME,
            absent: deadlines.absent.min(RETURN_WAIT),
            word: deadlines.verdict.min(RETURN_WAIT),
            max_posts_in_flight: RETURN_POSTS,
            max_cells_per_post: NonZeroU64::new(cells).unwrap_or(NonZeroU64::MIN),
            align_tokens: NonZeroU32::new(self.caches.tokens_per_block()).unwrap_or(NonZeroU32::MIN),
        };
        let part = PartTo { transfer: one.transfer, rank: peer.tp_rank, heads };
        let save = Save {
            request: one.request,
            transfer: one.transfer,
            to: Some(peer.clone()),
            readers: self.config.tp_size().get(),
            blocks: one.blocks,
            computed: end,
            prompt_tokens: end,
            ready: end,
            cached: end,
            first: true,
        };
        let mut entry = Sending::new(Sender::new(began, config), &part, &save, began);
        entry.returns = true;
        Ok(entry)
    }

    /// Whether a peer that is up holds the same part of the model as this worker.
    fn is_twin(&self, peer: &PeerId) -> bool {
        let ours = (self.caches.heads(), self.config.tp_size().get());
        peer.tp_rank == self.config.peer().tp_rank && self.peers.place(peer) == Some(ours)
    }

    /// The engine wants blocks of some requests now.
    pub(super) fn end_returns(&mut self, of: impl Fn(&RequestId) -> bool) {
        let returns = self.sending.iter().filter(|(_, entry)| entry.returns && of(&entry.request));
        let returns: Vec<_> = returns.map(|(&transfer, _)| transfer).collect();
        for transfer in returns {
            self.with_sending(transfer, |entry, now| entry.machine.cancel(now));
        }
    }

    /// Blocks that were to go back are not read any more.
    pub(super) fn return_ended(&mut self, transfer: TransferId, verdict: &Verdict) {
        let peer = self.sending.get(&transfer).and_then(|entry| entry.peer.clone());
        if let Some(peer) = peer.filter(|_| *verdict != Verdict::Done) {
            // A grant that comes too late is answered at once. Who grants nothing waits for nothing: what it was told unasked it would
            // keep for a request that never comes.
            self.decline_when_asked(&peer, transfer, "it is over on the side that sends");
        }
        self.board.results().tier.returned.push(transfer);
    }

    /// A peer offers blocks: the scheduler decides, in the engine's next step.
    pub(super) fn spare(&mut self, peer: PeerId, spare: Spare) {
        if self.taking.entries.get(&spare.transfer).is_some_and(|entry| entry.peer == peer) {
            // It is being taken: a refusal would end it.
            self.board.metrics.messages_dropped_total.at(DropReason::Duplicate).add(1);
            return;
        }
        let (chunks, rest) = spare.hashes.as_slice().as_chunks::<{ HashBytes::EACH }>();
        let refuse = |why: ReturnRefusal| {
            self.board.metrics.returns_refused_total.at(why).add(1);
            Refuse { transfer: spare.transfer, to: peer.clone() }
        };
        let refused = if self.keeping.is_none() {
            Some(refuse(ReturnRefusal::NoTier))
        } else if !self.is_twin(&peer) {
            Some(refuse(ReturnRefusal::Part))
        } else if spare.end_token(chunks.len()).is_none() {
            Some(refuse(ReturnRefusal::BlockSize))
        } else if chunks.is_empty()
            || !rest.is_empty()
            || self.taking.entries.len() >= TAKES
            || self.is_under_way(spare.transfer)
        {
            Some(refuse(ReturnRefusal::Full))
        } else {
            None
        };
        if let Some(refused) = refused {
            return self.refuse(&refused);
        }
        let Spare { transfer, first_token, tokens_per_block, .. } = spare;
        let hashes = chunks.iter().map(|bytes| BlockHash::new(*bytes)).collect();
        self.board.results().tier.offered.push(Offered { transfer, from: peer, first_token, tokens_per_block, hashes });
        // Somebody steps already, or is told to.
        let _ = self.wake.try_send(());
    }

    /// Whether an id is in use, with whomever: what lands and is said would be taken for the other transfer's.
    pub(super) fn is_under_way(&self, transfer: TransferId) -> bool {
        self.taking.entries.contains_key(&transfer)
            || self.receiving.contains_key(&transfer)
            || self.sending.contains_key(&transfer)
    }

    /// The scheduler, or this worker, does not want what a peer offers.
    pub(super) fn refuse(&mut self, refuse: &Refuse) {
        let Refuse { transfer, to } = refuse;
        let to = PeerId { tp_rank: self.config.peer().tp_rank, ..to.clone() };
        // Whoever gave it up meanwhile hears the same word as others, and what it said is kept no longer.
        self.early.take(&to, *transfer);
        if self.taking.refused.len() >= REFUSED {
            self.taking.refused.pop_first();
        }
        self.taking.refused.insert((to.clone(), *transfer));
        self.send(&to, &Message::Ended(Ended { transfer: *transfer, verdict: Verdict::Cancelled }));
    }

    /// Whether a message is about something that was refused: its sender's last word, or that it gave it up before it heard.
    pub(super) fn is_refused(&mut self, peer: &PeerId, message: &Message) -> bool {
        match message {
            Message::Ended(ended) => self.taking.refused.remove(&(peer.clone(), ended.transfer)),
            Message::Abort(abort) => self.taking.refused.contains(&(peer.clone(), abort.transfer)),
            _ => false,
        }
    }

    /// The scheduler gave frames to what a peer offers.
    pub(super) fn take_in(&mut self, mut take: Take) {
        take.from.tp_rank = self.config.peer().tp_rank;
        let (transfer, stores) = (take.transfer, take.stores.clone());
        if self.early.peer_of(transfer) == Some(&take.from) {
            tracing::debug!(%transfer, "offered blocks are not taken: their sender gave them up");
            self.refuse(&Refuse { transfer, to: take.from });
            return stores.into_iter().for_each(|(order, _)| self.drop_store(order, TierDrop::Failed));
        }
        let session = self.peers.session(&take.from);
        let began = self.now();
        match session.ok_or_else(|| "its session is gone".to_owned()).and_then(|_| self.taken(take, began)) {
            Ok(entry) => {
                self.board.metrics.transfers_started_total.at(metrics::Side::Receive).add(1);
                self.taking.entries.insert(transfer, entry);
                if let Some(session) = session {
                    self.with_taken(transfer, |entry, now| entry.machine.peer_up(now, session));
                }
            }
            Err(problem) => {
                tracing::debug!(%transfer, problem, "offered blocks are not taken");
                stores.into_iter().for_each(|(order, _)| self.drop_store(order, TierDrop::Failed));
            }
        }
    }

    fn taken(&self, take: Take, began: Time) -> Result<Taken, String> {
        let keeping = self.keeping.as_ref().ok_or("this worker has no tier")?;
        if self.is_under_way(take.transfer) {
            return Err("its id is in use already".into());
        }
        if self.early.is_declined(&take.from, take.transfer) {
            return Err("its sender gave it up".into());
        }
        let memory = &keeping.memory;
        let tokens = take.first_token..take.first_token + take.stores.len() as u32 * memory.tokens_per_block();
        let wanted = Rect::new(tokens.clone(), memory.layers()).map_err(|error| error.to_string())?;
        let deadlines = self.config.deadlines();
        let config = ReceiverConfig {
            transfer: take.transfer,
            wanted: Coverage::from(wanted),
            // Whoever speaks first on other occasions: the sender has spoken.
            order: Order::DecodeFirst,
            deadline: deadlines.transfer.min(RETURN_TIME),
            progress: deadlines.progress.min(RETURN_TIME),
            absent: deadlines.absent.min(RETURN_WAIT),
            lease_ttl: deadlines.lease_ttl.min(RETURN_WAIT),
            ask_before_revoke: None,
            linger: deadlines.verdict.min(RETURN_WAIT),
            max_cuts: 0,
        };
        let machine = Receiver::new(began, config).map_err(|error| error.to_string())?;
        let frames: Vec<_> = take.stores.iter().map(|&(_, frame)| frame).collect();
        let berths = keeping.enter(&frames)?;
        let guards = memory.guard_write(&berths, memory.layers()).inspect_err(|_| keeping.leave(&berths))?;
        Ok(Taken {
            machine,
            peer: take.from,
            stores: take.stores,
            berths,
            tokens,
            guards,
            grants: BTreeMap::new(),
            verifying: 0,
            end: None,
            over: false,
            began,
        })
    }

    /// Feeds a machine one input and performs what it asks for.
    pub(super) fn with_taken(
        &mut self,
        transfer: TransferId,
        input: impl FnOnce(&mut Taken, Time) -> Result<(), InputError>,
    ) {
        let now = self.now();
        if let Some(entry) = self.taking.entries.get_mut(&transfer) {
            let taken = input(entry, now);
            self.note(taken);
            self.turn(transfer, Side::Taking);
        }
    }

    /// What the peer says of it.
    pub(super) fn taken_message(&mut self, transfer: TransferId, message: Message) {
        self.with_taken(transfer, |entry, now| entry.machine.message(now, message));
    }

    /// A write of it landed.
    pub(super) fn taken_landed(&mut self, wrote: Wrote) {
        self.with_taken(wrote.transfer, |entry, now| entry.machine.landed(now, wrote));
    }

    /// Its session ended, or its peer started anew.
    pub(super) fn taken_down(&mut self, of: impl Fn(&PeerId) -> bool, restarted: bool) {
        let which: Vec<_> =
            self.taking.entries.iter().filter(|(_, entry)| of(&entry.peer)).map(|(&id, _)| id).collect();
        for transfer in which {
            self.with_taken(transfer, |entry, now| match restarted {
                true => entry.machine.peer_restarted(now),
                false => entry.machine.peer_down(now),
            });
        }
    }

    /// Its deadline came.
    pub(super) fn taken_timeout(&mut self, transfer: TransferId, now: Time) {
        if let Some(entry) = self.taking.entries.get_mut(&transfer) {
            entry.machine.timeout(now);
        }
    }

    /// The worker ends.
    pub(super) fn end_takes(&mut self) {
        let all: Vec<_> = self.taking.entries.keys().copied().collect();
        for transfer in all {
            self.with_taken(transfer, |entry, now| entry.machine.cancel(now));
        }
    }

    /// Performs all outputs of a machine; returns its next deadline.
    pub(super) fn turn_taken(&mut self, transfer: TransferId) -> Option<Time> {
        loop {
            let entry = self.taking.entries.get_mut(&transfer)?;
            match entry.machine.poll_output() {
                Some(output) => self.perform_taken(transfer, output),
                None if entry.machine.is_closed() && entry.over => {
                    self.taking.entries.remove(&transfer);
                    return None;
                }
                None => return entry.machine.poll_timeout().map(|(at, _)| at),
            }
        }
    }

    fn perform_taken(&mut self, transfer: TransferId, output: ReceiverOutput) {
        let now = self.now();
        let (Some(entry), Some(keeping)) = (self.taking.entries.get_mut(&transfer), &self.keeping) else { return };
        match output {
            ReceiverOutput::MakeGrant { generation, missing } => {
                let region = self.caches.regions();
                let version = self.peers.version(&entry.peer).ok_or(GrantRefusal::NotConnected);
                // One rectangle is missing, always: a cut ends a return. So no window is left behind by an error.
                let granted = version.and_then(|version| {
                    let grant = |&rect| entry.grant(&keeping.memory, region, &*self.transport, rect);
                    let windows = missing.iter().map(grant).collect::<Result<Vec<_>, _>>()?;
                    let bytes = Windows::encode(version, &windows).map_err(GrantRefusal::Impossible)?;
                    Ok((windows, bytes))
                });
                let taken = match granted {
                    Ok((windows, bytes)) => {
                        self.granted.extend(windows.iter().map(|window| (window.key, transfer)));
                        let first = OpaqueKey::new(windows.first().map_or(0, |window| window.key.0));
                        entry.grants.insert(generation, windows);
                        entry.machine.granted(now, generation, first, bytes)
                    }
                    Err(refusal) => entry.machine.grant_refused(now, generation, refusal),
                };
                self.note(taken);
            }
            ReceiverOutput::Send(message) => {
                let peer = entry.peer.clone();
                self.send(&peer, &message);
            }
            ReceiverOutput::Verify { generation, sequence, rect } => {
                entry.verifying += 1;
                let sealed = entry.seal(&*self.transport, generation, rect);
                let write = WriteKey { transfer, generation, sequence };
                let (blocks, first_token) = (entry.berths.clone(), entry.tokens.start);
                match sealed {
                    Ok(()) => self.verify(Job::VerifyTaken { write, blocks, first_token, rect }),
                    Err(problem) => self.taken_digested(write, Err(problem)),
                }
            }
            ReceiverOutput::Verified(rect) => {
                let metrics = &self.board.metrics;
                metrics.chunks_total.at(metrics::Side::Receive).add(1);
                let bytes = rect.cells() * keeping.memory.bytes_per_cell(&keeping.memory.heads());
                metrics.transfer_bytes_total.at(metrics::Side::Receive).add(bytes);
            }
            ReceiverOutput::Revoke { generation, .. } => {
                for GrantedWindow { key, .. } in entry.grants.remove(&generation).into_iter().flatten() {
                    self.transport.revoke(key);
                    self.granted.remove(&key);
                }
                let taken = entry.machine.fenced(now, generation);
                self.note(taken);
            }
            ReceiverOutput::Finished(end) => {
                entry.end = Some(end);
                self.finish_taken(transfer);
            }
        }
    }

    /// A mover hashed what a write left in the berths.
    pub(super) fn taken_digested(&mut self, write: WriteKey, digest: Result<Digest, String>) {
        let WriteKey { transfer, generation, sequence } = write;
        let Some(entry) = self.taking.entries.get_mut(&transfer) else { return };
        entry.verifying -= 1;
        let before = entry.machine.stats().digest_mismatches;
        self.with_taken(transfer, |entry, now| match digest {
            Ok(digest) => entry.machine.digested(now, generation, sequence, digest),
            Err(problem) => entry.machine.digest_failed(now, generation, sequence, &problem),
        });
        if let Some(entry) = self.taking.entries.get(&transfer) {
            let found = entry.machine.stats().digest_mismatches - before;
            self.board.metrics.digest_mismatches_total.add(found);
        }
        self.finish_taken(transfer);
    }

    /// Hands what came to the tier, or lets its frames go, once no mover reads the berths.
    fn finish_taken(&mut self, transfer: TransferId) {
        let now = self.now();
        let entry = self.taking.entries.get_mut(&transfer).filter(|entry| entry.verifying == 0);
        let Some(entry) = entry else { return };
        let Some(end) = entry.end.take() else { return };
        entry.over = true;
        entry.guards = None;
        let (stores, berths, first) = (std::mem::take(&mut entry.stores), entry.berths.clone(), entry.tokens.start);
        let elapsed = now.since(entry.began);
        self.count_end(metrics::Side::Receive, &end.verdict, elapsed);
        tracing::debug!(%transfer, verdict = %end.verdict, blocks = stores.len(), "blocks of a peer came");
        let per_block = self.caches.tokens_per_block();
        for (position, ((order, frame), berth)) in stores.into_iter().zip(berths).enumerate() {
            if end.verdict == Verdict::Done {
                self.board.metrics.taken_blocks_total.add(1);
                self.keep_landed(order, (frame, berth), first + position as u32 * per_block);
            } else {
                if let Some(keeping) = &self.keeping {
                    keeping.leave(&[berth]);
                }
                self.drop_store(order, TierDrop::Failed);
            }
        }
        self.turn(transfer, Side::Taking);
    }
}

/// How long blocks wait for a peer that does not say whether it wants them.
pub(super) const RETURN_WAIT: Duration = Duration::from_secs(2);
/// How long a return may take in all.
pub(super) const RETURN_TIME: Duration = Duration::from_secs(10);
/// Writes of one return that are under way at once.
pub(super) const RETURN_POSTS: NonZeroU32 = NonZeroU32::new(2).unwrap();
/// Returns that are taken at once.
const TAKES: usize = 64;
/// Refused ones that are remembered.
const REFUSED: usize = 1024;
