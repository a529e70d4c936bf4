//! One session's queue pairs, as the RDMA thread drives them.
//!
//! States: *connecting* (parameters are exchanged) -> *proving* (each side writes a pattern) -> *ready* (frames go) -> *closed* (the
//! queue pairs are gone). What is not proved goes straight to closed, and the session goes another way.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Instant;

use bytes::Bytes;
use kvferry_protocol::pages::Extent;
use kvferry_protocol::wire::{FrameHeader, FrameKind, Refusal, check_extents};

use super::beside::with_cause;
use super::endpoint::{Command, Shared};
use super::session::Session;
use super::verbs::{Verbs, broken, refuse, say};
use super::verbs_window::{PeerWindow, Unsent};
use super::verbs_words::VerbsWord;
use crate::api::GrantKey;
use crate::core::{Busy, Counters, FrameCut, Planted, SealsSeen, Written, random};
use crate::place::Runs;
use crate::rdma::fences::Fences;
use crate::rdma::machine::MachineEvent;
use crate::rdma::memory::{RegionKeys, intersect};
use crate::rdma::proof::{Output, Proof, Verdict};
use crate::rdma::rails::{Adapter, Rails};
use crate::rdma::work::{Key, Order};

/// Windows of one peer that are remembered; what is over goes by lanes.
const MAX_WINDOWS: usize = 1 << 16;
/// Writes of one window; what is over goes by lanes.
const MAX_WRITES: usize = 1 << 16;
/// Frames that wait for lanes.
const MAX_FOR_LANES: usize = 8;

pub(super) struct Link {
    session: Arc<Session>,
    adapter: Arc<Adapter>,
    rails: Rails,
    is_connected: bool,
    proof: Proof,
    /// It was proved: frames may go.
    is_ready: bool,
    /// It was not, and the session goes another way.
    is_given_up: bool,
    is_closed: bool,
    /// What the peer told before its queue pairs were known.
    early_regions: Vec<RegionKeys>,
    windows: HashMap<GrantKey, PeerWindow>,
    /// A frame whose window was not known when it was cut.
    early_frame: Option<FrameCut>,
    /// Frames under way.
    orders: HashMap<u64, FrameCut>,
    next_order: u64,
    landings: VecDeque<Bytes>,
    /// What the peer waits for, by its number, and with the extents of a seal.
    owed: Vec<(u32, GrantKey, Option<Vec<Extent>>)>,
    heard_fences: u32,
    /// What this side waits for.
    asked: Fences<SyncSender<()>>,
    closers: Vec<SyncSender<()>>,
    events: Vec<MachineEvent>,
    /// The outbox was in use.
    pub(super) is_to_try_again: bool,
}

/// The order that carries the test pattern.
const PATTERN_ORDER: u64 = u64::MAX;

impl Link {
    pub(super) fn new(verbs: &Verbs, shared: &Shared, session: Arc<Session>, now: Instant) -> Option<Self> {
        let rails = match Rails::new(&verbs.adapter, session.key.0, now) {
            Ok(rails) => rails,
            Err(error) => {
                let reason = format!("its queue pairs cannot be made: {}", with_cause(&error));
                say(&session, &VerbsWord::Wrong { reason: reason.clone() });
                shared.command(Command::Proved { session: session.key, outcome: Err(reason) });
                return None;
            }
        };
        let pattern = (0..rails.pattern_bytes().div_ceil(64)).flat_map(|_| random::<64>());
        let pattern = pattern.take(rails.pattern_bytes()).collect();
        let proof = Proof::new(pattern, shared.config.rdma.prove, now);
        say(&session, &VerbsWord::Parameters(rails.parameters()));
        shared.waker.wake();
        let (windows, orders, landings) = Default::default();
        Some(Self {
            session,
            adapter: Arc::clone(&verbs.adapter),
            rails,
            is_connected: false,
            proof,
            is_ready: false,
            is_given_up: false,
            is_closed: false,
            early_regions: Vec::new(),
            windows,
            early_frame: None,
            orders,
            next_order: 0,
            landings,
            owed: Vec::new(),
            heard_fences: 0,
            asked: Fences::default(),
            closers: Vec::new(),
            events: Vec::new(),
            is_to_try_again: false,
        })
    }

