//! The threads that attention may use.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::KernelError;

/// How many threads a call may use; those beyond the caller's own stay warm between calls. Made once, shared by reference.
#[derive(Debug)]
pub struct Threads {
    count: usize,
    /// The caller works too, so it has one thread less than `count`.
    helpers: Option<rayon::ThreadPool>,
    min_shared_work: usize,
}

/// Below this many multiply-adds a call is done before a second thread has woken up.
const MIN_SHARED_WORK: usize = 1 << 20; // about 50 us; benches/attention.rs

impl Threads {
    /// The caller's thread only.
    #[must_use]
    pub const fn single() -> Self {
        Self { count: 1, helpers: None, min_shared_work: MIN_SHARED_WORK }
    }

    /// `count` threads, the caller's among them; 0 counts as 1.
    ///
    /// # Errors
    /// [`KernelError::Threads`] if the system refuses to start them.
    pub fn new(count: usize) -> Result<Self, KernelError> {
        if count <= 1 {
            return Ok(Self::single());
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(count - 1)
            .thread_name(|index| format!("kvferry-attn-{index}"))
            .build()
            .map_err(|error| KernelError::Threads { threads: count, reason: error.to_string() })?;
        Ok(Self { count, helpers: Some(pool), min_shared_work: MIN_SHARED_WORK })
    }

    /// Sets how many multiply-adds a call must have to be shared; smaller ones stay on the caller's thread.
    #[must_use]
    pub fn min_shared_work(self, multiply_adds: usize) -> Self {
        Self { min_shared_work: multiply_adds, ..self }
    }

    /// How many threads there are, the caller's among them.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.count
    }

    /// How many threads a call of this many multiply-adds uses.
    pub(super) fn count_for(&self, multiply_adds: usize) -> usize {
        if multiply_adds < self.min_shared_work { 1 } else { self.count }
    }

    /// Calls `work(i)` once for each `i` in `0..items`, on `count` threads at most, and returns when all are done.
    pub(super) fn for_each(&self, count: usize, items: usize, work: impl Fn(usize) + Sync) {
        let next = AtomicUsize::new(0);
        let drain = || {
            loop {
                // Relaxed: only the number matters; what the items wrote is published by the end of the scope.
                let item = next.fetch_add(1, Ordering::Relaxed);
                if item >= items {
                    break;
                }
                work(item);
            }
        };
        let helpers = count.min(items).saturating_sub(1);
        match &self.helpers {
            Some(pool) if helpers > 0 => pool.in_place_scope(|scope| {
                for _ in 0..helpers {
                    scope.spawn(|_| drain());
                }
                drain();
            }),
            _ => drain(),
        }
    }
}
