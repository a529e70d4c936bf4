//! What this worker keeps for a decode engine: one request's KV, in as many parts as decode ranks read it.
//!
//! The engine hears once that a request was sent: when no part reads its blocks any more, whatever the verdicts, of which some may still
//! be awaited. A rank that nobody reads, because its heads are held by others too and those were chosen, says so at once.

use std::collections::BTreeSet;
use std::num::{NonZeroU32, NonZeroU64};

use kvferry_protocol::layout::{readers_of, sources_of};
use kvferry_protocol::transfer::{Rect, Sender, SenderConfig};
use kvferry_protocol::{PeerId, TpRank, TransferId};

use super::device::After;
use super::driver::{Driver, Side};
use super::held::LeaseHold;
use super::sending::{PartTo, Sending};
use super::step::Handed;
use crate::contract::{Readers, RequestId, Save};
use crate::metrics;

/// One request's KV, kept until nobody reads it any more.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) request: RequestId,
    /// Its transfers in [`Driver::sending`] that have not ended.
    parts: BTreeSet<TransferId>,
    /// The engine was told.
    reported: bool,
    /// What of it peers hold in place.
    pub(super) hold: LeaseHold,
}

impl Driver {
    /// The engine computes a request whose KV a peer wants.
    pub(super) fn lease(&mut self, save: Save) {
        if let Some(lease) = self.leases.get(&save.transfer) {
            if lease.request != save.request {
                if save.first {
                    let (request, transfer, other) = (&save.request, save.transfer, &lease.request);
                    tracing::warn!(%request, %transfer, %other, "transfer refused: it is another request's; draw a new id");
                    self.board.results().sent.push(save.request);
                }
                return;
            }
            for part in &lease.parts {
                if let Some(entry) = self.sending.get_mut(part) {
                    entry.blocks.clone_from(&save.blocks);
                }
            }
            return;
        }
        if !save.first {
            return; // It ended while the engine computed; the report is on its way to the scheduler.
        }
        let began = self.parts_to(save.transfer, save.readers).and_then(|parts| self.begin_lease(&save, &parts));
        match began {
            Ok(begun) if begun.is_empty() => self.board.results().sent.push(save.request),
            Ok(begun) => {
                self.board.metrics.transfers_started_total.at(metrics::Side::Send).add(begun.len() as u64);
                let parts = begun.iter().map(|(part, _)| *part).collect();
                let lease = Lease { request: save.request, parts, reported: false, hold: LeaseHold::default() };
                self.leases.insert(save.transfer, lease);
                self.count_live();
                for (part, peer) in begun {
                    match peer {
                        Some(peer) => self.begin_with(part, peer),
                        None => self.turn(part, Side::Sending),
                    }
                }
            }
            Err(problem) => {
                tracing::warn!(request = %save.request, transfer = %save.transfer, problem, "transfer refused");
                let readers = Readers { to: save.to, count: save.readers };
                self.decline_all(save.transfer, &readers, &problem);
                self.board.results().sent.push(save.request);
            }
        }
    }

    /// Tells the decode ranks that read from this worker that a transfer will not be.
    pub(super) fn decline_all(&mut self, transfer: TransferId, readers: &Readers, why: &str) {
        let Ok(parts) = self.parts_to(transfer, readers.count) else {
            return self.decline_whoever_asks(transfer, readers, why);
        };
        for part in parts {
            match self.reader(readers.to.as_ref(), &part) {
                Some(peer) => self.decline(&peer, part.transfer, why),
                None => self.ended.insert(part.transfer, why.to_owned()),
            }
        }
    }

    /// The same where the sizes do not fit: any rank may wait for a part, or none.
    fn decline_whoever_asks(&mut self, transfer: TransferId, readers: &Readers, why: &str) {
        let ours = self.config.peer().tp_rank;
        for rank in (0..readers.count.min(MAX_RANKS)).map(TpRank::new) {
            let part = PartTo { transfer: transfer.part(rank, ours), rank, heads: self.caches.heads() };
            if let Some(peer) = self.reader(readers.to.as_ref(), &part) {
                self.decline_when_asked(&peer, part.transfer, why);
            }
        }
        self.ended.insert_every(transfer, why.to_owned());
    }

    /// Which decode ranks read from this worker, and what each takes.
    fn parts_to(&self, transfer: TransferId, readers: u16) -> Result<Vec<PartTo>, String> {
        if readers > MAX_RANKS {
            return Err(format!("{readers} ranks read, but an engine has at most {MAX_RANKS}"));
        }
        let (ours, tp_size, kv_heads) =
            (self.config.peer().tp_rank, self.config.tp_size().get(), self.card.manifest.kv_heads);
        let explain = |error| format!("{error}: the request says that the decode engine has {readers} ranks");
        let expected = readers_of(ours, tp_size, readers, kv_heads).map_err(explain)?;
        let mut parts = Vec::with_capacity(expected.into());
        for rank in (0..readers).map(TpRank::new) {
            for source in sources_of(rank, readers, tp_size, kv_heads).map_err(explain)? {
                if source.tp_rank == ours {
                    parts.push(PartTo { transfer: transfer.part(rank, ours), rank, heads: source.heads });
                }
            }
        }
        Ok(parts)
    }

