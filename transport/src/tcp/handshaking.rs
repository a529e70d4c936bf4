//! A connection whose handshake goes on.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use kvferry_protocol::wire::{
    Declined, Dialler, Established, HandshakeError, HandshakeStep, Identity, Listener, Step, Verdict,
};
use rustix::event::{PollFd, PollFlags};

use super::pending::Pending;
use super::rails::Way;
use super::stream::Stream;
use crate::error::TransportError;

/// Why the connection exists.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    /// Somebody dialled us.
    Accepted,
    /// We dial a new session at this address.
    Control { to: SocketAddr },
    /// We dial data lane `lane` of the session with this address that is being made under this number; perhaps over a rail.
    Lane { to: SocketAddr, session: u64, lane: u16, rail: Option<Way> },
}

impl Role {
    /// Whether it is a lane over a rail.
    pub(crate) fn is_rail(self) -> bool {
        matches!(self, Self::Lane { rail: Some(_), .. })
    }

    /// The address whose session this is for, if we dial.
    pub(crate) fn to(self) -> Option<SocketAddr> {
        match self {
            Self::Accepted => None,
            Self::Control { to } | Self::Lane { to, .. } => Some(to),
        }
    }
}

pub(crate) struct Handshaking {
    pub(crate) stream: Stream,
    pub(crate) role: Role,
    /// The other end, in errors and logs.
    pub(crate) name: String,
    machine: Machine,
    input: Vec<u8>,
    output: Vec<u8>,
    is_connecting: bool,
    /// What it becomes when all output is sent.
    after: Option<Outcome>,
    /// What the verdict was, if one was given.
    pub(crate) decided: Option<Decided>,
}

/// What an accepted connection becomes after its verdict.
pub(crate) enum Decided {
    /// The control lane of a new session.
    Session(Box<Pending>),
    /// Lane `lane` of the session that is being made under this number.
    Lane { session: u64, lane: u16 },
    /// Nothing.
    Declined,
}

pub(crate) enum Machine {
    Dialler(Dialler),
    Listener(Listener),
}

/// What a handshake led to.
pub(crate) enum Outcome {
    /// The dialler's side is done.
    Dialled(Established),
    /// A proved dialler said who it is, and a verdict is due.
    Said(Identity),
    /// The verdict was sent.
    Judged,
    /// The peer keeps the session that it dialled itself.
    Needless,
    /// It failed.
    Failed(TransportError),
}

impl Handshaking {
    pub(crate) fn new(stream: Stream, role: Role, name: String, machine: Machine) -> Self {
        let is_connecting = matches!(machine, Machine::Dialler(_));
        Self {
            stream,
            role,
            name,
            machine,
            input: Vec::new(),
            output: Vec::new(),
            is_connecting,
            after: None,
            decided: None,
        }
    }

    /// Whether the other side has not proved itself.
    pub(crate) fn is_unproved(&self) -> bool {
        match &self.machine {
            Machine::Listener(listener) => {
                matches!(listener.awaits(), HandshakeStep::Hello | HandshakeStep::DiallerProof)
            }
            Machine::Dialler(_) => false,
        }
    }

    pub(crate) fn poll_timeout(&self) -> Instant {
        match &self.machine {
            Machine::Dialler(dialler) => dialler.poll_timeout(),
            Machine::Listener(listener) => listener.poll_timeout(),
        }
    }

