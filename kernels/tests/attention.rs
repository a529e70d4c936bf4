//! Attention against float64, over every layout, with poison in every slot that holds no token.

mod common;

use common::{Housing, LAYER, Model, PLAIN, Stage, distance};
use kvferry_kernels::{
    AttentionBatch, AttentionOptions, AttentionSequence, Held, HostKvCache, KernelError, KvDtype, Placement, Slot,
    Threads, Values, paged_attention, store_kv,
};
use kvferry_protocol::BlockId;
use kvferry_protocol::layout::{KvShape, LayoutOrder};

/// Values are in -1..1, so this is absolute and relative at once: some 40 units in the last place of f32.
const TOLERANCE: f64 = 5e-6;

const MODEL: Model = Model {
    q_heads: 4,
    kv_heads: 2,
    key_dim: 64,
    value_dim: 64,
    mla: false,
    dtype: KvDtype::F32,
    window: None,
    sinks: false,
    soft_cap: None,
};

fn heads(q_heads: usize, kv_heads: usize, dim: usize) -> Model {
    Model { q_heads, kv_heads, key_dim: dim, value_dim: dim, ..MODEL }
}

#[test]
fn attention_agrees_with_float64() {
    let models = [
        ("MHA 64", heads(3, 3, 64)),
        ("MHA 80", heads(2, 2, 80)),
        ("GQA 96 by 2", heads(4, 2, 96)),
        ("GQA 128 by 4", heads(8, 2, 128)),
        ("GQA 64 by 3", heads(9, 3, 64)),
        ("GQA 128 by 7", heads(7, 1, 128)),
        ("MQA 256", heads(5, 1, 256)),
        ("one head of 16", heads(1, 1, 16)),
        ("uneven dims", Model { key_dim: 120, value_dim: 37, ..MODEL }),
        ("less than a vector", Model { key_dim: 5, value_dim: 3, ..MODEL }),
        ("K 192, V 128", Model { key_dim: 192, value_dim: 128, ..MODEL }),
        ("MLA 576, 512", Model { q_heads: 16, kv_heads: 1, key_dim: 576, value_dim: 512, mla: true, ..MODEL }),
        ("MLA 72, 40", Model { q_heads: 3, kv_heads: 1, key_dim: 72, value_dim: 40, mla: true, ..MODEL }),
        ("window 1", Model { window: Some(1), ..MODEL }),
        ("window 33", Model { window: Some(33), ..MODEL }),
        ("sinks", Model { sinks: true, ..MODEL }),
        ("window and sinks", Model { window: Some(20), sinks: true, ..heads(8, 1, 64) }),
        ("soft cap", Model { soft_cap: Some(5.0), ..MODEL }),
        ("soft cap, window and sinks", Model { soft_cap: Some(30.0), window: Some(70), sinks: true, ..MODEL }),
    ];
    for (name, model) in models {
        for dtype in KvDtype::ALL {
            let model = Model { dtype, ..model.clone() };
            let sequence = model.sequence(1, 150);
            let reference = model.reference(&sequence, 0);
            let mut stage = Stage::new(&model, &PLAIN, &[150], 2);
            let mut found = Vec::new();
            for count in [70, 1, 1, 78] {
                found.extend(stage.step(std::slice::from_ref(&sequence), &[count], &Threads::single()).remove(0));
            }
            let distance = distance(&found, &reference);
            assert!(distance < TOLERANCE, "{name} {dtype}: {distance:e}");
        }
    }
}

#[test]
fn a_long_context_agrees_with_float64() {
    for window in [None, Some(1500), Some(1000)] {
        let model = Model { window, sinks: true, dtype: KvDtype::F16, ..heads(4, 2, 32) };
        let tokens = 2500;
        let sequence = model.sequence(3, tokens);
        let mut stage = Stage::new(&model, &PLAIN, &[tokens], 4);
        let sequence = std::slice::from_ref(&sequence);
        let mut found = Vec::new();
        for (count, threads) in [(2100, 1), (399, 1), (1, 4)] {
            let threads = Threads::new(threads).unwrap().min_shared_work(0);
            found = stage.step(sequence, &[count], &threads).remove(0);
        }
        let distance = distance(&found, &model.reference(&sequence[0], tokens - 1));
        assert!(distance < TOLERANCE, "{window:?}: {distance:e}");
    }
}

