//! One rank with its machines, as its driver sees them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use crate::ids::{Generation, PeerId, TransferId};
use crate::message::{Grant, Message, Verdict};
use crate::transfer::{Coverage, Early, EarlyConfig, GrantRefusal, Parts, PostOutcome, Receiver, Rect, Sender, Time};

use super::liars::Liar;
use super::memory::{Blocks, Memory};
use super::plan::{Act, Ambush, AmbushState, Plan};

#[derive(Debug)]
pub(super) struct Node {
    pub(super) incarnation: u64,
    pub(super) alive: bool,
    rate: u64,
    offset: u64,
    pub(super) pace: u64,
    /// Its process takes no input until then.
    pub(super) stopped_until: u64,
    pub(super) inbox: VecDeque<Inbox>,
    /// An event that takes the next input from the inbox is scheduled.
    pub(super) polling: bool,
    /// When the earliest scheduled look at the timers is.
    pub(super) timer_at: Option<u64>,
    /// When the last word of its engine arrives.
    pub(super) told_at: u64,
    /// By link.
    pub(super) views: BTreeMap<usize, PeerView>,
    pub(super) early: Early,
    pub(super) memory: Memory,
    /// By part.
    pub(super) receivers: BTreeMap<usize, ReceiverSlot>,
    pub(super) senders: BTreeMap<usize, SenderSlot>,
    /// By request.
    pub(super) loads: BTreeMap<usize, Load>,
    pub(super) leases: BTreeMap<usize, Leases>,
    /// Blocks that peers offered and this side does not want, by link: the sender's last word is still to come.
    pub(super) refused: BTreeSet<(usize, TransferId)>,
    /// When which part's machine is due, on its clock.
    pub(super) due: BTreeSet<(Time, usize)>,
    /// What it remembers if it lies.
    pub(super) liar: Liar,
}

/// What a driver knows of a peer.
#[derive(Debug, Clone)]
pub(super) struct PeerView {
    pub(super) id: PeerId,
    pub(super) incarnation: u64,
    pub(super) session: u64,
    pub(super) version: u16,
    pub(super) up: bool,
}

#[derive(Debug)]
pub(super) struct ReceiverSlot {
    pub(super) machine: Receiver,
    /// The peer's incarnation, once there was a session.
    pub(super) peer: Option<u64>,
    pub(super) blocks: Rc<Blocks>,
    /// The transport's grants.
    pub(super) grants: BTreeMap<Generation, u64>,
    pub(super) last_generation: Option<Generation>,
    /// Hashed by the driver.
    pub(super) hashed: Coverage,
    /// Attention may read it.
    pub(super) shown: Coverage,
    /// What is being hashed.
    pub(super) hashing: Vec<Rect>,
    /// Nothing more can be hashed.
    pub(super) unhashed: bool,
    /// Its grants, fences and hashes take long.
    pub(super) held: bool,
    pub(super) granting: bool,
    pub(super) fencing: bool,
    pub(super) finished: bool,
    pub(super) deadline: Time,
    pub(super) due: Option<Time>,
    pub(super) ambushes: Vec<Ambush>,
}

#[derive(Debug)]
pub(super) struct SenderSlot {
    pub(super) machine: Sender,
    pub(super) peer: Option<u64>,
    pub(super) blocks: Rc<Blocks>,
    pub(super) adopted: Option<Grant>,
    /// Posted under the adopted grant.
    pub(super) posted: Coverage,
    /// Posts whose end was not told.
    pub(super) writes: BTreeSet<u64>,
    /// Its posts' ends take long.
    pub(super) held: bool,
    pub(super) released: bool,
    pub(super) finished: bool,
    pub(super) due: Option<Time>,
    pub(super) ambushes: Vec<Ambush>,
}

/// What a rank takes for one request: a part from each rank that has heads of its own.
#[derive(Debug)]
pub(super) struct Load {
    pub(super) blocks: Rc<Blocks>,
    pub(super) parts: Parts<usize, Verdict>,
}

/// What a rank lends for one request: a part to each rank that wants heads of its own.
#[derive(Debug)]
pub(super) struct Leases {
    pub(super) blocks: Rc<Blocks>,
    pub(super) computed: Coverage,
    pub(super) ends: BTreeMap<usize, Option<Verdict>>,
}