    /// Closed, and somebody asked for that, or nobody knows that it was there.
    pub(super) fn is_over(&self) -> bool {
        self.is_closed && (self.is_given_up || !self.closers.is_empty())
    }

    pub(super) fn hear(&mut self, shared: &Shared, word: VerbsWord, now: Instant) {
        if self.is_given_up {
            return; // what the peer said before it knew
        }
        let outcome = match word {
            VerbsWord::Parameters(peer) if !self.is_connected => {
                match self.rails.connect(&peer, now) {
                    Ok(()) => {
                        self.is_connected = true;
                        say(&self.session, &VerbsWord::Ready { pattern: self.rails.pattern_keys() });
                    }
                    Err(error) => {
                        self.proof.failed(format!("its queue pairs cannot be connected: {}", with_cause(&error)));
                    }
                }
                std::mem::take(&mut self.early_regions).into_iter().try_for_each(|keys| self.add_region(keys))
            }
            VerbsWord::Ready { pattern } if self.is_connected => {
                match self.rails.set_peer_pattern(pattern) {
                    Ok(()) => self.proof.ready(),
                    Err(error) => self.proof.failed(error.to_string()),
                }
                Ok(())
            }
            VerbsWord::Echo { came } => {
                self.proof.echo(&came);
                Ok(())
            }
            VerbsWord::Right => {
                self.proof.right();
                Ok(())
            }
            VerbsWord::Wrong { reason } if self.is_ready => Err(format!("it takes its proof back: {reason}")),
            VerbsWord::Wrong { reason } => {
                self.proof.wrong(&reason);
                Ok(())
            }
            VerbsWord::Region(keys) if self.is_connected => self.add_region(keys),
            VerbsWord::Region(keys) if self.early_regions.len() < 4096 => {
                self.early_regions.push(keys);
                Ok(())
            }
            VerbsWord::Window { grant, pages } => {
                if let Some(window) = PeerWindow::new(&pages, self.rails.peer_memory(), &self.early_regions)
                    && self.windows.len() < MAX_WINDOWS
                {
                    self.windows.insert(grant, window);
                }
                Ok(())
            }
            VerbsWord::Fence { grant } => self.owe(shared, grant, None),
            VerbsWord::Seal { grant, extents } => self.owe(shared, grant, Some(extents)),
            VerbsWord::Fenced { ticket, ended } => {
                self.asked.answered(ticket, ended);
                Ok(())
            }
            _ => Err("a word that does not fit".to_owned()),
        };
        if let Err(problem) = outcome {
            broken(shared, &self.session, format!("its RDMA path: {problem}"));
            self.rails.fence(now);
        }
        self.prove(shared, now);
    }

    /// Does what the proof asks for.
    fn prove(&mut self, shared: &Shared, now: Instant) {
        while let Some(output) = self.proof.poll_output() {
            shared.waker.wake(); // mostly there is a word to send
            let verdict = match output {
                Output::Write => {
                    let mut pattern = self.proof.pattern().to_vec();
                    if shared.core.bug.is(Planted::PatternSpoilt) {
                        pattern[0] ^= 1;
                    }
                    if !self.rails.write_pattern(&pattern, PATTERN_ORDER, now) {
                        self.proof.failed("the test pattern cannot be written".to_owned());
                    }
                    continue;
                }
                Output::Echo(came) => {
                    say(&self.session, &VerbsWord::Echo { came });
                    continue;
                }
                Output::Right => {
                    say(&self.session, &VerbsWord::Right);
                    continue;
                }
                Output::Wrong(reason) => {
                    say(&self.session, &VerbsWord::Wrong { reason });
                    continue;
                }
                Output::Over(verdict) => verdict,
            };
            let outcome = match verdict {
                Verdict::Proved => {
                    self.is_ready = true;
                    Ok(())
                }
                Verdict::Unproved(reason) => {
                    self.is_given_up = true;
                    self.rails.fence(now);
                    Err(reason)
                }
                Verdict::Undecided(reason) => {
                    self.rails.fence(now);
                    broken(shared, &self.session, format!("its RDMA path: {reason}"));
                    continue;
                }
            };
            shared.command(Command::Proved { session: self.session.key, outcome });
        }
    }

    fn add_region(&mut self, keys: RegionKeys) -> Result<(), String> {
        self.rails.add_peer_region(keys).map_err(|error| error.to_string())
    }

