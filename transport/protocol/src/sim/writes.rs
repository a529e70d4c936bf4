//! Grants and writes, as a transport promises them and no better.
//!
//! A write's pieces leave and land one by one, whenever they like, in no order to messages. A piece lands only under a live grant
//! of its own session, and only inside what was granted and not sealed since; the receiver's side ends a session, or revokes.
//!
//! A rank that lies may post anything under any key that it knows; an honest one posts what its machine asked for.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use crate::ids::Generation;
use crate::message::Wrote;
use crate::transfer::{Coverage, GrantRefusal, PostOutcome, Rect};

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
    link: usize,
    incarnation: u64,
    prefill_incarnation: u64,
    session: u64,
    generation: Generation,
    blocks: Rc<Blocks>,
    /// What may be written.
    missing: Coverage,
    /// The part of it that is hashed, or was, and takes no more bytes.
    sealed: Coverage,
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
    link: usize,
    /// From, to.
    ends: [usize; 2],
    incarnation: u64,
    session: u64,
    grant: u64,
    wrote: Wrote,
    /// Where its bytes are read when they leave; those of a liar are made up.
    source: Option<Rc<Blocks>>,
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

/// A write as a rank that lies makes it.
#[derive(Debug)]
pub(super) struct Lie {
    pub(super) link: usize,
    pub(super) part: usize,
    pub(super) grant: u64,
    /// What it is said to be.
    pub(super) wrote: Wrote,
    /// What it is.
    pub(super) cells: Vec<(Cell, u64)>,
}

const FROM: usize = 0;
const TO: usize = 1;

impl Grants {
    pub(super) fn is_live(&self, grant: u64) -> bool {
        self.records.get(&grant).is_some_and(|grant| grant.live)
    }

    pub(super) fn any_live(&self) -> Option<usize> {
        self.records.values().find(|grant| grant.live).map(|grant| grant.part)
    }

    /// Which part a grant was made for.
    pub(super) fn part(&self, grant: u64) -> Option<usize> {
        self.records.get(&grant).map(|grant| grant.part)
    }

    /// For which part a grant was made, under which generation, and what it asks for.
    pub(super) fn describe(&self, grant: u64) -> Option<(usize, Generation, Vec<Rect>)> {
        let grant = self.records.get(&grant)?;
        Some((grant.part, grant.generation, grant.missing.rects().collect()))
    }

    /// A live grant of any rank.
    pub(super) fn some_live(&self, which: u64) -> Option<u64> {
        let live = self.records.iter().filter(|(_, grant)| grant.live).map(|(&id, _)| id);
        let count = live.clone().count() as u64;
        live.into_iter().nth(which.checked_rem(count)? as usize)
    }

    /// Bytes are to be hashed: they take no more.
    pub(super) fn seal(&mut self, grant: u64, rect: Rect) -> Result<(), String> {
        let Some(record) = self.records.get_mut(&grant) else { return Err(format!("there is no grant {grant}")) };
        let part = record.part;
        if !record.missing.contains(rect) {
            return Err(format!("invariant 1: part {part} takes {rect}, which is outside its grant"));
        }
        record.sealed.insert(rect).map_err(|error| error.to_string())
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
        self.records.get(&write).filter(|write| !write.device).map(|write| write.ends[FROM])
    }

    pub(super) fn process_that_receives(&self, write: u64) -> Option<usize> {
        self.records.get(&write).filter(|write| !write.device).map(|write| write.ends[TO])
    }

    pub(super) fn generation(&self, write: u64) -> Option<Generation> {
        self.records.get(&write).map(|write| write.wrote.generation)
    }

    pub(super) fn part(&self, write: u64) -> Option<usize> {
        self.records.get(&write).map(|write| write.part)
    }

    pub(super) fn any_open(&self) -> Option<usize> {
        self.records.values().find(|write| !write.ended && write.source.is_some()).map(|write| write.part)
    }

