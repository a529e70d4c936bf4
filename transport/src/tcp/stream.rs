//! A connection, whatever carries it, with TLS or without.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use kvferry_protocol::EngineId;
use kvferry_protocol::wire::ChannelSecret;

use crate::ffi;
use crate::raw::RawRun;
use crate::tls::Channel;

/// A non-blocking stream socket.
#[derive(Debug)]
pub(crate) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    pub(crate) fn is_unix(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    pub(crate) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.shutdown(how),
            Self::Unix(stream) => stream.shutdown(how),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

/// What one thread at a time reads and writes. Others may hold the socket, to end it.
///
/// With TLS, bytes may be here that the socket knows nothing of. Those that came are given out before a call would wait. Those to
/// send are given to the socket by every call that sends; who has nothing more to send waits until it is writable and calls
/// [`push`](Self::push), as long as there are some ([`has_unsent`](Self::has_unsent)).
#[derive(Debug)]
pub(crate) struct Stream {
    socket: Arc<Socket>,
    tls: Option<Box<Channel>>,
}

impl Stream {
    pub(crate) fn new(socket: Socket) -> Self {
        Self { socket: Arc::new(socket), tls: None }
    }

    /// The same through a channel, whose handshake is still to come.
    pub(crate) fn within(self, channel: Channel) -> Self {
        Self { tls: Some(Box::new(channel)), ..self }
    }

    pub(crate) fn socket(&self) -> &Arc<Socket> {
        &self.socket
    }

    pub(crate) fn is_unix(&self) -> bool {
        self.socket.is_unix()
    }

    pub(crate) fn is_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Whether a connection that was begun is there.
    pub(crate) fn is_connected(&self) -> io::Result<bool> {
        let (error, peer) = match &*self.socket {
            Socket::Tcp(stream) => (stream.take_error()?, stream.peer_addr().is_ok()),
            Socket::Unix(stream) => (stream.take_error()?, stream.peer_addr().is_ok()),
        };
        error.map_or(Ok(peer), Err)
    }

    /// Lets TLS shake hands, where there is TLS; returns whether bytes may flow.
    pub(crate) fn shake(&mut self) -> io::Result<bool> {
        match &mut self.tls {
            Some(channel) => channel.shake(&self.socket),
            None => Ok(true),
        }
    }

    /// What only the two ends of the channel know; `None` without TLS.
    pub(crate) fn secret(&self) -> io::Result<Option<ChannelSecret>> {
        self.tls.as_ref().map(|channel| channel.secret()).transpose()
    }

    /// Whether the peer may be this engine: its certificate may have to say so.
    pub(crate) fn names(&self, engine: &EngineId) -> bool {
        self.tls.as_ref().is_none_or(|channel| channel.names(engine))
    }

    /// Sends from the first runs; returns how many bytes it took. Never waits.
    pub(crate) fn send_runs(&mut self, runs: &[RawRun]) -> io::Result<usize> {
        match &mut self.tls {
            Some(channel) => channel.send(&self.socket, runs),
            None => ffi::send_runs(self.socket.as_fd(), runs),
        }
    }

    /// Receives into the first runs; returns how many bytes came, 0 at the end of the stream. Never waits.
    pub(crate) fn receive_runs(&mut self, runs: &[RawRun]) -> io::Result<usize> {
        match &mut self.tls {
            Some(channel) => channel.receive(&self.socket, runs),
            None => ffi::receive_runs(self.socket.as_fd(), runs),
        }
    }

    /// Sends bytes with a descriptor, which goes with the first of them.
    pub(crate) fn send_with_file(&mut self, bytes: &[u8], file: BorrowedFd<'_>) -> io::Result<usize> {
        match &mut self.tls {
            Some(channel) => channel.send_file(&self.socket, bytes, file),
            None => ffi::send_with_file(self.socket.as_fd(), bytes, file),
        }
    }

    /// Receives bytes, and the descriptor that comes with them; an older one is closed. With TLS it waits in the channel
    /// ([`take_file`](Self::take_file)), since bytes come there earlier than they are read.
    pub(crate) fn receive_with_file(&mut self, bytes: &mut [u8], file: &mut Option<OwnedFd>) -> io::Result<usize> {
        match &mut self.tls {
            Some(channel) => channel.receive(&self.socket, &[RawRun::of_mut(bytes)]),
            None => ffi::receive_with_file(self.socket.as_fd(), bytes, file),
        }
    }

    /// The descriptor that came first of those that wait in the channel.
    pub(crate) fn take_file(&mut self) -> Option<OwnedFd> {
        self.tls.as_mut().and_then(|channel| channel.take_file())
    }

    /// Whether bytes that were taken wait for the socket.
    pub(crate) fn has_unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|channel| channel.has_unsent())
    }

    /// Gives the socket what waits; returns whether it took all.
    pub(crate) fn push(&mut self) -> io::Result<bool> {
        match &mut self.tls {
            Some(channel) => channel.push(&self.socket),
            None => Ok(true),
        }
    }

    /// Says that nothing more will be sent.
    pub(crate) fn finish(&mut self) {
        if let Some(channel) = &mut self.tls {
            channel.finish(&self.socket);
        }
        // It fails if the peer was quicker.
        let _ = self.socket.shutdown(Shutdown::Write);
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl io::Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.receive_runs(&[RawRun::of_mut(into)])
    }
}

impl io::Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send_runs(&[RawRun::of(bytes)])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
