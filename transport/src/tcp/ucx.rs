//! Payload over UCX, beside the lanes of a session.
//!
//! A session whose two ends offer UCX gets a link when it is up: on the control lane each end tells the other its card and the
//! window of its *slots*, registered memory of its own. A frame's payload is put into a free slot of the peer; the note that
//! follows carries what stands before the payload on a lane, header and table. The receiver copies out of the slot into the granted
//! pages, under the grant's guard, and gives the slot back with its word about the write. So a sender, or a device that goes on
//! for it, writes slots and never a page: grants, seals and revokes are what they are on a lane, and need no word from the peer.
//!
//! Where no device puts (UCX's tcp), UCX would emulate puts by messages of its own, copy them once more than that, and end the whole
//! process if the sender dies meanwhile (`ucx::lanes`). There a frame is a *load*: one active message of note and payload, which the
//! receiver copies into the granted pages out of UCX's own buffer. A slot is then no memory, but leave to send one more.
//!
//! A session is told when its link is ready, or cannot be made: then the lanes carry all, and the path that is told is theirs. A
//! ready link that breaks breaks the session, as a lane does.
//!
//! Lock order: the table of links and a lane's state are taken one at a time; a lane's state before the outbox.

mod note;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Instant;

use bytes::Bytes;
use kvferry_protocol::RegionId;
use kvferry_protocol::pages::{Pages, Piece};
use kvferry_protocol::wire::{FrameHeader, FrameKind, WireError};

use super::endpoint::{Command, Shared};
use super::session::Session;
use crate::api::GrantKey;
use crate::core::{Carrier, Core, Counters, Inbound};
use crate::error::TransportError;
use crate::raw::{RawRun, copy};
use crate::ucx::{Cargo, LinkId, Load, RemoteWindow, UcxConfig, UcxError, UcxEvent, UcxNode, UcxSink, Work};
use note::{Note, Payload};

/// Frames of one session that are under way in one direction.
const SLOTS: u32 = 8;

/// The most slots that are owed to the peer without a word, so that it has others meanwhile.
const MOST_OWED: usize = SLOTS as usize / 2;
/// Payload of a load: with its note it fits what UCX's tcp sends at once, so that it arrives in one piece.
const LOAD_BYTES: u64 = 224 << 10;

/// UCX of an endpoint.
pub(crate) struct Ucx {
    pub(crate) node: Arc<UcxNode>,
    links: Arc<Links>,
    slot_bytes: u64,
}

#[derive(Default)]
struct Links {
    /// Set once the endpoint is made.
    shared: OnceLock<Weak<Shared>>,
    live: Mutex<HashMap<LinkId, Arc<UcxLane>>>,
    /// Slots of links that are over.
    spare: Mutex<Vec<RegionId>>,
}

/// One session's link.
pub(crate) struct UcxLane {
    node: Arc<UcxNode>,
    link: LinkId,
    session: Weak<Session>,
    /// Our slots.
    region: RegionId,
    slot_bytes: u64,
    /// Frames go here and not over the lanes.
    carries: AtomicBool,
    /// Both ends heard each other.
    is_ready: AtomicBool,
    /// Payload is put into slots; else it goes with its note.
    is_native: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    theirs: Option<Theirs>,
    next_post: u64,
    /// Frames whose puts or notes are under way.
    flying: HashMap<u64, Flying>,
    /// The peer's words about writes of which frames are flying: a write ends when UCX reads nothing of it any more.
    early: Vec<FrameHeader>,
    /// The peer's frames that are over here, of which it does not know.
    owed: Vec<u32>,
}

/// The peer's slots.
struct Theirs {
    window: Arc<RemoteWindow>,
    slot_bytes: u64,
    free: Vec<u32>,
    slots: u32,
}

struct Flying {
    grant: GrantKey,
    sequence: u32,
    slot: u32,
}

impl Ucx {
    /// Starts UCX. `frame_bytes` is what a slot holds.
    pub(crate) fn start(config: &UcxConfig, frame_bytes: u64) -> Result<Self, UcxError> {
        let links = Arc::new(Links::default());
        let node = Arc::new(UcxNode::start(config.clone(), Sink(Arc::clone(&links)))?);
        let facts = node.facts();
        tracing::info!(library = facts.library, version = facts.version, transports = ?facts.transports, "UCX is there");
        Ok(Self { node, links, slot_bytes: frame_bytes })
    }

    pub(crate) fn belongs_to(&self, shared: &Arc<Shared>) {
        // It is set once, by the endpoint that started it.
        let _ = self.links.shared.set(Arc::downgrade(shared));
    }

