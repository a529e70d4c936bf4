//! The control lane of a session that is up: messages, keep-alives, the session's end.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvferry_protocol::wire::{FrameHeader, FrameKind, MAX_GOODBYE_BYTES, Refusal};

use super::coming::Coming;
use super::poller::Interest;
use super::session::Session;
use super::stream::Stream;
use super::verbs_words::VerbsWord;
use crate::api::{Event, GrantKey};
use crate::core::{Core, Recall};
use crate::error::TransportError;

/// How many frames are read before the thread looks at its other peers.
const TURN_FRAMES: usize = 64;
/// The most bytes of answers that wait. A peer that asks for more without reading any does not want them: each turn writes what
/// the socket takes.
const MAX_ANSWER_BYTES: usize = 1 << 20;

pub(crate) struct Control {
    pub(crate) session: Arc<Session>,
    /// Until the session is told.
    pub(crate) coming: Option<Box<Coming>>,
    /// The peer's card for UCX, if it came before this side's end was made.
    pub(crate) card: Option<Vec<u8>>,
    stream: Stream,
    input: Vec<u8>,
    /// The header of the frame whose body is being read.
    header: Option<FrameHeader>,
    output: Vec<u8>,
    sent: usize,
    /// Answers that the lane itself owes.
    answers: Vec<FrameHeader>,
    heard_at: Instant,
    /// How many bytes of the lane came.
    heard_bytes: u64,
    pinged_at: Instant,
    /// How long the peer is silent before it is asked.
    quiet: Duration,
    pub(crate) again: bool,
    is_held_back: bool,
    /// Posts ended at the peer's word; lanes may wait for that.
    pub(crate) has_verdicts: bool,
}

