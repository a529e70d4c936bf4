//! The queue between a transport's threads and whoever polls.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::api::Event;

/// Events in the order in which the transport learned of them.
///
/// What comes from peers stops being read while the queue is full ([`EventQueue::is_full`]); what ends something is always
/// taken, and there can be no more of that than there are posts and sessions.
pub(crate) struct EventQueue {
    state: Mutex<State>,
    arrived: Condvar,
    max_events: usize,
}

#[derive(Default)]
struct State {
    events: VecDeque<Event>,
    /// Someone stopped reading until there is room.
    waiting_for_room: bool,
}

impl EventQueue {
    pub(crate) fn new(max_events: usize) -> Self {
        Self { state: Mutex::new(State::default()), arrived: Condvar::new(), max_events }
    }

    pub(crate) fn push(&self, event: Event) {
        self.lock().events.push_back(event);
        self.arrived.notify_all();
    }

    /// Whether nothing more may be read from peers. If so, [`EventQueue::poll`] says when there is room.
    pub(crate) fn is_full(&self) -> bool {
        let mut state = self.lock();
        let full = state.events.len() >= self.max_events;
        state.waiting_for_room |= full;
        full
    }

    pub(crate) fn limit(&self) -> usize {
        self.max_events
    }

    /// Moves all events into `into`; waits for the first one. Returns whether somebody waits for the room that is now there.
    pub(crate) fn poll(&self, into: &mut Vec<Event>, timeout: Duration) -> bool {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.lock();
        while state.events.is_empty() {
            let left = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                break;
            }
            state = match deadline {
                Some(_) => self.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
                None => self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
        into.extend(state.events.drain(..));
        std::mem::take(&mut state.waiting_for_room)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