    /// The peer wants nothing more to land in a grant, or in extents of it.
    fn owe(&mut self, shared: &Shared, grant: GrantKey, extents: Option<Vec<Extent>>) -> Result<(), String> {
        if self.owed.len() >= MAX_WINDOWS {
            return Err("more fences than grants".to_owned());
        }
        let is_device = self.is_device_window(grant);
        match &extents {
            None => drop(self.windows.remove(&grant)),
            Some(extents) => {
                if let Some(window) = self.windows.get_mut(&grant) {
                    let is_inside = |extent: &Extent| extent.end().is_some_and(|end| end <= window.list.bytes());
                    if !extents.iter().all(is_inside) {
                        return Err("a seal outside of its window".to_owned());
                    }
                    window.seals.add(extents);
                }
            }
        }
        // What waits for a place at the peer goes by lanes, where it is refused: the peer may give no place before it was answered.
        let is_meant = |cut: &FrameCut| is_of(cut, grant, extents.as_deref());
        let meant: Vec<_> = self.orders.iter().filter(|(_, cut)| is_meant(cut)).map(|(id, _)| *id).collect();
        for id in meant {
            if self.rails.withdraw(id).is_some()
                && let Some(cut) = self.orders.remove(&id)
            {
                cut.post.end_device_read();
                let refusal = if extents.is_some() { Refusal::Sealed } else { Refusal::UnknownGrant };
                self.leave(shared, cut, is_device, Unsent::Refused(refusal));
            }
        }
        self.owed.push((self.heard_fences, grant, extents));
        self.heard_fences = self.heard_fences.wrapping_add(1);
        Ok(())
    }

    /// This side wants nothing more to land.
    pub(super) fn fence(
        &mut self,
        shared: &Shared,
        grant: GrantKey,
        extents: Option<Vec<Extent>>,
        done: SyncSender<()>,
        now: Instant,
    ) {
        if self.is_closed {
            return;
        }
        let word = match extents {
            None => VerbsWord::Fence { grant },
            Some(extents) => VerbsWord::Seal { grant, extents },
        };
        say(&self.session, &word);
        shared.waker.wake();
        self.asked.ask(now + shared.config.rdma.ask, done);
    }

    pub(super) fn close(&mut self, done: SyncSender<()>, now: Instant) {
        self.closers.push(done);
        self.rails.fence(now);
    }

    /// Ends at once: the endpoint ends.
    pub(super) fn end(&mut self) {
        self.rails.fence_now(&mut self.events);
        for (_, cut) in self.orders.drain() {
            cut.post.end_device_read();
        }
    }

    /// Goes on; returns whether anything happened.
    pub(super) fn turn(&mut self, shared: &Shared, now: Instant) -> bool {
        let mut is_busy = self.rails.poll(now, &mut self.events);
        self.take_events(shared);
        is_busy |= self.land(shared, now);
        self.proof.time_out(now);
        self.prove(shared, now);
        self.asked.settle(&self.rails.parts_taken());
        if self.rails.is_open() && self.asked.first_due().is_some_and(|due| due <= now) {
            broken(shared, &self.session, "it did not answer a fence in time; its queue pairs are ended".to_owned());
            self.rails.fence(now);
            self.rails.poll(now, &mut self.events);
            self.take_events(shared);
        }
        if self.is_closed {
            self.asked.clear();
            return is_busy;
        }
        self.answer(shared);
        is_busy | self.pump(shared, now)
    }

    fn take_events(&mut self, shared: &Shared) {
        for event in std::mem::take(&mut self.events) {
            match event {
                MachineEvent::Sent { id } => {
                    if let Some(cut) = self.orders.remove(&id) {
                        Counters::add(&shared.core.counters.sent_bytes, cut.payload_bytes);
                        cut.post.end_device_read();
                    }
                    self.session.note_moved(Instant::now());
                }
                MachineEvent::Failed { id, .. } => {
                    if let Some(cut) = self.orders.remove(&id) {
                        cut.post.end_device_read();
                    }
                }
                MachineEvent::Landed { head } if head.is_empty() && !self.is_ready => {
                    self.proof.landed(self.rails.came_as_pattern());
                }
                MachineEvent::Landed { head } => self.landings.push_back(head),
                MachineEvent::Broken { fault } if !self.is_ready => self.proof.failed(fault.to_string()),
                MachineEvent::Broken { fault } => broken(shared, &self.session, format!("its RDMA path: {fault}")),
                MachineEvent::Closed => self.is_closed = true,
            }
        }
    }

