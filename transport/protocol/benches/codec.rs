//! Messages and notifications to bytes and back, and the set operations behind each write.
//!
//! `cargo bench -p kvferry-protocol --bench codec`
#![expect(missing_docs, reason = "criterion's macros make functions without any")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvferry_protocol::codec;
use kvferry_protocol::message::{Grant, Message, Missing, OpaqueKey, WindowBytes, Wrote};
use kvferry_protocol::transfer::{Coverage, Rect};
use kvferry_protocol::{Digest, Generation, TransferId};

const TRANSFER: TransferId = TransferId::new(0x0123_4567_89ab_cdef_0011_2233_4455_6677);

fn rect(tokens: std::ops::Range<u32>, layers: std::ops::Range<u16>) -> Rect {
    Rect::new(tokens, layers).expect("not empty")
}

fn grant() -> Message {
    let missing = (0..4).map(|n| rect(1024 * n..1024 * n + 512, 0..32)).collect();
    Message::Grant(Grant {
        transfer: TRANSFER,
        generation: Generation::new(1),
        key: OpaqueKey::new(u128::MAX / 3),
        ttl_ms: 30_000,
        window: WindowBytes::new(vec![7; 64]).expect("short"),
        missing: Missing::new(missing).expect("few"),
    })
}

fn wrote() -> Wrote {
    let digest = Digest::new(0x0123_4567_89ab_cdef);
    Wrote { transfer: TRANSFER, generation: Generation::new(1), sequence: 77, rect: rect(512..1024, 0..32), digest }
}

fn messages(c: &mut Criterion) {
    let bytes = codec::encode(1, &grant()).expect("short");
    let mut group = c.benchmark_group("grant of 4 rectangles");
    group.throughput(Throughput::Bytes(bytes.len() as u64));
    let message = grant();
    group.bench_function("encode", |b| b.iter(|| codec::encode(1, black_box(&message))));
    group.bench_function("decode", |b| b.iter(|| codec::decode(1, black_box(&bytes))));
    group.finish();

    let bytes = codec::encode_wrote(1, &wrote()).expect("short");
    let mut group = c.benchmark_group("wrote");
    group.throughput(Throughput::Bytes(bytes.len() as u64));
    let notification = wrote();
    group.bench_function("encode", |b| b.iter(|| codec::encode_wrote(1, black_box(&notification))));
    group.bench_function("decode", |b| b.iter(|| codec::decode_wrote(1, black_box(&bytes))));
    group.finish();
}

fn coverage(c: &mut Criterion) {
    // 128k tokens in blocks of 16, 32 layers: first in order, then every other block first.
    let blocks = 8192u32;
    let mut group = c.benchmark_group("coverage");
    group.throughput(Throughput::Elements(blocks.into()));
    group.bench_function("insert 8192 blocks in order", |b| {
        b.iter(|| {
            let mut coverage = Coverage::new();
            for block in 0..blocks {
                coverage.insert(rect(16 * block..16 * block + 16, 0..32)).expect("one rectangle");
            }
            coverage
        });
    });
    let blocks = 1024u32;
    group.throughput(Throughput::Elements(blocks.into()));
    group.bench_function("insert 1024 blocks, odd ones first", |b| {
        b.iter(|| {
            let mut coverage = Coverage::new();
            for block in (1..blocks).step_by(2).chain((0..blocks).step_by(2)) {
                coverage.insert(rect(16 * block..16 * block + 16, 0..32)).expect("at most 512 rectangles");
            }
            coverage
        });
    });
    group.finish();
}

criterion_group!(benches, messages, coverage);
criterion_main!(benches);