    /// Makes the link of a session; gives what to tell the peer.
    pub(crate) fn open(&self, session: &Arc<Session>) -> Result<(Arc<UcxLane>, Vec<u8>), UcxError> {
        let spare = lock(&self.links.spare).pop();
        let region = match spare {
            Some(region) => region,
            None => self.node.allocate((self.slot_bytes * u64::from(SLOTS)) as usize)?,
        };
        let run_bytes = self.slot_bytes * u64::from(SLOTS);
        let piece = Piece { region, offset: 0, loops: Vec::new(), run_bytes };
        let window = self.node.window(&Pages { bases: vec![0], pieces: vec![piece] })?;
        let (link, card) = self.node.open()?;
        let lane = Arc::new(UcxLane {
            node: Arc::clone(&self.node),
            link,
            session: Arc::downgrade(session),
            region,
            slot_bytes: self.slot_bytes,
            carries: AtomicBool::new(true),
            is_ready: AtomicBool::new(false),
            is_native: AtomicBool::new(false),
            state: Mutex::default(),
        });
        lock(&self.links.live).insert(link, Arc::clone(&lane));
        let mut body = (self.slot_bytes as u32).to_le_bytes().to_vec();
        body.extend(SLOTS.to_le_bytes());
        body.extend((card.len() as u32).to_le_bytes());
        body.extend_from_slice(&card);
        body.extend_from_slice(&window);
        Ok((lane, body))
    }
}

impl UcxLane {
    /// Whether frames go here and not over the lanes: from the start, unless the link cannot be made.
    pub(crate) fn carries(&self) -> bool {
        self.carries.load(Ordering::SeqCst)
    }

    /// Takes what the peer's [`Ucx::open`] gave, or nothing if it could not.
    pub(crate) fn take_card(&self, body: Vec<u8>) -> Result<(), UcxError> {
        if body.is_empty() {
            self.node.close(self.link, "the peer could not make its end");
            return Ok(());
        }
        let wrong = |problem| UcxError::Parameters { what: "the card and slots", problem };
        let body = Bytes::from(body);
        let number = |at: usize| -> Option<u32> { Some(u32::from_le_bytes(body.get(at..at + 4)?.try_into().ok()?)) };
        let (Some(slot_bytes), Some(slots), Some(card_bytes)) = (number(0), number(4), number(8)) else {
            return Err(wrong("they are too short"));
        };
        let window_at = 12usize.checked_add(card_bytes as usize).filter(|&at| at <= body.len());
        let window_at = window_at.ok_or_else(|| wrong("they are too short"))?;
        let window = RemoteWindow::decode(&body.slice(window_at..))?;
        let slots_bytes = u64::from(slot_bytes) * u64::from(slots);
        if slot_bytes == 0 || slots == 0 || slots > 1024 || window.bytes() != slots_bytes {
            return Err(wrong("the slots are not what the window holds"));
        }
        {
            let mut state = lock(&self.state);
            if state.theirs.is_some() {
                return Err(wrong("they came before"));
            }
            let free = (0..slots).rev().collect();
            let (window, slot_bytes) = (Arc::new(window), slot_bytes.into());
            state.theirs = Some(Theirs { window, slot_bytes, free, slots });
        }
        self.node.connect(self.link, &body.slice(12..window_at))
    }

    /// Puts frames of the session's outbox while slots are free.
    pub(crate) fn pump(&self, core: &Core) -> Result<(), TransportError> {
        let Some(session) = self.session.upgrade().filter(|session| !session.is_over()) else {
            return Ok(());
        };
        if !self.is_ready.load(Ordering::SeqCst) {
            return Ok(());
        }
        let mut state = lock(&self.state);
        let State { theirs: Some(theirs), next_post, flying, early, .. } = &mut *state else { return Ok(()) };
        while let Some(&slot) = theirs.free.last() {
            let is_native = self.is_native.load(Ordering::SeqCst);
            let frame_bytes = self.slot_bytes.min(theirs.slot_bytes).min(if is_native { u64::MAX } else { LOAD_BYTES });
            let Some(mut cut) = session.outbox.next_frame(core, frame_bytes, session.version, None) else { break };
            let at = u64::from(slot) * theirs.slot_bytes;
            let (grant, sequence) = (cut.post.grant, cut.post.sequence);
            if early.iter().any(|word| (word.grant, word.sequence) == (grant.0, sequence)) {
                continue; // refused: what is left of it is not sent
            }
            let note = note::frame(slot, &cut.head, !is_native);
            // A source in a device's memory is not posted in such a session.
            let Some(runs) = cut.take_host_runs() else { continue };
            let cargo = match is_native {
                true => Work::of_runs(cut.post, runs, Arc::clone(&theirs.window), at).map(Box::new).map(Cargo::Puts),
                false => Load::new(cut.post, runs).map(Box::new).map(Cargo::Load),
            };
            // A post that ended meanwhile has nothing to send.
            let Some(cargo) = cargo else { continue };
            *next_post += 1;
            self.node.enter(self.link, *next_post, cargo, note.into()).map_err(|error| broken(&session, &error))?;
            theirs.free.pop();
            flying.insert(*next_post, Flying { grant, sequence, slot });
            Counters::add(&core.counters.sent_bytes, cut.payload_bytes);
            Counters::add(&core.counters.ucx_bytes, cut.payload_bytes);
        }
        Ok(())
    }

