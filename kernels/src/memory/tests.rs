use std::sync::atomic::{AtomicU32, Ordering};

use kvferry_protocol::BlockId;
use kvferry_protocol::layout::KvShape;

use super::*;
use crate::dtype::KvDtype;
use crate::error::{Held, KernelError};

fn cache(layers: u16, blocks: u32) -> HostKvCache {
    let shape = KvShape { layers, blocks, heads: 1, tokens_per_block: 2, run_bytes: vec![8, 8] };
    HostKvCache::new(shape, KvDtype::F32, "BLPNHC".parse().unwrap(), Placement::OneRegion).unwrap()
}

fn ids(blocks: &[u32]) -> Vec<BlockId> {
    blocks.iter().map(|&block| BlockId::new(block)).collect()
}

fn busy(result: Result<PageGuards, KernelError>) -> (u16, u32, Held) {
    match result.unwrap_err() {
        KernelError::PageBusy { layer, block, held } => (layer, block.get(), held),
        other => panic!("{other}"),
    }
}

#[test]
fn a_region_is_zeroed_aligned_and_writable_to_its_last_byte() {
    for bytes in [1, 4096, 10_000] {
        let region = HostRegion::new(bytes).unwrap();
        assert_eq!(region.len(), bytes);
        assert!(region.as_ptr().addr().get().is_multiple_of(4096));
    }
    assert!(matches!(HostRegion::new(0), Err(KernelError::Map { bytes: 0, .. })));
    assert!(matches!(HostRegion::new(usize::MAX), Err(KernelError::Map { .. })));
}

#[test]
#[cfg_attr(miri, ignore = "maps megabytes")]
fn a_large_region_begins_at_a_huge_page() {
    let region = HostRegion::new(5 << 20).unwrap();
    assert!(region.as_ptr().addr().get().is_multiple_of(2 << 20));
}

#[test]
#[cfg_attr(miri, ignore = "makes memory files")]
fn a_sparse_region_has_no_pages_until_they_are_asked_for_and_none_can_be_written_by_others() {
    use std::os::unix::fs::MetadataExt as _;
    let region = HostRegion::sparse(64 << 12).unwrap();
    let file = std::fs::File::from(region.file().unwrap().try_clone().unwrap());
    // In units of 512 bytes. One huge page may come instead of four small ones.
    assert_eq!(file.metadata().unwrap().blocks(), 0);
    region.prefault((5 << 12) + 1..9 << 12).unwrap();
    assert!(file.metadata().unwrap().blocks() >= 4 * 8);
    assert!(matches!(region.prefault(0..(64 << 12) + 1), Err(KernelError::Map { .. })));
    let error = std::os::unix::fs::FileExt::write_at(&file, &[1], 0).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied, "the file is sealed");
}

#[test]
fn readers_share_a_page_and_a_writer_is_alone() {
    let cache = cache(2, 4);
    let first = cache.guard_read(&ids(&[1, 2]), 0..2).unwrap();
    let second = cache.guard_read(&ids(&[2, 3]), 0..1).unwrap();
    assert_eq!(busy(cache.guard_write(&ids(&[2]), 0..1)), (0, 2, Held::Reader));
    drop(first);
    assert_eq!(busy(cache.guard_write(&ids(&[2]), 0..1)), (0, 2, Held::Reader));
    let writer = cache.guard_write(&ids(&[2]), 1..2).unwrap();
    assert_eq!(busy(cache.guard_read(&ids(&[2]), 1..2)), (1, 2, Held::Writer));
    assert_eq!(busy(cache.guard_write(&ids(&[2]), 1..2)), (1, 2, Held::Writer));
    drop((second, writer));
    assert_eq!(cache.guard_write(&ids(&[0, 1, 2, 3]), 0..2).unwrap().held_pages(), 8);
}

#[test]
fn a_refused_guard_holds_nothing() {
    let cache = cache(2, 4);
    let writer = cache.guard_write(&ids(&[3]), 1..2).unwrap();
    assert_eq!(busy(cache.guard_write(&ids(&[0, 1, 2, 3]), 0..2)), (1, 3, Held::Writer));
    assert_eq!(busy(cache.guard_read(&ids(&[0, 1, 2, 3]), 0..2)), (1, 3, Held::Writer));
    assert_eq!(cache.guard_write(&ids(&[0, 1, 2]), 0..2).unwrap().held_pages(), 6);
    drop(writer);
    assert!(cache.guard_write(&ids(&[0, 1, 2, 3]), 0..2).is_ok());
}

