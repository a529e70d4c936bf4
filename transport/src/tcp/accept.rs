//! Who dials us: how many connections are taken, and which of those that have not proved themselves are let go for them.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use super::driver::{Driver, Due, Key};
use super::handshaking::{Handshaking, Opening, Role};
use super::poller::Interest;
use super::socket;
use super::strangers::{Admission, Source};
use super::stream::Stream;
use crate::core::Counters;

/// How many connections are accepted before the thread looks at its peers.
const TURN_ACCEPTS: usize = 16;
/// How long to accept nothing after the system refused a descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Where peers dial.
pub(crate) struct Listeners {
    pub(crate) tcp: TcpListener,
    /// For data lanes over other network cards, with their addresses.
    pub(crate) rails: Vec<(SocketAddr, TcpListener)>,
    /// For data lanes of peers on this host.
    pub(crate) unix: Option<UnixListener>,
}

/// How the last try to accept ended.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Accepting {
    #[default]
    Well,
    /// The system refused a descriptor, and somebody was told; nothing is accepted until the pause is over.
    Starved,
    /// It is tried again.
    Trying,
}

impl Driver<'_> {
    /// Waits for who dials, or not until the system may have descriptors again.
    pub(super) fn watch_listeners(&mut self, interest: Interest) -> io::Result<()> {
        self.poller.watch(Key::Tcp.get(), self.listeners.tcp.as_fd(), interest)?;
        for (at, (_, rail)) in (0..).zip(&self.listeners.rails) {
            self.poller.watch(Key::Rail(at).get(), rail.as_fd(), interest)?;
        }
        match &self.listeners.unix {
            Some(unix) => self.poller.watch(Key::Unix.get(), unix.as_fd(), interest),
            None => Ok(()),
        }
    }

    pub(super) fn accept_tcp(&mut self) {
        self.accept(|listeners| {
            let (stream, from) = listeners.tcp.accept()?;
            Ok((socket::accepted(stream)?, Source::of(from.ip()), from.to_string()))
        });
    }

    pub(super) fn accept_rail(&mut self, at: u64) {
        self.accept(|listeners| {
            let (_, rail) = listeners.rails.get(at as usize).ok_or(io::ErrorKind::WouldBlock)?;
            let (stream, from) = rail.accept()?;
            Ok((socket::accepted(stream)?, Source::of(from.ip()), from.to_string()))
        });
    }

    pub(super) fn accept_unix(&mut self) {
        self.accept(|listeners| {
            let unix = listeners.unix.as_ref().ok_or(io::ErrorKind::WouldBlock)?;
            Ok((socket::accepted_unix(unix.accept()?.0)?, Source::Host, "a process of this host".to_owned()))
        });
    }

    /// Begins to accept, at first and after a pause.
    pub(super) fn accept_again(&mut self) {
        if self.accepting == Accepting::Starved {
            self.accepting = Accepting::Trying;
        }
        if let Err(error) = self.watch_listeners(Interest::READ) {
            self.pause_accepting(&error);
        }
    }

    fn pause_accepting(&mut self, error: &io::Error) {
        if self.accepting == Accepting::Well {
            tracing::warn!(%error, "connections cannot be accepted for now; raise the limit, or see who holds them");
        }
        self.accepting = Accepting::Starved;
        // It fails only for what is not watched.
        let _ = self.watch_listeners(Interest::NONE);
        self.timers.set(Due::Accept, Instant::now() + ACCEPT_PAUSE);
    }

    fn accept(&mut self, accept: impl Fn(&Listeners) -> io::Result<(Stream, Source, String)>) {
        if self.accepting == Accepting::Starved {
            return; // the other listener found that, in this very round
        }
        for _ in 0..TURN_ACCEPTS {
            match accept(&self.listeners) {
                Ok((stream, source, name)) => self.take_in(stream, source, name),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.accepting = Accepting::Well;
                    return;
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => return self.pause_accepting(&error),
            }
        }
    }

    /// Begins to shake hands with a stranger, unless there are too many.
    fn take_in(&mut self, stream: Stream, source: Source, name: String) {
        let now = Instant::now();
        let admission = self.strangers.admit(source, now);
        match admission {
            Admission::Refused => return, // not even told that we are busy
            Admission::InsteadOf(oldest) => {
                if let Some(oldest) = self.take_handshake(oldest) {
                    Counters::add(&self.shared.core.counters.refused_peers, 1);
                    tracing::debug!(peer = oldest.name, "let go for another: it did not prove itself");
                }
            }
            Admission::Welcome | Admission::Busy => {}
        }
        let config = &self.shared.config;
        let (deadline, is_busy) = (now + config.handshake, admission == Admission::Busy);
        let opening = Opening::Listener { versions: config.versions, busy: is_busy };
        match Handshaking::new(stream, Role::Accepted, name, opening, self.shared.credentials(), deadline) {
            Ok(handshake) => {
                self.strangers.add(self.next_handshake, source, now);
                self.begin_handshake(handshake);
            }
            Err(error) => tracing::warn!(%error, "a connection was accepted and cannot be used"),
        }
    }
}
