//! Grants and writes, as a transport promises them and no better.
//!
//! A write's pieces leave and land one by one, whenever they like, in no order to messages. A piece lands only under a live grant
//! of its own session; the receiver's side ends a session, or revokes.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use crate::ids::Generation;
use crate::message::Wrote;
use crate::transfer::{GrantRefusal, PostOutcome, Rect};

use super::links::{DECODE, PREFILL};
use super::memory::{Blocks, Cell, cells, digest};
use super::node::Inbox;
use super::plan::MS;
use super::report::DriverBug;
use super::versions;
use super::world::{Event, World};

#[derive(Debug, Default)]
pub(super) struct Grants {
    next: u64,
    records: BTreeMap<u64, GrantRecord>,
}

/// A transport's grant.
#[derive(Debug)]
pub(super) struct GrantRecord {
    part: usize,
    incarnation: u64,
    prefill_incarnation: u64,
    session: u64,
    generation: Generation,
    blocks: Rc<Blocks>,
    live: bool,
    /// Bytes land although it is dead: a planted bug.
    leaks: bool,
    /// Writes that landed, of which the driver has not heard.
    unheard: VecDeque<Inbox>,
}

#[derive(Debug, Default)]
pub(super) struct Writes {
    next: u64,
    records: BTreeMap<u64, Write>,
}

/// A posted write.
#[derive(Debug)]
struct Write {
    part: usize,
    ends: [usize; 2],
    incarnation: u64,
    session: u64,
    grant: u64,
    wrote: Wrote,
    source: Rc<Blocks>,
    cells: Vec<Cell>,
    pieces: Vec<Piece>,
    /// Pieces that may still leave or land.
    on_the_way: usize,
    /// The sender was told its end: its source is not read any more.
    ended: bool,
    /// It is read and placed by devices, whatever the processes do.
    device: bool,
}

#[derive(Debug)]
struct Piece {
    cells: std::ops::Range<usize>,
    /// As they left.
    values: Vec<u64>,
    landed: bool,
}

impl Grants {
    pub(super) fn is_live(&self, grant: u64) -> bool {
        self.records.get(&grant).is_some_and(|grant| grant.live)
    }

    pub(super) fn any_live(&self) -> Option<usize> {
        self.records.values().find(|grant| grant.live).map(|grant| grant.part)
    }

    fn hear_of(&mut self, grant: u64, landed: Inbox) {
        if let Some(record) = self.records.get_mut(&grant) {
            record.unheard.push_back(landed);
        }
    }

    fn kill(&mut self, grant: u64, leaks: bool) {
        if let Some(record) = self.records.get_mut(&grant) {
            record.live = false;
            record.leaks = leaks;
        }
    }
}

impl Writes {
    pub(super) fn process_that_sends(&self, write: u64) -> Option<usize> {
        self.records.get(&write).filter(|write| !write.device).map(|write| write.ends[PREFILL])
    }

    pub(super) fn process_that_receives(&self, write: u64) -> Option<usize> {
        self.records.get(&write).filter(|write| !write.device).map(|write| write.ends[DECODE])
    }

    pub(super) fn generation(&self, write: u64) -> Option<Generation> {
        self.records.get(&write).map(|write| write.wrote.generation)
    }

    pub(super) fn part(&self, write: u64) -> Option<usize> {
        self.records.get(&write).map(|write| write.part)
    }

    pub(super) fn any_open(&self) -> Option<usize> {
        self.records.values().find(|write| !write.ended).map(|write| write.part)
    }

    fn forget_if_over(&mut self, id: u64) {
        if self.records.get(&id).is_some_and(|write| write.ended && write.on_the_way == 0) {
            self.records.remove(&id);
        }
    }
}

impl World {
    /// The transport makes the grant that a receiver asked for, or cannot; its driver hears of that later.
    pub(super) fn answer_grant(
        &mut self,
        index: usize,
        incarnation: u64,
        part: usize,
        generation: Generation,
        missing: &[Rect],
    ) -> Result<(), String> {
        let full = self.rng.once_in(self.plan.odds.ungranted);
        let heads = self.plan.parts[part].heads.clone();
        let node = &mut self.nodes[index];
        if node.incarnation != incarnation {
            return Ok(());
        }
        let Some(slot) = node.receivers.get_mut(&part) else { return Ok(()) };
        for cell in missing.iter().flat_map(|&rect| cells(rect, heads.clone())) {
            if node.memory.is_visible(&slot.blocks, cell) {
                return Err(format!("invariant 3: part {part} grants {cell:?}, which is read"));
            }
        }
        let grant = if full {
            Err(GrantRefusal::Impossible("too many grants".into()))
        } else {
            self.make_grant(index, part, generation).ok_or(GrantRefusal::NotConnected)
        };
        let node = &mut self.nodes[index];
        if let (Ok(grant), Some(slot)) = (&grant, node.receivers.get_mut(&part)) {
            node.memory.open(&slot.blocks, heads, Some((part, generation)));
            slot.grants.insert(generation, *grant);
        }
        let wait = self.work(index, part, 2);
        self.after(wait, Event::Input { node: index, incarnation, input: Inbox::Granted { part, generation, grant } });
        Ok(())
    }

