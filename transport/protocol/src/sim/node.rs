//! One engine with its machines, as the driver sees them.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::ids::{EngineId, Generation, Incarnation, PeerId, PpRank, TpRank, TransferId};
use crate::message::Grant;
use crate::transfer::{Coverage, Early, EarlyConfig, PostOutcome, Receiver, Rect, Sender, Time};

use super::memory::{Blocks, Pool};
use super::plan::{LAYERS, NodePlan};

/// A transfer with the engine at the other end.
pub(super) type Key = (usize, TransferId);

#[derive(Debug)]
pub(super) struct Node {
    pub(super) incarnation: u64,
    pub(super) alive: bool,
    rate: u64,
    offset: u64,
    pub(super) inbox: VecDeque<Inbox>,
    /// An event that takes the next input from the inbox is scheduled.
    pub(super) polling: bool,
    /// When the earliest scheduled look at the timers is.
    pub(super) timer_at: Option<u64>,
    pub(super) peers: BTreeMap<usize, PeerView>,
    pub(super) early: Early,
    pub(super) pool: Pool,
    pub(super) receivers: BTreeMap<Key, ReceiverSlot>,
    pub(super) senders: BTreeMap<Key, SenderSlot>,
}

/// What a driver knows of a peer.
#[derive(Debug, Clone, Copy)]
pub(super) struct PeerView {
    pub(super) incarnation: u64,
    pub(super) session: u64,
    pub(super) up: bool,
}

#[derive(Debug)]
pub(super) struct ReceiverSlot {
    pub(super) machine: Receiver,
    pub(super) request: usize,
    /// The peer's incarnation, once there was a session.
    pub(super) peer: Option<u64>,
    pub(super) blocks: Blocks,
    pub(super) keys: BTreeMap<Generation, u64>,
    pub(super) last_generation: Option<Generation>,
    /// Hashed by the driver.
    pub(super) hashed: Coverage,
    pub(super) hashing: u32,
    pub(super) finished: bool,
    /// It must be finished by then.
    pub(super) limit: u64,
}

#[derive(Debug)]
pub(super) struct SenderSlot {
    pub(super) machine: Sender,
    pub(super) request: usize,
    pub(super) peer: Option<u64>,
    pub(super) blocks: Blocks,
    pub(super) computed: Coverage,
    pub(super) adopted: Option<Grant>,
    /// Posted under the adopted grant.
    pub(super) posted: Coverage,
    pub(super) released: bool,
    pub(super) finished: bool,
    pub(super) limit: u64,
}

/// One input of a node, in the order in which its driver gets them.
#[derive(Debug)]
pub(super) enum Inbox {
    Up { peer: usize, incarnation: u64, session: u64 },
    Down { peer: usize },
    Message { peer: usize, incarnation: u64, bytes: Vec<u8> },
    Landed { peer: usize, incarnation: u64, wrote: Vec<u8> },
    Posted { key: Key, generation: Generation, sequence: u32, outcome: PostOutcome },
    Granted { key: Key, generation: Generation, missing: Vec<Rect> },
    Fenced { key: Key, generation: Generation },
    Digested { key: Key, generation: Generation, sequence: u32, rect: Rect },
    Decode { request: usize },
    Prefill { request: usize },
    Computed { request: usize, step: usize },
    CancelReceiver { request: usize },
    CancelSender { request: usize },
    FailSender { request: usize },
    Timer,
}

pub(super) const EARLY: EarlyConfig =
    EarlyConfig { max_messages: 5, max_messages_per_peer: 3, ttl: Duration::from_millis(500) };

impl Node {
    pub(super) fn new(plan: &NodePlan, incarnation: u64) -> Self {
        Self {
            incarnation,
            alive: true,
            rate: plan.rate,
            offset: plan.offset,
            inbox: VecDeque::new(),
            polling: false,
            timer_at: None,
            peers: BTreeMap::new(),
            early: Early::new(EARLY),
            pool: Pool::new(plan.blocks, plan.tokens_per_block, LAYERS),
            receivers: BTreeMap::new(),
            senders: BTreeMap::new(),
        }
    }

    /// What its clock shows at a moment of the world.
    pub(super) fn clock(&self, world: u64) -> Time {
        Time::since_epoch(Duration::from_micros(self.offset + world * self.rate / 1000))
    }

    /// The first moment of the world at which its clock shows `time`.
    pub(super) fn world_time(&self, time: Time) -> u64 {
        // A clock counts whole microseconds.
        let shown = u64::try_from(time.elapsed().as_nanos().div_ceil(1000)).unwrap_or(u64::MAX);
        (shown.saturating_sub(self.offset) * 1000).div_ceil(self.rate)
    }

    /// When something is due, on its clock.
    pub(super) fn next_timeout(&self) -> Option<(Time, &'static str)> {
        let receivers = self.receivers.values().filter_map(|slot| slot.machine.poll_timeout());
        let senders = self.senders.values().filter_map(|slot| slot.machine.poll_timeout());
        receivers.chain(senders).chain(self.early.poll_timeout()).min()
    }
}

pub(super) fn peer_id(node: usize, incarnation: u64) -> PeerId {
    PeerId {
        engine: EngineId::new(&format!("engine-{node}")).expect("a legal name"),
        incarnation: Incarnation::new(incarnation),
        pp_rank: PpRank::new(0),
        tp_rank: TpRank::new(0),
    }
}