    /// Makes the parts' machines, but for those whose receiver gave up before its turn came. Returns each with its receiver, where
    /// that is known.
    fn begin_lease(&mut self, save: &Save, parts: &[PartTo]) -> Result<Vec<(TransferId, Option<PeerId>)>, String> {
        let limit = self.config.limits().max_transfers.get() as usize;
        if self.sending.len() + parts.len() > limit {
            return Err(format!("{limit} transfers are under way; raise max_transfers or send less"));
        }
        let held = Rect::new(0..save.prompt_tokens, self.caches.layers()).map_err(|error| error.to_string())?;
        let began = self.now();
        let mut begun = Vec::with_capacity(parts.len());
        for part in parts {
            if self.sending.contains_key(&part.transfer) {
                return Err(format!("transfer {} is being sent already; draw a new id for each", save.transfer));
            }
            let peer = self.reader(save.to.as_ref(), part);
            let gave_up = match &peer {
                Some(peer) => self.early.is_declined(peer, part.transfer),
                None => self.early.was_declined_by(part.transfer, |peer| peer.tp_rank == part.rank),
            };
            if gave_up {
                continue;
            }
            self.ended.forget(part.transfer, part.rank);
            begun.push((part, peer));
        }
        let machine = |part: &PartTo| Sender::new(began, self.sender_config(part, held));
        let entries: Vec<_> =
            begun.iter().map(|(part, _)| (part.transfer, Sending::new(machine(part), part, save, began))).collect();
        self.sending.extend(entries);
        Ok(begun.into_iter().map(|(part, peer)| (part.transfer, peer)).collect())
    }

    fn sender_config(&self, part: &PartTo, held: Rect) -> SenderConfig {
        let deadlines = self.config.deadlines();
        let cells = self.config.limits().chunk_bytes / self.caches.bytes_per_cell(&part.heads).max(1);
        SenderConfig {
            transfer: part.transfer,
            held,
            order: self.config.order().into(),
            lease_ttl: deadlines.lease_ttl,
            lease_max: deadlines.transfer + deadlines.lease_ttl,
            absent: deadlines.absent,
            word: deadlines.verdict,
            max_posts_in_flight: self.config.limits().posts_in_flight.into(),
            max_cells_per_post: NonZeroU64::new(cells).unwrap_or(NonZeroU64::MIN),
            align_tokens: NonZeroU32::new(self.caches.tokens_per_block()).unwrap_or(NonZeroU32::MIN),
        }
    }

    /// The decode worker that reads a part: as the request names its engine, or who asked for the part before.
    fn reader(&self, to: Option<&PeerId>, part: &PartTo) -> Option<PeerId> {
        match to {
            Some(peer) => Some(PeerId { tp_rank: part.rank, ..peer.clone() }),
            None => self.early.peer_of(part.transfer).filter(|peer| peer.tp_rank == part.rank).cloned(),
        }
    }

    /// Some tokens of some layers are in the cache.
    pub(super) fn computed(&mut self, handed: &Handed, after: Result<After, String>) {
        match after {
            Ok(after) => {
                for part in self.parts_of_lease(handed.transfer) {
                    self.part_computed(part, handed, &after);
                }
            }
            Err(problem) => self.fail_lease(handed.transfer, &problem),
        }
    }

    /// Ends a lease: all its parts.
    pub(super) fn cancel_lease(&mut self, lease: TransferId) {
        for part in self.parts_of_lease(lease) {
            self.with_sending(part, |entry, now| entry.machine.cancel(now));
        }
    }

    /// Fails a lease: all its parts.
    pub(super) fn fail_lease(&mut self, lease: TransferId, problem: &str) {
        tracing::warn!(transfer = %lease, problem, "transfer failed");
        for part in self.parts_of_lease(lease) {
            self.with_sending(part, |entry, now| entry.machine.fail(now, problem));
        }
    }

    /// Nothing of a part reads the pages any more.
    pub(super) fn part_released(&mut self, id: TransferId) {
        let Some(lease) = self.leases.get_mut(&id) else { return };
        let reads = |part: &TransferId| self.sending.get(part).is_some_and(|entry| !entry.released);
        if !lease.reported && !lease.hold.is_held() && !lease.parts.iter().any(reads) {
            lease.reported = true;
            self.board.results().sent.push(lease.request.clone());
        }
    }

    /// A part ended.
    pub(super) fn part_sent(&mut self, id: TransferId, part: TransferId) {
        self.part_released(id);
        let Some(lease) = self.leases.get_mut(&id) else { return };
        lease.parts.remove(&part);
        if lease.parts.is_empty() && !lease.hold.is_held() {
            self.leases.remove(&id);
        }
    }

    /// No peer holds anything of a lease in place any more.
    pub(super) fn lease_let_go(&mut self, id: TransferId) {
        self.part_released(id);
        if self.leases.get(&id).is_some_and(|lease| lease.parts.is_empty()) {
            self.leases.remove(&id);
        }
    }

    fn parts_of_lease(&self, lease: TransferId) -> Vec<TransferId> {
        self.leases.get(&lease).map_or_else(Vec::new, |lease| lease.parts.iter().copied().collect())
    }
}

/// The most ranks that a configuration can name; the number comes from a peer's engine, so it is checked.
const MAX_RANKS: u16 = 1024;
