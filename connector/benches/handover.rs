//! A whole hand-over through the contract, digests on both ends, beside the same bytes without digests and what moves them raw.
//!
//! Three figures for each size of run, taken in turn in the same rounds:
//! - *hand-over*: two workers; a prompt whose KV is computed already is loaded, verified and released;
//! - *digest*: the two passes that the hand-over makes over its bytes, alone, one after the other on one thread;
//! - *raw*: as many scattered blocks of the same size, moved over two plain TCP connections, or, where the host's memory is shared,
//!   copied by one thread.
//!
//! `cargo bench -p kvferry --bench handover -- [rounds] [tcp|uds|cma|shm]`
//!
//! With the word `sweep` it compares numbers of movers and of posts in flight instead, a hand-over each in every round:
//! `cargo bench -p kvferry --bench handover -- 9 sweep`
//!
//! With the word `small` it measures how long requests of a few blocks take, one at a time, in microseconds:
//! `cargo bench -p kvferry --bench handover -- 300 small [tcp|uds|cma|shm]`

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;

use kvferry::config::{ConnectorConfig, PreSharedKey, RawConfig};
use kvferry::contract::{
    EngineFinish, Request, RequestId, ScheduledRequest, ScheduledStep, Scheduler, TransferParams, Worker,
};
use kvferry::metrics::Metrics;
use kvferry::open_transport;
use kvferry::pd::{PdScheduler, PdWorker, PdWorkerParts, SchedulerOptions, greeting};
use kvferry_kernels::copy::{self, RegionTable};
use kvferry_kernels::{HostKvCache, KvDtype, Placement};
use kvferry_protocol::layout::{CacheView, KvShape, Selection, Shard};
use kvferry_protocol::manifest::{self, Fingerprint, Manifest, Options, Planes, Rope, RopeStyle, ScalePer, Scales};
use kvferry_protocol::{BlockId, Incarnation, TransferId};
use kvferry_transport::testing::{RawPair, scattered};

const TOTAL_BYTES: usize = 128 << 20;
const RUN_BYTES: u32 = 256; // one head of 128 bf16
const TOKENS_PER_BLOCK: u32 = 16;

struct Engine {
    scheduler: PdScheduler,
    worker: PdWorker,
    cache: HostKvCache,
}

fn main() {
    let rounds = std::env::args().skip(1).find_map(|text| text.parse().ok()).unwrap_or(1);
    println!("{rounds} rounds of {} MiB; GB/s, medians", TOTAL_BYTES >> 20);
    if std::env::args().any(|text| text == "sweep") {
        sweep("16 KiB runs, packed", "LPBNHC", "packed_run_bytes = 65536", 4, 4, rounds);
        sweep("512 KiB runs", "BLPNHC", "", 8, 8, rounds);
        return;
    }
    if std::env::args().any(|text| text == "small") {
        for blocks in [1, 2, 4, 8, 32] {
            small(blocks, rounds, &path());
        }
        return;
    }
    for (name, layout, layers, heads) in [
        ("16 KiB runs", "LPBNHC", 4, 4),
        ("64 KiB runs", "BLPNHC", 1, 8),
        ("512 KiB runs", "BLPNHC", 8, 8),
        ("2 MiB runs", "BLPNHC", 32, 8),
    ] {
        measure(name, layout, layers, heads, rounds, &path());
    }
}

/// The way that the command line names.
fn path() -> String {
    let known = ["uds", "cma", "shm"];
    std::env::args().find(|text| known.contains(&text.as_str())).unwrap_or_else(|| "tcp".to_owned())
}

/// What moves the same bytes without anything around it.
enum Raw {
    Sockets(Box<RawPair>),
    Copy { source: Vec<u8>, target: Vec<u8>, block_bytes: usize },
}

impl Raw {
    fn new(path: &str, block_bytes: usize) -> Self {
        match path {
            "cma" | "shm" => Self::Copy { source: vec![1; TOTAL_BYTES], target: vec![2; TOTAL_BYTES], block_bytes },
            _ => Self::Sockets(Box::new(RawPair::new(2, TOTAL_BYTES, block_bytes, 512 << 10))),
        }
    }

    fn run(&mut self) {
        match self {
            Self::Sockets(pair) => pair.run(TOTAL_BYTES),
            Self::Copy { source, target, block_bytes } => {
                let blocks = TOTAL_BYTES / *block_bytes;
                for (from, to) in scattered(blocks, 7919).into_iter().zip(scattered(blocks, 104_729)) {
                    let from = &source[from * *block_bytes..][..*block_bytes];
                    target[to * *block_bytes..][..*block_bytes].copy_from_slice(from);
                }
                std::hint::black_box(target);
            }
        }
    }
}

