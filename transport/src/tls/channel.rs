//! One connection's TLS: what goes in as runs of memory comes out as records, and the other way round. Never waits.
//!
//! A record is at most 16 KiB, so its bytes are copied on the way: out of the source into a record of its own, and out of the
//! record into the target. The target's guard is held by the caller, around one call, as around a system call without TLS.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io::{self, BufRead, IoSlice, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kvferry_protocol::EngineId;
use kvferry_protocol::wire::ChannelSecret;
use rustls::{AlertDescription, CertificateError, Connection, Error, ProtocolVersion};

use super::identity::PROTOCOL;
use super::verify::names;
use super::{Broken, TlsNames};
use crate::ffi;
use crate::raw::{RawRun, copy};
use crate::tcp::Socket;

/// Plaintext of one record, at most.
const RECORD_BYTES: usize = 16 << 10;
/// Records that wait for the socket; one system call takes up to 64 of them.
const OUTPUT_BYTES: usize = 256 << 10;
/// What one call moves, at most.
const CALL_BYTES: usize = 256 << 10;
/// How much is read from the socket at once, at first and when the socket has shown that there is more.
const FIRST_INPUT_BYTES: usize = 4 << 10;
const INPUT_BYTES: usize = 128 << 10;
/// Descriptors that came and were not asked for yet: a sender has the bytes of one share out before it begins the next.
const MAX_FILES: usize = 2;

pub(crate) struct Channel {
    connection: Connection,
    names: TlsNames,
    /// Records that came: `input[start..end]`.
    input: Vec<u8>,
    start: usize,
    end: usize,
    /// Where the plaintext of one record is put together.
    record: Vec<u8>,
    /// A descriptor that goes with the next bytes.
    file: Option<OwnedFd>,
    files: VecDeque<OwnedFd>,
}

impl Channel {
    pub(super) fn new(mut connection: Connection, names: TlsNames) -> Self {
        connection.set_buffer_limit(Some(OUTPUT_BYTES));
        let (input, record, files) = Default::default();
        Self { connection, names, input, start: 0, end: 0, record, file: None, files }
    }

