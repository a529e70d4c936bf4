//! What the engines do: begin requests, compute, cancel, and go on after an end.

use std::collections::BTreeMap;
use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

use crate::transfer::{Coverage, Receiver, ReceiverConfig, Rect, Sender, SenderConfig};

use super::memory::{cells, content};
use super::node::{Inbox, Key, ReceiverSlot, SenderSlot, peer_id};
use super::plan::{LAYERS, MS, Request};
use super::world::{Event, World};

const DEADLINE_MS: u64 = 2500;
const PROGRESS_MS: u64 = 900;
const ABSENT_MS: u64 = 500;
const LEASE_TTL_MS: u64 = 600;
const LEASE_MAX_MS: u64 = 3000;
const WORD_MS: u64 = 700;
const ASK_MS: u64 = 120;
const LINGER_MS: u64 = 400;
/// The longest fence and the longest hash after it, and a busy inbox.
const SLACK_MS: u64 = 1500;

/// The slowest clock takes this much longer, plus what its driver may take.
fn limit(ms: u64) -> u64 {
    ms * MS * 1000 / 900 + SLACK_MS * MS
}

impl World {
    pub(super) fn begin_decode(&mut self, index: usize, request: usize) -> Result<(), String> {
        let plan = self.plan.requests[request].clone();
        let now = self.nodes[index].clock(self.now);
        let Some(blocks) = self.nodes[index].pool.allocate(plan.transfer, plan.local, plan.tokens) else {
            // The pool is full: the engine fails the request in writing.
            return Ok(());
        };
        let config = ReceiverConfig {
            transfer: plan.transfer,
            wanted: plan.wanted().into(),
            order: plan.order,
            deadline: Duration::from_millis(DEADLINE_MS),
            progress: Duration::from_millis(PROGRESS_MS),
            absent: Duration::from_millis(ABSENT_MS),
            lease_ttl: Duration::from_millis(LEASE_TTL_MS),
            ask_before_revoke: self.plan.ask.then_some(Duration::from_millis(ASK_MS)),
            linger: Duration::from_millis(LINGER_MS),
            max_cuts: 4,
        };
        let mut machine = Receiver::new(now, config).map_err(|error| error.to_string())?;
        machine.plant(self.options.planted);
        let key = (plan.prefill, plan.transfer);
        let slot = ReceiverSlot {
            machine,
            request,
            peer: None,
            blocks,
            keys: BTreeMap::new(),
            last_generation: None,
            hashed: Coverage::new(),
            hashing: 0,
            finished: false,
            limit: self.now + limit(DEADLINE_MS + ASK_MS),
        };
        self.nodes[index].receivers.insert(key, slot);
        self.introduce(index, key)
    }

    pub(super) fn begin_prefill(&mut self, index: usize, request: usize) -> Result<(), String> {
        let plan = self.plan.requests[request].clone();
        let now = self.nodes[index].clock(self.now);
        let Some(blocks) = self.nodes[index].pool.allocate(plan.transfer, 0, plan.held) else { return Ok(()) };
        let align = self.plan.nodes[index].tokens_per_block;
        let config = SenderConfig {
            transfer: plan.transfer,
            held: plan.held(),
            order: plan.order,
            lease_ttl: Duration::from_millis(LEASE_TTL_MS),
            lease_max: Duration::from_millis(LEASE_MAX_MS),
            absent: Duration::from_millis(ABSENT_MS),
            word: Duration::from_millis(WORD_MS),
            max_posts_in_flight: NonZeroU32::new(plan.posts_in_flight).expect("drawn from 1 on"),
            max_cells_per_post: NonZeroU64::new(plan.cells_per_post).expect("drawn from 1 on"),
            align_tokens: NonZeroU32::new(align).expect("a block has tokens"),
        };
        let mut machine = Sender::new(now, config);
        machine.plant(self.options.planted);
        let key = (plan.decode, plan.transfer);
        let slot = SenderSlot {
            machine,
            request,
            peer: None,
            blocks,
            computed: Coverage::new(),
            adopted: None,
            posted: Coverage::new(),
            released: false,
            finished: false,
            limit: self.now + limit(LEASE_MAX_MS + WORD_MS),
        };
        self.nodes[index].senders.insert(key, slot);
        let incarnation = self.nodes[index].incarnation;
        let input = Inbox::Computed { request, step: 0 };
        self.after(plan.compute, Event::Input { node: index, incarnation, input });
        self.introduce(index, key)
    }

    /// Tells a new machine the session, and what the peer said before it was there.
    fn introduce(&mut self, index: usize, key: Key) -> Result<(), String> {
        let Some(view) = self.nodes[index].peers.get(&key.0).copied().filter(|view| view.up) else {
            return self.drain(index, key);
        };
        let early = self.nodes[index].early.take(&peer_id(key.0, view.incarnation), key.1);
        self.bind(index, key, view.incarnation);
        self.peer_up(index, key, view.session)?;
        match early {
            Some(message) => self.hand_over(index, key, view.incarnation, message),
            None => Ok(()),
        }
    }

    /// Remembers which incarnation a machine speaks with.
    pub(super) fn bind(&mut self, index: usize, key: Key, incarnation: u64) {
        let node = &mut self.nodes[index];
        if let Some(slot) = node.receivers.get_mut(&key) {
            slot.peer = slot.peer.or(Some(incarnation));
        }
        if let Some(slot) = node.senders.get_mut(&key) {
            slot.peer = slot.peer.or(Some(incarnation));
        }
    }

    /// A chunk of tokens, or one layer of the last chunk, is computed.
    pub(super) fn compute(&mut self, index: usize, request: usize, step: usize) -> Result<(), String> {
        let plan = self.plan.requests[request].clone();
        let key = (plan.decode, plan.transfer);
        let Some(rect) = plan.step(step) else { return Ok(()) };
        let now = self.nodes[index].clock(self.now);
        let node = &mut self.nodes[index];
        let Some(slot) = node.senders.get_mut(&key).filter(|slot| !slot.released) else { return Ok(()) };
        for (token, layer) in cells(rect) {
            node.pool.set(&slot.blocks, token, layer, content(plan.transfer, token, layer));
        }
        slot.computed.insert(rect).map_err(|error| error.to_string())?;
        let state = slot.machine.state();
        let taken = slot.machine.computed(now, rect);
        self.visit("sender", state, "computed", taken.is_err());
        let incarnation = self.nodes[index].incarnation;
        let input = Inbox::Computed { request, step: step + 1 };
        self.after(plan.compute, Event::Input { node: index, incarnation, input });
        self.drain(index, key)
    }
}

impl Request {
    /// What the n-th step computes: chunks of tokens over all layers, the last chunk layer by layer.
    fn step(&self, step: usize) -> Option<Rect> {
        let chunks = self.held.div_ceil(self.tokens_per_chunk);
        let last_first = (chunks - 1) * self.tokens_per_chunk;
        let step = u32::try_from(step).ok()?;
        if step < chunks - 1 {
            let first = step * self.tokens_per_chunk;
            return Rect::new(first..first + self.tokens_per_chunk, 0..LAYERS).ok();
        }
        let layer = u16::try_from(step - (chunks - 1)).ok().filter(|&layer| layer < LAYERS)?;
        Rect::new(last_first..self.held, layer..layer + 1).ok()
    }
}
