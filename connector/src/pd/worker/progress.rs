//! What the model thread may ask of a load that is still landing: which layers are verified, and whether it ended.
//!
//! The driver thread writes, the model thread waits. One lock, held for a map look-up only.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use kvferry_kernels::device::Event;

use crate::contract::RequestId;

/// The shared board of all loads.
#[derive(Debug, Default)]
pub(super) struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    loads: BTreeMap<RequestId, LoadProgress>,
    /// Nothing will land any more.
    closed: bool,
}

#[derive(Debug)]
struct LoadProgress {
    /// Indexed by this worker's own layers: all wanted tokens of the layer are verified.
    verified: Vec<bool>,
    /// The same: what must be passed before the layer is in a device's pages.
    on_its_way: Vec<Vec<Arc<dyn Event>>>,
    ended: Option<Ended>,
}

/// How a load ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ended {
    /// All layers are verified.
    Loaded,
    /// Not all; nothing is written any more.
    Failed,
}

impl Progress {
    /// A load begins.
    pub(super) fn begin(&self, request: &RequestId, layers: usize) {
        let (verified, on_its_way) = (vec![false; layers], vec![Vec::new(); layers]);
        self.lock().loads.insert(request.clone(), LoadProgress { verified, on_its_way, ended: None });
    }

    /// Part of some of its layers is on its way to a device's pages, and there once the event is passed.
    pub(super) fn on_its_way(&self, request: &RequestId, layers: Range<u16>, event: &Arc<dyn Event>) {
        if let Some(load) = self.lock().loads.get_mut(request) {
            let layers = usize::from(layers.start)..usize::from(layers.end);
            load.on_its_way.get_mut(layers).into_iter().flatten().for_each(|events| events.push(Arc::clone(event)));
        }
    }

    /// What must be passed before a layer that is ready may be read.
    pub(super) fn events(&self, request: &RequestId, layer: usize) -> Vec<Arc<dyn Event>> {
        let state = self.lock();
        state.loads.get(request).and_then(|load| load.on_its_way.get(layer)).cloned().unwrap_or_default()
    }

    /// One layer of it is verified for all wanted tokens.
    pub(super) fn verified(&self, request: &RequestId, layer: usize) {
        if let Some(done) = self.lock().loads.get_mut(request).and_then(|load| load.verified.get_mut(layer)) {
            *done = true;
        }
        self.changed.notify_all();
    }

    /// It ended.
    pub(super) fn ended(&self, request: &RequestId, how: Ended) {
        if let Some(load) = self.lock().loads.get_mut(request) {
            load.ended = Some(how);
            // All that was on its way is there.
            load.on_its_way.clear();
        }
        self.changed.notify_all();
    }

    /// Nobody asks about it any more.
    pub(super) fn forget(&self, request: &RequestId) {
        self.lock().loads.remove(request);
    }

    /// Nothing will land any more: loads that have not ended count as failed.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Whether nothing will land any more.
    pub(super) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Loads that nobody will end any more, each once: the driver is gone, whatever took it.
    pub(super) fn abandoned(&self) -> Vec<RequestId> {
        let mut state = self.lock();
        if !state.closed {
            return Vec::new();
        }
        let open = state.loads.iter_mut().filter(|(_, load)| load.ended.is_none());
        open.map(|(request, load)| {
            load.ended = Some(Ended::Failed);
            request.clone()
        })
        .collect()
    }

    /// Waits for one layer of one load. Returns whether the layer may be read, and how long the wait was.
    pub(super) fn wait(&self, request: &RequestId, layer: usize) -> (bool, Duration) {
        let began = Instant::now();
        let mut state = self.lock();
        loop {
            // A request without a load has nothing to wait for.
            let Some(load) = state.loads.get(request) else { return (true, began.elapsed()) };
            let ready = load.verified.get(layer).copied().unwrap_or(true);
            match load.ended {
                _ if ready => return (true, began.elapsed()),
                Some(Ended::Loaded) => return (true, began.elapsed()),
                Some(Ended::Failed) => return (false, began.elapsed()),
                // The driver ends every load by its deadline, so this wait has one.
                None if state.closed => return (false, began.elapsed()),
                None => state = self.changed.wait(state).expect("no panic happens under this lock"),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic happens under this lock")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_layer_is_ready_when_it_is_verified_or_the_load_is_complete() {
        let (board, id) = (Progress::default(), RequestId::new("a"));
        assert!(board.wait(&id, 0).0, "no load, nothing to wait for");
        board.begin(&id, 2);
        board.verified(&id, 1);
        assert!(board.wait(&id, 1).0);
        board.ended(&id, Ended::Failed);
        assert_eq!((board.wait(&id, 0).0, board.wait(&id, 1).0), (false, true));
        board.ended(&id, Ended::Loaded);
        assert!(board.wait(&id, 0).0);
        board.forget(&id);
        assert!(board.wait(&id, 0).0);
    }

    #[test]
    fn loads_that_a_driver_left_behind_fail_once() {
        let (board, ids) = (Progress::default(), ["a", "b"].map(RequestId::new));
        ids.iter().for_each(|id| board.begin(id, 1));
        board.ended(&ids[0], Ended::Loaded);
        assert!(board.abandoned().is_empty(), "the driver lives");
        board.close();
        assert_eq!(board.abandoned(), [ids[1].clone()]);
        assert!(board.abandoned().is_empty());
        assert!(!board.wait(&ids[1], 0).0 && board.wait(&ids[0], 0).0);
    }

    #[test]
    fn a_waiting_thread_is_woken_by_its_layer() {
        let (board, id) = (Arc::new(Progress::default()), RequestId::new("a"));
        board.begin(&id, 1);
        let waiter = std::thread::spawn({
            let (board, id) = (Arc::clone(&board), id.clone());
            move || board.wait(&id, 0).0
        });
        board.verified(&id, 0);
        assert!(waiter.join().unwrap());
    }
}
