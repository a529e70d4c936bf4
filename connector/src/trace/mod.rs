//! A timeline of what happens to K/V: what was computed, packed, shipped, landed, verified and waited for, and when.
//!
//! A [`Tracer`] keeps the newest spans in memory and writes them as a file in Chrome's trace event format, which Perfetto
//! (<https://ui.perfetto.dev>) and `chrome://tracing` open. Times are those of the host's monotonic clock, so that the files of two
//! processes of one host have one clock; [`merge`] joins files.

mod file;
mod join;
mod span;

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

pub use file::TraceError;
pub use join::merge;
pub use span::{Kind, Span};

/// Records spans, or does nothing if it is off. Clones record into the same timeline.
#[derive(Clone, Debug, Default)]
pub struct Tracer {
    timeline: Option<Arc<Timeline>>,
    /// Whose spans these are, where one process has several workers.
    label: Option<Arc<str>>,
}

#[derive(Debug)]
struct Timeline {
    clock: Clock,
    capacity: usize,
    recorded: Mutex<Recorded>,
}

#[derive(Debug, Default)]
struct Recorded {
    spans: VecDeque<(Option<Arc<str>>, Span)>,
    /// Older spans that gave way to newer ones.
    dropped: u64,
}

/// One moment in three clocks.
#[derive(Clone, Copy, Debug)]
struct Clock {
    at: Instant,
    /// Of `CLOCK_MONOTONIC`, which `Instant` reads on Linux.
    monotonic_ns: i128,
    /// Since 1970, as this host believes.
    unix_ns: i128,
}

impl Tracer {
    /// Spans that are kept if nobody says otherwise: some 30 MB, a few thousand requests.
    pub const DEFAULT_SPANS: NonZeroUsize = NonZeroUsize::new(1 << 18).unwrap();

    /// Records nothing.
    #[must_use]
    pub const fn off() -> Self {
        Self { timeline: None, label: None }
    }

    /// Keeps the newest `spans` spans.
    #[must_use]
    pub fn keeping(spans: NonZeroUsize) -> Self {
        let timeline = Timeline { clock: Clock::read(), capacity: spans.get(), recorded: Mutex::default() };
        Self { timeline: Some(Arc::new(timeline)), label: None }
    }

    /// The same timeline, on tracks of its own that are named with `label`: for a process with several workers.
    #[must_use]
    pub fn labelled(&self, label: &str) -> Self {
        Self { timeline: self.timeline.clone(), label: Some(label.into()) }
    }

    /// Whether anything is recorded.
    #[must_use]
    pub const fn is_on(&self) -> bool {
        self.timeline.is_some()
    }

    /// The time for a span that begins now; `None` if nothing is recorded, and then no clock is read.
    #[must_use]
    pub fn start(&self) -> Option<Instant> {
        self.timeline.as_ref().map(|_| Instant::now())
    }

    /// Records a span. What it holds is made only if it is kept.
    pub fn record(&self, span: impl FnOnce() -> Span) {
        let Some(timeline) = &self.timeline else { return };
        let span = (self.label.clone(), span());
        let mut recorded = timeline.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        if recorded.spans.len() >= timeline.capacity {
            recorded.spans.pop_front();
            recorded.dropped += 1;
        }
        recorded.spans.push_back(span);
    }
}

impl Clock {
    /// Reads the three clocks as closely together as a few attempts allow.
    fn read() -> Self {
        let read = || {
            let at = Instant::now();
            let monotonic = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
            let unix = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
            let ns = |time: rustix::time::Timespec| i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec);
            (at.elapsed(), Self { at, monotonic_ns: ns(monotonic), unix_ns: ns(unix) })
        };
        let closest = (0..READINGS).map(|_| read()).min_by_key(|(took, _)| *took);
        closest.map_or_else(|| read().1, |(_, clock)| clock)
    }

    /// A moment on the monotonic clock, in nanoseconds.
    fn monotonic_ns(&self, at: Instant) -> i128 {
        let (after, before) = (at.saturating_duration_since(self.at), self.at.saturating_duration_since(at));
        self.monotonic_ns + after.as_nanos() as i128 - before.as_nanos() as i128
    }
}

/// A reading that was interrupted between two clocks is not used.
const READINGS: usize = 8;

#[cfg(test)]
mod tests;
