//! The threads that carry payload: each has some lanes and looks at those that can go on, in turn.
//!
//! A lane can go on when its socket is ready, when it was called (its session has something to send or is over), when the link's rate
//! lets it, or when its last turn ended early. In each *round* every one of them has one turn, so that no peer waits for another's end.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::calls::{Bell, Calls};
use super::endpoint::{Command, Shared};
use super::lane::Lane;
use super::poller::{Interest, Poller};
use super::session::Session;
use super::stream::Stream;
use super::timers::Timers;
use crate::error::TransportError;

/// What a data thread reads frames under dead grants into.
const SINK_BYTES: usize = 64 << 10;

/// A data thread, as other threads see it.
pub(crate) struct DataThread {
    pub(crate) calls: Arc<Calls>,
    /// Taken by the thread.
    poller: Mutex<Option<Poller>>,
    next_lane: AtomicU64,
    new_lanes: Mutex<Vec<(u64, Lane)>>,
    is_stopping: AtomicBool,
}

impl DataThread {
    pub(crate) fn new() -> io::Result<Self> {
        let calls = Calls::new()?;
        let poller = Mutex::new(Some(Poller::new(calls.waker())?));
        let (next_lane, new_lanes, is_stopping) = Default::default();
        Ok(Self { calls, poller, next_lane, new_lanes, is_stopping })
    }

    /// What calls the thread to a lane that is given to [`DataThread::add`] then.
    pub(crate) fn bell(&self) -> Bell {
        Bell::new(&self.calls, self.next_lane.fetch_add(1, Ordering::Relaxed))
    }

    /// `tells`: whether the lane is its session's first, which tells the peer which memory is shared.
    pub(crate) fn add(&self, key: u64, session: Arc<Session>, stream: Stream, tells: bool) {
        let lane = Lane::new(session, stream, tells);
        self.new_lanes.lock().unwrap_or_else(PoisonError::into_inner).push((key, lane));
        self.calls.wake();
    }

    pub(crate) fn stop(&self) {
        self.is_stopping.store(true, Ordering::SeqCst);
        self.calls.wake();
    }

    pub(crate) fn run(&self, shared: &Shared) {
        let poller = self.poller.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(poller) = poller else { return };
        let mut rounds = Rounds {
            shared,
            poller,
            lanes: HashMap::new(),
            queue: VecDeque::new(),
            held: Vec::new(),
            timers: Timers::new(),
            sink: vec![0; SINK_BYTES],
            number: 0,
        };
        while !self.is_stopping.load(Ordering::SeqCst) {
            let new = std::mem::take(&mut *self.new_lanes.lock().unwrap_or_else(PoisonError::into_inner));
            rounds.add(new);
            rounds.hear(&self.calls);
            rounds.turn();
            rounds.sleep(&self.calls);
        }
    }
}

/// The thread's own.
struct Rounds<'a> {
    shared: &'a Shared,
    poller: Poller,
    /// Boxed: a table has room for twice as many.
    lanes: HashMap<u64, Box<Served>>,
    /// Those that can go on, the one whose turn was longest ago first.
    queue: VecDeque<u64>,
    /// Those that read nothing until events are polled.
    held: Vec<u64>,
    /// Those that the link's rate lets go on later.
    timers: Timers<u64>,
    sink: Vec<u8>,
    number: u64,
}

struct Served {
    lane: Lane,
    is_queued: bool,
    is_held: bool,
}

impl Rounds<'_> {
    fn add(&mut self, lanes: Vec<(u64, Lane)>) {
        for (key, lane) in lanes {
            self.lanes.insert(key, Box::new(Served { lane, is_queued: true, is_held: false }));
            self.queue.push_back(key);
        }
    }

    /// Queues what the thread is called to, and what is due.
    fn hear(&mut self, calls: &Calls) {
        let mut called = VecDeque::new();
        calls.take(&mut called);
        if calls.take_all() {
            called.extend(self.lanes.keys());
        }
        if calls.take_room() {
            for key in self.held.drain(..) {
                if let Some(served) = self.lanes.get_mut(&key) {
                    served.is_held = false;
                    called.push_back(key);
                }
            }
        }
        if self.timers.next().is_some() {
            let now = Instant::now();
            called.extend(std::iter::from_fn(|| self.timers.pop(now)));
        }
        called.into_iter().for_each(|key| self.queue(key));
    }

    fn queue(&mut self, key: u64) {
        let Some(served) = self.lanes.get_mut(&key) else { return };
        if !std::mem::replace(&mut served.is_queued, true) {
            self.queue.push_back(key);
        }
    }

    /// One turn for each lane that can go on.
    fn turn(&mut self) {
        self.number += 1;
        for _ in 0..self.queue.len() {
            let Some(key) = self.queue.pop_front() else { return };
            let Some(served) = self.lanes.get_mut(&key) else { continue };
            served.is_queued = false;
            if served.lane.session.is_over() {
                self.remove(key);
            } else if let Err(reason) = self.serve(key) {
                let session = self.remove(key);
                if let Some(session) = session {
                    self.shared.command(Command::Broken { session: session.key, reason });
                }
            }
        }
    }

    fn serve(&mut self, key: u64) -> Result<(), TransportError> {
        let (core, frame_bytes) = (&self.shared.core, self.shared.config.frame_bytes);
        let Some(served) = self.lanes.get_mut(&key) else { return Ok(()) };
        let Served { lane, is_held, .. } = &mut **served;
        lane.turn(core, &mut self.sink, frame_bytes, self.number)?;
        let wants = lane.wants;
        let watched = self.poller.watch(key, lane.stream().as_fd(), wants.of_socket);
        watched.map_err(|error| lane.broken("watch a data lane", error))?;
        if let Some(at) = wants.at {
            self.timers.set(key, at);
        }
        if wants.room && !std::mem::replace(is_held, true) {
            self.held.push(key);
        }
        if wants.again {
            self.queue(key);
        }
        Ok(())
    }

    fn remove(&mut self, key: u64) -> Option<Arc<Session>> {
        let Served { lane, .. } = *self.lanes.remove(&key)?;
        self.poller.forget(key, lane.stream().as_fd());
        self.timers.clear(key);
        Some(lane.session)
    }

    fn sleep(&mut self, calls: &Calls) {
        let until = || self.timers.next().map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = if self.queue.is_empty() { until() } else { Some(Duration::ZERO) };
        for found in self.poller.sleep(calls.waker(), timeout) {
            let Some(served) = self.lanes.get_mut(&found.key) else { continue };
            served.lane.ready.read |= found.read;
            served.lane.ready.write |= found.write;
            if !std::mem::replace(&mut served.is_queued, true) {
                self.queue.push_back(found.key);
            }
        }
    }
}

/// What a lane waits for, when its turn is over.
#[derive(Clone, Copy, Default)]
pub(crate) struct Wants {
    pub(crate) of_socket: Interest,
    /// It can go on at once.
    pub(crate) again: bool,
    /// The link's rate lets it go on then.
    pub(crate) at: Option<Instant>,
    /// That somebody polls: there is no room for events.
    pub(crate) room: bool,
}
