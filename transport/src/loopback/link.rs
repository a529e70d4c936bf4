//! A session between two endpoints of one process.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use super::endpoint::Shared;
use crate::api::{Event, PeerAddress};
use crate::core::{Counters, Outbox, SessionKey};
use crate::error::TransportError;

/// One direction's sending side, and where it leads.
pub(crate) struct End {
    pub(crate) local: Arc<Shared>,
    pub(crate) remote: Arc<Shared>,
    pub(crate) local_session: SessionKey,
    pub(crate) remote_session: SessionKey,
    pub(crate) outbox: Outbox,
    /// Messages that the remote end has not been given.
    pub(crate) messages: Mutex<VecDeque<Bytes>>,
    /// Which address the local end dialled.
    pub(crate) address: Option<PeerAddress>,
    life: Arc<Life>,
}

/// Shared by both ends of a session.
#[derive(Default)]
struct Life {
    is_over: AtomicBool,
    ends: Mutex<Vec<Arc<End>>>,
}

impl End {
    /// Makes both ends: of the dialler, then of the dialled.
    pub(crate) fn pair(dialler: &Arc<Shared>, dialled: &Arc<Shared>, address: PeerAddress) -> (Arc<Self>, Arc<Self>) {
        let life = Arc::new(Life::default());
        let sessions = (dialler.core.next_session(), dialled.core.next_session());
        let end = |local: &Arc<Shared>, remote: &Arc<Shared>, own, other, address| {
            Arc::new(Self {
                local: Arc::clone(local),
                remote: Arc::clone(remote),
                local_session: own,
                remote_session: other,
                outbox: Outbox::new(local.config.max_posts),
                messages: Mutex::default(),
                address,
                life: Arc::clone(&life),
            })
        };
        let near = end(dialler, dialled, sessions.0, sessions.1, Some(address));
        let far = end(dialled, dialler, sessions.1, sessions.0, None);
        let mut ends = life.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.extend([Arc::clone(&near), Arc::clone(&far)]);
        drop(ends);
        (near, far)
    }

    /// Ends the session on both sides; `reason` is for this one, `their_reason` for the other. The second call does nothing.
    pub(crate) fn finish(&self, reason: &TransportError, their_reason: &TransportError) {
        if self.life.is_over.swap(true, Ordering::SeqCst) {
            return;
        }
        let ends = std::mem::take(&mut *self.life.ends.lock().unwrap_or_else(PoisonError::into_inner));
        for end in ends {
            let is_ours = end.local_session == self.local_session && Arc::ptr_eq(&end.local, &self.local);
            let reason = if is_ours { reason } else { their_reason };
            end.local.forget(&end);
            end.local.core.grants.close_session(end.local_session);
            end.outbox.close(&end.local.core, reason);
            Counters::add(&end.local.core.counters.sessions_down, 1);
            end.local.core.events.push(Event::Down {
                peer: Some(end.remote.peer.clone()),
                address: end.address,
                reason: reason.clone(),
            });
            end.local.wake();
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.life.is_over.load(Ordering::SeqCst)
    }
}
