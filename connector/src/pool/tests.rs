//! The pool against a model that keeps plain lists and searches them.

use std::ops::Range;

use kvferry_protocol::BlockId;
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const BLOCKS: usize = 12;

fn hash(name: u8) -> BlockHash {
    BlockHash::new([name; 32])
}

fn ids(raw: &[u32]) -> Vec<BlockId> {
    raw.iter().copied().map(BlockId::new).collect()
}

#[derive(Clone, Debug)]
enum Op {
    Open { hashes: Vec<u8>, fresh: usize },
    Extend { table: usize, fresh: usize },
    Truncate { table: usize, len: usize },
    Share { table: usize, range: Range<usize> },
    Lease { table: usize, range: Range<usize> },
    Release { table: usize },
    DropTable { table: usize },
    End { lease: usize },
    DropLease { lease: usize },
    Register { table: usize, position: usize, name: u8 },
    Unregister { table: usize, position: usize },
    CheckWritable { table: usize, range: Range<usize> },
    Touch { hashes: Vec<u8> },
    ClearCache,
}

fn any_op() -> impl Strategy<Value = Op> {
    let which = 0..6_usize;
    let position = 0..6_usize;
    let range = (0..6_usize, 0..7_usize).prop_map(|(start, end)| start..end);
    // Prefixes of few chains, so that they meet.
    let hashes = (0..3_u8, 0..5_u8).prop_map(|(chain, len)| (chain * 3..chain * 3 + len).collect::<Vec<u8>>());
    let at = (which.clone(), range.clone());
    prop_oneof![
        6 => (hashes.clone(), 0..5_usize).prop_map(|(hashes, fresh)| Op::Open { hashes, fresh }),
        2 => (which.clone(), 0..4_usize).prop_map(|(table, fresh)| Op::Extend { table, fresh }),
        1 => (which.clone(), 0..6_usize).prop_map(|(table, len)| Op::Truncate { table, len }),
        1 => at.clone().prop_map(|(table, range)| Op::Share { table, range }),
        2 => at.clone().prop_map(|(table, range)| Op::Lease { table, range }),
        3 => which.clone().prop_map(|table| Op::Release { table }),
        2 => which.clone().prop_map(|table| Op::DropTable { table }),
        1 => which.clone().prop_map(|lease| Op::End { lease }),
        1 => which.clone().prop_map(|lease| Op::DropLease { lease }),
        8 => (which.clone(), position.clone(), 0..12_u8)
            .prop_map(|(table, position, name)| Op::Register { table, position, name }),
        1 => (which, position).prop_map(|(table, position)| Op::Unregister { table, position }),
        1 => at.prop_map(|(table, range)| Op::CheckWritable { table, range }),
        1 => hashes.prop_map(|hashes| Op::Touch { hashes }),
        1 => Just(Op::ClearCache),
    ]
}

/// What an operation answered, in words that both can say.
#[derive(PartialEq, Debug)]
enum Answer {
    Nothing,
    Refused(PoolError),
    Ids(Vec<BlockId>),
    Registered(Registered),
    Count(usize),
}

impl From<Result<Answer, PoolError>> for Answer {
    fn from(result: Result<Answer, PoolError>) -> Self {
        result.unwrap_or_else(Answer::Refused)
    }
}

/// The pool with the tables and leases that it gave out.
struct Real {
    pool: BlockPool,
    tables: Vec<BlockTable>,
    leases: Vec<Lease>,
}

