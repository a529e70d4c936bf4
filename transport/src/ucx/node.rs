//! The node that callers hold.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;

use bytes::Bytes;
use kvferry_protocol::RegionId;
use kvferry_protocol::pages::{Extent, Pages};

use super::card::Card;
use super::config::UcxConfig;
use super::engine;
use super::error::UcxError;
use super::events::UcxSink;
use super::ffi::MAX_MESSAGE_BYTES;
use super::link::Gate;
use super::survey::UcxFacts;
use super::window::{RegionKey, RemoteWindow, encode};
use super::work::{Cargo, Work};
use crate::api::{Memory, MemoryKind, PostId, Write};
use crate::core::{Post, RegionTable};
use crate::error::TransportError;
use crate::raw::{RawRun, Region};
use crate::tcp::wake::Waker;

/// The most extents of one post.
const MAX_EXTENTS: usize = 1 << 16;
/// As many as a table of regions takes.
const MAX_REGIONS: usize = 4096;

/// Numbers the links of a node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LinkId(pub u64);

impl fmt::Display for LinkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UCX link {}", self.0)
    }
}

/// UCX on this side: one context, one thread that drives it, and a link for each session with a peer.
///
/// All calls return at once but those that say that they wait. Dropping it shuts it down.
pub struct UcxNode {
    shared: Arc<Shared>,
    facts: UcxFacts,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Memory of the node's own, by its region; dropped after the thread ended.
    own: Mutex<HashMap<RegionId, Vec<u8>>>,
}

/// What callers and the node's thread share.
pub(super) struct Shared {
    pub(super) config: UcxConfig,
    pub(super) waker: Waker,
    pub(super) state: Mutex<State>,
    /// Held while the two tables below grow, so that they number alike.
    registering: Mutex<()>,
    regions: RegionTable,
    keys: RwLock<Vec<RegionKey>>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) commands: VecDeque<Command>,
    pub(super) links: HashMap<LinkId, Arc<Gate>>,
    next_link: u64,
    /// Set once, when the thread ends or is told to.
    pub(super) is_stopping: bool,
}

/// What the node's thread is told.
pub(super) enum Command {
    Register { memory: RawRun, reply: SyncSender<Result<RegionKey, UcxError>> },
    Open { link: LinkId, gate: Arc<Gate>, reply: SyncSender<Result<Bytes, UcxError>> },
    Connect { link: LinkId, card: Card },
    Post { link: LinkId, post: u64, cargo: Cargo, note: Bytes },
    Cancel { link: LinkId, post: u64, done: SyncSender<()> },
    Close { link: LinkId, reason: String, done: Option<SyncSender<()>> },
}

impl UcxNode {
    /// Opens the library, starts UCX and its thread. `sink` takes what happens.
    ///
    /// # Errors
    /// [`UcxError`] if there is no library, no transport that may carry puts, or UCX does not start.
    pub fn start(config: UcxConfig, sink: impl UcxSink) -> Result<Self, UcxError> {
        let library = ucx_sys::library().map_err(UcxError::Library)?;
        let shared = Arc::new(Shared {
            config,
            waker: Waker::new().map_err(UcxError::io("make an eventfd"))?,
            state: Mutex::default(),
            registering: Mutex::default(),
            regions: RegionTable::new(),
            keys: RwLock::default(),
        });
        let (started, starting) = sync_channel(1);
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("kvferry-ucx".to_owned());
        let thread = thread.spawn(move || engine::run(&of_thread, library, Rc::new(sink), &started));
        let thread = thread.map_err(UcxError::io("start a thread"))?;
        match starting.recv() {
            Ok(Ok(facts)) => Ok(Self { shared, facts, thread: Mutex::new(Some(thread)), own: Mutex::default() }),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(stopped()),
        }
    }

    /// What UCX is and can do here.
    #[must_use]
    pub fn facts(&self) -> &UcxFacts {
        &self.facts
    }