    /// Lets the TLS handshake go on; returns whether it is over.
    ///
    /// # Errors
    /// Of kind `PermissionDenied` if one side does not take the other's certificate, `InvalidData` if what comes is not TLS.
    pub(crate) fn shake(&mut self, socket: &Socket) -> io::Result<bool> {
        loop {
            let is_sent = self.push(socket)?;
            if !self.connection.is_handshaking() {
                self.check()?;
                return Ok(true);
            }
            if !is_sent {
                return Ok(false);
            }
            if self.start == self.end {
                match self.fill(socket) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                    Err(error) => return Err(error),
                }
            }
            self.feed(socket)?;
        }
    }

    fn check(&self) -> io::Result<()> {
        if self.connection.alpn_protocol() != Some(PROTOCOL) {
            return Err(refusal("the other side does not say that it speaks kvferry".to_owned()));
        }
        if self.connection.protocol_version() != Some(ProtocolVersion::TLSv1_3) {
            return Err(refusal("the other side does not speak TLS 1.3".to_owned()));
        }
        match self.connection.peer_certificates() {
            Some([_, ..]) => Ok(()),
            _ => Err(refusal("the other side showed no certificate".to_owned())),
        }
    }

    /// What only the two ends of this channel know. After the handshake.
    pub(crate) fn secret(&self) -> io::Result<ChannelSecret> {
        let exported = self.connection.export_keying_material([0; 32], ChannelSecret::LABEL, None);
        exported.map(ChannelSecret::new).map_err(|error| broken(&error))
    }

    /// Whether the peer may be this engine, by its certificate.
    pub(crate) fn names(&self, engine: &EngineId) -> bool {
        match (self.names, self.connection.peer_certificates()) {
            (TlsNames::Any, _) => true,
            (TlsNames::Engine, Some([certificate, ..])) => names(certificate, engine),
            (TlsNames::Engine, _) => false,
        }
    }

    /// Takes bytes to send; returns how many. They may still be here when it returns ([`Channel::has_unsent`]).
    pub(crate) fn send(&mut self, socket: &Socket, runs: &[RawRun]) -> io::Result<usize> {
        self.push(socket)?;
        let taken = self.encrypt(runs)?;
        self.push(socket)?;
        match taken {
            0 if runs.iter().any(|run| run.bytes() > 0) => Err(io::ErrorKind::WouldBlock.into()),
            taken => Ok(taken),
        }
    }

    /// Takes bytes to send, all or none, with a descriptor that is there when they are read.
    pub(crate) fn send_file(&mut self, socket: &Socket, bytes: &[u8], file: BorrowedFd<'_>) -> io::Result<usize> {
        // Nothing may be on its way: a receiver holds few descriptors whose bytes it has not read.
        if !self.push(socket)? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.file = Some(file.try_clone_to_owned()?);
        let taken = self.encrypt(&[RawRun::of(bytes)])?;
        self.push(socket)?;
        Ok(taken)
    }

    /// Copies bytes into the runs as far as they came; 0 at the end of the stream.
    ///
    /// # Errors
    /// Of kind `WouldBlock` only if nothing more can be taken out of what came.
    pub(crate) fn receive(&mut self, socket: &Socket, runs: &[RawRun]) -> io::Result<usize> {
        let mut place = Place { runs, at: 0, within: 0 };
        let mut got = 0;
        loop {
            got += self.take(&mut place);
            if place.is_full() || (self.start == self.end && got >= CALL_BYTES) {
                return Ok(got);
            }
            if self.start == self.end {
                match self.fill(socket) {
                    Ok(0) => return Ok(got),
                    Ok(_) => {}
                    // Errors stay; they are met again by a call that has nothing to give.
                    Err(_) if got > 0 => return Ok(got),
                    Err(error) => return Err(error),
                }
            }
            if !self.feed(socket)? {
                return Ok(got);
            }
        }
    }

    /// The descriptor that came first of those that were not taken.
    pub(crate) fn take_file(&mut self) -> Option<OwnedFd> {
        self.files.pop_front()
    }

    /// Whether records wait for the socket to take them.
    pub(crate) fn has_unsent(&self) -> bool {
        self.connection.wants_write()
    }

    /// Gives the socket what waits; returns whether it took all.
    pub(crate) fn push(&mut self, socket: &Socket) -> io::Result<bool> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut Wire { socket, file: &mut self.file }) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.last_word(socket).unwrap_or(error)),
            }
        }
        Ok(true)
    }

    /// Says that nothing follows, if that can be said without waiting.
    pub(crate) fn finish(&mut self, socket: &Socket) {
        self.connection.send_close_notify();
        // The peer also learns it from the connection's end.
        let _ = self.push(socket);
    }

    /// Why the peer closed, if it said so before it did.
    fn last_word(&mut self, socket: &Socket) -> Option<io::Error> {
        while self.start < self.end || self.fill(socket).is_ok_and(|got| got > 0) {
            match self.feed(socket) {
                Ok(true) => self.take(&mut Place { runs: &[], at: 0, within: 0 }),
                Ok(false) => return None,
                Err(error) => return Some(error),
            };
            if !self.connection.wants_read() {
                return None; // data, which nobody takes here
            }
        }
        None
    }

    fn encrypt(&mut self, runs: &[RawRun]) -> io::Result<usize> {
        if self.record.is_empty() {
            self.record = vec![0; RECORD_BYTES];
        }
        let (mut taken, mut from) = (0, Place { runs, at: 0, within: 0 });
        while taken < CALL_BYTES {
            let mut bytes = 0;
            while let (Some(run), true) = (from.rest(), bytes < RECORD_BYTES) {
                let into = RawRun::of_mut(&mut self.record[bytes..]);
                copy(run, into);
                let copied = run.bytes().min(into.bytes());
                from.advance(copied);
                bytes += copied;
            }
            if bytes == 0 {
                break;
            }
            let accepted = self.connection.writer().write(&self.record[..bytes])?;
            taken += accepted;
            if accepted < bytes {
                break;
            }
        }
        Ok(taken)
    }

    fn take(&mut self, place: &mut Place<'_>) -> usize {
        let mut taken = 0;
        while let Some(run) = place.rest() {
            let mut reader = self.connection.reader();
            // The errors say that there is nothing, or nothing any more, which `fill` and `feed` find out.
            let Ok(chunk) = reader.fill_buf() else { break };
            if chunk.is_empty() {
                break;
            }
            copy(RawRun::of(chunk), run);
            let copied = chunk.len().min(run.bytes());
            reader.consume(copied);
            place.advance(copied);
            taken += copied;
        }
        taken
    }

    /// Reads records from the socket. Everything that was read before has been fed.
    fn fill(&mut self, socket: &Socket) -> io::Result<usize> {
        let bytes = match self.input.len() {
            0 => FIRST_INPUT_BYTES,
            all if self.end == all => INPUT_BYTES,
            all => all,
        };
        self.input.resize(bytes, 0);
        (self.start, self.end) = (0, 0);
        loop {
            let got = if socket.is_unix() {
                let mut file = None;
                let got = ffi::receive_with_file(socket.as_fd(), &mut self.input, &mut file);
                self.files.extend(file);
                if self.files.len() > MAX_FILES {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "more descriptors than shares"));
                }
                got
            } else {
                ffi::receive_runs(socket.as_fd(), &[RawRun::of_mut(&mut self.input)])
            };
            match got {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                got => {
                    self.end = *got.as_ref().unwrap_or(&0);
                    return got;
                }
            }
        }
    }

    /// Feeds some of what was read; returns whether there is any sense in more.
    fn feed(&mut self, socket: &Socket) -> io::Result<bool> {
        let mut rest = &self.input[self.start..self.end];
        let before = rest.len();
        self.connection.read_tls(&mut rest)?;
        self.start += before - rest.len();
        if before == rest.len() {
            // It takes nothing after the peer's word that nothing follows.
            self.start = self.end;
            return Ok(false);
        }
        match self.connection.process_new_packets() {
            Ok(_) => Ok(true),
            Err(error) => {
                // What TLS has to say about it; the connection ends with it either way.
                let _ = self.connection.write_tls(&mut Wire { socket, file: &mut None });
                Err(broken(&error))
            }
        }
    }
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Channel").field("names", &self.names).finish_non_exhaustive()
    }
}