#[test]
fn a_sub_range_is_released_early_and_only_once() {
    let cache = cache(3, 4);
    let mut guards = cache.guard_write(&ids(&[3, 1, 1]), 0..3).unwrap();
    assert_eq!((guards.blocks(), guards.held_pages()), (&ids(&[1, 3])[..], 6));
    assert_eq!(guards.release_layers(0..1), 2);
    assert_eq!(guards.release_layers(0..1), 0);
    assert!(!guards.holds(0, BlockId::new(1)) && guards.holds(1, BlockId::new(1)));
    let reader = cache.guard_read(&ids(&[1, 3]), 0..1).unwrap();
    // A late release of what somebody else holds by now must not free it.
    assert_eq!(guards.release_layers(0..1), 0);
    assert_eq!(busy(cache.guard_write(&ids(&[1]), 0..1)), (0, 1, Held::Reader));
    assert_eq!(guards.release(&ids(&[1, 0]), 1..9), 2);
    assert_eq!(guards.release_blocks(&ids(&[3, 3])), 2);
    assert_eq!(guards.held_pages(), 0);
    drop(guards);
    assert_eq!(busy(cache.guard_write(&ids(&[3]), 0..1)), (0, 3, Held::Reader));
    drop(reader);
    assert!(cache.guard_write(&ids(&[0, 1, 2, 3]), 0..3).is_ok());
}

#[test]
fn what_does_not_exist_is_refused_by_name() {
    let cache = cache(2, 4);
    assert!(matches!(cache.guard_read(&ids(&[0, 4]), 0..2), Err(KernelError::BlockOutOfRange { blocks: 4, .. })));
    assert!(matches!(cache.guard_write(&ids(&[0]), 1..3), Err(KernelError::LayerOutOfRange { layer: 2, layers: 2 })));
    assert_eq!(cache.guard_read(&[], 0..2).unwrap().held_pages(), 0);
    assert_eq!(cache.guard_read(&ids(&[1]), 1..1).unwrap().held_pages(), 0);
}

#[test]
fn guards_keep_the_memory_after_the_cache_is_gone() {
    let cache = cache(1, 1);
    let guards = cache.guard_read(&ids(&[0]), 0..1).unwrap();
    drop(cache);
    assert_eq!(guards.held_pages(), 1);
}

#[test]
fn an_odd_run_and_an_impossible_size_are_refused() {
    let order = "BLPNHC".parse().unwrap();
    let shape = KvShape { layers: 1, blocks: 1, heads: 1, tokens_per_block: 1, run_bytes: vec![8, 6] };
    let refused = HostKvCache::new(shape, KvDtype::F32, order, Placement::OneRegion);
    assert!(matches!(refused, Err(KernelError::RunBytes { plane: 1, run_bytes: 6, .. })));
    let (layers, heads) = (u16::MAX, u16::MAX);
    let shape = KvShape { layers, blocks: u32::MAX, heads, tokens_per_block: 1, run_bytes: vec![8, 8] };
    assert!(HostKvCache::new(shape, KvDtype::F32, order, Placement::OneRegion).is_err());
    let shape = KvShape { layers: 0, blocks: 1, heads: 1, tokens_per_block: 1, run_bytes: vec![8] };
    for placement in [Placement::OneRegion, Placement::RegionPerLayer] {
        assert!(matches!(HostKvCache::new(shape.clone(), KvDtype::F32, order, placement), Err(KernelError::Layout(_))));
    }
}

#[test]
fn two_threads_never_hold_a_page_for_writing_at_once() {
    let cache = cache(1, 2);
    let (rounds, inside, taken) = (if cfg!(miri) { 50 } else { 20_000 }, AtomicU32::new(0), AtomicU32::new(0));
    std::thread::scope(|scope| {
        for thread in 0..4_u32 {
            let (cache, inside, taken) = (&cache, &inside, &taken);
            scope.spawn(move || {
                for round in 0..rounds {
                    if (thread + round) % 2 == 0 {
                        let Ok(guards) = cache.guard_write(&ids(&[0, 1]), 0..1) else { continue };
                        assert_eq!(inside.swap(1 << 16, Ordering::Relaxed), 0, "a writer met somebody");
                        inside.store(0, Ordering::Relaxed);
                        taken.fetch_add(1, Ordering::Relaxed);
                        drop(guards);
                    } else {
                        let Ok(guards) = cache.guard_read(&ids(&[1]), 0..1) else { continue };
                        assert!(inside.fetch_add(1, Ordering::Relaxed) < 1 << 16, "a reader met a writer");
                        inside.fetch_sub(1, Ordering::Relaxed);
                        drop(guards);
                    }
                }
            });
        }
    });
    assert!(taken.load(Ordering::Relaxed) > 0);
    assert!(cache.guard_write(&ids(&[0, 1]), 0..1).is_ok(), "a page was left held");
}
