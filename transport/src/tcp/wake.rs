//! Wakes a thread out of poll(2) or epoll(7).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// One thread sleeps on it, any thread wakes it; a wake that comes before the sleep is not lost.
pub(crate) struct Waker {
    fd: OwnedFd,
    is_woken: AtomicBool,
    is_sleeping: AtomicBool,
}

impl Waker {
    pub(crate) fn new() -> std::io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { fd, is_woken: AtomicBool::new(false), is_sleeping: AtomicBool::new(false) })
    }

    /// Wakes the thread. Costs a system call only if it sleeps.
    pub(crate) fn wake(&self) {
        let was_woken = self.is_woken.swap(true, Ordering::SeqCst);
        if !was_woken && self.is_sleeping.load(Ordering::SeqCst) {
            // It fails only if the counter is full, and then the thread is being woken.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }

    /// Waits until one of `fds` is ready, the thread is woken, or `timeout` is over. `fds[0]` has to be [`Waker::entry`].
    pub(crate) fn sleep(&self, fds: &mut [PollFd<'_>], timeout: Option<Duration>) {
        self.around(timeout, |timeout| {
            let timeout = timeout.map(|timeout| Timespec {
                tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
                tv_nsec: timeout.subsec_nanos().into(),
            });
            // Interrupted is as good as woken: the caller looks at everything again.
            let _ = poll(fds, timeout.as_ref());
            !fds[0].revents().is_empty()
        });
    }

    /// The same with a wait of the caller's: no longer than it is told, and it watches [`Waker::as_fd`] and says whether that was ready.
    pub(crate) fn around(&self, timeout: Option<Duration>, wait: impl FnOnce(Option<Duration>) -> bool) {
        self.is_sleeping.store(true, Ordering::SeqCst);
        let timeout = if self.is_woken.load(Ordering::SeqCst) { Some(Duration::ZERO) } else { timeout };
        let is_ready = wait(timeout);
        self.is_sleeping.store(false, Ordering::SeqCst);
        if is_ready {
            let mut count = [0; 8];
            let _ = rustix::io::read(&self.fd, &mut count);
        }
        // Before the caller looks at its queues: what is queued later wakes anew.
        self.is_woken.store(false, Ordering::SeqCst);
    }

    pub(crate) fn entry(&self) -> PollFd<'_> {
        PollFd::from_borrowed_fd(self.as_fd(), PollFlags::IN)
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