impl Real {
    fn apply(&mut self, op: &Op) -> Answer {
        let Self { pool, tables, leases } = self;
        let hashes = |names: &[u8]| names.iter().copied().map(hash).collect::<Vec<_>>();
        match op {
            Op::Open { hashes: names, fresh } => {
                let found = pool.lookup(&hashes(names));
                match pool.open(&hashes(names), *fresh) {
                    Ok(table) => {
                        assert_eq!(table.len(), found + fresh, "lookup says what open finds");
                        let ids = table.ids().to_vec();
                        tables.push(table);
                        Answer::Ids(ids)
                    }
                    Err(error) => Answer::Refused(error),
                }
            }
            Op::Touch { hashes: names } => Answer::Count(pool.touch(&hashes(names))),
            Op::ClearCache => Answer::Count(pool.clear_cache()),
            Op::End { lease } | Op::DropLease { lease } if *lease >= leases.len() => Answer::Nothing,
            Op::End { lease } => {
                pool.end(leases.swap_remove(*lease));
                Answer::Nothing
            }
            Op::DropLease { lease } => {
                drop(leases.swap_remove(*lease));
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
            | Op::CheckWritable { table, .. } => match *table < tables.len() {
                true => self.apply_to(*table, op).into(),
                false => Answer::Nothing,
            },
        }
    }

    fn apply_to(&mut self, at: usize, op: &Op) -> Result<Answer, PoolError> {
        let Self { pool, tables, leases } = self;
        let table = &mut tables[at];
        match op {
            Op::Extend { fresh, .. } => pool.extend(table, *fresh)?,
            Op::Truncate { len, .. } => pool.truncate(table, *len)?,
            Op::Release { .. } => pool.release(tables.swap_remove(at)),
            Op::DropTable { .. } => drop(tables.swap_remove(at)),
            Op::Share { range, .. } => {
                let shared = pool.share(table, range.clone())?;
                tables.push(shared);
            }
            Op::Lease { range, .. } => leases.push(pool.lease(table, range.clone())?),
            Op::CheckWritable { range, .. } => pool.check_writable(table, range.clone())?,
            Op::Register { position, name, .. } => {
                return Ok(Answer::Registered(pool.register(table, *position, hash(*name))?));
            }
            Op::Unregister { position, .. } => {
                return Ok(Answer::Count(usize::from(pool.unregister(table, *position)?)));
            }
            Op::Open { .. } | Op::Touch { .. } | Op::ClearCache | Op::End { .. } | Op::DropLease { .. } => {}
        }
        Ok(tables.get(at).map_or(Answer::Nothing, |table| Answer::Ids(table.ids().to_vec())))
    }
}

/// The same with lists: who holds a block is found by searching, the free list is a vector.
#[derive(Default)]
struct Model {
    tables: Vec<Vec<u32>>,
    leases: Vec<Vec<u32>>,
    free: Vec<u32>,
    hashes: Vec<Option<u8>>,
}

impl Model {
    fn new() -> Self {
        Self { free: (0..BLOCKS as u32).collect(), hashes: vec![None; BLOCKS], ..Self::default() }
    }

    fn holders(&self, id: u32) -> usize {
        self.tables.iter().chain(&self.leases).flatten().filter(|held| **held == id).count()
    }

    fn find(&self, name: u8) -> Option<u32> {
        self.hashes.iter().position(|hash| *hash == Some(name)).map(|at| at as u32)
    }

    fn prefix(&self, names: &[u8]) -> Vec<u32> {
        names.iter().map_while(|name| self.find(*name)).collect()
    }

    fn take(&mut self, wanted: usize, fresh: usize) -> Result<Vec<u32>, PoolError> {
        let free = self.free.len();
        if wanted > free {
            return Err(PoolError::Exhausted { wanted, free, total: BLOCKS });
        }
        let taken: Vec<u32> = self.free.drain(..fresh).collect();
        taken.iter().for_each(|id| self.hashes[*id as usize] = None);
        Ok(taken)
    }

    /// Called when the references are gone from the lists.
    fn freed(&mut self, ids: Vec<u32>) {
        for id in ids.into_iter().rev() {
            if self.holders(id) == 0 {
                match self.hashes[id as usize] {
                    Some(_) => self.free.push(id),
                    None => self.free.insert(0, id),
                }
            }
        }
    }

    fn counts(&self) -> PoolCounts {
        let leased = (0..BLOCKS as u32).filter(|id| self.leases.iter().flatten().any(|held| held == id)).count();
        PoolCounts {
            total: BLOCKS,
            free: self.free.len(),
            cached: self.free.iter().filter(|id| self.hashes[**id as usize].is_some()).count(),
            registered: self.hashes.iter().flatten().count(),
            leased,
            ..PoolCounts::default()
        }
    }

