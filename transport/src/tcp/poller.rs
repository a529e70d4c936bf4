//! The sockets that a thread waits for, in epoll(7): a round costs what is ready, not what exists.
//!
//! Level-triggered. A lane stops in the middle of what there is, when its turn is over, when nobody polls for events or when a read came
//! back short, and is told again for as long as there is more; with edges each of these would have to remember that, and a short read of
//! a Unix socket, which ends at a descriptor, would be taken for the last. The price is a system call when what is waited for changes,
//! which for most sockets is never. Those that are found are given in turn when there are more than a round takes.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::wake::Waker;

/// How many sockets are found in a round.
const ROUND_SOCKETS: usize = 256;
/// The system call counts in milliseconds. Shorter waits than this are made with ppoll(2), which does not.
const PRECISE: Duration = Duration::from_millis(10);
/// The waker's own key.
const WAKER: u64 = u64::MAX;

/// What of a socket is waited for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Interest {
    pub(crate) read: bool,
    pub(crate) write: bool,
}

impl Interest {
    pub(crate) const NONE: Self = Self { read: false, write: false };
    pub(crate) const READ: Self = Self { read: true, write: false };
}

/// A socket that is ready; one that broke is in both directions, so that whoever tries sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) key: u64,
    pub(crate) read: bool,
    pub(crate) write: bool,
}

pub(crate) struct Poller {
    epoll: OwnedFd,
    interests: HashMap<u64, Interest>,
    found: Vec<Found>,
}

impl Poller {
    /// One that `waker` wakes.
    pub(crate) fn new(waker: &Waker) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, waker.as_fd(), EventData::new_u64(WAKER), EventFlags::IN)?;
        Ok(Self { epoll, interests: HashMap::new(), found: Vec::new() })
    }

    /// Waits for `interest` of a socket from now on. One that nothing is waited for stays out: its hang-up would be told over and over.
    ///
    /// # Errors
    /// Of epoll_ctl(2): too many are watched, or there is no memory.
    pub(crate) fn watch(&mut self, key: u64, socket: BorrowedFd<'_>, interest: Interest) -> io::Result<()> {
        let before = self.interests.get(&key).copied().unwrap_or(Interest::NONE);
        if before == interest {
            return Ok(());
        }
        let mut flags = EventFlags::empty();
        flags.set(EventFlags::IN, interest.read);
        flags.set(EventFlags::OUT, interest.write);
        let data = EventData::new_u64(key);
        if interest == Interest::NONE {
            self.interests.remove(&key);
            epoll::delete(&self.epoll, socket)?;
        } else if before == Interest::NONE {
            epoll::add(&self.epoll, socket, data, flags)?;
            self.interests.insert(key, interest);
        } else {
            epoll::modify(&self.epoll, socket, data, flags)?;
            self.interests.insert(key, interest);
        }
        Ok(())
    }

    /// Waits for nothing of a socket any more; before it is closed, since others may hold it too.
    pub(crate) fn forget(&mut self, key: u64, socket: BorrowedFd<'_>) {
        // It fails only for what is not there.
        let _ = self.watch(key, socket, Interest::NONE);
    }

    /// Waits until a socket is ready, the thread is woken, or `timeout` is over; gives what is ready.
    pub(crate) fn sleep(&mut self, waker: &Waker, timeout: Option<Duration>) -> impl Iterator<Item = Found> {
        self.found.clear();
        // Interrupted is as good as woken: the caller looks at everything again.
        waker.around(timeout, |timeout| wait(&self.epoll, timeout, &mut self.found).unwrap_or(true));
        self.found.drain(..)
    }
}

/// Returns whether the waker is ready.
fn wait(epoll: &OwnedFd, timeout: Option<Duration>, found: &mut Vec<Found>) -> io::Result<bool> {
    let timeout = match timeout {
        Some(timeout) if !timeout.is_zero() && timeout < PRECISE => {
            let timeout = Timespec { tv_sec: 0, tv_nsec: timeout.subsec_nanos().into() };
            poll(&mut [PollFd::from_borrowed_fd(epoll.as_fd(), PollFlags::IN)], Some(&timeout))?;
            Some(Timespec { tv_sec: 0, tv_nsec: 0 })
        }
        // Rounded up: a wait that is too short by less than a millisecond would be made over and over.
        Some(timeout) => {
            let ms = timeout.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128) as i64;
            Some(Timespec { tv_sec: ms / 1000, tv_nsec: ms % 1000 * 1_000_000 })
        }
        None => None,
    };
    let mut space = [const { MaybeUninit::uninit() }; ROUND_SOCKETS];
    let (events, _) = epoll::wait(epoll, &mut space[..], timeout.as_ref())?;
    let mut is_woken = false;
    for event in events {
        let (flags, key) = (event.flags, event.data.u64());
        let is_broken = flags.intersects(EventFlags::HUP | EventFlags::ERR);
        match key {
            WAKER => is_woken = true,
            key => found.push(Found {
                key,
                read: is_broken || flags.contains(EventFlags::IN),
                write: is_broken || flags.contains(EventFlags::OUT),
            }),
        }
    }
    Ok(is_woken)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_is_ready_is_told_until_it_was_taken_and_only_if_somebody_waits_for_it() {
        let (waker, (mut near, mut far)) = (Waker::new().unwrap(), UnixStream::pair().unwrap());
        let mut poller = Poller::new(&waker).unwrap();
        let now = |poller: &mut Poller| -> Vec<(u64, bool, bool)> {
            poller.sleep(&waker, Some(Duration::ZERO)).map(|found| (found.key, found.read, found.write)).collect()
        };
        poller.watch(7, near.as_fd(), Interest::READ).unwrap();
        assert_eq!(now(&mut poller), []);
        far.write_all(b"ab").unwrap();
        near.read_exact(&mut [0]).unwrap();
        assert_eq!(now(&mut poller), [(7, true, false)], "one byte is left");
        poller.watch(7, near.as_fd(), Interest { read: true, write: true }).unwrap();
        assert_eq!(now(&mut poller), [(7, true, true)]);
        poller.watch(7, near.as_fd(), Interest::NONE).unwrap();
        drop(far);
        assert_eq!(now(&mut poller), [], "a hang-up that nobody waits for");
        poller.watch(7, near.as_fd(), Interest::READ).unwrap();
        assert_eq!(now(&mut poller), [(7, true, true)], "broken in both directions");
        poller.forget(7, near.as_fd());
        assert_eq!(now(&mut poller), []);
    }

    #[test]
    fn a_wake_ends_the_sleep_and_a_short_timeout_too() {
        let waker = Waker::new().unwrap();
        let mut poller = Poller::new(&waker).unwrap();
        waker.wake();
        assert_eq!(poller.sleep(&waker, None).count(), 0);
        for timeout in [Duration::from_micros(10), Duration::from_millis(11)] {
            assert_eq!(poller.sleep(&waker, Some(timeout)).count(), 0);
        }
        std::thread::scope(|scope| {
            scope.spawn(|| waker.wake());
            assert_eq!(poller.sleep(&waker, None).count(), 0);
        });
    }
}