    /// Registers memory with UCX, so that it can be put from and granted; waits for UCX, which pins it. Regions are numbered from
    /// 0 in the order of registration.
    ///
    /// # Safety
    /// The memory stays mapped until [`UcxNode::shutdown`] returned or the node is dropped. While a peer may write a part of it,
    /// nobody else writes or reads that part; while a post reads a part of it, nobody writes that part.
    ///
    /// # Errors
    /// [`UcxError::Memory`] if the kind is not supported, there are too many regions, or UCX refuses.
    #[expect(unsafe_code, reason = "the caller vouches for raw memory")]
    pub unsafe fn register(&self, memory: Memory) -> Result<RegionId, UcxError> {
        let _one_by_one = lock(&self.shared.registering);
        let refuse = |problem: &str| UcxError::Memory { bytes: memory.bytes, problem: problem.to_owned() };
        // All that the table of regions refuses, before UCX pins anything.
        let Some(region) = Region::of(&memory) else {
            // What UCX could put says nothing about who else touches it: slots, from which a receiver copies, are host memory.
            let kinds = self.facts.memory_kinds.join(", ");
            return Err(refuse(&format!(
                "kvferry gives UCX host memory only (a receiver copies out of slots in it), though UCX says that it can put {kinds}"
            )));
        };
        if self.shared.keys.read().unwrap_or_else(PoisonError::into_inner).len() >= MAX_REGIONS {
            return Err(refuse("there are too many regions; register larger ones"));
        }
        let run = (memory.bytes <= isize::MAX as usize).then(|| region.run(0, memory.bytes as u64)).flatten();
        let run = run.filter(|run| run.bytes() > 0).ok_or_else(|| refuse("a region has 1 to isize::MAX bytes"))?;
        let key = self.ask(|reply| Command::Register { memory: run, reply })??;
        let region = self.shared.regions.add(memory).map_err(UcxError::Write)?;
        self.shared.keys.write().unwrap_or_else(PoisonError::into_inner).push(key);
        Ok(region)
    }

    /// Registers memory that the node allocates and keeps.
    ///
    /// # Errors
    /// As [`UcxNode::register`].
    #[expect(unsafe_code, reason = "registers memory")]
    pub(crate) fn allocate(&self, bytes: usize) -> Result<RegionId, UcxError> {
        let mut memory = vec![0u8; bytes.max(1)];
        let address = NonNull::from(memory.as_mut_slice()).cast();
        let registered = Memory { address, bytes: memory.len(), kind: MemoryKind::Host, file: None };
        // SAFETY: the node keeps the memory, and nobody makes a reference to it, until its thread has ended.
        let region = unsafe { self.register(registered) }?;
        lock(&self.own).insert(region, memory);
        Ok(region)
    }

    /// A part of what [`UcxNode::allocate`] gave, for as long as the node lives; peers may write it meanwhile.
    pub(crate) fn own_run(&self, region: RegionId, offset: u64, bytes: u64) -> Option<RawRun> {
        let end = offset.checked_add(bytes)?;
        let mut own = lock(&self.own);
        let memory = own.get_mut(&region).filter(|memory| end <= memory.len() as u64)?;
        Some(RawRun::of_mut(memory).skip(offset as usize).keep(bytes as usize))
    }

