//! Sessions, messages and writes between the engines, as a transport promises them and no better.
//!
//! Messages of one session arrive in order, at most once. A write's parts leave and land one by one, whenever they like, in no
//! order to messages. A part lands only under a live grant of its own session; the receiver's side ends a session, or revokes.

use std::collections::BTreeMap;

use crate::codec;
use crate::ids::{Generation, TransferId};
use crate::message::{Message, Wrote};
use crate::transfer::PostOutcome;

use super::memory::{Blocks, cells, digest};
use super::node::{Inbox, Key};
use super::plan::MS;
use super::world::{DriverBug, Event, World};

/// The sessions of one prefill and one decode engine.
#[derive(Debug, Default)]
pub(super) struct Link {
    session: u64,
    /// Nothing new enters the session.
    cut: bool,
    /// Whether each side has it up: prefill, decode.
    up: [bool; 2],
    /// When the last message to each side arrives.
    arrival: [u64; 2],
    /// The last messages: to which side, from which incarnation.
    said: Vec<(usize, u64, Vec<u8>)>,
}

/// A transport's grant.
#[derive(Debug)]
pub(super) struct GrantRecord {
    decode: usize,
    incarnation: u64,
    prefill: usize,
    prefill_incarnation: u64,
    session: u64,
    pub(super) transfer: TransferId,
    generation: Generation,
    blocks: Blocks,
    pub(super) live: bool,
    /// Bytes land although it is dead: a planted bug.
    leaks: bool,
}

/// A posted write.
#[derive(Debug)]
pub(super) struct Write {
    from: usize,
    incarnation: u64,
    to: usize,
    session: u64,
    grant: u64,
    pub(super) wrote: Wrote,
    source: Blocks,
    parts: Vec<Part>,
    /// The sender was told its end: its source is not read any more.
    pub(super) ended: bool,
}

#[derive(Debug)]
struct Part {
    cells: Vec<(u32, u16)>,
    /// As they left.
    values: Vec<u64>,
    landed: bool,
}

const PREFILL: usize = 0;
const DECODE: usize = 1;

/// Which link joins two engines, and which side the second one is.
fn link_to(world: &World, from: usize, to: usize) -> ((usize, usize), usize) {
    if from < world.plan.prefills { ((from, to), DECODE) } else { ((to, from), PREFILL) }
}

impl World {
    pub(super) fn connect_all(&mut self) {
        for prefill in 0..self.plan.prefills {
            for decode in self.plan.prefills..self.plan.nodes.len() {
                self.links.insert((prefill, decode), Link { cut: true, ..Link::default() });
                let wait = self.rng.within(0..200) * MS;
                self.after(wait, Event::Connect { link: (prefill, decode) });
            }
        }
    }

    /// Begins the next session, unless one is up or an engine is away.
    pub(super) fn connect(&mut self, ends: (usize, usize)) {
        if !self.nodes[ends.0].alive || !self.nodes[ends.1].alive {
            return;
        }
        let Some(link) = self.links.get_mut(&ends) else { return };
        if !link.cut || link.up != [false; 2] {
            return;
        }
        link.session += 1;
        link.cut = false;
        let session = link.session;
        let said = std::mem::take(&mut link.said);
        for side in [PREFILL, DECODE] {
            let wait = self.delay(20);
            self.after(wait, Event::SideUp { link: ends, session, side });
            if let Some(link) = self.links.get_mut(&ends) {
                link.arrival[side] = self.now + wait + 1;
            }
        }
        for (side, incarnation, bytes) in said {
            if self.rng.once_in(self.plan.repeat_once_in) {
                self.deliver_later(ends, side, incarnation, bytes);
            }
        }
    }

    pub(super) fn side_up(&mut self, ends: (usize, usize), session: u64, side: usize) {
        let Some(link) = self.links.get_mut(&ends) else { return };
        if link.session != session || link.cut || link.up[side] {
            return;
        }
        link.up[side] = true;
        let (node, peer) = if side == PREFILL { ends } else { (ends.1, ends.0) };
        let incarnation = self.nodes[peer].incarnation;
        self.push(node, Inbox::Up { peer, incarnation, session });
    }

    /// The network between two engines fails; each side learns of it in its own time.
    pub(super) fn cut(&mut self, ends: (usize, usize)) {
        let Some(link) = self.links.get_mut(&ends) else { return };
        if link.cut {
            return;
        }
        link.cut = true;
        let session = link.session;
        for side in [PREFILL, DECODE] {
            let wait = self.delay(80);
            self.after(wait, Event::SideDown { link: ends, session, side });
        }
    }

