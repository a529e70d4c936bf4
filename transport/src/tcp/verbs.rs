//! The RDMA path of an endpoint: one thread that owns the queue pairs of all its sessions.
//!
//! A session on this path has TCP lanes too: they carry what no device can (sources that are not registered, windows that the peer
//! has not told yet, frames that the receiver will refuse), so a grant is filled by both; but nothing into or out of a device's memory,
//! whose posts end instead. A grant's window is told to the peer on
//! the control lane. To revoke it the peer is asked to post no more and to wait for what is under way; if it does not answer in time,
//! the queue pairs are put into error and destroyed, and the session ends.
//!
//! Lock order: `regions`, then the endpoint's state, then a session's control queue; `told` and the inbox are leaves. The thread waits
//! for nobody: others wait for it, also under an outbox's lock, which it therefore only tries.

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvferry_protocol::RegionId;
use kvferry_protocol::pages::{Extent, Pages};
use kvferry_protocol::wire::{FrameHeader, FrameKind};
use rustix::event::{PollFd, PollFlags};

use super::beside::with_cause;
use super::endpoint::Shared;
use super::session::Session;
use super::verbs_link::Link;
use super::verbs_words::VerbsWord;
use super::wake::Waker;
use crate::api::{GrantKey, Memory};
use crate::core::{Core, SessionKey};
use crate::error::TransportError;
use crate::rdma::rails::Adapter;
use crate::rdma::{PortFacts, RdmaConfig, RdmaError};

/// An outbox that somebody was inside of is tried again after this.
const AGAIN: Duration = Duration::from_millis(1);

pub(crate) struct Verbs {
    pub(super) adapter: Arc<Adapter>,
    inbox: Mutex<Inbox>,
    waker: Waker,
    /// Of each region, the adapter's number.
    regions: Mutex<Vec<usize>>,
    /// Which session was told of a grant's window.
    told: Mutex<HashMap<GrantKey, SessionKey>>,
}

#[derive(Default)]
struct Inbox {
    commands: VecDeque<Command>,
    is_stopping: bool,
}

enum Command {
    Open(Arc<Session>),
    Word {
        session: SessionKey,
        word: VerbsWord,
    },
    /// Without extents the whole grant.
    Fence {
        session: SessionKey,
        grant: GrantKey,
        extents: Option<Vec<Extent>>,
        done: SyncSender<()>,
    },
    Close {
        session: SessionKey,
        done: SyncSender<()>,
    },
}

impl Verbs {
    /// Opens the devices.
    pub(crate) fn open(config: &RdmaConfig) -> Result<Self, RdmaError> {
        let waker = Waker::new().map_err(|error| RdmaError::Call {
            device: "eventfd".to_owned(),
            call: "eventfd".to_owned(),
            mend: "raise the limit of open files (ulimit -n)",
            source: Arc::new(error),
        })?;
        Ok(Self {
            adapter: Arc::new(Adapter::open(config)?),
            inbox: Mutex::default(),
            waker,
            regions: Mutex::default(),
            told: Mutex::default(),
        })
    }

    pub(crate) fn wake(&self) {
        self.waker.wake();
    }

    /// Registers memory with the core and with all devices, and tells the sessions.
    pub(crate) fn register(&self, shared: &Shared, memory: Memory) -> Result<RegionId, TransportError> {
        let bytes = memory.bytes;
        let mut regions = lock(&self.regions);
        let index = self
            .adapter
            .register(&memory)
            .map_err(|error| TransportError::Memory { bytes, problem: with_cause(&error) })?;
        let id = shared.core.register_beside_devices(memory)?;
        regions.push(index);
        let sessions = shared.lock().sessions.values().cloned().collect::<Vec<_>>();
        sessions.iter().filter(|session| session.verbs().is_some()).for_each(|session| self.tell(session, index));
        shared.waker.wake();
        Ok(id)
    }

    /// What the cards say to memory of other devices, in words.
    pub(crate) fn device_memory(&self) -> String {
        let of_port = |facts: &PortFacts| {
            let ways = facts.device_memory.ways();
            format!("{}: {}", facts.device, ways.map_or_else(|why| why, |ways| format!("yes, {ways}")))
        };
        self.adapter.ports().map(of_port).collect::<Vec<_>>().join("; ")
    }

    /// A session is there: its queue pairs are made and proved, which [`Command::Proved`](super::endpoint::Command) tells.
    pub(crate) fn join(&self, session: &Arc<Session>) {
        self.command(Command::Open(Arc::clone(session)));
    }

    /// A session begins: it is told all regions, and `insert` makes it known to those who register later.
    pub(crate) fn begin(&self, session: &Arc<Session>, insert: impl FnOnce()) {
        let regions = lock(&self.regions);
        regions.iter().for_each(|index| self.tell(session, *index));
        insert();
        drop(regions);
    }

    fn tell(&self, session: &Session, index: usize) {
        if let Some(mut keys) = self.adapter.region_keys(index) {
            // Who does not know the word is granted no page of it, either.
            keys.is_device &= session.knows_device_memory;
            say(session, &VerbsWord::Region(keys));
        }
    }

    /// Tells the peer a grant's window, unless that is longer than a message may be; lanes carry what is not told. Returns its bytes as a
    /// message.
    pub(crate) fn tell_window(&self, session: &Session, grant: GrantKey, pages: Pages) -> usize {
        let word = VerbsWord::Window { grant, pages }.encode();
        if word.len() <= kvferry_protocol::wire::MAX_MESSAGE_BYTES {
            lock(&self.told).insert(grant, session.key);
            if session.is_over() {
                // Its end may have forgotten all that it was told before this.
                lock(&self.told).remove(&grant);
                return word.len();
            }
            let header = FrameHeader::with_body(FrameKind::Path, &word);
            // A session that is over has no grants.
            let _ = session.queue_control(header, &word, usize::MAX);
        }
        word.len()
    }

