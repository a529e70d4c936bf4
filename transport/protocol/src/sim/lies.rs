//! What a rank that lies writes: anything, under every key that it knows, said to be anything.

use crate::ids::Generation;
use crate::message::{Grant, Wrote};
use crate::transfer::{ReceiverState, Rect};

use super::memory::{Cell, cells, content, digest};
use super::node::ReceiverSlot;
use super::plan::LAYERS;
use super::world::World;
use super::writes::Lie;

impl World {
    /// Writes what a grant asks for, as an honest rank would; now and then not all of it.
    pub(super) fn fill(&mut self, index: usize, link: usize, grant: &Grant) {
        for &missing in grant.missing.as_slice().iter().take(8) {
            let tokens = missing.tokens();
            let middle = tokens.start + self.rng.within(0..tokens.len() as u64) as u32;
            for tokens in [tokens.start..middle, middle..tokens.end] {
                let Ok(rect) = Rect::new(tokens, missing.layers()) else { continue };
                if self.rng.once_in(12) {
                    continue;
                }
                if let Some(lie) = self.honest_write(index, link, grant, rect) {
                    self.post_lie(index, lie);
                }
            }
        }
    }

    /// The write of a rectangle under a grant, with its bytes and its digest as they should be.
    fn honest_write(&mut self, index: usize, link: usize, grant: &Grant, rect: Rect) -> Option<Lie> {
        let part = self.part_of(grant.transfer)?;
        let plan = &self.plan.parts[part];
        let salt = self.plan.requests[plan.request].salt;
        let cells: Vec<(Cell, u64)> = cells(rect, plan.heads.clone()).map(|cell| (cell, content(salt, cell))).collect();
        let liar = &mut self.nodes[index].liar;
        let sequence = liar.sequence;
        liar.sequence += 1;
        let digest = digest(cells.iter().copied());
        let wrote = Wrote { transfer: grant.transfer, generation: grant.generation, sequence, rect, digest };
        let grant = u64::try_from(grant.key.get()).unwrap_or(u64::MAX);
        Some(Lie { link, part, grant, wrote, cells })
    }

    /// Writes something that no honest rank writes.
    pub(super) fn write_a_lie(&mut self, index: usize) {
        let known: Vec<(usize, Grant)> = self.nodes[index].liar.grants.iter().cloned().collect();
        let Some((link, grant)) = self.rng.one_of(&known).cloned() else { return };
        let Some(&missing) = self.rng.one_of(grant.missing.as_slice()) else { return };
        let rect = self.some_of(missing);
        let Some(mut lie) = self.honest_write(index, link, &grant, rect) else { return };
        match self.rng.within(0..17) {
            // The right bytes, by whatever name.
            0 => {}
            1 => lie.wrote.digest = digest(std::iter::empty()),
            2 => {
                lie.cells.iter_mut().for_each(|(_, value)| *value ^= 0xff);
                lie.wrote.digest = digest(lie.cells.iter().copied());
            }
            // Said to be elsewhere: inside the grant, or not.
            3..=4 => lie.wrote.rect = self.moved(rect),
            5 => {
                let elsewhere = self.moved(rect);
                let Some(other) = self.honest_write(index, link, &grant, elsewhere) else { return };
                lie = other;
            }
            6 => lie.wrote.generation = self.any_generation(index),
            7 => lie.wrote.sequence = [5000, u32::MAX, 4095][self.rng.within(0..3) as usize],
            8 => {
                // Again, under another number.
                let Some(again) = self.honest_write(index, link, &grant, self.widened(rect)) else { return };
                self.post_lie(index, again);
            }
            9 => {
                // Two under one number, and one digest for both.
                let elsewhere = self.some_of(missing);
                let Some(mut other) = self.honest_write(index, link, &grant, elsewhere) else { return };
                (other.wrote.sequence, other.wrote.digest) = (lie.wrote.sequence, lie.wrote.digest);
                self.post_lie(index, other);
            }
            10..=13 => self.name_another(index, &mut lie),
            14 => self.steal_a_grant(&mut lie),
            // Fewer bytes than it is said to have.
            _ => drop(lie.cells.pop()),
        }
        if !lie.cells.is_empty() {
            self.post_lie(index, lie);
        }
    }