    /// What the peer needs to fill a grant over `pages`; it reads it with [`RemoteWindow::decode`].
    ///
    /// # Errors
    /// [`UcxError::Write`] if a page lies outside its region; [`UcxError::Limit`] if there are too many.
    pub fn window(&self, pages: &Pages) -> Result<Bytes, UcxError> {
        self.shared.regions.window(pages, "a granted page").map_err(UcxError::Write)?;
        encode(pages, &self.shared.keys.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Makes a link for one session with one peer, and the card to give to that peer, and to nobody else, over the authenticated
    /// control lane. Waits for UCX, some milliseconds.
    ///
    /// # Errors
    /// [`UcxError::Limit`] if there are too many links, or what UCX says.
    pub fn open(&self) -> Result<(LinkId, Bytes), UcxError> {
        let gate = Arc::new(Gate::default());
        let mut state = self.shared.lock();
        let (found, limit) = (state.links.len() as u64 + 1, self.shared.config.max_links as u64);
        if found > limit {
            return Err(UcxError::Limit { what: "UCX links", found, limit });
        }
        let link = LinkId(state.next_link);
        state.next_link += 1;
        state.links.insert(link, Arc::clone(&gate));
        drop(state);
        let card = self.ask(|reply| Command::Open { link, gate, reply }).and_then(|card| card);
        if card.is_err() {
            self.shared.lock().links.remove(&link);
        }
        Ok((link, card?))
    }

    /// Connects a link to the peer whose card this is. [`UcxEvent::Ready`](super::UcxEvent::Ready) or
    /// [`UcxEvent::Down`](super::UcxEvent::Down) follows, once the peer connected its link to this side's card too, or did not in
    /// time.
    ///
    /// # Errors
    /// [`UcxError::Parameters`] if it is no card; [`UcxError::NoLink`].
    pub fn connect(&self, link: LinkId, card: &Bytes) -> Result<(), UcxError> {
        let card = Card::decode(card)?;
        self.gate(link)?;
        self.command(Command::Connect { link, card })
    }

    /// Puts `write.source` into `write.extents` of the peer's window; when all bytes are in place the peer gets `note` as
    /// [`UcxEvent::Noted`](super::UcxEvent::Noted). Ends in one [`UcxEvent::Posted`](super::UcxEvent::Posted) with the number
    /// `post`, which no other live post of the link has. The write's grant, sequence and notification are the caller's affair.
    ///
    /// # Errors
    /// [`UcxError::Write`] if the write makes no sense, [`UcxError::Limit`] if there are too many, [`UcxError::NoLink`]; nothing
    /// was sent then, and no event follows.
    pub fn post(
        &self,
        link: LinkId,
        post: u64,
        write: &Write,
        window: &Arc<RemoteWindow>,
        note: Bytes,
    ) -> Result<(), UcxError> {
        let regions = &self.shared.regions;
        let checked =
            Post::new(PostId(post), write, regions, MAX_EXTENTS, MAX_MESSAGE_BYTES).map_err(UcxError::Write)?;
        let end = checked.extents.iter().filter_map(Extent::end).max().unwrap_or(0);
        let work = Work::new(Arc::new(checked), Arc::clone(window)).ok_or_else(|| {
            let what = "an extent of the window".to_owned();
            UcxError::Write(TransportError::Range { what, start: 0, end, limit: window.bytes() })
        })?;
        self.enter(link, post, Cargo::Puts(Box::new(work)), note)
    }

    /// Sends a note without bytes. It may overtake posts.
    ///
    /// # Errors
    /// As [`UcxNode::post`].
    pub fn send(&self, link: LinkId, post: u64, note: Bytes) -> Result<(), UcxError> {
        self.enter(link, post, Cargo::Note, note)
    }

    /// Sends bytes with a note. A load ends when UCX needs its source no more; it may be under way still.
    pub(crate) fn enter(&self, link: LinkId, post: u64, cargo: Cargo, note: Bytes) -> Result<(), UcxError> {
        let (found, limit) = (note.len() as u64, MAX_MESSAGE_BYTES as u64);
        if found > limit {
            return Err(UcxError::Limit { what: "bytes of a note", found, limit });
        }
        let gate = self.gate(link)?;
        let limit = self.shared.config.max_posts;
        let found = gate.posts.fetch_add(1, Ordering::Relaxed) + 1;
        let entered = if found > limit {
            Err(UcxError::Limit { what: "posts of one UCX link", found: found as u64, limit: limit as u64 })
        } else {
            self.command(Command::Post { link, post, cargo, note })
        };
        if entered.is_err() {
            gate.posts.fetch_sub(1, Ordering::Relaxed);
        }
        entered
    }

    /// Ends a post early, if it has not ended. Waits until nothing of its source is read any more: for the puts that are under
    /// way, or, if they do not end in time, for the end of the link.
    pub fn cancel(&self, link: LinkId, post: u64) {
        self.wait(|done| Command::Cancel { link, post, done });
    }

    /// Begins to end a post early, if it has not ended; its event says when nothing of its source is read any more.
    pub(crate) fn give_up(&self, link: LinkId, post: u64) {
        let (done, _nobody) = sync_channel(1);
        // If the thread is over nothing is under way.
        let _ = self.command(Command::Cancel { link, post, done });
    }

    /// Ends a link without the peer's help. After this returns no byte of the peer lands through it: its worker, and with it
    /// every socket and queue pair that served the peer, is gone. All its posts have ended then.
    pub fn fence(&self, link: LinkId) {
        let reason = "its peer's writes are revoked".to_owned();
        self.wait(|done| Command::Close { link, reason, done: Some(done) });
    }

    /// Begins to end a link; [`UcxEvent::Down`](super::UcxEvent::Down) says when it did.
    pub fn close(&self, link: LinkId, reason: &str) {
        // If the thread is over so is the link.
        let _ = self.command(Command::Close { link, reason: reason.to_owned(), done: None });
    }

    /// Makes the node look at its sink again.
    pub fn wake(&self) {
        self.shared.waker.wake();
    }

    /// Ends all links, lets go of all memory and waits for the thread.
    pub fn shutdown(&self) {
        self.shared.lock().is_stopping = true;
        self.shared.waker.wake();
        if let Some(thread) = lock(&self.thread).take() {
            // One that panicked has said so, and its links are gone with it.
            let _ = thread.join();
        }
    }

    fn gate(&self, link: LinkId) -> Result<Arc<Gate>, UcxError> {
        self.shared.lock().links.get(&link).cloned().ok_or(UcxError::NoLink { link })
    }

    fn command(&self, command: Command) -> Result<(), UcxError> {
        let mut state = self.shared.lock();
        if state.is_stopping {
            return Err(stopped());
        }
        state.commands.push_back(command);
        drop(state);
        self.shared.waker.wake();
        Ok(())
    }

    fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> Result<T, UcxError> {
        let (reply, answer): (_, Receiver<T>) = sync_channel(1);
        self.command(command(reply))?;
        answer.recv().map_err(|_| stopped())
    }

    fn wait(&self, command: impl FnOnce(SyncSender<()>) -> Command) {
        // If the thread is over nothing is under way.
        let _ = self.ask(command);
    }
}

impl Drop for UcxNode {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn stopped() -> UcxError {
    UcxError::Stopped { reason: "by this side".to_owned() }
}
