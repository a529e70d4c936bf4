//! The drivers: one input at a time into a machine, then all its outputs.

use crate::ids::{Generation, TransferId};
use crate::message::{Message, OpaqueKey, WindowBytes};
use crate::transfer::{
    EarlyInput, EarlyState, GrantRefusal, InputError, MessageKind, PostOutcome, ReceiverInput, Rect, SenderInput,
};

use super::memory::{cells, digest};
use super::node::{Inbox, PeerView, ReceiverSlot, SenderSlot};
use super::report::DriverBug;
use super::versions;
use super::world::World;

impl World {
    pub(super) fn poll(&mut self, index: usize, incarnation: u64) -> Result<(), String> {
        if self.nodes[index].incarnation != incarnation {
            return Ok(());
        }
        self.nodes[index].polling = false;
        let Some(input) = self.nodes[index].inbox.pop_front() else { return Ok(()) };
        if self.options.trace {
            self.report.trace.push(format!("              node {index} takes {input:?}"));
        }
        self.take(index, input)?;
        self.schedule_poll(index);
        self.schedule_timer(index);
        Ok(())
    }

    fn take(&mut self, index: usize, input: Inbox) -> Result<(), String> {
        if self.plan.lies(index) {
            return self.liar_takes(index, input);
        }
        let now = self.nodes[index].clock(self.now);
        match input {
            Inbox::Up { link, incarnation, session, version } => self.up(index, link, incarnation, session, version),
            Inbox::Down { link } => self.down(index, link),
            Inbox::Message { link, incarnation, bytes } => self.message(index, link, incarnation, &bytes),
            Inbox::Landed { link, incarnation, version, grant, cells, wrote } => {
                self.landed(index, (link, incarnation, version), (grant, cells), &wrote)
            }
            Inbox::Posted { part, generation, sequence, outcome } => {
                let input = match outcome {
                    PostOutcome::Taken => SenderInput::PostedTaken,
                    PostOutcome::Lost => SenderInput::PostedLost,
                };
                self.sender(index, part, input, |slot| slot.machine.posted(now, generation, sequence, outcome))
            }
            Inbox::Granted { part, generation, grant } => self.granted(index, part, generation, grant),
            Inbox::Fenced { part, generation } => self.fenced(index, part, generation),
            Inbox::Digested { part, generation, sequence, rect } => {
                self.digested(index, part, generation, sequence, rect)
            }
            Inbox::Begin { request, blocks } => self.begin(index, request, &blocks),
            Inbox::Decline { request } => self.decline(index, request),
            Inbox::RefuseSpare { request } => self.refuse_spares(index, request),
            Inbox::Computed { request, step } => self.compute(index, request, step),
            Inbox::Cancel { request } => {
                self.plan.requests[request].parts.clone().try_for_each(|part| self.cancel_part(index, part))
            }
            Inbox::Fail { request } => {
                self.plan.requests[request].parts.clone().try_for_each(|part| self.fail_part(index, part))
            }
            Inbox::CancelPart { part } => self.cancel_part(index, part),
            Inbox::FailPart { part } => self.fail_part(index, part),
            Inbox::Again { link, incarnation, message } => {
                if self.nodes[index].incarnation == incarnation {
                    self.send(index, link, *message)
                } else {
                    Ok(())
                }
            }
            Inbox::Timer => self.timer(index),
        }
    }