    /// Ends the puts under a grant; after this nothing of their sources is read.
    pub(crate) fn cancel(&self, grant: GrantKey) {
        let of_grant = |(&post, flying): (&u64, &Flying)| (flying.grant == grant).then_some(post);
        let posts: Vec<u64> = lock(&self.state).flying.iter().filter_map(of_grant).collect();
        for post in posts {
            self.node.cancel(self.link, post);
        }
    }

    /// Lets the link go. Late puts of the peer land in its slots, which nobody uses before the link is down.
    pub(crate) fn close(&self) {
        self.is_ready.store(false, Ordering::SeqCst);
        self.node.close(self.link, "its session is over");
    }

    /// Takes a peer's note. What it says is checked as a frame on a lane is.
    fn hear(&self, core: &Core, session: &Session, note: &[u8]) -> Result<(), TransportError> {
        let wrong =
            |problem: &str| TransportError::Protocol { peer: session.name.clone(), problem: problem.to_owned() };
        session.note_moved(Instant::now());
        match Note::decode(note, session.version).map_err(|problem| wrong(&problem))? {
            Note::Frame { slot, header, table, payload } => {
                let staged = match payload {
                    Payload::InSlot => self.slot(slot, header.payload_bytes.into()),
                    Payload::Here(payload) => Ok(RawRun::of(payload)),
                };
                let landed = staged.and_then(|staged| self.land(core, session, staged, &header, table));
                let word = landed.map_err(|error| wrong(&error.to_string()))?;
                self.owe(session, slot, word)
            }
            Note::Credit { slots, word } => {
                let mut state = lock(&self.state);
                let theirs = state.theirs.as_mut().ok_or_else(|| wrong("it gives slots back before it told them"))?;
                for slot in slots {
                    if slot >= theirs.slots || theirs.free.contains(&slot) {
                        return Err(wrong("it gives back a slot that was not taken"));
                    }
                    theirs.free.push(slot);
                }
                if let Some(word) = word {
                    for (&post, _) in state.flying.iter().filter(|(_, flying)| flying.is_of(&word)) {
                        self.node.give_up(self.link, post);
                    }
                    state.early.push(word);
                }
                let words = state.settled();
                drop(state);
                words.iter().for_each(|word| session.verdict(core, word.grant, word.sequence, word.refusal));
                self.pump(core)
            }
        }
    }

    /// Owes the peer a slot, and says so at once if there is a word or it may soon have no other.
    fn owe(&self, session: &Session, slot: u32, word: Option<FrameHeader>) -> Result<(), TransportError> {
        let mut state = lock(&self.state);
        state.owed.push(slot);
        if word.is_none() && state.owed.len() < MOST_OWED {
            return Ok(());
        }
        let credit = note::credit(&std::mem::take(&mut state.owed), word.as_ref(), session.version);
        state.next_post += 1;
        self.node.send(self.link, state.next_post, credit.into()).map_err(|error| broken(session, &error))
    }

    /// The first bytes of one of our slots.
    fn slot(&self, slot: u32, bytes: u64) -> Result<RawRun, WireError> {
        let at = u64::from(slot) * self.slot_bytes;
        let run = (bytes <= self.slot_bytes).then(|| self.node.own_run(self.region, at, bytes)).flatten();
        run.ok_or(WireError::Limit { what: "the payload of a slot", found: bytes, limit: self.slot_bytes })
    }

    /// Copies a frame's payload into the granted pages; gives the word that the sender is owed.
    fn land(
        &self,
        core: &Core,
        session: &Session,
        staged: RawRun,
        header: &FrameHeader,
        table: &[u8],
    ) -> Result<Option<FrameHeader>, WireError> {
        header.check_table(table)?;
        let bytes = u64::from(header.payload_bytes);
        Counters::add(&core.counters.ucx_bytes, bytes);
        let admitted = Inbound::admit(core, session.key, header, table, Carrier::Processor, Vec::new())?;
        let landed = admitted.and_then(|mut inbound| {
            while inbound.left() > 0 {
                let from = staged.skip((bytes - inbound.left()) as usize);
                inbound.place(|runs| {
                    let mut placed = 0;
                    for run in runs {
                        copy(from.skip(placed), *run);
                        placed += run.bytes();
                    }
                    (placed, ())
                })?;
            }
            inbound.land(core, &session.peer)
        });
        let about = |kind, refusal| FrameHeader::about(kind, refusal, header.grant, header.sequence);
        Ok(match landed {
            Ok(true) => Some(about(FrameKind::Ack, None)),
            Ok(false) => None,
            Err(refusal) => self.refuse(core, session, header).then(|| about(FrameKind::Refuse, Some(refusal))),
        })
    }

