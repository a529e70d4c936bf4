//! A session that is there and not told yet: its RDMA path is being proved, or it has none.
//!
//! Nothing is told before that: the path that `Event::Up` reports is the one that is taken. Meanwhile nobody can post or grant; a
//! peer that is quicker may send a message already, which stays in its socket.

use std::sync::Arc;

use kvferry_protocol::wire::PeerIdentity;

use super::calls::Bell;
use super::driver::Driver;
use super::path::Choice;
use super::session::Session;
use super::stream::Stream;
use crate::api::{Event, PathKind, PeerAddress};
use crate::core::{Counters, SessionKey};

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
        self.open_ucx(&session, path.kind == PathKind::Ucx);
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
