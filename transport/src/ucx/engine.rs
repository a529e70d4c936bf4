//! The thread that drives UCX: all handles are its own, and all calls of UCX are made here.
//!
//! Links that moved are *hot* and driven in turn. One that has nothing to do is *armed*: its event descriptor, in one epoll set with
//! those of all others, wakes the thread. So an idle link costs nothing, and a busy one no system call between two turns.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec};
use ucx_sys::Library;

use super::error::UcxError;
use super::events::{UcxEvent, UcxSink};
use super::ffi::{Context, Mapped};
use super::link::{Gate, Link};
use super::node::{Command, LinkId, Shared};
use super::regions::Regions;
use super::survey::{self, UcxFacts};
use super::window::RegionKey;

/// Turns without movement before the thread sleeps. Few: a thread that spins takes the core that the peer, or the engine, needs.
const IDLE_TURNS: usize = 8;
/// How long a full sink is left alone.
const FULL_WAIT: Duration = Duration::from_millis(1);
/// How many woken links are learned of at once.
const WOKEN: usize = 64;

/// Runs until the node is shut down. The result of starting goes to `started`.
pub(super) fn run(
    shared: &Arc<Shared>,
    library: &'static Library,
    sink: Rc<dyn UcxSink>,
    started: &SyncSender<Result<UcxFacts, UcxError>>,
) {
    // Also if this thread panics: nobody must wait for its answer then.
    let _stop = StopWithThread(shared);
    let made = survey::start(library, &shared.config).and_then(|(context, facts)| {
        let epoll = epoll::create(CreateFlags::CLOEXEC);
        let epoll = epoll.map_err(|error| UcxError::io("make an epoll set")(error.into()))?;
        Ok((Engine { shared, sink, epoll, links: HashMap::new(), regions: Regions::default(), context }, facts))
    });
    match made {
        // Who started the node may have given up.
        Err(error) => drop(started.send(Err(error))),
        Ok((engine, facts)) => {
            if started.send(Ok(facts)).is_ok() {
                engine.run();
            }
        }
    }
}

struct StopWithThread<'a>(&'a Shared);

impl Drop for StopWithThread<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.is_stopping = true;
        // Whoever waits for a reply learns that none comes.
        let dropped = std::mem::take(&mut state.commands);
        drop(state);
        drop(dropped);
    }
}

/// Links are destroyed before regions, and regions before the context.
struct Engine<'a> {
    shared: &'a Shared,
    sink: Rc<dyn UcxSink>,
    epoll: OwnedFd,
    links: HashMap<LinkId, Link>,
    regions: Regions,
    context: Rc<Context>,
}

/// Which links have a turn, and when others must have one.
#[derive(Default)]
struct Schedule {
    hot: BTreeSet<LinkId>,
    deadlines: BTreeMap<LinkId, Instant>,
}

