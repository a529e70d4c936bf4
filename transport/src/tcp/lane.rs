//! One data lane: frames out, frames in, on one connection. Never waits.
//!
//! Out: `Empty -> Words | Frame -> Empty`. In: `Header -> Table -> Payload | Copy | Sink -> Header`. A frame that lends its payload is
//! sent as its head alone; its receiver copies the payload in pieces (`Copy`).

mod allowance;
mod lending;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use kvferry_protocol::wire::{FrameHeader, FrameKind, Loan, Refusal, WireError};

use allowance::Allowance;

use super::data::Wants;
use super::poller::Interest;
use super::session::Session;
use super::stream::Stream;
use crate::api::GrantKey;
use crate::core::{Carrier, Core, Counters, FrameCut, Inbound, Planted, not_by_processors};
use crate::error::TransportError;
use crate::ffi;
use crate::raw::{RawRun, advance};
use crate::share::Borrowed;

/// A read or write that moved less than it could have, and less than this, was the last for now.
const RETRY_BYTES: usize = 32 << 10;
/// What a frame under a dead grant is read into, and what the rest of a cancelled frame is sent from.
const SCRAP_BYTES: usize = 64 << 10;
/// Acknowledgements that wait before the lane stops reading.
const MAX_WORDS_BYTES: usize = 256 << 10;

static ZEROES: [u8; SCRAP_BYTES] = [0; SCRAP_BYTES];

pub(crate) struct Lane {
    pub(crate) session: Arc<Session>,
    stream: Stream,
    /// Whether it is the one that tells the peer which memory is shared.
    tells: bool,
    /// A descriptor that came with the header that was read last.
    file: Option<OwnedFd>,
    /// Acknowledgements and refusals to send.
    words: Vec<u8>,
    outgoing: Outgoing,
    incoming: Incoming,
    scratch: Vec<RawRun>,
    /// What to wait for.
    pub(crate) wants: Wants,
    /// Which directions are worth a system call.
    pub(crate) ready: Ready,
    /// Bytes that were moved since somebody looked.
    moved_bytes: u64,
    reads: Allowance,
    writes: Allowance,
}

/// Which directions of a lane are worth a system call.
#[derive(Clone, Copy)]
pub(crate) struct Ready {
    pub(crate) read: bool,
    pub(crate) write: bool,
}

enum Outgoing {
    Empty,
    Words { bytes: Vec<u8>, sent: usize, file: Option<Arc<OwnedFd>> },
    Frame(Box<FrameOut>),
}

struct FrameOut {
    cut: FrameCut,
    runs: Vec<RawRun>,
    next: usize,
    sent: u64,
    total: u64,
    /// Lent payload that the link's rate has not let go yet.
    owed: u64,
}

enum Incoming {
    Header { bytes: [u8; FrameHeader::BYTES], got: usize },
    Table { header: FrameHeader, table: Vec<u8>, got: usize },
    Payload { header: FrameHeader, inbound: Box<Inbound> },
    Copy { header: FrameHeader, inbound: Box<Inbound>, borrowed: Box<Borrowed> },
    Sink { left: u64 },
}

const NO_HEADER: Incoming = Incoming::Header { bytes: [0; FrameHeader::BYTES], got: 0 };

/// What one step led to.
enum Turn {
    /// There may be more.
    Moved,
    /// The socket has no more, or takes no more.
    Blocked,
    /// The receiver has to say something first, on the control lane.
    Held,
    Nothing,
}

/// What one system call moved, and what it could have.
struct Call {
    result: io::Result<usize>,
    asked: usize,
}

impl Call {
    fn new(result: io::Result<usize>, asked: usize) -> Self {
        Self { result, asked }
    }

    fn bytes(&self) -> usize {
        *self.result.as_ref().unwrap_or(&0)
    }
}

