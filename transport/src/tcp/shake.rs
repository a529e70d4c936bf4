//! What becomes of handshakes: the part of the control thread that says yes or no.

use std::net::SocketAddr;
use std::time::Instant;

use kvferry_protocol::PeerId;
use kvferry_protocol::wire::{Declined, Established, Identity, LaneIdentity, PeerIdentity, Verdict};

use super::driver::Driver;
use super::handshaking::{Decided, Handshaking, Outcome, Role};
use super::pending::Pending;
use super::socket;
use super::strangers::Source;
use super::stream::Stream;
use crate::api::{Event, PathKind, PeerAddress};
use crate::core::{Counters, random};
use crate::error::TransportError;

impl Driver<'_> {
    /// Lets a handshake go on; takes it out of the list if that was its end.
    pub(super) fn shake(&mut self, number: u64) {
        // An earlier failure may have taken several out of the list.
        let Some(handshake) = self.handshaking.get_mut(&number) else { return };
        let outcome = handshake.turn();
        if !handshake.is_unproved() {
            self.strangers.forget(number);
        }
        let Some(outcome) = outcome else { return self.watch_handshake(number) };
        if let Outcome::Said(identity) = outcome {
            self.judge(number, identity);
            return self.shake(number); // sends the verdict; it cannot come here again
        }
        let Some(handshake) = self.take_handshake(number) else { return };
        match outcome {
            Outcome::Said(_) => {}
            Outcome::Failed(reason) => self.failed(&handshake, reason),
            Outcome::Needless => {
                if let Some(to) = handshake.role.to() {
                    self.retry(to);
                }
            }
            Outcome::Judged => self.judged(handshake),
            Outcome::Dialled(established) => self.dialled(handshake, established),
        }
    }

    pub(super) fn failed(&mut self, handshake: &Handshaking, reason: TransportError) {
        match handshake.role {
            Role::Accepted => {
                Counters::add(&self.shared.core.counters.refused_peers, 1);
                let from = handshake.name.parse::<SocketAddr>().map_or(Source::Host, |from| Source::of(from.ip()));
                match self.refusals.note(from, Instant::now()) {
                    Some(times) => tracing::warn!(peer = handshake.name, %reason, times, "a peer was refused"),
                    None => tracing::debug!(peer = handshake.name, %reason, "a peer was refused"),
                }
            }
            role @ Role::Lane { rail: Some(_), .. } if self.leave_rail(role, &reason) => {}
            Role::Control { to } | Role::Lane { to, .. } => self.missed(to, None, reason),
        }
    }

    fn judge(&mut self, number: u64, identity: Identity) {
        let (verdict, decided) = match identity {
            Identity::Peer(peer) => self.judge_peer(number, peer),
            Identity::Lane(lane) => self.judge_lane(number, &lane),
        }
        .unwrap_or_else(|why| (Verdict::Declined(why), Decided::Declined));
        if let Some(handshake) = self.handshaking.get_mut(&number) {
            handshake.judge(&verdict);
            handshake.decided = Some(decided);
        }
    }

    fn judge_peer(&mut self, handshake: u64, identity: PeerIdentity) -> Result<(Verdict, Decided), Declined> {
        let (us, them) = (&self.shared.peer, &identity.peer);
        if us == them {
            return Err(Declined::Itself);
        }
        if self.handshaking.get(&handshake).is_some_and(|handshake| !handshake.stream.names(&them.engine)) {
            return Err(Declined::Unnamed);
        }
        if self.superseded.contains(them) {
            return Err(Declined::Superseded);
        }
        if self.dialled_session_with(them) && us < them {
            // It learns whom it found, and that this is no session.
            return Ok((Verdict::Peer(self.introduce(identity.lanes, NO_SESSION)), Decided::Declined));
        }
        if !self.is_known(them) && self.live.len() + self.pending.len() >= self.shared.config.max_peers {
            return Err(Declined::Full);
        }
        let listener = self.handshaking.get_mut(&handshake).and_then(|handshake| handshake.listener());
        let (version, secret) = listener.and_then(|listener| listener.session()).ok_or(Declined::Stopping)?;
        let number = u64::from_le_bytes(random()).max(1);
        let pending = Pending {
            number,
            dialled: None,
            control: None,
            version,
            secret,
            lanes: (0..identity.lanes).map(|_| None).collect(),
            choice: self.shared.local.choose(version, &identity.offers),
            deadline: Instant::now() + self.shared.config.handshake,
            identity,
        };
        let verdict = Verdict::Peer(self.introduce(pending.identity.lanes, number));
        Ok((verdict, Decided::Session(Box::new(pending))))
    }

    fn judge_lane(&mut self, handshake: u64, lane: &LaneIdentity) -> Result<(Verdict, Decided), Declined> {
        let handshake = self.handshaking.get_mut(&handshake).ok_or(Declined::Stopping)?;
        let pending = self.pending.get(&(None, lane.session)).ok_or(Declined::UnknownSession)?;
        let is_bound = handshake.listener().is_some_and(|listener| listener.binds(lane, &pending.secret));
        if !handshake.stream.names(&pending.identity.peer.engine) {
            return Err(Declined::Unnamed);
        }
        let is_unfit = !handshake.stream.is_unix() && !self.shared.local.allows(PathKind::Tcp);
        if !is_bound || is_unfit || !pending.awaits(lane.lane) {
            return Err(Declined::UnknownSession);
        }
        Ok((Verdict::Lane, Decided::Lane { session: lane.session, lane: lane.lane }))
    }

    /// A verdict was sent.
    fn judged(&mut self, handshake: Handshaking) {
        match handshake.decided {
            Some(Decided::Session(mut pending)) => {
                pending.control = Some(handshake.stream);
                self.begin_pending(*pending);
            }
            Some(Decided::Lane { session, lane }) => {
                // Without the right buffers it is slower, no more.
                let _ = socket::size_accepted(&handshake.stream, self.shared.config.socket_buffer_bytes);
                self.bind(None, session, lane, handshake.stream);
            }
            Some(Decided::Declined) | None => tracing::debug!(peer = handshake.name, "declined"),
        }
    }

    fn dialled(&mut self, handshake: Handshaking, established: Established) {
        match (handshake.role, established.verdict) {
            (Role::Control { to: address }, Verdict::Peer(identity)) => {
                let peer = identity.peer.clone();
                if !handshake.stream.names(&peer.engine) {
                    return self.missed(address, None, unnamed(address.to_string(), &peer));
                }
                if identity.session == NO_SESSION || self.is_needless(&peer, address) {
                    return self.found(address, peer);
                }
                let (number, lanes) = (identity.session, self.lanes_asked(address, &identity));
                let mut pending = Pending {
                    number,
                    dialled: Some(address),
                    control: Some(handshake.stream),
                    choice: self.shared.local.choose(established.version, &identity.offers),
                    identity,
                    version: established.version,
                    secret: established.lane_secret,
                    lanes: Vec::new(),
                    deadline: Instant::now() + self.shared.config.handshake,
                };
                let outcome = match lanes {
                    Some(_) if self.superseded.contains(&peer) => Err("it was replaced by a later start of its engine"),
                    Some(lanes) => Ok(lanes),
                    None => Err("it wants another number of data lanes"),
                };
                let outcome = outcome
                    .map_err(|problem| TransportError::Protocol { peer: peer.to_string(), problem: problem.to_owned() })
                    .and_then(|lanes| {
                        pending.lanes = (0..lanes).map(|_| None).collect();
                        self.dial_lanes(address, &mut pending)?;
                        self.begin_pending(pending);
                        Ok(())
                    });
                if let Err(reason) = outcome {
                    self.missed(address, Some(peer), reason);
                }
            }
            (Role::Lane { to, session, .. }, Verdict::Lane) if !self.is_lane_of(session, to, &handshake.stream) => {
                let problem = "the certificate of a data lane does not name the session's engine".to_owned();
                self.missed(to, None, TransportError::Authentication { peer: handshake.name, problem });
            }
            (Role::Lane { to, session, lane, .. }, Verdict::Lane) => {
                self.bind(Some(to), session, lane, handshake.stream)
            }
            (role, _) => {
                let problem = format!("its verdict does not fit {role:?}");
                let reason = TransportError::Protocol { peer: handshake.name, problem };
                if let Some(to) = role.to() {
                    self.missed(to, None, reason);
                }
            }
        }
    }

    /// Whether a lane that we dialled ends at the engine that the session is with, as far as its certificate tells.
    fn is_lane_of(&self, number: u64, to: SocketAddr, stream: &Stream) -> bool {
        let pending = self.pending.get(&(Some(to), number));
        pending.is_none_or(|pending| stream.names(&pending.identity.peer.engine))
    }

    /// The listener repeats how many lanes we announced.
    fn lanes_asked(&self, address: SocketAddr, identity: &PeerIdentity) -> Option<u16> {
        (identity.lanes == self.lanes_to(address)).then_some(identity.lanes)
    }

    /// There is a session with who is at an address, or its end is not known here yet.
    pub(super) fn found(&mut self, address: SocketAddr, peer: PeerId) {
        if self.is_known(&peer) {
            if let Some(target) = self.targets.get_mut(&address) {
                target.peer = Some(peer.clone());
            }
            self.shared.core.events.push(Event::Found { peer, address: PeerAddress::Tcp(address) });
        }
        self.retry(address);
    }

    /// Whether there is a session with the peer that is to be kept instead of a new one that we dialled at an address.
    pub(super) fn is_needless(&self, peer: &PeerId, address: SocketAddr) -> bool {
        let dialled_at = self.targets.get(&address).and_then(|target| target.dialled_at);
        self.session_with(peer).is_some_and(|session| {
            // Both dialled at once: the session that the smaller one dialled stays. One that was there before stays, too: transfers are
            // under way in it. It is looked at again later whether it is still there.
            let is_older = dialled_at.is_none_or(|at| session.born() < at);
            session.address.is_some() || self.shared.peer > *peer || is_older
        })
    }

    fn is_known(&self, peer: &PeerId) -> bool {
        self.session_with(peer).is_some()
    }

    pub(super) fn dialled_session_with(&self, peer: &PeerId) -> bool {
        self.session_with(peer).is_some_and(|session| session.address.is_some())
    }

    fn bind(&mut self, dialled: Option<SocketAddr>, number: u64, lane: u16, stream: Stream) {
        let Some(pending) = self.pending.get_mut(&(dialled, number)) else { return };
        if pending.bind(lane, stream)
            && let Some(pending) = self.take_pending((dialled, number))
        {
            self.establish(pending);
        }
    }
}

/// The number by which a listener says that the session that there is stays.
const NO_SESSION: u64 = 0;

fn unnamed(address: String, peer: &PeerId) -> TransportError {
    let problem = format!("its certificate does not name the engine {}, and `names` asks for that", peer.engine);
    TransportError::Authentication { peer: address, problem }
}
