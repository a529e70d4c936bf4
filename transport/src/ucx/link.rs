//! One link: a worker and an endpoint of its own, and what is under way on them.
//!
//! `Open -> Connecting -> Ready -> Closing -> over`; from any but the last two a fault or a call leads to `Closing`.
//!
//! A post goes through `queued` (puts are handed to UCX, a bounded number at a time), `to_flush`, a flush, its note, and ends.
//! The note is an active message that follows the flush, and is not merely posted behind the puts: puts and active messages may
//! take different lanes, UCX orders nothing between two lanes, its fence orders only what the same lane carries, and a put's own
//! completion says that its source may be reused, not that its bytes arrived. The end of a flush says that every put before it
//! is in the peer's memory, so what the note announces is there, whatever way the note takes.
//!
//! Fields are dropped in the order in which they stand: endpoint and worker first, then all that UCX might have touched.

mod closing;

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use bytes::Bytes;
use ucx_sys::UCS_OK;

use super::card::{Card, Token};
use super::config::UcxConfig;
use super::error::UcxError;
use super::events::{UcxEvent, UcxSink};
use super::ffi::{Context, Endpoint, HEADER_BYTES, LOAD, Worker};
use super::lanes;
use super::node::LinkId;
use super::regions::Regions;
use super::ticket::{Counts, Ticket, TicketId};
use super::work::{Cargo, Load, Next, Work};

/// The most bytes of one put: a cancelled post waits for those that are under way.
const PUT_BYTES: u64 = 1 << 20;
/// Puts under way together: of about this many bytes, but neither fewer nor more than these.
const UNDER_WAY_BYTES: u64 = 16 << 20;
const UNDER_WAY_LEAST: usize = 8;
const UNDER_WAY_MOST: usize = 256;
/// Flushes under way; posts that end their puts meanwhile share the next one.
const MAX_FLUSHES: usize = 4;
/// Calls of `progress` before other links have their turn.
const PROGRESS_CALLS: usize = 32;
/// While something is under way a link is looked at this often, though its event descriptor says nothing: a wake-up that a
/// transport of UCX forgot (openucx/ucxx 15) costs this long and no more.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

const HELLO: u8 = 1;
const WELCOME: u8 = 2;
const NOTE: u8 = 3;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// The worker listens; nothing is known of the peer.
    Open,
    /// Waits for the peer's answer.
    Connecting {
        since: Instant,
    },
    Ready,
    /// Waits until UCX ended all operations, or for this moment; then closes the endpoint and is over, or, if something is under way
    /// still, waits as long again for its end.
    Closing {
        until: Instant,
        is_closed: bool,
    },
}

/// What all threads know of a link.
#[derive(Default)]
pub(super) struct Gate {
    pub(super) posts: AtomicUsize,
}

pub(super) struct Link {
    endpoint: Option<Endpoint>,
    worker: Rc<Worker>,
    id: LinkId,
    gate: Arc<Gate>,
    stage: Stage,
    counts: Rc<Counts>,
    next_ticket: u64,
    tickets: HashMap<TicketId, (Rc<Ticket>, Purpose)>,
    posts: HashMap<u64, Flying>,
    queued: VecDeque<u64>,
    to_flush: Vec<u64>,
    flushes: usize,
    /// The peer's keys, by their packed bytes.
    keys: HashMap<Bytes, usize>,
    /// Headers of [`HELLO`], [`WELCOME`], [`NOTE`] and [`LOAD`], for as long as a message with one is under way.
    headers: Box<[[u8; HEADER_BYTES]; 4]>,
    is_greeted: bool,
    moved: Moved,
    reason: Option<UcxError>,
    closing: Option<Rc<Ticket>>,
    was_ready: bool,
    /// Its endpoint must not be closed; see [`Link::is_greeting_stuck`].
    is_abandoned: bool,
    waiting: Vec<SyncSender<()>>,
    drain: Duration,
    connect: Duration,
    stall: Duration,
    emulated_puts: bool,
}

/// When something last ended.
struct Moved {
    at: Instant,
    ended: u64,
}

/// What a ticket stands for.
enum Purpose {
    Puts(u64),
    Flush(Vec<u64>),
    Note(u64),
    Word,
    Close,
}