#[test]
fn every_layout_is_read_in_place_and_poison_is_not() {
    let mla = Model { q_heads: 4, kv_heads: 1, key_dim: 48, value_dim: 32, mla: true, ..MODEL };
    let cases = LayoutOrder::LISTED.map(|order| (order, MODEL)).into_iter();
    for (order, model) in cases.chain([("BLNC", mla.clone()), ("LBNC", mla), ("NHLPBC", MODEL)]) {
        for placement in [Placement::OneRegion, Placement::RegionPerLayer] {
            let model = Model { dtype: KvDtype::Bf16, window: Some(40), ..model.clone() };
            let housing = Housing { order, placement, tokens_per_block: 5 };
            let sequences = [model.sequence(1, 83), model.sequence(2, 9)];
            let mut stage = Stage::new(&model, &housing, &[83, 9], 3);
            stage.step(&sequences, &[50, 4], &Threads::single());
            let found = stage.step(&sequences, &[33, 5], &Threads::single());
            for (index, from) in [(0, 50), (1, 4)] {
                let distance = distance(&found[index], &model.reference(&sequences[index], from));
                assert!(distance < TOLERANCE, "{order} {placement:?}: {distance:e}");
            }
        }
    }
}

#[test]
fn a_nan_that_is_seen_is_not_hidden() {
    let sequence = MODEL.sequence(1, 20);
    let mut poisoned = sequence.clone();
    poisoned.keys[10 * 2 * 64] = f32::NAN;
    let mut stage = Stage::new(&MODEL, &PLAIN, &[20], 2);
    let out = stage.step(&[poisoned], &[20], &Threads::single()).remove(0);
    let row = |token: usize, head: usize| &out[(token * 4 + head) * 64..][..64];
    assert!(row(9, 0).iter().all(|x| x.is_finite()), "a token saw its future");
    assert!(row(10, 1).iter().all(|x| x.is_nan()) && row(19, 0).iter().all(|x| x.is_nan()));
    assert!(row(19, 2).iter().all(|x| x.is_finite()), "the other KV head has no NaN");
}

fn small_cache() -> HostKvCache {
    let shape = KvShape { layers: 2, blocks: 4, heads: 2, tokens_per_block: 4, run_bytes: vec![64, 64] };
    HostKvCache::new(shape, KvDtype::F32, "BLPNHC".parse().unwrap(), Placement::OneRegion).unwrap()
}

#[test]
fn pages_are_held_while_they_are_read_and_refused_while_they_are_written() {
    let cache = small_cache();
    let blocks = [BlockId::new(3), BlockId::new(1)];
    let sequences = [AttentionSequence { blocks: &blocks, context_len: 6, queries: 0..1 }; 1];
    let batch = AttentionBatch { queries: &[0.5; 32], q_heads: 2, sequences: &sequences };
    let options = AttentionOptions::causal(0.25);
    let mut out = [7.0; 32];
    let mut attend = |options: &AttentionOptions<'_>| {
        paged_attention(&cache, 0, &batch, options, &Threads::single(), &mut out).map(|()| out)
    };
    let reader = cache.guard_read(&blocks, 0..2).unwrap();
    assert_eq!(attend(&options).unwrap(), [0.0; 32]);
    drop(reader);
    let mut writer = cache.guard_write(&blocks[..1], 0..2).unwrap();
    let refused = attend(&options);
    assert!(matches!(refused, Err(KernelError::PageBusy { layer: 0, held: Held::Writer, .. })), "{refused:?}");
    // A window that begins in the second block leaves the first one alone.
    let window = AttentionOptions { window: std::num::NonZeroU32::new(2), ..options };
    attend(&window).unwrap();
    writer.release_layers(0..1);
    attend(&options).unwrap();
    assert!(cache.guard_write(&blocks, 0..1).is_ok(), "a page was left held");
}

