//! The pool with plain lists, which it searches.

use std::collections::BTreeSet;

use super::history::{Answer, Op};
use super::*;

/// The same with lists: who holds a block is found by searching, the free list is a vector.
#[derive(Default)]
pub(super) struct Model {
    tables: Vec<Vec<u32>>,
    leases: Vec<Vec<u32>>,
    pins: Vec<Vec<u32>>,
    /// Blocks on their own, each a list of one.
    ones: Vec<Vec<u32>>,
    pub(super) free: Vec<u32>,
    /// Free, and reused after all in `free`.
    pub(super) last: Vec<u32>,
    hashes: Vec<Option<u8>>,
    soft: Vec<bool>,
    null: bool,
}

impl Model {
    pub(super) fn new(null: bool) -> Self {
        let first = u32::from(null);
        let all = BLOCKS + first as usize;
        let free = (first..all as u32).collect();
        Self { free, hashes: vec![None; all], soft: vec![false; all], null, ..Self::default() }
    }

    fn holders(&self, id: u32) -> usize {
        let all = [&self.tables, &self.leases, &self.pins, &self.ones];
        all.into_iter().flatten().flatten().filter(|held| **held == id).count()
    }

    fn is_free(&self, id: u32) -> bool {
        self.free.contains(&id) || self.last.contains(&id)
    }

    fn unlist(&mut self, id: u32) -> bool {
        let free = self.is_free(id);
        self.free.retain(|free| *free != id);
        self.last.retain(|free| *free != id);
        free
    }

    fn list_last(&mut self, id: u32) {
        if self.soft[id as usize] { self.last.push(id) } else { self.free.push(id) }
    }

    fn requeue(&mut self, id: u32) {
        if self.unlist(id) {
            self.list_last(id);
        }
    }

    fn forget(&mut self, id: u32) -> bool {
        self.soft[id as usize] = false;
        self.hashes[id as usize].take().is_some()
    }

    fn find(&self, name: u8) -> Option<u32> {
        self.hashes.iter().position(|hash| *hash == Some(name)).map(|at| at as u32)
    }

    fn prefix(&self, names: &[u8]) -> Vec<u32> {
        names.iter().map_while(|name| self.find(*name)).collect()
    }

    fn take(&mut self, wanted: usize, fresh: usize) -> Result<Vec<u32>, PoolError> {
        let free = self.free.len() + self.last.len();
        if wanted > free {
            return Err(PoolError::Exhausted { wanted, free, total: BLOCKS });
        }
        let order = [self.free.clone(), self.last.clone()].concat();
        let taken = order[..fresh].to_vec();
        for id in &taken {
            self.unlist(*id);
            self.forget(*id);
        }
        Ok(taken)
    }

    /// Called when the references are gone from the lists.
    fn freed(&mut self, ids: Vec<u32>) {
        let null = self.null;
        let mut empty = vec![];
        for at in (0..ids.len()).rev().filter(|at| !(null && ids[*at] == 0)) {
            let id = ids[at];
            // A table may have a block twice: it is free when the first place is given back, too.
            if self.holders(id) == 0 && !ids[..at].contains(&id) {
                match self.hashes[id as usize] {
                    Some(_) => self.list_last(id),
                    None => empty.push(id),
                }
            }
        }
        // The last one is the first to be reused.
        self.free.splice(0..0, empty);
    }

    pub(super) fn counts(&self) -> PoolCounts {
        let first = u32::from(self.null);
        let among = |held: &[Vec<u32>]| {
            let ids: BTreeSet<u32> = held.iter().flatten().copied().filter(|id| *id >= first).collect();
            ids.len()
        };
        PoolCounts {
            total: BLOCKS,
            free: self.free.len() + self.last.len(),
            cached: self.free.iter().chain(&self.last).filter(|id| self.hashes[**id as usize].is_some()).count(),
            registered: self.hashes.iter().flatten().count(),
            leased: among(&self.leases),
            pinned: among(&self.pins),
            soft_pinned: self.soft.iter().filter(|soft| **soft).count(),
            ..PoolCounts::default()
        }
    }

