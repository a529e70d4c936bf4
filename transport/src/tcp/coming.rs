//! A session that is there and not told yet: its RDMA path is being proved, or its link over UCX is being made, if it has one.
//!
//! Nothing is told before that: the path that `Event::Up` reports is the one that is taken. Meanwhile nobody can post or grant; a
//! peer that is quicker may send a message already, which stays in its socket.

use std::sync::Arc;

use kvferry_protocol::wire::{FrameHeader, FrameKind, PeerIdentity};

use super::calls::Bell;
use super::driver::Driver;
use super::path::Choice;
use super::session::Session;
use super::stream::Stream;
use crate::api::{Event, PathKind, PeerAddress};
use crate::core::{Counters, SessionKey};
use crate::error::TransportError;

pub(crate) struct Coming {
    pub(crate) identity: PeerIdentity,
    pub(crate) choice: Choice,
    pub(crate) streams: Vec<Stream>,
    pub(crate) are_unix: bool,
    pub(crate) is_tls: bool,
}

impl Driver<'_> {
    /// A session's RDMA path was proved, or was not and the next is taken.
    pub(super) fn proved(&mut self, session: SessionKey, outcome: Result<(), String>) {
        let Some(control) = self.live.get_mut(&session) else { return };
        let Some(coming) = &mut control.coming else { return };
        match outcome {
            Ok(()) => control.session.take_device(),
            Err(reason) => {
                tracing::warn!(peer = %control.session.peer, reason, "RDMA is not used: its test failed");
                coming.choice.without_device(reason);
            }
        }
        self.link(session);
    }

    /// Makes a session's link over UCX, if that was chosen: tells the peer how to reach it. Else the session begins.
    pub(super) fn link(&mut self, key: SessionKey) {
        let Some(control) = self.live.get_mut(&key) else { return };
        let Some(coming) = &control.coming else { return };
        let is_chosen = coming.choice.report(coming.are_unix).kind == PathKind::Ucx;
        let Some(ucx) = self.shared.ucx.as_ref().filter(|_| is_chosen) else { return self.begin(key) };
        let session = Arc::clone(&control.session);
        let (lane, body) = match ucx.open(&session) {
            Ok(opened) => opened,
            Err(error) => {
                let _ = session.queue_control(FrameHeader::empty(FrameKind::Card), &[], usize::MAX);
                return self.linked(key, Err(error.to_string()));
            }
        };
        let header = FrameHeader::with_body(FrameKind::Card, &body);
        // Nobody can say much to a peer before its session is told.
        let _ = session.queue_control(header, &body, usize::MAX);
        let early = control.card.take().map(|card| lane.take_card(card));
        // Nobody else gives it one.
        let _ = session.ucx.set(lane);
        match early {
            Some(Err(error)) => {
                let reason = TransportError::Protocol { peer: session.name.clone(), problem: error.to_string() };
                let word = reason.to_string();
                self.end_session(key, reason, Some(&word));
            }
            _ => self.serve(key),
        }
    }

    /// A session's link over UCX is ready, or cannot be made and its lanes carry the payload.
    pub(super) fn linked(&mut self, session: SessionKey, outcome: Result<(), String>) {
        let Some(control) = self.live.get_mut(&session) else { return };
        let Some(coming) = &mut control.coming else { return };
        if let Err(reason) = outcome {
            tracing::warn!(peer = %control.session.peer, reason, "no UCX: payload goes over TCP lanes");
            coming.choice.without_ucx(reason);
        }
        self.begin(session);
    }

    /// Makes a session known, and tells it.
    pub(super) fn begin(&mut self, key: SessionKey) {
        let shared = self.shared;
        let Some(control) = self.live.get_mut(&key) else { return };
        let Some(coming) = control.coming.take() else { return };
        let Coming { identity, choice, streams, are_unix, is_tls } = *coming;
        let session = Arc::clone(&control.session);
        let path = choice.report(are_unix);
        if let Some(reason) = path.why_not_by_device() {
            session.set_not_by_device(reason);
        }
        shared.core.grants.open_session(session.key);
        let (peer, taken, not) = (session.peer.clone(), path.taken(), path.not_taken());
        let in_place = session.is_in_place;
        tracing::info!(%peer, session = session.key.0, lanes = streams.len(), tls = is_tls, path = taken, in_place, not, "session up");
        Counters::add(&shared.core.counters.sessions_up, 1);
        shared.begin(&session);
        shared.core.events.push(Event::Up {
            peer,
            session: session.key.0,
            address: session.address.map(PeerAddress::Tcp),
            version: session.version,
            greeting: identity.greeting.into(),
            path,
        });
        self.give_lanes(&session, streams);
        // What came early waits for this.
        self.serve(key);
    }

    /// Gives lanes to data threads, one after the other.
    fn give_lanes(&mut self, session: &Arc<Session>, streams: Vec<Stream>) {
        let threads: Vec<_> = self.shared.data.iter().cycle().skip(self.next_data).take(streams.len()).collect();
        self.next_data = (self.next_data + streams.len()) % self.shared.data.len();
        let bells: Vec<_> = threads.iter().map(|thread| thread.bell()).collect();
        let keys: Vec<_> = bells.iter().map(Bell::key).collect();
        session.set_lane_bells(bells);
        for (index, ((stream, thread), key)) in streams.into_iter().zip(threads).zip(keys).enumerate() {
            thread.add(key, Arc::clone(session), stream, index == 0);
        }
    }
}