    pub(crate) fn entry(&self) -> PollFd<'_> {
        let writes = self.is_connecting || !self.output.is_empty();
        PollFd::from_borrowed_fd(self.stream.as_fd(), if writes { PollFlags::OUT } else { PollFlags::IN })
    }

    pub(crate) fn listener(&mut self) -> Option<&mut Listener> {
        match &mut self.machine {
            Machine::Listener(listener) => Some(listener),
            Machine::Dialler(_) => None,
        }
    }

    /// Gives a verdict; [`Outcome::Judged`] follows when it was sent.
    pub(crate) fn judge(&mut self, verdict: &Verdict) {
        if let Machine::Listener(listener) = &mut self.machine {
            listener.judge(verdict);
            self.after = Some(Outcome::Judged);
        }
    }

    /// The handshake is over its deadline.
    pub(crate) fn late(&self) -> TransportError {
        let (peer, step) = (self.name.clone(), self.awaits());
        if self.is_connecting {
            let source = Arc::new(io::Error::from(io::ErrorKind::TimedOut));
            return TransportError::Io { peer, operation: "connect", source };
        }
        refused(&peer, &HandshakeError::Deadline { step })
    }

    /// Does what can be done without waiting.
    pub(crate) fn turn(&mut self) -> Option<Outcome> {
        self.try_turn().unwrap_or_else(|error| Some(Outcome::Failed(error)))
    }

    fn try_turn(&mut self) -> Result<Option<Outcome>, TransportError> {
        if self.is_connecting {
            match self.stream.is_connected() {
                Ok(true) => self.is_connecting = false,
                Ok(false) => return Ok(None),
                Err(error) => return Err(self.broken("connect", error)),
            }
        }
        loop {
            let output = match &mut self.machine {
                Machine::Dialler(dialler) => dialler.poll_output(),
                Machine::Listener(listener) => listener.poll_output(),
            };
            self.output.extend(output.unwrap_or_default());
            if !self.flush()? {
                return Ok(None);
            }
            if let Some(after) = self.after.take() {
                return Ok(Some(after));
            }
            let wants = self.wants();
            if wants == 0 || !self.fill(wants)? {
                return Ok(None);
            }
            let input = std::mem::take(&mut self.input);
            let peer = self.name.clone();
            match &mut self.machine {
                Machine::Dialler(dialler) => match dialler.feed(&input) {
                    Ok(Step::More) => {}
                    Ok(Step::Said(established)) => return Ok(Some(Outcome::Dialled(established))),
                    Err(HandshakeError::Declined(Declined::Duplicate)) => return Ok(Some(Outcome::Needless)),
                    Err(error) => return Err(refused(&peer, &error)),
                },
                Machine::Listener(listener) => match listener.feed(&input) {
                    Ok(Step::More) => {}
                    Ok(Step::Said(identity)) => return Ok(Some(Outcome::Said(identity))),
                    // The dialler may be owed a word about it.
                    Err(error) => self.after = Some(Outcome::Failed(refused(&peer, &error))),
                },
            }
        }
    }

    fn wants(&self) -> usize {
        match &self.machine {
            Machine::Dialler(dialler) => dialler.wants(),
            Machine::Listener(listener) => listener.wants(),
        }
    }

    fn awaits(&self) -> HandshakeStep {
        match &self.machine {
            Machine::Dialler(dialler) => dialler.awaits(),
            Machine::Listener(listener) => listener.awaits(),
        }
    }

    /// Returns whether all output was sent.
    fn flush(&mut self) -> Result<bool, TransportError> {
        while !self.output.is_empty() {
            match (&self.stream).write(&self.output) {
                Ok(sent) => drop(self.output.drain(..sent)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.broken("write a handshake", error)),
            }
        }
        Ok(true)
    }

    /// Reads up to `wants` bytes in all and no more; returns whether they are there.
    fn fill(&mut self, wants: usize) -> Result<bool, TransportError> {
        while self.input.len() < wants {
            let got = self.input.len();
            // Grows with what comes, not with what a peer announces.
            self.input.resize(wants.min(got + 4096), 0);
            let result = (&self.stream).read(&mut self.input[got..]);
            self.input.truncate(got + result.as_ref().unwrap_or(&0));
            match result {
                Ok(0) => {
                    let error = HandshakeError::HungUp { step: self.awaits() };
                    return Err(refused(&self.name, &error));
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A listener that holds another key closes with our proof unread; that is a reset here.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    let error = HandshakeError::HungUp { step: self.awaits() };
                    return Err(refused(&self.name, &error));
                }
                Err(error) => return Err(self.broken("read a handshake", error)),
            }
        }
        Ok(true)
    }

    fn broken(&self, operation: &'static str, source: io::Error) -> TransportError {
        TransportError::Io { peer: self.name.clone(), operation, source: Arc::new(source) }
    }
}

fn refused(peer: &str, error: &HandshakeError) -> TransportError {
    let (peer, problem) = (peer.to_owned(), chain(error));
    match error {
        HandshakeError::Proof { .. } | HandshakeError::HungUp { step: HandshakeStep::ListenerProof } => {
            TransportError::Authentication { peer, problem }
        }
        HandshakeError::Busy | HandshakeError::Declined(_) => TransportError::Ended { peer, reason: problem },
        _ => TransportError::Protocol { peer, problem },
    }
}

/// An error and its causes in one line: the cause does not cross into `TransportError`.
fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