/// A post that has not ended.
struct Flying {
    /// Owns what the puts read.
    work: Option<Work>,
    /// Owns what the note carries along.
    load: Option<Load>,
    /// The numbers of the window's keys at the endpoint.
    keys: Vec<usize>,
    note: Bytes,
    puts: Rc<Ticket>,
    is_note_sent: bool,
    is_noted: bool,
    cancelled: Option<Instant>,
    /// Who waits until nothing is read any more.
    waiting: Vec<SyncSender<()>>,
}

impl Link {
    /// Makes the link's worker, and the card to give to the peer.
    pub(super) fn new(
        context: &Rc<Context>,
        id: LinkId,
        gate: Arc<Gate>,
        config: &UcxConfig,
        sink: &Rc<dyn UcxSink>,
        now: Instant,
    ) -> Result<(Self, Bytes), UcxError> {
        let token: Token = crate::core::random();
        let sink = Rc::clone(sink);
        let worker = Worker::new(context, token, Box::new(move |load| sink.loaded(id, load)))?;
        let card = Card { token, address: worker.address()? }.encode();
        let link = Self {
            endpoint: None,
            worker,
            id,
            gate,
            stage: Stage::Open,
            counts: Rc::default(),
            next_ticket: 0,
            tickets: HashMap::new(),
            posts: HashMap::new(),
            queued: VecDeque::new(),
            to_flush: Vec::new(),
            flushes: 0,
            keys: HashMap::new(),
            headers: Box::default(),
            is_greeted: false,
            moved: Moved { at: now, ended: 0 },
            reason: None,
            closing: None,
            was_ready: false,
            is_abandoned: false,
            waiting: Vec::new(),
            drain: config.drain,
            connect: config.connect,
            stall: config.stall,
            emulated_puts: config.emulated_puts,
        };
        Ok((link, card))
    }

    pub(super) fn worker(&self) -> &Worker {
        &self.worker
    }

    /// Connects to the worker of the peer's card.
    pub(super) fn connect(&mut self, card: &Card, now: Instant) {
        if self.stage != Stage::Open {
            return;
        }
        let header = |what| {
            let mut header = [what; HEADER_BYTES];
            header[..card.token.len()].copy_from_slice(&card.token);
            header
        };
        *self.headers = [HELLO, WELCOME, NOTE, LOAD].map(header);
        match Endpoint::new(&self.worker, &card.address) {
            Ok(endpoint) => self.endpoint = Some(endpoint),
            Err(error) => return self.begin_closing(error, now),
        }
        self.stage = Stage::Connecting { since: now };
        self.say(HELLO, now);
        if self.is_greeted {
            self.say(WELCOME, now);
        }
    }

    /// Takes a post.
    pub(super) fn post(&mut self, id: u64, cargo: Cargo, note: Bytes, now: Instant, out: &mut Vec<UcxEvent>) {
        let puts = self.ticket(Purpose::Puts(id));
        let (work, load) = match cargo {
            Cargo::Note => (None, None),
            Cargo::Puts(work) => (Some(*work), None),
            Cargo::Load(load) => (None, Some(*load)),
        };
        let (is_work, is_load) = (work.is_some(), load.is_some());
        let mut flying = Flying {
            work,
            load,
            keys: Vec::new(),
            note,
            puts,
            is_note_sent: false,
            is_noted: false,
            cancelled: None,
            waiting: Vec::new(),
        };
        let refused = match self.stage {
            Stage::Ready => self.take_keys(&mut flying).err(),
            Stage::Closing { .. } => Some(self.reason.clone().unwrap_or(UcxError::NoLink { link: self.id })),
            Stage::Open | Stage::Connecting { .. } => Some(UcxError::NoLink { link: self.id }),
        };
        self.posts.insert(id, flying);
        if let Some(reason) = refused {
            self.end_post(id, Err(reason), out);
        } else if is_work {
            self.queued.push_back(id);
        } else if is_load {
            self.send_load(id, now);
        } else {
            self.send_note(id, now);
        }
    }

    fn take_keys(&mut self, flying: &mut Flying) -> Result<(), UcxError> {
        let (Some(work), Some(endpoint)) = (&flying.work, &mut self.endpoint) else { return Ok(()) };
        for region in work.window().regions() {
            let key = match self.keys.get(&region.packed) {
                Some(&key) => key,
                None => {
                    let (found, limit) = (self.keys.len() as u64 + 1, MAX_KEYS);
                    if found > limit {
                        return Err(UcxError::Limit { what: "the keys of one peer", found, limit });
                    }
                    let key = endpoint.unpack(&region.packed)?;
                    // A copy: the window's bytes are longer than its keys.
                    self.keys.insert(Bytes::copy_from_slice(&region.packed), key);
                    key
                }
            };
            flying.keys.push(key);
        }
        Ok(())
    }