/// One input of a node, in the order in which its driver gets them.
#[derive(Debug)]
pub(super) enum Inbox {
    Up {
        link: usize,
        incarnation: u64,
        session: u64,
        version: u16,
    },
    Down {
        link: usize,
    },
    Message {
        link: usize,
        incarnation: u64,
        bytes: Vec<u8>,
    },
    /// A write landed under one of its grants: how many cells, and what it is said to be.
    Landed {
        link: usize,
        incarnation: u64,
        version: u16,
        grant: u64,
        cells: u64,
        wrote: Vec<u8>,
    },
    Posted {
        part: usize,
        generation: Generation,
        sequence: u32,
        outcome: PostOutcome,
    },
    /// The transport's grant, or why there is none.
    Granted {
        part: usize,
        generation: Generation,
        grant: Result<u64, GrantRefusal>,
    },
    Fenced {
        part: usize,
        generation: Generation,
    },
    Digested {
        part: usize,
        generation: Generation,
        sequence: u32,
        rect: Rect,
    },
    /// The engine gave blocks: to load into, or to lend.
    Begin {
        request: usize,
        blocks: Rc<Blocks>,
    },
    /// The engine will not take the request.
    Decline {
        request: usize,
    },
    /// The engine does not want what a peer offered.
    RefuseSpare {
        request: usize,
    },
    Computed {
        request: usize,
        step: usize,
    },
    Cancel {
        request: usize,
    },
    Fail {
        request: usize,
    },
    CancelPart {
        part: usize,
    },
    FailPart {
        part: usize,
    },
    /// The peer says something again: what an ambush asked for.
    Again {
        link: usize,
        incarnation: u64,
        message: Box<Message>,
    },
    Timer,
}

impl Node {
    pub(super) fn new(plan: &Plan, index: usize, incarnation: u64, epoch: u64) -> Self {
        let (node, timing) = (&plan.nodes[index], plan.timing);
        let engine = &plan.engines[node.engine];
        let (max_messages, max_messages_per_peer) = plan.early;
        let ttl = Duration::from_millis(timing.early);
        Self {
            incarnation,
            alive: true,
            rate: node.rate,
            offset: node.offset + epoch,
            pace: node.pace,
            stopped_until: 0,
            inbox: VecDeque::new(),
            polling: false,
            timer_at: None,
            told_at: 0,
            views: BTreeMap::new(),
            early: Early::new(EarlyConfig { max_messages, max_messages_per_peer, ttl }),
            memory: Memory::new(engine.blocks, engine.tokens_per_block, node.heads.clone()),
            receivers: BTreeMap::new(),
            senders: BTreeMap::new(),
            loads: BTreeMap::new(),
            leases: BTreeMap::new(),
            refused: BTreeSet::new(),
            due: BTreeSet::new(),
            liar: Liar::default(),
        }
    }

    /// What its clock shows at a moment of the world.
    pub(super) fn clock(&self, world: u64) -> Time {
        Time::since_epoch(Duration::from_micros(self.offset + world * self.rate / 1000))
    }

    /// The clock jumps forward.
    pub(super) fn jump(&mut self, by: u64) {
        self.offset += by;
    }

    /// The first moment of the world at which its clock shows `time`.
    pub(super) fn world_time(&self, time: Time) -> u64 {
        // A clock counts whole microseconds.
        let shown = u64::try_from(time.elapsed().as_nanos().div_ceil(1000)).unwrap_or(u64::MAX);
        (shown.saturating_sub(self.offset) * 1000).div_ceil(self.rate)
    }

    /// When something is due, on its clock.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        let machines = self.due.first().map(|&(at, _)| at);
        machines.into_iter().chain(self.early.poll_timeout().map(|(at, _)| at)).min()
    }

    /// From now on what a part's driver waits for takes long.
    pub(super) fn hold(&mut self, part: usize) {
        if let Some(slot) = self.receivers.get_mut(&part) {
            slot.held = true;
        }
        if let Some(slot) = self.senders.get_mut(&part) {
            slot.held = true;
        }
    }

    pub(super) fn is_held(&self, part: usize) -> bool {
        let receiver = self.receivers.get(&part).is_some_and(|slot| slot.held);
        receiver || self.senders.get(&part).is_some_and(|slot| slot.held)
    }

    /// Notes when a part's machine is due; returns what an ambush does to it now.
    pub(super) fn note(&mut self, part: usize) -> Option<Act> {
        let (due, slot_due, ambushes, state, (up, hashes)) = if let Some(slot) = self.receivers.get_mut(&part) {
            let state = AmbushState::Receiver(slot.machine.kind());
            (
                slot.machine.poll_timeout(),
                &mut slot.due,
                &mut slot.ambushes,
                state,
                (slot.machine.is_up(), !slot.hashing.is_empty()),
            )
        } else if let Some(slot) = self.senders.get_mut(&part) {
            let state = AmbushState::Sender(slot.machine.kind());
            (slot.machine.poll_timeout(), &mut slot.due, &mut slot.ambushes, state, (slot.machine.is_up(), false))
        } else {
            return None;
        };
        let due = due.map(|(at, _)| at);
        if *slot_due != due {
            if let Some(before) = slot_due.take() {
                self.due.remove(&(before, part));
            }
            *slot_due = due;
            self.due.extend(due.map(|at| (at, part)));
        }
        let waits = |ambush: &Ambush| ambush.state == state && ambush.up == up && (hashes || !ambush.hashing);
        // In their order: only the first lies in wait.
        if ambushes.first().is_some_and(waits) { Some(ambushes.remove(0).act) } else { None }
    }
}
