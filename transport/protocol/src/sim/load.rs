//! A rank's share of a request: its parts begin together, and it is over when all of them are.
//!
//! A decode rank takes each head from one prefill rank, a part from each; [`Parts`] says when layers are complete, which siblings end
//! with a part that failed, and how the load ended. A prefill rank lends its blocks to a part for each decode rank that wants heads of
//! its own, and has them back when all leases are released.

use std::collections::{BTreeMap, BTreeSet};
use std::num::{NonZeroU32, NonZeroU64};
use std::rc::Rc;
use std::time::Duration;

use crate::message::Verdict;
use crate::transfer::{
    Coverage, EarlyInput, Parts, PartsEnd, PartsStep, Receiver, ReceiverConfig, ReceiverEnd, Rect, Sender,
    SenderConfig, SenderInput,
};

use super::memory::{Blocks, cells, content};
use super::node::{Inbox, Leases, Load, ReceiverSlot, SenderSlot};
use super::plan::MS;
use super::scheduler::{Spoken, Step};
use super::world::{Event, World};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Cuts that a receiver survives.
const MAX_CUTS: u32 = 4;
/// What the slowest clock makes of a duration, and what its driver may take beside.
const fn limit(ms: u64) -> u64 {
    ms * MS * 1000 / 700 + 1500 * MS
}

impl World {
    /// The engine gave this rank blocks.
    pub(super) fn begin(&mut self, index: usize, request: usize, blocks: &Rc<Blocks>) -> Result<(), String> {
        self.nodes[index].memory.take(blocks)?;
        let parts = self.parts_here(index, request);
        let returns = self.plan.requests[request].returns;
        if self.receives(self.plan.nodes[index].engine, request) {
            let heads = parts.iter().map(|&part| (part, self.plan.parts[part].heads.len() as u16));
            let wanted = self.plan.requests[request].wanted();
            let mut progress = Parts::new(wanted, heads).map_err(|error| error.to_string())?;
            progress.plant(self.options.planted);
            let load = Load { blocks: Rc::clone(blocks), parts: progress };
            self.nodes[index].loads.insert(request, load);
            for &part in &parts {
                self.begin_receiver(index, part, blocks)?;
            }
        } else {
            let ends = parts.iter().map(|&part| (part, None)).collect();
            let leases = Leases { blocks: Rc::clone(blocks), computed: Coverage::new(), ends };
            self.nodes[index].leases.insert(request, leases);
            if parts.is_empty() {
                // The head is held twice, and the decode ranks take it from the other holder.
                return self.leases_over(index, request);
            }
            if returns && !self.may_offer(index, parts[0]) {
                let cancelled = |&part: &usize| (part, Some(Verdict::Cancelled));
                let ends = parts.iter().map(cancelled).collect();
                if let Some(leases) = self.nodes[index].leases.get_mut(&request) {
                    leases.ends = ends;
                }
                return self.leases_over(index, request);
            }
            for &part in &parts {
                self.begin_sender(index, part, blocks);
            }
            self.compute_later(index, request, 0);
        }
        for &part in &parts {
            self.introduce(index, part)?;
        }
        match parts.first() {
            Some(&part) if returns && self.plan.parts[part].sender == index => self.offer_spares(index, part),
            _ => Ok(()),
        }
    }

    pub(super) fn parts_here(&self, index: usize, request: usize) -> Vec<usize> {
        let here = |part: &usize| self.plan.parts[*part].sender == index || self.plan.parts[*part].receiver == index;
        self.plan.requests[request].parts.clone().filter(here).collect()
    }

    fn begin_receiver(&mut self, index: usize, part: usize, blocks: &Rc<Blocks>) -> Result<(), String> {
        let (plan, timing) = (&self.plan.parts[part], self.plan.timing);
        let request = &self.plan.requests[plan.request];
        let now = self.nodes[index].clock(self.now);
        let config = ReceiverConfig {
            transfer: plan.transfer,
            wanted: request.wanted().into(),
            order: request.order,
            deadline: ms(timing.deadline),
            progress: ms(timing.progress),
            absent: ms(timing.absent),
            lease_ttl: ms(timing.lease_ttl),
            ask_before_revoke: self.plan.ask.then_some(ms(timing.ask)),
            linger: ms(timing.linger),
            max_cuts: if request.returns { 0 } else { MAX_CUTS },
        };
        let mut machine = Receiver::new(now, config).map_err(|error| error.to_string())?;
        machine.plant(self.options.planted);
        let slot = ReceiverSlot {
            machine,
            peer: None,
            blocks: Rc::clone(blocks),
            grants: BTreeMap::new(),
            last_generation: None,
            hashed: Coverage::new(),
            shown: Coverage::new(),
            hashing: Vec::new(),
            unhashed: false,
            held: false,
            granting: false,
            fencing: false,
            finished: false,
            deadline: now + ms(timing.deadline),
            due: None,
            ambushes: plan.ambushes.clone(),
        };
        self.nodes[index].receivers.insert(part, slot);
        self.limit_later(index, part, limit(timing.deadline + timing.ask), 0);
        Ok(())
    }

