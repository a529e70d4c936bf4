//! Pages that are read where somebody else has them.
#![expect(unsafe_code, reason = "the tests vouch for the memory that pages are aliased to")]

use std::ptr::NonNull;
use std::sync::Arc;

use kvferry_kernels::{
    AliasOwner, AttentionBatch, AttentionOptions, AttentionSequence, HostKvCache, KernelError, KvDtype, Placement,
    Settle, Slot, Threads, paged_attention, store_kv,
};
use kvferry_protocol::BlockId;
use kvferry_protocol::layout::{KvShape, LayoutOrder};

const LAYERS: u16 = 2;
const HEADS: usize = 2;
const DIM: usize = 24;
const PER_BLOCK: u32 = 4;
const TOKENS: usize = 70;

fn cache(order: LayoutOrder, dtype: KvDtype, blocks: u32) -> HostKvCache {
    let run = (DIM * dtype.bytes()) as u32;
    let shape =
        KvShape { layers: LAYERS, blocks, heads: HEADS as u16, tokens_per_block: PER_BLOCK, run_bytes: vec![run, run] };
    HostKvCache::new(shape, dtype, order, Placement::OneRegion).unwrap()
}

fn wave(count: usize, step: f32) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * step).sin()).collect()
}

/// Stores a sequence into these blocks of a cache.
fn fill(cache: &HostKvCache, blocks: &[BlockId]) {
    let slots: Vec<_> = (0..TOKENS).map(|at| Slot::of_position(at, blocks, PER_BLOCK).unwrap()).collect();
    for layer in 0..LAYERS {
        let of = |step: f32| wave(TOKENS * HEADS * DIM, step + f32::from(layer));
        store_kv(cache, layer, &slots, &of(0.7), Some(&of(1.3))).unwrap();
    }
}

fn attend(cache: &HostKvCache, blocks: &[BlockId], rows: usize) -> Vec<u32> {
    let queries = wave(rows * 2 * HEADS * DIM, 0.3);
    let sequences = [AttentionSequence { blocks, context_len: TOKENS, queries: 0..rows }];
    let batch = AttentionBatch { queries: &queries, q_heads: 2 * HEADS, sequences: &sequences };
    let mut bits = Vec::new();
    for layer in 0..LAYERS {
        let mut out = vec![0.0; rows * 2 * HEADS * DIM];
        paged_attention(cache, layer, &batch, &AttentionOptions::causal(0.2), &Threads::single(), &mut out).unwrap();
        bits.extend(out.into_iter().map(f32::to_bits));
    }
    bits
}

/// Where a page's planes begin in another cache.
fn pages_of(cache: &HostKvCache, layer: u16, block: BlockId) -> Vec<NonNull<u8>> {
    let of = |plane| {
        let place = cache.layout().place(layer, block, plane, 0, 0);
        let region = cache.region(place.region).unwrap();
        assert!(place.offset < region.len() as u64);
        // SAFETY: inside the region.
        unsafe { region.as_ptr().add(place.offset as usize) }
    };
    (0..2).map(of).collect()
}

/// Has every other block of `reader` read where `owner` has it.
fn alias_every_other(reader: &HostKvCache, ours: &[BlockId], owner: &HostKvCache, theirs: &[BlockId]) -> AliasOwner {
    let keep: AliasOwner = Arc::new(owner.clone());
    let mut guards = reader.guard_write(ours, 0..LAYERS).unwrap();
    for (&our, &their) in ours.iter().zip(theirs).step_by(2) {
        for layer in 0..LAYERS {
            // SAFETY: `keep` holds the owner's memory, which nobody writes.
            unsafe { guards.alias(layer, our, &pages_of(owner, layer, their), &keep).unwrap() };
        }
    }
    keep
}

fn ids(blocks: impl Iterator<Item = u32>) -> Vec<BlockId> {
    blocks.map(BlockId::new).collect()
}

