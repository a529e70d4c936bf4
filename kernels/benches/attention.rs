//! Decode attention beside a plain read of the same bytes, in the same run and on as many threads.
//!
//! `cargo bench -p kvferry-kernels --bench attention`; the ratio is printed at the end of each model.
#![expect(missing_docs, reason = "criterion's macros make undocumented items")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvferry_kernels::{
    AttentionBatch, AttentionOptions, AttentionSequence, HostKvCache, KvDtype, Placement, Slot, Threads,
    paged_attention, store_kv,
};
use kvferry_protocol::BlockId;
use kvferry_protocol::layout::KvShape;

struct Model {
    name: &'static str,
    kv_heads: usize,
    q_heads: usize,
    dim: usize,
    dtype: KvDtype,
}

const MODELS: [Model; 2] = [
    Model { name: "llama-8b bf16", kv_heads: 8, q_heads: 32, dim: 128, dtype: KvDtype::Bf16 },
    Model { name: "smollm2 f16", kv_heads: 3, q_heads: 9, dim: 64, dtype: KvDtype::F16 },
];
const CONTEXT: usize = 4096;
const BATCH: usize = 4;
const TOKENS_PER_BLOCK: u32 = 16;
/// Enough layers that no cache holds what the previous pass read.
const MIN_CACHE_BYTES: usize = 256 << 20;

struct Fixture {
    cache: HostKvCache,
    layers: u16,
    tables: Vec<Vec<BlockId>>,
    queries: Vec<f32>,
    layer_bytes: usize,
}

fn fixture(model: &Model, order: &str) -> Fixture {
    let per_sequence = CONTEXT as u32 / TOKENS_PER_BLOCK;
    let blocks = BATCH as u32 * per_sequence;
    let layer_bytes = BATCH * CONTEXT * model.kv_heads * model.dim * model.dtype.bytes() * 2;
    let layers = MIN_CACHE_BYTES.div_ceil(layer_bytes) as u16;
    let run_bytes = vec![(model.dim * model.dtype.bytes()) as u32; 2];
    let heads = model.kv_heads as u16;
    let shape = KvShape { layers, blocks, heads, tokens_per_block: TOKENS_PER_BLOCK, run_bytes };
    let cache = HostKvCache::new(shape, model.dtype, order.parse().unwrap(), Placement::OneRegion).unwrap();
    let wave = |len: usize| (0..len).map(|i| (i as f32 * 0.37).sin()).collect::<Vec<_>>();
    // Blocks of a sequence lie scattered, as in a pool that has been used for a while.
    let table = |sequence: u32| {
        (0..per_sequence).map(move |i| BlockId::new((i * 389 + sequence) % per_sequence * 4 + sequence))
    };
    let tables: Vec<Vec<_>> = (0..BATCH as u32).map(|sequence| table(sequence).collect()).collect();
    let slots: Vec<_> = (0..u64::from(blocks * TOKENS_PER_BLOCK)).map(Slot::new).collect();
    let rows = wave(slots.len() * model.kv_heads * model.dim);
    for layer in 0..layers {
        store_kv(&cache, layer, &slots, &rows, Some(&rows)).unwrap();
    }
    Fixture { cache, layers, tables, queries: wave(BATCH * model.q_heads * model.dim), layer_bytes }
}

fn attend(model: &Model, fixture: &Fixture, layer: u16, threads: &Threads, out: &mut [f32]) {
    let sequences: Vec<_> = fixture
        .tables
        .iter()
        .enumerate()
        .map(|(row, blocks)| AttentionSequence { blocks, context_len: CONTEXT, queries: row..row + 1 })
        .collect();
    let batch = AttentionBatch { queries: &fixture.queries, q_heads: model.q_heads, sequences: &sequences };
    let options = AttentionOptions::causal(1.0 / (model.dim as f32).sqrt());
    paged_attention(&fixture.cache, layer, &batch, &options, threads, out).unwrap();
}

/// Sums the words of one layer's share of the region, in order.
fn read(fixture: &Fixture, layer: u16, threads: usize) -> u64 {
    let part_words = fixture.layer_bytes / 8 / threads;
    let start = fixture.cache.regions()[0].as_ptr().as_ptr().addr() + usize::from(layer) * fixture.layer_bytes;
    let sum = move |thread: usize| {
        let first = std::ptr::with_exposed_provenance::<u64>(start + thread * part_words * 8);
        // SAFETY: this part lies inside the region, which the fixture keeps mapped, and nobody writes it.
        let words = unsafe { std::slice::from_raw_parts(first, part_words) };
        let mut sums = [0_u64; 32];
        for words in words.chunks_exact(32) {
            sums.iter_mut().zip(words).for_each(|(sum, word)| *sum = sum.wrapping_add(*word));
        }
        sums.into_iter().fold(0, u64::wrapping_add)
    };
    if threads == 1 {
        return sum(0);
    }
    std::thread::scope(|scope| {
        let workers: Vec<_> = (1..threads).map(|thread| scope.spawn(move || sum(thread))).collect();
        workers.into_iter().fold(sum(0), |total, worker| total.wrapping_add(worker.join().unwrap()))
    })
}

/// The fastest of many single layers, in seconds: what a busy machine disturbs least. No layer is in a CPU cache when its turn
/// comes, because the others were read in between.
fn fastest(layers: u16, mut one: impl FnMut(u16)) -> f64 {
    let mut timed = |layer| {
        let start = Instant::now();
        one(layer);
        start.elapsed().as_secs_f64()
    };
    (0..8).flat_map(|_| 0..layers).map(&mut timed).fold(f64::INFINITY, f64::min)
}

fn decode(c: &mut Criterion) {
    for model in &MODELS {
        for order in ["BLPNHC", "BHLPNC", "LPBNHC"] {
            let fixture = fixture(model, order);
            fixture.cache.regions()[0].as_ptr().as_ptr().expose_provenance();
            let mut out = vec![0.0; BATCH * model.q_heads * model.dim];
            for count in [1, 2] {
                let threads = Threads::new(count).unwrap();
                let gb = fixture.layer_bytes as f64 / 1e9;
                let reading = gb / fastest(fixture.layers, |layer| _ = black_box(read(&fixture, layer, count)));
                let attending =
                    gb / fastest(fixture.layers, |layer| attend(model, &fixture, layer, &threads, &mut out));
                println!(
                    "{} {order} threads={count}: plain read {reading:.1} GB/s, attention {attending:.1} GB/s, ratio {:.2}",
                    model.name,
                    attending / reading
                );
            }
            if order == "BLPNHC" {
                let mut group = c.benchmark_group("decode");
                group.warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1)).sample_size(10);
                group.throughput(Throughput::Bytes(fixture.layer_bytes as u64));
                let mut layer = 0;
                group.bench_function(BenchmarkId::new("attention", model.name), |b| {
                    b.iter(|| {
                        layer = (layer + 1) % fixture.layers;
                        attend(model, &fixture, layer, &Threads::single(), &mut out);
                    });
                });
                group.bench_function(BenchmarkId::new("guards", model.name), |b| {
                    let all: Vec<_> = fixture.tables.concat();
                    b.iter(|| drop(black_box(fixture.cache.guard_read(&all, 0..1).unwrap())));
                });
            }
        }
    }
}

criterion_group!(benches, decode);
criterion_main!(benches);
