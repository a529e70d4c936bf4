//! The queue between a transport's threads and whoever polls.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::planted::{Bug, Planted};
use crate::api::Event;

/// Events in the order in which the transport learned of them.
///
/// What comes from peers stops being read while the queue is full, by count or by bytes ([`EventQueue::is_full`]); what ends something is always
/// taken, and there can be no more of that than there are posts and sessions.
pub(crate) struct EventQueue {
    state: Mutex<State>,
    arrived: Condvar,
    max_events: usize,
    bug: Bug,
}

#[derive(Default)]
struct State {
    events: VecDeque<Event>,
    /// Peers' bytes in them.
    bytes: usize,
    /// Someone stopped reading until there is room.
    waiting_for_room: bool,
    /// The next poll is not to wait.
    interrupted: bool,
}

impl EventQueue {
    pub(crate) fn new(max_events: usize, bug: Bug) -> Self {
        Self { state: Mutex::new(State::default()), arrived: Condvar::new(), max_events, bug }
    }

    pub(crate) fn push(&self, event: Event) {
        let mut state = self.lock();
        state.bytes += peer_bytes(&event);
        state.events.push_back(event);
        drop(state);
        self.arrived.notify_all();
    }

    /// Ends the wait of who polls now, or polls next.
    pub(crate) fn interrupt(&self) {
        self.lock().interrupted = true;
        self.arrived.notify_all();
    }

    /// Whether nothing more may be read from peers. If so, [`EventQueue::poll`] says when there is room.
    pub(crate) fn is_full(&self) -> bool {
        let mut state = self.lock();
        let full = state.events.len() >= self.max_events || state.bytes >= MAX_BYTES;
        state.waiting_for_room |= full;
        full
    }

    /// How many events may be added before it is full; at least as many fit as it is not full.
    pub(crate) fn room(&self) -> usize {
        if self.is_full() { 0 } else { self.max_events.saturating_sub(self.lock().events.len()).max(1) }
    }

    pub(crate) fn limit(&self) -> usize {
        self.max_events
    }

    /// Moves all events into `into`; waits for the first one. Returns whether somebody waits for the room that is now there.
    pub(crate) fn poll(&self, into: &mut Vec<Event>, timeout: Duration) -> bool {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.lock();
        while state.events.is_empty() && !state.interrupted {
            let left = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                break;
            }
            state = match deadline {
                Some(_) => self.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
                None => self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
        state.interrupted = false;
        into.extend(state.events.drain(..));
        state.bytes = 0;
        std::mem::take(&mut state.waiting_for_room) && !self.bug.is(Planted::RoomNotTold)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of peers that wait at once; one message more may be on its way from each lane.
const MAX_BYTES: usize = 64 << 20;

fn peer_bytes(event: &Event) -> usize {
    match event {
        Event::Message { message, .. } => message.len(),
        Event::Landed { notification, .. } | Event::Lent { notification, .. } => notification.len(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use kvferry_protocol::{EngineId, Incarnation, PeerId, PpRank, TpRank};

    use super::*;

    #[test]
    fn an_interrupt_ends_one_wait_whether_it_has_begun_or_not() {
        let queue = EventQueue::new(1, Bug::default());
        let mut taken = Vec::new();
        queue.interrupt();
        queue.poll(&mut taken, Duration::MAX);
        std::thread::scope(|scope| {
            scope.spawn(|| queue.poll(&mut Vec::new(), Duration::MAX));
            queue.interrupt();
        });
        assert!(taken.is_empty() && !queue.lock().interrupted);
    }

    #[test]
    fn long_messages_fill_the_queue_before_many_do() {
        let queue = EventQueue::new(1000, Bug::default());
        let peer = PeerId {
            engine: EngineId::new("sender").unwrap(),
            incarnation: Incarnation::new(1),
            tp_rank: TpRank::new(0),
            pp_rank: PpRank::new(0),
        };
        let message = Bytes::from(vec![0; 1 << 20]);
        for _ in 0..64 {
            assert!(!queue.is_full());
            queue.push(Event::Message { peer: peer.clone(), message: message.clone() });
        }
        assert!(queue.is_full());
        let mut taken = Vec::new();
        assert!(queue.poll(&mut taken, Duration::ZERO), "somebody waits for room");
        assert_eq!(taken.len(), 64);
        assert!(!queue.is_full());
    }
}