    fn begin_sender(&mut self, index: usize, part: usize, blocks: &Rc<Blocks>) {
        let (plan, timing) = (&self.plan.parts[part], self.plan.timing);
        let request = &self.plan.requests[plan.request];
        let align = self.plan.engines[self.plan.nodes[index].engine].tokens_per_block;
        let config = SenderConfig {
            transfer: plan.transfer,
            held: request.held(),
            order: request.order,
            // What goes back waits a moment for a grant, no more.
            lease_ttl: ms(if request.returns { timing.lease_ttl / 2 } else { timing.lease_ttl }),
            lease_max: ms(timing.lease_max),
            absent: ms(timing.absent),
            word: ms(timing.word),
            max_posts_in_flight: NonZeroU32::new(request.posts_in_flight).expect("drawn from 1 on"),
            max_cells_per_post: NonZeroU64::new(request.cells_per_post).expect("drawn from 1 on"),
            align_tokens: NonZeroU32::new(align).expect("a block has tokens"),
        };
        let mut machine = Sender::new(self.nodes[index].clock(self.now), config);
        machine.plant(self.options.planted);
        let slot = SenderSlot {
            machine,
            peer: None,
            blocks: Rc::clone(blocks),
            adopted: None,
            posted: Coverage::new(),
            writes: BTreeSet::new(),
            held: false,
            released: false,
            finished: false,
            due: None,
            ambushes: plan.ambushes.clone(),
        };
        self.nodes[index].senders.insert(part, slot);
        self.limit_later(index, part, limit(timing.lease_max + timing.word), 0);
    }

    pub(super) fn limit_later(&mut self, node: usize, part: usize, wait: u64, postponed: u32) {
        let incarnation = self.nodes[node].incarnation;
        self.after(wait, Event::Limit { node, incarnation, part, postponed });
    }

    /// Tells a new machine the session, and what the peer said before it was there.
    fn introduce(&mut self, index: usize, part: usize) -> Result<(), String> {
        let plan = &self.plan.parts[part];
        let (link, transfer) = (plan.link, plan.transfer);
        let Some(view) = self.nodes[index].views.get(&link).filter(|view| view.up).cloned() else {
            return self.drain(index, part);
        };
        let early = &mut self.nodes[index].early;
        self.report.visits.early(early.state(&view.id, transfer), EarlyInput::Take);
        let said = early.take(&view.id, transfer);
        self.bind(index, part, view.incarnation);
        self.peer_up(index, part, view.session)?;
        match said {
            Some(message) => self.hand_over(index, link, part, view.incarnation, message),
            None => Ok(()),
        }
    }

    /// Remembers which incarnation a machine speaks with.
    pub(super) fn bind(&mut self, index: usize, part: usize, incarnation: u64) {
        let node = &mut self.nodes[index];
        if let Some(slot) = node.receivers.get_mut(&part) {
            slot.peer = slot.peer.or(Some(incarnation));
        }
        if let Some(slot) = node.senders.get_mut(&part) {
            slot.peer = slot.peer.or(Some(incarnation));
        }
    }

