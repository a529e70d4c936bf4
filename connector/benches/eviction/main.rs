//! Which blocks to evict: the pool's least recently used first against S3-FIFO, by the share of prompt blocks that are found.
//!
//! `cargo bench -p kvferry --bench eviction -- [--trace FILE]... [--svg FILE]`
//!
//! A trace is a file of JSON lines with `hash_ids`, a block each, as Mooncake publishes them (FAST25-release/traces in its
//! repository: one of conversations, one of tools and agents, one made up); without one two are drawn here: conversations of many turns,
//! and agents that share long instructions, take many short steps and branch. LRU is the real [`BlockPool`]; S3-FIFO is `s3fifo.rs`.
//! A block counts as found if it and all before it in its prompt are there, as engines use them. The best that any cache could do is
//! to lose nothing; that is the last column.

mod draw;
mod plot;
mod s3fifo;

use std::collections::HashSet;
use std::path::PathBuf;

use kvferry::pool::{BlockHash, BlockPool};
use s3fifo::S3Fifo;

/// A trace: each prompt's blocks, in the order in which prompts come.
pub(crate) struct Trace {
    /// What it is called.
    pub(crate) name: String,
    /// Block numbers; equal ones have equal content and equal blocks before them.
    pub(crate) prompts: Vec<Vec<u64>>,
}

/// What of a trace's blocks was found, at one size of the cache.
pub(crate) struct Point {
    /// The cache, as a share of the trace's distinct blocks.
    pub(crate) share: f64,
    /// With the least recently used block evicted first.
    pub(crate) lru: f64,
    /// With S3-FIFO.
    pub(crate) s3fifo: f64,
}

/// Sizes of the cache: of the trace's distinct blocks one in so many.
const PARTS: [usize; 7] = [128, 64, 32, 16, 8, 4, 2];

fn main() {
    let (mut traces, mut svg, mut is_bench) = (Vec::new(), None, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--bench" => is_bench = true,
            "--trace" => traces.push(Trace::read(arguments.next().expect("--trace takes a file").into())),
            "--svg" => svg = Some(PathBuf::from(arguments.next().expect("--svg takes a file"))),
            other => panic!("{other:?} is not known; write --trace FILE or --svg FILE"),
        }
    }
    if traces.is_empty() {
        // As a test, once and small.
        let sessions = if is_bench { 3000 } else { 100 };
        traces = vec![draw::conversations(sessions), draw::agents(sessions)];
    }
    let mut lines = Vec::new();
    for trace in traces {
        let distinct = trace.prompts.iter().flatten().collect::<HashSet<_>>().len();
        let all = trace.prompts.iter().map(Vec::len).sum::<usize>();
        let (longest, best) = (trace.prompts.iter().map(Vec::len).max().unwrap_or(0), unlimited(&trace));
        println!("{}: {} prompts, {all} blocks, {distinct} of them distinct", trace.name, trace.prompts.len());
        println!("{:>10} {:>12} {:>8} {:>8} {:>8}", "blocks", "of distinct", "LRU", "S3-FIFO", "all kept");
        let mut points = Vec::new();
        for part in PARTS {
            let blocks = (distinct / part).max(longest);
            let point = Point {
                share: blocks as f64 / distinct as f64,
                lru: least_recently_used(&trace, blocks),
                s3fifo: s3_fifo(&trace, blocks),
            };
            let Point { share, lru, s3fifo } = point;
            println!("{blocks:>10} {share:>12.4} {lru:>8.4} {s3fifo:>8.4} {best:>8.4}");
            assert!(lru <= best && s3fifo <= best, "no cache finds what was never there");
            points.push(point);
        }
        lines.push((trace.name, best, points));
    }
    if let Some(svg) = svg {
        std::fs::write(&svg, plot::svg(&lines)).expect("the plot can be written");
        println!("{}", svg.display());
    }
}

impl Trace {
    fn read(path: PathBuf) -> Self {
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let prompt = |(number, line): (usize, &str)| -> Vec<u64> {
            let value: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
            let ids = value["hash_ids"].as_array().and_then(|ids| ids.iter().map(serde_json::Value::as_u64).collect());
            ids.unwrap_or_else(|| panic!("{}, line {}: no `hash_ids` of numbers", path.display(), number + 1))
        };
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Self { name, prompts: text.lines().enumerate().map(prompt).collect() }
    }
}

fn unlimited(trace: &Trace) -> f64 {
    let mut seen: HashSet<u64> = HashSet::new();
    share_found(trace, |prompt| {
        let found = prompt.iter().take_while(|block| seen.contains(*block)).count();
        seen.extend(prompt);
        found
    })
}

fn least_recently_used(trace: &Trace, blocks: usize) -> f64 {
    let mut pool = BlockPool::new(blocks).expect("a legal size");
    share_found(trace, |prompt| {
        let hashes: Vec<BlockHash> = prompt.iter().map(|&block| hash(block)).collect();
        let found = pool.lookup(&hashes);
        let table = pool.open(&hashes[..found], prompt.len() - found).expect("a prompt fits");
        for (position, &hash) in hashes.iter().enumerate().skip(found) {
            pool.register(&table, position, hash).expect("its own block");
        }
        pool.release(table);
        found
    })
}

fn s3_fifo(trace: &Trace, blocks: usize) -> f64 {
    let mut cache = S3Fifo::new(blocks);
    share_found(trace, |prompt| {
        let found = prompt.iter().take_while(|block| cache.has(**block)).count();
        // The last one first, as the pool frees them: a prefix outlives what follows it.
        prompt.iter().rev().for_each(|&block| cache.touch(block));
        found
    })
}

fn share_found(trace: &Trace, found: impl FnMut(&Vec<u64>) -> usize) -> f64 {
    let all: usize = trace.prompts.iter().map(Vec::len).sum();
    trace.prompts.iter().map(found).sum::<usize>() as f64 / all.max(1) as f64
}

fn hash(block: u64) -> BlockHash {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&block.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    BlockHash::new(bytes)
}