    /// Takes what landed, while somebody polls for it.
    fn land(&mut self, shared: &Shared, now: Instant) -> bool {
        let mut has_landed = false;
        loop {
            let batch = shared.core.events.room().min(self.landings.len());
            if batch == 0 {
                break;
            }
            has_landed = true;
            self.session.note_moved(now);
            let heads: Vec<_> = self.landings.drain(..batch).collect();
            self.take(shared, &heads);
        }
        self.rails.hold(!self.landings.is_empty());
        if has_landed {
            shared.waker.wake();
        }
        has_landed
    }

    /// Frames, all of whose bytes are in place.
    fn take(&self, shared: &Shared, heads: &[Bytes]) {
        let (core, session) = (&shared.core, &self.session);
        let admit = |head: &Bytes| self.admit(shared, head).map_err(|problem| broken(shared, session, problem)).ok();
        let batch: Vec<_> = heads.iter().filter_map(admit).collect();
        if let Err(problem) = Written::make_visible(&batch) {
            let problem =
                format!("this side's device cannot show its kernels what was written into its memory: {problem}");
            return broken(shared, session, problem);
        }
        for written in batch {
            let header = written.header;
            match written.land(core, &session.peer) {
                Ok(true) => {
                    let word = FrameHeader::about(FrameKind::Ack, None, header.grant, header.sequence);
                    let _ = session.queue_control(word, &[], usize::MAX);
                }
                Ok(false) => {}
                Err(refusal) => refuse(core, session, &header, refusal),
            }
        }
    }

    fn admit(&self, shared: &Shared, head: &[u8]) -> Result<Written, String> {
        let session = &self.session;
        let Some((header, table)) = head.split_first_chunk() else { return Err("a frame without a header".to_owned()) };
        let header = FrameHeader::decode(header, session.version).map_err(|error| error.to_string())?;
        header.check_table(table).map_err(|error| error.to_string())?;
        if header.kind != FrameKind::Data || header.table_bytes as usize != table.len() {
            return Err("a frame that its device cannot have written".to_owned());
        }
        Written::admit(&shared.core, session.key, header, table).map_err(|error| error.to_string())
    }

    /// Says which of the peer's fences are fulfilled.
    fn answer(&mut self, shared: &Shared) {
        let orders = &self.orders;
        let is_clear = |(_, grant, extents): &mut (u32, GrantKey, Option<Vec<Extent>>)| {
            !orders.values().any(|cut| is_of(cut, *grant, extents.as_deref()))
        };
        let clear: Vec<_> = self.owed.extract_if(.., is_clear).collect();
        for (ticket, ..) in &clear {
            say(&self.session, &VerbsWord::Fenced { ticket: *ticket, ended: self.rails.parts_ended() });
        }
        if !clear.is_empty() {
            shared.waker.wake();
        }
    }

    /// Posts frames while there is room.
    fn pump(&mut self, shared: &Shared, now: Instant) -> bool {
        self.is_to_try_again = false;
        let mut has_posted = false;
        while self.is_ready && self.rails.has_room() && self.session.waiting_for_lanes() < MAX_FOR_LANES {
            let (cut, is_looked_for) = match self.early_frame.take() {
                Some(cut) => (cut, true),
                None => match self.session.outbox.try_next_frame(shared.config.frame_bytes, self.session.version) {
                    Ok(Some(cut)) => (cut, false),
                    Ok(None) => break,
                    Err(Busy) => {
                        self.is_to_try_again = true;
                        break;
                    }
                },
            };
            has_posted = true;
            match self.order(&cut) {
                Ok(order) => self.post(cut, order, now),
                // Who posted it heard of the grant behind its window, which may have come since this thread took its words.
                Err(_) if !is_looked_for && !self.windows.contains_key(&cut.post.grant) => {
                    self.early_frame = Some(cut);
                    break;
                }
                Err(unsent) => {
                    let is_device = self.is_device_window(cut.post.grant);
                    self.leave(shared, cut, is_device, unsent);
                }
            }
        }
        has_posted
    }

