//! What must hold after every step, and at the end.

use std::collections::BTreeMap;

use crate::ids::TransferId;
use crate::message::Verdict;
use crate::transfer::{Coverage, ReceiverEnd, Rect};

use super::memory::{cells, content};
use super::node::{EARLY, Key, ReceiverSlot};
use super::plan::{LAYERS, Request};
use super::world::World;

/// The verdicts of all transfers.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    ends: BTreeMap<TransferId, (Option<Verdict>, Option<Verdict>)>,
}

impl Ledger {
    pub(super) fn receiver_ended(&mut self, transfer: TransferId, verdict: Verdict) -> Result<(), String> {
        let ends = self.ends.entry(transfer).or_default();
        if let Some(before) = &ends.0 {
            return Err(format!("invariant 2: the receiver of {transfer} ended twice: {before}, then {verdict}"));
        }
        ends.0 = Some(verdict);
        Self::check(transfer, ends)
    }

    pub(super) fn sender_ended(&mut self, transfer: TransferId, verdict: Verdict) -> Result<(), String> {
        let ends = self.ends.entry(transfer).or_default();
        if let Some(before) = &ends.1 {
            return Err(format!("invariant 2: the sender of {transfer} ended twice: {before}, then {verdict}"));
        }
        if verdict == Verdict::Done && ends.0 != Some(Verdict::Done) {
            return Err(format!("invariant 2: the sender of {transfer} is done, its receiver is {:?}", ends.0));
        }
        ends.1 = Some(verdict);
        Self::check(transfer, ends)
    }

    fn check(transfer: TransferId, ends: &(Option<Verdict>, Option<Verdict>)) -> Result<(), String> {
        match ends {
            (Some(receiver), Some(sender)) if !receiver.may_pair_with_sender(sender) => {
                Err(format!("invariant 2: {transfer}: the receiver is {receiver}, the sender {sender}"))
            }
            _ => Ok(()),
        }
    }
}

impl World {
    pub(super) fn check_step(&self) -> Result<(), String> {
        for (index, node) in self.nodes.iter().enumerate() {
            if node.early.len() > EARLY.max_messages {
                return Err(format!("invariant 7: engine {index} keeps {} early messages", node.early.len()));
            }
            for (key, slot) in &node.receivers {
                if slot.limit < self.now && !slot.finished {
                    let state = slot.machine.state();
                    return Err(format!("invariant 2: the receiver of {} is {state} after its deadline", key.1));
                }
                if slot.machine.verified().rects().count() > Coverage::MAX_RECTS {
                    return Err(format!("invariant 7: the receiver of {} keeps too many rectangles", key.1));
                }
            }
            for (key, slot) in &node.senders {
                if slot.limit < self.now && !slot.finished {
                    let state = slot.machine.state();
                    return Err(format!("invariant 2: the sender of {} is {state} after its deadline", key.1));
                }
                let (found, limit) = (slot.machine.posts_in_flight(), self.plan.requests[slot.request].posts_in_flight);
                if found > limit as usize {
                    return Err(format!("invariant 7: the sender of {} has {found} posts in flight", key.1));
                }
            }
        }
        Ok(())
    }

    pub(super) fn check_end(&mut self) -> Result<(), String> {
        for (index, node) in self.nodes.iter().enumerate() {
            if let Some((_, transfer)) = node.receivers.keys().chain(node.senders.keys()).next() {
                return Err(format!("invariant 2: {transfer} is left over on engine {index}"));
            }
            if !node.pool.is_all_free() {
                return Err(format!("invariant 4: blocks are left over on engine {index}"));
            }
            if !node.early.is_empty() {
                return Err(format!("invariant 7: early messages are left over on engine {index}"));
            }
        }
        if let Some(grant) = self.grants.values().find(|grant| grant.live) {
            return Err(format!("invariant 4: a grant of {} is left over", grant.transfer));
        }
        if let Some(write) = self.writes.values().find(|write| !write.ended) {
            return Err(format!("invariant 4: a post of {} is left over", write.wrote.transfer));
        }
        for request in &self.plan.requests {
            let ends = self.ledger.ends.get(&request.transfer);
            let name = |verdict: Option<&Verdict>| verdict.map_or("-", Verdict::name);
            let pair = (name(ends.and_then(|ends| ends.0.as_ref())), name(ends.and_then(|ends| ends.1.as_ref())));
            *self.report.verdicts.entry(pair).or_default() += 1;
        }
        Ok(())
    }

    /// What a receiver calls good is right, and its blocks are fenced.
    pub(super) fn check_receiver_end(&self, node: usize, slot: &ReceiverSlot, end: &ReceiverEnd) -> Result<(), String> {
        let transfer = slot.machine.transfer();
        let plan = &self.plan.requests[slot.request];
        if let Some(grant) = slot.keys.values().filter_map(|key| self.grants.get(key)).find(|grant| grant.live) {
            return Err(format!("invariant 1: {} ended while its grant lives", grant.transfer));
        }
        if slot.hashing > 0 {
            return Err(format!("invariant 4: {transfer} ended while {} writes are being hashed", slot.hashing));
        }
        let good = Coverage::of(&end.good).map_err(|error| error.to_string())?;
        for rect in good.rects() {
            self.check_content(node, slot, rect, "invariant 8: good")?;
        }
        let wanted = plan.wanted();
        if end.verdict == Verdict::Done && !good.contains(wanted) {
            return Err(format!("invariant 2: {transfer} is done, but only {:?} is there", end.good));
        }
        if plan.local < end.good_until_token {
            let told = Rect::new(plan.local..end.good_until_token, 0..LAYERS).map_err(|error| error.to_string())?;
            if !good.contains(told) || !wanted.contains(told) {
                return Err(format!("invariant 8: {transfer} calls tokens good that are not: {end:?}"));
            }
        }
        Ok(())
    }

    pub(super) fn check_content(&self, node: usize, slot: &ReceiverSlot, rect: Rect, what: &str) -> Result<(), String> {
        let transfer = slot.machine.transfer();
        for (token, layer) in cells(rect) {
            if self.nodes[node].pool.read(&slot.blocks, token, layer)? != content(transfer, token, layer) {
                return Err(format!("{what}: token {token} layer {layer} of {transfer} is wrong"));
            }
        }
        Ok(())
    }

    /// Nothing of an old incarnation reaches a machine.
    pub(super) fn check_incarnation(key: Key, bound: Option<u64>, found: u64) -> Result<(), String> {
        if bound == Some(found) {
            return Ok(());
        }
        Err(format!("invariant 5: {} takes a word of incarnation {found}, its peer is {bound:?}", key.1))
    }
}

impl Request {
    pub(super) fn wanted(&self) -> Rect {
        Rect::new(self.local..self.tokens, 0..LAYERS).expect("local is less than tokens")
    }

    pub(super) fn held(&self) -> Rect {
        Rect::new(0..self.held, 0..LAYERS).expect("at least one token is held")
    }
}
