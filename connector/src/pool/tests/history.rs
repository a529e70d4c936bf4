//! Random histories of a pool, and the same history of its model.

use super::model::Model;
use super::*;

#[derive(Clone, Debug)]
pub(super) enum Op {
    Open {
        hashes: Vec<u8>,
        fresh: usize,
    },
    Extend {
        table: usize,
        fresh: usize,
    },
    Truncate {
        table: usize,
        len: usize,
    },
    Share {
        table: usize,
        range: Range<usize>,
    },
    Lease {
        table: usize,
        range: Range<usize>,
    },
    Release {
        table: usize,
    },
    DropTable {
        table: usize,
    },
    End {
        lease: usize,
    },
    DropLease {
        lease: usize,
    },
    Register {
        table: usize,
        position: usize,
        name: u8,
    },
    Unregister {
        table: usize,
        position: usize,
    },
    CheckWritable {
        table: usize,
        range: Range<usize>,
    },
    Touch {
        hashes: Vec<u8>,
    },
    ClearCache,
    Skip {
        table: usize,
        range: Range<usize>,
    },
    Pin {
        hashes: Vec<u8>,
    },
    DropPin {
        pin: usize,
    },
    SoftPin {
        hashes: Vec<u8>,
    },
    SoftUnpin {
        hashes: Vec<u8>,
    },
    /// Takes one block and leaves it mutable.
    Block,
    /// Takes one block, fills it and publishes it.
    Publish {
        name: u8,
    },
    Find {
        name: u8,
    },
    DropOne {
        one: usize,
    },
    Adopt {
        table: usize,
        one: usize,
    },
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
        1 => (which.clone(), position).prop_map(|(table, position)| Op::Unregister { table, position }),
        1 => at.clone().prop_map(|(table, range)| Op::CheckWritable { table, range }),
        1 => hashes.clone().prop_map(|hashes| Op::Touch { hashes }),
        1 => Just(Op::ClearCache),
        5 => any_new_op(at, hashes),
        2 => any_op_of_one(which),
    ]
}

fn any_new_op(
    at: impl Strategy<Value = (usize, Range<usize>)>,
    hashes: impl Strategy<Value = Vec<u8>> + Clone,
) -> impl Strategy<Value = Op> {
    prop_oneof![
        2 => at.prop_map(|(table, range)| Op::Skip { table, range }),
        1 => hashes.clone().prop_map(|hashes| Op::Pin { hashes }),
        1 => (0..3_usize).prop_map(|pin| Op::DropPin { pin }),
        2 => (0..12_u8).prop_map(|name| Op::SoftPin { hashes: vec![name] }),
        1 => hashes.clone().prop_map(|hashes| Op::SoftPin { hashes }),
        1 => hashes.prop_map(|hashes| Op::SoftUnpin { hashes }),
    ]
}

fn any_op_of_one(which: Range<usize>) -> impl Strategy<Value = Op> {
    prop_oneof![
        1 => Just(Op::Block),
        2 => (0..12_u8).prop_map(|name| Op::Publish { name }),
        1 => (0..12_u8).prop_map(|name| Op::Find { name }),
        2 => (0..4_usize).prop_map(|one| Op::DropOne { one }),
        2 => (which, 0..4_usize).prop_map(|(table, one)| Op::Adopt { table, one }),
    ]
}

/// What an operation answered, in words that both can say.
#[derive(PartialEq, Debug)]
pub(super) enum Answer {
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
    pins: Vec<Pin>,
    ones: Vec<One>,
}

enum One {
    Mutable(MutableBlock),
    Registered(RegisteredBlock),
}

