//! What `integration-tests/hashes/side_by_side.py` sets beside vLLM's figures of the same run: blocks hashed per second, and a request of
//! 1,000 blocks allocated and freed. In the CPU time of one thread, since it is printed as a ratio on machines that do other things, too.
//!
//! `cargo bench -p kvferry --bench engine_figures` prints JSON: rates in blocks of 16 tokens per second, the last hash of each chain, times
//! in microseconds; medians of 9.

use std::hint::black_box;

use kvferry::pool::{BlockHasher, BlockPool, ExtraForm, HashScope, NoneHash, SglangScope, VllmAlgorithm, VllmScope};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Map, Value, json};

const TOKENS_PER_BLOCK: usize = 16;
const BLOCKS: usize = 4096;
const REQUEST_BLOCKS: usize = 1000;
const ROUNDS: usize = 9;

fn main() {
    // Run as a test, each works once.
    let measured = std::env::args().any(|argument| argument == "--bench");
    // Tokens below Llama 3's vocabulary; the script draws the same.
    let tokens: Vec<u32> =
        (0..(BLOCKS * TOKENS_PER_BLOCK) as u64).map(|at| (at * 2_654_435_761 % 128_256) as u32).collect();
    let mut hash = Map::new();
    for (name, hasher) in hashers() {
        let chain = || black_box(hasher.chain(black_box(&tokens)));
        let seconds = median_seconds(if measured { 200 } else { 1 }, || drop(chain()));
        let last =
            chain().last().map(|hash| hasher.digest(hash).iter().map(|byte| format!("{byte:02x}")).collect::<String>());
        hash.insert(name.to_owned(), json!({ "blocks_per_s": BLOCKS as f64 / seconds, "last": last }));
    }
    let mut pool = BlockPool::new(100_000).expect("a legal size");
    let seconds = median_seconds(if measured { 5000 } else { 1 }, || {
        let table = pool.open(&[], black_box(REQUEST_BLOCKS)).expect("there is room");
        pool.release(table);
    });
    println!("{}", json!({ "hash": Value::Object(hash), "request_us": seconds * 1e6 }));
}

fn hashers() -> Vec<(&'static str, BlockHasher)> {
    let tokens_per_block = TOKENS_PER_BLOCK;
    let own = BlockHasher::new(&HashScope { model: "llama", tokens_per_block, adapter: None, salt: b"" });
    let sglang = BlockHasher::sglang(&SglangScope { tokens_per_block, salt: None, bigrams: false });
    let mut hashers = vec![("kvferry", own.expect("a legal scope")), ("sglang", sglang.expect("a legal scope"))];
    for name in ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] {
        let algorithm = VllmAlgorithm::from_name(name).expect("a name of the list");
        let none_hash = NoneHash::Seed("vllm-none-hash");
        let scope = VllmScope { algorithm, tokens_per_block, none_hash, extra_form: ExtraForm::Tagged };
        hashers.push((name, BlockHasher::vllm(&scope).expect("a legal scope")));
    }
    hashers
}

fn median_seconds(times: u32, mut work: impl FnMut()) -> f64 {
    let mut rounds = [0.0; ROUNDS];
    for round in &mut rounds {
        let start = cpu_seconds();
        (0..times).for_each(|_| work());
        *round = (cpu_seconds() - start) / f64::from(times);
    }
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}

fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
