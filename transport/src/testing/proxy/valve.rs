//! What one direction of a proxy does to the bytes that pass, changeable while they do.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How bytes of one direction flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Flow {
    /// As they come.
    #[default]
    Pass,
    /// Not at all, and all of them later: a network that loses packets, as TCP shows it.
    Hold,
    /// They vanish without a word; the stream goes on behind the gap when that ends.
    Vanish,
    /// So many bytes a second on each connection.
    Crawl {
        /// At least 1.
        bytes_per_second: u64,
    },
    /// Each piece (64 KiB at most) so much later than it came.
    Delay(Duration),
}

/// What is to be done with a piece that was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    /// Hand on so many of its bytes, then ask again.
    Carry(usize),
    /// Throw it away.
    Drop,
    /// The connection is over.
    End,
}

/// One direction of a proxy, for all of its connections.
#[derive(Debug, Default)]
pub(super) struct Valve {
    flow: Mutex<Flow>,
    changed: Condvar,
    carried: AtomicU64,
    flip_next: AtomicBool,
}

impl Valve {
    pub(super) fn set(&self, flow: Flow) {
        *self.lock() = flow;
        self.changed.notify_all();
    }

    /// Wakes who waits here, to look whether its connection is over.
    pub(super) fn wake(&self) {
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Bytes that came in, over all connections.
    pub(super) fn carried(&self) -> u64 {
        self.carried.load(Ordering::Relaxed)
    }

    pub(super) fn flip_next(&self) {
        self.flip_next.store(true, Ordering::Relaxed);
    }

    /// Counts a piece that came in, and flips a bit in its middle if that was asked for.
    pub(super) fn take(&self, piece: &mut [u8]) {
        self.carried.fetch_add(piece.len() as u64, Ordering::Relaxed);
        if self.flip_next.swap(false, Ordering::Relaxed) {
            let middle = piece.len() / 2;
            piece[middle] ^= 0x10;
        }
    }

    /// Waits until some of `left` bytes, which came at `came`, may go on.
    pub(super) fn pass(&self, left: usize, came: Instant, is_over: &AtomicBool) -> Fate {
        let mut flow = self.lock();
        let began = Instant::now();
        loop {
            if is_over.load(Ordering::SeqCst) {
                return Fate::End;
            }
            let (until, piece) = match *flow {
                Flow::Pass => return Fate::Carry(left),
                Flow::Vanish => return Fate::Drop,
                Flow::Hold => {
                    flow = self.changed.wait(flow).unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
                Flow::Crawl { bytes_per_second } => {
                    let piece = left.min(CRAWL_BYTES);
                    (began + Duration::from_secs_f64(piece as f64 / bytes_per_second.max(1) as f64), piece)
                }
                Flow::Delay(by) => (came + by, left),
            };
            let wait = until.saturating_duration_since(Instant::now());
            if wait.is_zero() {
                return Fate::Carry(piece);
            }
            flow = self.changed.wait_timeout(flow, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Flow> {
        self.flow.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The most that goes at once on a link that crawls.
const CRAWL_BYTES: usize = 512;