/// Hand-overs of a few blocks of 64 KiB each, one at a time.
fn small(blocks: u32, rounds: usize, path: &str) {
    let extra = ways(path);
    let mut prefill = engine("prefill", "BLPNHC", shape(1, 8, 64), &extra);
    let mut decode = engine("decode", "BLPNHC", shape(1, 8, 64), &extra);
    let ids: Vec<BlockId> = (0..blocks).map(|id| BlockId::new(id * 37 % 64)).collect();
    let mut figures = Vec::new();
    for round in 0..rounds.max(1) {
        let start = Instant::now();
        hand_over(&mut prefill, &mut decode, &ids, &ids, round);
        figures.push(start.elapsed().as_secs_f64() * 1e6);
    }
    figures.sort_unstable_by(f64::total_cmp);
    let at = |part: f64| figures[((figures.len() - 1) as f64 * part) as usize];
    println!("{:>6} KiB: p50 {:6.0} us   p90 {:6.0} us   least {:6.0} us", blocks * 64, at(0.5), at(0.9), at(0.0));
}

/// Allows one way, and what it needs beside it.
fn ways(path: &str) -> String {
    if path == "tcp" { "paths = ['tcp']".to_owned() } else { format!("paths = ['{path}', 'uds']") }
}

/// Hand-overs with each number of movers and of posts in flight, in turn.
fn sweep(name: &str, layout: &str, extra: &str, layers: u16, heads: u16, rounds: usize) {
    println!("\n{name}\n  movers  posts   GB/s");
    let shape = |blocks| shape(layers, heads, blocks);
    let blocks = (TOTAL_BYTES as u64 / shape(1).block_bytes()) as u32;
    let order = |step| scattered(blocks as usize, step).into_iter().map(|id| BlockId::new(id as u32)).collect();
    let (source, target): (Vec<BlockId>, Vec<BlockId>) = (order(7919), order(104_729));
    let mut cases = Vec::new();
    for movers in [1, 2, 4] {
        for posts in [1, 2, 4, 8, 16] {
            let extra = format!("{extra}\nmovers = {movers}\nposts_in_flight = {posts}");
            let extra = format!("{extra}\npaths = ['tcp']");
            let engines = ["prefill", "decode"].map(|role| engine(role, layout, shape(blocks), &extra));
            cases.push((movers, posts, engines, Vec::new()));
        }
    }
    for round in 0..=rounds {
        for (_, _, [prefill, decode], found) in &mut cases {
            let gbps = time(|| hand_over(prefill, decode, &source, &target, round));
            if round > 0 || rounds == 0 {
                found.push(gbps);
            }
        }
    }
    for (movers, posts, _, mut found) in cases {
        println!("  {movers:>6} {posts:>6} {:>6.2}", median(&mut found));
    }
}

fn shape(layers: u16, heads: u16, blocks: u32) -> KvShape {
    KvShape { layers, blocks, heads, tokens_per_block: TOKENS_PER_BLOCK, run_bytes: vec![RUN_BYTES; 2] }
}

fn measure(name: &str, layout: &str, layers: u16, heads: u16, rounds: usize, path: &str) {
    let shape = |blocks| shape(layers, heads, blocks);
    let blocks = (TOTAL_BYTES as u64 / shape(1).block_bytes()) as u32;
    let run_bytes = match layout {
        "LPBNHC" => (shape(1).block_bytes() / u64::from(layers) / 2) as usize,
        _ => shape(1).block_bytes() as usize,
    };
    let extra = ways(path);
    let mut prefill = engine("prefill", layout, shape(blocks), &extra);
    let mut decode = engine("decode", layout, shape(blocks), &extra);
    let order = |step| scattered(blocks as usize, step).into_iter().map(|id| BlockId::new(id as u32)).collect();
    let (source, target): (Vec<BlockId>, Vec<BlockId>) = (order(7919), order(104_729));
    let mut raw = Raw::new(path, run_bytes);
    let mut figures: [Vec<f64>; 3] = Default::default();
    for round in 0..=rounds {
        let times = [
            time(|| hand_over(&mut prefill, &mut decode, &source, &target, round)),
            time(|| digest_twice(&prefill.cache, &source)),
            time(|| raw.run()),
        ];
        // The first round wakes everything.
        if round > 0 || rounds == 0 {
            figures.iter_mut().zip(times).for_each(|(figure, gbps)| figure.push(gbps));
        }
    }
    let mut ratios: Vec<f64> = figures[0].iter().zip(&figures[2]).map(|(ours, raw)| ours / raw).collect();
    let [ours, digest, plain] = figures.map(|mut figure| median(&mut figure));
    let ratio = median(&mut ratios);
    println!(
        "{name:>12}: hand-over {ours:5.2}   digest alone {digest:5.2}   raw {plain:5.2}   hand-over / raw {ratio:4.2}"
    );
}