impl Real {
    fn apply(&mut self, op: &Op) -> Answer {
        let Self { pool, tables, leases, pins, .. } = self;
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
            Op::SoftPin { hashes: names } => Answer::Count(pool.soft_pin(&hashes(names))),
            Op::SoftUnpin { hashes: names } => Answer::Count(pool.soft_unpin(&hashes(names))),
            Op::Pin { hashes: names } => {
                let pin = pool.pin(&hashes(names));
                let ids = pin.ids().to_vec();
                pins.push(pin);
                Answer::Ids(ids)
            }
            Op::DropPin { pin } => {
                if *pin < pins.len() {
                    drop(pins.swap_remove(*pin));
                }
                Answer::Nothing
            }
            Op::Block | Op::Publish { .. } | Op::Find { .. } | Op::DropOne { .. } => self.apply_to_one(op).into(),
            Op::Adopt { table, one } if *table >= tables.len() || *one >= self.ones.len() => Answer::Nothing,
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
            | Op::Skip { table, .. }
            | Op::Adopt { table, .. }
            | Op::CheckWritable { table, .. } => match *table < tables.len() {
                true => self.apply_to(*table, op).into(),
                false => Answer::Nothing,
            },
        }
    }

    fn apply_to(&mut self, at: usize, op: &Op) -> Result<Answer, PoolError> {
        let Self { pool, tables, leases, ones, .. } = self;
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
            Op::Skip { range, .. } => return Ok(Answer::Count(pool.skip(table, range.clone())?)),
            Op::Adopt { one, .. } => match ones.swap_remove(*one) {
                One::Mutable(block) => pool.adopt(table, block).map_err(|(_, error)| error)?,
                One::Registered(block) => pool.adopt(table, block).map_err(|(_, error)| error)?,
            },
            _ => unreachable!("{op:?} is not about a table"),
        }
        Ok(tables.get(at).map_or(Answer::Nothing, |table| Answer::Ids(table.ids().to_vec())))
    }

    fn apply_to_one(&mut self, op: &Op) -> Result<Answer, PoolError> {
        let Self { pool, ones, .. } = self;
        let (one, answer) = match op {
            Op::Block => {
                let block = pool.mutable()?;
                let id = block.id();
                (One::Mutable(block), Answer::Ids(vec![id]))
            }
            Op::Publish { name } => {
                let block = pool.mutable()?.complete(hash(*name));
                let (block, done) = pool.publish(block).map_err(|(_, error)| error)?;
                assert!(matches!(done, Registered::New) || done == Registered::Duplicate(block.id()));
                (One::Registered(block), Answer::Registered(done))
            }
            Op::Find { name } => match pool.find(hash(*name)) {
                Some(block) => {
                    let id = block.id();
                    (One::Registered(block), Answer::Ids(vec![id]))
                }
                None => return Ok(Answer::Nothing),
            },
            Op::DropOne { one } => {
                if *one < ones.len() {
                    ones.swap_remove(*one);
                }
                return Ok(Answer::Nothing);
            }
            _ => unreachable!("{op:?} is not about one block"),
        };
        ones.push(one);
        Ok(answer)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn the_pool_agrees_with_its_model(null in any::<bool>(), ops in vec(any_op(), 0..250)) {
        let pool = if null { BlockPool::with_null(BLOCKS + 1) } else { BlockPool::new(BLOCKS) }.unwrap();
        let mut real = Real { pool, tables: vec![], leases: vec![], pins: vec![], ones: vec![] };
        let mut model = Model::new(null);
        for op in ops {
            prop_assert_eq!(real.apply(&op), model.apply(&op), "{:?}", op);
            let got = PoolCounts { evicted_total: 0, queried_total: 0, hit_total: 0, ..real.pool.counts() };
            prop_assert_eq!(got, model.counts(), "{:?}", op);
        }
        // The rest of the free list, in order; then everything comes back.
        let order = [model.free.clone(), model.last.clone()].concat();
        let rest = real.pool.open(&[], order.len()).unwrap();
        prop_assert_eq!(rest.ids(), ids(&order));
        drop((rest, real.tables, real.leases, real.pins, real.ones));
        let counts = real.pool.counts();
        prop_assert_eq!((counts.free, counts.leased, counts.pinned), (BLOCKS, 0, 0));
    }
}