    pub(super) fn apply(&mut self, op: &Op) -> Answer {
        match op {
            Op::Open { hashes, fresh } => self.open(hashes, *fresh).into(),
            Op::Touch { hashes } => {
                let found = self.prefix(hashes);
                found.iter().rev().for_each(|id| self.requeue(*id));
                Answer::Count(found.len())
            }
            Op::SoftPin { hashes } => {
                let found = self.prefix(hashes);
                for id in found.iter().rev() {
                    self.soft[*id as usize] = true;
                    self.requeue(*id);
                }
                Answer::Count(found.len())
            }
            Op::SoftUnpin { hashes } => Answer::Count(self.soft_unpin(hashes)),
            Op::Pin { hashes } => {
                let found = self.prefix(hashes);
                for id in &found {
                    self.unlist(*id);
                }
                self.pins.push(found.clone());
                Answer::Ids(ids(&found))
            }
            Op::DropPin { pin } => {
                if *pin < self.pins.len() {
                    let ids = self.pins.swap_remove(*pin);
                    self.freed(ids);
                }
                Answer::Nothing
            }
            Op::Block | Op::Publish { .. } | Op::Find { .. } | Op::DropOne { .. } => self.apply_to_one(op).into(),
            Op::Adopt { table, one } if *table >= self.tables.len() || *one >= self.ones.len() => Answer::Nothing,
            Op::ClearCache => {
                let registered = self.hashes.iter().flatten().count();
                for id in 0..self.hashes.len() as u32 {
                    if self.forget(id) && self.unlist(id) {
                        self.free.insert(0, id);
                    }
                }
                Answer::Count(registered)
            }
            Op::End { lease } | Op::DropLease { lease } => {
                if *lease < self.leases.len() {
                    let ids = self.leases.swap_remove(*lease);
                    self.freed(ids);
                }
                Answer::Nothing
            }
            Op::Extend { table, .. }
            | Op::Truncate { table, .. }
            | Op::Share { table, .. }
            | Op::Lease { table, .. }
            | Op::Release { table }
            | Op::DropTable { table }
            | Op::Register { table, .. }
            | Op::Unregister { table, .. }
            | Op::Skip { table, .. }
            | Op::Adopt { table, .. }
            | Op::CheckWritable { table, .. } => match *table < self.tables.len() {
                true => self.apply_to(*table, op).into(),
                false => Answer::Nothing,
            },
        }
    }

    fn soft_unpin(&mut self, names: &[u8]) -> usize {
        let found: Vec<u32> = names.iter().filter_map(|name| self.find(*name)).collect();
        let soft = found.into_iter().filter(|id| self.soft[*id as usize]).collect::<Vec<_>>();
        for id in soft.iter().rev() {
            self.soft[*id as usize] = false;
            self.requeue(*id);
        }
        soft.len()
    }

    fn open(&mut self, names: &[u8], fresh: usize) -> Result<Answer, PoolError> {
        let mut table = self.prefix(names);
        let revived = table.iter().filter(|id| self.is_free(**id)).count();
        self.take(revived + fresh, 0)?;
        for id in &table {
            self.unlist(*id);
        }
        table.extend(self.take(fresh, fresh)?);
        let answer = Answer::Ids(ids(&table));
        self.tables.push(table);
        Ok(answer)
    }

    fn slice(&self, at: usize, range: &Range<usize>) -> Result<Vec<u32>, PoolError> {
        let len = self.tables[at].len();
        let Range { start, end } = *range;
        match start <= end && end <= len {
            true => Ok(self.tables[at][start..end].to_vec()),
            false => Err(PoolError::Position { start, end, len }),
        }
    }

    fn at(&self, at: usize, position: usize) -> Result<u32, PoolError> {
        let id = self.slice(at, &(position..position + 1))?[0];
        if self.null && id == 0 { Err(PoolError::Null { position }) } else { Ok(id) }
    }

