use kvferry_protocol::layout::KvShape;

use super::simd::Backend;
use super::*;
use crate::dtype::KvDtype;
use crate::memory::Placement;
use crate::store::{Slot, store_kv};

#[test]
#[expect(unsafe_code, reason = "calls below the guards")]
fn every_backend_computes_the_same_bits() {
    for dtype in KvDtype::ALL {
        for (group, key_dim, value_dim, tokens) in [(1, 16, 16, 70), (3, 64, 64, 70), (4, 128, 96, 9), (6, 20, 9, 70)] {
            let tokens = if cfg!(miri) { 3 } else { tokens };
            let run_bytes = [key_dim, value_dim].map(|dim| (dim * dtype.bytes()) as u32).to_vec();
            let shape = KvShape { layers: 1, blocks: 18, heads: 1, tokens_per_block: 4, run_bytes };
            let order = "LBHNPC".parse().unwrap();
            let cache = HostKvCache::new(shape, dtype, order, Placement::OneRegion).unwrap();
            let wave = |len: usize, step: f32| (0..len).map(|i| (i as f32 * step).sin()).collect::<Vec<_>>();
            let (keys, values) = (wave(tokens * key_dim, 0.7), wave(tokens * value_dim, 1.3));
            let slots: Vec<_> = (0..tokens as u64).map(Slot::new).collect();
            store_kv(&cache, 0, &slots, &keys, Some(&values)).unwrap();
            let blocks: Vec<_> = (0..18).map(BlockId::new).collect();
            let queries = wave(tokens * group * key_dim, 0.3);
            let sequences = [AttentionSequence { blocks: &blocks, context_len: tokens, queries: 0..tokens }];
            let batch = AttentionBatch { queries: &queries, q_heads: group, sequences: &sequences };
            let options = AttentionOptions { soft_cap: Some(3.0), ..AttentionOptions::causal(0.5) };
            let results: Vec<_> = Backend::available()
                .map(|backend| {
                    let mut out = vec![0.0; tokens * group * value_dim];
                    let (view, threads) = (cache.view(), Threads::single());
                    // SAFETY: one layer, blocks of this cache, lengths as stated; nobody else knows the cache.
                    unsafe { work::attend_by(backend, view, 0, &batch, &options, &threads, &mut out) };
                    out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                })
                .collect();
            assert!(results.iter().all(|bits| *bits == results[0]), "{dtype} {group} {key_dim}");
        }
    }
}
