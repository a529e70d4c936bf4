//! What all transports share: regions, windows, grants, posts, events, counters.
//!
//! Lock order: a session's outbox, then a post's source; the grant table, then a grant's guard, then its progress or what it collects in place. The event
//! queue is taken last, under any of them, and takes none.

mod adopting;
mod counters;
mod cut;
mod events;
mod grants;
mod inbound;
mod outbox;
mod planted;
mod post;
mod progress;
mod regions;
mod runs;
mod seals;
mod superseded;
mod window;
mod written;

pub(crate) use adopting::adopt;
pub(crate) use counters::Counters;
pub(crate) use cut::FrameCut;
pub(crate) use events::EventQueue;
pub(crate) use grants::{Carrier, GrantTable, SessionKey};
pub(crate) use inbound::Inbound;
pub(crate) use outbox::{Busy, Outbox, Recall, not_by_processors};
pub(crate) use planted::Bug;
#[cfg_attr(not(feature = "planted"), expect(unreachable_pub, reason = "exported with the feature `planted` only"))]
pub use planted::Planted;
pub(crate) use post::Post;
pub(crate) use regions::{Entry, RegionTable};
pub(crate) use runs::RunList;
pub(crate) use seals::{Seals, SealsSeen};
pub(crate) use superseded::{Superseded, is_other_start};
pub(crate) use written::Written;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvferry_protocol::pages::Pages;
use kvferry_protocol::{PeerId, RegionId};

use adopting::Adopting;
use grants::Target;
use window::AnyWindow;

use crate::api::{GrantKey, Memory, MemoryKind, PostId, TransportStats};
use crate::error::TransportError;
use crate::share::LetGo;
use crate::watch::Landing;

/// One endpoint's part that does not depend on how bytes travel.
pub(crate) struct Core {
    pub(crate) regions: RegionTable,
    pub(crate) grants: GrantTable,
    pub(crate) events: EventQueue,
    pub(crate) counters: Counters,
    pub(crate) bug: Bug,
    next_post: AtomicU64,
    next_session: AtomicU64,
}

impl Core {
    pub(crate) fn new(max_grants: usize, max_events: usize, bug: Bug) -> Self {
        Self {
            regions: RegionTable::new(),
            grants: GrantTable::new(max_grants, bug),
            events: EventQueue::new(max_events, bug),
            counters: Counters::default(),
            bug,
            next_post: AtomicU64::new(1),
            next_session: AtomicU64::new(1),
        }
    }

    pub(crate) fn register(&self, memory: Memory) -> Result<RegionId, TransportError> {
        self.regions.add(memory)
    }

    /// Takes memory that RDMA devices have registered, of whichever kind.
    pub(crate) fn register_beside_devices(&self, memory: Memory) -> Result<RegionId, TransportError> {
        match memory.kind {
            MemoryKind::Host => self.regions.add(memory),
            MemoryKind::Device(_) => self.regions.add_of_device(memory),
        }
    }

    /// `by_devices` says whether the peer's devices can write here: no processor writes pages of a device.
    pub(crate) fn grant(
        &self,
        peer: &PeerId,
        session: SessionKey,
        pages: &Pages,
        watch: Option<Arc<dyn Landing>>,
        by_devices: impl FnOnce() -> Result<(), TransportError>,
    ) -> Result<GrantKey, TransportError> {
        let target = match self.regions.window(pages, "a granted page")? {
            AnyWindow::Host(window) => Target::Pages(window),
            AnyWindow::Device(window) => {
                by_devices()?;
                if watch.is_some() {
                    let problem = "it cannot be watched; grant it without".to_owned();
                    return Err(TransportError::DeviceMemory { what: "a granted page", problem });
                }
                Target::Device { bytes: window.bytes(), flushes: self.regions.flushes(pages) }
            }
        };
        self.grants.add(peer, session, target, watch)
    }

    /// A grant of which nothing is placed: its bytes stay where they are.
    pub(crate) fn grant_in_place(
        &self,
        peer: &PeerId,
        session: SessionKey,
        bytes: u64,
    ) -> Result<GrantKey, TransportError> {
        self.grants.add(peer, session, Target::InPlace(Adopting::new(bytes)), None)
    }

    pub(crate) fn next_post(&self) -> PostId {
        PostId(self.next_post.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn next_session(&self) -> SessionKey {
        SessionKey(self.next_session.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn stats(&self) -> TransportStats {
        self.counters.snapshot(self.grants.live())
    }
}

/// A session in which writes may be handed over in place, as their receiver.
pub(crate) trait SessionInPlace: LetGo + 'static {
    /// What tells the peer that its memory is read here.
    fn tether(&self) -> Option<Arc<OwnedFd>>;
    /// A write is about to be given out.
    fn hold(&self, grant: GrantKey, sequence: u32);
    /// Who hears that it was let go. It does not keep the session.
    fn let_go(self: Arc<Self>) -> Arc<dyn LetGo>;
}

/// Fills an array with bytes that nobody can guess.
pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // Without randomness no grant is safe from guessing, and no operating system that we run on fails here.
    getrandom::fill(&mut bytes).expect("the operating system has randomness");
    bytes
}
