//! The thread that owns every transfer's machine: feeds it inputs, performs its outputs, keeps its deadlines.
//!
//! It waits for the transport's events. Commands of the model thread and finished jobs of the movers come through one bounded
//! channel ([`Inlet`]) and end that wait. Nothing else here blocks; `revoke` waits for one system call.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use crossbeam_channel::{Receiver as Inbox, Sender as Outbox};
use kvferry_kernels::device::Lane;
use kvferry_protocol::message::{Abort, EngineBytes, Message, Reason, Verdict};
use kvferry_protocol::transfer::{Early, EarlyConfig, InputError, Time};
use kvferry_protocol::{PeerId, TransferId, codec};
use kvferry_transport::{GrantKey, PeerAddress, Transport};

use super::card::WorkerCard;
use super::device::Staging;
use super::ended::Ended;
use super::inlet::Inlet;
use super::jobs::Movers;
use super::keeping::Keeping;
use super::leases::Lease;
use super::loading::Loading;
use super::peers::Peers;
use super::posting::Posting;
use super::receiving::Receiving;
use super::returning::Taking;
use super::sending::Sending;
use super::slabs::SlabPool;
use super::unheard::Unheard;
use super::uploading::WaitingGrant;
use super::{Board, Command, INPUTS, Input};
use crate::config::ConnectorConfig;
use crate::contract::{self, Cancel, RequestId};
use crate::metrics::{self, DropReason};
use crate::pd::caches::Caches;

/// All transfers of one worker.
pub(super) struct Driver {
    pub(super) config: ConnectorConfig,
    pub(super) caches: Caches,
    /// Where peers' writes land on their way to a device.
    pub(super) staging: Option<Arc<Staging>>,
    /// Grants that wait for room there, who asked first in front.
    pub(super) waiting_grants: VecDeque<WaitingGrant>,
    pub(super) transport: Arc<dyn Transport>,
    pub(super) board: Arc<Board>,
    pub(super) movers: Movers,
    pub(super) card: WorkerCard,
    pub(super) peers: Peers,
    /// Loads by their hand-over, and keeps by theirs.
    pub(super) loads: BTreeMap<TransferId, Loading>,
    pub(super) leases: BTreeMap<TransferId, Lease>,
    /// Their parts, each a transfer with one peer under an id of its own.
    pub(super) receiving: BTreeMap<TransferId, Receiving>,
    pub(super) sending: BTreeMap<TransferId, Sending>,
    /// What peers said of transfers that this engine does not know yet.
    pub(super) early: Early,
    /// Parts that this side sends no more.
    pub(super) ended: Ended,
    /// Which transfer a grant of ours belongs to: what lands names it, but only this table is believed.
    pub(super) granted: BTreeMap<GrantKey, TransferId>,
    /// Writes that their peers asked back before they were verified.
    pub(super) recalled: BTreeSet<(GrantKey, u32)>,
    pub(super) posting: Posting,
    /// After the movers, which copy what it guards.
    pub(super) keeping: Option<Keeping>,
    pub(super) taking: Taking,
    /// Tells the engine that a step is wanted although nothing is scheduled.
    pub(super) wake: Outbox<()>,
    pub(super) messages: Outbox<(PeerId, Bytes)>,
    /// What found `messages` full.
    pub(super) unheard: Unheard,
    epoch: Instant,
    deadlines: Deadlines,
    /// Who waits for the end of which transfers.
    waiting: Vec<(BTreeSet<TransferId>, Vec<RequestId>, Outbox<()>)>,
    stopping: Option<(Instant, Outbox<()>)>,
}

/// The memory that a driver works in.
pub(super) struct Memories {
    pub(super) caches: Caches,
    pub(super) keeping: Option<Keeping>,
    pub(super) slabs: Arc<SlabPool>,
    /// If the caches are on a device: where writes land on their way, and the movers' lanes.
    pub(super) staging: Option<Arc<Staging>>,
    pub(super) lanes: Vec<Lane>,
}

/// Where a driver speaks to: itself by way of other threads, and the engine.
pub(super) struct Outlets<'a> {
    pub(super) inputs: &'a Inlet,
    pub(super) wake: Outbox<()>,
    pub(super) messages: Outbox<(PeerId, Bytes)>,
}

