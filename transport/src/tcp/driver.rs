//! The control thread: it listens, dials, shakes hands, and begins and ends sessions.
//!
//! A session's life: `Handshaking` (control lane) -> `Pending` (data lanes are coming) -> `Control` (up) -> over.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_protocol::PeerId;
use kvferry_protocol::wire::{Dialler, Introduction, LaneSecret, Listener, PeerIdentity};
use rustix::event::{PollFd, PollFlags};

use super::control::Control;
use super::endpoint::{Command, Shared};
use super::handshaking::{Handshaking, Machine, Role};
use super::pending::Pending;
use super::session::{Session, SessionSetup};
use super::socket;
use super::target::{BackOff, Target, TargetState};
use crate::api::{Event, PeerAddress};
use crate::core::{Counters, SessionKey, Superseded, is_other_start, random};
use crate::error::TransportError;

/// How many connections are accepted before the thread looks at its peers.
const TURN_ACCEPTS: usize = 16;
/// How long to accept nothing after the system refused a descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

pub(crate) struct Driver<'a> {
    pub(super) shared: &'a Arc<Shared>,
    listener: TcpListener,
    accept_at: Option<Instant>,
    /// Somebody was told that connections cannot be accepted, and some still wait.
    is_starved: bool,
    pub(super) handshaking: Vec<Handshaking>,
    pub(super) pending: Vec<Pending>,
    pub(super) live: Vec<Control>,
    pub(super) targets: Vec<Target>,
    pub(super) back_off: BackOff,
    pub(super) superseded: Superseded,
    next_data: usize,
}

