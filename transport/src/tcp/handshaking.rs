//! A connection whose handshake goes on: TLS, where there is TLS, and inside it ours.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use kvferry_protocol::wire::{
    Declined, Dialler, Established, HandshakeError, HandshakeStep, Identity, Introduction, Listener, Step, Verdict,
    VersionRange,
};

use super::pending::Pending;
use super::poller::Interest;
use super::rails::Way;
use super::stream::Stream;
use crate::core::random;
use crate::credentials::Credentials;
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
    deadline: Instant,
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

enum Machine {
    /// TLS comes first: our handshake is bound to its channel.
    Opening {
        opening: Opening,
        credentials: Credentials,
    },
    Dialler(Dialler),
    Listener(Listener),
}

/// How our handshake begins.
pub(crate) enum Opening {
    /// We say who we are.
    Dialler { versions: VersionRange, introduction: Introduction },
    /// We listen, and say so if we are too busy for more.
    Listener { versions: VersionRange, busy: bool },
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
    /// # Errors
    /// [`TransportError`] if TLS cannot begin.
    pub(crate) fn new(
        stream: Stream,
        role: Role,
        name: String,
        opening: Opening,
        credentials: Credentials,
        deadline: Instant,
    ) -> Result<Self, TransportError> {
        let is_connecting = matches!(opening, Opening::Dialler { .. });
        let channel = credentials.tls().map(|tls| if is_connecting { tls.dial() } else { tls.accept() });
        let broken =
            |source| TransportError::Io { peer: name.clone(), operation: "begin TLS", source: Arc::new(source) };
        let stream = match channel.transpose().map_err(broken)? {
            Some(channel) => stream.within(channel),
            None => stream,
        };
        Ok(Self {
            stream,
            role,
            name,
            machine: Machine::Opening { opening, credentials },
            deadline,
            input: Vec::new(),
            output: Vec::new(),
            is_connecting,
            after: None,
            decided: None,
        })
    }

    /// Whether the other side has not proved itself.
    pub(crate) fn is_unproved(&self) -> bool {
        match &self.machine {
            Machine::Listener(listener) => {
                matches!(listener.awaits(), HandshakeStep::Hello | HandshakeStep::DiallerProof)
            }
            Machine::Opening { opening, .. } => matches!(opening, Opening::Listener { .. }),
            Machine::Dialler(_) => false,
        }
    }