    fn post(&mut self, cut: FrameCut, order: Order, now: Instant) {
        if !cut.post.begin_device_read() {
            return; // it ended meanwhile; the receiver is asked about it on the control lane
        }
        let id = order.id;
        if self.rails.post(order, now).is_ok() {
            self.orders.insert(id, cut);
        } else {
            // It had room, so the order itself does not fit, or the queue pairs have just failed, which ends the session.
            cut.post.end_device_read();
            tracing::warn!(peer = %self.session.name, "a frame was not taken by the queue pairs");
        }
    }

    /// Leaves a frame to the lanes; but what they would have to read from a device's memory, or write there, ends its post. The receiver is
    /// asked whether it has all of it.
    fn leave(&self, shared: &Shared, cut: FrameCut, is_device_window: bool, unsent: Unsent) {
        let what = match (cut.is_of_device(), is_device_window) {
            (true, _) => "the source",
            (false, true) => "the granted window",
            (false, false) => return self.session.give_to_lanes(cut),
        };
        let (session, grant, sequence) = (self.session.key, cut.post.grant, cut.post.sequence);
        shared.command(Command::GiveUp { session, grant, sequence, reason: unsent.reason(what) });
    }

    fn is_device_window(&self, grant: GrantKey) -> bool {
        self.windows.get(&grant).is_some_and(|window| window.is_device)
    }

    /// The frame as requests of the device, or why it is none.
    fn order(&mut self, cut: &FrameCut) -> Result<Order, Unsent> {
        let window = self.windows.get_mut(&cut.post.grant).ok_or(Unsent::Refused(Refusal::UnknownGrant))?;
        check_extents(&cut.extents, window.list.bytes(), cut.payload_bytes).map_err(Unsent::Refused)?;
        // What the receiver would refuse goes to it by a lane, where it is refused before it is placed.
        let is_again = cut.frame == 0 && window.begun.contains(&cut.post.sequence);
        let refusal = match () {
            () if is_again => Some(Refusal::SequenceTaken),
            () if window.seals.meet(&cut.extents, &mut SealsSeen::default()) => Some(Refusal::Sealed),
            () if window.begun.len() >= MAX_WRITES => Some(Refusal::TooMany),
            () => None,
        };
        if let Some(refusal) = refusal {
            return Err(Unsent::Refused(refusal));
        }
        let (mut local, mut remote) = (Vec::<(Key, u64, u64)>::new(), Vec::new());
        let located = match cut.runs() {
            Runs::Host(runs) => self.adapter.locate(runs, &mut local),
            Runs::Device(runs) => self.adapter.locate_of_device(runs, &mut local),
        };
        located
            .map_err(|_| Unsent::Unable("the source is not registered with the RDMA devices: register its memory"))?;
        let located = window.locate(&cut.extents, self.rails.peer_memory(), &mut remote);
        located.ok_or(Unsent::Refused(Refusal::OutOfWindow))?;
        if !self.rails.takes_head(cut.head.len()) {
            return Err(Unsent::Unable("the list of runs is longer than one head: post fewer runs, or longer ones"));
        }
        window.begun.insert(cut.post.sequence);
        let id = self.next_order;
        self.next_order += 1;
        Ok(Order { id, head: Bytes::from(cut.head.clone()), runs: intersect(&local, &remote), is_spread: false })
    }

    /// Asks the device for an event; returns whether something came before.
    pub(super) fn arm(&mut self, now: Instant) -> bool {
        if self.is_closed {
            return false;
        }
        self.rails.arm(now);
        let taken = self.rails.poll(now, &mut self.events);
        taken || !self.events.is_empty()
    }

    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        let due = self.asked.first_due().filter(|_| self.rails.is_open());
        self.rails.poll_timeout().into_iter().chain(due).chain(self.proof.poll_timeout()).min()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        for (_, cut) in self.orders.drain() {
            cut.post.end_device_read();
        }
    }
}

/// Whether a frame writes into a grant, or into these extents of it.
fn is_of(cut: &FrameCut, grant: GrantKey, extents: Option<&[Extent]>) -> bool {
    let meets = |extents: &[Extent]| extents.iter().any(|sealed| cut.extents.iter().any(|extent| sealed.meets(extent)));
    cut.post.grant == grant && extents.is_none_or(meets)
}
