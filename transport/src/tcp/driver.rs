//! The control thread: it listens, dials, shakes hands, and begins and ends sessions.
//!
//! A session's life: `Handshaking` (control lane) -> `Pending` (data lanes are coming) -> `Control` (up) -> over.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_protocol::PeerId;
use kvferry_protocol::wire::{Dialler, FrameHeader, FrameKind, Introduction, Listener, PeerIdentity};
use rustix::event::{PollFd, PollFlags};

use super::control::Control;
use super::endpoint::{Command, Shared};
use super::handshaking::{Handshaking, Machine, Role};
use super::path::{Choice, Route};
use super::pending::Pending;
use super::rails::{self, Way};
use super::session::{Session, SessionSetup};
use super::socket;
use super::stream::Stream;
use super::target::{BackOff, Target, TargetState};
use crate::api::{Event, PeerAddress};
use crate::core::{Counters, SessionKey, Superseded, is_other_start, random};
use crate::error::TransportError;
use crate::share::Sharing;

/// How many connections are accepted before the thread looks at its peers.
const TURN_ACCEPTS: usize = 16;
/// How long to accept nothing after the system refused a descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

pub(crate) struct Driver<'a> {
    pub(super) shared: &'a Arc<Shared>,
    listeners: Listeners,
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

/// Where peers dial.
pub(crate) struct Listeners {
    pub(crate) tcp: TcpListener,
    /// For data lanes over other network cards.
    pub(crate) rails: Vec<(SocketAddr, TcpListener)>,
    /// For data lanes of peers on this host.
    pub(crate) unix: Option<UnixListener>,
}

/// What poll(2) found at the listeners.
#[derive(Clone, Copy, Default)]
struct Knocks {
    tcp: bool,
    unix: bool,
}

/// Why a round of accepting is over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AcceptEnd {
    /// Nobody waits any more.
    Drained,
    /// The system refused a descriptor.
    Starved,
    /// Others have their turn.
    More,
}

