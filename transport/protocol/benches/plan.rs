//! How long a plan takes, for Llama-3.1-8B (32 layers, 8 KV heads of 128 bf16 values) and 512 blocks of 16 tokens.
//!
//! `cargo bench -p kvferry-protocol --bench plan`
#![expect(missing_docs, reason = "criterion's macros make functions without any")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use kvferry_protocol::layout::{CacheView, CopyPlan, KvLayout, KvShape, LayerBase, Selection, Shard, heads_of, plan};
use kvferry_protocol::{BlockId, RegionId, TpRank};

const BLOCKS: u32 = 512;

fn layout(order: &str, heads: u16) -> KvLayout {
    let shape = KvShape { layers: 32, blocks: 2 * BLOCKS, heads, tokens_per_block: 16, run_bytes: vec![256, 256] };
    KvLayout::packed(shape, order.parse().unwrap()).unwrap()
}

/// The same, each layer in a region of its own.
fn layer_regions(order: &str, heads: u16) -> KvLayout {
    let whole = layout(order, heads);
    let bases = (0..32).map(|layer| LayerBase { region: RegionId::new(layer), offset: 0 }).collect();
    KvLayout::new(whole.shape().clone(), whole.planes().to_vec(), bases).unwrap()
}

fn benches(c: &mut Criterion) {
    let scattered: Vec<BlockId> = (0..BLOCKS).map(|i| BlockId::new(i * 37 % (2 * BLOCKS))).collect();
    let in_order: Vec<BlockId> = (0..BLOCKS).map(BlockId::new).collect();
    let tp8 = |rank| heads_of(TpRank::new(rank), 8, 8).unwrap().start;
    let cases = [
        ("same layout, BLPNHC", layout("BLPNHC", 8), 0, layout("BLPNHC", 8), 0),
        ("NHD to HND, BLPNHC to BHLPNC", layout("BLPNHC", 8), 0, layout("BHLPNC", 8), 0),
        ("per layer, LBNHPC to LBHNPC", layout("LBNHPC", 8), 0, layout("LBHNPC", 8), 0),
        ("a region a layer to BLNHPC", layer_regions("LBNHPC", 8), 0, layout("BLNHPC", 8), 0),
        ("TP8 to TP4, BHLPNC", layout("BHLPNC", 1), tp8(3), layout("BHLPNC", 2), 2),
        ("TP8 to TP4, BLPNHC", layout("BLPNHC", 1), tp8(3), layout("BLPNHC", 2), 2),
    ];
    let mut group = c.benchmark_group("plan");
    for (name, src, src_head, dst, dst_head) in &cases {
        let shard = |first_head| Shard { first_head, ..Shard::default() };
        let from = CacheView { layout: src, shard: shard(*src_head), blocks: &scattered, first_token: 0 };
        let to = CacheView { layout: dst, shard: shard(*dst_head), blocks: &in_order, first_token: 0 };
        let selection = Selection::common(&from, &to);
        let made = plan(&from, &to, &selection).unwrap();
        let pieces: usize = made.groups().iter().map(|group| group.pieces.len()).sum();
        println!("{name}: {} bytes, {} runs, {pieces} pieces", made.bytes(), made.runs());
        group.bench_function(*name, |b| b.iter(|| plan(black_box(&from), &to, &selection).unwrap()));
        group.bench_function(format!("{name}, for the wire"), |b| {
            let wire = |plan: &CopyPlan| (plan.source_pages(), plan.window_extents().unwrap());
            b.iter(|| wire(black_box(&made)));
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