impl Lane {
    pub(crate) fn new(session: Arc<Session>, stream: Stream, tells: bool) -> Self {
        let session_shares = session.sharing.is_some();
        Self {
            session,
            stream,
            tells: tells && session_shares,
            file: None,
            words: Vec::new(),
            outgoing: Outgoing::Empty,
            incoming: NO_HEADER,
            scratch: Vec::new(),
            wants: Wants::default(),
            ready: Ready { read: true, write: true },
            moved_bytes: 0,
            reads: Allowance::default(),
            writes: Allowance::default(),
        }
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Does what can be done in a round's turn without waiting, and says what to wait for.
    ///
    /// # Errors
    /// [`TransportError`] if the lane broke; the session ends with it.
    pub(crate) fn turn(
        &mut self,
        core: &Core,
        sink: &mut [u8],
        frame_bytes: u64,
        round: u64,
    ) -> Result<(), TransportError> {
        self.wants = Wants { of_socket: Interest::READ, ..Wants::default() };
        self.reads.begin(round);
        while self.ready.read {
            if core.events.is_full() {
                self.wants.room = true;
                break;
            }
            // Goes on below if the words go out, and else when the socket takes them.
            if self.words.len() > MAX_WORDS_BYTES {
                break;
            }
            if self.reads.is_used_up() {
                self.wants.again = true;
                break;
            }
            let turn = self.receive(core, sink)?;
            self.reads.spend(std::mem::take(&mut self.moved_bytes));
            self.ready.read = matches!(turn, Turn::Moved);
        }
        self.writes.begin(round);
        if self.ready.write {
            self.stream.push().map_err(|error| self.broken("write a data lane", error))?;
        }
        while self.ready.write {
            if self.writes.is_used_up() {
                self.wants.again = true;
                break;
            }
            let turn = self.send(core, frame_bytes)?;
            self.writes.spend(std::mem::take(&mut self.moved_bytes));
            match turn {
                Turn::Moved => {}
                Turn::Blocked => {
                    self.ready.write = self.wants.at.is_some();
                    break;
                }
                // Called by a new post, or by the receiver's word.
                Turn::Held | Turn::Nothing => break,
            }
        }
        let is_stopped = self.words.len() > MAX_WORDS_BYTES;
        // Reading stopped for words that are gone.
        self.wants.again |= self.ready.read && !self.wants.room && !is_stopped;
        // What TLS holds back goes out when the socket takes it, also if there is nothing more to send.
        let write = !self.ready.write || self.stream.has_unsent();
        self.wants.of_socket = Interest { read: !self.wants.room && !is_stopped, write };
        Ok(())
    }

    fn send(&mut self, core: &Core, frame_bytes: u64) -> Result<Turn, TransportError> {
        if matches!(self.outgoing, Outgoing::Empty) {
            if !self.words.is_empty() {
                self.outgoing = Outgoing::Words { bytes: std::mem::take(&mut self.words), sent: 0, file: None };
            } else if let Some(share) = self.next_share(core) {
                self.outgoing = share;
            } else if self.session.ucx_carries() {
                return Ok(Turn::Nothing);
            } else if let Some(cut) = self.session.next_frame(core, frame_bytes) {
                self.outgoing = self.frame_of(core, cut);
            } else {
                return Ok(Turn::Nothing);
            }
        }
        let stream = &mut self.stream;
        let call = match &mut self.outgoing {
            Outgoing::Empty => return Ok(Turn::Moved), // what there was has ended
            Outgoing::Words { bytes, sent, file } => {
                let asked = bytes.len() - *sent;
                let result = match file {
                    Some(file) if *sent == 0 => stream.send_with_file(bytes, file.as_fd()),
                    _ => stream.send_runs(&[RawRun::of(&bytes[*sent..])]),
                };
                let call = Call::new(result, asked);
                *sent += call.bytes();
                if call.bytes() == asked {
                    self.outgoing = Outgoing::Empty;
                }
                call
            }
            Outgoing::Frame(frame) => {
                if let Err(at) = frame.pay(&self.session) {
                    self.wants.at = Some(at);
                    return Ok(Turn::Blocked);
                }
                if frame.is_held() && !core.bug.is(Planted::FillerAtOnce) {
                    return Ok(Turn::Held);
                }
                let left = frame.total - frame.sent;
                let allowed = match allow(&self.session, left) {
                    Ok(allowed) => allowed,
                    Err(at) => {
                        self.wants.at = Some(at);
                        return Ok(Turn::Blocked);
                    }
                };
                let Some(result) = frame.send(stream, allowed) else {
                    refund(&self.session, allowed);
                    self.outgoing = Outgoing::Empty;
                    return Ok(Turn::Moved);
                };
                let call = Call::new(result, allowed as usize);
                let sent = call.bytes() as u64;
                refund(&self.session, allowed - sent);
                Counters::add(&core.counters.sent_bytes, frame.count_payload(sent));
                if frame.sent == frame.total {
                    if frame.cut.is_lent && !frame.cut.post.is_in_place {
                        Counters::add(&core.counters.sent_bytes, frame.cut.payload_bytes);
                        Counters::add(&core.counters.lent_bytes, frame.cut.payload_bytes);
                    }
                    self.outgoing = Outgoing::Empty;
                }
                call
            }
        };
        self.moved("write a data lane", call)
    }

    /// What to send of a frame: nothing of a device's memory, which is not cut for lanes, and whose post would end here.
    fn frame_of(&self, core: &Core, cut: FrameCut) -> Outgoing {
        let (grant, sequence) = (cut.post.grant, cut.post.sequence);
        if let Some(frame) = FrameOut::new(cut) {
            return Outgoing::Frame(Box::new(frame));
        }
        self.session.outbox.finish(core, grant, sequence, Err(not_by_processors("the source")));
        Outgoing::Empty
    }

    fn receive(&mut self, core: &Core, sink: &mut [u8]) -> Result<Turn, TransportError> {
        let stream = &mut self.stream;
        let call = match &mut self.incoming {
            Incoming::Header { bytes, got } => {
                let asked = FrameHeader::BYTES - *got;
                let received = match self.session.sharing {
                    Some(_) => stream.receive_with_file(&mut bytes[*got..], &mut self.file),
                    None => stream.receive_runs(&[RawRun::of_mut(&mut bytes[*got..])]),
                };
                let call = Call::new(received, asked);
                *got += call.bytes();
                if *got == FrameHeader::BYTES {
                    let header = FrameHeader::decode(bytes, self.session.version).map_err(|e| self.torn(&e))?;
                    self.begin(core, header)?;
                }
                call
            }
            Incoming::Table { header, table, got } => {
                let asked = table.len() - *got;
                let call = Call::new(stream.receive_runs(&[RawRun::of_mut(&mut table[*got..])]), asked);
                *got += call.bytes();
                if *got == table.len() {
                    let (header, table) = (*header, std::mem::take(table));
                    self.take_table(core, &header, &table)?;
                }
                call
            }
            Incoming::Payload { header, inbound } => {
                let placed = inbound.place(|runs| {
                    let asked = runs.iter().take(ffi::MAX_RUNS).map(|run| run.bytes()).sum();
                    let call = Call::new(stream.receive_runs(runs), asked);
                    (call.bytes(), call)
                });
                let (header, left) = (*header, inbound.left());
                match placed {
                    Ok(call) => {
                        if left == 0 {
                            self.land(core, &header);
                        }
                        call
                    }
                    Err(refusal) => {
                        self.refuse(core, &header, refusal, left);
                        return Ok(Turn::Moved);
                    }
                }
            }
            Incoming::Copy { .. } => return self.copy(core),
            Incoming::Sink { left } => {
                let asked = sink.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                let call = Call::new(stream.receive_runs(&[RawRun::of_mut(&mut sink[..asked])]), asked);
                let dropped = call.bytes() as u64;
                *left -= dropped;
                Counters::add(&core.counters.dropped_bytes, dropped);
                if *left == 0 {
                    self.incoming = NO_HEADER;
                }
                call
            }
        };
        if let Ok(0) = call.result {
            return Err(self.broken("read a data lane", io::ErrorKind::UnexpectedEof.into()));
        }
        self.moved("read a data lane", call)
    }

    fn begin(&mut self, core: &Core, header: FrameHeader) -> Result<(), TransportError> {
        if header.kind != FrameKind::Share {
            self.file = None;
        }
        match header.kind {
            FrameKind::Data | FrameKind::Lend | FrameKind::Share => {
                let table = vec![0; header.table_bytes as usize];
                self.incoming = Incoming::Table { header, table, got: 0 };
                return Ok(());
            }
            FrameKind::Mapped if header.table_bytes > 0 => {
                let table = vec![0; header.table_bytes as usize];
                self.incoming = Incoming::Table { header, table, got: 0 };
                return Ok(());
            }
            FrameKind::Mapped => self.mapped(core, &header, None),
            FrameKind::Ack | FrameKind::Refuse => {
                self.session.verdict(core, header.grant, header.sequence, header.refusal);
            }
            FrameKind::Held if self.session.is_in_place => {
                self.session.outbox.held(core, GrantKey(header.grant), header.sequence);
            }
            other => return Err(self.wrong(format!("a {other:?} frame on a data lane"))),
        }
        self.incoming = NO_HEADER;
        Ok(())
    }

    fn take_table(&mut self, core: &Core, header: &FrameHeader, table: &[u8]) -> Result<(), TransportError> {
        header.check_table(table).map_err(|e| self.torn(&e))?;
        match header.kind {
            FrameKind::Share => {
                self.incoming = NO_HEADER;
                self.take_share(table)
            }
            FrameKind::Mapped => {
                self.incoming = NO_HEADER;
                self.mapped(core, header, Some(table));
                Ok(())
            }
            FrameKind::Lend => {
                let (loan, rest) = Loan::take(table, header.payload_bytes).map_err(|e| self.torn(&e))?;
                self.admit(core, header, rest, Some(&loan))
            }
            _ => self.admit(core, header, table, None),
        }
    }

    fn admit(
        &mut self,
        core: &Core,
        header: &FrameHeader,
        table: &[u8],
        loan: Option<&Loan>,
    ) -> Result<(), TransportError> {
        let borrowed = match loan {
            None => None,
            Some(loan) => {
                let borrowed = self.session.sharing.as_ref().and_then(|sharing| sharing.borrower.borrow(loan));
                Some(borrowed.ok_or_else(|| self.wrong("it lends what it never shared".to_owned()))?)
            }
        };
        let follows = if loan.is_some() { 0 } else { u64::from(header.payload_bytes) };
        if self.session.is_in_place && GrantKey(header.grant).is_in_place() {
            return self.adopt(core, header, table, borrowed, follows);
        }
        let scratch = std::mem::take(&mut self.scratch);
        let admitted = Inbound::admit(core, self.session.key, header, table, Carrier::Processor, scratch);
        let admitted = admitted.map_err(|e| self.torn(&e))?;
        match (admitted, borrowed) {
            (Ok(inbound), None) => self.incoming = Incoming::Payload { header: *header, inbound: Box::new(inbound) },
            (Ok(inbound), Some(borrowed)) => {
                let (inbound, borrowed) = (Box::new(inbound), Box::new(borrowed));
                self.incoming = Incoming::Copy { header: *header, inbound, borrowed };
            }
            (Err(refusal), _) => self.refuse(core, header, refusal, follows),
        }
        Ok(())
    }

    fn land(&mut self, core: &Core, header: &FrameHeader) {
        let (Incoming::Payload { inbound, .. } | Incoming::Copy { inbound, .. }) =
            std::mem::replace(&mut self.incoming, NO_HEADER)
        else {
            return;
        };
        match inbound.land(core, &self.session.peer) {
            Ok(true) => self.say(FrameKind::Ack, None, header),
            Ok(false) => {}
            Err(refusal) => self.refuse(core, header, refusal, 0),
        }
        self.scratch = inbound.into_scratch();
    }

    /// Refuses a write, and throws away what is still to come of the frame.
    fn refuse(&mut self, core: &Core, header: &FrameHeader, refusal: Refusal, left: u64) {
        if self.session.is_new_refusal(header.grant, header.sequence) {
            Counters::add(&core.counters.refused_writes, 1);
            self.say(FrameKind::Refuse, Some(refusal), header);
        }
        self.incoming = if left == 0 { NO_HEADER } else { Incoming::Sink { left } };
    }

    fn say(&mut self, kind: FrameKind, refusal: Option<Refusal>, header: &FrameHeader) {
        let word = FrameHeader::about(kind, refusal, header.grant, header.sequence);
        self.words.extend_from_slice(&word.encode(self.session.version));
    }

    fn moved(&mut self, operation: &'static str, call: Call) -> Result<Turn, TransportError> {
        match call.result {
            Ok(moved) => {
                self.moved_bytes += moved as u64;
                self.session.note_moved(Instant::now());
                // Much came, and while it was copied more may have come: a call that does not wait leaves that for the next one.
                let is_over = moved < call.asked && moved < RETRY_BYTES;
                Ok(if is_over { Turn::Blocked } else { Turn::Moved })
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Turn::Blocked),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Turn::Moved),
            Err(error) => Err(self.broken(operation, error)),
        }
    }

