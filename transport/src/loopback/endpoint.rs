//! An endpoint of a loopback network.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvferry_protocol::pages::{Extent, Pages};
use kvferry_protocol::wire::{MAX_MESSAGE_BYTES, MAX_NOTIFICATION_BYTES};
use kvferry_protocol::{PeerId, RegionId};

use super::link::End;
use super::mover;
use super::{FaultPlan, LoopbackConfig, Network};
use crate::api::{
    Capabilities, Event, GrantKey, Memory, PeerAddress, PostError, PostId, Transport, TransportStats, Write,
};
use crate::core::{Bug, Core, Post, Superseded, is_other_start, not_by_processors};
use crate::credentials::Credentials;
use crate::error::TransportError;
use crate::watch::{Landing, Leaving};

/// The most extents of one post.
const MAX_EXTENTS: usize = 1 << 16;

/// An endpoint of a [`LoopbackNetwork`](super::LoopbackNetwork). Dropping it shuts it down.
pub struct Loopback {
    pub(super) shared: Arc<Shared>,
    mover: Mutex<Option<JoinHandle<()>>>,
}

/// What an endpoint's callers, its mover and its peers' movers share.
pub(crate) struct Shared {
    pub(crate) network: Arc<Network>,
    pub(crate) number: u64,
    pub(crate) peer: PeerId,
    pub(crate) greeting: Bytes,
    pub(crate) config: LoopbackConfig,
    pub(crate) core: Core,
    pub(crate) state: Mutex<State>,
    woken: Condvar,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) is_stopping: bool,
    pub(crate) targets: Vec<Target>,
    pub(crate) ends: HashMap<PeerId, Arc<End>>,
    pub(crate) superseded: Superseded,
    /// Something happened since the mover last looked.
    pub(crate) is_woken: bool,
}

/// An address that is to be reached, and kept reached.
pub(crate) struct Target {
    pub(crate) address: PeerAddress,
    pub(crate) peer: Option<PeerId>,
    pub(crate) try_at: Instant,
    pub(crate) back_off: Duration,
}

impl Shared {
    pub(crate) fn new(
        network: Arc<Network>,
        number: u64,
        peer: PeerId,
        greeting: Bytes,
        config: LoopbackConfig,
        bug: Bug,
    ) -> Self {
        let core = Core::new(config.max_grants, config.max_events, bug);
        Self { network, number, peer, greeting, config, core, state: Mutex::default(), woken: Condvar::new() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn wake(&self) {
        self.lock().is_woken = true;
        self.woken.notify_all();
    }

    /// Waits for the next thing to do.
    pub(crate) fn wait<'a>(&self, state: MutexGuard<'a, State>, until: Option<Instant>) -> MutexGuard<'a, State> {
        match until.map(|until| until.saturating_duration_since(Instant::now())) {
            Some(left) => self.woken.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            None => self.woken.wait(state).unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// Takes a session that ended out of the table.
    pub(crate) fn forget(&self, end: &Arc<End>) {
        let mut state = self.lock();
        let peer = &end.remote.peer;
        if state.ends.get(peer).is_some_and(|known| Arc::ptr_eq(known, end)) {
            state.ends.remove(peer);
        }
    }

    /// Ends the sessions with other starts of this peer's engine, of which nothing is accepted from now on; unless the peer is
    /// itself one that was replaced.
    pub(crate) fn supersede(&self, peer: &PeerId) {
        let old: Vec<_> = {
            let mut state = self.lock();
            if state.superseded.contains(peer) {
                return;
            }
            state.superseded.meet(peer);
            state.ends.values().filter(|end| is_other_start(&end.remote.peer, peer)).cloned().collect()
        };
        for end in old {
            let reason = format!("{peer} replaced it");
            let theirs = TransportError::Ended { peer: self.peer.to_string(), reason: reason.clone() };
            end.finish(&TransportError::Disconnected { reason }, &theirs);
        }
    }

    fn end(&self, peer: &PeerId) -> Result<Arc<End>, TransportError> {
        let end = self.lock().ends.get(peer).cloned();
        end.ok_or_else(|| TransportError::NotConnected { peer: peer.to_string() })
    }

    fn try_post(
        &self,
        peer: &PeerId,
        write: &Write,
        watch: Option<Arc<dyn Leaving>>,
    ) -> Result<PostId, TransportError> {
        let end = self.end(peer)?;
        let id = self.core.next_post();
        let post = Post::new(id, write, &self.core.regions, MAX_EXTENTS, MAX_NOTIFICATION_BYTES)?;
        end.outbox.add(&self.core, &peer.to_string(), post.watched(watch))?;
        self.wake();
        Ok(id)
    }
}

impl Loopback {
    pub(crate) fn start(shared: Arc<Shared>, faults: FaultPlan) -> Self {
        let of_mover = Arc::clone(&shared);
        let mover = std::thread::Builder::new().name(format!("loopback-{}", shared.number));
        // A thread is refused only when the process is out of them, and then nothing else would work either.
        let mover = mover.spawn(move || mover::run(&of_mover, faults)).expect("a thread for the mover");
        Self { shared, mover: Mutex::new(Some(mover)) }
    }

    fn finish(&self, peer: &PeerId, reason: &str) {
        if let Ok(end) = self.shared.end(peer) {
            let reason = reason.to_owned();
            let theirs = TransportError::Ended { peer: self.shared.peer.to_string(), reason: reason.clone() };
            end.finish(&TransportError::Disconnected { reason }, &theirs);
        }
    }
}

impl Transport for Loopback {
    fn name(&self) -> &'static str {
        "loopback"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_message_bytes: MAX_MESSAGE_BYTES,
            max_notification_bytes: MAX_NOTIFICATION_BYTES,
            max_extents: MAX_EXTENTS,
        }
    }