/// One timer for all machines: the next moment of each, in order.
#[derive(Debug, Default)]
struct Deadlines {
    order: BTreeSet<(Time, TransferId, Side)>,
    at: BTreeMap<(TransferId, Side), Time>,
}

/// Which machine of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Side {
    Receiving,
    Sending,
    /// A peer's blocks on their way into the tier.
    Taking,
}

impl Driver {
    pub(super) fn new(
        config: ConnectorConfig,
        memories: Memories,
        card: WorkerCard,
        transport: Arc<dyn Transport>,
        board: Arc<Board>,
        outlets: Outlets<'_>,
    ) -> Self {
        let Outlets { inputs, wake, messages } = outlets;
        let Memories { caches, keeping, slabs, staging, lanes } = memories;
        let tier = keeping.as_ref().map(|keeping| &keeping.memory);
        let movers = Movers::start(config.limits().movers.get().into(), (&caches, tier, lanes), inputs, &board.tracer);
        let posting = Posting::new(config.limits(), slabs);
        let early = Early::new(EarlyConfig {
            max_messages: EARLY_MESSAGES,
            max_messages_per_peer: EARLY_MESSAGES / 4,
            ttl: config.deadlines().transfer,
        });
        let ended = Ended::new(config.peer().tp_rank);
        Self {
            config,
            caches,
            staging,
            waiting_grants: VecDeque::new(),
            transport,
            board,
            movers,
            card,
            peers: Peers::default(),
            loads: BTreeMap::new(),
            leases: BTreeMap::new(),
            receiving: BTreeMap::new(),
            sending: BTreeMap::new(),
            early,
            ended,
            granted: BTreeMap::new(),
            recalled: BTreeSet::new(),
            posting,
            keeping,
            taking: Taking::default(),
            wake,
            messages,
            unheard: Unheard::default(),
            epoch: Instant::now(),
            deadlines: Deadlines::default(),
            waiting: Vec::new(),
            stopping: None,
        }
    }

    pub(super) fn run(mut self, inputs: Inbox<Input>) {
        let mut events = Vec::new();
        loop {
            self.transport.poll(&mut events, self.wait());
            events.drain(..).for_each(|event| self.event(event));
            // What is sent from here on ends the next wait before it begins.
            inputs.try_iter().take(INPUTS).for_each(|input| self.take(input));
            self.expire();
            self.push_grants();
            self.push_posts();
            self.push_stores();
            self.unheard.hand_over(&self.messages);
            self.set_gauges();
            if self.is_stopped() {
                break;
            }
        }
        // Before the movers are joined: one may wait for room in the channel.
        drop(inputs);
    }

    pub(super) fn now(&self) -> Time {
        Time::since_epoch(self.epoch.elapsed())
    }

