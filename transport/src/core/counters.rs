//! Counters of one endpoint.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::api::TransportStats;

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) sent_bytes: AtomicU64,
    pub(crate) lent_bytes: AtomicU64,
    pub(crate) ucx_bytes: AtomicU64,
    pub(crate) landed_bytes: AtomicU64,
    pub(crate) dropped_bytes: AtomicU64,
    pub(crate) refused_writes: AtomicU64,
    pub(crate) sessions_up: AtomicU64,
    pub(crate) sessions_down: AtomicU64,
    pub(crate) refused_peers: AtomicU64,
    pub(crate) posts_live: AtomicU64,
    pub(crate) handed_bytes: AtomicU64,
    pub(crate) adopted_bytes: AtomicU64,
    pub(crate) held_bytes: AtomicU64,
    pub(crate) recalled_writes: AtomicU64,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64, more: u64) {
        counter.fetch_add(more, Ordering::Relaxed);
    }

    /// Adds to a gauge, unless it gets over a limit then; returns what it would have been.
    pub(crate) fn reserve(gauge: &AtomicU64, more: u64, limit: u64) -> Result<(), u64> {
        let grown = |now: u64| now.checked_add(more).filter(|sum| *sum <= limit);
        let reserved = gauge.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grown);
        reserved.map(drop).map_err(|now| now.saturating_add(more))
    }

    /// Takes back what was reserved.
    pub(crate) fn give_back(gauge: &AtomicU64, less: u64) {
        gauge.fetch_sub(less, Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self, grants_live: u64) -> TransportStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TransportStats {
            sent_bytes: read(&self.sent_bytes),
            lent_bytes: read(&self.lent_bytes),
            ucx_bytes: read(&self.ucx_bytes),
            landed_bytes: read(&self.landed_bytes),
            dropped_bytes: read(&self.dropped_bytes),
            refused_writes: read(&self.refused_writes),
            sessions_up: read(&self.sessions_up),
            sessions_down: read(&self.sessions_down),
            refused_peers: read(&self.refused_peers),
            grants_live,
            posts_live: read(&self.posts_live),
            handed_bytes: read(&self.handed_bytes),
            adopted_bytes: read(&self.adopted_bytes),
            held_bytes: read(&self.held_bytes),
            recalled_writes: read(&self.recalled_writes),
        }
    }
}
