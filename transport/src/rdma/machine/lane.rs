//! One queue pair's books: what is posted, what has ended, what waits for room.

use std::collections::VecDeque;
use std::time::Instant;

use super::cut::Part;

/// Requests are numbered from 0 in each direction; those below `retired` and `taken` have ended.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) next: u64,
    pub(crate) retired: u64,
    /// Bytes of each request in flight, oldest first.
    sizes: VecDeque<u64>,
    /// Requests in flight that end something of a write: their number and the write's tag.
    ends: VecDeque<(u64, u32)>,
    pub(crate) bytes_in_flight: u64,
    pub(crate) posted_receives: u64,
    pub(crate) taken_receives: u64,
    /// Parts that were sent and have ended, and parts that came.
    pub(crate) parts_ended: u64,
    pub(crate) parts_taken: u64,
    /// What waits for room.
    pub(crate) parts: VecDeque<Part>,
    /// When the oldest request in flight was posted, or the last one ended.
    since: Instant,
}

impl Lane {
    pub(crate) fn new(now: Instant) -> Self {
        let (sizes, ends, parts) = Default::default();
        Self {
            next: 0,
            retired: 0,
            sizes,
            ends,
            bytes_in_flight: 0,
            posted_receives: 0,
            taken_receives: 0,
            parts_ended: 0,
            parts_taken: 0,
            parts,
            since: now,
        }
    }

    pub(crate) fn in_flight(&self) -> u64 {
        self.next - self.retired
    }

    pub(crate) fn receives(&self) -> u64 {
        self.posted_receives - self.taken_receives
    }

    pub(crate) fn is_drained(&self) -> bool {
        self.in_flight() == 0 && self.receives() == 0
    }

    pub(crate) fn queued_bytes(&self) -> u64 {
        self.bytes_in_flight + self.parts.iter().map(|part| part.left).sum::<u64>()
    }

    /// Since when nothing has ended though something is in flight.
    pub(crate) fn waiting_since(&self) -> Option<Instant> {
        (self.in_flight() > 0).then_some(self.since)
    }

    /// Books a request that was posted.
    pub(crate) fn book(&mut self, bytes: u64, ends: Option<u32>, now: Instant) {
        if self.in_flight() == 0 {
            self.since = now;
        }
        if let Some(tag) = ends {
            self.ends.push_back((self.next, tag));
        }
        self.next += 1;
        self.sizes.push_back(bytes);
        self.bytes_in_flight += bytes;
    }

    /// Books the end of all requests below `to`, and calls `ended` for the tag of each that ends something.
    pub(crate) fn retire(&mut self, to: u64, now: Instant, mut ended: impl FnMut(u32)) {
        while self.retired < to {
            self.retired += 1;
            self.bytes_in_flight -= self.sizes.pop_front().unwrap_or(0);
            self.since = now;
        }
        while self.ends.front().is_some_and(|(number, _)| *number < to) {
            if let Some((_, tag)) = self.ends.pop_front() {
                ended(tag);
            }
        }
    }
}