pub(crate) fn run(shared: &Arc<Shared>, listeners: Listeners) {
    let config = &shared.config;
    let back_off = BackOff { first: config.redial_first, longest: config.redial_longest, random: config.redial_seed };
    let mut driver = Driver {
        shared,
        listeners,
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
        self.accept(ready.knocks);
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
            fds.push(PollFd::from_borrowed_fd(self.listeners.tcp.as_fd(), PollFlags::IN));
            fds.extend(self.listeners.unix.as_ref().map(|unix| PollFd::from_borrowed_fd(unix.as_fd(), PollFlags::IN)));
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
            knocks: match self.accept_at {
                Some(at) => Knocks { tcp: at <= Instant::now(), unix: at <= Instant::now() },
                None => Knocks { tcp: next(), unix: self.listeners.unix.is_some() && next() },
            },
            handshaking: self.handshaking.iter().map(|_| next()).collect(),
            live: self.live.iter().map(|control| control.entry().is_some() && next()).collect(),
        }
    }

    fn accept(&mut self, knocks: Knocks) {
        if !(knocks.tcp || knocks.unix) {
            return;
        }
        self.accept_at = None;
        let mut ends = Vec::new();
        if knocks.tcp {
            ends.push(self.accept_from(|listeners| {
                let (stream, from) = listeners.tcp.accept()?;
                Ok((socket::accepted(stream)?, from.to_string()))
            }));
        }
        if knocks.unix && !ends.contains(&AcceptEnd::Starved) {
            ends.push(self.accept_from(|listeners| {
                let unix = listeners.unix.as_ref().ok_or(io::ErrorKind::WouldBlock)?;
                Ok((socket::accepted_unix(unix.accept()?.0)?, "a process of this host".to_owned()))
            }));
        }
        if ends.iter().all(|end| *end == AcceptEnd::Drained) {
            self.is_starved = false;
        }
    }

    fn accept_from(&mut self, accept: impl Fn(&Listeners) -> io::Result<(Stream, String)>) -> AcceptEnd {
        for _ in 0..TURN_ACCEPTS {
            let (stream, name) = match accept(&self.listeners) {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return AcceptEnd::Drained,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => {
                    if !std::mem::replace(&mut self.is_starved, true) {
                        tracing::warn!(%error, "connections cannot be accepted for now; raise the limit, or see who holds them");
                    }
                    self.accept_at = Some(Instant::now() + ACCEPT_PAUSE);
                    return AcceptEnd::Starved;
                }
            };
            let unproved = self.handshaking.iter().filter(|handshake| handshake.is_unproved()).count();
            let limit = self.shared.config.max_unauthenticated;
            if unproved >= 2 * limit {
                continue; // dropped: not even told that we are busy
            }
            let deadline = Instant::now() + self.shared.config.handshake;
            let versions = self.shared.config.versions;
            let listener = Listener::new(self.shared.keys(), versions, random(), deadline, unproved >= limit);
            self.handshaking.push(Handshaking::new(stream, Role::Accepted, name, Machine::Listener(listener)));
        }
        AcceptEnd::More
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
            if let Err(reason) = self.dial(address, Introduction::Peer(identity)) {
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
        PeerIdentity { peer, lanes, session, greeting, offers: self.shared.local.offers() }
    }

    fn dial(&mut self, address: SocketAddr, introduction: Introduction) -> Result<(), TransportError> {
        let stream = socket::dial(address, None, false, None).map_err(unreached(address.to_string()))?;
        self.shake_over(stream, Role::Control { to: address }, address.to_string(), introduction);
        Ok(())
    }

    /// Dials the data lanes of a session, the way that was chosen. Unix lanes that cannot be had are replaced by TCP, if that is allowed.
    pub(super) fn dial_lanes(&mut self, address: SocketAddr, pending: &mut Pending) -> Result<(), TransportError> {
        let buffer_bytes = self.shared.config.socket_buffer_bytes;
        if let Route::Unix(name) = pending.choice.route.clone() {
            let lanes = pending.lanes.iter().map(|_| socket::dial_unix(&name, buffer_bytes));
            match lanes.collect::<io::Result<Vec<_>>>() {
                Ok(streams) => return self.shake_lanes(address, pending, streams, &format!("{address}, Unix lane")),
                Err(error) => {
                    let problem =
                        format!("its rendezvous cannot be reached from here ({error}): another network namespace?");
                    let (version, offers) = (pending.version, &pending.identity.offers);
                    pending.choice = self.shared.local.without_unix(version, offers, &problem);
                }
            }
        }
        let Route::Tcp(rails) = &pending.choice.route else {
            let (peer, reasons) = (pending.identity.peer.to_string(), pending.choice.reasons());
            let problem = format!("there is no common way for payload: {reasons}; allow one more in `paths`");
            return Err(TransportError::Protocol { peer, problem });
        };
        let ours: Vec<IpAddr> = self.listeners.rails.iter().map(|(address, _)| address.ip()).collect();
        let ways = rails::spread(pending.lanes.len(), address, &ours, rails);
        for (lane, way) in (0..).zip(ways) {
            self.dial_lane(address, pending, lane, way)?;
        }
        Ok(())
    }

    /// Dials one data lane over TCP; one whose rail is closed goes over the main address.
    fn dial_lane(
        &mut self,
        address: SocketAddr,
        pending: &Pending,
        lane: u16,
        way: Way,
    ) -> Result<(), TransportError> {
        let dial = |way: Way| socket::dial(way.to, way.from, true, self.shared.config.socket_buffer_bytes);
        let (way, stream) = match dial(way) {
            Ok(stream) => (way, stream),
            Err(error) if way.is_rail => {
                rails::warn_closed(&pending.identity.peer, way, &error);
                (Way::main(address), dial(Way::main(address)).map_err(unreached(address.to_string()))?)
            }
            Err(error) => return Err(unreached(way.to.to_string())(error)),
        };
        let (session, secret) = (pending.number, pending.secret.clone());
        let role = Role::Lane { to: address, session, lane, rail: way.is_rail.then_some(way) };
        self.shake_over(stream, role, way.to.to_string(), Introduction::Lane { session, lane, secret });
        Ok(())
    }

    /// A lane's rail led nowhere: it is dialled again, over the peer's main address. `false` if nobody waits for it.
    pub(super) fn leave_rail(&mut self, role: Role, reason: &TransportError) -> bool {
        let Role::Lane { to, session, lane, rail: Some(way) } = role else { return false };
        let of_lane = |pending: &Pending| pending.dialled == Some(to) && pending.number == session;
        let Some(at) = self.pending.iter().position(of_lane) else { return false };
        let pending = self.pending.swap_remove(at);
        rails::warn_closed(&pending.identity.peer, way, reason);
        let outcome = self.dial_lane(to, &pending, lane, Way::main(to));
        self.pending.push(pending);
        outcome.is_ok()
    }

    fn shake_lanes(
        &mut self,
        address: SocketAddr,
        pending: &Pending,
        streams: Vec<Stream>,
        name: &str,
    ) -> Result<(), TransportError> {
        for (lane, stream) in (0..).zip(streams) {
            let (session, secret) = (pending.number, pending.secret.clone());
            let role = Role::Lane { to: address, session, lane, rail: None };
            self.shake_over(stream, role, name.to_owned(), Introduction::Lane { session, lane, secret });
        }
        Ok(())
    }

    fn shake_over(&mut self, stream: Stream, role: Role, name: String, introduction: Introduction) {
        let config = &self.shared.config;
        // A rail that swallows everything leaves time for another way.
        let patience = if role.is_rail() { config.handshake / 2 } else { config.handshake };
        let deadline = Instant::now() + patience;
        let dialler = Dialler::new(self.shared.keys().own().clone(), config.versions, introduction, random(), deadline);
        self.handshaking.push(Handshaking::new(stream, role, name, Machine::Dialler(dialler)));
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
        self.handshaking.retain(|handshake| handshake.role.to() != Some(address));
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
        let are_unix = sockets.iter().all(|socket| socket.is_unix());
        let path = pending.choice.report(are_unix);
        let sharing = sharing(&pending.choice, are_unix, &sockets, shared.config.max_posts);
        let key = shared.core.next_session();
        let setup = SessionSetup {
            key,
            peer: peer.clone(),
            version: pending.version,
            address: pending.dialled,
            max_posts: shared.config.max_posts,
            link_bytes_per_second: shared.config.link_bytes_per_second,
            sharing,
            verbs: shared.verbs.clone().filter(|_| pending.choice.by_device && !are_unix),
            sockets: sockets.clone(),
        };
        let session = Arc::new(Session::new(setup, now));
        self.open_ucx(&session, pending.choice.by_ucx && !are_unix);
        shared.core.grants.open_session(key);
        if let Some(target) = self.targets.iter_mut().find(|target| Some(target.address) == pending.dialled) {
            target.reached(&peer, key, &self.back_off);
        }
        let not = pending.choice.reasons();
        tracing::info!(%peer, session = key.0, lanes = sockets.len(), path = %path.kind, %not, "session up");
        Counters::add(&shared.core.counters.sessions_up, 1);
        shared.begin(&session);
        shared.core.events.push(Event::Up {
            peer,
            session: key.0,
            address: pending.dialled.map(PeerAddress::Tcp),
            version: pending.version,
            greeting: pending.identity.greeting.into(),
            path,
        });
        for (index, socket) in sockets.into_iter().enumerate() {
            shared.data[self.next_data % shared.data.len()].add(Arc::clone(&session), socket, index == 0);
            self.next_data += 1;
        }
        self.live.push(Control::new(session, control, now, shared.config.keepalive));
    }

    /// Begins to make a session's link over UCX, if it was chosen: tells the peer how to reach it.
    fn open_ucx(&self, session: &Arc<Session>, is_chosen: bool) {
        let Some(ucx) = self.shared.ucx.as_ref().filter(|_| is_chosen) else { return };
        match ucx.open(session) {
            Ok((lane, body)) => {
                // The session is new: nobody else gives it one, and its control lane is empty.
                let _ = session.ucx.set(lane);
                let header = FrameHeader::with_body(FrameKind::Card, &body);
                let _ = session.queue_control(header, &body, usize::MAX);
            }
            Err(error) => {
                tracing::warn!(peer = session.name, %error, "no UCX: payload goes over TCP lanes");
                let _ = session.queue_control(FrameHeader::empty(FrameKind::Card), &[], usize::MAX);
            }
        }
    }

    fn serve(&mut self, index: usize, is_ready: bool) {
        let (core, config, now) = (&self.shared.core, &self.shared.config, Instant::now());
        let control = &mut self.live[index];
        let is_due = control.poll_timeout(config.stall) <= now;
        if !(is_ready || is_due || control.again || control.held_back() || control.session.has_control()) {
            return;
        }
        let outcome = control.turn(core, now, config.keepalive, config.stall);
        if std::mem::take(&mut control.has_verdicts) {
            self.shared.wake_data();
        }
        if let Err(reason) = outcome {
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

/// What the two read in each other's memory. Without it payload goes over the lanes.
fn sharing(choice: &Choice, are_unix: bool, sockets: &[Arc<Stream>], max_posts: usize) -> Option<Sharing> {
    let (by_descriptor, by_address) = (choice.by_descriptor, choice.by_address);
    let socket = sockets.first().filter(|_| are_unix && (by_descriptor || by_address))?;
    match Sharing::new(by_descriptor, by_address, socket.as_fd(), max_posts) {
        Ok(sharing) => Some(sharing),
        Err(error) => {
            tracing::warn!(%error, "no memory can be shared with the peer; payload goes over Unix sockets");
            None
        }
    }
}

fn unreached(peer: String) -> impl FnOnce(io::Error) -> TransportError {
    move |source| TransportError::Io { peer, operation: "connect", source: Arc::new(source) }
}

/// What poll(2) found.
struct Ready {
    knocks: Knocks,
    handshaking: Vec<bool>,
    live: Vec<bool>,
}
