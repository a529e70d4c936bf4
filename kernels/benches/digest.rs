//! Digest in place beside a copy of the same bytes: in the second-level cache, and out of every cache.
//!
//! `cargo bench -p kvferry-kernels --bench digest`
#![expect(missing_docs, reason = "criterion's macros make functions without any")]

use std::hint::black_box;
use std::ptr::NonNull;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvferry_kernels::copy::{RegionTable, digest};
use kvferry_protocol::BlockId;
use kvferry_protocol::layout::{CacheView, KvLayout, KvShape, Selection, Shard};

const HOT_BYTES: usize = 256 << 10;
const COLD_BYTES: usize = 256 << 20;

/// One layer of 8 heads and 4 tokens a block.
fn layout(run_bytes: u32, bytes: usize) -> KvLayout {
    let block_bytes = 2 * 8 * 4 * run_bytes as usize;
    let blocks = (bytes / block_bytes) as u32;
    let shape = KvShape { layers: 1, blocks, heads: 8, tokens_per_block: 4, run_bytes: vec![run_bytes; 2] };
    KvLayout::packed(shape, "BLPNHC".parse().unwrap()).unwrap()
}

fn benches(c: &mut Criterion) {
    for (temperature, size) in [("hot", HOT_BYTES), ("cold", COLD_BYTES)] {
        let mut source: Vec<u8> = (0..size).map(|i| ((i * 31) >> 3) as u8).collect();
        let mut target = vec![1; size];
        let mut group = c.benchmark_group(format!("digest/{temperature}"));
        group.throughput(Throughput::Bytes(size as u64));
        group.bench_function("memcpy", |b| b.iter(|| black_box(&mut target).copy_from_slice(black_box(&source))));
        // SAFETY: the vector outlives the table, and one thread uses it.
        let table = unsafe { RegionTable::new(vec![(NonNull::from(&mut *source).cast(), size)]) };
        for run_bytes in [64, 128, 256, 1152] {
            let layout = layout(run_bytes, size);
            let shape = layout.shape();
            let blocks: Vec<BlockId> = (0..shape.blocks).map(BlockId::new).collect();
            let view = CacheView { layout: &layout, shard: Shard::default(), blocks: &blocks, first_token: 0 };
            let selection = Selection { layers: 0..1, heads: 0..8, tokens: 0..shape.blocks * 4 };
            group.throughput(Throughput::Bytes(shape.block_bytes() * u64::from(shape.blocks)));
            group.bench_function(run_bytes.to_string(), |b| {
                b.iter(|| black_box(digest(&view, &selection, &table).unwrap()));
            });
        }
        group.finish();
    }
}

criterion_group! {
    name = all;
    config = Criterion::default().measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(300)).sample_size(10);
    targets = benches
}
criterion_main!(all);