    /// Ends a post early. `done` is told when nothing of its source is read any more.
    pub(super) fn cancel(&mut self, id: u64, done: SyncSender<()>, now: Instant, out: &mut Vec<UcxEvent>) {
        let Some(flying) = self.posts.get_mut(&id) else { return tell(&done) };
        flying.cancelled.get_or_insert(now);
        flying.waiting.push(done);
        self.queued.retain(|&queued| queued != id);
        self.to_flush.retain(|&waiting| waiting != id);
        // Sealed by now, or nothing more is put: with the last put that is under way it is done.
        flying.puts.seal();
        self.look_at(id, out);
    }

    /// Gives the link up. `done` is told when UCX touches nothing of it any more.
    pub(super) fn close(&mut self, reason: UcxError, done: Option<SyncSender<()>>, now: Instant) {
        self.waiting.extend(done);
        self.begin_closing(reason, now);
    }

    /// Drives the link once: progress, what came, what ended, what is next. Returns whether anything moved.
    pub(super) fn turn(&mut self, regions: &Regions, now: Instant, out: &mut Vec<UcxEvent>) -> bool {
        let mut moved = false;
        let loads = self.worker.inbox().loads();
        for _ in 0..PROGRESS_CALLS {
            if self.is_over(now) || !self.worker.progress() {
                break;
            }
            moved = true;
            if self.worker.inbox().loads() != loads {
                // The peer waits for what whoever took them has to say.
                break;
            }
        }
        if let Stage::Closing { .. } = self.stage {
            // Only what is under way matters; nothing that comes is heard.
            self.settle(now, out);
            self.close_drained(now);
            return moved;
        }
        self.hear(now, out);
        self.settle(now, out);
        self.pump(regions, now);
        // Much ends in the call that starts it.
        self.settle(now, out);
        self.check(now);
        moved
    }

    /// When the link has to be driven though nothing wakes it.
    pub(super) fn deadline(&self, now: Instant) -> Option<Instant> {
        let is_busy = self.counts.under_way() > 0 || !self.queued.is_empty();
        match self.stage {
            Stage::Closing { until, .. } => Some(until.min(now + LOOK_AGAIN)),
            Stage::Connecting { since } => Some((since + self.connect).min(now + LOOK_AGAIN)),
            _ => is_busy.then(|| now + LOOK_AGAIN),
        }
    }

    fn ticket(&mut self, purpose: Purpose) -> Rc<Ticket> {
        let id = TicketId(self.next_ticket);
        self.next_ticket += 1;
        let ticket = Ticket::new(id, &self.counts);
        self.tickets.insert(id, (Rc::clone(&ticket), purpose));
        ticket
    }

    fn say(&mut self, what: u8, now: Instant) {
        let ticket = self.ticket(Purpose::Word);
        let Some(endpoint) = &self.endpoint else { return };
        let sent = endpoint.send(&self.headers[usize::from(what) - 1], &[], &ticket);
        ticket.seal();
        self.check_started(sent, now);
    }

    fn check_started(&mut self, started: Result<(), ucx_sys::ucs_status_t>, now: Instant) {
        if let (Err(status), Some(endpoint)) = (started, &self.endpoint) {
            let status = endpoint.text(status);
            self.begin_closing(UcxError::Gone { link: self.id, status }, now);
        }
    }

    /// Reads what came.
    fn hear(&mut self, now: Instant, out: &mut Vec<UcxEvent>) {
        while let Some((what, note)) = self.worker.inbox().next() {
            match (what, self.stage) {
                (HELLO, Stage::Open) => self.is_greeted = true,
                (HELLO, _) if !self.is_greeted => {
                    self.is_greeted = true;
                    self.say(WELCOME, now);
                }
                (WELCOME, Stage::Connecting { .. }) => self.greet(now, out),
                // The peer may be ready before this side is: its welcome is on its way.
                (NOTE, Stage::Connecting { .. } | Stage::Ready) => out.push(UcxEvent::Noted { link: self.id, note }),
                _ => {
                    let problem = "it sent an active message that has no place here";
                    return self.begin_closing(UcxError::Protocol { link: self.id, problem }, now);
                }
            }
        }
        if let Some(problem) = self.worker.inbox().problem() {
            self.begin_closing(UcxError::Protocol { link: self.id, problem }, now);
        }
    }

