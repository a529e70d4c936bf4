//! Matrix products of SmolLM2's sizes beside candle's 8-bit ones in the same run: for 1, 8 and 128 rows.
#![expect(missing_docs, reason = "criterion's macros make public items")]

use candle_core::quantized::GgmlType;
use candle_core::quantized::k_quants::{BlockQ8_0, matmul};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvferry_examples::model::Linear;

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i * 7919 % 1000) as f32 / 500.0 - 1.0).collect()
}

fn products(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("linear");
    for (outputs, inputs) in [(1536, 576), (576, 1536)] {
        let weights = numbers(outputs * inputs);
        let linear = Linear::quantise(&weights, outputs, inputs);
        let mut blocks = vec![BlockQ8_0::zeros(); weights.len() / 32];
        BlockQ8_0::from_float(&weights, &mut blocks);
        for rows in [1, 8, 128] {
            let (x, mut out) = (numbers(rows * inputs), vec![0.0; rows * outputs]);
            // Elements are multiply-adds.
            group.throughput(Throughput::Elements((rows * outputs * inputs) as u64));
            let name = format!("{outputs}x{inputs}");
            group.bench_function(BenchmarkId::new(format!("own/{name}"), rows), |bench| {
                bench.iter(|| linear.forward(&x, &mut out));
            });
            group.bench_function(BenchmarkId::new(format!("candle/{name}"), rows), |bench| {
                bench.iter(|| matmul::<BlockQ8_0>((rows, inputs, outputs), &x, &blocks, &mut out));
            });
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(std::time::Duration::from_millis(200))
        .measurement_time(std::time::Duration::from_millis(800));
    targets = products
}
criterion_main!(benches);