#[test]
fn attention_over_aliased_blocks_has_the_same_bits_in_every_layout() {
    let orders =
        ["LPBNHC", "LBPNHC", "LBPHNC", "PLBNHC", "LBNHPC", "LBHNPC", "BLPNHC", "BHLPNC", "BPHLNC", "BLNHPC", "BHLNPC"];
    for order in orders.map(|order| order.parse().unwrap()) {
        for (dtype, rows) in [(KvDtype::F32, 1), (KvDtype::F16, 1), (KvDtype::Bf16, TOKENS)] {
            let (reader, owner) = (cache(order, dtype, 20), cache(order, dtype, 33));
            let (ours, theirs) = (ids((0..18).rev()), ids((0..18).map(|block| 32 - block)));
            fill(&owner, &theirs);
            fill(&reader, &ours);
            let want = attend(&reader, &ours, rows);
            // What lies behind an alias is not read: it is spoilt here.
            let spoil = wave(2 * HEADS * DIM, 9.0);
            for &block in ours.iter().step_by(2) {
                let slots = [0, 3].map(|token| Slot::new(u64::from(block.get() * PER_BLOCK + token)));
                (0..LAYERS).for_each(|layer| store_kv(&reader, layer, &slots, &spoil, Some(&spoil)).unwrap());
            }
            assert_ne!(attend(&reader, &ours, rows), want, "{order}: the test spoils nothing");
            let keep = alias_every_other(&reader, &ours, &owner, &theirs);
            assert_eq!(attend(&reader, &ours, rows), want, "{order} {dtype}");
            let pages = reader.settle(&ours, Settle::Copy).unwrap();
            assert_eq!((pages, Arc::strong_count(&keep)), (9 * usize::from(LAYERS), 1), "{order}: let go");
            drop((keep, owner));
            assert_eq!(attend(&reader, &ours, rows), want, "{order} {dtype}, copied");
        }
    }
}

#[test]
fn an_aliased_page_is_for_attention_alone_until_it_is_settled() {
    let order = "BLPNHC".parse().unwrap();
    let (reader, owner) = (cache(order, KvDtype::F32, 18), cache(order, KvDtype::F32, 18));
    let blocks = ids(0..18);
    fill(&owner, &blocks);
    let keep = alias_every_other(&reader, &blocks, &owner, &blocks);
    let row = wave(HEADS * DIM, 1.0);
    let store = |slot| store_kv(&reader, 1, &[Slot::new(slot)], &row, Some(&row));
    let is_aliased = |error| matches!(error, KernelError::PageAliased { block, .. } if block == BlockId::new(2));
    assert!(is_aliased(store(9).unwrap_err()));
    assert!(is_aliased(reader.guard_read(&blocks[1..4], 1..2).unwrap_err()));
    assert!(is_aliased(reader.guard_write(&blocks[2..3], 0..1).unwrap_err()));
    store(5).unwrap();
    assert!(reader.is_aliased(1, BlockId::new(2)) && !reader.is_aliased(1, BlockId::new(1)));
    assert!(!reader.is_aliased(LAYERS, BlockId::new(2)) && !reader.is_aliased(0, BlockId::new(99)));

    // Only who holds a page for writing may have it read from elsewhere.
    let mut readers = reader.guard_read(&blocks[1..2], 0..1).unwrap();
    let mut writer = reader.guard_write(&blocks[3..4], 0..1).unwrap();
    let page = pages_of(&owner, 0, blocks[1]);
    for (guards, block, planes) in [(0, blocks[1], &page[..]), (1, blocks[1], &page), (1, blocks[3], &page[..1])] {
        let guards = if guards == 0 { &mut readers } else { &mut writer };
        // SAFETY: `keep` holds the owner's memory, which nobody writes.
        let refused = unsafe { guards.alias(0, block, planes, &keep) };
        assert!(matches!(refused, Err(KernelError::Alias { .. })), "{refused:?}");
    }
    drop((readers, writer));

    assert!(matches!(reader.settle(&ids(17..19), Settle::Forget), Err(KernelError::BlockOutOfRange { .. })));
    let owners = Arc::strong_count(&keep);
    assert_eq!(reader.settle(&blocks[2..3], Settle::Forget).unwrap(), usize::from(LAYERS));
    assert_eq!(Arc::strong_count(&keep), owners - 1, "each block lets go by itself");
    store(9).unwrap();
    assert_eq!(reader.settle(&blocks[2..3], Settle::Forget).unwrap(), 0);
    drop(reader);
    assert_eq!(Arc::strong_count(&keep), 1, "a cache that goes lets go of all");
}
