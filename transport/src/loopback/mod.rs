//! A real transport inside one process, which can be told to break what it carries.
//!
//! Each endpoint has one *mover* thread that copies what its side posts, frame by frame through the same headers, tables and
//! checks as a connection would. Lock order: an endpoint's state before that of an endpoint with a higher number; a link's
//! locks, then the core's; no state lock is held while a link ends.

mod endpoint;
mod faults;
mod link;
mod mover;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use bytes::Bytes;
use kvferry_protocol::PeerId;
use kvferry_protocol::wire::{MAX_PAYLOAD_BYTES, VERSIONS};

pub use endpoint::Loopback;
pub use faults::{FaultPlan, FaultRates};

use crate::core::Bug;
use endpoint::Shared;

/// Limits of a loopback endpoint.
#[derive(Clone, Copy, Debug)]
pub struct LoopbackConfig {
    /// The most grants at once.
    pub max_grants: usize,
    /// The most posts to one peer at once.
    pub max_posts: usize,
    /// The most events that wait to be polled before nothing more is taken from peers.
    pub max_events: usize,
    /// The most messages that wait for one peer.
    pub max_messages: usize,
    /// The most peers at once, and the most addresses.
    pub max_peers: usize,
    /// Payload bytes of one frame; brought into 64 bytes to 4 MiB.
    pub frame_bytes: u64,
    /// The newest protocol version to speak.
    pub newest_version: u16,
}

impl Default for LoopbackConfig {
    fn default() -> Self {
        Self {
            max_grants: 1 << 16,
            max_posts: 4096,
            max_events: 1 << 16,
            max_messages: 4096,
            max_peers: 64,
            frame_bytes: 256 << 10,
            newest_version: VERSIONS.max,
        }
    }
}

/// The endpoints that can reach each other.
#[derive(Clone, Default)]
pub struct LoopbackNetwork(Arc<Network>);

#[derive(Default)]
pub(crate) struct Network {
    endpoints: Mutex<HashMap<u64, Weak<Shared>>>,
    next: AtomicU64,
}

impl LoopbackNetwork {
    /// An empty network.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes an endpoint called `peer`, which introduces itself with `greeting`; what it sends suffers `faults`.
    #[must_use]
    pub fn endpoint(&self, peer: PeerId, greeting: Bytes, config: LoopbackConfig, faults: FaultPlan) -> Loopback {
        self.endpoint_with(peer, greeting, config, faults, Bug::default())
    }

    /// The same with a bug, so that a test can prove that it is seen.
    #[cfg(feature = "planted")]
    #[must_use]
    pub fn endpoint_planted(
        &self,
        peer: PeerId,
        greeting: Bytes,
        config: LoopbackConfig,
        bug: crate::Planted,
    ) -> Loopback {
        self.endpoint_with(peer, greeting, config, FaultPlan::NONE, Bug::plant(bug))
    }

    fn endpoint_with(
        &self,
        peer: PeerId,
        greeting: Bytes,
        config: LoopbackConfig,
        faults: FaultPlan,
        bug: Bug,
    ) -> Loopback {
        // A frame has some bytes, and as many as its header can say.
        let frame_bytes = config.frame_bytes.clamp(64, MAX_PAYLOAD_BYTES as u64);
        let config = LoopbackConfig { frame_bytes, ..config };
        let number = self.0.next.fetch_add(1, Ordering::Relaxed);
        let shared = Arc::new(Shared::new(Arc::clone(&self.0), number, peer, greeting, config, bug));
        self.0.lock().insert(number, Arc::downgrade(&shared));
        Loopback::start(shared, faults)
    }
}

impl Network {
    fn find(&self, number: u64) -> Option<Arc<Shared>> {
        self.lock().get(&number).and_then(Weak::upgrade)
    }

    fn remove(&self, number: u64) {
        self.lock().remove(&number);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Weak<Shared>>> {
        self.endpoints.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
