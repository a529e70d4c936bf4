//! How other threads call a thread to one of the many things that it looks after.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::wake::Waker;

/// What a thread is called to.
pub(crate) struct Calls {
    waker: Waker,
    /// Keys of bells, and whether they are in here: no more than there are bells. A bell itself would hold this, and never go.
    rung: Mutex<Vec<(u64, Arc<AtomicBool>)>>,
    to_all: AtomicBool,
    has_room: AtomicBool,
}

/// Calls a thread to one thing.
pub(crate) struct Bell {
    calls: Arc<Calls>,
    key: u64,
    is_rung: Arc<AtomicBool>,
}

impl Calls {
    pub(crate) fn new() -> io::Result<Arc<Self>> {
        let (rung, to_all, has_room) = Default::default();
        Ok(Arc::new(Self { waker: Waker::new()?, rung, to_all, has_room }))
    }

    pub(crate) fn waker(&self) -> &Waker {
        &self.waker
    }

    /// Wakes the thread; it looks at what it was called to.
    pub(crate) fn wake(&self) {
        self.waker.wake();
    }

    /// Calls it to everything.
    pub(crate) fn ring_all(&self) {
        self.to_all.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Calls it to what waits until events are polled.
    pub(crate) fn tell_room(&self) {
        self.has_room.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// For the thread: moves the keys of what it is called to into `keys`.
    pub(crate) fn take(&self, keys: &mut VecDeque<u64>) {
        let rung = std::mem::take(&mut *self.rung.lock().unwrap_or_else(PoisonError::into_inner));
        keys.extend(rung.into_iter().map(|(key, is_rung)| {
            // Before the thread looks: what comes later rings anew.
            is_rung.store(false, Ordering::SeqCst);
            key
        }));
    }

    /// For the thread: whether it is called to everything.
    pub(crate) fn take_all(&self) -> bool {
        self.to_all.swap(false, Ordering::SeqCst)
    }

    /// For the thread: whether events were polled for which something waits.
    pub(crate) fn take_room(&self) -> bool {
        self.has_room.swap(false, Ordering::SeqCst)
    }
}

impl Bell {
    pub(crate) fn new(calls: &Arc<Calls>, key: u64) -> Self {
        Self { calls: Arc::clone(calls), key, is_rung: Arc::default() }
    }

    pub(crate) fn key(&self) -> u64 {
        self.key
    }

    /// Says what the thread is called to, without waking it.
    pub(crate) fn note(&self) {
        if !self.is_rung.swap(true, Ordering::SeqCst) {
            let mut rung = self.calls.rung.lock().unwrap_or_else(PoisonError::into_inner);
            rung.push((self.key, Arc::clone(&self.is_rung)));
        }
    }

    /// Calls the thread.
    pub(crate) fn ring(&self) {
        self.note();
        self.calls.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bell_is_heard_once_for_each_look_and_goes_with_its_owner() {
        let calls = Calls::new().unwrap();
        let (one, other) = (Bell::new(&calls, 1), Bell::new(&calls, 2));
        let heard = || {
            let mut keys = VecDeque::new();
            calls.take(&mut keys);
            Vec::from(keys)
        };
        [&one, &other, &one].into_iter().for_each(Bell::ring);
        assert_eq!((heard(), heard()), (vec![1, 2], vec![]));
        one.note();
        drop((one, other));
        assert_eq!(Arc::strong_count(&calls), 1, "an unheard call keeps its thread's descriptors open");
        assert_eq!(heard(), [1]);
        calls.tell_room();
        assert_eq!((calls.take_room(), calls.take_room(), calls.take_all()), (true, false, false));
    }
}