    fn apply_to_one(&mut self, op: &Op) -> Result<Answer, PoolError> {
        let (id, answer) = match op {
            Op::Block => {
                let id = self.take(1, 1)?[0];
                (id, Answer::Ids(ids(&[id])))
            }
            Op::Publish { name } => {
                let id = self.take(1, 1)?[0];
                match self.find(*name) {
                    Some(other) => {
                        self.free.insert(0, id);
                        self.unlist(other);
                        (other, Answer::Registered(Registered::Duplicate(BlockId::new(other))))
                    }
                    None => {
                        self.hashes[id as usize] = Some(*name);
                        (id, Answer::Registered(Registered::New))
                    }
                }
            }
            Op::Find { name } => match self.find(*name) {
                Some(id) => {
                    self.unlist(id);
                    (id, Answer::Ids(ids(&[id])))
                }
                None => return Ok(Answer::Nothing),
            },
            Op::DropOne { one } => {
                if *one < self.ones.len() {
                    let ids = self.ones.swap_remove(*one);
                    self.freed(ids);
                }
                return Ok(Answer::Nothing);
            }
            _ => unreachable!("{op:?} is not about one block"),
        };
        self.ones.push(vec![id]);
        Ok(answer)
    }

    fn apply_to(&mut self, at: usize, op: &Op) -> Result<Answer, PoolError> {
        match op {
            Op::Extend { fresh, .. } => {
                let taken = self.take(*fresh, *fresh)?;
                self.tables[at].extend(taken);
            }
            Op::Truncate { len, .. } => {
                let keep = (*len).min(self.tables[at].len());
                let cut = self.tables[at].split_off(keep);
                self.freed(cut);
            }
            Op::Release { .. } | Op::DropTable { .. } => {
                let table = self.tables.swap_remove(at);
                self.freed(table);
            }
            Op::Share { range, .. } => {
                let shared = self.slice(at, range)?;
                self.tables.push(shared);
            }
            Op::Lease { range, .. } => {
                let leased = self.slice(at, range)?;
                self.leases.push(leased);
            }
            Op::CheckWritable { range, .. } => {
                for (position, id) in (range.start..).zip(self.slice(at, range)?) {
                    if self.null && id == 0 {
                        return Err(PoolError::Null { position });
                    }
                    let (holders, registered) = (self.holders(id), self.hashes[id as usize].is_some());
                    if holders != 1 || registered {
                        return Err(PoolError::Shared { block: BlockId::new(id), holders: holders as u32, registered });
                    }
                }
            }
            Op::Register { position, name, .. } => {
                let id = self.at(at, *position)?;
                return match (self.hashes[id as usize], self.find(*name)) {
                    (Some(old), _) if old == *name => Ok(Answer::Registered(Registered::Already)),
                    (Some(old), _) => {
                        Err(PoolError::AlreadyRegistered { block: BlockId::new(id), registered: hash(old) })
                    }
                    (None, Some(other)) => Ok(Answer::Registered(Registered::Duplicate(BlockId::new(other)))),
                    (None, None) => {
                        self.hashes[id as usize] = Some(*name);
                        Ok(Answer::Registered(Registered::New))
                    }
                };
            }
            Op::Unregister { position, .. } => {
                let id = self.at(at, *position)?;
                return Ok(Answer::Count(usize::from(self.forget(id))));
            }
            Op::Skip { range, .. } => {
                if !self.null {
                    return Err(PoolError::NoNull);
                }
                let skipped: Vec<u32> = self.slice(at, range)?.into_iter().filter(|id| *id != 0).collect();
                self.tables[at][range.clone()].fill(0);
                let count = skipped.len();
                self.freed(skipped);
                return Ok(Answer::Count(count));
            }
            Op::Adopt { one, .. } => {
                let one = self.ones.swap_remove(*one);
                self.tables[at].extend(one);
            }
            _ => unreachable!("{op:?} is not about a table"),
        }
        Ok(self.tables.get(at).map_or(Answer::Nothing, |table| Answer::Ids(ids(table))))
    }
}
