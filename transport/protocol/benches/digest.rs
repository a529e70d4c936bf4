//! Digest speed beside a copy of the same bytes: in the second-level cache, and out of every cache.
//!
//! `cargo bench -p kvferry-protocol --bench digest`
#![expect(missing_docs, reason = "criterion's macros make functions without any")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvferry_protocol::LayerId;
use kvferry_protocol::digest::{Digest, HeadKey};

const HOT_BYTES: usize = 256 << 10;
const COLD_BYTES: usize = 256 << 20;

fn digest(bytes: &[u8], run_bytes: usize) -> Digest {
    let head = HeadKey::new(LayerId::new(3), 0, 5);
    let mut sum = Digest::ZERO;
    for (token, run) in bytes.chunks_exact(run_bytes).enumerate() {
        sum.add_run(head.run(token as u32).hash(run));
    }
    sum
}

fn benches(c: &mut Criterion) {
    for (temperature, size) in [("hot", HOT_BYTES), ("cold", COLD_BYTES)] {
        let source: Vec<u8> = (0..size).map(|i| ((i * 31) >> 3) as u8).collect();
        let mut target = vec![1; size];
        let mut group = c.benchmark_group(format!("digest/{temperature}"));
        group.throughput(Throughput::Bytes(size as u64));
        group.bench_function("memcpy", |b| b.iter(|| black_box(&mut target).copy_from_slice(black_box(&source))));
        for run_bytes in [64, 128, 256, 1152] {
            group.bench_function(run_bytes.to_string(), |b| b.iter(|| digest(black_box(&source), run_bytes)));
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
