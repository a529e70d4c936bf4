//! What becomes of handshakes: the part of the control thread that says yes or no.

use std::net::SocketAddr;
use std::time::Instant;

use kvferry_protocol::PeerId;
use kvferry_protocol::wire::{Declined, Established, Identity, LaneIdentity, PeerIdentity, Verdict};

use super::driver::Driver;
use super::handshaking::{Decided, Handshaking, Outcome, Role};
use super::pending::Pending;
use super::socket;
use super::stream::Stream;
use crate::api::PathKind;
use crate::core::{Counters, random};
use crate::error::TransportError;

impl Driver<'_> {
    /// Lets a handshake go on; takes it out of the list if that was its end.
    pub(super) fn shake(&mut self, index: usize) {
        // An earlier failure may have taken several out of the list.
        let Some(handshake) = self.handshaking.get_mut(index) else { return };
        match handshake.turn() {
            None => {}
            Some(Outcome::Said(identity)) => {
                self.judge(index, identity);
                self.shake(index); // sends the verdict; it cannot come here again
            }
            Some(Outcome::Failed(reason)) => {
                let handshake = self.handshaking.swap_remove(index);
                self.failed(&handshake, reason);
            }
            Some(Outcome::Needless) => {
                let handshake = self.handshaking.swap_remove(index);
                if let Some(to) = handshake.role.to() {
                    self.wait_with(to);
                }
            }
            Some(Outcome::Judged) => {
                let handshake = self.handshaking.swap_remove(index);
                self.judged(handshake);
            }
            Some(Outcome::Dialled(established)) => {
                let handshake = self.handshaking.swap_remove(index);
                self.dialled(handshake, established);
            }
        }
    }

    pub(super) fn failed(&mut self, handshake: &Handshaking, reason: TransportError) {
        match handshake.role {
            Role::Accepted => {
                Counters::add(&self.shared.core.counters.refused_peers, 1);
                tracing::warn!(peer = handshake.name, %reason, "a peer was refused");
            }
            role @ Role::Lane { rail: Some(_), .. } if self.leave_rail(role, &reason) => {}
            Role::Control { to } | Role::Lane { to, .. } => self.missed(to, None, reason),
        }
    }

    fn judge(&mut self, index: usize, identity: Identity) {
        let (verdict, decided) = match identity {
            Identity::Peer(peer) => self.judge_peer(index, peer),
            Identity::Lane(lane) => self.judge_lane(index, &lane),
        }
        .unwrap_or_else(|why| (Verdict::Declined(why), Decided::Declined));
        let handshake = &mut self.handshaking[index];
        handshake.judge(&verdict);
        handshake.decided = Some(decided);
    }

    fn judge_peer(&mut self, index: usize, identity: PeerIdentity) -> Result<(Verdict, Decided), Declined> {
        let (us, them) = (&self.shared.peer, &identity.peer);
        if us == them {
            return Err(Declined::Itself);
        }
        if self.superseded.contains(them) {
            return Err(Declined::Superseded);
        }
        if self.dialled_session_with(them) && us < them {
            return Err(Declined::Duplicate);
        }
        let known = self.live.iter().any(|control| control.session.peer == *them);
        if !known && self.live.len() + self.pending.len() >= self.shared.config.max_peers {
            return Err(Declined::Full);
        }
        let handshake = &mut self.handshaking[index];
        let (version, secret) =
            handshake.listener().and_then(|listener| listener.session()).ok_or(Declined::Stopping)?;
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

    fn judge_lane(&mut self, index: usize, lane: &LaneIdentity) -> Result<(Verdict, Decided), Declined> {
        let of_session = |pending: &&mut Pending| pending.number == lane.session && pending.dialled.is_none();
        let pending = self.pending.iter_mut().find(of_session).ok_or(Declined::UnknownSession)?;
        let listener = self.handshaking[index].listener();
        let is_bound = listener.is_some_and(|listener| listener.binds(lane, &pending.secret));
        let is_unfit = !self.handshaking[index].stream.is_unix() && !self.shared.local.allows(PathKind::Tcp);
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
                self.pending.push(*pending);
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
                if self.is_needless(&peer) {
                    return self.wait_with(address);
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
                        self.pending.push(pending);
                        Ok(())
                    });
                if let Err(reason) = outcome {
                    self.missed(address, Some(peer), reason);
                }
            }
            (Role::Lane { to, session, lane, .. }, Verdict::Lane) => self.bind(Some(to), session, lane, handshake.stream),
            (role, _) => {
                let problem = format!("its verdict does not fit {role:?}");
                let reason = TransportError::Protocol { peer: handshake.name, problem };
                if let Some(to) = role.to() {
                    self.missed(to, None, reason);
                }
            }
        }
    }

    /// The listener repeats how many lanes we announced.
    fn lanes_asked(&self, address: SocketAddr, identity: &PeerIdentity) -> Option<u16> {
        (identity.lanes == self.lanes_to(address)).then_some(identity.lanes)
    }

    /// Whether there is a session with the peer that is to be kept instead of a new one that we dialled.
    pub(super) fn is_needless(&self, peer: &PeerId) -> bool {
        let known = self.live.iter().any(|control| control.session.peer == *peer);
        // Both dialled at once: the session that the smaller one dialled stays.
        known && (self.dialled_session_with(peer) || self.shared.peer > *peer)
    }

    pub(super) fn dialled_session_with(&self, peer: &PeerId) -> bool {
        self.live.iter().any(|control| control.session.peer == *peer && control.session.address.is_some())
    }

    /// Looks again later whether the session that the peer dialled is still there.
    pub(super) fn wait_with(&mut self, address: SocketAddr) {
        let target = self.targets.iter_mut().find(|target| target.address == address);
        if let Some(target) = target {
            target.retry(Instant::now(), &mut self.back_off);
        }
    }

    fn bind(&mut self, dialled: Option<SocketAddr>, number: u64, lane: u16, stream: Stream) {
        let of_session = |pending: &Pending| pending.number == number && pending.dialled == dialled;
        let Some(at) = self.pending.iter().position(of_session) else { return };
        if self.pending[at].bind(lane, stream) {
            let pending = self.pending.swap_remove(at);
            self.establish(pending);
        }
    }
}