    /// The transport makes a grant; `None` if there is no session.
    fn make_grant(&mut self, decode: usize, part: usize, generation: Generation) -> Option<u64> {
        let link = &self.links[self.plan.parts[part].link];
        let node = &self.nodes[decode];
        let view = node.views.get(&self.plan.parts[part].link)?;
        if !link.up[DECODE] || !view.up || view.session != link.session {
            return None;
        }
        let blocks = Rc::clone(&node.receivers.get(&part)?.blocks);
        let record = GrantRecord {
            part,
            incarnation: node.incarnation,
            prefill_incarnation: view.incarnation,
            session: link.session,
            generation,
            blocks,
            live: true,
            leaks: false,
            unheard: VecDeque::new(),
        };
        self.grants.next += 1;
        self.grants.records.insert(self.grants.next, record);
        Some(self.grants.next)
    }

    /// The fence is up: no byte of the grant lands any more.
    pub(super) fn fence_returns(
        &mut self,
        node: usize,
        incarnation: u64,
        part: usize,
        generation: Generation,
        grant: u64,
    ) {
        self.grants.kill(grant, self.options.driver_bug == Some(DriverBug::FenceLies));
        // What landed before is handed in before.
        while self.notify(grant) {}
        self.input(node, incarnation, Inbox::Fenced { part, generation });
    }

    /// The driver hears of the first write under a grant that it has not heard of; `false` if there is none.
    pub(super) fn notify(&mut self, grant: u64) -> bool {
        let Some(record) = self.grants.records.get_mut(&grant) else { return false };
        let Some(landed) = record.unheard.pop_front() else { return false };
        let (node, incarnation) = (self.plan.parts[record.part].decode, record.incarnation);
        self.input(node, incarnation, landed);
        true
    }

    /// The decode side of a session ended: its grants are dead.
    pub(super) fn kill_grants(&mut self, link: usize) {
        let node = &self.nodes[self.links[link].ends[DECODE]];
        let slots = self.plan.links[link].parts.iter().filter_map(|part| node.receivers.get(part));
        for &grant in slots.flat_map(|slot| slot.grants.values()) {
            self.grants.kill(grant, false);
        }
    }

    /// A rank is gone, with what its transport knew.
    pub(super) fn drop_transports(&mut self, node: usize) {
        for &grant in self.nodes[node].receivers.values().flat_map(|slot| slot.grants.values()) {
            self.grants.kill(grant, false);
        }
        for &write in self.nodes[node].senders.values().flat_map(|slot| &slot.writes) {
            if let Some(record) = self.writes.records.get_mut(&write) {
                record.ended = true;
            }
            self.writes.forget_if_over(write);
        }
    }

    /// Posts on a link whose end was not told.
    pub(super) fn posts_on(&self, link: usize) -> Vec<u64> {
        let node = &self.nodes[self.links[link].ends[PREFILL]];
        let slots = self.plan.links[link].parts.iter().filter_map(|part| node.senders.get(part));
        slots.flat_map(|slot| slot.writes.iter().copied()).collect()
    }

    /// Posts of a part whose end was not told, up to a generation.
    pub(super) fn posts_of(&self, node: usize, part: usize, up_to: Generation) -> Vec<u64> {
        let Some(slot) = self.nodes[node].senders.get(&part) else { return Vec::new() };
        let up_to = |write: &u64| self.writes.generation(*write).is_some_and(|generation| generation <= up_to);
        slot.writes.iter().copied().filter(up_to).collect()
    }

    pub(super) fn post(&mut self, from: usize, part: usize, grant: u64, mut wrote: Wrote) -> Result<(), String> {
        let (plan, node) = (&self.plan.parts[part], &mut self.nodes[from]);
        let Some(slot) = node.senders.get_mut(&part) else { return Ok(()) };
        let cells: Vec<Cell> = cells(wrote.rect, plan.heads.clone()).collect();
        let mut hashed = Vec::with_capacity(cells.len());
        for &cell in &cells {
            hashed.push((cell, node.memory.read_for_transfer(&slot.blocks, cell)?));
        }
        wrote.digest = digest(hashed.into_iter());
        let size = cells.len().div_ceil(self.rng.within(1..4) as usize);
        let pieces: Vec<Piece> = (0..cells.len())
            .step_by(size)
            .map(|first| Piece { cells: first..(first + size).min(cells.len()), values: Vec::new(), landed: false })
            .collect();
        let on_the_way = pieces.len();
        let write = Write {
            part,
            ends: [from, plan.decode],
            incarnation: node.incarnation,
            session: self.links[plan.link].session,
            grant,
            wrote,
            source: Rc::clone(&slot.blocks),
            cells,
            pieces,
            on_the_way,
            ended: false,
            device: self.rng.once_in(self.plan.odds.device),
        };
        self.writes.next += 1;
        let id = self.writes.next;
        slot.writes.insert(id);
        self.writes.records.insert(id, write);
        let mut wait = 0;
        for piece in 0..on_the_way {
            wait += self.delay(15);
            self.after(wait, Event::Depart { write: id, piece });
        }
        Ok(())
    }

