//! Whom we dial: the control lane of a new session, and then its data lanes, the way that was chosen.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use kvferry_protocol::wire::{Introduction, PeerIdentity};

use super::driver::{Driver, Due};
use super::handshaking::{Handshaking, Opening, Role};
use super::path::Route;
use super::pending::Pending;
use super::rails::{self, Way};
use super::socket;
use super::stream::Stream;
use super::target::TargetState;
use crate::error::TransportError;

impl Driver<'_> {
    pub(super) fn dial_target(&mut self, address: SocketAddr) {
        let waiting = self.targets.get_mut(&address).filter(|target| target.state == TargetState::Waiting);
        let Some(target) = waiting else { return };
        if let Some(peer) = target.peer.as_ref().filter(|peer| self.by_peer.contains_key(*peer)).cloned() {
            // It dialled us meanwhile; that session is as good.
            return self.found(address, peer);
        }
        (target.state, target.dialled_at) = (TargetState::Dialling, Some(Instant::now()));
        let lanes = self.lanes_to(address);
        let identity = self.introduce(lanes, 0);
        if let Err(reason) = self.dial(address, Introduction::Peer(identity)) {
            self.missed(address, None, reason);
        }
    }

    /// Dials the address again after a while, if somebody wants that.
    pub(super) fn retry(&mut self, address: SocketAddr) {
        let Some(target) = self.targets.get_mut(&address) else { return };
        let at = target.retry(Instant::now(), &mut self.back_off);
        self.timers.set(Due::Target(address), at);
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
        self.shake_over(stream, Role::Control { to: address }, address.to_string(), introduction)
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
    fn dial_lane(&mut self, address: SocketAddr, pending: &Pending, lane: u16, way: Way) -> Result<(), TransportError> {
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
        self.shake_over(stream, role, way.to.to_string(), Introduction::Lane { session, lane, secret })
    }

    /// A lane's rail led nowhere: it is dialled again, over the peer's main address. `false` if nobody waits for it.
    pub(super) fn leave_rail(&mut self, role: Role, reason: &TransportError) -> bool {
        let Role::Lane { to, session, lane, rail: Some(way) } = role else { return false };
        let key = (Some(to), session);
        let Some(pending) = self.pending.remove(&key) else { return false };
        rails::warn_closed(&pending.identity.peer, way, reason);
        let outcome = self.dial_lane(to, &pending, lane, Way::main(to));
        self.pending.insert(key, pending);
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
            self.shake_over(stream, role, name.to_owned(), Introduction::Lane { session, lane, secret })?;
        }
        Ok(())
    }

    fn shake_over(
        &mut self,
        stream: Stream,
        role: Role,
        name: String,
        introduction: Introduction,
    ) -> Result<(), TransportError> {
        let config = &self.shared.config;
        // A rail that swallows everything leaves time for another way.
        let patience = if role.is_rail() { config.handshake / 2 } else { config.handshake };
        let deadline = Instant::now() + patience;
        let opening = Opening::Dialler { versions: config.versions, introduction };
        self.begin_handshake(Handshaking::new(stream, role, name, opening, self.shared.credentials(), deadline)?);
        Ok(())
    }
}

fn unreached(peer: String) -> impl FnOnce(io::Error) -> TransportError {
    move |source| TransportError::Io { peer, operation: "connect", source: Arc::new(source) }
}