    /// Counts a refusal if it is the first of its write.
    fn refuse(&self, core: &Core, session: &Session, header: &FrameHeader) -> bool {
        Counters::add(&core.counters.dropped_bytes, header.payload_bytes.into());
        let is_new = session.is_new_refusal(header.grant, header.sequence);
        if is_new {
            Counters::add(&core.counters.refused_writes, 1);
        }
        is_new
    }

    /// A post ended; a slot into which nothing was announced is free again.
    fn ended(&self, core: &Core, session: &Session, post: u64, is_announced: bool) -> Result<(), TransportError> {
        let mut state = lock(&self.state);
        let flying = state.flying.remove(&post);
        if let (Some(flying), Some(theirs), false) = (flying, &mut state.theirs, is_announced) {
            theirs.free.push(flying.slot);
        }
        let words = state.settled();
        drop(state);
        words.iter().for_each(|word| session.verdict(core, word.grant, word.sequence, word.refusal));
        self.pump(core)
    }
}

impl State {
    /// Takes the words about writes of which nothing flies.
    fn settled(&mut self) -> Vec<FrameHeader> {
        let flying = &self.flying;
        self.early.extract_if(.., |word| !flying.values().any(|flying| flying.is_of(word))).collect()
    }
}

impl Flying {
    fn is_of(&self, word: &FrameHeader) -> bool {
        (self.grant.0, self.sequence) == (word.grant, word.sequence)
    }
}

/// Takes the node's events, on its thread.
struct Sink(Arc<Links>);

impl UcxSink for Sink {
    fn event(&self, event: UcxEvent) {
        let (UcxEvent::Ready { link, .. }
        | UcxEvent::Noted { link, .. }
        | UcxEvent::Posted { link, .. }
        | UcxEvent::Down { link, .. }) = event;
        let Some(shared) = self.0.shared.get().and_then(Weak::upgrade) else { return };
        let Some(lane) = lock(&self.0.live).get(&link).cloned() else { return };
        let Some(session) = lane.session.upgrade().filter(|session| !session.is_over()) else {
            if let UcxEvent::Down { .. } = event {
                self.forget(link, &lane);
            }
            return;
        };
        let core = &shared.core;
        let outcome = match event {
            UcxEvent::Ready { lanes, is_native, .. } => {
                lane.is_native.store(is_native, Ordering::SeqCst);
                tracing::info!(peer = session.name, lanes = lanes.join(", "), "payload goes over UCX");
                lane.is_ready.store(true, Ordering::SeqCst);
                shared.command(Command::Linked { session: session.key, outcome: Ok(()) });
                Ok(())
            }
            UcxEvent::Noted { note, .. } => lane.hear(core, &session, &note),
            UcxEvent::Posted { post, outcome, .. } => match outcome {
                Ok(()) => lane.ended(core, &session, post, true),
                Err(UcxError::Cancelled) => lane.ended(core, &session, post, false),
                // The end of the link follows.
                Err(_) => Ok(()),
            },
            UcxEvent::Down { reason, .. } => {
                let was_ready = lane.is_ready.swap(false, Ordering::SeqCst);
                self.forget(link, &lane);
                if was_ready {
                    Err(broken(&session, &reason))
                } else {
                    lane.carries.store(false, Ordering::SeqCst);
                    shared.command(Command::Linked { session: session.key, outcome: Err(reason.to_string()) });
                    Ok(())
                }
            }
        };
        if let Err(reason) = outcome {
            shared.command(Command::Broken { session: session.key, reason });
        }
    }

    fn loaded(&self, link: LinkId, load: &[u8]) {
        let Some(shared) = self.0.shared.get().and_then(Weak::upgrade) else { return };
        let Some(lane) = lock(&self.0.live).get(&link).cloned() else { return };
        let Some(session) = lane.session.upgrade().filter(|session| !session.is_over()) else { return };
        if let Err(reason) = lane.hear(&shared.core, &session, load) {
            shared.command(Command::Broken { session: session.key, reason });
        }
    }

    fn is_full(&self) -> bool {
        self.0.shared.get().and_then(Weak::upgrade).is_some_and(|shared| shared.core.events.is_full())
    }
}

impl Sink {
    /// The link is down: nobody writes its slots any more.
    fn forget(&self, link: LinkId, lane: &UcxLane) {
        lock(&self.0.live).remove(&link);
        lock(&self.0.spare).push(lane.region);
    }
}

fn broken(session: &Session, error: &UcxError) -> TransportError {
    TransportError::Protocol { peer: session.name.clone(), problem: error.to_string() }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
