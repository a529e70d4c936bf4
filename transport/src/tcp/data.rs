//! The threads that carry payload: each has some lanes and waits for all of them in poll(2).

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::endpoint::{Command, Shared};
use super::lane::{Lane, Ready};
use super::session::Session;
use super::stream::Stream;
use super::wake::Waker;

/// What a data thread reads frames under dead grants into.
const SINK_BYTES: usize = 64 << 10;

/// A data thread, as other threads see it.
pub(crate) struct DataThread {
    pub(crate) waker: Waker,
    new_lanes: Mutex<Vec<Lane>>,
    is_stopping: AtomicBool,
}

impl DataThread {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self { waker: Waker::new()?, new_lanes: Mutex::default(), is_stopping: AtomicBool::new(false) })
    }

    /// `tells`: whether the lane is its session's first, which tells the peer which memory is shared.
    pub(crate) fn add(&self, session: Arc<Session>, stream: Stream, tells: bool) {
        let lane = Lane::new(session, stream, tells);
        self.new_lanes.lock().unwrap_or_else(PoisonError::into_inner).push(lane);
        self.waker.wake();
    }

    pub(crate) fn stop(&self) {
        self.is_stopping.store(true, Ordering::SeqCst);
        self.waker.wake();
    }

    pub(crate) fn run(&self, shared: &Shared) {
        let mut lanes: Vec<Lane> = Vec::new();
        let mut sink = vec![0; SINK_BYTES];
        while !self.is_stopping.load(Ordering::SeqCst) {
            let new = std::mem::take(&mut *self.new_lanes.lock().unwrap_or_else(PoisonError::into_inner));
            lanes.extend(new);
            lanes.retain_mut(|lane| {
                if lane.session.is_over() {
                    return false;
                }
                match lane.turn(&shared.core, &mut sink, shared.config.frame_bytes) {
                    Ok(()) => true,
                    Err(reason) => {
                        shared.command(Command::Broken { session: lane.session.key, reason });
                        false
                    }
                }
            });
            self.sleep(&mut lanes);
        }
    }

    fn sleep(&self, lanes: &mut [Lane]) {
        let mut timeout = None;
        let mut fds = Vec::with_capacity(lanes.len() + 1);
        fds.push(self.waker.entry());
        for lane in &*lanes {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, lane.wants.read);
            flags.set(PollFlags::OUT, lane.wants.write);
            // One that waits for nothing stays out: a hang-up would be reported over and over.
            if !flags.is_empty() {
                fds.push(PollFd::from_borrowed_fd(lane.stream().as_fd(), flags));
            }
            let wait = match (lane.wants.again, lane.wants.at) {
                (true, _) => Some(Duration::ZERO),
                (false, at) => at.map(|at| at.saturating_duration_since(Instant::now())),
            };
            timeout = match (timeout, wait) {
                (Some(a), Some(b)) => Some(std::cmp::min::<Duration>(a, b)),
                (a, b) => a.or(b),
            };
        }
        self.waker.sleep(&mut fds, timeout);
        let found: Vec<PollFlags> = fds.iter().skip(1).map(PollFd::revents).collect();
        let mut found = found.into_iter();
        for lane in lanes {
            let was_polled = lane.wants.read || lane.wants.write;
            let found = if was_polled { found.next().unwrap_or(PollFlags::empty()) } else { PollFlags::empty() };
            // What was not waited for is tried; a hang-up or an error shows in either direction.
            let broken = found.intersects(PollFlags::HUP | PollFlags::ERR);
            lane.ready = Ready {
                read: !lane.wants.read || found.contains(PollFlags::IN) || broken,
                write: !lane.wants.write || found.contains(PollFlags::OUT) || broken,
            };
        }
    }
}
