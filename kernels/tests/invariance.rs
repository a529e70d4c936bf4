//! Attention's invariant: the same bits whatever the chunking, batch, block size, layout and threads.

mod common;

use common::{Housing, Model, Numbers, PLAIN, Stage};
use kvferry_kernels::{KvDtype, Placement, Threads};
use kvferry_protocol::layout::LayoutOrder;
use proptest::prelude::*;

/// Head counts and dimensions; dimensions that are no multiple of 16 take another path through the kernels.
fn any_model() -> impl Strategy<Value = Model> {
    let sizes = prop_oneof![
        Just((1, 1, 16, 16)),
        Just((3, 1, 64, 64)),
        Just((4, 1, 128, 128)),
        Just((6, 3, 32, 32)),
        Just((8, 1, 48, 16)),
        Just((10, 2, 20, 9)),
        Just((21, 1, 80, 80)),
    ];
    let dtype = prop::sample::select(&KvDtype::ALL[..]);
    let window = prop_oneof![2 => Just(None), 1 => (1_u32..100).prop_map(Some)];
    let cap = prop_oneof![3 => Just(None), 1 => Just(Some(4.0_f32))];
    (sizes, any::<bool>(), dtype, window, any::<bool>(), cap).prop_map(
        |((q_heads, kv_heads, key_dim, value_dim), mla, dtype, window, sinks, soft_cap)| Model {
            q_heads,
            kv_heads,
            key_dim,
            value_dim,
            mla: mla && kv_heads == 1,
            dtype,
            window,
            sinks,
            soft_cap,
        },
    )
}

fn any_housing() -> impl Strategy<Value = Housing> {
    let order = prop::sample::select(&LayoutOrder::LISTED[..]);
    let placement = prop::sample::select(&[Placement::OneRegion, Placement::RegionPerLayer][..]);
    (order, placement, 1_u32..=64).prop_map(|(order, placement, tokens_per_block)| Housing {
        order,
        placement,
        tokens_per_block,
    })
}

fn bits(rows: &[f32]) -> Vec<u32> {
    rows.iter().map(|x| x.to_bits()).collect()
}

/// Runs the sequences in random chunks side by side until all are done; returns each one's rows.
fn in_random_chunks(stage: &mut Stage, sequences: &[common::Sequence], seed: u64, threads: &Threads) -> Vec<Vec<f32>> {
    let mut numbers = Numbers::new(seed);
    let mut left: Vec<usize> = sequences.iter().map(|sequence| sequence.tokens).collect();
    let mut rows = vec![Vec::new(); sequences.len()];
    while left.iter().any(|&left| left > 0) {
        // Decode steps, small chunks, large ones, and sequences that pause, in one batch.
        let counts: Vec<usize> = left
            .iter()
            .map(|&left| {
                let most = [0, 1, 7, 80][numbers.below(4)];
                left.min(if most > 1 { 1 + numbers.below(most) } else { most })
            })
            .collect();
        for (rows, out) in rows.iter_mut().zip(stage.step(sequences, &counts, threads)) {
            rows.extend(out);
        }
        left.iter_mut().zip(counts).for_each(|(left, count)| *left -= count);
    }
    rows
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn bits_do_not_depend_on_chunks_batch_blocks_layout_or_threads(
        model in any_model(),
        housing in any_housing(),
        lens in prop::collection::vec(1_usize..200, 1..4),
        threads in 1_usize..4,
        seed in any::<u64>(),
    ) {
        let sequences: Vec<_> = lens.iter().zip(seed..).map(|(&len, seed)| model.sequence(seed, len)).collect();
        let threads = Threads::new(threads).unwrap().min_shared_work(0);
        let mut stage = Stage::new(&model, &housing, &lens, seed);
        let found = in_random_chunks(&mut stage, &sequences, seed, &threads);
        for (sequence, found) in sequences.into_iter().zip(&found) {
            let mut stage = Stage::new(&model, &PLAIN, &[sequence.tokens], 1);
            let count = [sequence.tokens];
            let whole = stage.step(&[sequence], &count, &Threads::single()).remove(0);
            prop_assert_eq!(bits(found), bits(&whole));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn bits_of_a_long_context_do_not_depend_on_who_computes_its_segments(
        housing in any_housing(),
        tokens in 1000_usize..3200,
        window in prop_oneof![Just(None), (900_u32..2100).prop_map(Some)],
        sinks in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let (q_heads, kv_heads, key_dim, value_dim) = (2, 1, 16, 16);
        let dtype = KvDtype::F16;
        let model = Model { q_heads, kv_heads, key_dim, value_dim, mla: false, dtype, window, sinks, soft_cap: None };
        let sequence = [model.sequence(seed, tokens)];
        let (single, many) = (Threads::single(), Threads::new(3).unwrap().min_shared_work(0));
        let mut stage = Stage::new(&model, &housing, &[tokens], seed);
        // The last rows are computed with the segments on several threads, then as a part of the whole prompt.
        let mut found = Vec::new();
        stage.step(&sequence, &[tokens - 5], &single);
        for count in [1, 3, 1] {
            found.extend(stage.step(&sequence, &[count], &many).remove(0));
        }
        let mut stage = Stage::new(&model, &PLAIN, &[tokens], 1);
        let whole = stage.step(&sequence, &[tokens], &single).remove(0);
        prop_assert_eq!(bits(&found), bits(&whole[whole.len() - found.len()..]));
    }
}
