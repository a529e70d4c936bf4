//! How long is too long, on a machine that may be busy with other things.
//!
//! A configured deadline bounds how long a node *waits*. It says nothing of how long the node computes, nor of how long the machine
//! lets it lie while it could run: asserting wall-clock time would test the machine. So a span counts only as far as the process was
//! idle in it:
//!
//! ```text
//! idle = wall clock - time on a processor - time in a run queue - time in which the test held the process stopped
//! ```
//!
//! The kernel keeps the second and the third for every thread (`/proc/PID/task/TID/schedstat`); those of all threads of the node, and
//! of the thread that waits, are subtracted, which errs on the lenient side: four threads that run at once count four times. What
//! hangs is idle, so it is found out all the same; an engine that polls while it waits only stretches the limit by what polling costs.
//! Where the kernel keeps no such figures nothing is subtracted, and the limits may be too strict for a busy machine.
//!
//! The limits are twice the sum of the deadlines that can follow one another. A request may queue for blocks behind others that wait
//! for their whole deadline, and then wait for its own: that is the factor of two.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvferry::config::Deadlines;

/// What may pass idle before something must have come.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The end of a request: right tokens, or the error of the policy.
    pub answer: Duration,
    /// Everything that was held for transfers is free, once no request is under way.
    pub free: Duration,
    /// All sessions are up, once the network is whole.
    pub whole: Duration,
}

impl From<&Deadlines> for Limits {
    fn from(deadlines: &Deadlines) -> Self {
        let Deadlines { transfer, lease_ttl, verdict, absent, silence, .. } = *deadlines;
        Self {
            // The transfer's deadline is over all that can happen to it; its last words and a session that must be given up first.
            answer: 2 * (transfer + verdict + silence),
            // A sender's lease runs from the end of its request, and its word is waited for after that.
            free: 2 * (transfer + lease_ttl + verdict + silence) + TIER,
            // What is left of a dead session is found by silence on either side; then the dialler's back-off, and a handshake.
            whole: 2 * (silence + absent) + REDIAL,
        }
    }
}

/// The tier's own limits, which are not configured: 2 s for an offer of blocks, 2 s for a call.
const TIER: Duration = Duration::from_secs(4);
/// The transport's, for links that are to be reached: 2 s of back-off at most, 5 s for a handshake.
const REDIAL: Duration = Duration::from_secs(7);

/// A process to watch, also after it ended.
#[derive(Clone, Debug)]
pub struct Watch {
    pid: u32,
    stops: Arc<Mutex<Stops>>,
}

/// How long a process was held stopped.
#[derive(Clone, Copy, Debug, Default)]
struct Stops {
    over: Duration,
    since: Option<Instant>,
}

impl Watch {
    pub(crate) fn new(pid: u32) -> Self {
        Self { pid, stops: Arc::default() }
    }

    pub(crate) fn stopped(&self) {
        self.lock().since.get_or_insert_with(Instant::now);
    }

    pub(crate) fn goes_on(&self) {
        let mut stops = self.lock();
        let since = stops.since.take();
        stops.over += since.map_or(Duration::ZERO, |since| since.elapsed());
    }

    /// Time in which it could run, over all of its threads, or was held stopped.
    fn not_idle(&self) -> Duration {
        let stops = *self.lock();
        let stopped = stops.over + stops.since.map_or(Duration::ZERO, |since| since.elapsed());
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.pid)).into_iter().flatten().flatten();
        let runnable: Duration = threads.map(|thread| runnable(&thread.path().join("schedstat"))).sum();
        stopped + runnable
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Stops> {
        self.stops.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A span of time, as far as some processes and the thread that measures were idle in it.
#[derive(Debug)]
pub struct Idle {
    began: Instant,
    watched: Vec<(Watch, Duration)>,
    own: Duration,
}

impl Idle {
    /// Begins to measure. The end is to be asked for on the same thread.
    #[must_use]
    pub fn begin(watched: impl IntoIterator<Item = Watch>) -> Self {
        let with_start = |watch: Watch| (watch.clone(), watch.not_idle());
        Self { began: Instant::now(), watched: watched.into_iter().map(with_start).collect(), own: own_runnable() }
    }

    /// How long it is so far.
    #[must_use]
    pub fn so_far(&self) -> Duration {
        let wall = self.began.elapsed();
        // A process that ended has no figures any more.
        let busy = self.watched.iter().map(|(watch, start)| watch.not_idle().saturating_sub(*start));
        wall.saturating_sub(busy.sum::<Duration>() + own_runnable().saturating_sub(self.own))
    }
}

fn own_runnable() -> Duration {
    runnable(std::path::Path::new("/proc/thread-self/schedstat"))
}

/// Time on a processor and in a run queue; zero for a thread that is gone, or a kernel that does not tell.
fn runnable(schedstat: &std::path::Path) -> Duration {
    let text = std::fs::read_to_string(schedstat).unwrap_or_default();
    let nanoseconds = text.split_ascii_whitespace().take(2).filter_map(|number| number.parse::<u64>().ok());
    Duration::from_nanos(nanoseconds.sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn computing_is_not_idle_and_sleeping_is() {
        let idle = Idle::begin([]);
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(300) {
            std::hint::spin_loop();
        }
        // Whatever else runs here: this thread could run all the time.
        assert!(idle.so_far() < Duration::from_millis(150), "{:?}", idle.so_far());
        let asleep = Idle::begin([]);
        std::thread::park_timeout(Duration::from_millis(200));
        assert!(asleep.so_far() > Duration::from_millis(100) || asleep.began.elapsed() < Duration::from_millis(200));
    }

    #[test]
    fn a_process_that_is_held_stopped_is_not_idle() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep is there");
        let watch = Watch::new(child.id());
        let idle = Idle::begin([watch.clone()]);
        watch.stopped();
        std::thread::park_timeout(Duration::from_millis(200));
        watch.goes_on();
        let (wall, so_far) = (idle.began.elapsed(), idle.so_far());
        assert!(so_far < wall / 2, "{so_far:?} of {wall:?}");
        child.kill().expect("a child can be killed");
        child.wait().expect("a child can be waited for");
    }
}
