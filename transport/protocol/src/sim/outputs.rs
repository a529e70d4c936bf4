//! What the drivers do with the machines' outputs, and what must hold of each.

use crate::digest::Digest;
use crate::ids::Generation;
use crate::message::{Message, Wrote};
use crate::transfer::{Coverage, ReceiverOutput, Rect, SenderOutput};

use super::memory::cells;
use super::node::Inbox;
use super::world::{Event, World};

impl World {
    /// Performs all outputs of a part's machine; drops it when all is over.
    pub(super) fn drain(&mut self, index: usize, part: usize) -> Result<(), String> {
        while let Some(output) = self.nodes[index].receivers.get_mut(&part).and_then(|slot| slot.machine.poll_output())
        {
            if self.options.trace {
                self.report.trace.push(format!("              receiver of part {part}: {output:?}"));
            }
            self.receiver_output(index, part, output)?;
        }
        while let Some(output) = self.nodes[index].senders.get_mut(&part).and_then(|slot| slot.machine.poll_output()) {
            if self.options.trace {
                self.report.trace.push(format!("              sender of part {part}: {output:?}"));
            }
            self.sender_output(index, part, output)?;
        }
        self.check_part(index, part)?;
        if let Some(act) = self.nodes[index].note(part) {
            self.ambush(index, part, act);
        }
        let node = &mut self.nodes[index];
        if node.receivers.get(&part).is_some_and(|slot| slot.machine.is_closed()) {
            node.receivers.remove(&part);
        }
        if let Some(slot) = node.senders.get(&part).filter(|slot| slot.machine.is_closed()) {
            self.report.visits.lease(slot.machine.lease_visits());
            node.senders.remove(&part);
        }
        Ok(())
    }

    fn receiver_output(&mut self, index: usize, part: usize, output: ReceiverOutput) -> Result<(), String> {
        let incarnation = self.nodes[index].incarnation;
        let Some(slot) = self.nodes[index].receivers.get_mut(&part) else { return Ok(()) };
        match output {
            ReceiverOutput::MakeGrant { generation, missing } => {
                if slot.last_generation.is_some_and(|last| generation <= last) {
                    return Err(format!("invariant 5: part {part} grants generation {generation} again"));
                }
                slot.last_generation = Some(generation);
                slot.granting = true;
                let wait = self.work(index, part, 4);
                self.after(wait, Event::GrantAnswer { node: index, incarnation, part, generation, missing });
            }
            ReceiverOutput::Send(message) => return self.send(index, self.plan.parts[part].link, message),
            ReceiverOutput::Verify { generation, sequence, rect } => {
                if slot.shown.overlaps(rect) || slot.hashing.iter().any(|hashing| hashing.overlaps(rect)) {
                    return Err(format!("invariant 3: part {part} takes {rect} a second time"));
                }
                slot.hashing.push(rect);
                let grant = slot.grants.get(&generation).copied();
                let grant = grant.ok_or_else(|| format!("part {part}: {rect} landed under no grant"))?;
                self.grants.seal(grant, rect)?;
                let wait = self.work(index, part, 6);
                let input = Inbox::Digested { part, generation, sequence, rect };
                self.after(wait, Event::Input { node: index, incarnation, input });
            }
            ReceiverOutput::Verified(rect) => return self.verified(index, part, rect),
            ReceiverOutput::Revoke { generation, .. } => {
                slot.fencing = true;
                let Some(&grant) = slot.grants.get(&generation) else {
                    return Err(format!("part {part}: no grant {generation} to revoke"));
                };
                let wait = self.work(index, part, 10);
                self.after(wait, Event::FenceReturns { node: index, incarnation, part, generation, grant });
            }
            ReceiverOutput::Finished(end) => {
                self.check_receiver_end(index, part, &end)?;
                self.ledger.receiver_ended(part, &end.verdict)?;
                if let Some(slot) = self.nodes[index].receivers.get_mut(&part) {
                    slot.finished = true;
                }
                return self.part_received(index, part, end);
            }
        }
        Ok(())
    }