    pub(crate) fn broken(&self, operation: &'static str, source: io::Error) -> TransportError {
        TransportError::Io { peer: self.session.name.clone(), operation, source: Arc::new(source) }
    }

    fn torn(&self, error: &WireError) -> TransportError {
        self.wrong(error.to_string())
    }

    fn wrong(&self, problem: String) -> TransportError {
        TransportError::Protocol { peer: self.session.name.clone(), problem }
    }
}

impl FrameOut {
    /// `None` if its payload is a device's.
    fn new(mut cut: FrameCut) -> Option<Self> {
        let mut payload = cut.take_host_runs()?;
        let mut runs = Vec::with_capacity(payload.len() + 1);
        // The head's bytes stay where they are while the vector that holds them is moved.
        runs.push(RawRun::of(&cut.head));
        runs.append(&mut payload);
        let payload_bytes = if cut.is_lent { 0 } else { cut.payload_bytes };
        let total = cut.head.len() as u64 + payload_bytes;
        // What stays in place crosses nothing.
        let owed = if cut.post.is_in_place { 0 } else { cut.payload_bytes - payload_bytes };
        Some(Self { cut, runs, next: 0, sent: 0, total, owed })
    }

    /// Waits for the link's rate on behalf of payload that is lent.
    fn pay(&mut self, session: &Session) -> Result<(), Instant> {
        while self.owed > 0 {
            self.owed -= allow(session, self.owed)?;
        }
        Ok(())
    }