impl Control {
    pub(crate) fn new(
        session: Arc<Session>,
        stream: Stream,
        now: Instant,
        keepalive: Duration,
        coming: Coming,
    ) -> Self {
        // One that asks is enough for both: who dialled does. What it hears then is no reason to ask later the next time.
        let quiet = if session.address.is_some() { keepalive / 2 } else { keepalive * 3 / 2 };
        Self {
            session,
            coming: Some(Box::new(coming)),
            card: None,
            stream,
            input: Vec::new(),
            header: None,
            output: Vec::new(),
            sent: 0,
            answers: Vec::new(),
            heard_at: now,
            heard_bytes: 0,
            pinged_at: now,
            quiet,
            again: true,
            is_held_back: false,
            has_verdicts: false,
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// What of its socket to wait for.
    pub(crate) fn interest(&self) -> Interest {
        let write = self.sent < self.output.len() || self.stream.has_unsent();
        Interest { read: !self.is_held_back, write }
    }

    /// Whether it does not listen because nobody polls.
    pub(crate) fn held_back(&self) -> bool {
        self.is_held_back
    }

    /// When something is to be done unprompted.
    pub(crate) fn poll_timeout(&self, keepalive: Duration, stall: Duration) -> Instant {
        let silent_until = self.heard_at + stall;
        self.ping_at(keepalive).min(silent_until)
    }

    /// When the peer is asked whether it is there, if nothing is heard until then.
    fn ping_at(&self, keepalive: Duration) -> Instant {
        (self.pinged_at + keepalive).max(self.heard_at + self.quiet)
    }

    /// Does what can be done without waiting.
    ///
    /// # Errors
    /// [`TransportError`] if the session is over.
    pub(crate) fn turn(
        &mut self,
        core: &Core,
        now: Instant,
        keepalive: Duration,
        stall: Duration,
        hold: Duration,
    ) -> Result<(), TransportError> {
        self.again = false;
        self.read(core, now)?;
        if self.session.is_in_place
            && let Some(before) = now.checked_sub(hold)
        {
            self.session.ask_back(core, &self.session.outbox.recall(Recall::HeldSince(before)));
        }
        self.check_time(now, keepalive, stall)?;
        self.write()
    }

    fn check_time(&mut self, now: Instant, keepalive: Duration, stall: Duration) -> Result<(), TransportError> {
        let stalled = |operation, waited: Duration| {
            let waited_ms = waited.as_millis() as u64;
            Err(TransportError::Stalled { peer: self.session.name.clone(), operation, waited_ms })
        };
        let silent = now.saturating_duration_since(self.heard_at);
        if self.is_held_back {
            self.heard_at = now; // it is we who do not listen
        } else if silent >= stall {
            return stalled("the control lane", silent);
        }
        let idle = self.session.idle_for(now);
        if idle >= stall
            && self.session.outbox.oldest_post().is_some_and(|at| now.saturating_duration_since(at) >= stall)
        {
            return stalled("the writes to it", idle);
        }
        if now >= self.ping_at(keepalive) {
            self.pinged_at = now;
            self.answer(FrameHeader::empty(FrameKind::Ping));
        }
        Ok(())
    }

    fn read(&mut self, core: &Core, now: Instant) -> Result<(), TransportError> {
        for _ in 0..TURN_FRAMES {
            // A message waits for room, and until the session is told. What else comes makes no event or ends something, and somebody
            // who would poll may wait for it: for the peer's word about a fence.
            let is_early = self.coming.is_some() || core.events.is_full();
            self.is_held_back = is_early && self.header.is_some_and(|header| header.kind == FrameKind::Message);
            if self.is_held_back {
                return Ok(());
            }
            let wants = self.header.map_or(FrameHeader::BYTES, |header| header.table_bytes as usize);
            if !self.fill(wants, now)? {
                return Ok(());
            }
            let input = std::mem::take(&mut self.input);
            match self.header.take() {
                Some(header) => self.take(core, &header, input)?,
                None => {
                    let bytes = input.first_chunk().ok_or_else(|| self.wrong("a short header".to_owned()))?;
                    let header = FrameHeader::decode(bytes, self.session.version);
                    let header = header.map_err(|error| self.wrong(error.to_string()))?;
                    if header.table_bytes > 0 || header.kind == FrameKind::Message {
                        self.header = Some(header);
                    } else {
                        self.take(core, &header, Vec::new())?;
                    }
                }
            }
        }
        self.again = true;
        self.check_answers()
    }

    fn check_answers(&self) -> Result<(), TransportError> {
        let (found, limit) = ((self.answers.len() * FrameHeader::BYTES) as u64, MAX_ANSWER_BYTES as u64);
        if found <= limit {
            return Ok(());
        }
        Err(TransportError::Limit { what: "bytes of answers that the peer does not read", found, limit })
    }

    fn take(&mut self, core: &Core, header: &FrameHeader, body: Vec<u8>) -> Result<(), TransportError> {
        header.check_table(&body).map_err(|error| self.wrong(error.to_string()))?;
        let session = Arc::clone(&self.session);
        match header.kind {
            FrameKind::Message => {
                core.events.push(Event::Message { peer: session.peer.clone(), message: Bytes::from(body) });
            }
            FrameKind::Ping => {
                self.check_place(header)?;
                self.answer(FrameHeader::empty(FrameKind::Pong));
            }
            FrameKind::Pong => self.check_place(header)?,
            FrameKind::Ack | FrameKind::Refuse => {
                session.verdict(core, header.grant, header.sequence, header.refusal);
                self.has_verdicts = true;
            }
            FrameKind::Cancel => {
                let grant = core.grants.find(header.grant, session.key);
                let is_complete = grant.is_some_and(|grant| grant.cancel(header.sequence));
                // After the cancel: a lane that was giving it out has done so.
                if let Some(is_new) = session.recall_held(header.grant, header.sequence) {
                    self.recalled(core, header, is_new);
                    return Ok(());
                }
                let word = if is_complete {
                    FrameHeader::about(FrameKind::Ack, None, header.grant, header.sequence)
                } else {
                    let refusal = Some(Refusal::Cancelled);
                    FrameHeader::about(FrameKind::Refuse, refusal, header.grant, header.sequence)
                };
                self.answer(word);
            }
            FrameKind::Recall => {
                if let Some(is_new) = session.recall_held(header.grant, header.sequence) {
                    self.recalled(core, header, is_new);
                }
            }
            FrameKind::Held => return Err(self.wrong("a Held frame on the control lane".to_owned())),
            FrameKind::Goodbye => {
                let reason = String::from_utf8_lossy(&body).chars().filter(|c| !c.is_control()).collect();
                return Err(TransportError::Ended { peer: session.name.clone(), reason });
            }
            FrameKind::Path => {
                let word = VerbsWord::decode(&body).map_err(|problem| self.wrong(problem.to_owned()))?;
                let verbs = session.rdma.as_ref();
                verbs
                    .ok_or_else(|| self.wrong("a word of a path that is not taken".to_owned()))?
                    .hear(session.key, word);
            }
            FrameKind::Card => match session.ucx.get() {
                Some(lane) => lane.take_card(body).map_err(|error| self.wrong(error.to_string()))?,
                // This side is not so far, or makes no link.
                None => self.card = Some(body),
            },
            FrameKind::Data | FrameKind::Lend | FrameKind::Share | FrameKind::Mapped => {
                return Err(self.wrong(format!("a {:?} frame on the control lane", header.kind)));
            }
        }
        Ok(())
    }

    /// Whether all of the lane came that was sent before a ping or a pong. What was lost nobody would send again: a write's end, a verdict.
    fn check_place(&self, header: &FrameHeader) -> Result<(), TransportError> {
        let (sent, came) = (header.write_bytes, self.heard_bytes - FrameHeader::BYTES as u64);
        if sent == 0 || sent == came {
            return Ok(());
        }
        let problem =
            format!("{sent} bytes were sent on it and {came} came: something between the two hosts loses bytes");
        Err(self.broken("read the control lane", io::Error::new(io::ErrorKind::InvalidData, problem)))
    }

    /// The answer is given when who holds the write lets go.
    fn recalled(&self, core: &Core, header: &FrameHeader, is_new: bool) {
        if is_new {
            let (peer, grant, sequence) = (self.session.peer.clone(), GrantKey(header.grant), header.sequence);
            core.events.push(Event::Recalled { peer, grant, sequence });
        }
    }

    fn answer(&mut self, header: FrameHeader) {
        self.answers.push(header);
    }

    fn write(&mut self) -> Result<(), TransportError> {
        self.stream.push().map_err(|error| self.broken("write the control lane", error))?;
        loop {
            if self.sent == self.output.len() {
                self.sent = 0;
                self.output.clear();
                match self.session.next_control(&mut self.answers) {
                    Some(next) => self.output = next,
                    None => return Ok(()),
                }
            }
            match self.stream.write(&self.output[self.sent..]) {
                Ok(sent) => self.sent += sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.broken("write the control lane", error)),
            }
        }
    }

    fn fill(&mut self, wants: usize, now: Instant) -> Result<bool, TransportError> {
        while self.input.len() < wants {
            let got = self.input.len();
            self.input.resize(wants, 0);
            let result = self.stream.read(&mut self.input[got..]);
            self.input.truncate(got + result.as_ref().unwrap_or(&0));
            match result {
                Ok(0) => return Err(self.broken("read the control lane", io::ErrorKind::UnexpectedEof.into())),
                Ok(read) => (self.heard_at, self.heard_bytes) = (now, self.heard_bytes + read as u64),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.broken("read the control lane", error)),
            }
        }
        Ok(true)
    }

    /// Says why the session ends, if that can be said without waiting, and closes the lane.
    pub(crate) fn close(mut self, reason: Option<&str>) {
        if let Some(reason) = reason {
            self.session.queue_goodbye(&reason[..reason.floor_char_boundary(MAX_GOODBYE_BYTES)]);
            // The peer also learns it from the connection's end.
            let _ = self.write();
        }
        self.stream.finish();
    }

    fn wrong(&self, problem: String) -> TransportError {
        TransportError::Protocol { peer: self.session.name.clone(), problem }
    }

    pub(crate) fn broken(&self, operation: &'static str, source: io::Error) -> TransportError {
        TransportError::Io { peer: self.session.name.clone(), operation, source: Arc::new(source) }
    }
}
