//! The drivers: one input at a time into a machine, then all its outputs.

use crate::codec;
use crate::ids::{Generation, TransferId};
use crate::message::{Message, OpaqueKey, WindowBytes, Wrote};
use crate::transfer::{GrantRefusal, InputError, ReceiverOutput, Rect, SenderOutput};

use super::memory::{cells, digest};
use super::node::{Inbox, Key, peer_id};
use super::plan::MS;
use super::world::{DriverBug, Event, World};

impl World {
    pub(super) fn poll(&mut self, index: usize, incarnation: u64) -> Result<(), String> {
        if self.nodes[index].incarnation != incarnation {
            return Ok(());
        }
        self.nodes[index].polling = false;
        let Some(input) = self.nodes[index].inbox.pop_front() else { return Ok(()) };
        if self.options.trace {
            self.report.trace.push(format!("              engine {index} takes {input:?}"));
        }
        self.take(index, input)?;
        self.schedule_poll(index);
        self.schedule_timer(index);
        Ok(())
    }

    fn take(&mut self, index: usize, input: Inbox) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        match input {
            Inbox::Up { peer, incarnation, session } => self.up(index, peer, incarnation, session),
            Inbox::Down { peer } => self.down(index, peer),
            Inbox::Message { peer, incarnation, bytes } => self.message(index, peer, incarnation, &bytes),
            Inbox::Landed { peer, incarnation, wrote } => self.landed(index, peer, incarnation, &wrote),
            Inbox::Posted { key, generation, sequence, outcome } => {
                let posted =
                    |slot: &mut super::node::SenderSlot| slot.machine.posted(now, generation, sequence, outcome);
                self.sender(index, key, "posted", posted)
            }
            Inbox::Granted { key, generation, missing } => self.granted(index, key, generation, &missing),
            Inbox::Fenced { key, generation } => self.fenced(index, key, generation),
            Inbox::Digested { key, generation, sequence, rect } => {
                self.digested(index, key, generation, sequence, rect)
            }
            Inbox::Decode { request } => self.begin_decode(index, request),
            Inbox::Prefill { request } => self.begin_prefill(index, request),
            Inbox::Computed { request, step } => self.compute(index, request, step),
            Inbox::CancelReceiver { request } => {
                let plan = &self.plan.requests[request];
                self.receiver(index, (plan.prefill, plan.transfer), "cancel", |slot| slot.machine.cancel(now))
            }
            Inbox::CancelSender { request } => {
                let plan = &self.plan.requests[request];
                self.sender(index, (plan.decode, plan.transfer), "cancel", |slot| slot.machine.cancel(now))
            }
            Inbox::FailSender { request } => {
                let plan = &self.plan.requests[request];
                self.sender(index, (plan.decode, plan.transfer), "fail", |slot| slot.machine.fail(now, "no memory"))
            }
            Inbox::Timer => self.timer(index),
        }
    }

    fn up(&mut self, index: usize, peer: usize, incarnation: u64, session: u64) -> Result<(), String> {
        let view = super::node::PeerView { incarnation, session, up: true };
        let before = self.nodes[index].peers.insert(peer, view);
        if let Some(old) = before.filter(|old| old.incarnation != incarnation) {
            self.nodes[index].early.peer_down(&peer_id(peer, old.incarnation));
        }
        let now = self.nodes[index].clock(self.now);
        for key in self.keys_of(index, peer) {
            let node = &self.nodes[index];
            let bound = node.receivers.get(&key).map(|slot| slot.peer);
            let bound = bound.or_else(|| node.senders.get(&key).map(|slot| slot.peer)).flatten();
            if bound.is_some_and(|bound| bound != incarnation) {
                self.receiver(index, key, "peer_restarted", |slot| slot.machine.peer_restarted(now))?;
                self.sender(index, key, "peer_restarted", |slot| slot.machine.peer_restarted(now))?;
            } else {
                self.bind(index, key, incarnation);
                self.peer_up(index, key, session)?;
            }
        }
        Ok(())
    }

    pub(super) fn peer_up(&mut self, index: usize, key: Key, session: u64) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        self.receiver(index, key, "peer_up", |slot| slot.machine.peer_up(now, session))?;
        self.sender(index, key, "peer_up", |slot| slot.machine.peer_up(now, session))
    }

    fn down(&mut self, index: usize, peer: usize) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        let Some(view) = self.nodes[index].peers.get_mut(&peer) else { return Ok(()) };
        view.up = false;
        let incarnation = view.incarnation;
        self.nodes[index].early.peer_down(&peer_id(peer, incarnation));
        for key in self.keys_of(index, peer) {
            self.receiver(index, key, "peer_down", |slot| slot.machine.peer_down(now))?;
            self.sender(index, key, "peer_down", |slot| slot.machine.peer_down(now))?;
        }
        Ok(())
    }

    fn message(&mut self, index: usize, peer: usize, incarnation: u64, bytes: &[u8]) -> Result<(), String> {
        let message = codec::decode(bytes).map_err(|error| format!("a message cannot be read: {error}"))?;
        let current = self.nodes[index].peers.get(&peer).is_some_and(|view| view.up && view.incarnation == incarnation);
        if !current && self.options.driver_bug != Some(DriverBug::OldIncarnationTaken) {
            self.report.refused += 1;
            return Ok(());
        }
        let Some(transfer) = message.transfer() else { return Ok(()) };
        self.hand_over(index, (peer, transfer), incarnation, message)
    }

    /// Gives a message to the machine that it is for, or keeps it for one to come.
    pub(super) fn hand_over(
        &mut self,
        index: usize,
        key: Key,
        incarnation: u64,
        message: Message,
    ) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        let name = message.name();
        // A machine speaks with one incarnation; another one is another peer, even about the same transfer.
        let any = self.options.driver_bug == Some(DriverBug::OldIncarnationTaken);
        let is_peer = |bound: Option<u64>| any || bound == Some(incarnation);
        if let Some(slot) = self.nodes[index].receivers.get(&key).filter(|slot| is_peer(slot.peer)) {
            Self::check_incarnation(key, slot.peer, incarnation)?;
            return self.receiver(index, key, name, |slot| slot.machine.message(now, message));
        }
        if let Some(slot) = self.nodes[index].senders.get(&key).filter(|slot| is_peer(slot.peer)) {
            Self::check_incarnation(key, slot.peer, incarnation)?;
            return self.sender(index, key, name, |slot| slot.machine.message(now, message));
        }
        let answer = self.nodes[index].early.message(now, &peer_id(key.0, incarnation), message);
        match answer {
            Some(answer) => self.send(index, key.0, &answer),
            None => Ok(()),
        }
    }

    fn landed(&mut self, index: usize, peer: usize, incarnation: u64, wrote: &[u8]) -> Result<(), String> {
        let wrote = codec::decode_wrote(wrote).map_err(|error| format!("a notification cannot be read: {error}"))?;
        let key = (peer, wrote.transfer);
        let now = self.nodes[index].clock(self.now);
        if let Some(slot) = self.nodes[index].receivers.get(&key) {
            Self::check_incarnation(key, slot.peer, incarnation)?;
        }
        self.receiver(index, key, "landed", |slot| slot.machine.landed(now, wrote))
    }

    fn granted(&mut self, index: usize, key: Key, generation: Generation, missing: &[Rect]) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        let full = self.rng.once_in(60);
        let Some(slot) = self.nodes[index].receivers.get(&key) else { return Ok(()) };
        let blocks = slot.blocks.clone();
        for (token, layer) in missing.iter().flat_map(|&rect| cells(rect)) {
            if self.nodes[index].pool.is_visible(&blocks, token, layer) {
                return Err(format!("invariant 3: {} grants token {token} layer {layer}, which is read", key.1));
            }
        }
        let made = if full { None } else { self.make_grant(index, key, generation, &blocks) };
        let Some(grant) = made else {
            let why =
                if full { GrantRefusal::Impossible("too many grants".into()) } else { GrantRefusal::NotConnected };
            return self.receiver(index, key, "grant_refused", |slot| slot.machine.grant_refused(now, generation, why));
        };
        self.nodes[index].pool.open(&blocks, Some(generation));
        self.receiver(index, key, "granted", |slot| {
            slot.keys.insert(generation, grant);
            slot.machine.granted(now, generation, OpaqueKey::new(grant.into()), WindowBytes::default())
        })
    }

    fn fenced(&mut self, index: usize, key: Key, generation: Generation) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        let node = &mut self.nodes[index];
        if let Some(slot) = node.receivers.get(&key).filter(|slot| !slot.finished) {
            node.pool.open(&slot.blocks, None);
        }
        self.receiver(index, key, "fenced", |slot| slot.machine.fenced(now, generation))
    }

    fn digested(
        &mut self,
        index: usize,
        key: Key,
        generation: Generation,
        sequence: u32,
        rect: Rect,
    ) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        let node = &mut self.nodes[index];
        let Some(slot) = node.receivers.get_mut(&key) else { return Ok(()) };
        let mut hashed = Vec::new();
        for (token, layer) in cells(rect) {
            hashed.push((token, layer, node.pool.read(&slot.blocks, token, layer)?));
        }
        slot.hashing -= 1;
        if self.rng.once_in(400) {
            return self.receiver(index, key, "digest_failed", |slot| {
                slot.machine.digest_failed(now, generation, sequence, "the device is gone")
            });
        }
        slot.hashed.insert(rect).map_err(|error| error.to_string())?;
        let found = digest(hashed.into_iter());
        self.receiver(index, key, "digested", |slot| slot.machine.digested(now, generation, sequence, found))
    }

    fn timer(&mut self, index: usize) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        for (peer, answer) in self.nodes[index].early.timeout(now) {
            let to = (0..self.nodes.len()).find(|&node| peer_id(node, peer.incarnation.get()) == peer);
            if let Some(to) = to {
                self.send(index, to, &answer)?;
            }
        }
        let due = |timeout: Option<(crate::transfer::Time, &str)>| timeout.is_some_and(|(at, _)| at <= now);
        let node = &self.nodes[index];
        let receivers: Vec<Key> =
            node.receivers.iter().filter(|(_, slot)| due(slot.machine.poll_timeout())).map(|(&key, _)| key).collect();
        let senders: Vec<Key> =
            node.senders.iter().filter(|(_, slot)| due(slot.machine.poll_timeout())).map(|(&key, _)| key).collect();
        for key in receivers {
            self.receiver(index, key, "timeout", |slot| {
                slot.machine.timeout(now);
                Ok(())
            })?;
        }
        for key in senders {
            self.sender(index, key, "timeout", |slot| {
                slot.machine.timeout(now);
                Ok(())
            })?;
        }
        let late = self.nodes[index].next_timeout().filter(|&(at, _)| at <= now);
        late.map_or(Ok(()), |(_, why)| Err(format!("invariant 2: {why} is due for ever")))
    }

    fn receiver(
        &mut self,
        index: usize,
        key: Key,
        input: &'static str,
        give: impl FnOnce(&mut super::node::ReceiverSlot) -> Result<(), InputError>,
    ) -> Result<(), String> {
        let Some(slot) = self.nodes[index].receivers.get_mut(&key) else { return Ok(()) };
        let state = slot.machine.state();
        let taken = give(slot);
        self.visit("receiver", state, input, taken.is_err());
        self.drain(index, key)
    }

    fn sender(
        &mut self,
        index: usize,
        key: Key,
        input: &'static str,
        give: impl FnOnce(&mut super::node::SenderSlot) -> Result<(), InputError>,
    ) -> Result<(), String> {
        let Some(slot) = self.nodes[index].senders.get_mut(&key) else { return Ok(()) };
        let state = slot.machine.state();
        let taken = give(slot);
        self.visit("sender", state, input, taken.is_err());
        self.drain(index, key)
    }

    pub(super) fn visit(&mut self, side: &'static str, state: &'static str, input: &'static str, ignored: bool) {
        *self.report.visited.entry((side, state, input)).or_default() += 1;
        self.report.ignored += u64::from(ignored);
    }

    fn keys_of(&self, index: usize, peer: usize) -> Vec<Key> {
        let node = &self.nodes[index];
        let range = (peer, TransferId::new(0))..=(peer, TransferId::new(u128::MAX));
        let receivers = node.receivers.range(range.clone()).map(|(&key, _)| key);
        receivers.chain(node.senders.range(range).map(|(&key, _)| key)).collect()
    }

    /// Performs all outputs of a machine; drops it when all is over.
    pub(super) fn drain(&mut self, index: usize, key: Key) -> Result<(), String> {
        while let Some(output) = self.nodes[index].receivers.get_mut(&key).and_then(|slot| slot.machine.poll_output()) {
            if self.options.trace {
                self.report.trace.push(format!("              receiver {}: {output:?}", key.1));
            }
            self.receiver_output(index, key, output)?;
        }
        while let Some(output) = self.nodes[index].senders.get_mut(&key).and_then(|slot| slot.machine.poll_output()) {
            if self.options.trace {
                self.report.trace.push(format!("              sender {}: {output:?}", key.1));
            }
            self.sender_output(index, key, output)?;
        }
        let node = &mut self.nodes[index];
        node.receivers.retain(|_, slot| !slot.machine.is_closed());
        node.senders.retain(|_, slot| !slot.machine.is_closed());
        Ok(())
    }

    fn receiver_output(&mut self, index: usize, key: Key, output: ReceiverOutput) -> Result<(), String> {
        let incarnation = self.nodes[index].incarnation;
        match output {
            ReceiverOutput::MakeGrant { generation, missing } => {
                let Some(slot) = self.nodes[index].receivers.get_mut(&key) else { return Ok(()) };
                if slot.last_generation.is_some_and(|last| generation <= last) {
                    return Err(format!("invariant 5: {} grants generation {generation} again", key.1));
                }
                slot.last_generation = Some(generation);
                let wait = self.rng.within(0..4 * MS);
                self.after(wait, Event::GrantAnswer { node: index, incarnation, key, generation, missing });
            }
            ReceiverOutput::Send(message) => return self.send(index, key.0, &message),
            ReceiverOutput::Verify { generation, sequence, rect } => {
                let Some(slot) = self.nodes[index].receivers.get_mut(&key) else { return Ok(()) };
                slot.hashing += 1;
                let wait = self.delay(6);
                let input = Inbox::Digested { key, generation, sequence, rect };
                self.after(wait, Event::Input { node: index, incarnation, input });
            }
            ReceiverOutput::Verified(rect) => return self.verified(index, key, rect),
            ReceiverOutput::Revoke { generation, .. } => {
                let grant = self.nodes[index].receivers.get(&key).and_then(|slot| slot.keys.get(&generation).copied());
                let Some(grant) = grant else { return Err(format!("{}: no grant {generation} to revoke", key.1)) };
                let wait = self.delay(10);
                self.after(wait, Event::FenceReturns { node: index, incarnation, key, generation, grant });
            }
            ReceiverOutput::Finished(end) => {
                let Some(slot) = self.nodes[index].receivers.get(&key) else { return Ok(()) };
                self.check_receiver_end(index, slot, &end)?;
                self.ledger.receiver_ended(key.1, end.verdict)?;
                let node = &mut self.nodes[index];
                if let Some(slot) = node.receivers.get_mut(&key) {
                    slot.finished = true;
                    node.pool.free(&slot.blocks)?;
                }
            }
        }
        Ok(())
    }

    fn verified(&mut self, index: usize, key: Key, rect: Rect) -> Result<(), String> {
        let Some(slot) = self.nodes[index].receivers.get(&key) else { return Ok(()) };
        if !slot.hashed.contains(rect) {
            return Err(format!("invariant 3: {rect} of {} is visible before it is hashed", key.1));
        }
        self.check_content(index, slot, rect, "invariant 3: visible")?;
        let blocks = slot.blocks.clone();
        self.nodes[index].pool.show(&blocks, rect);
        Ok(())
    }

    fn sender_output(&mut self, index: usize, key: Key, output: SenderOutput) -> Result<(), String> {
        let (peer, transfer) = key;
        match output {
            SenderOutput::Adopt(grant) => {
                let Some(slot) = self.nodes[index].senders.get_mut(&key) else { return Ok(()) };
                if slot.adopted.as_ref().is_some_and(|last| grant.generation <= last.generation) {
                    return Err(format!("invariant 5: {transfer} uses generation {} again", grant.generation));
                }
                slot.adopted = Some(grant);
                slot.posted = crate::transfer::Coverage::new();
            }
            SenderOutput::Post { generation, sequence, rect } => {
                return self.post_checked(index, key, generation, sequence, rect);
            }
            SenderOutput::CancelPosts { generation } => self.cancel_posts(index, transfer, generation),
            SenderOutput::Send(message) => {
                if let Message::Stopped(stopped) = &message
                    && self.posts_of(index, transfer, stopped.generation) > 0
                {
                    return Err(format!("invariant 1: the sender of {transfer} says stopped while it posts"));
                }
                return self.send(index, peer, &message);
            }
            SenderOutput::ReleaseLease => {
                if self.posts_of(index, transfer, Generation::new(u32::MAX)) > 0 {
                    return Err(format!("invariant 4: the lease of {transfer} is released while posts read it"));
                }
                let node = &mut self.nodes[index];
                let Some(slot) = node.senders.get_mut(&key) else { return Ok(()) };
                slot.released = true;
                node.pool.free(&slot.blocks)?;
            }
            SenderOutput::Finished(verdict) => {
                let Some(slot) = self.nodes[index].senders.get_mut(&key) else { return Ok(()) };
                if !slot.released {
                    return Err(format!("invariant 4: the sender of {transfer} ended with its lease"));
                }
                slot.finished = true;
                self.ledger.sender_ended(transfer, verdict)?;
            }
        }
        Ok(())
    }

    fn post_checked(
        &mut self,
        index: usize,
        key: Key,
        generation: Generation,
        sequence: u32,
        rect: Rect,
    ) -> Result<(), String> {
        let (peer, transfer) = key;
        let Some(slot) = self.nodes[index].senders.get_mut(&key) else { return Ok(()) };
        let Some(grant) = slot.adopted.as_ref().filter(|grant| grant.generation == generation) else {
            return Err(format!("invariant 5: {transfer} posts under generation {generation}, which is not adopted"));
        };
        if !slot.computed.contains(rect) {
            return Err(format!("invariant 3: {transfer} posts {rect}, which is not computed"));
        }
        if slot.posted.overlaps(rect) {
            return Err(format!("invariant 1: {transfer} posts {rect} again under generation {generation}"));
        }
        if !grant.missing.as_slice().iter().any(|missing| missing.contains(rect)) {
            return Err(format!("invariant 1: {transfer} posts {rect}, which is in no window"));
        }
        let grant = u64::try_from(grant.key.get()).unwrap_or(u64::MAX);
        slot.posted.insert(rect).map_err(|error| error.to_string())?;
        let source = slot.blocks.clone();
        let wrote = Wrote { transfer, generation, sequence, rect, digest: crate::Digest::default() };
        self.post(index, peer, grant, wrote, source)
    }
}