    fn some_of(&mut self, rect: Rect) -> Rect {
        let (tokens, layers) = (rect.tokens(), rect.layers());
        let token = tokens.start + self.rng.within(0..tokens.len() as u64) as u32;
        let layer = layers.start + self.rng.within(0..layers.len() as u64) as u16;
        let token_end = token + 1 + self.rng.within(0..u64::from(tokens.end - token)) as u32;
        let layer_end = layer + 1 + self.rng.within(0..u64::from(layers.end - layer)) as u16;
        Rect::new(token..token_end, layer..layer_end).unwrap_or(rect)
    }

    /// As large, somewhere else.
    fn moved(&mut self, rect: Rect) -> Rect {
        let (tokens, layers) = (rect.tokens(), rect.layers());
        let by = 1 + self.rng.within(0..8) as u32;
        let (tokens, layers) = match self.rng.within(0..3) {
            0 => (tokens.start + by..tokens.end + by, layers),
            1 => (tokens, layers.start + 1..layers.end + 1),
            _ => (tokens.start.saturating_sub(by)..tokens.end.saturating_sub(by), layers),
        };
        Rect::new(tokens, layers).unwrap_or(rect)
    }

    fn widened(&self, rect: Rect) -> Rect {
        Rect::new(rect.tokens().start.saturating_sub(1)..rect.tokens().end, rect.layers()).unwrap_or(rect)
    }

    /// Says that a write is one of another transfer of its receiver, with the digest of what that holds.
    fn name_another(&mut self, index: usize, lie: &mut Lie) {
        let to = self.plan.peer_of(lie.link, index);
        let is_granted = |slot: &ReceiverSlot| slot.machine.kind() == ReceiverState::Granted;
        let others = self.nodes[to].receivers.iter().filter(|(part, slot)| **part != lie.part && is_granted(slot));
        let others: Vec<usize> = others.map(|(&part, _)| part).collect();
        let Some(&other) = self.rng.one_of(&others) else { return };
        let plan = &self.plan.parts[other];
        let wanted = self.plan.requests[plan.request].wanted();
        let (transfer, heads) = (plan.transfer, plan.heads.clone());
        // The end comes last: it may not be there yet.
        let end = Rect::new(wanted.tokens().end - 1..wanted.tokens().end, LAYERS - 1..LAYERS).unwrap_or(wanted);
        let rect = if self.rng.once_in(2) { end } else { self.some_of(wanted) };
        let node = &self.nodes[to];
        let Some(slot) = node.receivers.get(&other) else { return };
        let held: Vec<(Cell, u64)> =
            cells(rect, heads).filter_map(|cell| Some((cell, node.memory.read(&slot.blocks, cell).ok()?))).collect();
        lie.wrote.transfer = transfer;
        lie.wrote.generation = slot.last_generation.unwrap_or(Generation::new(0));
        lie.wrote.rect = rect;
        lie.wrote.digest = digest(held.iter().copied());
        // As many bytes as it is said to have, where it may write.
        lie.cells = lie.cells.iter().copied().cycle().take(held.len()).collect();
    }

    /// Writes under a key that was given to somebody else.
    fn steal_a_grant(&mut self, lie: &mut Lie) {
        let which = self.rng.next();
        let Some(key) = self.grants.some_live(which) else { return };
        let Some((part, generation, missing)) = self.grants.describe(key) else { return };
        let Some(&missing) = self.rng.one_of(&missing) else { return };
        let rect = self.some_of(missing);
        let plan = &self.plan.parts[part];
        lie.cells = cells(rect, plan.heads.clone()).map(|cell| (cell, 0x5eed)).collect();
        lie.grant = key;
        lie.wrote.transfer = plan.transfer;
        lie.wrote.generation = generation;
        lie.wrote.rect = rect;
        lie.wrote.digest = digest(lie.cells.iter().copied());
    }
}