    /// A moment of the machines' time on the process's clock.
    pub(super) fn instant(&self, time: Time) -> Instant {
        self.epoch + time.elapsed()
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::Command(command) => self.command(command),
            Input::Job(done) => self.job_done(done),
            Input::Tier(answer) => self.tier_answer(answer),
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Load(load, after) => self.load(load, after),
            Command::Lease(save) => self.lease(save),
            Command::Computed(handed, after) => self.computed(&handed, after),
            Command::Cancel(cancel) => self.cancel(&cancel),
            Command::Keep(stores) => self.keep(stores),
            Command::Restore(restore) => self.restore(restore),
            Command::Hurry(requests) => self.hurry(&requests),
            Command::Return(returns, after) => self.give_back(returns, &after),
            Command::Take(take) => self.take_in(take),
            Command::Refuse(refuse) => self.refuse(&refuse),
            Command::Preempt(requests, done) => {
                let transfers = self.transfers_of(&requests);
                self.end_all(|request| requests.contains(request));
                self.abandon_stores(|request| requests.contains(request));
                self.end_returns(|request| requests.contains(request));
                self.recall_of(&requests);
                self.waiting.push((transfers, requests, done));
                self.answer_waiting();
            }
            Command::Recall => self.recall_all(),
            Command::Connect(address) => {
                self.peers.keep(address);
                self.dial(address);
            }
            Command::Message(peer, message) => {
                let message = EngineBytes::new(message.to_vec()).map(Message::Engine);
                match message {
                    Ok(message) => self.send(&peer, &message),
                    Err(error) => tracing::warn!(%peer, %error, "engine message was not sent"),
                }
            }
            Command::Decline(peer, transfer, why) => {
                self.decline(&peer, transfer, &why);
            }
            Command::Shutdown(grace, done) => {
                self.end_all(|_| true);
                self.abandon_stores(|_| true);
                self.end_returns(|_| true);
                self.end_takes();
                // Who reads this side's blocks in place has the time to copy them.
                self.recall_all();
                self.stopping = Some((Instant::now() + grace, done));
            }
        }
    }

    /// Dials an address unless that was done.
    pub(super) fn dial(&mut self, address: PeerAddress) {
        if self.peers.must_dial(address)
            && let Err(error) = self.transport.connect(&address)
        {
            tracing::warn!(?address, %error, "peer cannot be dialled");
            self.peers.forget_address(address);
        }
    }

    /// Sends a message in the version of the session; without a session it is lost, as the machines expect.
    pub(super) fn send(&self, peer: &PeerId, message: &Message) {
        let Some(version) = self.peers.version(peer) else {
            tracing::debug!(%peer, message = message.name(), "message was not sent: there is no session");
            return;
        };
        match codec::encode(version, message) {
            Ok(bytes) => {
                if let Err(error) = self.transport.send(peer, bytes.into()) {
                    tracing::debug!(%peer, message = message.name(), %error, "message was not sent");
                }
            }
            Err(error) => tracing::warn!(%peer, message = message.name(), %error, "message cannot be encoded"),
        }
    }

    /// Tells a peer that a transfer for which it waits will not be, now and when it asks.
    pub(super) fn decline(&mut self, peer: &PeerId, transfer: TransferId, why: &str) {
        if !self.early.is_declined(peer, transfer) && !self.decline_when_asked(peer, transfer, why) {
            // It has not spoken yet, or waits for this side to speak first: either way it must not wait for its deadline.
            let why = Verdict::failed(Reason::Unknown, why);
            self.send(peer, &Message::Abort(Abort { transfer, why }));
        }
    }

    /// Tells a peer the same, but only if it has asked, or when it does; returns whether it had.
    pub(super) fn decline_when_asked(&mut self, peer: &PeerId, transfer: TransferId, why: &str) -> bool {
        let answer = self.early.decline(self.now(), peer, transfer, why);
        if let Some(answer) = &answer {
            self.send(peer, answer);
        }
        answer.is_some()
    }

    /// An input that a machine did not take: late, duplicate or unknown. It was counted and changed nothing.
    pub(super) fn note(&self, taken: Result<(), InputError>) {
        if let Err(error) = taken {
            let reason = match error {
                InputError::Sequence { .. } => DropReason::Duplicate,
                InputError::Transfer { .. } | InputError::Computed { .. } => DropReason::Unknown,
                _ => DropReason::Late,
            };
            self.board.metrics.messages_dropped_total.at(reason).add(1);
            tracing::debug!(%error, "input ignored");
        }
    }

    fn cancel(&mut self, cancel: &Cancel) {
        let loads = self.loads.get(&cancel.transfer).is_some_and(|load| load.request == cancel.request);
        let keeps = self.leases.get(&cancel.transfer).is_some_and(|lease| lease.request == cancel.request);
        match cancel.side {
            // One that is not here, or is another request's, is over, and the scheduler will hear of that.
            contract::Side::Load if loads => self.cancel_load(cancel.transfer),
            contract::Side::Load => {}
            contract::Side::Keep if keeps => self.cancel_lease(cancel.transfer),
            contract::Side::Keep => {
                if let Some(readers) = &cancel.waiting {
                    self.decline_all(
                        cancel.transfer,
                        readers,
                        "the engine gave the request up before its transfer began",
                    );
                }
                // Nothing was begun for it, or it is over: the scheduler waits for a word all the same.
                self.board.results().sent.push(cancel.request.clone());
            }
        }
    }

    /// Ends the loads and keeps of some requests.
    fn end_all(&mut self, of: impl Fn(&RequestId) -> bool) {
        let loads: Vec<_> = self.loads.iter().filter(|(_, load)| of(&load.request)).map(|(&id, _)| id).collect();
        let leases: Vec<_> = self.leases.iter().filter(|(_, lease)| of(&lease.request)).map(|(&id, _)| id).collect();
        loads.into_iter().for_each(|id| self.cancel_load(id));
        leases.into_iter().for_each(|id| self.cancel_lease(id));
    }

    fn transfers_of(&self, requests: &[RequestId]) -> BTreeSet<TransferId> {
        let receiving = self.receiving.iter().filter(|(_, entry)| !entry.over && requests.contains(&entry.request));
        let sending = self.sending.iter().filter(|(_, entry)| !entry.over && requests.contains(&entry.request));
        receiving.map(|(&transfer, _)| transfer).chain(sending.map(|(&transfer, _)| transfer)).collect()
    }

    /// Performs all that a machine asks for, then notes its next deadline, or forgets it when all is over.
    pub(super) fn turn(&mut self, transfer: TransferId, side: Side) {
        let next = match side {
            Side::Receiving => self.turn_receiving(transfer),
            Side::Sending => self.turn_sending(transfer),
            Side::Taking => self.turn_taken(transfer),
        };
        self.deadlines.set(transfer, side, next);
        self.answer_waiting();
    }

    pub(super) fn answer_waiting(&mut self) {
        let (receiving, sending, keeping) = (&self.receiving, &self.sending, &self.keeping);
        let touches = |transfer: &TransferId| {
            receiving.get(transfer).is_some_and(|entry| !entry.over)
                || sending.get(transfer).is_some_and(|entry| !entry.released)
        };
        let leases = &self.leases;
        let holds = |requests: &[RequestId]| {
            leases.values().any(|lease| lease.hold.is_held() && requests.contains(&lease.request))
        };
        self.waiting.retain(|(transfers, requests, done)| {
            let wait = transfers.iter().any(touches)
                || holds(requests)
                || keeping.as_ref().is_some_and(|keeping| keeping.touches(requests));
            if !wait {
                // Who no longer waits need not hear it.
                let _ = done.try_send(());
            }
            wait
        });
    }

    fn expire(&mut self) {
        let now = self.now();
        while let Some((_, transfer, side)) = self.deadlines.first().filter(|&(at, ..)| at <= now) {
            match side {
                Side::Receiving => {
                    if let Some(entry) = self.receiving.get_mut(&transfer) {
                        entry.machine.timeout(now);
                    }
                }
                Side::Sending => {
                    if let Some(entry) = self.sending.get_mut(&transfer) {
                        entry.machine.timeout(now);
                    }
                }
                Side::Taking => self.taken_timeout(transfer, now),
            }
            self.turn(transfer, side);
        }
        self.expire_tier();
        if self.early.poll_timeout().is_some_and(|(at, _)| at <= now) {
            for (peer, answer) in self.early.timeout(now) {
                self.board.metrics.early_grants_dropped_total.add(1);
                self.send(&peer, &answer);
            }
        }
    }

    /// Sets the gauges that follow tables; once for each round of inputs.
    fn set_gauges(&self) {
        let metrics = &self.board.metrics;
        metrics.early_grants_live.set(self.early.len() as u64);
        metrics.grants_live.set(self.granted.len() as u64);
        metrics.sessions_live.set(self.peers.count() as u64);
        metrics.addresses_dialled.set(self.peers.dialled() as u64);
        metrics.engine_messages_waiting.set(self.unheard.len() as u64);
        let stats = self.transport.stats();
        metrics.lent_bytes_total.advance_to(stats.lent_bytes);
        metrics.handed_bytes_total.advance_to(stats.handed_bytes);
        metrics.adopted_bytes_total.advance_to(stats.adopted_bytes);
        metrics.recalled_writes_total.advance_to(stats.recalled_writes);
        metrics.held_bytes.set(stats.held_bytes);
        let (used, limit) = self.posting.slab_bytes();
        metrics.slab_pool_used_bytes.set(used);
        metrics.slab_pool_limit_bytes.set(limit);
        if let Some(staging) = &self.staging {
            let (used, limit) = staging.usage();
            metrics.staging_used_bytes.set(used);
            metrics.staging_limit_bytes.set(limit);
        }
        if let Some(keeping) = &self.keeping {
            let (limit, queued) = keeping.usage();
            metrics.tier_limit_bytes.set(limit);
            metrics.tier_queue_blocks.set(queued);
        }
    }

    /// Sets the gauges of transfers.
    pub(super) fn count_live(&self) {
        let metrics = &self.board.metrics;
        let receiving = self.receiving.values().filter(|entry| !entry.over).count();
        let sending = self.sending.values().filter(|entry| !entry.over).count();
        metrics.transfers_live.at(metrics::Side::Receive).set(receiving as u64);
        metrics.transfers_live.at(metrics::Side::Send).set(sending as u64);
        metrics.leases_live.set(sending as u64);
    }

    /// Counts the end of a transfer.
    pub(super) fn count_end(&self, side: metrics::Side, verdict: &Verdict, elapsed: Duration) {
        let metrics = &self.board.metrics;
        match verdict {
            Verdict::Done => metrics.transfers_done_total.at(side).add(1),
            Verdict::Cancelled => metrics.transfers_cancelled_total.at(side).add(1),
            Verdict::Failed(failure) => {
                metrics.transfers_failed_total.at((side, failure.reason.into())).add(1);
                if failure.reason == Reason::LeaseExpired && side == metrics::Side::Send {
                    metrics.leases_expired_total.add(1);
                }
            }
        }
        metrics.transfer_seconds.at(side).observe(elapsed);
        self.count_live();
    }

    fn wait(&self) -> Duration {
        let next = self.deadlines.first().map_or(IDLE_WAIT, |(at, ..)| at.since(self.now()));
        let tier = self.keeping.as_ref().and_then(Keeping::deadline);
        let next = tier.map_or(next, |at| at.since(self.now()).min(next));
        let next = if self.unheard.is_empty() { next } else { next.min(UNHEARD_WAIT) };
        let stop = self.stopping.as_ref().map(|(by, _)| by.saturating_duration_since(Instant::now()));
        next.min(stop.unwrap_or(IDLE_WAIT)).min(IDLE_WAIT)
    }

    fn is_stopped(&mut self) -> bool {
        let Some((by, _)) = &self.stopping else { return false };
        let live = self.receiving.values().any(|entry| !entry.over)
            || self.sending.values().any(|entry| !entry.over)
            || self.taking.entries.values().any(|entry| !entry.over)
            || self.keeping.as_ref().is_some_and(Keeping::is_busy)
            || !self.posting.held.is_empty();
        if live && Instant::now() < *by {
            return false;
        }
        if live {
            tracing::warn!("shut down before all transfers had ended");
        }
        self.transport.shutdown();
        if let Some((_, done)) = self.stopping.take() {
            let _ = done.try_send(());
        }
        true
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // Guards and caches go only after the transport can touch no page any more, also when a panic brought us here.
        self.transport.shutdown();
    }
}

impl Deadlines {
    fn set(&mut self, transfer: TransferId, side: Side, at: Option<Time>) {
        if let Some(old) = self.at.remove(&(transfer, side)) {
            self.order.remove(&(old, transfer, side));
        }
        if let Some(at) = at {
            self.at.insert((transfer, side), at);
            self.order.insert((at, transfer, side));
        }
    }

    fn first(&self) -> Option<(Time, TransferId, Side)> {
        self.order.first().copied()
    }
}

/// Messages that may wait for their request.
const EARLY_MESSAGES: usize = 1024;
/// The longest sleep: machines wake the driver through `deadlines`, so this bounds only how late expired early grants go.
const IDLE_WAIT: Duration = Duration::from_millis(500);
/// How soon the engine's queue is looked at again while something waits for room in it.
const UNHEARD_WAIT: Duration = Duration::from_millis(5);