    /// A side learns that its session ended: its grants are dead and its posts ended before its driver hears of it.
    pub(super) fn side_down(&mut self, ends: (usize, usize), session: u64, side: usize) {
        let Some(link) = self.links.get_mut(&ends) else { return };
        if link.session != session {
            return;
        }
        let was_up = std::mem::replace(&mut link.up[side], false);
        let over = link.up == [false; 2];
        if was_up && side == DECODE {
            for grant in self.grants.values_mut().filter(|grant| (grant.prefill, grant.decode) == ends) {
                grant.live = false;
            }
            self.push(ends.1, Inbox::Down { peer: ends.0 });
        } else if was_up {
            let posted: Vec<u64> = self
                .writes
                .iter()
                .filter(|(_, write)| (write.from, write.to, write.session) == (ends.0, ends.1, session))
                .map(|(&id, _)| id)
                .collect();
            for id in posted {
                self.post_ends(id, PostOutcome::Lost);
            }
            self.push(ends.0, Inbox::Down { peer: ends.1 });
        }
        if over {
            let wait = self.delay(150);
            self.after(wait, Event::Connect { link: ends });
        }
    }

    /// A crashed engine's sessions end at once on its own side.
    pub(super) fn drop_sessions(&mut self, node: usize) {
        let links: Vec<_> = self.links.keys().copied().filter(|ends| ends.0 == node || ends.1 == node).collect();
        for ends in links {
            self.cut(ends);
            if let Some(link) = self.links.get_mut(&ends) {
                link.up[usize::from(ends.1 == node)] = false;
            }
        }
        for grant in self.grants.values_mut().filter(|grant| grant.decode == node) {
            grant.live = false;
        }
        for write in self.writes.values_mut().filter(|write| write.from == node) {
            write.ended = true;
        }
    }

    pub(super) fn reconnect(&mut self, node: usize) {
        let links: Vec<_> = self.links.keys().copied().filter(|ends| ends.0 == node || ends.1 == node).collect();
        for ends in links {
            let wait = self.delay(100);
            self.after(wait, Event::Connect { link: ends });
        }
    }

    pub(super) fn send(&mut self, from: usize, to: usize, message: &Message) -> Result<(), String> {
        let bytes = codec::encode(1, message).map_err(|error| error.to_string())?;
        let (ends, side) = link_to(self, from, to);
        let incarnation = self.nodes[from].incarnation;
        let Some(link) = self.links.get_mut(&ends) else { return Ok(()) };
        if !link.up[1 - side] || link.cut {
            return Ok(());
        }
        link.said.push((side, incarnation, bytes.clone()));
        if link.said.len() > 6 {
            link.said.remove(0);
        }
        self.deliver_later(ends, side, incarnation, bytes);
        Ok(())
    }

    fn deliver_later(&mut self, ends: (usize, usize), side: usize, incarnation: u64, bytes: Vec<u8>) {
        let wait = self.delay(40);
        let Some(link) = self.links.get_mut(&ends) else { return };
        // In order: never before the last one.
        link.arrival[side] = link.arrival[side].max(self.now + wait);
        let (session, arrival) = (link.session, link.arrival[side]);
        self.after(arrival - self.now, Event::Deliver { link: ends, session, side, incarnation, bytes });
    }

    pub(super) fn deliver(
        &mut self,
        ends: (usize, usize),
        session: u64,
        side: usize,
        incarnation: u64,
        bytes: Vec<u8>,
    ) {
        let Some(link) = self.links.get(&ends) else { return };
        // What was on its way when the session was cut may still arrive, or not.
        if link.session != session || !link.up[side] || (link.cut && self.rng.once_in(2)) {
            return;
        }
        let (node, peer) = if side == PREFILL { ends } else { (ends.1, ends.0) };
        self.push(node, Inbox::Message { peer, incarnation, bytes });
    }

    /// The transport makes a grant; `None` if there is no session.
    pub(super) fn make_grant(
        &mut self,
        decode: usize,
        key: Key,
        generation: Generation,
        blocks: &Blocks,
    ) -> Option<u64> {
        let (prefill, transfer) = key;
        let link = self.links.get(&(prefill, decode))?;
        let view = self.nodes[decode].peers.get(&prefill)?;
        if !link.up[DECODE] || !view.up || view.session != link.session {
            return None;
        }
        let record = GrantRecord {
            decode,
            incarnation: self.nodes[decode].incarnation,
            prefill,
            prefill_incarnation: view.incarnation,
            session: link.session,
            transfer,
            generation,
            blocks: blocks.clone(),
            live: true,
            leaks: false,
        };
        self.next_id += 1;
        self.grants.insert(self.next_id, record);
        Some(self.next_id)
    }

    /// The fence is up: no byte of the grant lands any more.
    pub(super) fn fence_returns(
        &mut self,
        node: usize,
        incarnation: u64,
        key: Key,
        generation: Generation,
        grant: u64,
    ) {
        let leaks = self.options.driver_bug == Some(DriverBug::FenceLies);
        if let Some(record) = self.grants.get_mut(&grant) {
            record.live = false;
            record.leaks = leaks;
        }
        if self.nodes[node].incarnation == incarnation {
            self.push(node, Inbox::Fenced { key, generation });
        }
    }

