//! The queue pairs of one peer as a machine: it takes orders, completions and the time, and drives a [`Lanes`].
//!
//! States: *idle* (not connected) -> *open* -> *draining* (all queue pairs are in error, what was posted comes back) -> *closed*.
//! A fault or a fence leads from idle or open to draining; nothing leads back: the next session has a new machine.
//!
//! Lane 0 carries words: the head of each write, and counts that give the window back. The other lanes carry payload and
//! nothing else. A write takes a place in the peer's window, sends its head, and is cut into parts, one a lane; the last request
//! of each part carries the write's tag. RC keeps order in a lane, so a tag says that its part is in place; lanes may overtake each
//! other. The receiver gives a place back when the write has landed, so it needs no more receives than the window.
//!
//! The last request of each chain makes a completion. So whatever was posted, a completion comes for it or for a later one, also in
//! error: draining ends by itself, and what the devices do not give back by a deadline is ended by destroying the queue pairs.

mod cut;
mod inbound;
mod lane;
#[cfg(test)]
mod mock;
mod planted;
#[cfg(test)]
mod proving;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use self::cut::{RequestLimits, parts};
use self::inbound::{Inbound, prefix};
use self::lane::Lane;
use self::planted::{Plant, Planted};
use crate::rdma::work::{Chain, Completion, Direction, Done, Fault, Lanes, NotPosted, Order, Posting, Request};

pub(crate) use self::inbound::PREFIX_BYTES;

/// The most payload lanes: parts are told in a `u8` and remembered in a `u64`.
pub(crate) const MAX_PAYLOAD_LANES: usize = 32;
/// Receives of lane 0 beyond the window, for counts: at most two are under way, since each gives half of the window back.
const COUNT_RECEIVES: u32 = 4;
/// Requests of lane 0 that are left for counts.
const COUNT_ROOM: u64 = 4;

/// Limits of a machine; both sides of a pair have the same `payload_lanes`, and each knows the other's `window`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MachineConfig {
    pub(crate) payload_lanes: usize,
    /// Writes under way that the peer may have towards here.
    pub(crate) window: u32,
    /// The longest head.
    pub(crate) head_bytes: usize,
    /// Requests in flight in one lane.
    pub(crate) send_depth: u32,
    /// Bytes in flight in one lane; one request may exceed it.
    pub(crate) lane_bytes: u64,
    /// The longest request, and how many pieces it gathers.
    pub(crate) request_bytes: u32,
    pub(crate) segments: usize,
    /// Requests of one doorbell.
    pub(crate) chain: usize,
    /// A write is spread over lanes in parts of at least this.
    pub(crate) part_bytes: u64,
    /// Orders taken that have not begun.
    pub(crate) max_orders: usize,
    /// Nothing in flight ended for this long: the peer or the path is dead.
    pub(crate) stall: Duration,
    /// Draining gets this long.
    pub(crate) drain: Duration,
}

/// What happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum MachineEvent {
    /// The peer's device has all bytes of an order; its sources are not read any more.
    Sent { id: u64 },
    /// An order ended without that; its sources are not read any more.
    Failed { id: u64, fault: Fault },
    /// All bytes of a peer's write are in place.
    Landed { head: Bytes },
    /// The queue pairs failed and are being drained.
    Broken { fault: Fault },
    /// The queue pairs are gone: nothing is read or written for this peer any more. Nothing follows.
    Closed,
}

/// What does not happen on a good day.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct MachineCounts {
    /// Completions of requests that had ended.
    pub(crate) duplicates: u64,
    /// Completions after the end.
    pub(crate) late: u64,
    /// Requests whose completion had not come when draining gave up.
    pub(crate) lost: u64,
}

/// An order that was not taken.
#[derive(Debug)]
pub(crate) struct Untaken {
    pub(crate) order: Order,
    pub(crate) why: Why,
}

/// Why an order is not taken.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Why {
    /// Not connected, or over.
    NotOpen,
    /// As many wait as may.
    Full,
    /// It has no bytes, an empty run, more bytes than `u64` or too long a head.
    Malformed,
}

#[derive(Debug)]
enum Phase {
    Idle,
    Open,
    Draining { until: Instant, fault: Fault },
    Closed,
}

/// A write whose head was sent.
#[derive(Debug)]
struct Begun {
    id: u64,
    /// Its word and its parts that have not ended.
    left: u32,
}