    fn local_address(&self) -> PeerAddress {
        PeerAddress::Loopback(self.shared.number)
    }

    #[expect(unsafe_code, reason = "the caller vouches for raw memory")]
    unsafe fn register(&self, memory: Memory) -> Result<RegionId, TransportError> {
        self.shared.core.register(memory)
    }

    fn connect(&self, address: &PeerAddress) -> Result<(), TransportError> {
        let mut state = self.shared.lock();
        if state.targets.iter().any(|target| target.address == *address) {
            return Ok(());
        }
        let limit = self.shared.config.max_peers;
        if state.targets.len() >= limit {
            let found = state.targets.len() as u64 + 1;
            return Err(TransportError::Limit { what: "addresses to reach", found, limit: limit as u64 });
        }
        state.targets.push(Target {
            address: *address,
            peer: None,
            try_at: Instant::now(),
            back_off: mover::FIRST_BACK_OFF,
        });
        drop(state);
        self.shared.wake();
        Ok(())
    }

    fn forget(&self, address: &PeerAddress) {
        self.shared.lock().targets.retain(|target| target.address != *address);
    }

    fn disconnect(&self, peer: &PeerId, reason: &str) {
        self.shared.lock().targets.retain(|target| target.peer.as_ref() != Some(peer));
        self.finish(peer, reason);
    }

    fn send(&self, peer: &PeerId, message: Bytes) -> Result<(), TransportError> {
        let limit = |what, found: usize, limit: usize| {
            let (found, limit) = (found as u64, limit as u64);
            if found <= limit { Ok(()) } else { Err(TransportError::Limit { what, found, limit }) }
        };
        limit("bytes of a message", message.len(), MAX_MESSAGE_BYTES)?;
        let end = self.shared.end(peer)?;
        let mut messages = end.messages.lock().unwrap_or_else(PoisonError::into_inner);
        limit("messages to one peer", messages.len() + 1, self.shared.config.max_messages)?;
        messages.push_back(message);
        drop(messages);
        self.shared.wake();
        Ok(())
    }

    fn grant(&self, peer: &PeerId, pages: Pages) -> Result<GrantKey, TransportError> {
        let end = self.shared.end(peer)?;
        self.shared.core.grant(peer, end.local_session, &pages, None, || Err(not_by_processors("a granted page")))
    }

    fn grant_watched(&self, peer: &PeerId, pages: Pages, watch: Arc<dyn Landing>) -> Result<GrantKey, TransportError> {
        let end = self.shared.end(peer)?;
        self.shared
            .core
            .grant(peer, end.local_session, &pages, Some(watch), || Err(not_by_processors("a granted page")))
    }

    fn revoke(&self, grant: GrantKey) {
        self.shared.core.grants.revoke(grant);
    }

    fn seal(&self, grant: GrantKey, extents: &[Extent]) {
        self.shared.core.grants.seal(grant, extents);
    }

    fn post(&self, peer: &PeerId, write: Write) -> Result<PostId, Box<PostError>> {
        self.shared.try_post(peer, &write, None).map_err(|reason| Box::new(PostError { write, reason }))
    }

    fn watches(&self, _: &PeerId) -> bool {
        true
    }

    fn post_watched(&self, peer: &PeerId, write: Write, watch: Arc<dyn Leaving>) -> Result<PostId, Box<PostError>> {
        self.shared.try_post(peer, &write, Some(watch)).map_err(|reason| Box::new(PostError { write, reason }))
    }

    fn cancel(&self, peer: &PeerId, grant: GrantKey) {
        let Ok(end) = self.shared.end(peer) else { return };
        for sequence in end.outbox.cancel(&self.shared.core, grant) {
            let theirs = end.remote.core.grants.find(grant.0, end.remote_session);
            let is_complete = theirs.is_some_and(|theirs| theirs.cancel(sequence));
            let outcome = if is_complete { Ok(()) } else { Err(TransportError::Cancelled) };
            end.outbox.finish(&self.shared.core, grant, sequence, outcome);
        }
    }

    fn direct_run_bytes(&self, _: &PeerId) -> u64 {
        256
    }

    fn interrupt(&self) {
        self.shared.core.events.interrupt();
    }

    fn poll(&self, events: &mut Vec<Event>, timeout: Duration) {
        if self.shared.core.events.poll(events, timeout) {
            let peers: Vec<_> = self.shared.lock().ends.values().map(|end| Arc::clone(&end.remote)).collect();
            for peer in peers {
                peer.wake();
            }
        }
    }

    fn set_credentials(&self, _: Credentials) {}

    fn stats(&self) -> TransportStats {
        self.shared.core.stats()
    }

    fn shutdown(&self) {
        self.shared.network.remove(self.shared.number);
        let peers: Vec<_> = {
            let mut state = self.shared.lock();
            state.is_stopping = true;
            state.targets.clear();
            state.ends.keys().cloned().collect()
        };
        for peer in peers {
            self.finish(&peer, "shutdown");
        }
        self.shared.wake();
        let mover = self.mover.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mover) = mover {
            // A mover that panicked has said so; there is nothing left to wait for.
            let _ = mover.join();
        }
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.shutdown();
    }
}