    /// The engine will not take a request: its peers are told, now or when they ask.
    pub(super) fn decline(&mut self, index: usize, request: usize) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        for part in self.parts_here(index, request) {
            let plan = &self.plan.parts[part];
            let (link, transfer) = (plan.link, plan.transfer);
            let node = &mut self.nodes[index];
            let Some(view) = node.views.get(&link).filter(|view| view.up) else { continue };
            self.report.visits.early(node.early.state(&view.id, transfer), EarlyInput::Decline);
            let answer = node.early.decline(now, &view.id, transfer, "no room");
            self.check_early(index)?;
            if let Some(answer) = answer {
                self.send(index, link, answer)?;
            }
        }
        Ok(())
    }

    fn compute_later(&mut self, index: usize, request: usize, step: usize) {
        let (incarnation, wait) = (self.nodes[index].incarnation, self.plan.requests[request].compute);
        let wait = wait + self.rng.within(0..MS);
        self.after(wait, Event::Input { node: index, incarnation, input: Inbox::Computed { request, step } });
    }

    /// A chunk of tokens, or one layer of the last chunk, is computed.
    pub(super) fn compute(&mut self, index: usize, request: usize, step: usize) -> Result<(), String> {
        let plan = &self.plan.requests[request];
        let (salt, Some(rect)) = (plan.salt, plan.step(step)) else { return Ok(()) };
        let now = self.nodes[index].clock(self.now);
        let node = &mut self.nodes[index];
        let Some(leases) = node.leases.get_mut(&request) else { return Ok(()) };
        for cell in cells(rect, self.plan.nodes[index].heads.clone()) {
            node.memory.set(&leases.blocks, cell, content(salt, cell));
        }
        leases.computed.insert(rect).map_err(|error| error.to_string())?;
        let parts: Vec<usize> = leases.ends.keys().copied().collect();
        for part in parts {
            self.sender(index, part, SenderInput::Computed, |slot| slot.machine.computed(now, rect))?;
        }
        self.compute_later(index, request, step + 1);
        Ok(())
    }

    /// A rectangle of a part is verified: layers that are complete with it hold what they must, in all heads of this rank.
    pub(super) fn part_verified(&mut self, index: usize, part: usize, rect: Rect) -> Result<(), String> {
        let request = self.plan.parts[part].request;
        let Some(load) = self.nodes[index].loads.get_mut(&request) else { return Ok(()) };
        let complete = load.parts.verified(&part, rect).map_err(|error| error.to_string())?;
        let blocks = Rc::clone(&load.blocks);
        for layer in complete {
            let tokens = self.plan.requests[request].wanted().tokens();
            let layer = Rect::new(tokens, layer..layer + 1).map_err(|error| error.to_string())?;
            self.check_cells(index, &blocks, layer, self.plan.nodes[index].heads.clone(), "invariant 3: a layer")?;
        }
        Ok(())
    }

    /// A part of a load is over on this rank, and fenced.
    pub(super) fn part_received(&mut self, index: usize, part: usize, end: ReceiverEnd) -> Result<(), String> {
        let request = self.plan.parts[part].request;
        let Some(load) = self.nodes[index].loads.get_mut(&request) else {
            // Its load went on without it: a planted bug.
            return Ok(());
        };
        let failure = (end.verdict != Verdict::Done).then_some(end.verdict);
        match load.parts.ended(&part, end.good_until_token, failure).map_err(|error| error.to_string())? {
            PartsStep::Wait => Ok(()),
            PartsStep::Cancel(siblings) => {
                siblings.into_iter().for_each(|part| self.push_first(index, Inbox::CancelPart { part }));
                Ok(())
            }
            PartsStep::Over(end) => self.load_over(index, request, end),
        }
    }

    fn load_over(&mut self, index: usize, request: usize, end: PartsEnd<usize, Verdict>) -> Result<(), String> {
        let Some(load) = self.nodes[index].loads.remove(&request) else { return Ok(()) };
        self.nodes[index].memory.settle(&load.blocks)?;
        let good = end.first_missing().unwrap_or(end.tokens.end);
        let verdict = end.failure.map_or(Verdict::Done, |(_, verdict)| verdict);
        self.check_tokens(index, &load.blocks, end.tokens.start..good, "invariant 8: good on this rank")?;
        self.report_to_engine(index, request, Spoken { verdict, good });
        Ok(())
    }

    /// A part's sender is over on this rank, and its lease released.
    pub(super) fn part_sent(&mut self, index: usize, part: usize, verdict: Verdict) -> Result<(), String> {
        let request = self.plan.parts[part].request;
        let Some(leases) = self.nodes[index].leases.get_mut(&request) else { return Ok(()) };
        let late = verdict != Verdict::Done && self.plan.requests[request].returns;
        leases.ends.insert(part, Some(verdict));
        let over = leases.ends.values().all(Option::is_some);
        if late {
            self.offer_no_more(index, part)?;
        }
        if over { self.leases_over(index, request) } else { Ok(()) }
    }

    fn leases_over(&mut self, index: usize, request: usize) -> Result<(), String> {
        let Some(leases) = self.nodes[index].leases.remove(&request) else { return Ok(()) };
        self.nodes[index].memory.settle(&leases.blocks)?;
        let verdict = leases.ends.values().flatten().find(|verdict| **verdict != Verdict::Done).cloned();
        self.report_to_engine(index, request, Spoken { verdict: verdict.unwrap_or(Verdict::Done), good: 0 });
        Ok(())
    }

    fn report_to_engine(&mut self, index: usize, request: usize, spoken: Spoken) {
        let engine = self.plan.nodes[index].engine;
        let rank = index - self.plan.engines[engine].nodes.start;
        let (incarnation, wait) = (Some(self.engines[engine].incarnation), self.rng.within(0..5 * MS));
        self.after(wait, Event::Engine { engine, incarnation, step: Step::Report { request, rank, spoken } });
    }
}