pub(crate) struct Machine {
    config: MachineConfig,
    phase: Phase,
    lanes: Vec<Lane>,
    waiting: VecDeque<Order>,
    begun: BTreeMap<u32, Begun>,
    /// Places of the peer's window that are free, and how many it has.
    places: u32,
    peer_window: u32,
    peer_head_bytes: usize,
    /// Since when orders wait though no place is free.
    starved: Option<Instant>,
    next_tag: u32,
    /// Heads sent, and how many of them ended: their difference is how many send buffers are in use.
    heads: u64,
    heads_ended: u64,
    inbound: Inbound,
    /// Places of the own window to give back, and whether they are kept for now.
    to_return: u32,
    is_held: bool,
    events: VecDeque<MachineEvent>,
    chain: Chain,
    pub(crate) counts: MachineCounts,
    planted: Planted,
}

impl Machine {
    pub(crate) fn new(config: MachineConfig, now: Instant) -> Self {
        Self {
            config,
            phase: Phase::Idle,
            lanes: (0..=config.payload_lanes).map(|_| Lane::new(now)).collect(),
            waiting: VecDeque::new(),
            begun: BTreeMap::new(),
            places: 0,
            peer_window: 0,
            peer_head_bytes: 0,
            starved: None,
            next_tag: 0,
            heads: 0,
            heads_ended: 0,
            inbound: Inbound::new(config.window, config.payload_lanes, Planted::default()),
            to_return: 0,
            is_held: false,
            events: VecDeque::new(),
            chain: Chain::default(),
            counts: MachineCounts::default(),
            planted: Planted::default(),
        }
    }

    /// How many receives are posted in a lane while it is open.
    pub(crate) const fn receives(config: &MachineConfig, lane: usize) -> u32 {
        if lane == 0 { config.window + COUNT_RECEIVES } else { config.window }
    }

    /// How many send buffers for words there are.
    pub(crate) const fn send_slots(config: &MachineConfig) -> u32 {
        config.window
    }

    /// Begins: the peer may have `peer_window` writes under way from here, with heads of at most `peer_head_bytes`. The peer posts
    /// nothing before it heard that this side is open.
    pub(crate) fn open(&mut self, lanes: &mut impl Lanes, peer_window: u32, peer_head_bytes: usize, now: Instant) {
        if !matches!(self.phase, Phase::Idle) {
            return;
        }
        self.phase = Phase::Open;
        (self.places, self.peer_window, self.peer_head_bytes) = (peer_window, peer_window, peer_head_bytes);
        for lane in 0..self.lanes.len() {
            self.post_receives(lanes, lane, Self::receives(&self.config, lane) as usize, now);
        }
        self.settle(lanes);
    }