    pub(crate) fn poll_timeout(&self) -> Instant {
        self.deadline
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// What of its socket to wait for.
    pub(crate) fn interest(&self) -> Interest {
        let write = self.is_connecting || !self.output.is_empty() || self.stream.has_unsent();
        Interest { read: !write, write }
    }

    pub(crate) fn listener(&mut self) -> Option<&mut Listener> {
        match &mut self.machine {
            Machine::Listener(listener) => Some(listener),
            Machine::Dialler(_) | Machine::Opening { .. } => None,
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
        if matches!(self.machine, Machine::Opening { .. }) && self.stream.is_tls() {
            let problem = "TLS did not come up within the deadline".to_owned();
            return TransportError::Protocol { peer, problem };
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
        if let Machine::Opening { .. } = self.machine
            && !self.open()?
        {
            return Ok(None);
        }
        loop {
            let output = match &mut self.machine {
                Machine::Dialler(dialler) => dialler.poll_output(),
                Machine::Listener(listener) => listener.poll_output(),
                Machine::Opening { .. } => None,
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
            match &mut self.machine {
                Machine::Dialler(dialler) => match dialler.feed(&input) {
                    Ok(Step::More) => {}
                    Ok(Step::Said(established)) => return Ok(Some(Outcome::Dialled(established))),
                    Err(HandshakeError::Declined(Declined::Duplicate)) => return Ok(Some(Outcome::Needless)),
                    Err(error) => return Err(self.misheard(&input, &error)),
                },
                Machine::Listener(listener) => match listener.feed(&input) {
                    Ok(Step::More) => {}
                    Ok(Step::Said(identity)) => return Ok(Some(Outcome::Said(identity))),
                    // The dialler may be owed a word about it.
                    Err(error) => self.after = Some(Outcome::Failed(self.misheard(&input, &error))),
                },
                Machine::Opening { .. } => return Ok(None),
            }
        }
    }

    /// Lets TLS shake hands, and begins our own inside it; returns whether that was begun.
    fn open(&mut self) -> Result<bool, TransportError> {
        match self.stream.shake() {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(error) => return Err(self.unopened(error)),
        }
        let Machine::Opening { opening, credentials } = &mut self.machine else { return Ok(true) };
        let keys = self.stream.secret().map(|channel| credentials.keys(channel.as_ref()));
        let machine = match (keys, opening) {
            (Ok(Some(keys)), Opening::Dialler { versions, introduction }) => {
                let (own, introduction) = (keys.own().clone(), introduction.clone());
                Machine::Dialler(Dialler::new(own, *versions, introduction, random(), self.deadline))
            }
            (Ok(Some(keys)), Opening::Listener { versions, busy }) => {
                Machine::Listener(Listener::new(keys, *versions, random(), self.deadline, *busy))
            }
            (Ok(None), _) => return Err(self.broken("begin a handshake", io::ErrorKind::InvalidInput.into())),
            (Err(error), _) => return Err(self.broken("begin a handshake", error)),
        };
        self.machine = machine;
        Ok(true)
    }

    /// Why there is no channel.
    fn unopened(&self, error: io::Error) -> TransportError {
        match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                let problem = "it hung up before TLS was up: a node without certificates does so".to_owned();
                TransportError::Protocol { peer: self.name.clone(), problem }
            }
            _ => self.broken("TLS", error),
        }
    }

    /// What the other side said is no handshake. It may be TLS, whose records begin with their type and version.
    fn misheard(&self, input: &[u8], error: &HandshakeError) -> TransportError {
        if self.is_foreign(input) {
            return self.encrypted();
        }
        refused(&self.name, error)
    }

    fn is_foreign(&self, input: &[u8]) -> bool {
        !self.stream.is_tls() && matches!(input, [0x15 | 0x16, 3, ..])
    }

    fn encrypted(&self) -> TransportError {
        let problem = "it speaks TLS, and this node has no certificates: give both some, or neither".to_owned();
        TransportError::Protocol { peer: self.name.clone(), problem }
    }

    fn wants(&self) -> usize {
        match &self.machine {
            Machine::Opening { .. } => 0,
            Machine::Dialler(dialler) => dialler.wants(),
            Machine::Listener(listener) => listener.wants(),
        }
    }

    fn awaits(&self) -> HandshakeStep {
        match &self.machine {
            Machine::Opening { opening: Opening::Dialler { .. }, .. } => HandshakeStep::Challenge,
            Machine::Opening { opening: Opening::Listener { .. }, .. } => HandshakeStep::Hello,
            Machine::Dialler(dialler) => dialler.awaits(),
            Machine::Listener(listener) => listener.awaits(),
        }
    }

    /// Returns whether all output was sent.
    fn flush(&mut self) -> Result<bool, TransportError> {
        while !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(sent) => drop(self.output.drain(..sent)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.broken("write a handshake", error)),
            }
        }
        self.stream.push().map_err(|error| self.broken("write a handshake", error))
    }

    /// Reads up to `wants` bytes in all and no more; returns whether they are there.
    fn fill(&mut self, wants: usize) -> Result<bool, TransportError> {
        while self.input.len() < wants {
            let got = self.input.len();
            // Grows with what comes, not with what a peer announces.
            self.input.resize(wants.min(got + 4096), 0);
            let result = self.stream.read(&mut self.input[got..]);
            self.input.truncate(got + result.as_ref().unwrap_or(&0));
            match result {
                Ok(0) => return Err(self.hung_up()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A listener that holds another key closes with our proof unread; that is a reset here.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Err(self.hung_up()),
                Err(error) => return Err(self.broken("read a handshake", error)),
            }
        }
        Ok(true)
    }

    fn hung_up(&self) -> TransportError {
        let step = self.awaits();
        if self.is_foreign(&self.input) {
            return self.encrypted();
        }
        if self.stream.is_tls() && step == HandshakeStep::Challenge {
            let problem = "it hung up when TLS was up: it does so when it refuses our certificate".to_owned();
            return TransportError::Authentication { peer: self.name.clone(), problem };
        }
        refused(&self.name, &HandshakeError::HungUp { step })
    }

    fn broken(&self, operation: &'static str, source: io::Error) -> TransportError {
        let peer = self.name.clone();
        match source.kind() {
            io::ErrorKind::PermissionDenied => TransportError::Authentication { peer, problem: source.to_string() },
            io::ErrorKind::InvalidData => TransportError::Protocol { peer, problem: source.to_string() },
            _ => TransportError::Io { peer, operation, source: Arc::new(source) },
        }
    }
}

fn refused(peer: &str, error: &HandshakeError) -> TransportError {
    let (peer, problem) = (peer.to_owned(), chain(error));
    match error {
        HandshakeError::Proof { .. }
        | HandshakeError::HungUp { step: HandshakeStep::ListenerProof }
        | HandshakeError::Declined(Declined::Unnamed) => TransportError::Authentication { peer, problem },
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
