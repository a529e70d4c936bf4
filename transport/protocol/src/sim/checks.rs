//! What must hold after every step, and at the end.
//!
//! A step changes one rank or one engine, so only what it touched is looked at: each machine after each of its inputs, each byte
//! when it leaves, lands, is hashed and is read.

use crate::message::Verdict;
use crate::transfer::{Coverage, ReceiverEnd, Rect};

use super::node::PeerView;
use super::plan::{LAYERS, MS, Plan, Weather};
use super::world::World;

/// How all transfers and requests ended.
#[derive(Debug)]
pub(super) struct Ledger {
    /// By part: receiver, sender.
    parts: Vec<(Option<Verdict>, Option<Verdict>)>,
    /// By request: sender, receiver.
    requests: Vec<[Progress; 2]>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    Unknown,
    Begun,
    Ended,
    /// Its engine crashed meanwhile.
    Lost,
}

impl Ledger {
    pub(super) fn new(requests: usize, parts: usize) -> Self {
        Self { parts: vec![(None, None); parts], requests: vec![[Progress::Unknown; 2]; requests] }
    }

    pub(super) fn receiver_ended(&mut self, part: usize, verdict: &Verdict) -> Result<(), String> {
        let ends = &mut self.parts[part];
        if let Some(before) = &ends.0 {
            return Err(format!("invariant 2: the receiver of part {part} ended twice: {before}, then {verdict}"));
        }
        ends.0 = Some(verdict.clone());
        Self::check(part, ends)
    }

    /// A sender's end. With `known`, the receiver's is known too; a liar's word need not be true.
    pub(super) fn sender_ended(&mut self, part: usize, verdict: &Verdict, known: bool) -> Result<(), String> {
        let ends = &mut self.parts[part];
        if let Some(before) = &ends.1 {
            return Err(format!("invariant 2: the sender of part {part} ended twice: {before}, then {verdict}"));
        }
        if known && *verdict == Verdict::Done && ends.0 != Some(Verdict::Done) {
            return Err(format!("invariant 2: the sender of part {part} is done, its receiver is {:?}", ends.0));
        }
        ends.1 = Some(verdict.clone());
        Self::check(part, ends)
    }

    fn check(part: usize, ends: &(Option<Verdict>, Option<Verdict>)) -> Result<(), String> {
        match ends {
            (Some(receiver), Some(sender)) if !receiver.may_pair_with_sender(sender) => {
                Err(format!("invariant 2: part {part}: the receiver is {receiver}, the sender {sender}"))
            }
            _ => Ok(()),
        }
    }

    /// Whether a receiving engine never heard of a request.
    pub(super) fn is_new(&self, request: usize) -> bool {
        self.requests[request][1] == Progress::Unknown
    }

    pub(super) fn began(&mut self, request: usize, receives: bool) -> Result<(), String> {
        match std::mem::replace(&mut self.requests[request][usize::from(receives)], Progress::Begun) {
            Progress::Unknown => Ok(()),
            other => Err(format!("invariant 2: request {request} begins after it was {other:?}")),
        }
    }

    pub(super) fn request_ended(&mut self, request: usize, receives: bool) -> Result<(), String> {
        match std::mem::replace(&mut self.requests[request][usize::from(receives)], Progress::Ended) {
            Progress::Begun => Ok(()),
            other => Err(format!("invariant 2: request {request} ends after it was {other:?}")),
        }
    }

    /// What an engine had begun is lost.
    pub(super) fn crashed(&mut self, plan: &Plan, engine: usize) {
        for (request, progress) in plan.requests.iter().zip(&mut self.requests) {
            for (of, progress) in [request.from, request.to].into_iter().zip(progress) {
                if of == engine && *progress == Progress::Begun {
                    *progress = Progress::Lost;
                }
            }
        }
    }

    /// A request is done exactly if all its parts are.
    pub(super) fn check_request(&self, plan: &Plan, request: usize, verdict: &Verdict) -> Result<(), String> {
        let parts = plan.requests[request].parts.clone();
        let mut ends = parts.map(|part| self.parts[part].0.as_ref());
        if ends.clone().any(|end| end.is_none()) {
            return Err(format!("invariant 2: request {request} is over before all its parts"));
        }
        if ends.all(|end| end == Some(&Verdict::Done)) == (*verdict == Verdict::Done) {
            return Ok(());
        }
        Err(format!("invariant 2: request {request} is {verdict}, its parts are not"))
    }
}