    pub(crate) fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open)
    }

    pub(crate) fn is_closed(&self) -> bool {
        matches!(self.phase, Phase::Closed)
    }

    /// Whether an order would be taken.
    pub(crate) fn has_room(&self) -> bool {
        self.is_open() && self.waiting.len() < self.config.max_orders
    }

    /// Takes an order; it ends in one `Sent` or `Failed`.
    pub(crate) fn post(&mut self, lanes: &mut impl Lanes, order: Order, now: Instant) -> Result<(), Box<Untaken>> {
        let bytes = order.runs.iter().try_fold(0u64, |sum, run| sum.checked_add(run.bytes));
        let is_whole = bytes.is_some_and(|bytes| bytes > 0)
            && order.runs.iter().all(|run| run.bytes > 0)
            && order.head.len() <= self.config.head_bytes.min(self.peer_head_bytes);
        let why = match () {
            () if !self.is_open() => Why::NotOpen,
            () if !is_whole => Why::Malformed,
            () if self.waiting.len() >= self.config.max_orders => Why::Full,
            () => {
                self.waiting.push_back(order);
                self.advance(lanes, now);
                return Ok(());
            }
        };
        Err(Box::new(Untaken { order, why }))
    }

    /// Whether the peer's places are kept when its writes land: then it stops when it has none left.
    pub(crate) fn hold(&mut self, is_held: bool) {
        self.is_held = is_held;
    }

    /// Whether the peer and this side take a head of this length.
    pub(crate) fn takes_head(&self, bytes: usize) -> bool {
        bytes <= self.config.head_bytes.min(self.peer_head_bytes)
    }

    /// Of each payload lane, how many parts of writes from here the peer's device has.
    pub(crate) fn parts_ended(&self) -> Vec<u64> {
        self.lanes[1..].iter().map(|lane| lane.parts_ended).collect()
    }

    /// Of each payload lane, how many parts of the peer's writes are in place: a completion said so.
    pub(crate) fn parts_taken(&self) -> Vec<u64> {
        self.lanes[1..].iter().map(|lane| lane.parts_taken).collect()
    }

    /// Takes back an order that has not begun.
    pub(crate) fn withdraw(&mut self, id: u64) -> Option<Order> {
        let at = self.waiting.iter().position(|order| order.id == id)?;
        self.waiting.remove(at)
    }

    /// Takes a completion. Call [`advance`](Self::advance) after the last of a batch.
    pub(crate) fn complete(&mut self, lanes: &mut impl Lanes, completion: Completion, now: Instant) {
        if matches!(self.phase, Phase::Closed) || completion.lane >= self.lanes.len() {
            self.counts.late += 1;
            return;
        }
        match completion.direction {
            Direction::Send => self.sent(lanes, completion, now),
            Direction::Receive => self.received(lanes, completion, now),
        }
    }

    /// Posts what there is room for; ends what is drained.
    pub(crate) fn advance(&mut self, lanes: &mut impl Lanes, now: Instant) {
        if self.is_open() {
            self.return_places(lanes, now);
            self.begin(lanes, now);
            for lane in 1..self.lanes.len() {
                self.push(lanes, lane, now);
            }
        }
        self.settle(lanes);
    }

    /// Puts all queue pairs into error and drains them; ends in `Closed`, without `Broken`.
    pub(crate) fn fence(&mut self, lanes: &mut impl Lanes, now: Instant) {
        self.fail(lanes, Fault::Fenced, now);
        self.settle(lanes);
    }

    /// Ends what the devices themselves refuse to go on with.
    pub(crate) fn break_off(&mut self, lanes: &mut impl Lanes, fault: Fault, now: Instant) {
        self.fail(lanes, fault, now);
        self.settle(lanes);
    }

    /// When [`time_out`](Self::time_out) has something to do, if nothing happens before.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Open => {
                let waiting = self.lanes.iter().filter_map(Lane::waiting_since).chain(self.starved).min();
                waiting.map(|since| since + self.config.stall)
            }
            Phase::Draining { until, .. } => Some(*until),
            Phase::Idle | Phase::Closed => None,
        }
    }

    /// Ends what made no progress for too long.
    pub(crate) fn time_out(&mut self, lanes: &mut impl Lanes, now: Instant) {
        match self.phase {
            Phase::Open => {
                let since = |lane: &Lane| lane.waiting_since();
                let stalled = self.lanes.iter().map(since).chain([self.starved]).enumerate();
                let late = |since: &Option<Instant>| since.is_some_and(|since| since + self.config.stall <= now);
                let Some((lane, since)) = stalled.into_iter().find(|(_, since)| late(since)) else { return };
                // A peer that gives no places back is found through the lane of words.
                let lane = if lane < self.lanes.len() { lane } else { 0 };
                let waited = since.map_or(Duration::ZERO, |since| now - since);
                self.fail(lanes, Fault::Stalled { lane, waited }, now);
                self.settle(lanes);
            }
            Phase::Draining { until, .. } if until <= now => {
                self.counts.lost += self.lanes.iter().map(|lane| lane.in_flight() + lane.receives()).sum::<u64>();
                self.close(lanes);
            }
            Phase::Draining { .. } | Phase::Idle | Phase::Closed => {}
        }
    }

    pub(crate) fn poll_event(&mut self) -> Option<MachineEvent> {
        self.events.pop_front()
    }

    fn sent(&mut self, lanes: &mut impl Lanes, completion: Completion, now: Instant) {
        let Completion { lane, number, outcome, .. } = completion;
        let books = &mut self.lanes[lane];
        if number < books.retired || number >= books.next {
            self.counts.duplicates += 1;
            return;
        }
        let fault = match outcome {
            Err(fault) if !self.planted.is(Plant::FailureTakenForSuccess) => fault,
            _ => {
                // Requests of a lane run in order: those before it succeeded too.
                let (begun, events, heads_ended) = (&mut self.begun, &mut self.events, &mut self.heads_ended);
                let mut parts_ended = 0;
                books.retire(number + 1, now, |tag| {
                    *heads_ended += u64::from(lane == 0);
                    parts_ended += 1;
                    let Some(write) = begun.get_mut(&tag) else { return };
                    write.left -= 1;
                    if write.left == 0 {
                        events.push_back(MachineEvent::Sent { id: write.id });
                        begun.remove(&tag);
                    }
                });
                books.parts_ended += parts_ended;
                return;
            }
        };
        // Those before it should have succeeded, but nothing says so: if the completion of the one that failed was lost, this is of
        // one that was flushed after it. Their writes stay begun, and fail when all is drained.
        books.retire(number + 1, now, |_| {});
        self.fail(lanes, fault, now);
    }

    fn received(&mut self, lanes: &mut impl Lanes, completion: Completion, now: Instant) {
        let Completion { lane, number, outcome, .. } = completion;
        let books = &mut self.lanes[lane];
        let is_old = number < books.taken_receives || number >= books.posted_receives;
        if is_old && !self.planted.is(Plant::DuplicateTaken) {
            self.counts.duplicates += 1;
            return;
        }
        let is_next = number == books.taken_receives || is_old;
        books.taken_receives = books.taken_receives.max(number + 1);
        let outcome = if is_next { outcome } else { Err(Fault::Lost { lane }) };
        let result = outcome.and_then(|done| if self.is_open() { self.take(lane, done, now) } else { Ok(()) });
        match result {
            Ok(()) if self.is_open() && !self.planted.is(Plant::ReceiveNotPosted) => {
                self.post_receives(lanes, lane, 1, now)
            }
            Ok(()) => {}
            Err(fault) => self.fail(lanes, fault, now),
        }
    }

    /// What came through a receive.
    fn take(&mut self, lane: usize, done: Done, now: Instant) -> Result<(), Fault> {
        let landed = match (lane, done) {
            (0, Done::Word(word)) => self.inbound.word(&word)?,
            (0, Done::Credit(count)) => {
                let places = self.places.checked_add(count).filter(|places| *places <= self.peer_window);
                self.places = places.ok_or(Fault::Protocol("more places given back than its window has"))?;
                self.starved = self.starved.map(|_| now);
                None
            }
            (1.., Done::Tag(tag)) => {
                self.lanes[lane].parts_taken += 1;
                self.inbound.tag(lane, tag)?
            }
            _ => return Err(Fault::Protocol("what this queue pair does not carry")),
        };
        if let Some(head) = landed {
            self.to_return += 1;
            self.events.push_back(MachineEvent::Landed { head });
        }
        Ok(())
    }

    /// Gives places back when there are enough to be worth a message.
    fn return_places(&mut self, lanes: &mut impl Lanes, now: Instant) {
        let enough = (self.config.window / 2).max(1);
        let words = &self.lanes[0];
        if self.is_held || self.to_return < enough || words.in_flight() >= self.config.send_depth.into() {
            return;
        }
        self.chain.clear();
        let count = std::mem::take(&mut self.to_return);
        let request = Request::Credit { count };
        self.chain.postings.push(Posting { number: words.next, request, is_signalled: true });
        self.chain.books.push((0, None));
        self.post_chain(lanes, 0, now);
        if self.planted.is(Plant::PlacesReturnedTwice) {
            self.to_return += count;
        }
    }

    /// Sends heads while the peer has places, and puts the parts into the lanes.
    fn begin(&mut self, lanes: &mut impl Lanes, now: Instant) {
        self.chain.clear();
        let words = &self.lanes[0];
        let (first, in_flight) = (words.next, words.in_flight());
        let room = u64::from(self.config.send_depth).saturating_sub(COUNT_ROOM + in_flight);
        let slots = u64::from(Self::send_slots(&self.config));
        while (self.chain.postings.len() as u64) < room && self.heads - self.heads_ended < slots {
            if self.places == 0 && !self.planted.is(Plant::WindowIgnored) {
                break;
            }
            let Some(order) = self.waiting.pop_front() else { break };
            self.places = self.places.saturating_sub(1);
            let tag = self.next_tag;
            self.next_tag = tag.wrapping_add(1);
            let order = Arc::new(order);
            let count = self.spread(&order, tag);
            let slot = (self.heads % slots) as usize;
            self.heads += 1;
            lanes.stage(slot, &prefix(tag, count), &order.head);
            let number = first + self.chain.postings.len() as u64;
            let request = Request::Word { slot, bytes: PREFIX_BYTES + order.head.len() };
            self.chain.postings.push(Posting { number, request, is_signalled: true });
            self.chain.books.push((0, Some(tag)));
        }
        let is_starved = self.places == 0 && !self.waiting.is_empty();
        self.starved = is_starved.then(|| self.starved.unwrap_or(now));
        if !self.chain.postings.is_empty() {
            self.post_chain(lanes, 0, now);
        }
    }

    /// Cuts a write into parts and queues each in the lane that has the least to do. Returns how many parts.
    fn spread(&mut self, order: &Arc<Order>, tag: u32) -> u8 {
        let bytes: u64 = order.runs.iter().map(|run| run.bytes).sum();
        let lanes = self.config.payload_lanes as u64;
        let count = if order.is_spread { lanes } else { (bytes / self.config.part_bytes).clamp(1, lanes) };
        let parts = parts(order, tag, bytes, count);
        let count = parts.len();
        self.begun.insert(tag, Begun { id: order.id, left: count as u32 + 1 });
        let mut by_load: Vec<usize> = (1..self.lanes.len()).collect();
        by_load.sort_by_key(|lane| self.lanes[*lane].queued_bytes());
        for (part, lane) in parts.into_iter().zip(by_load) {
            self.lanes[lane].parts.push_back(part);
        }
        // At most MAX_PAYLOAD_LANES.
        count as u8
    }

    /// Posts a lane's parts while there is room.
    fn push(&mut self, lanes: &mut impl Lanes, lane: usize, now: Instant) {
        let limits = RequestLimits { bytes: self.config.request_bytes, segments: self.config.segments };
        while self.is_open() {
            self.chain.clear();
            let books = &mut self.lanes[lane];
            let room = match self.planted.is(Plant::DepthIgnored) {
                true => u64::MAX,
                false => u64::from(self.config.send_depth) - books.in_flight(),
            };
            let most = room.min(self.config.chain as u64);
            let mut bytes = books.bytes_in_flight;
            while (self.chain.postings.len() as u64) < most && (bytes == 0 || bytes < self.config.lane_bytes) {
                let Some(part) = books.parts.front_mut() else { break };
                let number = books.next + self.chain.postings.len() as u64;
                let cut = part.cut(number, limits, &mut self.chain);
                bytes += cut;
                let ends = (part.left == 0).then_some(part.tag);
                self.chain.books.push((cut, ends));
                if ends.is_some() {
                    books.parts.pop_front();
                }
            }
            let Some(last) = self.chain.postings.last_mut() else { return };
            last.is_signalled = !self.planted.is(Plant::LastUnsignalled);
            self.post_chain(lanes, lane, now);
        }
    }

    fn post_chain(&mut self, lanes: &mut impl Lanes, lane: usize, now: Instant) {
        let (posted, fault) = match lanes.post(lane, &self.chain) {
            Ok(()) => (self.chain.postings.len(), None),
            Err(NotPosted { posted, fault }) => (posted, Some(fault)),
        };
        for (bytes, ends) in &self.chain.books[..posted] {
            self.lanes[lane].book(*bytes, *ends, now);
        }
        if let Some(fault) = fault {
            self.fail(lanes, fault, now);
        }
    }

    fn post_receives(&mut self, lanes: &mut impl Lanes, lane: usize, count: usize, now: Instant) {
        let from = self.lanes[lane].posted_receives;
        let (posted, fault) = match lanes.receive(lane, from, count) {
            Ok(()) => (count, None),
            Err(NotPosted { posted, fault }) => (posted, Some(fault)),
        };
        self.lanes[lane].posted_receives += posted as u64;
        if let Some(fault) = fault {
            self.fail(lanes, fault, now);
        }
    }

    fn fail(&mut self, lanes: &mut impl Lanes, fault: Fault, now: Instant) {
        if !matches!(self.phase, Phase::Idle | Phase::Open) {
            return;
        }
        if fault != Fault::Fenced {
            self.events.push_back(MachineEvent::Broken { fault: fault.clone() });
        }
        self.phase = Phase::Draining { until: now + self.config.drain, fault };
        self.starved = None;
        for lane in 0..self.lanes.len() {
            lanes.fail(lane);
            self.lanes[lane].parts.clear();
        }
    }

    fn settle(&mut self, lanes: &mut impl Lanes) {
        let is_draining = matches!(self.phase, Phase::Draining { .. });
        let is_drained = self.lanes.iter().all(Lane::is_drained) || self.planted.is(Plant::ClosedBeforeDrained);
        if is_draining && is_drained {
            self.close(lanes);
        }
    }

    fn close(&mut self, lanes: &mut impl Lanes) {
        let Phase::Draining { fault, .. } = std::mem::replace(&mut self.phase, Phase::Closed) else { return };
        if !self.planted.is(Plant::ClosedBeforeDrained) {
            lanes.close();
        }
        let begun = std::mem::take(&mut self.begun).into_values().map(|write| write.id);
        let waiting = self.waiting.drain(..).map(|order| order.id);
        let failed = begun.chain(waiting).map(|id| MachineEvent::Failed { id, fault: fault.clone() });
        self.events.extend(failed);
        self.events.push_back(MachineEvent::Closed);
    }
}
