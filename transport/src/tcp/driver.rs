//! The control thread: it listens, dials, shakes hands, and begins and ends sessions.
//!
//! A session's life: `Handshaking` (control lane) -> `Pending` (data lanes are coming) -> `Control` (up) -> over.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_protocol::PeerId;
use kvferry_protocol::wire::{FrameHeader, FrameKind};

use super::accept::{Accepting, Listeners};
use super::calls::Bell;
use super::coming::Coming;
use super::control::Control;
use super::endpoint::{Command, Shared};
use super::estate::Estate;
use super::handshaking::Handshaking;
use super::path::Choice;
use super::pending::{Pending, PendingKey};
use super::poller::Poller;
use super::session::{Session, SessionSetup};
use super::strangers::{Refusals, Strangers};
use super::stream::Stream;
use super::target::{BackOff, Target, TargetState};
use super::timers::Timers;
use crate::api::{Event, PeerAddress};
use crate::core::{Counters, SessionKey, Superseded, is_other_start};
use crate::error::TransportError;
use crate::share::Sharing;

/// An accepted connection is not let go for another one for this part of a handshake's time.
const GRACE_PART: u32 = 100;

pub(crate) struct Driver<'a> {
    pub(super) shared: &'a Arc<Shared>,
    pub(super) listeners: Listeners,
    pub(super) poller: Poller,
    pub(super) timers: Timers<Due>,
    pub(super) accepting: Accepting,
    pub(super) strangers: Strangers,
    pub(super) refusals: Refusals,
    pub(super) next_handshake: u64,
    pub(super) handshaking: HashMap<u64, Handshaking>,
    pub(super) pending: HashMap<PendingKey, Pending>,
    /// Boxed: a table has room for twice as many.
    pub(super) live: HashMap<SessionKey, Box<Control>>,
    /// Which of them is with whom.
    pub(super) by_peer: HashMap<PeerId, SessionKey>,
    /// Sessions that read nothing until events are polled.
    held: HashSet<u64>,
    /// Sessions whose control lane can go on.
    queue: VecDeque<u64>,
    pub(super) targets: HashMap<SocketAddr, Target>,
    pub(super) back_off: BackOff,
    pub(super) superseded: Superseded,
    pub(super) next_data: usize,
    /// What peers may still read of sessions that are over.
    pub(super) estates: HashMap<SessionKey, Estate>,
}

/// A socket that this thread waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Key {
    Tcp,
    Unix,
    /// By its place in the list.
    Rail(u64),
    /// By its number.
    Handshake(u64),
    Session(SessionKey),
    /// Of a session that is over.
    Estate(SessionKey),
}

/// What this thread does at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) enum Due {
    /// Accept again.
    Accept,
    /// Give up a handshake.
    Handshake(u64),
    /// Give up a session whose lanes do not come.
    Pending(PendingKey),
    /// Dial.
    Target(SocketAddr),
    /// Ask a peer whether it is there, or give it up.
    Session(SessionKey),
}

impl Key {
    pub(super) fn get(self) -> u64 {
        match self {
            Self::Tcp => 0,
            Self::Unix => 2,
            Self::Rail(at) => (at + 1) << 3,
            Self::Handshake(number) => number << 3 | 1,
            Self::Session(key) => key.0 << 3 | 3,
            Self::Estate(key) => key.0 << 3 | 4,
        }
    }

    fn of(key: u64) -> Self {
        match (key & 7, key >> 3) {
            (1, number) => Self::Handshake(number),
            (3, key) => Self::Session(SessionKey(key)),
            (4, key) => Self::Estate(SessionKey(key)),
            (2, _) => Self::Unix,
            (_, 0) => Self::Tcp,
            (_, at) => Self::Rail(at - 1),
        }
    }
}