    /// Whether the post was cancelled in the middle of the frame and the receiver may not know it yet.
    fn is_held(&self) -> bool {
        self.sent > 0 && self.cut.post.read_source().is_none() && !self.cut.post.has_verdict()
    }

    /// Sends up to `allowed` bytes. `None` if the post ended before the frame began: there is nothing to send then.
    fn send(&mut self, stream: &mut Stream, allowed: u64) -> Option<io::Result<usize>> {
        let result = match self.cut.post.read_source() {
            Some(_reading) => {
                let runs = &self.runs[self.next..];
                if allowed >= self.total - self.sent {
                    stream.send_runs(runs)
                } else {
                    send_some(stream, runs, allowed)
                }
            }
            None if self.sent == 0 => return None,
            None => self.send_filler(stream, allowed),
        };
        if let Ok(sent) = result {
            self.sent += sent as u64;
            self.next += advance(&mut self.runs[self.next..], sent);
        }
        Some(result)
    }

    /// The post ended in the middle of the frame. The stream has to stay in step, and the receiver has forgotten the write.
    fn send_filler(&self, stream: &mut Stream, allowed: u64) -> io::Result<usize> {
        let head = self.cut.head.len() as u64;
        if self.sent < head {
            return stream.send_runs(&[RawRun::of(&self.cut.head[self.sent as usize..])]);
        }
        let left = usize::try_from((self.total - self.sent).min(allowed)).unwrap_or(usize::MAX);
        stream.send_runs(&[RawRun::of(&ZEROES[..left.min(SCRAP_BYTES)])])
    }

    /// How many of the `sent` bytes that went last were payload.
    fn count_payload(&self, sent: u64) -> u64 {
        let head = self.cut.head.len() as u64;
        self.sent.saturating_sub(head) - (self.sent - sent).saturating_sub(head)
    }
}

fn send_some(stream: &mut Stream, runs: &[RawRun], allowed: u64) -> io::Result<usize> {
    let mut left = usize::try_from(allowed).unwrap_or(usize::MAX);
    let mut some = Vec::new();
    for run in runs {
        if left == 0 {
            break;
        }
        let run = run.keep(left);
        left -= run.bytes();
        some.push(run);
    }
    stream.send_runs(&some)
}

fn allow(session: &Session, want: u64) -> Result<u64, Instant> {
    match &session.bucket {
        None => Ok(want),
        Some(bucket) => bucket.lock().unwrap_or_else(PoisonError::into_inner).take(want, Instant::now()),
    }
}

fn refund(session: &Session, bytes: u64) {
    if let Some(bucket) = &session.bucket
        && bytes > 0
    {
        bucket.lock().unwrap_or_else(PoisonError::into_inner).refund(bytes);
    }
}
