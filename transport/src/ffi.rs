//! Vectored, non-blocking socket calls on raw addresses.
#![expect(unsafe_code, reason = "sendmsg and recvmsg take raw addresses")]

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

use crate::raw::RawRun;

/// The most runs that one call takes: `UIO_MAXIOV` of Linux.
pub(crate) const MAX_RUNS: usize = 1024;

/// Sends from the first [`MAX_RUNS`] runs; returns how many bytes went. Never waits, never raises SIGPIPE.
pub(crate) fn send_runs(fd: BorrowedFd<'_>, runs: &[RawRun]) -> io::Result<usize> {
    let message = message(runs);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `message` points at `runs`, which outlive the call; what they point at is mapped and guarded (see `raw`).
    let sent = unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Receives into the first [`MAX_RUNS`] runs; returns how many bytes came, 0 at the end of the stream. Never waits.
pub(crate) fn receive_runs(fd: BorrowedFd<'_>, runs: &[RawRun]) -> io::Result<usize> {
    let mut message = message(runs);
    // SAFETY: `message` points at `runs`, which outlive the call; what they point at is mapped and guarded (see `raw`).
    let received = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
    usize::try_from(received).map_err(|_| io::Error::last_os_error())
}

/// Sends bytes with a descriptor, which goes with the first of them. Never waits, never raises SIGPIPE.
pub(crate) fn send_with_file(fd: BorrowedFd<'_>, bytes: &[u8], file: BorrowedFd<'_>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files = [file];
    if !ancillary.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(sendmsg(fd, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
}

/// Receives bytes, and the descriptor that comes with them; an older one is closed. Never waits.
pub(crate) fn receive_with_file(fd: BorrowedFd<'_>, bytes: &mut [u8], file: &mut Option<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(fd, &mut [IoSliceMut::new(bytes)], &mut ancillary, flags)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            *file = files.last().or(file.take());
        }
    }
    Ok(received.bytes)
}

fn message(runs: &[RawRun]) -> libc::msghdr {
    // SAFETY: all-zero bytes are a valid `msghdr`: null pointers with zero lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    // The kernel reads the vector and never writes it; `RawRun` is laid out as `iovec`.
    message.msg_iov = runs.as_ptr().cast_mut().cast();
    message.msg_iovlen = runs.len().min(MAX_RUNS) as _;
    message
}