    /// The peer answered: both directions carry. What carries them is looked at before anything is put.
    fn greet(&mut self, now: Instant, out: &mut Vec<UcxEvent>) {
        let Some(endpoint) = &self.endpoint else { return };
        let allowed = self.worker.transports();
        let checked = endpoint.printed().and_then(|printed| {
            let lanes = lanes::endpoint_lanes(&printed).unwrap_or_default();
            let unfenced = if lanes.is_empty() { vec![printed] } else { lanes::unfenced(&lanes, allowed) };
            if unfenced.is_empty() {
                if self.emulated_puts || lanes::is_native(&lanes) {
                    return Ok(lanes);
                }
                return Err(UcxError::Emulated { link: self.id, found: lanes.join(", ") });
            }
            Err(UcxError::Unfenced { link: self.id, found: unfenced.join(", "), allowed: allowed.join(", ") })
        });
        match checked {
            Ok(lanes) => {
                self.stage = Stage::Ready;
                self.was_ready = true;
                let is_native = lanes::is_native(&lanes);
                out.push(UcxEvent::Ready { link: self.id, lanes, is_native });
            }
            Err(error) => self.begin_closing(error, now),
        }
    }

    /// Draws the consequences of what ended.
    fn settle(&mut self, now: Instant, out: &mut Vec<UcxEvent>) {
        loop {
            let done = self.counts.take_done();
            if done.is_empty() {
                return;
            }
            for id in done {
                let Some((ticket, purpose)) = self.tickets.remove(&id) else { continue };
                let is_closing = matches!(self.stage, Stage::Closing { .. });
                if ticket.status() != UCS_OK && !is_closing {
                    self.check_started(Err(ticket.status()), now);
                }
                let is_ok = ticket.status() == UCS_OK;
                match purpose {
                    Purpose::Puts(post) => {
                        if let Some(flying) = self.posts.get_mut(&post).filter(|flying| flying.load.is_some()) {
                            flying.load = None;
                            flying.is_noted = is_ok;
                        }
                        self.look_at(post, out);
                    }
                    Purpose::Flush(posts) => {
                        self.flushes -= 1;
                        if is_ok && !is_closing {
                            posts.into_iter().for_each(|post| self.send_note(post, now));
                        }
                    }
                    Purpose::Note(post) => {
                        if let Some(flying) = self.posts.get_mut(&post) {
                            flying.is_noted = is_ok;
                        }
                        self.look_at(post, out);
                    }
                    Purpose::Word | Purpose::Close => {}
                }
            }
        }
    }

    /// Ends a post if it is over.
    fn look_at(&mut self, id: u64, out: &mut Vec<UcxEvent>) {
        let Some(flying) = self.posts.get_mut(&id) else { return };
        if !flying.puts.is_done() {
            return;
        }
        flying.waiting.drain(..).for_each(|waiting| tell(&waiting));
        if flying.is_noted {
            self.end_post(id, Ok(()), out);
        } else if flying.cancelled.is_some() && !flying.is_note_sent {
            self.end_post(id, Err(UcxError::Cancelled), out);
        }
    }

    fn end_post(&mut self, id: u64, outcome: Result<(), UcxError>, out: &mut Vec<UcxEvent>) {
        let Some(flying) = self.posts.remove(&id) else { return };
        flying.puts.seal();
        flying.waiting.iter().for_each(tell);
        self.gate.posts.fetch_sub(1, Ordering::Relaxed);
        out.push(UcxEvent::Posted { link: self.id, post: id, outcome });
    }

