//! The pool against a model, and what it must do in words.

mod history;
mod model;

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

#[test]
fn changes_of_the_prefix_cache_are_told_in_order_and_once() {
    let mut pool = BlockPool::new(3).unwrap();
    let table = pool.open(&[], 1).unwrap();
    pool.register(&table, 0, hash(1)).unwrap();
    assert_eq!(pool.take_changes(), [], "nobody asked");
    pool.record_changes();
    let other = pool.open(&[], 2).unwrap();
    pool.register(&other, 0, hash(2)).unwrap();
    assert!(matches!(pool.register(&other, 1, hash(1)), Ok(Registered::Duplicate(_))));
    pool.release(other);
    let evicting = pool.open(&[], 2).unwrap();
    let want = [PrefixChange::Stored(hash(2)), PrefixChange::Removed(hash(2))];
    assert_eq!(pool.take_changes(), want);
    assert_eq!(pool.take_changes(), []);
    pool.register(&evicting, 0, hash(3)).unwrap();
    pool.unregister(&table, 0).unwrap();
    pool.clear_cache();
    pool.register(&evicting, 1, hash(4)).unwrap();
    assert_eq!(pool.take_changes(), [PrefixChange::Cleared, PrefixChange::Stored(hash(4))]);
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

#[test]
fn a_freed_request_is_reused_from_its_end_and_empty_blocks_before_cached_ones() {
    let mut pool = BlockPool::with_null(7).unwrap();
    assert_eq!(pool.null(), Some(BlockId::new(0)));
    let table = pool.open(&[], 5).unwrap();
    assert_eq!(table.ids(), ids(&[1, 2, 3, 4, 5]), "the null block is never given out");
    pool.register(&table, 0, hash(1)).unwrap();
    pool.register(&table, 1, hash(2)).unwrap();
    pool.release(table);
    assert_eq!(pool.open(&[], 6).unwrap().ids(), ids(&[5, 4, 3, 6, 2, 1]), "vLLM's order");
}

#[test]
fn what_a_window_has_passed_is_freed_at_once_and_stays_as_null() {
    let mut pool = BlockPool::with_null(5).unwrap();
    let mut table = pool.open(&[], 4).unwrap();
    pool.register(&table, 1, hash(1)).unwrap();
    assert_eq!(pool.skip(&mut table, 0..2), Ok(2));
    assert_eq!(pool.skip(&mut table, 0..3), Ok(1), "those that are null already stay");
    assert_eq!(table.ids(), ids(&[0, 0, 0, 4]));
    let counts = pool.counts();
    assert_eq!((counts.free, counts.cached, counts.total), (3, 1, 4));
    assert_eq!(pool.register(&table, 2, hash(2)), Err(PoolError::Null { position: 2 }));
    assert_eq!(pool.check_writable(&table, 0..4), Err(PoolError::Null { position: 0 }));
    let lease = pool.lease(&table, 0..4).unwrap();
    assert_eq!(pool.counts().leased, 1, "the null block is nobody's");
    drop((table, lease));
    assert_eq!(pool.counts().free, 4);
    let mut plain = BlockPool::new(1).unwrap();
    let mut table = plain.open(&[], 1).unwrap();
    assert_eq!(plain.skip(&mut table, 0..1), Err(PoolError::NoNull));
    assert_eq!(BlockPool::with_null(1).err(), Some(PoolError::Size { blocks: 1 }));
}

#[test]
fn pinned_blocks_stay_and_soft_pinned_ones_go_last() {
    let mut pool = BlockPool::new(4).unwrap();
    let table = pool.open(&[], 4).unwrap();
    for name in 0..4 {
        pool.register(&table, name as usize, hash(name)).unwrap();
    }
    pool.release(table);
    let pin = pool.pin(&[hash(0)]);
    assert_eq!(pool.soft_pin(&[hash(1), hash(9)]), 1);
    assert_eq!(pool.touch(&[hash(2)]), 1, "used later than the soft-pinned one, and reused before it");
    let table = pool.open(&[], 2).unwrap();
    assert_eq!(table.ids(), ids(&[3, 2]));
    let more = pool.open(&[], 1).unwrap();
    assert_eq!((more.ids(), pool.counts().soft_pinned), (&ids(&[1])[..], 0), "there is nothing else");
    assert_eq!(pool.open(&[], 1).unwrap_err(), PoolError::Exhausted { wanted: 1, free: 0, total: 4 });
    drop((pin, more));
    assert_eq!(pool.lookup(&[hash(0)]), 1);
    assert_eq!(pool.soft_unpin(&[hash(0)]), 0, "it has none");
}

#[test]
fn a_block_on_its_own_is_filled_named_and_shared() {
    let mut pool = BlockPool::new(3).unwrap();
    let complete = pool.mutable().unwrap().complete(hash(1));
    assert_eq!(pool.lookup(&[hash(1)]), 0, "nobody can reach it yet");
    let (first, done) = pool.publish(complete).unwrap();
    assert_eq!((first.hash(), done), (hash(1), Registered::New));
    let twin = pool.mutable().unwrap().complete(hash(1));
    let (second, done) = pool.publish(twin).unwrap();
    assert_eq!((second.id(), done), (first.id(), Registered::Duplicate(first.id())));
    assert_eq!(pool.counts().free, 2, "the twin is free again");

    let mut other = BlockPool::new(1).unwrap();
    let stray = other.mutable().unwrap().complete(hash(2));
    let (stray, error) = pool.publish(stray).unwrap_err();
    assert_eq!(error, PoolError::ForeignTable { len: 1 });
    let mut table = pool.open(&[], 1).unwrap();
    let (_stray, error) = pool.adopt(&mut table, stray).unwrap_err();
    assert_eq!(error, PoolError::ForeignTable { len: 1 });
    pool.adopt(&mut table, first).unwrap();
    drop(second);
    assert_eq!((table.len(), pool.counts().cached), (2, 0), "the table holds it");
    pool.release(table);
    assert_eq!(pool.counts().cached, 1);
    drop(pool.find(hash(1)).unwrap());
    assert_eq!(pool.counts().free, 3);
}
