//! What a node tells whoever uses it.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::error::UcxError;
use super::node::LinkId;

/// What happened.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum UcxEvent {
    /// Both sides of a link heard each other; from now on it takes posts.
    Ready {
        /// Which.
        link: LinkId,
        /// What carries it, read back from UCX: transport and device of each lane, as `rc_mlx5/mlx5_0:1.0`.
        lanes: Vec<String>,
        /// Whether a device puts by one of them. Else UCX would emulate puts, and loads are better.
        is_native: bool,
    },
    /// A peer's note. All bytes of its post are in place.
    Noted {
        /// Which link.
        link: LinkId,
        /// Its bytes; the peer proved who it is, but what it says has to be checked.
        note: Bytes,
    },
    /// A post ended; nothing of its source is read any more.
    Posted {
        /// Which link.
        link: LinkId,
        /// The number that the caller gave it.
        post: u64,
        /// `Ok`: all its bytes are in place at the peer, and the note is on its way.
        outcome: Result<(), UcxError>,
    },
    /// A link is over: its worker is destroyed, so nothing lands through it; all its posts have ended before this.
    Down {
        /// Which.
        link: LinkId,
        /// Why.
        reason: UcxError,
    },
}

/// Takes a node's events, on the node's thread: it must not wait, and must not call [`UcxNode::fence`](super::UcxNode::fence),
/// [`UcxNode::cancel`](super::UcxNode::cancel) or [`UcxNode::register`](super::UcxNode::register), which wait for that thread.
pub trait UcxSink: Send + 'static {
    /// Takes one.
    fn event(&self, event: UcxEvent);

    /// Takes a peer's load: its note, and then its bytes. They are UCX's, which waits for this.
    fn loaded(&self, link: LinkId, load: &[u8]) {
        self.event(UcxEvent::Noted { link, note: Bytes::copy_from_slice(load) });
    }

    /// Whether the node is to stop reading from peers. It asks again about each millisecond, and after
    /// [`UcxNode::wake`](super::UcxNode::wake).
    fn is_full(&self) -> bool;
}

/// A queue of events that is polled.
#[derive(Clone)]
pub struct UcxEvents {
    shared: Arc<Shared>,
}

struct Shared {
    events: Mutex<VecDeque<UcxEvent>>,
    arrived: Condvar,
    max_events: usize,
}

impl UcxEvents {
    /// A queue that holds peers back from `max_events` on.
    #[must_use]
    pub fn new(max_events: usize) -> Self {
        Self { shared: Arc::new(Shared { events: Mutex::default(), arrived: Condvar::new(), max_events }) }
    }

    /// Moves events into `events`; waits up to `timeout` if there are none.
    pub fn poll(&self, events: &mut Vec<UcxEvent>, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let mut waiting = self.lock();
        while waiting.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            waiting = self.shared.arrived.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        events.extend(waiting.drain(..));
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<UcxEvent>> {
        self.shared.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UcxSink for UcxEvents {
    fn event(&self, event: UcxEvent) {
        self.lock().push_back(event);
        self.shared.arrived.notify_all();
    }

    fn is_full(&self) -> bool {
        self.lock().len() >= self.shared.max_events
    }
}