#[test]
fn a_wrong_call_is_refused_and_writes_nothing() {
    let cache = small_cache();
    let (queries, options, blocks) = ([0.5; 64], AttentionOptions::causal(0.25), [0, 1].map(BlockId::new));
    let sequence = |context_len, queries| AttentionSequence { blocks: &blocks, context_len, queries };
    let foreign = [BlockId::new(9)];
    let none = &[][..];
    type Case<'a> = (&'a str, u16, usize, &'a [AttentionSequence<'a>], AttentionOptions<'a>, usize);
    let cases: [Case<'_>; 15] = [
        ("layer 2 is out of range", 2, 2, none, options, 64),
        ("3 query heads cannot share 2 KV heads", 0, 3, none, options, 64),
        ("0 query heads", 0, 0, none, options, 64),
        ("out f32 [tokens, q_heads, value_dim]: 60 elements, expected 64", 0, 2, none, options, 60),
        ("a context of 9 needs 3 blocks; the table has 2", 0, 2, &[sequence(9, 0..2)], options, 64),
        ("2 queries but a context of 1", 0, 2, &[sequence(1, 0..2)], options, 64),
        ("query rows 1..3 are not inside 0..2", 0, 2, &[sequence(8, 1..3)], options, 64),
        ("sequence 1: query rows 0..1 are not inside 1..2", 0, 2, &[sequence(4, 0..1), sequence(4, 0..1)], options, 64),
        (
            "block 9 is out of range: the cache has 4 blocks",
            0,
            2,
            &[AttentionSequence { blocks: &foreign, context_len: 2, queries: 0..2 }],
            options,
            64,
        ),
        ("scale = NaN", 0, 2, none, AttentionOptions { scale: f32::NAN, ..options }, 64),
        ("soft_cap = 0", 0, 2, none, AttentionOptions { soft_cap: Some(0.0), ..options }, 64),
        ("sinks f32 [q_heads]: 1 elements", 0, 2, none, AttentionOptions { sinks: Some(&[0.0]), ..options }, 64),
        ("sinks = NaN", 0, 2, none, AttentionOptions { sinks: Some(&[0.0, f32::NAN]), ..options }, 64),
        ("value_dim = 17", 0, 2, none, AttentionOptions { values: Values::KeyPrefix { value_dim: 17 }, ..options }, 64),
        (
            "head dimension 0",
            0,
            2,
            none,
            AttentionOptions { values: Values::KeyPrefix { value_dim: 0 }, ..options },
            64,
        ),
    ];
    for (message, layer, q_heads, sequences, options, out_len) in cases {
        let mut out = vec![7.0; out_len];
        let batch = AttentionBatch { queries: &queries, q_heads, sequences };
        let error = paged_attention(&cache, layer, &batch, &options, &Threads::single(), &mut out).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert!(out.iter().all(|&x| x == 7.0), "{message}");
    }
    assert!(cache.guard_write(&blocks, 0..2).is_ok(), "a page was left held");
}

#[test]
fn steps_on_several_threads_leave_each_other_alone() {
    let model = Model { dtype: KvDtype::F16, ..MODEL };
    let sequences: Vec<_> = (0..4).map(|seed| model.sequence(seed, 40)).collect();
    let stage = Stage::new(&model, &PLAIN, &[40; 4], 5);
    std::thread::scope(|scope| {
        for (sequence, blocks) in sequences.iter().zip(&stage.tables) {
            let (cache, model) = (&stage.cache, &model);
            scope.spawn(move || {
                let slots: Vec<_> = (0..40).map(|at| Slot::of_position(at, blocks, 16).unwrap()).collect();
                store_kv(cache, LAYER, &slots, &sequence.keys, Some(&sequence.values)).unwrap();
                let span = [AttentionSequence { blocks, context_len: 40, queries: 0..40 }];
                let batch = AttentionBatch { queries: &sequence.queries, q_heads: 4, sequences: &span };
                let mut out = vec![f32::NAN; 40 * 4 * 64];
                paged_attention(cache, LAYER, &batch, &model.options(None), &Threads::single(), &mut out).unwrap();
                assert!(distance(&out, &model.reference(sequence, 0)) < TOLERANCE);
            });
        }
    });
}