impl World {
    /// A machine after an input: within its limits, and somebody owns its end.
    pub(super) fn check_part(&self, index: usize, part: usize) -> Result<(), String> {
        let node = &self.nodes[index];
        if let Some(slot) = node.receivers.get(&part) {
            let (machine, state) = (&slot.machine, slot.machine.state());
            if machine.verified().rects().count() > Coverage::MAX_RECTS {
                return Err(format!("invariant 7: the receiver of part {part} keeps too many rectangles"));
            }
            let asked = slot.granting || slot.fencing || !slot.hashing.is_empty();
            match machine.poll_timeout() {
                Some((at, _)) if !slot.finished && at > slot.deadline && state != "Stopping" => {
                    Err(format!("invariant 2: the receiver of part {part}, {state}, forgot its deadline"))
                }
                None if !machine.is_closed() && !asked => {
                    Err(format!("invariant 2: nobody owns the end of the receiver of part {part}, {state}"))
                }
                Some(_) | None => Ok(()),
            }
        } else if let Some(slot) = node.senders.get(&part) {
            let (machine, state) = (&slot.machine, slot.machine.state());
            if machine.poll_timeout().is_none() && !machine.is_closed() && machine.posts_in_flight() == 0 {
                return Err(format!("invariant 2: nobody owns the end of the sender of part {part}, {state}"));
            }
            Ok(())
        } else {
            Ok(())
        }
    }

    pub(super) fn check_early(&self, index: usize) -> Result<(), String> {
        let (early, limit) = (&self.nodes[index].early, self.plan.early.0);
        if early.len() > limit || early.declined_len() > limit {
            return Err(format!("invariant 7: node {index} keeps {} early messages", early.len()));
        }
        let each = self.plan.early.1;
        for PeerView { id, .. } in self.nodes[index].views.values() {
            if early.kept_of(id) > each {
                return Err(format!("invariant 7: node {index} keeps {} early messages of {id}", early.kept_of(id)));
            }
            if early.declined_to(id) > each {
                return Err(format!("invariant 7: node {index} keeps {} refusals to {id}", early.declined_to(id)));
            }
        }
        Ok(())
    }

    /// A machine's time is up; its driver may be busy or stopped, but not idle.
    pub(super) fn check_limit(
        &mut self,
        index: usize,
        incarnation: u64,
        part: usize,
        postponed: u32,
    ) -> Result<(), String> {
        let node = &self.nodes[index];
        if node.incarnation != incarnation {
            return Ok(());
        }
        let (open, asked, state) = match (node.receivers.get(&part), node.senders.get(&part)) {
            (Some(slot), _) => {
                (!slot.finished, slot.granting || slot.fencing || !slot.hashing.is_empty(), slot.machine.state())
            }
            (None, Some(slot)) => (!slot.finished, !slot.writes.is_empty(), slot.machine.state()),
            (None, None) => return Ok(()),
        };
        if !open {
            return Ok(());
        }
        // Who was stopped beyond a deadline comes to it late, and then may wait for the peer's word once more.
        let last_wait = (self.plan.timing.word + self.plan.timing.ask) * MS * 1000 / 700;
        let busy = node.stopped_until + last_wait > self.now || !node.inbox.is_empty() || asked;
        if !busy || postponed > 30 {
            return Err(format!("invariant 2: part {part} on node {index} is {state} after its deadline"));
        }
        self.limit_later(index, part, 200 * MS, postponed + 1);
        Ok(())
    }

