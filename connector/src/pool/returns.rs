//! What comes back to a pool from any thread.
//!
//! The one thing of a pool that threads share. `tests/loom.rs` compiles this very file with loom's primitives and tries every order.

use super::sync::{AtomicBool, Mutex, Ordering, PoisonError};

/// What came back without the pool at hand; the pool takes it in at its next call.
///
/// Its length is bounded by the guards that exist. `pending` spares the lock when there are none.
pub(super) struct Returns<T> {
    pending: AtomicBool,
    queue: Mutex<Vec<T>>,
}

impl<T> Default for Returns<T> {
    fn default() -> Self {
        Self { pending: AtomicBool::new(false), queue: Mutex::default() }
    }
}

impl<T> Returns<T> {
    pub(super) fn push(&self, returned: T) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.push(returned);
        self.pending.store(true, Ordering::Release);
    }

    pub(super) fn take(&self) -> Vec<T> {
        if !self.pending.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        self.pending.store(false, Ordering::Release);
        std::mem::take(&mut queue)
    }
}