    /// Hands UCX what it may have: puts up to the bound, then a flush for all posts whose last put was handed over.
    fn pump(&mut self, regions: &Regions, now: Instant) {
        while let (Some(&id), Stage::Ready) = (self.queued.front(), self.stage) {
            let (Some(flying), Some(endpoint)) = (self.posts.get_mut(&id), &self.endpoint) else { return };
            let Some(work) = &mut flying.work else { return };
            if self.counts.under_way() >= most_under_way(work) {
                break;
            }
            match work.next(PUT_BYTES) {
                Next::Put(run, remote) => {
                    let started = match remote.place(&flying.keys) {
                        Some(place) => endpoint.put(run, regions.find(run), place, &flying.puts),
                        None => Err(ucx_sys::UCS_ERR_INVALID_PARAM),
                    };
                    self.check_started(started, now);
                }
                Next::End => {
                    self.queued.pop_front();
                    flying.puts.seal();
                    self.to_flush.push(id);
                }
                Next::Broken => self.check_started(Err(ucx_sys::UCS_ERR_INVALID_PARAM), now),
            }
        }
        if self.stage == Stage::Ready && !self.to_flush.is_empty() && self.flushes < MAX_FLUSHES {
            let posts = std::mem::take(&mut self.to_flush);
            let ticket = self.ticket(Purpose::Flush(posts));
            let Some(endpoint) = &self.endpoint else { return };
            self.flushes += 1;
            let started = endpoint.flush(&ticket);
            ticket.seal();
            self.check_started(started, now);
        }
    }

    /// All bytes of a post are in place at the peer: tells it.
    fn send_note(&mut self, id: u64, now: Instant) {
        if self.posts.get(&id).is_none_or(|flying| flying.cancelled.is_some()) {
            return;
        }
        let ticket = self.ticket(Purpose::Note(id));
        let (Some(flying), Some(endpoint)) = (self.posts.get_mut(&id), &self.endpoint) else { return };
        flying.is_note_sent = true;
        flying.puts.seal();
        if flying.puts.is_done() {
            // The flush covered all puts; whoever hears of the note may look whether a slab was let go.
            flying.work = None;
        }
        let started = endpoint.send(&self.headers[usize::from(NOTE) - 1], &flying.note, &ticket);
        ticket.seal();
        self.check_started(started, now);
    }

    /// Sends note and bytes at once. They are read, as by puts, until the post's ticket is done.
    fn send_load(&mut self, id: u64, now: Instant) {
        let (Some(flying), Some(endpoint)) = (self.posts.get_mut(&id), &self.endpoint) else { return };
        let Some(load) = &mut flying.load else { return };
        flying.is_note_sent = true;
        let header = &self.headers[usize::from(LOAD) - 1];
        let started = endpoint.send_runs(header, load.after(&flying.note), &flying.puts);
        flying.puts.seal();
        self.check_started(started, now);
    }

    /// Looks for faults and deadlines.
    fn check(&mut self, now: Instant) {
        if let Some(status) = self.endpoint.as_ref().and_then(Endpoint::fault) {
            return self.begin_closing(UcxError::Gone { link: self.id, status }, now);
        }
        let stalled = |operation, waited: Duration, advice| UcxError::Stalled {
            link: self.id,
            operation,
            waited_ms: waited.as_millis() as u64,
            advice,
        };
        if let Stage::Connecting { since } = self.stage
            && now.duration_since(since) >= self.connect
        {
            return self.begin_closing(stalled("connecting", now.duration_since(since), CONNECT_ADVICE), now);
        }
        if self.counts.under_way() == 0 || self.counts.ended() != self.moved.ended {
            self.moved = Moved { at: now, ended: self.counts.ended() };
        }
        let idle = now.duration_since(self.moved.at);
        if idle >= self.stall {
            return self.begin_closing(stalled("puts", idle, STALL_ADVICE), now);
        }
        let cancelled =
            self.posts.values().filter(|flying| !flying.puts.is_done()).filter_map(|flying| flying.cancelled);
        if let Some(since) = cancelled.min().filter(|&since| now.duration_since(since) >= self.drain) {
            self.begin_closing(stalled("a cancelled post", now.duration_since(since), STALL_ADVICE), now);
        }
    }
}

/// How many puts may be under way while those of this work are handed out.
fn most_under_way(work: &Work) -> usize {
    let of_put = work.next_bytes().clamp(1, PUT_BYTES);
    ((UNDER_WAY_BYTES / of_put) as usize).clamp(UNDER_WAY_LEAST, UNDER_WAY_MOST)
}

fn tell(waiting: &SyncSender<()>) {
    // Whoever waited may have gone.
    let _ = waiting.try_send(());
}

/// A peer has as many keys as regions, and one may register anew.
const MAX_KEYS: u64 = 1 << 14;
const STALL_ADVICE: &str = "look whether the peer runs and its network is up";
const CONNECT_ADVICE: &str = "look whether both sides share a network (UCX_NET_DEVICES), whether a firewall stops UCX's ports \
                              (UCX_TCP_PORT_RANGE), and on RoCE whether both GIDs are of one kind (gid_index, UCX_IB_GID_INDEX)";