/// A place in a list of runs.
struct Place<'a> {
    runs: &'a [RawRun],
    at: usize,
    within: usize,
}

impl Place<'_> {
    /// What is left of the run that it is in.
    fn rest(&mut self) -> Option<RawRun> {
        while let Some(run) = self.runs.get(self.at) {
            if self.within < run.bytes() {
                return Some(run.skip(self.within));
            }
            (self.at, self.within) = (self.at + 1, 0);
        }
        None
    }

    fn advance(&mut self, bytes: usize) {
        self.within += bytes;
    }

    fn is_full(&mut self) -> bool {
        self.rest().is_none()
    }
}

/// Where records go.
struct Wire<'a> {
    socket: &'a Socket,
    file: &'a mut Option<OwnedFd>,
}

impl Write for Wire<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let fd = self.socket.as_fd();
        if let (Some(file), Some(first)) = (&*self.file, slices.first()) {
            let sent = ffi::send_with_file(fd, first, file.as_fd())?;
            *self.file = None;
            return Ok(sent);
        }
        let runs: Vec<RawRun> = slices.iter().map(|slice| RawRun::of(slice)).collect();
        ffi::send_runs(fd, &runs)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn refusal(problem: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, Broken(problem))
}

/// What a TLS error means here: who refused whom, and why.
fn broken(error: &Error) -> io::Error {
    use AlertDescription as Alert;
    let mend = match error {
        Error::InvalidCertificate(CertificateError::UnknownIssuer) => {
            "its certificate is not from an authority of ours"
        }
        Error::InvalidCertificate(_) => "its certificate is refused",
        Error::NoCertificatesPresented | Error::AlertReceived(Alert::CertificateRequired) => "a certificate is missing",
        Error::AlertReceived(Alert::UnknownCA) => "our certificate is not from an authority of its own",
        Error::AlertReceived(Alert::CertificateExpired) => "our certificate has expired, or is not in force yet, there",
        Error::AlertReceived(
            Alert::BadCertificate | Alert::CertificateRevoked | Alert::CertificateUnknown | Alert::AccessDenied,
        ) => "it refuses our certificate",
        Error::NoApplicationProtocol | Error::AlertReceived(Alert::NoApplicationProtocol) => {
            "one of the two does not speak kvferry"
        }
        Error::InvalidMessage(_) => {
            let problem = format!("what comes is not TLS ({error}): give both nodes certificates, or neither");
            return io::Error::new(io::ErrorKind::InvalidData, Broken(problem));
        }
        _ => return io::Error::new(io::ErrorKind::InvalidData, Broken(error.to_string())),
    };
    refusal(format!("{mend} ({error})"))
}
