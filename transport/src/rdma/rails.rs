//! The queue pairs towards one peer, on all rails: a machine and the devices that it drives.
//!
//! One progress thread owns all of an endpoint's `Rails`. It sleeps on the rails' channels, asks [`Adapter::ready`] which peers have
//! something, and calls [`Rails::poll`] for those and for those whose [`Rails::poll_timeout`] is over; nothing waits for another peer.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::config::RdmaConfig;
use super::device::{PortFacts, Rail, failed, open_rails};
use super::error::RdmaError;
use super::hardware::{Hardware, LaneAddress};
use super::machine::{MAX_PAYLOAD_LANES, Machine, MachineConfig, MachineCounts, MachineEvent, Untaken};
use super::memory::{PeerMemory, RegionKeys, Registered};
use super::proof::LANE_PATTERN_BYTES;
use super::work::{Completion, Fault, Key, Order, Run};
use crate::api::Memory;
use crate::place::DeviceRun;
use crate::raw::RawRun;

/// The devices of one endpoint and the memory that is registered on them.
pub(crate) struct Adapter {
    pub(super) rails: Vec<Rail>,
    pub(super) memory: Registered,
    pub(super) config: RdmaConfig,
}

impl Adapter {
    /// Opens the devices that the settings choose.
    pub(crate) fn open(config: &RdmaConfig) -> Result<Self, RdmaError> {
        let rails = open_rails(config)?;
        let mut config = config.clone();
        let least = |limit: fn(&PortFacts) -> u64| rails.iter().map(|rail| limit(&rail.facts)).min().unwrap_or(0);
        let machine = &mut config.machine;
        machine.payload_lanes = (rails.len() * config.lanes_per_device).min(MAX_PAYLOAD_LANES);
        machine.segments = machine.segments.min(least(|facts| facts.max_segments.into()) as usize).max(1);
        machine.request_bytes = machine.request_bytes.min(least(|facts| facts.max_request_bytes.into()) as u32);
        machine.send_depth = machine.send_depth.min(least(|facts| facts.max_queue_pair_requests.into()) as u32);
        let memory = Registered::new(least(|facts| facts.max_registration_bytes));
        Ok(Self { rails, memory, config })
    }

    /// What was opened.
    pub(crate) fn ports(&self) -> impl Iterator<Item = &PortFacts> {
        self.rails.iter().map(|rail| &rail.facts)
    }

    /// Registers memory of any kind on all rails; gives its index, by which peers name it.
    pub(crate) fn register(&self, memory: &Memory) -> Result<usize, RdmaError> {
        self.memory.add(&self.rails, memory)
    }

    /// What a peer must know of a region to write into it.
    pub(crate) fn region_keys(&self, index: usize) -> Option<RegionKeys> {
        self.memory.keys(index)
    }

    /// Appends the pieces of local memory to a list that [`super::memory::intersect`] takes.
    pub(crate) fn locate(&self, runs: &[RawRun], pieces: &mut Vec<(Key, u64, u64)>) -> Result<(), RdmaError> {
        for run in runs {
            let (address, bytes) = (run.start() as u64, run.bytes() as u64);
            self.memory.locate(false, address, bytes, |key, address, bytes| pieces.push((key, address, bytes)))?;
        }
        Ok(())
    }

    /// The same of a device's memory.
    pub(crate) fn locate_of_device(
        &self,
        runs: &[DeviceRun],
        pieces: &mut Vec<(Key, u64, u64)>,
    ) -> Result<(), RdmaError> {
        for run in runs {
            let piece = |key, address, bytes| pieces.push((key, address, bytes));
            self.memory.locate(true, run.address, run.bytes, piece)?;
        }
        Ok(())
    }

    /// Descriptors to sleep on: readable when peers have something, for those that are armed.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.rails.iter().map(|rail| std::os::fd::AsFd::as_fd(&*rail.channel))
    }

    /// Appends the numbers of the [`Rails`] that have something; each has to be armed anew.
    pub(crate) fn ready(&self, numbers: &mut Vec<u64>) -> Result<(), RdmaError> {
        for rail in &self.rails {
            let failed = |error: io::Error| failed(&rail.facts.device, "get_cq_event", error);
            while let Some(number) = rail.channel.next_event().map_err(failed)? {
                if !numbers.contains(&number) {
                    numbers.push(number);
                }
            }
        }
        Ok(())
    }
}