    pub(super) fn check_end(&mut self) -> Result<(), String> {
        for (index, node) in self.nodes.iter().enumerate() {
            if let Some(part) = node.receivers.keys().chain(node.senders.keys()).next() {
                return Err(format!("invariant 2: part {part} is left over on node {index}"));
            }
            if let Some(request) = node.loads.keys().chain(node.leases.keys()).next() {
                return Err(format!("invariant 2: request {request} is left over on node {index}"));
            }
            if !node.early.is_empty() {
                return Err(format!("invariant 7: early messages are left over on node {index}"));
            }
            if !node.memory.is_unused() {
                return Err(format!("invariant 4: pages are left over on node {index}"));
            }
        }
        for (engine, plan) in self.engines.iter().zip(&self.plan.engines) {
            if let Some(left) = engine.left_over(plan.blocks) {
                return Err(left);
            }
        }
        if let Some(part) = self.grants.any_live() {
            return Err(format!("invariant 4: a grant of part {part} is left over"));
        }
        if let Some(part) = self.writes.any_open() {
            return Err(format!("invariant 4: a post of part {part} is left over"));
        }
        if let Some(at) = self.ledger.requests.iter().position(|progress| progress.contains(&Progress::Begun)) {
            return Err(format!("invariant 2: request {at} never ended"));
        }
        self.check_fair()?;
        for ends in &self.ledger.parts {
            let name = |verdict: &Option<Verdict>| verdict.as_ref().map_or("-", Verdict::name);
            *self.report.verdicts.entry((name(&ends.0), name(&ends.1))).or_default() += 1;
        }
        Ok(())
    }

    /// Where nothing happened that may not be survived, everything is done; a sender may have missed the word.
    fn check_fair(&self) -> Result<(), String> {
        if self.plan.weather != Weather::Fair {
            return Ok(());
        }
        for (part, ends) in self.ledger.parts.iter().enumerate() {
            let request = self.plan.parts[part].request;
            // What is offered may be refused, and what a liar takes part in is never done.
            if self.plan.requests[request].returns || self.plan.has_liar(request) {
                continue;
            }
            match ends {
                (Some(Verdict::Done), Some(Verdict::Done | Verdict::Failed(_))) => {}
                (receiver, sender) => {
                    return Err(format!("fair weather: part {part} ended as {receiver:?} and {sender:?}"));
                }
            }
        }
        Ok(())
    }

    /// What a receiver calls good is right, and its blocks are fenced.
    pub(super) fn check_receiver_end(&self, index: usize, part: usize, end: &ReceiverEnd) -> Result<(), String> {
        let Some(slot) = self.nodes[index].receivers.get(&part) else { return Ok(()) };
        let plan = &self.plan.requests[self.plan.parts[part].request];
        if slot.grants.values().any(|&grant| self.grants.is_live(grant)) {
            return Err(format!("invariant 1: part {part} ended while its grant lives"));
        }
        if !slot.hashing.is_empty() {
            return Err(format!("invariant 4: part {part} ended while {} writes are being hashed", slot.hashing.len()));
        }
        if slot.finished {
            // The ledger says so better.
            return Ok(());
        }
        let good = Coverage::of(&end.good).map_err(|error| error.to_string())?;
        for rect in good.rects() {
            let heads = self.plan.parts[part].heads.clone();
            self.check_cells(index, &slot.blocks, rect, heads, "invariant 8: good")?;
        }
        // What a liar writes a second time is not good any more, although no byte of it changed.
        if !good.contains_all(&slot.shown) && !self.plan.has_liar(self.plan.parts[part].request) {
            return Err(format!("invariant 8: part {part} showed more than it calls good: {end:?}"));
        }
        let wanted = plan.wanted();
        if end.verdict == Verdict::Done && !good.contains(wanted) {
            return Err(format!("invariant 2: part {part} is done, but only {:?} is there", end.good));
        }
        if plan.local < end.good_until_token {
            let told = Rect::new(plan.local..end.good_until_token, 0..LAYERS).map_err(|error| error.to_string())?;
            if !good.contains(told) || !wanted.contains(told) {
                return Err(format!("invariant 8: part {part} calls tokens good that are not: {end:?}"));
            }
        }
        Ok(())
    }

    /// Nothing of an old incarnation reaches a machine.
    pub(super) fn check_incarnation(part: usize, bound: Option<u64>, found: u64) -> Result<(), String> {
        if bound == Some(found) {
            return Ok(());
        }
        Err(format!("invariant 5: part {part} takes a word of incarnation {found}, its peer is {bound:?}"))
    }
}
