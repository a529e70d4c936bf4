//! Two processes with queue pairs between them.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::api::{Memory, MemoryKind};
use crate::raw::{RawRun, Region, copy};
use crate::rdma::machine::MachineEvent;
use crate::rdma::memory::{RegionKeys, intersect};
use crate::rdma::rails::{Adapter, Rails, RailsParameters};
use crate::rdma::work::{Key, Order};
use crate::rdma::{RdmaConfig, RdmaConfigFile};

pub(super) const PAGE: usize = 16 << 10;
pub(super) const PAGES: usize = 256;
/// How many different scattered writes there are.
pub(super) const WRITES: usize = 24;
/// Pages of one scattered write.
const WRITE_PAGES: usize = 10;
const LIMIT: Duration = Duration::from_secs(60);
/// Where the child finds its parent.
const CONTROL: &str = "KVFERRY_RDMA_CONTROL";

/// One process's end.
pub(super) struct Side {
    pub(super) adapter: Arc<Adapter>,
    pub(super) rails: Rails,
    region: Region,
    control: Option<TcpStream>,
    child: Option<Child>,
    sessions: u64,
}

/// Runs both sides of the test of this name: the first here, the second in a process of its own.
pub(super) fn play(name: &str, here: impl FnOnce(&mut Side), there: impl FnOnce(&mut Side)) {
    if let Ok(address) = std::env::var(CONTROL) {
        there(&mut Side::new(TcpStream::connect(address).unwrap(), None));
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"])
        .env(CONTROL, listener.local_addr().unwrap().to_string())
        // Its count of tests is not another one.
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut side = Side::new(accept(&listener, LIMIT), Some(child));
    here(&mut side);
    if let Some(mut child) = side.child.take() {
        let status = child.wait().unwrap();
        assert!(status.success(), "the other side: {status}");
    }
}

fn accept(listener: &TcpListener, limit: Duration) -> TcpStream {
    sleep(&mut [PollFd::new(listener, PollFlags::IN)], limit);
    listener.set_nonblocking(true).unwrap();
    let (control, _) = listener.accept().expect("the other side connects");
    control.set_nonblocking(false).unwrap();
    control
}

fn sleep(fds: &mut [PollFd<'_>], limit: Duration) {
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    // Interrupted is as good as ready: the caller looks.
    let _ = poll(fds, Some(&limit));
}

/// An emulated device moves some MB/s: short requests and few bytes in flight, so that it answers before it is given up.
fn config() -> RdmaConfig {
    let file = RdmaConfigFile {
        request_bytes: 64 << 10,
        lane_bytes: 256 << 10,
        part_bytes: 64 << 10,
        ack_timeout: 15,
        drain_ms: 5_000,
        ..RdmaConfigFile::default()
    };
    file.try_into().unwrap()
}

impl Side {
    fn new(control: TcpStream, child: Option<Child>) -> Self {
        control.set_nodelay(true).unwrap();
        control.set_read_timeout(Some(LIMIT)).unwrap();
        let mut side = Self::alone();
        (side.control, side.child) = (Some(control), child);
        side.connect();
        side
    }

    /// A side that has no peer.
    pub(super) fn alone() -> Self {
        let adapter = Arc::new(Adapter::open(&config()).unwrap());
        let memory = Box::leak(vec![0u8; PAGE * PAGES].into_boxed_slice());
        let (address, bytes) = (NonNull::new(memory.as_mut_ptr()).unwrap(), memory.len());
        let memory = Memory { address, bytes, kind: MemoryKind::Host, file: None };
        let region = Region::of(&memory).unwrap();
        adapter.register(&memory).unwrap();
        let rails = Rails::new(&adapter, 1, Instant::now()).unwrap();
        Self { rails, adapter, region, control: None, child: None, sessions: 1 }
    }

    fn connect(&mut self) {
        self.say(&self.rails.parameters().encode());
        let peer = RailsParameters::decode(&self.hear()).unwrap();
        self.rails.connect(&peer, Instant::now()).unwrap();
        self.say(&self.adapter.region_keys(0).unwrap().encode());
        self.rails.add_peer_region(RegionKeys::decode(&self.hear()).unwrap()).unwrap();
        self.say(b"ready");
        assert_eq!(self.hear(), b"ready");
    }

    /// New queue pairs with the same peer; the old ones are gone.
    pub(super) fn renew(&mut self) {
        self.sessions += 1;
        self.rails = Rails::new(&self.adapter, self.sessions, Instant::now()).unwrap();
        self.connect();
    }

    pub(super) fn say(&self, word: &[u8]) {
        let mut control = self.control.as_ref().unwrap();
        let bytes = [&(word.len() as u32).to_le_bytes(), word].concat();
        control.write_all(&bytes).unwrap();
    }

    pub(super) fn hear(&self) -> Vec<u8> {
        let mut control = self.control.as_ref().unwrap();
        let mut length = [0; 4];
        control.read_exact(&mut length).unwrap();
        let mut word = vec![0; u32::from_le_bytes(length) as usize];
        control.read_exact(&mut word).unwrap();
        word
    }

    /// Whether the control connection has a word, or `None` if it has ended.
    fn peek(&self) -> Option<bool> {
        let control = self.control.as_ref().unwrap();
        control.set_nonblocking(true).unwrap();
        let peeked = control.peek(&mut [0]);
        control.set_nonblocking(false).unwrap();
        match peeked {
            Ok(0) => None,
            Ok(_) => Some(true),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Some(false),
            Err(_) => None,
        }
    }

    pub(super) fn was_spoken_to(&self) -> bool {
        self.peek().expect("the other side lives")
    }

    pub(super) fn is_alone(&self) -> bool {
        self.peek().is_none()
    }

    pub(super) fn kill_peer(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Waits for events, asleep.
    pub(super) fn some_events(&mut self, limit: Duration) -> Vec<MachineEvent> {
        let mut events = Vec::new();
        let end = Instant::now() + limit;
        loop {
            self.rails.poll(Instant::now(), &mut events);
            if events.is_empty() {
                self.rails.arm(Instant::now());
                self.rails.poll(Instant::now(), &mut events);
            }
            let now = Instant::now();
            if !events.is_empty() || now >= end {
                return events;
            }
            let until = self.rails.poll_timeout().map_or(end, |at| at.min(end));
            let mut fds: Vec<_> = self.adapter.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            sleep(&mut fds, until.saturating_duration_since(now));
            let mut ready = Vec::new();
            self.adapter.ready(&mut ready).unwrap();
        }
    }

    pub(super) fn next_events(&mut self, limit: Duration) -> Vec<MachineEvent> {
        let events = self.some_events(limit);
        assert!(!events.is_empty(), "nothing happened in {limit:?}");
        events
    }

    /// Waits until `is_enough` of all events from here on.
    pub(super) fn wait_for(
        &mut self,
        limit: Duration,
        is_enough: impl Fn(&[MachineEvent]) -> bool,
    ) -> Vec<MachineEvent> {
        let mut events = Vec::new();
        while !is_enough(&events) {
            events.extend(self.next_events(limit));
        }
        events
    }

    pub(super) fn fence(&mut self) {
        let mut events = Vec::new();
        self.rails.fence_now(&mut events);
        assert_eq!(self.rails.counts().lost, 0, "the queue pairs were not drained, but destroyed");
    }

    pub(super) fn own_run(&self, offset: usize, bytes: usize) -> RawRun {
        self.region.run(offset as u64, bytes as u64).unwrap()
    }

    /// Posts runs of (source offset, target offset, bytes).
    fn post(&mut self, id: u64, head: u8, runs: &[(usize, usize, usize)]) {
        let (mut local, mut remote) = (Vec::new(), Vec::<(Key, u64, u64)>::new());
        for (from, to, bytes) in runs {
            self.adapter.locate(&[self.own_run(*from, *bytes)], &mut local).unwrap();
            let memory = self.rails.peer_memory();
            memory.locate(0, *to as u64, *bytes as u64, |key, at, bytes| remote.push((key, at, bytes))).unwrap();
        }
        let order = Order { id, head: Bytes::from(vec![head]), runs: intersect(&local, &remote), is_spread: false };
        self.rails.post(order, Instant::now()).unwrap();
    }

    /// Fills the sources of all scattered writes; each byte tells its write and its place in it.
    pub(super) fn fill_sources(&self) {
        for (write, page) in (0..WRITES).flat_map(|write| (0..WRITE_PAGES).map(move |page| (write, page))) {
            let bytes: Vec<u8> = (0..PAGE).map(|at| content(write, page, at)).collect();
            copy(RawRun::of(&bytes), self.own_run(source_page(write, page) * PAGE, PAGE));
        }
    }

    /// A write of scattered pages into scattered pairs of pages.
    pub(super) fn post_scattered(&mut self, id: u64, write: usize) {
        let runs: Vec<_> = (0..WRITE_PAGES)
            .map(|page| (source_page(write, page) * PAGE, target_page(write, page) * PAGE, PAGE))
            .collect();
        self.post(id, write as u8, &runs);
    }

    pub(super) fn check_scattered(&self, write: usize) {
        for page in 0..WRITE_PAGES {
            let mut found = vec![0; PAGE];
            copy(self.own_run(target_page(write, page) * PAGE, PAGE), RawRun::of_mut(&mut found));
            let wrong = (0..PAGE).find(|at| found[*at] != content(write, page, *at));
            assert_eq!(wrong, None, "write {write}, page {page}");
        }
    }

    /// A write of equal blocks, in reverse order.
    pub(super) fn post_blocks(&mut self, id: u64, block: usize, bytes: usize) {
        let count = bytes / block;
        let runs: Vec<_> = (0..count).map(|at| ((count - 1 - at) * block, at * block, block)).collect();
        self.post(id, 0, &runs);
    }

    /// A write that begins inside the peer's region and goes on beyond its end.
    pub(super) fn post_beyond(&mut self, id: u64) {
        let mut local = Vec::new();
        self.adapter.locate(&[self.own_run(0, PAGE)], &mut local).unwrap();
        let mut remote = Vec::new();
        let last = (PAGE * PAGES - 10) as u64;
        self.rails.peer_memory().locate(0, last, 10, |key, at, _| remote.push((key, at, PAGE as u64))).unwrap();
        let order =
            Order { id, head: Bytes::from_static(b"beyond"), runs: intersect(&local, &remote), is_spread: false };
        self.rails.post(order, Instant::now()).unwrap();
    }

    pub(super) fn poison(&self, byte: u8) {
        let bytes = vec![byte; PAGE * PAGES];
        copy(RawRun::of(&bytes), self.own_run(0, PAGE * PAGES));
    }

    pub(super) fn assert_poison(&self, byte: u8, round: usize) {
        let mut found = vec![0; PAGE * PAGES];
        copy(self.own_run(0, PAGE * PAGES), RawRun::of_mut(&mut found));
        // An emulated processor counts bytes slowly: only if there is something to count.
        let late =
            if found == vec![byte; PAGE * PAGES] { 0 } else { found.iter().filter(|found| **found != byte).count() };
        assert_eq!(late, 0, "round {round}: bytes came after the fence");
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn content(write: usize, page: usize, at: usize) -> u8 {
    let mixed = ((write * WRITE_PAGES + page) as u32 * 65_537 + at as u32).wrapping_mul(2_654_435_761);
    (mixed >> 24) as u8
}

fn source_page(write: usize, page: usize) -> usize {
    (write * WRITE_PAGES + page) * 91 % PAGES
}

/// Two pages in a row each, so that one request gathers them.
fn target_page(write: usize, page: usize) -> usize {
    let pair = (write * WRITE_PAGES + page) / 2 * 37 % (PAGES / 2);
    pair * 2 + page % 2
}