/// What a peer must know to connect its queue pairs to these.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct RailsParameters {
    /// Writes that the peer may have under way.
    pub(crate) window: u32,
    /// The longest head that it may send.
    pub(crate) head_bytes: u32,
    /// How many rails this side has.
    pub(crate) rails: u8,
    /// The queue pairs: the first carries words, the others payload.
    pub(crate) lanes: Vec<LaneAddress>,
}

/// The queue pairs towards one peer.
pub(crate) struct Rails {
    machine: Machine,
    hardware: Hardware,
    config: MachineConfig,
    completions: Vec<Completion>,
}

/// How many completions one poll takes at most, so that no peer holds up the others.
const POLL_BUDGET: usize = 256;

impl Rails {
    /// Makes queue pairs; `number` is what [`Adapter::ready`] calls them.
    pub(crate) fn new(adapter: &Arc<Adapter>, number: u64, now: Instant) -> Result<Self, RdmaError> {
        let config = adapter.config.machine;
        let hardware = Hardware::new(adapter, number, &config)?;
        Ok(Self { machine: Machine::new(config, now), hardware, config, completions: Vec::new() })
    }

    /// What to tell the peer.
    pub(crate) fn parameters(&self) -> RailsParameters {
        RailsParameters {
            window: self.config.window,
            head_bytes: self.config.head_bytes as u32,
            rails: self.hardware.rails() as u8,
            lanes: self.hardware.addresses(),
        }
    }

    /// Connects to the peer's queue pairs. Nothing is to be posted before the peer has said that it is connected too.
    pub(crate) fn connect(&mut self, peer: &RailsParameters, now: Instant) -> Result<(), RdmaError> {
        let refuse = |problem: String| Err(RdmaError::Parameters { problem });
        let own = self.config.payload_lanes + 1;
        if peer.lanes.len() != own {
            let problem = format!("it has {} and this side has {own}; give both the same number", peer.lanes.len());
            return refuse(problem);
        }
        if peer.window == 0 || peer.head_bytes < 256 || peer.rails == 0 {
            return refuse("its window, heads or rails are too few".to_owned());
        }
        if peer.lanes.iter().any(|lane| lane.rail >= peer.rails) {
            return refuse("a queue pair is on a rail that it has not".to_owned());
        }
        self.hardware.connect(peer)?;
        self.machine.open(&mut self.hardware, peer.window, peer.head_bytes as usize, now);
        self.hardware.ready_to_send()
    }

    /// Bytes of a test pattern.
    pub(crate) fn pattern_bytes(&self) -> usize {
        self.config.payload_lanes * LANE_PATTERN_BYTES
    }

    /// Where the peer is to write its test pattern.
    pub(crate) fn pattern_keys(&self) -> RegionKeys {
        self.hardware.pattern_keys()
    }

    /// Takes where this side is to write its test pattern.
    pub(crate) fn set_peer_pattern(&mut self, memory: RegionKeys) -> Result<(), RdmaError> {
        let (bytes, rails) = (self.pattern_bytes(), self.hardware.peer_rails());
        self.hardware.peer.set_pattern(memory, bytes, rails)
    }

    /// Writes a test pattern over all payload lanes; its head is empty. `false` if it cannot be posted.
    pub(crate) fn write_pattern(&mut self, pattern: &[u8], id: u64, now: Instant) -> bool {
        let Some(remote) = self.hardware.peer.pattern_address() else { return false };
        let local = self.hardware.lay_pattern(pattern);
        let (local_key, remote_key, bytes) = (Key::PATTERN, Key::PATTERN, pattern.len() as u64);
        let runs = vec![Run { local, local_key, remote, remote_key, bytes }];
        self.post(Order { id, head: Bytes::new(), runs, is_spread: true }, now).is_ok()
    }

    /// What came as the peer's test pattern.
    pub(crate) fn came_as_pattern(&self) -> Vec<u8> {
        self.hardware.came_as_pattern()
    }