    fn apply(&mut self, op: &Op) -> Answer {
        match op {
            Op::Open { hashes, fresh } => self.open(hashes, *fresh).into(),
            Op::Touch { hashes } => {
                let found = self.prefix(hashes);
                for id in found.iter().rev() {
                    if let Some(at) = self.free.iter().position(|free| free == id) {
                        self.free.remove(at);
                        self.free.push(*id);
                    }
                }
                Answer::Count(found.len())
            }
            Op::ClearCache => {
                let registered = self.hashes.iter().flatten().count();
                for id in (0..BLOCKS as u32).filter(|id| self.hashes[*id as usize].is_some()) {
                    if let Some(at) = self.free.iter().position(|free| *free == id) {
                        self.free.remove(at);
                        self.free.insert(0, id);
                    }
                }
                self.hashes = vec![None; BLOCKS];
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
            | Op::CheckWritable { table, .. } => match *table < self.tables.len() {
                true => self.apply_to(*table, op).into(),
                false => Answer::Nothing,
            },
        }
    }

    fn open(&mut self, names: &[u8], fresh: usize) -> Result<Answer, PoolError> {
        let mut table = self.prefix(names);
        let revived = table.iter().filter(|id| self.free.contains(id)).count();
        self.take(revived + fresh, 0)?;
        self.free.retain(|id| !table.contains(id));
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
                for id in self.slice(at, range)? {
                    let (holders, registered) = (self.holders(id), self.hashes[id as usize].is_some());
                    if holders != 1 || registered {
                        return Err(PoolError::Shared { block: BlockId::new(id), holders: holders as u32, registered });
                    }
                }
            }
            Op::Register { position, name, .. } => {
                let id = self.slice(at, &(*position..position + 1))?[0];
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
                let id = self.slice(at, &(*position..position + 1))?[0];
                return Ok(Answer::Count(usize::from(self.hashes[id as usize].take().is_some())));
            }
            Op::Open { .. } | Op::Touch { .. } | Op::ClearCache | Op::End { .. } | Op::DropLease { .. } => {}
        }
        Ok(self.tables.get(at).map_or(Answer::Nothing, |table| Answer::Ids(ids(table))))
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn the_pool_agrees_with_its_model(ops in vec(any_op(), 0..200)) {
        let pool = BlockPool::new(BLOCKS).unwrap();
        let (mut real, mut model) = (Real { pool, tables: vec![], leases: vec![] }, Model::new());
        for op in ops {
            prop_assert_eq!(real.apply(&op), model.apply(&op), "{:?}", op);
            let got = PoolCounts { evicted_total: 0, queried_total: 0, hit_total: 0, ..real.pool.counts() };
            prop_assert_eq!(got, model.counts(), "{:?}", op);
        }
        // The rest of the free list, in order; then everything comes back.
        let rest = real.pool.open(&[], model.free.len()).unwrap();
        prop_assert_eq!(rest.ids(), ids(&model.free));
        drop((rest, real.tables, real.leases));
        let counts = real.pool.counts();
        prop_assert_eq!((counts.free, counts.leased), (BLOCKS, 0));
    }
}

#[test]
fn a_freed_prefix_lives_until_its_blocks_are_reused_from_its_end() {
    let mut pool = BlockPool::new(4).unwrap();
    let hashes = [hash(1), hash(2), hash(3)];
    let table = pool.open(&hashes, 4).unwrap();
    for (position, hash) in hashes.iter().enumerate() {
        assert_eq!(pool.register(&table, position, *hash), Ok(Registered::New));
    }
    pool.release(table);
    assert_eq!(pool.lookup(&hashes), 3);

    let one = pool.open(&[], 1).unwrap();
    assert_eq!(one.ids(), ids(&[3]), "the empty block goes first");
    let two = pool.open(&[], 1).unwrap();
    assert_eq!(two.ids(), ids(&[2]), "then the end of the freed request");
    assert_eq!(pool.lookup(&hashes), 2);
    let again = pool.open(&hashes, 0).unwrap();
    assert_eq!(again.ids(), ids(&[0, 1]));
    let PoolCounts { evicted_total, queried_total, hit_total, .. } = pool.counts();
    assert_eq!((evicted_total, queried_total, hit_total), (1, 6, 2));
}

#[test]
fn a_lease_outlives_its_request_and_frees_what_is_left() {
    let mut pool = BlockPool::new(4).unwrap();
    let table = pool.open(&[], 3).unwrap();
    let lease = pool.lease(&table, 0..2).unwrap();
    pool.release(table);
    let counts = pool.counts();
    assert_eq!((counts.free, counts.leased), (2, 2));
    assert_eq!(pool.open(&[], 3).unwrap_err(), PoolError::Exhausted { wanted: 3, free: 2, total: 4 });
    pool.end(lease);
    let counts = pool.counts();
    assert_eq!((counts.free, counts.leased), (4, 0));
}

#[test]
fn what_is_dropped_on_another_thread_comes_back() {
    let mut pool = BlockPool::new(2).unwrap();
    let table = pool.open(&[], 2).unwrap();
    std::thread::spawn(move || drop(table)).join().unwrap();
    assert_eq!(pool.open(&[], 2).unwrap().len(), 2);
}

#[test]
fn a_block_that_others_can_see_may_not_be_written() {
    let mut pool = BlockPool::new(3).unwrap();
    let table = pool.open(&[], 3).unwrap();
    assert_eq!(pool.check_writable(&table, 0..3), Ok(()));
    let lease = pool.lease(&table, 1..2).unwrap();
    let shared = PoolError::Shared { block: BlockId::new(1), holders: 2, registered: false };
    assert_eq!(pool.check_writable(&table, 0..3), Err(shared));
    pool.end(lease);
    pool.register(&table, 2, hash(1)).unwrap();
    let registered = PoolError::Shared { block: BlockId::new(2), holders: 1, registered: true };
    assert_eq!(pool.check_writable(&table, 0..3), Err(registered));
}

#[test]
fn misuse_is_refused_and_changes_nothing() {
    let mut pool = BlockPool::new(2).unwrap();
    let mut other = BlockPool::new(2).unwrap();
    let mut table = pool.open(&[], 2).unwrap();
    let foreign = PoolError::ForeignTable { len: 2 };
    assert_eq!(other.extend(&mut table, 1), Err(foreign.clone()));
    assert_eq!(other.truncate(&mut table, 0), Err(foreign.clone()));
    assert_eq!(other.share(&table, 0..1).unwrap_err(), foreign);
    assert_eq!(other.lease(&table, 0..1).unwrap_err(), foreign);
    assert_eq!(other.register(&table, 0, hash(1)), Err(foreign.clone()));
    assert_eq!(other.unregister(&table, 0), Err(foreign.clone()));
    assert_eq!(other.check_writable(&table, 0..1), Err(foreign));
    for (start, end) in [(0, 3), (2, 1), (3, 3), (usize::MAX, usize::MAX)] {
        assert_eq!(pool.lease(&table, start..end).unwrap_err(), PoolError::Position { start, end, len: 2 });
    }
    let outside = PoolError::Position { start: usize::MAX, end: usize::MAX, len: 2 };
    assert_eq!(pool.register(&table, usize::MAX, hash(1)), Err(outside));
    let endless = PoolError::Exhausted { wanted: usize::MAX, free: 0, total: 2 };
    assert_eq!(pool.open(&[], usize::MAX).unwrap_err(), endless);
    other.release(table);
    assert_eq!((pool.counts().free, other.counts().free), (2, 2), "it went back to where it belongs");
    for blocks in [0, BlockPool::MAX_BLOCKS + 1, usize::MAX] {
        assert_eq!(BlockPool::new(blocks).err(), Some(PoolError::Size { blocks }));
    }
}

#[test]
fn a_pool_and_what_it_gives_out_can_move_between_threads() {
    fn movable<T: Send>() {}
    movable::<BlockPool>();
    movable::<BlockTable>();
    movable::<Lease>();
}