    pub(super) fn cancel_posts(&mut self, from: usize, part: usize, generation: Generation) {
        for write in self.posts_of(from, part, generation) {
            if self.writes.generation(write) == Some(generation) {
                let wait = self.work(from, part, 30);
                self.after(wait, Event::PostEnds { write, outcome: PostOutcome::Lost });
            }
        }
    }

    /// A piece leaves the sender: its source is read now, and not later.
    pub(super) fn depart(&mut self, id: u64, piece: usize) -> Result<(), String> {
        let corrupt = self.rng.once_in(self.plan.odds.corrupt);
        let Some(write) = self.writes.records.get_mut(&id) else { return Ok(()) };
        let node = &self.nodes[write.ends[PREFILL]];
        if write.ended || node.incarnation != write.incarnation {
            write.on_the_way -= 1;
            self.writes.forget_if_over(id);
            return Ok(());
        }
        let mut values = Vec::new();
        for &cell in &write.cells[write.pieces[piece].cells.clone()] {
            values.push(node.memory.read_for_transfer(&write.source, cell)?);
        }
        if corrupt && let Some(value) = values.first_mut() {
            *value ^= 1 << 17;
            self.report.count("changed pieces");
        }
        write.pieces[piece].values = values;
        let wait = self.delay(25);
        self.after(wait, Event::Land { write: id, piece });
        Ok(())
    }

    pub(super) fn land(&mut self, id: u64, piece: usize) -> Result<(), String> {
        let Some(write) = self.writes.records.get_mut(&id) else { return Ok(()) };
        let (to, part) = (write.ends[DECODE], write.part);
        let link = self.plan.parts[part].link;
        let blocked = self.links[link].blocked_for(DECODE, self.now);
        if blocked > 0 {
            self.after(blocked, Event::Land { write: id, piece });
            return Ok(());
        }
        write.on_the_way -= 1;
        let Some(grant) = self.grants.records.get(&write.grant) else { return Ok(()) };
        let receiver = &mut self.nodes[to];
        let takes = (grant.live || grant.leaks)
            && receiver.incarnation == grant.incarnation
            && (grant.part, grant.session) == (write.part, write.session);
        if !takes {
            self.writes.forget_if_over(id);
            let wait = self.way_back(link, part, 25);
            self.after(wait, Event::PostEnds { write: id, outcome: PostOutcome::Lost });
            return Ok(());
        }
        if grant.prefill_incarnation != write.incarnation {
            let old = write.incarnation;
            return Err(format!("invariant 5: a write of incarnation {old} lands under a newer one's grant"));
        }
        let piece = &mut write.pieces[piece];
        for (&cell, &value) in write.cells[piece.cells.clone()].iter().zip(&piece.values) {
            receiver.memory.land(&grant.blocks, (grant.part, grant.generation), cell, value)?;
        }
        piece.landed = true;
        if write.pieces.iter().all(|piece| piece.landed) {
            let (incarnation, version) = (write.incarnation, self.links[link].version);
            let (grant, wrote) = (write.grant, versions::encode_wrote(version, &write.wrote)?);
            self.grants.hear_of(grant, Inbox::Landed { incarnation, version, wrote });
            let late = if self.rng.once_in(3) { 500 } else { 60 };
            let wait = if self.rng.once_in(self.plan.odds.late_words) { self.rng.within(0..late * MS) } else { 0 };
            self.after(wait, Event::Notify { grant });
            let wait = self.way_back(link, part, 25);
            self.after(wait, Event::PostEnds { write: id, outcome: PostOutcome::Taken });
        }
        self.writes.forget_if_over(id);
        Ok(())
    }

    pub(super) fn post_ends(&mut self, id: u64, outcome: PostOutcome) {
        let Some(write) = self.writes.records.get_mut(&id) else { return };
        if std::mem::replace(&mut write.ended, true) {
            return;
        }
        let Wrote { generation, sequence, .. } = write.wrote;
        let (node, incarnation, part) = (write.ends[PREFILL], write.incarnation, write.part);
        self.writes.forget_if_over(id);
        if self.nodes[node].incarnation != incarnation {
            return;
        }
        if let Some(slot) = self.nodes[node].senders.get_mut(&part) {
            slot.writes.remove(&id);
        }
        self.push(node, Inbox::Posted { part, generation, sequence, outcome });
    }
}