    fn cancel_part(&mut self, index: usize, part: usize) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        self.receiver(index, part, ReceiverInput::Cancel, |slot| slot.machine.cancel(now))?;
        self.sender(index, part, SenderInput::Cancel, |slot| slot.machine.cancel(now))
    }

    fn up(&mut self, index: usize, link: usize, incarnation: u64, session: u64, version: u16) -> Result<(), String> {
        let peer = self.links[link].ends.iter().copied().find(|&end| end != index).unwrap_or(index);
        let id = self.peer_id(peer, incarnation);
        let view = PeerView { id, incarnation, session, version, up: true };
        let before = self.nodes[index].views.insert(link, view);
        if let Some(old) = before.filter(|old| old.incarnation != incarnation) {
            self.nodes[index].early.peer_down(&old.id);
        }
        let now = self.nodes[index].clock(self.now);
        for part in self.parts_on(index, link) {
            let node = &self.nodes[index];
            let bound = node.receivers.get(&part).map(|slot| slot.peer);
            let bound = bound.or_else(|| node.senders.get(&part).map(|slot| slot.peer)).flatten();
            if bound.is_some_and(|bound| bound != incarnation) {
                let input = ReceiverInput::PeerRestarted;
                self.receiver(index, part, input, |slot| slot.machine.peer_restarted(now))?;
                self.sender(index, part, SenderInput::PeerRestarted, |slot| slot.machine.peer_restarted(now))?;
            } else {
                self.bind(index, part, incarnation);
                self.peer_up(index, part, session)?;
            }
        }
        Ok(())
    }

    pub(super) fn peer_up(&mut self, index: usize, part: usize, session: u64) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        self.receiver(index, part, ReceiverInput::PeerUp, |slot| slot.machine.peer_up(now, session))?;
        self.sender(index, part, SenderInput::PeerUp, |slot| slot.machine.peer_up(now, session))
    }

    fn down(&mut self, index: usize, link: usize) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        let node = &mut self.nodes[index];
        let Some(view) = node.views.get_mut(&link) else { return Ok(()) };
        view.up = false;
        for &part in &self.plan.links[link].parts {
            let state = node.early.state(&view.id, self.plan.parts[part].transfer);
            if !matches!(state, EarlyState::Unknown | EarlyState::Full) {
                self.report.visits.early(state, EarlyInput::PeerDown);
            }
        }
        node.early.peer_down(&view.id);
        for part in self.parts_on(index, link) {
            self.receiver(index, part, ReceiverInput::PeerDown, |slot| slot.machine.peer_down(now))?;
            self.sender(index, part, SenderInput::PeerDown, |slot| slot.machine.peer_down(now))?;
        }
        Ok(())
    }

    /// Parts of a link for which there is a machine.
    fn parts_on(&self, index: usize, link: usize) -> Vec<usize> {
        let node = &self.nodes[index];
        let here = |part: &&usize| node.receivers.contains_key(part) || node.senders.contains_key(part);
        self.plan.links[link].parts.iter().filter(here).copied().collect()
    }

    fn message(&mut self, index: usize, link: usize, incarnation: u64, bytes: &[u8]) -> Result<(), String> {
        let Some(view) = self.nodes[index].views.get(&link) else { return Ok(()) };
        let current = view.up && view.incarnation == incarnation;
        if !current && self.options.driver_bug != Some(DriverBug::OldIncarnationTaken) {
            self.report.count("messages of old incarnations refused");
            return Ok(());
        }
        let message = match versions::decode(view.version, bytes) {
            Ok(message) => message,
            Err(_) if self.plan.lies(self.plan.peer_of(link, index)) => {
                self.hang_up(index, link);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let Some(transfer) = message.transfer() else { return Ok(()) };
        match message {
            Message::Spare(spare) => self.spare(index, link, spare),
            Message::Ended(_) if self.nodes[index].refused.remove(&(link, transfer)) => Ok(()),
            message => match self.part_of(transfer) {
                Some(part) => self.hand_over(index, link, part, incarnation, message),
                None => self.hear_early(index, link, incarnation, message),
            },
        }
    }

    /// Ends the session with a peer that broke the protocol.
    fn hang_up(&mut self, index: usize, link: usize) {
        self.report.count("sessions ended for what cannot be");
        let (session, side) = (self.links[link].session, self.links[link].side_of(index));
        self.side_down(link, session, side);
    }

    pub(super) fn part_of(&self, transfer: TransferId) -> Option<usize> {
        let part = transfer.get() as u64 as usize;
        self.plan.parts.get(part).filter(|plan| plan.transfer == transfer).map(|_| part)
    }

    /// Gives a message to the machine that it is for, or keeps it for one to come.
    pub(super) fn hand_over(
        &mut self,
        index: usize,
        link: usize,
        part: usize,
        incarnation: u64,
        message: Message,
    ) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        let kind = MessageKind::from(&message);
        // A machine speaks with one rank's one incarnation; another one is another peer, even about the same transfer.
        let any_start = self.options.driver_bug == Some(DriverBug::OldIncarnationTaken);
        let is_the_rank =
            self.plan.parts[part].link == link || self.options.driver_bug == Some(DriverBug::AnybodyHeard);
        let is_peer = |bound: Option<u64>| is_the_rank && (any_start || bound == Some(incarnation));
        let node = &self.nodes[index];
        if let Some(slot) = node.receivers.get(&part).filter(|slot| is_peer(slot.peer)) {
            Self::check_incarnation(part, slot.peer, incarnation)?;
            return self.receiver(index, part, kind.into(), |slot| slot.machine.message(now, message));
        }
        if let Some(slot) = node.senders.get(&part).filter(|slot| is_peer(slot.peer)) {
            Self::check_incarnation(part, slot.peer, incarnation)?;
            return self.sender(index, part, kind.into(), |slot| slot.machine.message(now, message));
        }
        self.hear_early(index, link, incarnation, message)
    }

    /// What a peer says of a transfer that this side does not know, or has with somebody else.
    fn hear_early(&mut self, index: usize, link: usize, incarnation: u64, message: Message) -> Result<(), String> {
        let (now, kind) = (self.nodes[index].clock(self.now), MessageKind::from(&message));
        let Some(transfer) = message.transfer() else { return Ok(()) };
        let peer = self.peer_id(self.plan.peer_of(link, index), incarnation);
        let early = &mut self.nodes[index].early;
        let state = early.state(&peer, transfer);
        let answer = early.message(now, &peer, message);
        self.report.visits.early(state, kind.into());
        self.check_early(index)?;
        match answer {
            Some(answer) => self.send(index, link, answer),
            None => Ok(()),
        }
    }

    fn landed(
        &mut self,
        index: usize,
        (link, incarnation, version): (usize, u64, u16),
        (grant, cells): (u64, u64),
        wrote: &[u8],
    ) -> Result<(), String> {
        let wrote = versions::decode_wrote(version, wrote)?;
        let now = self.nodes[index].clock(self.now);
        let honest = !self.plan.lies(self.plan.peer_of(link, index));
        let named = self.part_of(wrote.transfer);
        // What it is said to be must be what the grant was made for.
        if named != self.grants.part(grant) && self.options.driver_bug != Some(DriverBug::NotificationTrusted) {
            self.report.count("writes said to be another transfer's");
            return if honest { Err(format!("{wrote:?} is said to be another transfer's")) } else { Ok(()) };
        }
        let Some(part) = named else { return Ok(()) };
        if cells != wrote.rect.cells() * self.plan.parts[part].heads.len() as u64 {
            if honest {
                return Err(format!("{cells} cells are said to be {wrote:?}"));
            }
            self.hang_up(index, link);
            return Ok(());
        }
        if let Some(slot) = self.nodes[index].receivers.get(&part) {
            Self::check_incarnation(part, slot.peer, incarnation)?;
        }
        self.receiver(index, part, ReceiverInput::Landed, |slot| slot.machine.landed(now, wrote))
    }

    fn granted(
        &mut self,
        index: usize,
        part: usize,
        generation: Generation,
        grant: Result<u64, GrantRefusal>,
    ) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        if let Some(slot) = self.nodes[index].receivers.get_mut(&part) {
            slot.granting = false;
        }
        match grant {
            Ok(grant) => self.receiver(index, part, ReceiverInput::Granted, |slot| {
                slot.machine.granted(now, generation, OpaqueKey::new(grant.into()), WindowBytes::default())
            }),
            Err(why) => {
                let refused = |slot: &mut ReceiverSlot| slot.machine.grant_refused(now, generation, why);
                self.receiver(index, part, ReceiverInput::GrantRefused, refused)
            }
        }
    }

    fn fenced(&mut self, index: usize, part: usize, generation: Generation) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        let heads = self.plan.parts[part].heads.clone();
        let node = &mut self.nodes[index];
        if let Some(slot) = node.receivers.get_mut(&part).filter(|slot| !slot.finished) {
            slot.fencing = false;
            node.memory.open(&slot.blocks, heads, None);
        }
        self.receiver(index, part, ReceiverInput::Fenced, |slot| slot.machine.fenced(now, generation))
    }

    fn digested(
        &mut self,
        index: usize,
        part: usize,
        generation: Generation,
        sequence: u32,
        rect: Rect,
    ) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        let unhashed = self.rng.once_in(self.plan.odds.unhashed);
        let heads = self.plan.parts[part].heads.clone();
        let node = &mut self.nodes[index];
        let Some(slot) = node.receivers.get_mut(&part) else { return Ok(()) };
        let mut hashed = Vec::new();
        for cell in cells(rect, heads) {
            hashed.push((cell, node.memory.read_for_transfer(&slot.blocks, cell)?));
        }
        if let Some(at) = slot.hashing.iter().position(|&hashing| hashing == rect) {
            slot.hashing.swap_remove(at);
        }
        if unhashed || slot.unhashed {
            return self.receiver(index, part, ReceiverInput::DigestFailed, |slot| {
                slot.machine.digest_failed(now, generation, sequence, "the device is gone")
            });
        }
        slot.hashed.insert(rect).map_err(|error| error.to_string())?;
        let found = digest(hashed.into_iter());
        let digested = |slot: &mut ReceiverSlot| slot.machine.digested(now, generation, sequence, found);
        self.receiver(index, part, ReceiverInput::Digested, digested)
    }

    fn timer(&mut self, index: usize) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        self.early_timer(index)?;
        let mut looks = 2 * self.nodes[index].due.len() + 2;
        while let Some(&(_, part)) = self.nodes[index].due.first().filter(|&&(at, _)| at <= now) {
            looks -= 1;
            if looks == 0 {
                return Err(format!("invariant 2: part {part} is due for ever"));
            }
            self.receiver(index, part, ReceiverInput::Timeout, |slot| {
                slot.machine.timeout(now);
                Ok(())
            })?;
            self.sender(index, part, SenderInput::Timeout, |slot| {
                slot.machine.timeout(now);
                Ok(())
            })?;
        }
        match self.nodes[index].next_timeout() {
            Some(at) if at <= now => Err("invariant 2: an early message is due for ever".to_owned()),
            Some(_) | None => Ok(()),
        }
    }

    fn early_timer(&mut self, index: usize) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        let node = &mut self.nodes[index];
        if node.early.poll_timeout().is_none_or(|(at, _)| at > now) {
            return Ok(());
        }
        let mut known = Vec::new();
        for (&link, view) in &node.views {
            for &part in &self.plan.links[link].parts {
                let transfer = self.plan.parts[part].transfer;
                let state = node.early.state(&view.id, transfer);
                if !matches!(state, EarlyState::Unknown | EarlyState::Full) {
                    known.push((view.id.clone(), transfer, state));
                }
            }
        }
        let answers = node.early.timeout(now);
        for (id, transfer, before) in known {
            if node.early.state(&id, transfer) != before {
                self.report.visits.early(before, EarlyInput::Timeout);
            }
        }
        for (peer, answer) in answers {
            let link = self.nodes[index].views.iter().find(|(_, view)| view.id == peer).map(|(&link, _)| link);
            if let Some(link) = link {
                self.send(index, link, answer)?;
            }
        }
        Ok(())
    }

    pub(super) fn receiver(
        &mut self,
        index: usize,
        part: usize,
        input: ReceiverInput,
        give: impl FnOnce(&mut ReceiverSlot) -> Result<(), InputError>,
    ) -> Result<(), String> {
        let Some(slot) = self.nodes[index].receivers.get_mut(&part) else { return Ok(()) };
        let place = (slot.machine.kind(), slot.machine.is_up());
        let taken = give(slot);
        let lied_to = self.plan.has_liar(self.plan.parts[part].request);
        let agreed = self.report.visits.receiver(lied_to, place, input, &taken);
        self.report.ignored += u64::from(taken.is_err());
        if self.options.planted.is_none() {
            agreed?;
        }
        self.drain(index, part)
    }

    pub(super) fn sender(
        &mut self,
        index: usize,
        part: usize,
        input: SenderInput,
        give: impl FnOnce(&mut SenderSlot) -> Result<(), InputError>,
    ) -> Result<(), String> {
        let Some(slot) = self.nodes[index].senders.get_mut(&part) else { return Ok(()) };
        let place = (slot.machine.kind(), slot.machine.is_up());
        let taken = give(slot);
        let lied_to = self.plan.has_liar(self.plan.parts[part].request);
        let agreed = self.report.visits.sender(lied_to, place, input, &taken);
        self.report.ignored += u64::from(taken.is_err());
        if self.options.planted.is_none() {
            agreed?;
        }
        self.drain(index, part)
    }
}
