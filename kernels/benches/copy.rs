//! Gather with and without digest beside a memcpy of the same bytes, and digests in place.
//!
//! `cargo bench -p kvferry-kernels --bench copy`
#![expect(missing_docs, reason = "criterion's macros make functions without any")]

use std::hint::black_box;
use std::ptr::NonNull;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvferry_kernels::copy::{RegionTable, copy, digest_side, gather_with_digest, pack_with_digest};
use kvferry_protocol::BlockId;
use kvferry_protocol::layout::{CacheView, KvLayout, KvShape, Selection, Shard, Side, plan};

/// Llama-3.1-8B: 32 layers, 8 KV heads of 128 bf16 values, 16 tokens a block; 2 MiB a block.
const POOL_BLOCKS: u32 = 64;
const BLOCKS: u32 = 32;

fn layout(order: &str, blocks: u32) -> KvLayout {
    let shape = KvShape { layers: 32, blocks, heads: 8, tokens_per_block: 16, run_bytes: vec![256, 256] };
    KvLayout::packed(shape, order.parse().unwrap()).unwrap()
}

fn table(memory: &mut [u8]) -> RegionTable {
    // SAFETY: the vectors outlive the tables, and one thread runs one copy at a time.
    unsafe { RegionTable::new(vec![(NonNull::from(&mut *memory).cast(), memory.len())]) }
}

fn benches(c: &mut Criterion) {
    let bytes = u64::from(BLOCKS) * layout("BLPNHC", 1).shape().block_bytes();
    let mut pool: Vec<u8> = (0..bytes * 2).map(|i| ((i * 31) >> 3) as u8).collect();
    let mut packed = vec![1; bytes as usize];
    let mut slab = vec![1; bytes as usize];
    let scattered: Vec<BlockId> = (0..BLOCKS).map(|i| BlockId::new(i * 37 % POOL_BLOCKS)).collect();
    let in_order: Vec<BlockId> = (0..BLOCKS).map(BlockId::new).collect();
    let mut group = c.benchmark_group("gather");
    group.throughput(Throughput::Bytes(bytes));
    group.bench_function("memcpy", |b| b.iter(|| black_box(&mut packed).copy_from_slice(&pool[..bytes as usize])));
    let (src, dst) = (table(&mut pool), table(&mut packed));
    for (from, to) in [("BLPNHC", "BLPNHC"), ("LBNHPC", "BLNHPC"), ("LPBNHC", "BLPNHC"), ("BLPNHC", "BHLPNC")] {
        let (from_layout, to_layout) = (layout(from, POOL_BLOCKS), layout(to, BLOCKS));
        let from_view = CacheView { layout: &from_layout, shard: Shard::default(), blocks: &scattered, first_token: 0 };
        let to_view = CacheView { layout: &to_layout, blocks: &in_order, ..from_view };
        let plan = plan(&from_view, &to_view, &Selection::common(&from_view, &to_view)).unwrap();
        let name = format!("{from}-{to}");
        group.bench_function(format!("{name}/copy"), |b| b.iter(|| copy(&plan, &src, &dst).unwrap()));
        group.bench_function(format!("{name}/copy+digest"), |b| {
            b.iter(|| gather_with_digest(&plan, &src, &dst).unwrap())
        });
        group.bench_function(format!("{name}/pack+digest"), |b| {
            b.iter(|| pack_with_digest(&plan, &src, &mut slab).unwrap());
        });
        group.bench_function(format!("{name}/digest in place"), |b| {
            b.iter(|| digest_side(&plan, Side::Source, &src).unwrap());
        });
    }
    group.finish();
}

criterion_group! {
    name = all;
    config = Criterion::default().measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(300)).sample_size(10);
    targets = benches
}
criterion_main!(all);
