//! Hashes of blocks of 16 tokens, on one core: one prompt's chain after another, each block waiting for its parent.
//!
//! `cargo bench -p kvferry --bench hash`. Tokens are drawn below 128,256 (Llama 3's vocabulary), so that most take 4 bytes of
//! pickle or CBOR.
#![expect(missing_docs, reason = "criterion's macros make functions without any")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvferry::pool::{BlockHasher, ExtraForm, HashScope, NoneHash, SglangScope, VllmAlgorithm, VllmScope};

const TOKENS_PER_BLOCK: usize = 16;
const BLOCKS: usize = 4096;

fn chains(criterion: &mut Criterion) {
    let mut state = 1_u64;
    let tokens: Vec<u32> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as u32 % 128_256
    })
    .take(BLOCKS * TOKENS_PER_BLOCK)
    .collect();
    let mut group = criterion.benchmark_group("hash");
    group.throughput(Throughput::Elements(BLOCKS as u64));
    for (name, hasher) in hashers() {
        group.bench_function(name, |bencher| bencher.iter(|| hasher.chain(black_box(&tokens))));
    }
    group.finish();
}

fn hashers() -> Vec<(&'static str, BlockHasher)> {
    let own = HashScope { model: "llama", tokens_per_block: TOKENS_PER_BLOCK, adapter: None, salt: b"" };
    let sglang = SglangScope { tokens_per_block: TOKENS_PER_BLOCK, salt: None, bigrams: false };
    let vllm = |name| VllmScope {
        algorithm: VllmAlgorithm::from_name(name).expect("a name of the list"),
        tokens_per_block: TOKENS_PER_BLOCK,
        none_hash: NoneHash::Seed("0"),
        extra_form: ExtraForm::Tagged,
    };
    let vllm = |name| (name, BlockHasher::vllm(&vllm(name)).expect("a legal scope"));
    let mut hashers = vec![
        ("kvferry", BlockHasher::new(&own).expect("a legal scope")),
        ("sglang", BlockHasher::sglang(&sglang).expect("a legal scope")),
    ];
    hashers.extend(["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"].map(vllm));
    hashers
}

criterion_group!(benches, chains);
criterion_main!(benches);
