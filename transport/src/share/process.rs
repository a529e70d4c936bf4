//! The peer's process, where its memory is read by a system call.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::process::{PidfdFlags, pidfd_open};

use super::raw::{RemoteRun, read_process};
use crate::raw::RawRun;

/// A process that cannot be mistaken for a later one with its number.
#[derive(Debug)]
pub(super) struct Process {
    pid: i32,
    handle: OwnedFd,
}

impl Process {
    /// The process at the other end of a Unix socket.
    pub(super) fn behind(socket: BorrowedFd<'_>) -> io::Result<Self> {
        let pid = socket_peercred(socket)?.pid;
        let handle = pidfd_open(pid, PidfdFlags::empty())?;
        Ok(Self { pid: pid.as_raw_nonzero().get(), handle })
    }

    /// Whether it still runs. If so, what was read before came from it.
    pub(super) fn is_alive(&self) -> bool {
        let mut fds = [PollFd::new(&self.handle, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut fds, Some(&now)), Ok(0))
    }

    pub(super) fn read(&self, to: &[RawRun], from: &[RemoteRun]) -> io::Result<usize> {
        read_process(self.pid, to, from)
    }
}