    fn forget_if_over(&mut self, id: u64) {
        // Nobody waits for the end of a liar's.
        let over = |write: &Write| (write.ended || write.source.is_none()) && write.on_the_way == 0;
        if self.records.get(&id).is_some_and(over) {
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
            self.make_grant(index, part, generation, missing).ok_or(GrantRefusal::NotConnected)
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
    fn make_grant(&mut self, receiver: usize, part: usize, generation: Generation, missing: &[Rect]) -> Option<u64> {
        let number = self.plan.parts[part].link;
        let (link, node) = (&self.links[number], &self.nodes[receiver]);
        let view = node.views.get(&number)?;
        if !link.up[link.side_of(receiver)] || !view.up || view.session != link.session {
            return None;
        }
        let slot = node.receivers.get(&part)?;
        if slot.peer != Some(view.incarnation) {
            // A grant is made to one incarnation, and that one is gone.
            return None;
        }
        let blocks = Rc::clone(&slot.blocks);
        let record = GrantRecord {
            part,
            link: number,
            incarnation: node.incarnation,
            prefill_incarnation: view.incarnation,
            session: link.session,
            generation,
            blocks,
            missing: Coverage::of(missing).ok()?,
            sealed: Coverage::new(),
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
        let (node, incarnation) = (self.plan.parts[record.part].receiver, record.incarnation);
        self.input(node, incarnation, landed);
        true
    }

    /// A session ended on a side: what it granted is dead.
    pub(super) fn kill_grants(&mut self, link: usize, side: usize) {
        let node = &self.nodes[self.links[link].ends[side]];
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

    /// Posts of a side of a link whose end was not told.
    pub(super) fn posts_on(&self, link: usize, side: usize) -> Vec<u64> {
        let node = &self.nodes[self.links[link].ends[side]];
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
            link: plan.link,
            ends: [from, plan.receiver],
            incarnation: node.incarnation,
            session: self.links[plan.link].session,
            grant,
            wrote,
            source: Some(Rc::clone(&slot.blocks)),
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
        let Some(source) = &write.source else {
            let wait = self.delay(25);
            self.after(wait, Event::Land { write: id, piece });
            return Ok(());
        };
        let node = &self.nodes[write.ends[FROM]];
        if write.ended || node.incarnation != write.incarnation {
            write.on_the_way -= 1;
            self.writes.forget_if_over(id);
            return Ok(());
        }
        let mut values = Vec::new();
        for &cell in &write.cells[write.pieces[piece].cells.clone()] {
            values.push(node.memory.read_for_transfer(source, cell)?);
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
        let (link, part, [from, to]) = (write.link, write.part, write.ends);
        let blocked = self.links[link].blocked_for(self.links[link].side_of(to), self.now);
        if blocked > 0 {
            self.after(blocked, Event::Land { write: id, piece });
            return Ok(());
        }
        write.on_the_way -= 1;
        if self.plan.lies(to) {
            self.lands_on_a_liar(id);
            return Ok(());
        }
        if !self.takes(id, piece) {
            self.writes.forget_if_over(id);
            let wait = self.way_back(link, from, part, 25);
            self.after(wait, Event::PostEnds { write: id, outcome: PostOutcome::Lost });
            return Ok(());
        }
        let (Some(write), receiver) = (self.writes.records.get_mut(&id), &mut self.nodes[to]) else { return Ok(()) };
        let Some(grant) = self.grants.records.get(&write.grant) else { return Ok(()) };
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
            let (grant, cells) = (write.grant, write.cells.len() as u64);
            let wrote = versions::encode_wrote(version, &write.wrote)?;
            self.grants.hear_of(grant, Inbox::Landed { link, incarnation, version, grant, cells, wrote });
            let late = if self.rng.once_in(3) { 500 } else { 60 };
            let wait = if self.rng.once_in(self.plan.odds.late_words) { self.rng.within(0..late * MS) } else { 0 };
            self.after(wait, Event::Notify { grant });
            let wait = self.way_back(link, from, part, 25);
            self.after(wait, Event::PostEnds { write: id, outcome: PostOutcome::Taken });
        }
        self.writes.forget_if_over(id);
        Ok(())
    }

    /// Whether the receiver's transport places a piece: under a live grant to this peer, and, where it is not one that an honest driver
    /// asked for, inside what is granted and not sealed.
    fn takes(&self, id: u64, piece: usize) -> bool {
        let Some(write) = self.writes.records.get(&id) else { return false };
        let Some(grant) = self.grants.records.get(&write.grant) else { return false };
        let owner = &self.plan.parts[grant.part];
        let to_this_peer = (grant.link, grant.session) == (write.link, write.session)
            || (self.options.driver_bug == Some(DriverBug::GrantForAnybody) && owner.receiver == write.ends[TO]);
        let live = (grant.live || grant.leaks) && self.nodes[write.ends[TO]].incarnation == grant.incarnation;
        if !(live && to_this_peer) {
            return false;
        }
        if write.source.is_some() {
            return grant.part == write.part;
        }
        let seals = self.options.driver_bug != Some(DriverBug::NotSealed);
        write.cells[write.pieces[piece].cells.clone()].iter().all(|&(token, layer, head)| {
            let Ok(cell) = Rect::new(token..token.saturating_add(1), layer..layer.saturating_add(1)) else {
                return false;
            };
            owner.heads.contains(&head) && grant.missing.contains(cell) && !(seals && grant.sealed.contains(cell))
        })
    }

    /// A write reaches a rank that lies: it says how it ended when it likes, or lets the session end first.
    fn lands_on_a_liar(&mut self, id: u64) {
        let Some(write) = self.writes.records.get(&id).filter(|write| write.on_the_way == 0) else { return };
        let (link, part, [from, _]) = (write.link, write.part, write.ends);
        let outcome = if self.rng.once_in(5) { PostOutcome::Lost } else { PostOutcome::Taken };
        let wait = if self.rng.once_in(8) { self.rng.within(300..1500) * MS } else { 0 };
        let wait = wait + self.way_back(link, from, part, 25);
        self.after(wait, Event::PostEnds { write: id, outcome });
    }

    /// A rank that lies posts a write, in pieces that land when they like.
    pub(super) fn post_lie(&mut self, from: usize, lie: Lie) {
        let Lie { link, part, grant, wrote, cells } = lie;
        let to = self.links[link].ends[1 - self.links[link].side_of(from)];
        let size = cells.len().div_ceil(self.rng.within(1..4) as usize).max(1);
        let (cells, values): (Vec<Cell>, Vec<u64>) = cells.into_iter().unzip();
        let pieces: Vec<Piece> = (0..cells.len())
            .step_by(size)
            .map(|first| first..(first + size).min(cells.len()))
            .map(|cells| Piece { values: values[cells.clone()].to_vec(), cells, landed: false })
            .collect();
        let on_the_way = pieces.len();
        let write = Write {
            part,
            link,
            ends: [from, to],
            incarnation: self.nodes[from].incarnation,
            session: self.links[link].session,
            grant,
            wrote,
            source: None,
            cells,
            pieces,
            on_the_way,
            ended: false,
            device: self.rng.once_in(self.plan.odds.device),
        };
        self.writes.next += 1;
        let id = self.writes.next;
        self.writes.records.insert(id, write);
        self.report.count("writes of liars");
        for piece in 0..on_the_way {
            let wait = self.delay(15);
            self.after(wait, Event::Depart { write: id, piece });
        }
    }

    pub(super) fn post_ends(&mut self, id: u64, outcome: PostOutcome) {
        let Some(write) = self.writes.records.get_mut(&id) else { return };
        if std::mem::replace(&mut write.ended, true) {
            return;
        }
        let Wrote { generation, sequence, .. } = write.wrote;
        let (node, incarnation, part) = (write.ends[FROM], write.incarnation, write.part);
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
