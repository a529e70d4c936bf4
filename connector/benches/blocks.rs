//! The block pool and the radix cache, on one core.
//!
//! - *request of 1,000 blocks*: allocated and freed; its blocks empty, or all of them evicted from the prefix cache first, and registered
//!   again under new hashes;
//! - *match of 32k tokens*: the prompt's whole prefix found, locked and unlocked in a tree of a million nodes. The prompt lies on a path of
//!   64 nodes, one per turn of 512 tokens; the others are a thousand prefixes with a thousand ends each. The memory of the whole process
//!   before and after is printed, per node.
//!
//! `cargo bench -p kvferry --bench blocks`; run once as a test the tree has a thousand nodes.
#![expect(missing_docs, reason = "criterion's macros make functions without any")]

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use kvferry::pool::{BlockHash, BlockPool, RadixCache, Sharing};

const REQUEST_BLOCKS: usize = 1000;
const POOL_BLOCKS: usize = 100_000;
const TURNS: usize = 64;
const TOKENS_PER_TURN: usize = 512;

fn pool(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("request of 1,000 blocks");
    let mut pool = BlockPool::new(POOL_BLOCKS).expect("a legal size");
    group.bench_function("empty", |bencher| {
        bencher.iter(|| {
            let table = pool.open(&[], black_box(REQUEST_BLOCKS)).expect("there is room");
            pool.release(table);
        });
    });
    let mut number = 0_u64;
    let mut next_hash = || {
        number += 1;
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        BlockHash::new(bytes)
    };
    let fill = |pool: &mut BlockPool, next_hash: &mut dyn FnMut() -> BlockHash| {
        let table = pool.open(&[], REQUEST_BLOCKS).expect("there is room");
        for position in 0..REQUEST_BLOCKS {
            pool.register(&table, position, next_hash()).expect("its own block");
        }
        pool.release(table);
    };
    (0..POOL_BLOCKS / REQUEST_BLOCKS).for_each(|_| fill(&mut pool, &mut next_hash));
    group.bench_function("evicted and registered", |bencher| bencher.iter(|| fill(&mut pool, &mut next_hash)));
    group.finish();
}

fn radix(criterion: &mut Criterion) {
    // Criterion runs each function once, without this argument, as a test.
    let fan = if std::env::args().any(|argument| argument == "--bench") { 1000 } else { 30 };
    let mut group = criterion.benchmark_group("match of 32k tokens");
    for tokens_per_block in [16, 1] {
        let before = resident_bytes();
        let (mut cache, prompt) = grown(tokens_per_block, fan);
        let counts = cache.counts();
        println!(
            "{} nodes over {} blocks of {tokens_per_block} tokens: {} bytes of memory per node",
            counts.nodes,
            counts.cached,
            resident_bytes().saturating_sub(before) / counts.nodes,
        );
        group.bench_function(format!("{tokens_per_block} tokens a block"), |bencher| {
            bencher.iter(|| {
                let sequence = cache.admit(b"", black_box(&prompt));
                assert_eq!(sequence.shared_tokens(), prompt.len() - tokens_per_block);
            });
        });
    }
    group.finish();
}

/// A tree of a bit more than `fan * fan` nodes, and a prompt that is in it up to its last block.
fn grown(tokens_per_block: usize, fan: u32) -> (RadixCache, Vec<u32>) {
    let blocks = 3 * (fan * fan) as usize + TURNS * TOKENS_PER_TURN;
    let mut cache = RadixCache::new(blocks, tokens_per_block, Sharing::Radix).expect("a legal size");
    let mut keep = |text: &[u32]| {
        let mut sequence = cache.admit(b"", text);
        cache.extend(&mut sequence, text.len()).expect("there is room");
        cache.finish(sequence, text).expect("all of it has slots");
    };
    let block = |token: u32| vec![token; tokens_per_block];
    for prefix in 0..fan {
        for end in 0..fan {
            keep(&[block(prefix), block(end)].concat());
        }
    }
    let prompt: Vec<u32> = (0..(TURNS * TOKENS_PER_TURN) as u32).map(|at| 1_000_000 + at * 7 % 1013).collect();
    for turn in 1..=TURNS {
        // Another answer than the one that the conversation goes on with: the nodes part here.
        keep(&[&prompt[..turn * TOKENS_PER_TURN], &block(turn as u32)[..]].concat());
    }
    keep(&prompt);
    (cache, prompt)
}

fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").ok();
    let resident =
        pages.as_deref().and_then(|text| text.split(' ').nth(1)).and_then(|pages| pages.parse::<usize>().ok());
    resident.unwrap_or(0) * 4096
}

criterion_group! {
    name = all;
    config = Criterion::default().measurement_time(Duration::from_secs(3)).warm_up_time(Duration::from_millis(500)).sample_size(30);
    targets = pool, radix
}
criterion_main!(all);