    /// Of each payload lane, how many parts from here have ended, and how many of the peer's are in place.
    pub(crate) fn parts_ended(&self) -> Vec<u64> {
        self.machine.parts_ended()
    }

    /// See [`parts_ended`](Self::parts_ended).
    pub(crate) fn parts_taken(&self) -> Vec<u64> {
        self.machine.parts_taken()
    }

    /// Whether it is connected and nothing has ended it.
    pub(crate) fn is_open(&self) -> bool {
        self.machine.is_open()
    }

    /// Takes what the peer says of its regions, in its order.
    pub(crate) fn add_peer_region(&mut self, region: RegionKeys) -> Result<(), RdmaError> {
        let rails = self.hardware.peer_rails();
        self.hardware.peer.add(region, rails)
    }

    /// The peer's memory, by which orders name it.
    pub(crate) fn peer_memory(&self) -> &PeerMemory {
        &self.hardware.peer
    }

    /// Takes an order; it ends in one `Sent` or `Failed`.
    pub(crate) fn post(&mut self, order: Order, now: Instant) -> Result<(), Box<Untaken>> {
        self.machine.post(&mut self.hardware, order, now)
    }

    /// Whether an order would be taken.
    pub(crate) fn has_room(&self) -> bool {
        self.machine.has_room()
    }

    /// Whether the peer's places are kept when its writes land: then it stops when it has none left.
    pub(crate) fn hold(&mut self, is_held: bool) {
        self.machine.hold(is_held);
    }

    /// Whether the peer and this side take a head of this length.
    pub(crate) fn takes_head(&self, bytes: usize) -> bool {
        self.machine.takes_head(bytes)
    }

    /// Takes back an order that has not begun.
    pub(crate) fn withdraw(&mut self, id: u64) -> Option<Order> {
        self.machine.withdraw(id)
    }

    /// Goes on: takes completions, posts what there is room for, ends what is late. Returns whether it took any.
    pub(crate) fn poll(&mut self, now: Instant, events: &mut Vec<MachineEvent>) -> bool {
        let mut taken = 0;
        while taken < POLL_BUDGET {
            self.completions.clear();
            if let Err(error) = self.hardware.poll(&mut self.completions) {
                let fault = Fault::Call { call: "poll_cq", text: error.to_string() };
                self.machine.break_off(&mut self.hardware, fault, now);
                break;
            }
            if self.completions.is_empty() {
                break;
            }
            taken += self.completions.len();
            for completion in self.completions.drain(..) {
                self.machine.complete(&mut self.hardware, completion, now);
            }
            self.machine.advance(&mut self.hardware, now);
        }
        if self.poll_timeout().is_some_and(|at| at <= now) {
            self.machine.time_out(&mut self.hardware, now);
        }
        events.extend(std::iter::from_fn(|| self.machine.poll_event()));
        taken > 0
    }

    /// Asks for an event with the next completion. [`poll`](Self::poll) once more before sleeping: what came before makes none.
    pub(crate) fn arm(&mut self, now: Instant) {
        if let Err(error) = self.hardware.arm() {
            let fault = Fault::Call { call: "req_notify_cq", text: error.to_string() };
            self.machine.break_off(&mut self.hardware, fault, now);
        }
    }

    /// When [`poll`](Self::poll) has something to do, if nothing comes before.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        self.machine.poll_timeout()
    }

    /// Puts the queue pairs into error. After the event `Closed` nothing is read or written for this peer any more.
    pub(crate) fn fence(&mut self, now: Instant) {
        self.machine.fence(&mut self.hardware, now);
    }

    /// Fences and waits for the end, which takes at most the time that draining has and a little.
    pub(crate) fn fence_now(&mut self, events: &mut Vec<MachineEvent>) -> Duration {
        let start = Instant::now();
        self.fence(start);
        loop {
            self.poll(Instant::now(), events);
            if self.machine.is_closed() {
                return start.elapsed();
            }
            std::thread::yield_now();
        }
    }

    pub(crate) fn counts(&self) -> MachineCounts {
        self.machine.counts
    }
}