impl Engine<'_> {
    fn run(mut self) {
        let mut schedule = Schedule::default();
        let (mut idle_turns, mut is_stopping) = (0, false);
        loop {
            let commands = {
                let mut state = self.shared.lock();
                is_stopping |= state.is_stopping;
                std::mem::take(&mut state.commands)
            };
            let mut moved = !commands.is_empty();
            for command in commands {
                self.obey(command, &mut schedule);
            }
            if is_stopping {
                self.close_all(&mut schedule);
            }
            if self.sink.is_full() && !is_stopping {
                self.sleep(&mut schedule, Some(FULL_WAIT));
                continue;
            }
            moved |= self.turn(&mut schedule);
            // Looked at after the turn, in which the last link may have ended: nobody wakes a thread that has no link.
            if is_stopping && self.links.is_empty() {
                return;
            }
            idle_turns = if moved { 0 } else { idle_turns + 1 };
            if idle_turns < IDLE_TURNS {
                continue;
            }
            self.arm(&mut schedule);
            if schedule.hot.is_empty() {
                let now = Instant::now();
                let next = schedule.deadlines.values().min().copied();
                self.sleep(&mut schedule, next.map(|next| next.saturating_duration_since(now)));
            }
        }
    }

    fn obey(&mut self, command: Command, schedule: &mut Schedule) {
        let now = Instant::now();
        let mut events = Vec::new();
        match command {
            Command::Register { memory, reply } => {
                // Whoever asked waits, so that there is room.
                let _ = reply.try_send(self.register(memory));
            }
            Command::Open { link, gate, reply } => {
                let opened = self.open(link, gate, now);
                // UCX says when there is something to do only once the worker is armed, as it is after a turn.
                self.with(link, schedule, |_| ());
                let _ = reply.try_send(opened);
            }
            Command::Connect { link, card } => {
                self.with(link, schedule, |of| of.connect(&card, now));
            }
            Command::Post { link, post, cargo, note } => {
                let taken = self.with(link, schedule, |of| of.post(post, cargo, note, now, &mut events));
                if !taken {
                    events.push(UcxEvent::Posted { link, post, outcome: Err(UcxError::NoLink { link }) });
                }
            }
            Command::Cancel { link, post, done } => {
                self.with(link, schedule, |of| of.cancel(post, done, now, &mut events));
            }
            Command::Close { link, reason, done } => {
                self.with(link, schedule, |of| of.close(UcxError::Closed { link, reason }, done, now));
            }
        }
        events.into_iter().for_each(|event| self.sink.event(event));
    }

    /// Lets something be done to a link, which gets a turn then; false if there is none. What was to reply is dropped then, which
    /// tells as much.
    fn with(&mut self, id: LinkId, schedule: &mut Schedule, act: impl FnOnce(&mut Link)) -> bool {
        let Some(link) = self.links.get_mut(&id) else { return false };
        act(link);
        schedule.hot.insert(id);
        true
    }

    #[expect(unsafe_code, reason = "the caller of UcxNode::register vouches for the memory")]
    fn register(&mut self, memory: crate::raw::RawRun) -> Result<RegionKey, UcxError> {
        // SAFETY: the caller of `UcxNode::register` keeps the memory until the node is shut down, which drops the region.
        let mapped = unsafe { Mapped::new(&self.context, memory) }?;
        let (start, bytes) = (memory.start().expose_provenance(), memory.bytes());
        let key = RegionKey { address: start as u64, bytes: bytes as u64, packed: mapped.pack()? };
        self.regions.add(start, bytes, mapped);
        Ok(key)
    }

    fn open(&mut self, id: LinkId, gate: Arc<Gate>, now: Instant) -> Result<Bytes, UcxError> {
        let (link, card) = Link::new(&self.context, id, gate, &self.shared.config, &self.sink, now)?;
        let fd = link.worker().event_fd()?;
        let added = epoll::add(&self.epoll, fd, EventData::new_u64(id.0), EventFlags::IN);
        added.map_err(|error| UcxError::io("watch a worker's event descriptor")(error.into()))?;
        self.links.insert(id, link);
        Ok(card)
    }

    /// Gives each hot link a turn. Returns whether anything moved.
    fn turn(&mut self, schedule: &mut Schedule) -> bool {
        let now = Instant::now();
        let mut moved = false;
        let mut events = Vec::new();
        for id in schedule.hot.clone() {
            let Some(link) = self.links.get_mut(&id) else {
                schedule.hot.remove(&id);
                continue;
            };
            moved |= link.turn(&self.regions, now, &mut events);
            moved |= !events.is_empty();
            if link.is_over(now) {
                self.finish(id, schedule, &mut events);
            } else {
                schedule.expect(id, link.deadline(now));
            }
            events.drain(..).for_each(|event| self.sink.event(event));
        }
        moved
    }

    fn finish(&mut self, id: LinkId, schedule: &mut Schedule, events: &mut Vec<UcxEvent>) {
        schedule.hot.remove(&id);
        schedule.deadlines.remove(&id);
        let Some(link) = self.links.remove(&id) else { return };
        let forgotten = link.worker().event_fd().map(|fd| epoll::delete(&self.epoll, fd));
        if !matches!(forgotten, Ok(Ok(()))) {
            tracing::warn!(link = %id, "a worker's event descriptor was not watched");
        }
        self.shared.lock().links.remove(&id);
        link.finish(events);
    }

    fn close_all(&mut self, schedule: &mut Schedule) {
        let now = Instant::now();
        for (&id, link) in &mut self.links {
            link.close(UcxError::Closed { link: id, reason: "this side shuts down".to_owned() }, None, now);
            schedule.hot.insert(id);
        }
    }

    /// Arms the hot links; those that have something to do stay hot.
    ///
    /// UCX is asked once more after it armed: what completed just before is told by the event descriptor on cards that compare what was
    /// read of a completion queue with what is in it (mlx5), but by verbs' own rules need not be, and soft-RoCE does not tell it.
    fn arm(&mut self, schedule: &mut Schedule) {
        let links = &mut self.links;
        schedule.hot.retain(|id| {
            let Some(link) = links.get_mut(id) else { return false };
            match link.worker().arm() {
                Ok(is_armed) => !is_armed || link.worker().progress(),
                Err(error) => {
                    link.close(error, None, Instant::now());
                    true
                }
            }
        });
    }

    /// Sleeps until something wakes the thread or the time is over; the links that are due become hot.
    fn sleep(&self, schedule: &mut Schedule, timeout: Option<Duration>) {
        let mut fds = [self.shared.waker.entry(), PollFd::new(&self.epoll, PollFlags::IN)];
        self.shared.waker.sleep(&mut fds, timeout);
        let mut woken = [MaybeUninit::uninit(); WOKEN];
        // Interrupted or failed: what is ready is ready the next time.
        if let Ok((woken, _)) = epoll::wait(&self.epoll, &mut woken, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            schedule.hot.extend(woken.iter().map(|event| LinkId(event.data.u64())));
        }
        let now = Instant::now();
        schedule.hot.extend(schedule.deadlines.iter().filter(|&(_, &at)| at <= now).map(|(&id, _)| id));
    }
}

impl Schedule {
    fn expect(&mut self, id: LinkId, deadline: Option<Instant>) {
        match deadline {
            Some(at) => self.deadlines.insert(id, at),
            None => self.deadlines.remove(&id),
        };
    }
}