    pub(super) fn post(
        &mut self,
        from: usize,
        to: usize,
        grant: u64,
        mut wrote: Wrote,
        source: Blocks,
    ) -> Result<(), String> {
        let pool = &self.nodes[from].pool;
        let mut hashed = Vec::new();
        for (token, layer) in cells(wrote.rect) {
            hashed.push((token, layer, pool.read(&source, token, layer)?));
        }
        wrote.digest = digest(hashed.into_iter());
        let all: Vec<(u32, u16)> = cells(wrote.rect).collect();
        let parts = self.rng.within(1..4) as usize;
        let parts: Vec<Part> = all
            .chunks(all.len().div_ceil(parts))
            .map(|cells| Part { cells: cells.to_vec(), values: Vec::new(), landed: false })
            .collect();
        let count = parts.len();
        let session = self.links.get(&(from, to)).map_or(0, |link| link.session);
        let incarnation = self.nodes[from].incarnation;
        self.next_id += 1;
        let id = self.next_id;
        let write = Write { from, incarnation, to, session, grant, wrote, source, parts, ended: false };
        self.writes.insert(id, write);
        let mut wait = 0;
        for part in 0..count {
            wait += self.delay(15);
            self.after(wait, Event::Depart { write: id, part });
        }
        Ok(())
    }

    pub(super) fn cancel_posts(&mut self, from: usize, transfer: TransferId, generation: Generation) {
        let posted: Vec<u64> = self
            .writes
            .iter()
            .filter(|(_, write)| write.from == from && write.wrote.transfer == transfer && !write.ended)
            .filter(|(_, write)| write.wrote.generation == generation)
            .map(|(&id, _)| id)
            .collect();
        for id in posted {
            let wait = self.delay(30);
            self.after(wait, Event::PostEnds { write: id, outcome: PostOutcome::Lost });
        }
    }

    /// A part leaves the sender: its source is read now, and not later.
    pub(super) fn depart(&mut self, id: u64, part: usize) -> Result<(), String> {
        let corrupt = self.rng.once_in(self.plan.corrupt_once_in);
        let Some(write) = self.writes.get_mut(&id) else { return Ok(()) };
        let node = &self.nodes[write.from];
        if write.ended || !node.alive || node.incarnation != write.incarnation {
            return Ok(());
        }
        let mut values = Vec::new();
        for &(token, layer) in &write.parts[part].cells {
            values.push(node.pool.read(&write.source, token, layer)?);
        }
        if corrupt && let Some(value) = values.first_mut() {
            *value ^= 1 << 17;
        }
        write.parts[part].values = values;
        let wait = self.delay(25);
        self.after(wait, Event::Land { write: id, part });
        Ok(())
    }

    pub(super) fn land(&mut self, id: u64, part: usize) -> Result<(), String> {
        let Some(write) = self.writes.get_mut(&id) else { return Ok(()) };
        let (from, to) = (write.from, write.to);
        let Some(grant) = self.grants.get(&write.grant) else { return Ok(()) };
        let receiver = &mut self.nodes[to];
        let takes = (grant.live || grant.leaks)
            && receiver.alive
            && receiver.incarnation == grant.incarnation
            && (grant.decode, grant.prefill, grant.session) == (to, from, write.session);
        if !takes {
            let wait = self.delay(25);
            self.after(wait, Event::PostEnds { write: id, outcome: PostOutcome::Lost });
            return Ok(());
        }
        if grant.prefill_incarnation != write.incarnation {
            return Err(format!(
                "invariant 5: a write of incarnation {} lands under a newer one's grant",
                write.incarnation
            ));
        }
        let part = &mut write.parts[part];
        for (&cell, &value) in part.cells.iter().zip(&part.values) {
            receiver.pool.land(&grant.blocks, grant.generation, cell, value)?;
        }
        part.landed = true;
        if write.parts.iter().all(|part| part.landed) {
            let wrote = codec::encode_wrote(1, &write.wrote).map_err(|error| error.to_string())?;
            let incarnation = write.incarnation;
            self.push(to, Inbox::Landed { peer: from, incarnation, wrote });
            let wait = self.delay(25);
            self.after(wait, Event::PostEnds { write: id, outcome: PostOutcome::Taken });
        }
        Ok(())
    }

    pub(super) fn post_ends(&mut self, id: u64, outcome: PostOutcome) {
        let Some(write) = self.writes.get_mut(&id) else { return };
        if std::mem::replace(&mut write.ended, true) {
            return;
        }
        let Wrote { transfer, generation, sequence, .. } = write.wrote;
        let (from, key) = (write.from, (write.to, transfer));
        if self.nodes[from].incarnation == write.incarnation {
            self.push(from, Inbox::Posted { key, generation, sequence, outcome });
        }
    }

    /// Posts of a transfer whose sender was not told the end, up to a generation.
    pub(super) fn posts_of(&self, from: usize, transfer: TransferId, up_to: Generation) -> usize {
        let incarnation = self.nodes[from].incarnation;
        self.writes
            .values()
            .filter(|write| write.from == from && write.incarnation == incarnation && !write.ended)
            .filter(|write| write.wrote.transfer == transfer && write.wrote.generation <= up_to)
            .count()
    }

    /// A delay around `usual` milliseconds, now and then a long one.
    pub(super) fn delay(&mut self, usual: u64) -> u64 {
        if self.rng.once_in(self.plan.slow_once_in) {
            return self.rng.within(50..700) * MS;
        }
        self.rng.within(0..usual * MS)
    }
}

pub(super) type Links = BTreeMap<(usize, usize), Link>;