pub(crate) fn run(shared: &Arc<Shared>, listener: TcpListener) {
    let config = &shared.config;
    let back_off = BackOff { first: config.redial_first, longest: config.redial_longest, random: config.redial_seed };
    let mut driver = Driver {
        shared,
        listener,
        accept_at: None,
        is_starved: false,
        handshaking: Vec::new(),
        pending: Vec::new(),
        live: Vec::new(),
        targets: Vec::new(),
        back_off,
        superseded: Superseded::default(),
        next_data: 0,
    };
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
        for command in commands {
            self.obey(command);
        }
        self.dial_targets(Instant::now());
        self.expire(Instant::now());
        let ready = self.sleep();
        if ready.accept {
            self.accept();
        }
        // Back to front: a handshake or a session that is over makes room for the last one.
        for index in (0..ready.handshaking.len()).rev() {
            if ready.handshaking[index] {
                self.shake(index);
            }
        }
        for index in (0..ready.live.len().min(self.live.len())).rev() {
            self.serve(index, ready.live[index]);
        }
        true
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Connect(address) => self.targets.push(Target::new(address, Instant::now(), &self.back_off)),
            Command::Disconnect { peer, reason } => {
                let mut state = self.shared.lock();
                self.targets.retain(|target| {
                    let is_kept = target.peer.as_ref() != Some(&peer);
                    if !is_kept {
                        state.wanted.retain(|wanted| *wanted != target.address);
                    }
                    is_kept
                });
                drop(state);
                if let Some(index) = self.live.iter().position(|control| control.session.peer == peer) {
                    self.end_session(index, TransportError::Disconnected { reason: reason.clone() }, Some(&reason));
                }
            }
            Command::Broken { session, reason } => {
                if let Some(index) = self.live.iter().position(|control| control.session.key == session) {
                    let word = reason.to_string();
                    self.end_session(index, reason, Some(&word));
                }
            }
        }
    }

    fn sleep(&self) -> Ready {
        let now = Instant::now();
        let mut until: Option<Instant> = self.accept_at;
        let mut sooner = |at: Instant| until = Some(until.map_or(at, |until| until.min(at)));
        let mut fds = vec![self.shared.waker.entry()];
        if self.accept_at.is_none() {
            fds.push(PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN));
        }
        for handshake in &self.handshaking {
            sooner(handshake.poll_timeout());
            fds.push(handshake.entry());
        }
        for pending in &self.pending {
            sooner(pending.deadline);
        }
        for target in &self.targets {
            if let TargetState::Waiting(at) = target.state {
                sooner(at);
            }
        }
        for control in &self.live {
            sooner(if control.again { now } else { control.poll_timeout(self.shared.config.stall) });
            fds.extend(control.entry());
        }
        self.shared.waker.sleep(&mut fds, until.map(|until| until.saturating_duration_since(now)));
        let mut ready = fds.iter().skip(1).map(|fd| !fd.revents().is_empty());
        let mut next = || ready.next().unwrap_or(false);
        Ready {
            accept: match self.accept_at {
                Some(at) => at <= Instant::now(),
                None => next(),
            },
            handshaking: self.handshaking.iter().map(|_| next()).collect(),
            live: self.live.iter().map(|control| control.entry().is_some() && next()).collect(),
        }
    }

    fn accept(&mut self) {
        self.accept_at = None;
        for _ in 0..TURN_ACCEPTS {
            let accepted = self.listener.accept().and_then(|(stream, from)| Ok((socket::accepted(stream)?, from)));
            let (stream, address) = match accepted {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.is_starved = false;
                    return;
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => {
                    if !std::mem::replace(&mut self.is_starved, true) {
                        tracing::warn!(%error, "connections cannot be accepted for now; raise the limit, or see who holds them");
                    }
                    self.accept_at = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            };
            let unproved = self.handshaking.iter().filter(|handshake| handshake.is_unproved()).count();
            let limit = self.shared.config.max_unauthenticated;
            if unproved >= 2 * limit {
                continue; // dropped: not even told that we are busy
            }
            let deadline = Instant::now() + self.shared.config.handshake;
            let (key, versions) = (self.shared.key.clone(), self.shared.config.versions);
            let listener = Listener::new(key, versions, random(), deadline, unproved >= limit);
            self.handshaking.push(Handshaking::new(stream, Role::Accepted, address, Machine::Listener(listener)));
        }
    }

    fn dial_targets(&mut self, now: Instant) {
        for index in 0..self.targets.len() {
            let target = &mut self.targets[index];
            if !matches!(target.state, TargetState::Waiting(at) if at <= now) {
                continue;
            }
            let peer = target.peer.clone();
            if peer.is_some_and(|peer| self.live.iter().any(|control| control.session.peer == peer)) {
                // It dialled us meanwhile; that session is as good.
                target.retry(now, &mut self.back_off);
                continue;
            }
            target.state = TargetState::Dialling;
            let address = target.address;
            let lanes = self.lanes_to(address);
            let identity = self.introduce(lanes, 0);
            if let Err(reason) = self.dial(address, Role::Control, Introduction::Peer(identity)) {
                self.missed(address, None, reason);
            }
        }
    }

    pub(super) fn lanes_to(&self, address: SocketAddr) -> u16 {
        let config = &self.shared.config;
        let is_same_host = address.ip().is_loopback() || address.ip() == self.shared.address.ip();
        if is_same_host { config.lanes_same_host } else { config.lanes_remote }
    }

    pub(super) fn introduce(&self, lanes: u16, session: u64) -> PeerIdentity {
        let (peer, greeting) = (self.shared.peer.clone(), self.shared.greeting.to_vec());
        PeerIdentity { peer, lanes, session, greeting }
    }

    pub(super) fn dial(
        &mut self,
        address: SocketAddr,
        role: Role,
        introduction: Introduction,
    ) -> Result<(), TransportError> {
        let config = &self.shared.config;
        let is_data = matches!(role, Role::Lane { .. });
        let stream = socket::dial(address, is_data, config.socket_buffer_bytes);
        let stream = stream.map_err(|source| TransportError::Io {
            peer: address.to_string(),
            operation: "connect",
            source: Arc::new(source),
        })?;
        let deadline = Instant::now() + config.handshake;
        let dialler = Dialler::new(self.shared.key.clone(), config.versions, introduction, random(), deadline);
        self.handshaking.push(Handshaking::new(stream, role, address, Machine::Dialler(dialler)));
        Ok(())
    }

    pub(super) fn dial_lanes(
        &mut self,
        address: SocketAddr,
        number: u64,
        lanes: u16,
        secret: &LaneSecret,
    ) -> Result<(), TransportError> {
        for lane in 0..lanes {
            let introduction = Introduction::Lane { session: number, lane, secret: secret.clone() };
            self.dial(address, Role::Lane { session: number, lane }, introduction)?;
        }
        Ok(())
    }

    fn expire(&mut self, now: Instant) {
        // One failure may take others out of the list.
        while let Some(index) = self.handshaking.iter().position(|handshake| handshake.poll_timeout() <= now) {
            let late = self.handshaking.swap_remove(index);
            let reason = late.late();
            self.failed(&late, reason);
        }
        let is_late = |pending: &mut Pending| pending.deadline <= now;
        let late: Vec<_> = self.pending.extract_if(.., is_late).collect();
        for pending in late {
            if let Some(address) = pending.dialled {
                let waited_ms = self.shared.config.handshake.as_millis() as u64;
                let peer = pending.identity.peer.to_string();
                let reason = TransportError::Stalled { peer, operation: "opening the data lanes", waited_ms };
                self.missed(address, Some(pending.identity.peer), reason);
            }
        }
    }

    /// An attempt to reach an address failed.
    pub(super) fn missed(&mut self, address: SocketAddr, peer: Option<PeerId>, reason: TransportError) {
        // Other lanes of the same attempt are of no use any more.
        self.pending.retain(|pending| pending.dialled != Some(address));
        self.handshaking.retain(|handshake| handshake.role == Role::Accepted || handshake.address != address);
        let Some(target) = self.targets.iter_mut().find(|target| target.address == address) else { return };
        target.retry(Instant::now(), &mut self.back_off);
        Counters::add(&self.shared.core.counters.sessions_down, 1);
        tracing::debug!(%address, %reason, "not reached");
        self.shared.core.events.push(Event::Down { peer, address: Some(PeerAddress::Tcp(address)), reason });
    }

    /// All lanes are there.
    pub(super) fn establish(&mut self, pending: Pending) {
        let Some(control) = pending.control else { return };
        if pending.dialled.is_some_and(|address| self.targets.iter().all(|target| target.address != address)) {
            return; // nobody wants it any more
        }
        let peer = pending.identity.peer.clone();
        // Both dialled at once, and the other session was quicker.
        let is_needless = match pending.dialled {
            Some(_) => self.is_needless(&peer),
            None => self.dialled_session_with(&peer) && self.shared.peer < peer,
        };
        if is_needless {
            return pending.dialled.map_or((), |address| self.wait_with(address));
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
        for index in (0..self.live.len()).rev() {
            let other = self.live[index].session.peer.clone();
            if other == peer {
                let reason = "a newer session replaced it";
                self.end_session(index, TransportError::Disconnected { reason: reason.to_owned() }, Some(reason));
            } else if is_other_start(&other, &peer) {
                let reason = format!("{peer} replaced it");
                self.end_session(index, TransportError::Disconnected { reason: reason.clone() }, Some(&reason));
            }
        }
        let (shared, now) = (self.shared, Instant::now());
        let sockets: Vec<_> = pending.lanes.into_iter().flatten().map(Arc::new).collect();
        let key = shared.core.next_session();
        let setup = SessionSetup {
            key,
            peer: peer.clone(),
            version: pending.version,
            address: pending.dialled,
            max_posts: shared.config.max_posts,
            link_bytes_per_second: shared.config.link_bytes_per_second,
            sockets: sockets.clone(),
        };
        let session = Arc::new(Session::new(setup, now));
        shared.core.grants.open_session(key);
        if let Some(target) = self.targets.iter_mut().find(|target| Some(target.address) == pending.dialled) {
            target.reached(&peer, key, &self.back_off);
        }
        tracing::info!(%peer, session = key.0, lanes = sockets.len(), "session up");
        Counters::add(&shared.core.counters.sessions_up, 1);
        shared.lock().sessions.insert(peer.clone(), Arc::clone(&session));
        shared.core.events.push(Event::Up {
            peer,
            session: key.0,
            address: pending.dialled.map(PeerAddress::Tcp),
            version: pending.version,
            greeting: pending.identity.greeting.into(),
        });
        for socket in sockets {
            shared.data[self.next_data % shared.data.len()].add(Arc::clone(&session), socket);
            self.next_data += 1;
        }
        self.live.push(Control::new(session, control, now, shared.config.keepalive));
    }

    fn serve(&mut self, index: usize, is_ready: bool) {
        let (core, config, now) = (&self.shared.core, &self.shared.config, Instant::now());
        let control = &mut self.live[index];
        let is_due = control.poll_timeout(config.stall) <= now;
        if !(is_ready || is_due || control.again || control.held_back() || control.session.has_control()) {
            return;
        }
        if let Err(reason) = control.turn(core, now, config.keepalive, config.stall) {
            let word = reason.to_string();
            let goodbye = !matches!(reason, TransportError::Ended { .. });
            self.end_session(index, reason, goodbye.then_some(&word));
        }
    }

    /// Ends a session: posts and grants first, then the event.
    pub(super) fn end_session(&mut self, index: usize, reason: TransportError, goodbye: Option<&str>) {
        let control = self.live.swap_remove(index);
        let session = Arc::clone(&control.session);
        let mut state = self.shared.lock();
        if state.sessions.get(&session.peer).is_some_and(|known| known.key == session.key) {
            state.sessions.remove(&session.peer);
        }
        drop(state);
        control.close(goodbye);
        session.finish(&self.shared.core, &reason);
        self.shared.wake_data();
        self.lost(session.key);
        tracing::info!(peer = %session.peer, session = session.key.0, %reason, "session down");
        Counters::add(&self.shared.core.counters.sessions_down, 1);
        self.shared.core.events.push(Event::Down {
            peer: Some(session.peer.clone()),
            address: session.address.map(PeerAddress::Tcp),
            reason,
        });
    }

    fn lost(&mut self, session: SessionKey) {
        if let Some(target) = self.targets.iter_mut().find(|target| target.state == TargetState::Up(session)) {
            target.retry(Instant::now(), &mut self.back_off);
        }
    }

    fn stop(&mut self) {
        self.targets.clear();
        self.handshaking.clear();
        self.pending.clear();
        while !self.live.is_empty() {
            let reason = "shutdown".to_owned();
            self.end_session(self.live.len() - 1, TransportError::Disconnected { reason }, Some("shutdown"));
        }
    }
}

/// What poll(2) found.
struct Ready {
    accept: bool,
    handshaking: Vec<bool>,
    live: Vec<bool>,
}