pub(crate) fn run(shared: &Arc<Shared>, listeners: Listeners, poller: Poller) {
    let config = &shared.config;
    let back_off = BackOff { first: config.redial_first, longest: config.redial_longest, random: config.redial_seed };
    let (most, most_of_source) = (config.max_unauthenticated, config.max_unauthenticated_per_address);
    let mut driver = Driver {
        shared,
        listeners,
        poller,
        timers: Timers::new(),
        accepting: Accepting::default(),
        strangers: Strangers::new(most, most_of_source, config.handshake / GRACE_PART),
        refusals: Refusals::default(),
        next_handshake: 0,
        handshaking: HashMap::new(),
        pending: HashMap::new(),
        live: HashMap::new(),
        by_peer: HashMap::new(),
        held: HashSet::new(),
        queue: VecDeque::new(),
        targets: HashMap::new(),
        back_off,
        superseded: Superseded::default(),
        next_data: 0,
        estates: HashMap::new(),
    };
    driver.accept_again();
    while driver.turn() {}
    driver.stop();
}

impl Driver<'_> {
    /// One round; returns whether there is another.
    fn turn(&mut self) -> bool {
        let (is_stopping, commands) = {
            let mut state = self.shared.lock();
            (state.is_stopping, std::mem::take(&mut state.commands))
        };
        if is_stopping {
            return false;
        }
        commands.into_iter().for_each(|command| self.obey(command));
        self.expire(Instant::now());
        self.shared.waker.take(&mut self.queue);
        if self.shared.waker.take_room() {
            self.queue.extend(self.held.drain());
        }
        for _ in 0..self.queue.len() {
            let key = self.queue.pop_front();
            key.into_iter().for_each(|key| self.serve(SessionKey(key)));
        }
        for key in self.sleep() {
            match Key::of(key) {
                Key::Tcp => self.accept_tcp(),
                Key::Unix => self.accept_unix(),
                Key::Rail(at) => self.accept_rail(at),
                Key::Handshake(number) => self.shake(number),
                Key::Session(key) => self.serve(key),
                Key::Estate(key) => self.look_at_estate(key),
            }
        }
        true
    }

    /// What is ready, after a sleep.
    fn sleep(&mut self) -> Vec<u64> {
        let until = || self.timers.next().map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = if self.queue.is_empty() { until() } else { Some(Duration::ZERO) };
        self.poller.sleep(self.shared.waker.waker(), timeout).map(|found| found.key).collect()
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Connect(address) => {
                self.targets.entry(address).or_insert_with(|| Target::new(&self.back_off));
                self.timers.set(Due::Target(address), Instant::now());
            }
            Command::Forget(address) => {
                self.targets.remove(&address);
                self.timers.clear(Due::Target(address));
            }
            Command::Disconnect { peer, reason } => {
                let is_theirs = |_: &SocketAddr, target: &mut Target| target.peer.as_ref() == Some(&peer);
                let unwanted: Vec<_> = self.targets.extract_if(is_theirs).map(|(address, _)| address).collect();
                self.shared.lock().wanted.retain(|wanted| !unwanted.contains(wanted));
                unwanted.into_iter().for_each(|address| self.timers.clear(Due::Target(address)));
                if let Some(key) = self.by_peer.get(&peer).copied() {
                    self.end_session(key, TransportError::Disconnected { reason: reason.clone() }, Some(&reason));
                }
            }
            Command::Proved { session, outcome } => self.proved(session, outcome),
            Command::Linked { session, outcome } => self.linked(session, outcome),
            Command::GiveUp { session, grant, sequence, reason } => {
                let Some(control) = self.live.get(&session) else { return };
                if control.session.outbox.give_up(grant, sequence, reason) {
                    let header = FrameHeader::about(FrameKind::Cancel, None, grant.0, sequence);
                    // There are no more of these than posts.
                    let _ = control.session.queue_control(header, &[], usize::MAX);
                    self.serve(session);
                }
            }
            Command::Broken { session, reason } => {
                let word = reason.to_string();
                self.end_session(session, reason, Some(&word));
            }
        }
    }

    pub(super) fn begin_handshake(&mut self, handshake: Handshaking) {
        let number = self.next_handshake;
        self.next_handshake += 1;
        self.timers.set(Due::Handshake(number), handshake.poll_timeout());
        self.handshaking.insert(number, handshake);
        self.watch_handshake(number);
    }

    pub(super) fn watch_handshake(&mut self, number: u64) {
        let Some(handshake) = self.handshaking.get(&number) else { return };
        let key = Key::Handshake(number).get();
        if let Err(error) = self.poller.watch(key, handshake.fd(), handshake.interest())
            && let Some(handshake) = self.take_handshake(number)
        {
            let (peer, operation) = (handshake.name.clone(), "watch a connection");
            self.failed(&handshake, TransportError::Io { peer, operation, source: Arc::new(error) });
        }
    }

    pub(super) fn take_handshake(&mut self, number: u64) -> Option<Handshaking> {
        let handshake = self.handshaking.remove(&number)?;
        self.poller.forget(Key::Handshake(number).get(), handshake.fd());
        self.timers.clear(Due::Handshake(number));
        self.strangers.forget(number);
        Some(handshake)
    }

    pub(super) fn begin_pending(&mut self, pending: Pending) {
        self.timers.set(Due::Pending(pending.key()), pending.deadline);
        self.pending.insert(pending.key(), pending);
    }

    pub(super) fn take_pending(&mut self, key: PendingKey) -> Option<Pending> {
        self.timers.clear(Due::Pending(key));
        self.pending.remove(&key)
    }

    /// Does what is due.
    fn expire(&mut self, now: Instant) {
        while let Some(due) = self.timers.pop(now) {
            match due {
                Due::Accept => self.accept_again(),
                Due::Target(address) => self.dial_target(address),
                Due::Session(key) => self.serve_if_due(key, now),
                Due::Handshake(number) => {
                    if let Some(late) = self.take_handshake(number) {
                        let reason = late.late();
                        self.failed(&late, reason);
                    }
                }
                Due::Pending(key) => {
                    let Some(Pending { identity, dialled: Some(address), .. }) = self.take_pending(key) else {
                        continue;
                    };
                    let waited_ms = self.shared.config.handshake.as_millis() as u64;
                    let peer = identity.peer.to_string();
                    let reason = TransportError::Stalled { peer, operation: "opening the data lanes", waited_ms };
                    self.missed(address, Some(identity.peer), reason);
                }
            }
        }
    }

    /// An attempt to reach an address failed.
    pub(super) fn missed(&mut self, address: SocketAddr, peer: Option<PeerId>, reason: TransportError) {
        // Other lanes of the same attempt are of no use any more.
        let of_attempt = |pending: &&PendingKey| pending.0 == Some(address);
        for key in self.pending.keys().filter(of_attempt).copied().collect::<Vec<_>>() {
            self.take_pending(key);
        }
        let of_attempt = |(_, handshake): &(&u64, &Handshaking)| handshake.role.to() == Some(address);
        for number in self.handshaking.iter().filter(of_attempt).map(|(number, _)| *number).collect::<Vec<_>>() {
            self.take_handshake(number);
        }
        if !self.targets.contains_key(&address) {
            return;
        }
        self.retry(address);
        Counters::add(&self.shared.core.counters.sessions_down, 1);
        tracing::debug!(%address, %reason, "not reached");
        self.shared.core.events.push(Event::Down { peer, address: Some(PeerAddress::Tcp(address)), reason });
    }

    /// All lanes are there.
    pub(super) fn establish(&mut self, pending: Pending) {
        let Some(control) = pending.control else { return };
        if pending.dialled.is_some_and(|address| !self.targets.contains_key(&address)) {
            return; // nobody wants it any more
        }
        let peer = pending.identity.peer.clone();
        // Both dialled at once, and the other session was quicker.
        let is_needless = match pending.dialled {
            Some(address) => self.is_needless(&peer, address),
            None => self.dialled_session_with(&peer) && self.shared.peer < peer,
        };
        if is_needless {
            return pending.dialled.map_or((), |address| self.found(address, peer));
        }
        if self.superseded.contains(&peer) {
            // Replaced while its lanes were coming.
            let problem = "a later start of its engine replaced it".to_owned();
            if let Some(address) = pending.dialled {
                self.missed(address, Some(peer.clone()), TransportError::Protocol { peer: peer.to_string(), problem });
            }
            return;
        }
        self.superseded.meet(&peer);
        let others = self.live.values().map(|control| &control.session);
        let others = others.filter(|other| other.peer == peer || is_other_start(&other.peer, &peer));
        for (key, other) in others.map(|other| (other.key, other.peer.clone())).collect::<Vec<_>>() {
            let reason = match other == peer {
                true => "a newer session replaced it".to_owned(),
                false => format!("{peer} replaced it"),
            };
            self.end_session(key, TransportError::Disconnected { reason: reason.clone() }, Some(&reason));
        }
        let (shared, now) = (self.shared, Instant::now());
        let streams: Vec<_> = pending.lanes.into_iter().flatten().collect();
        let are_unix = streams.iter().all(Stream::is_unix);
        let sharing = match sharing(&peer, &pending.choice, are_unix, (&streams, shared.config.max_posts)) {
            Ok(sharing) => sharing,
            Err(reason) => return pending.dialled.map_or((), |address| self.missed(address, Some(peer), reason)),
        };
        let key = shared.core.next_session();
        let setup = SessionSetup {
            key,
            peer: peer.clone(),
            version: pending.version,
            address: pending.dialled,
            max_posts: shared.config.max_posts,
            link_bytes_per_second: shared.config.link_bytes_per_second,
            is_in_place: pending.choice.in_place && sharing.is_some(),
            sharing,
            knows_device_memory: pending.choice.device_memory,
            rdma: shared.verbs.clone().filter(|_| pending.choice.by_device && !are_unix),
            sockets: streams.iter().map(|stream| Arc::clone(stream.socket())).collect(),
            control_socket: (!control.is_tls()).then(|| Arc::clone(control.socket())),
            control_bell: Bell::new(&shared.waker, key.0),
        };
        let session = Arc::new(Session::new(setup, now));
        if let Some(target) = pending.dialled.and_then(|address| self.targets.get_mut(&address)) {
            target.reached(&peer, key, &self.back_off);
        }
        let coming =
            Coming { identity: pending.identity, choice: pending.choice, streams, are_unix, is_tls: control.is_tls() };
        let control = Control::new(Arc::clone(&session), control, now, shared.config.keepalive, coming);
        self.live.insert(key, Box::new(control));
        self.by_peer.insert(peer, key);
        match &session.rdma {
            Some(rdma) => {
                rdma.join(&session);
                self.serve(key);
            }
            None => self.link(key),
        }
    }

    /// What was heard meanwhile may have put off what was due.
    fn serve_if_due(&mut self, key: SessionKey, now: Instant) {
        let config = &self.shared.config;
        let Some(control) = self.live.get(&key) else { return };
        match control.poll_timeout(config.keepalive, config.stall) {
            at if at > now => self.timers.set(Due::Session(key), at),
            _ => self.serve(key),
        }
    }

    pub(super) fn serve(&mut self, key: SessionKey) {
        let (core, config, now) = (&self.shared.core, &self.shared.config, Instant::now());
        let Some(control) = self.live.get_mut(&key) else { return };
        let mut outcome = control.turn(core, now, config.keepalive, config.stall, config.hold);
        if std::mem::take(&mut control.has_verdicts) {
            control.session.ring_lanes(); // one may wait for that
        }
        if outcome.is_ok() {
            let watched = self.poller.watch(Key::Session(key).get(), control.fd(), control.interest());
            outcome = watched.map_err(|error| control.broken("watch the control lane", error));
        }
        if let Err(reason) = outcome {
            let word = reason.to_string();
            let goodbye = !matches!(reason, TransportError::Ended { .. });
            return self.end_session(key, reason, goodbye.then_some(&word));
        }
        self.timers.set_by(Due::Session(key), control.poll_timeout(config.keepalive, config.stall));
        if control.held_back() {
            self.held.insert(key.0);
        }
        if control.again {
            self.queue.push_back(key.0);
        }
    }

    /// Ends a session: posts and grants first, then the event.
    pub(super) fn end_session(&mut self, key: SessionKey, reason: TransportError, goodbye: Option<&str>) {
        let Some(control) = self.live.remove(&key) else { return };
        self.poller.forget(Key::Session(key).get(), control.fd());
        self.timers.clear(Due::Session(key));
        self.held.remove(&key.0);
        self.by_peer.remove(&control.session.peer);
        let session = Arc::clone(&control.session);
        let mut state = self.shared.lock();
        if state.sessions.get(&session.peer).is_some_and(|known| known.key == session.key) {
            state.sessions.remove(&session.peer);
        }
        drop(state);
        // One that was dialled and never up is told as an attempt that failed; the other side's is nobody's concern.
        let is_told = control.coming.is_none() || session.address.is_some();
        control.close(goodbye);
        let estate = session.finish(&self.shared.core, &reason);
        self.keep_estate(key, estate);
        session.ring_lanes();
        if let Some(address) = session.address.filter(|address| self.is_up(*address, key)) {
            self.retry(address);
        }
        tracing::info!(peer = %session.peer, session = session.key.0, %reason, "session down");
        Counters::add(&self.shared.core.counters.sessions_down, 1);
        if is_told {
            self.shared.core.events.push(Event::Down {
                peer: Some(session.peer.clone()),
                address: session.address.map(PeerAddress::Tcp),
                reason,
            });
        }
    }

    /// The session with a peer, if there is one or one is coming.
    pub(super) fn session_with(&self, peer: &PeerId) -> Option<&Session> {
        self.live.get(self.by_peer.get(peer)?).map(|control| &*control.session)
    }

    /// Whether the session is the one by which the address is reached.
    fn is_up(&self, address: SocketAddr, session: SessionKey) -> bool {
        self.targets.get(&address).is_some_and(|target| target.state == TargetState::Up(session))
    }

    fn stop(&mut self) {
        self.targets.clear();
        self.handshaking.clear();
        self.pending.clear();
        for key in self.live.keys().copied().collect::<Vec<_>>() {
            let reason = "shutdown".to_owned();
            self.end_session(key, TransportError::Disconnected { reason }, Some("shutdown"));
        }
        self.give_up_estates();
    }
}

/// What the two read in each other's memory. Without it payload goes over the lanes, but where it may be granted in place the peer would
/// count on it: then there is no session, until it can be.
fn sharing(
    peer: &PeerId,
    choice: &Choice,
    are_unix: bool,
    (lanes, max_posts): (&[Stream], usize),
) -> Result<Option<Sharing>, TransportError> {
    let Choice { by_descriptor, by_address, in_place, .. } = *choice;
    let Some(lane) = lanes.first().filter(|_| are_unix && (by_descriptor || by_address)) else { return Ok(None) };
    match Sharing::new(by_descriptor, by_address, in_place, lane.as_fd(), max_posts) {
        Ok(sharing) => Ok(Some(sharing)),
        Err(source) if in_place => {
            let peer = peer.to_string();
            tracing::warn!(peer, error = %source, "no memory can be shared with the peer: the session is given up");
            Err(TransportError::Io { peer, operation: "share memory", source: Arc::new(source) })
        }
        Err(error) => {
            tracing::warn!(%error, "no memory can be shared with the peer; payload goes over Unix sockets");
            Ok(None)
        }
    }
}