    /// A word of the peer.
    pub(crate) fn hear(&self, session: SessionKey, word: VerbsWord) {
        self.command(Command::Word { session, word });
    }

    /// After this returns no device of the peer writes into the grant, or into these extents of it.
    pub(crate) fn fence(&self, grant: GrantKey, extents: Option<Vec<Extent>>) {
        let Some(session) = lock(&self.told).get(&grant).copied() else { return };
        let is_whole = extents.is_none();
        let (done, wait) = sync_channel(1);
        self.command(Command::Fence { session, grant, extents, done });
        wait_for(&wait);
        if is_whole {
            lock(&self.told).remove(&grant);
        }
    }

    /// Ends a session's queue pairs. After this returns no device reads or writes for it.
    pub(crate) fn close(&self, session: SessionKey) {
        let (done, wait) = sync_channel(1);
        self.command(Command::Close { session, done });
        wait_for(&wait);
        lock(&self.told).retain(|_, told| *told != session);
    }

    pub(crate) fn stop(&self) {
        lock(&self.inbox).is_stopping = true;
        self.waker.wake();
    }

    fn command(&self, command: Command) {
        let mut inbox = lock(&self.inbox);
        if inbox.is_stopping {
            return; // who waits for an answer hears that there is none
        }
        inbox.commands.push_back(command);
        drop(inbox);
        self.waker.wake();
    }

    /// The thread.
    pub(crate) fn run(&self, shared: &Shared) {
        // Dropped last, also by a panic: when the links with their queue pairs are gone, nobody waits for this thread any more.
        let _ended = Ended(self);
        let mut links: HashMap<SessionKey, Link> = HashMap::new();
        let mut ready = Vec::new();
        loop {
            let (commands, is_stopping) = {
                let mut inbox = lock(&self.inbox);
                (std::mem::take(&mut inbox.commands), inbox.is_stopping)
            };
            for command in commands {
                self.obey(shared, &mut links, command);
            }
            if is_stopping {
                links.values_mut().for_each(Link::end);
                return;
            }
            let mut is_busy = false;
            for link in links.values_mut() {
                is_busy |= link.turn(shared, Instant::now());
            }
            links.retain(|_, link| !link.is_over());
            if !is_busy {
                self.sleep(&mut links);
                ready.clear();
                if let Err(error) = self.adapter.ready(&mut ready) {
                    tracing::error!(%error, "an RDMA device tells nothing any more");
                }
            }
        }
    }

    fn obey(&self, shared: &Shared, links: &mut HashMap<SessionKey, Link>, command: Command) {
        let now = Instant::now();
        match command {
            Command::Open(session) => {
                let key = session.key;
                if let Some(link) = Link::new(self, shared, session, now) {
                    links.insert(key, link);
                }
            }
            Command::Word { session, word } => {
                if let Some(link) = links.get_mut(&session) {
                    link.hear(shared, word, now);
                }
            }
            Command::Fence { session, grant, extents, done } => match links.get_mut(&session) {
                Some(link) => link.fence(shared, grant, extents, done, now),
                None => drop(done),
            },
            Command::Close { session, done } => match links.get_mut(&session) {
                Some(link) => link.close(done, now),
                None => drop(done),
            },
        }
    }

    fn sleep(&self, links: &mut HashMap<SessionKey, Link>) {
        let mut until: Option<Duration> = None;
        for link in links.values_mut() {
            let now = Instant::now();
            let wait = match link.arm(now) {
                true => Duration::ZERO, // something came before it was armed
                false if link.is_to_try_again => AGAIN,
                false => match link.poll_timeout() {
                    Some(at) => at.saturating_duration_since(now),
                    None => continue,
                },
            };
            until = Some(until.map_or(wait, |until| until.min(wait)));
        }
        let mut fds = vec![self.waker.entry()];
        fds.extend(self.adapter.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        self.waker.sleep(&mut fds, until);
    }
}

/// When this is dropped the thread is over.
struct Ended<'a>(&'a Verbs);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        let mut inbox = lock(&self.0.inbox);
        inbox.is_stopping = true;
        // Who waits for one of these hears that there is no answer.
        inbox.commands.clear();
    }
}

/// Queues a word of the path; a session that is over needs none.
pub(super) fn say(session: &Session, word: &VerbsWord) {
    let body = word.encode();
    let _ = session.queue_control(FrameHeader::with_body(FrameKind::Path, &body), &body, usize::MAX);
}

/// Reports a session that cannot go on.
pub(super) fn broken(shared: &Shared, session: &Session, problem: String) {
    let reason = TransportError::Protocol { peer: session.name.clone(), problem };
    shared.command(super::endpoint::Command::Broken { session: session.key, reason });
}

/// Counts a refusal and answers it, once a write.
pub(super) fn refuse(core: &Core, session: &Session, header: &FrameHeader, refusal: kvferry_protocol::wire::Refusal) {
    if session.is_new_refusal(header.grant, header.sequence) {
        crate::core::Counters::add(&core.counters.refused_writes, 1);
        let word = FrameHeader::about(FrameKind::Refuse, Some(refusal), header.grant, header.sequence);
        let _ = session.queue_control(word, &[], usize::MAX);
    }
}

fn wait_for(done: &Receiver<()>) {
    // An error: the thread has ended, and with it all queue pairs, or there is no such session any more.
    let _ = done.recv();
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