    fn verified(&mut self, index: usize, part: usize, rect: Rect) -> Result<(), String> {
        let Some(slot) = self.nodes[index].receivers.get(&part) else { return Ok(()) };
        if !slot.hashed.contains(rect) {
            return Err(format!("invariant 3: {rect} of part {part} is visible before it is hashed"));
        }
        let heads = self.plan.parts[part].heads.clone();
        self.check_cells(index, &slot.blocks, rect, heads.clone(), "invariant 3: visible")?;
        let node = &mut self.nodes[index];
        let Some(slot) = node.receivers.get_mut(&part) else { return Ok(()) };
        slot.shown.insert(rect).map_err(|error| error.to_string())?;
        node.memory.show(&slot.blocks, cells(rect, heads));
        self.part_verified(index, part, rect)
    }

    fn sender_output(&mut self, index: usize, part: usize, output: SenderOutput) -> Result<(), String> {
        let Some(slot) = self.nodes[index].senders.get_mut(&part) else { return Ok(()) };
        match output {
            SenderOutput::Adopt(grant) => {
                if slot.adopted.as_ref().is_some_and(|last| grant.generation <= last.generation) {
                    return Err(format!("invariant 5: part {part} uses generation {} again", grant.generation));
                }
                slot.adopted = Some(grant);
                slot.posted = Coverage::new();
            }
            SenderOutput::Post { generation, sequence, rect } => {
                return self.post_checked(index, part, generation, sequence, rect);
            }
            SenderOutput::CancelPosts { generation } => self.cancel_posts(index, part, generation),
            SenderOutput::Send(message) => {
                if let Message::Stopped(stopped) = &message
                    && !self.posts_of(index, part, stopped.generation).is_empty()
                {
                    return Err(format!("invariant 1: the sender of part {part} says stopped while it posts"));
                }
                return self.send(index, self.plan.parts[part].link, message);
            }
            SenderOutput::ReleaseLease => {
                if !slot.writes.is_empty() {
                    return Err(format!("invariant 4: the lease of part {part} is released while posts read it"));
                }
                slot.released = true;
            }
            SenderOutput::Finished(verdict) => {
                if !slot.released {
                    return Err(format!("invariant 4: the sender of part {part} ended with its lease"));
                }
                slot.finished = true;
                let believes = !self.plan.lies(self.plan.parts[part].receiver);
                self.ledger.sender_ended(part, &verdict, believes)?;
                return self.part_sent(index, part, verdict);
            }
        }
        Ok(())
    }

    fn post_checked(
        &mut self,
        index: usize,
        part: usize,
        generation: Generation,
        sequence: u32,
        rect: Rect,
    ) -> Result<(), String> {
        let plan = &self.plan.parts[part];
        let node = &mut self.nodes[index];
        let Some(slot) = node.senders.get_mut(&part) else { return Ok(()) };
        let Some(grant) = slot.adopted.as_ref().filter(|grant| grant.generation == generation) else {
            return Err(format!("invariant 5: part {part} posts under generation {generation}, which is not adopted"));
        };
        if !node.leases.get(&plan.request).is_some_and(|leases| leases.computed.contains(rect)) {
            return Err(format!("invariant 3: part {part} posts {rect}, which is not computed"));
        }
        if slot.released {
            return Err(format!("invariant 4: part {part} posts {rect} after its lease"));
        }
        if slot.posted.overlaps(rect) {
            return Err(format!("invariant 1: part {part} posts {rect} again under generation {generation}"));
        }
        if !grant.missing.as_slice().iter().any(|missing| missing.contains(rect)) {
            return Err(format!("invariant 1: part {part} posts {rect}, which is in no window"));
        }
        let limit = self.plan.requests[plan.request].posts_in_flight as usize;
        if slot.machine.posts_in_flight() > limit {
            return Err(format!("invariant 7: part {part} has more than {limit} posts in flight"));
        }
        let grant = u64::try_from(grant.key.get()).unwrap_or(u64::MAX);
        slot.posted.insert(rect).map_err(|error| error.to_string())?;
        let wrote = Wrote { transfer: plan.transfer, generation, sequence, rect, digest: Digest::default() };
        self.post(index, part, grant, wrote)
    }
}
