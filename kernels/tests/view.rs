//! The unguarded kernels over memory that an engine owns, with padded pages and layers of their own.

mod common;

use std::ptr::NonNull;

use common::{LAYER, Model, PLAIN, Stage};
use kvferry_kernels::{
    AttentionBatch, AttentionSequence, KernelError, KvCacheView, KvDtype, Slot, Threads, paged_attention_unguarded,
    store_kv_unguarded,
};
use kvferry_protocol::layout::{KvLayout, KvShape, LayerBase, PlaneStrides};
use kvferry_protocol::{BlockId, RegionId};

const MODEL: Model = Model {
    q_heads: 4,
    kv_heads: 2,
    key_dim: 24,
    value_dim: 16,
    mla: false,
    dtype: KvDtype::F16,
    window: None,
    sinks: true,
    soft_cap: None,
};
const BLOCKS: u32 = 9;
const TOKENS_PER_BLOCK: u32 = 3;
/// Runs of 48 and 32 bytes, and padding after each token, head and page.
const TOKEN_BYTES: u64 = 100;
const PAGE_BYTES: u64 = 1000;

/// Heads outside tokens; K first, then V, in each token; two bytes into a region for each layer, so that nothing is aligned.
fn padded() -> KvLayout {
    let shape =
        KvShape { layers: 2, blocks: BLOCKS, heads: 2, tokens_per_block: TOKENS_PER_BLOCK, run_bytes: vec![48, 32] };
    let plane = |offset, run_bytes| PlaneStrides {
        offset,
        layer: 0,
        block: PAGE_BYTES,
        head: 4 * TOKEN_BYTES,
        token: TOKEN_BYTES,
        run_bytes,
    };
    let bases = [1, 0].map(|region| LayerBase { region: RegionId::new(region), offset: 2 });
    KvLayout::new(shape, vec![plane(0, 48), plane(50, 32)], bases.to_vec()).unwrap()
}

#[test]
#[expect(unsafe_code, reason = "the engine's side of the contract")]
fn padded_pages_in_foreign_memory_give_the_same_bits() {
    let tokens = 25;
    let sequence = MODEL.sequence(6, tokens);
    let want =
        Stage::new(&MODEL, &PLAIN, &[tokens], 1).step(std::slice::from_ref(&sequence), &[tokens], &Threads::single());

    let mut memory = [(); 2].map(|()| vec![0xFF_u8; 2 + BLOCKS as usize * PAGE_BYTES as usize]);
    let starts = memory.each_mut().map(|bytes| (NonNull::from(&mut bytes[..]).cast::<u8>(), bytes.len()));
    // SAFETY: both vectors outlive the view, and only the calls below use them.
    let view = unsafe { KvCacheView::new(padded(), KvDtype::F16, &starts) }.unwrap();
    let table: Vec<_> = (0..BLOCKS).rev().map(BlockId::new).collect();
    let slots: Vec<_> = (0..tokens).map(|at| Slot::of_position(at, &table, TOKENS_PER_BLOCK).unwrap()).collect();
    // SAFETY: no other thread knows this memory.
    unsafe { store_kv_unguarded(&view, LAYER, &slots, &sequence.keys, Some(&sequence.values)) }.unwrap();
    let span = [AttentionSequence { blocks: &table, context_len: tokens, queries: 0..tokens }];
    let batch = AttentionBatch { queries: &sequence.queries, q_heads: MODEL.q_heads, sequences: &span };
    let sinks = MODEL.sink_logits();
    let (options, mut out) = (MODEL.options(sinks.as_deref()), vec![f32::NAN; want[0].len()]);
    // SAFETY: as above.
    unsafe { paged_attention_unguarded(&view, LAYER, &batch, &options, &Threads::single(), &mut out) }.unwrap();
    assert_eq!(out, want[0]);
    // Layer 1 lies in region 0; the other layer's region and the padding are as they were.
    assert!(memory[1].iter().all(|&byte| byte == 0xFF));
    let padding = |at: usize| (at - 2) % TOKEN_BYTES as usize >= 82 || (at - 2) % 1000 >= 700;
    assert!((2..memory[0].len()).filter(|&at| padding(at)).all(|at| memory[0][at] == 0xFF));
}

#[test]
#[expect(unsafe_code, reason = "the engine's side of the contract")]
fn a_layout_that_reaches_past_its_memory_is_refused() {
    // One past the last run: region's first two bytes, block 8, head 1, token 2, V.
    let needed = 2 + 8 * PAGE_BYTES as usize + 4 * 100 + 2 * 100 + 50 + 32;
    let mut memory = vec![0_u8; needed];
    let start = NonNull::from(&mut memory[..]).cast::<u8>();
    let new = |regions: &[(NonNull<u8>, usize)]| {
        // SAFETY: the view is not used.
        unsafe { KvCacheView::new(padded(), KvDtype::F16, regions) }.map(|_| ())
    };
    new(&[(start, needed), (start, needed)]).unwrap();
    let error = new(&[(start, needed), (start, needed - 1)]).unwrap_err();
    assert!(matches!(&error, KernelError::RegionTooSmall { region, .. } if region.get() == 1), "{error}");
    let error = new(&[(start, needed)]).unwrap_err().to_string();
    assert!(error.contains("of region 1, which has 0 bytes"), "{error}");
}
