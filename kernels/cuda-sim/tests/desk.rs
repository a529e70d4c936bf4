//! A cache on a device takes and gives what a cache on the host does, and refuses what that refuses.

use std::num::NonZeroU32;
use std::sync::Arc;

use kvferry_cuda_sim::LateDevice;
use kvferry_kernels::device::{Device, DeviceError, DeviceKvCache, RowDesk};
use kvferry_kernels::{
    AttentionBatch, AttentionOptions, AttentionSequence, HostKvCache, KernelError, KvDtype, Placement, Slot, Threads,
    Values, paged_attention, store_kv,
};
use kvferry_protocol::BlockId;
use kvferry_protocol::layout::KvShape;

const LAYERS: u16 = 2;
const BLOCKS: u32 = 12;
const HEADS: usize = 2;
const Q_HEADS: usize = 6;
const DIM: usize = 16;
const TOKENS_PER_BLOCK: u32 = 5;

fn caches(seed: u64) -> (HostKvCache, RowDesk, LateDevice) {
    let run = (DIM * 2) as u32;
    let shape = KvShape {
        layers: LAYERS,
        blocks: BLOCKS,
        heads: HEADS as u16,
        tokens_per_block: TOKENS_PER_BLOCK,
        run_bytes: vec![run; 2],
    };
    let host = HostKvCache::new(shape.clone(), KvDtype::Bf16, "BLPNHC".parse().unwrap(), Placement::OneRegion).unwrap();
    let device = LateDevice::new(seed);
    let seam: Arc<dyn Device> = Arc::new(device.clone());
    let stream = seam.stream("engine").unwrap();
    let cache = DeviceKvCache::allocate(seam, stream, shape, KvDtype::Bf16.into(), "LPBHNC".parse().unwrap()).unwrap();
    (host, RowDesk::new(cache).unwrap(), device)
}

/// Numbers between -1 and 1 that have nothing to do with one another.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let number = |at: u64| {
        let mut bits = (seed << 32 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ (bits >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..count as u64).map(number).collect()
}

#[test]
fn rows_are_stored_and_seen_as_in_a_cache_on_the_host() {
    for seed in 0..20 {
        let (host, mut desk, device) = caches(seed);
        // Two sequences of 17 and 9 tokens, whose tables share the first block; 5 rows that belong to none are left alone.
        let blocks = [[7, 2, 9, 0].map(BlockId::new), [7, 4, 11, 3].map(BlockId::new)];
        let slot = |(of, at): (usize, usize)| Slot::of_position(at, &blocks[of], TOKENS_PER_BLOCK).unwrap();
        let mut slots: Vec<Slot> = (0..17).map(|at| (0, at)).chain((5..9).map(|at| (1, at))).map(slot).collect();
        // One is written twice, and one is padding.
        slots.extend([slots[3], Slot::SKIP]);
        let rows = slots.len() * HEADS * DIM;
        let queries = numbers(seed ^ 3, 12 * Q_HEADS * DIM);
        let sinks = numbers(seed ^ 4, Q_HEADS);
        let sequences = [
            AttentionSequence { blocks: &blocks[0], context_len: 17, queries: 2..6 },
            AttentionSequence { blocks: &blocks[1], context_len: 9, queries: 8..9 },
        ];
        let batch = AttentionBatch { queries: &queries, q_heads: Q_HEADS, sequences: &sequences };
        for layer in 0..LAYERS {
            let (keys, values) = (numbers(u64::from(layer) << 8 | seed, rows), numbers(seed ^ 0xff, rows));
            store_kv(&host, layer, &slots, &keys, Some(&values)).unwrap();
            desk.store(layer, &slots, &keys, Some(&values)).unwrap();
            for (window, sinks) in [(None, None), (NonZeroU32::new(4), Some(&sinks[..]))] {
                let options = AttentionOptions { window, sinks, ..AttentionOptions::causal(0.25) };
                let (mut want, mut got) = (vec![7.0; queries.len()], vec![7.0; queries.len()]);
                paged_attention(&host, layer, &batch, &options, &Threads::single(), &mut want).unwrap();
                desk.attend(layer, &batch, &options, &mut got).unwrap();
                for (row, (want, got)) in want.chunks(Q_HEADS * DIM).zip(got.chunks(Q_HEADS * DIM)).enumerate() {
                    let farthest = want.iter().zip(got).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    let allowed = if (2..6).contains(&row) || row == 8 { 1e-5 } else { 0.0 };
                    assert!(farthest <= allowed, "seed {seed}, layer {layer}, {window:?}, row {row}: {farthest}");
                }
            }
        }
        device.settle().unwrap();
    }
}

#[test]
fn what_does_not_fit_is_refused_as_on_the_host_and_nothing_is_queued() {
    let (_, mut desk, device) = caches(1);
    let row = vec![0.0; HEADS * DIM];
    let queries = vec![0.0; Q_HEADS * DIM];
    let refused = |result: Result<(), DeviceError>| match result {
        Err(DeviceError::Rows(error)) => error,
        other => panic!("{other:?}"),
    };
    let end = Slot::new(u64::from(BLOCKS * TOKENS_PER_BLOCK));
    assert!(matches!(refused(desk.store(0, &[end], &row, Some(&row))), KernelError::SlotOutOfRange { .. }));
    assert!(matches!(refused(desk.store(LAYERS, &[end], &row, Some(&row))), KernelError::LayerOutOfRange { .. }));
    assert!(matches!(refused(desk.store(0, &[Slot::new(0)], &row, None)), KernelError::Planes { .. }));
    assert!(matches!(refused(desk.store(0, &[Slot::new(0)], &row[1..], Some(&row))), KernelError::Length { .. }));
    let nowhere = [BlockId::new(BLOCKS)];
    let sequences = [AttentionSequence { blocks: &nowhere, context_len: 1, queries: 0..1 }];
    let batch = AttentionBatch { queries: &queries, q_heads: Q_HEADS, sequences: &sequences };
    let plain = AttentionOptions::causal(1.0);
    let mut out = queries.clone();
    assert!(matches!(refused(desk.attend(0, &batch, &plain, &mut out)), KernelError::BlockOutOfRange { .. }));
    let here = [BlockId::new(0)];
    let sequences = [AttentionSequence { blocks: &here, context_len: 1, queries: 0..1 }];
    let batch = AttentionBatch { sequences: &sequences, ..batch };
    for options in [
        AttentionOptions { soft_cap: Some(30.0), ..plain },
        AttentionOptions { values: Values::KeyPrefix { value_dim: DIM }, ..plain },
    ] {
        assert!(matches!(refused(desk.attend(0, &batch, &options, &mut out)), KernelError::Option { .. }));
    }
    assert_eq!(device.ran(), 0);
}