fn engine(role: &str, layout: &str, shape: KvShape, extra: &str) -> Engine {
    let text = format!("engine_id = '{role}'\nrole = '{role}'\n{extra}");
    let mut raw = RawConfig::from_toml(&text).expect("TOML");
    raw.psk = Some(PreSharedKey::new(&[7; 32], "bench").expect("a legal key"));
    let config = ConnectorConfig::try_from((raw, Incarnation::new(1))).expect("a legal configuration");
    let manifest = Manifest {
        model: "bench".into(),
        model_fingerprint: Fingerprint::default(),
        kv_dtype: manifest::KvDtype::Bf16,
        layers: shape.layers,
        kv_heads: shape.heads,
        head_size_k: RUN_BYTES / 2,
        head_size_v: RUN_BYTES / 2,
        planes: Planes::KeyValue,
        rope: Rope { style: RopeStyle::None, theta_bits: 0, rotary_elements: 0, scaling: "none".into() },
        scales: Scales { per: ScalePer::None, fingerprint: Fingerprint::default() },
        hash_scheme: "none".into(),
        digest_scheme: "kvferry-1".into(),
        options: Options::default(),
    };
    let cache = HostKvCache::shareable(shape, KvDtype::Bf16, layout.parse().expect("an order"), Placement::OneRegion)
        .expect("memory");
    let shard = Shard::default();
    let transport =
        open_transport(&config, greeting(&config, &manifest, shard, cache.layout()).expect("it fits")).expect("a port");
    let parts =
        PdWorkerParts { config, manifest, shard, cache: cache.clone().into(), metrics: Arc::new(Metrics::new()) };
    let worker = PdWorker::start(parts, transport).expect("a worker");
    let tokens_per_block = NonZeroU32::new(TOKENS_PER_BLOCK).expect("not zero");
    let scheduler = PdScheduler::new(SchedulerOptions { tokens_per_block, reporters: 1, layerwise: false });
    Engine { scheduler, worker, cache }
}

/// Loads all tokens, and returns when decode has them verified and prefill is released.
fn hand_over(prefill: &mut Engine, decode: &mut Engine, source: &[BlockId], target: &[BlockId], round: usize) {
    let tokens = source.len() as u32 * TOKENS_PER_BLOCK;
    let (id, transfer) = (RequestId::new(&round.to_string()), TransferId::new(round as u128 + 1));
    let params = Some(TransferParams::Fetch {
        transfer,
        from: vec![prefill.worker.local_address()],
        engine: None,
        ask: b"ask".to_vec(),
    });
    let fetch = Request { id: id.clone(), prompt_tokens: tokens, params, hashes: Arc::default() };
    decode.scheduler.allocated(&fetch, target, 0, tokens).expect("it fits");
    step(decode, &ScheduledStep::default());
    let (peer, _) = prefill.worker.messages().recv().expect("the question");
    let params = Some(TransferParams::Keep { transfer, to: Some(peer), readers: 1 });
    let keep = Request { id: id.clone(), prompt_tokens: tokens, params, hashes: Arc::default() };
    prefill.scheduler.allocated(&keep, source, 0, 0).expect("it fits");
    let computed = ScheduledRequest { id: id.clone(), tokens: 0..tokens, blocks: source.to_vec() };
    step(prefill, &ScheduledStep { requests: vec![computed] });
    prefill.scheduler.finished(&id, source, EngineFinish::Complete);
    while decode.scheduler.has_pending() || prefill.scheduler.has_pending() {
        for engine in [&mut *decode, &mut *prefill] {
            step(engine, &ScheduledStep::default());
        }
        std::thread::sleep(std::time::Duration::from_micros(if tokens > 1024 { 200 } else { 20 }));
    }
    decode.scheduler.finished(&id, target, EngineFinish::Complete);
}

fn step(engine: &mut Engine, scheduled: &ScheduledStep) {
    let meta = engine.scheduler.build_step(scheduled);
    engine.worker.begin_step(meta).expect("a step");
    engine.worker.wait_saved();
    let applied = engine.scheduler.apply(vec![engine.worker.poll()]);
    assert!(applied.failed.is_empty(), "{applied:?}");
}

/// What a hand-over digests: its bytes, once on either side.
fn digest_twice(cache: &HostKvCache, blocks: &[BlockId]) {
    let shape = cache.layout().shape();
    let tokens = blocks.len() as u32 * shape.tokens_per_block;
    let view = CacheView { layout: cache.layout(), shard: Shard::default(), blocks, first_token: 0 };
    let selection = Selection { layers: 0..shape.layers, heads: 0..shape.heads, tokens: 0..tokens };
    let regions = cache.regions().iter().map(|region| (region.as_ptr(), region.len())).collect();
    // SAFETY: the cache is alive, and between hand-overs nobody writes its pages.
    let table = unsafe { RegionTable::new(regions) };
    let once = || copy::digest(&view, &selection, &table).expect("the view holds all of it");
    assert_eq!(once(), once());
}

/// Runs once and returns GB/s.
fn time(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    TOTAL_BYTES as f64 / start.elapsed().as_secs_f64() / 1e9
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}
