//! What write-back costs a transfer, on a link that is limited: the same hand-over with and without it, and write-back alone.
//!
//! Three figures for each layout, taken in turn in the same rounds, in milliseconds:
//! - *transfer*: a prompt whose KV is computed already is loaded and verified; nothing is kept;
//! - *write-back*: the same blocks are copied to the tier; nothing is sent;
//! - *both*: the transfer as part of both, and the time until both are over.
//!
//! `cargo bench -p kvferry --bench write_back -- [rounds] [gbps]`

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry::config::{ConnectorConfig, PreSharedKey, RawConfig};
use kvferry::contract::{
    EngineFinish, Request, RequestId, ScheduledRequest, ScheduledStep, Scheduler, TransferParams, Worker,
};
use kvferry::metrics::Metrics;
use kvferry::open_transport;
use kvferry::pd::{PdScheduler, PdWorker, PdWorkerParts, SchedulerOptions, greeting};
use kvferry::pool::BlockHash;
use kvferry::tier::{FrameIndex, HostTier};
use kvferry_kernels::{HostKvCache, KvDtype, Placement};
use kvferry_protocol::layout::{KvShape, Shard};
use kvferry_protocol::manifest::{self, Fingerprint, Manifest, Options, Planes, Rope, RopeStyle, ScalePer, Scales};
use kvferry_protocol::{BlockId, Incarnation, TransferId};
use kvferry_transport::testing::scattered;

const TOTAL_BYTES: u64 = 64 << 20;
const RUN_BYTES: u32 = 256; // one head of 128 bf16
const TOKENS_PER_BLOCK: u32 = 16;

struct Engine {
    scheduler: PdScheduler,
    worker: PdWorker,
    metrics: Arc<Metrics>,
}

/// One prompt: its blocks on both sides, and who wants it.
struct Prompt<'a> {
    number: u128,
    source: &'a [BlockId],
    target: &'a [BlockId],
    send: bool,
    keep: bool,
}

fn main() {
    let mut numbers = std::env::args().skip(1).filter_map(|text| text.parse::<f64>().ok());
    let (rounds, gbps) = (numbers.next().unwrap_or(1.0) as usize, numbers.next().unwrap_or(4.0));
    println!("{rounds} rounds of {} MiB over {gbps} Gbit/s; milliseconds, medians", TOTAL_BYTES >> 20);
    for (name, layouts, layers, heads) in [
        ("2 MiB blocks as they lie", ("BLPNHC", "BLPNHC"), 32, 8),
        ("512 KiB blocks, packed", ("LPBNHC", "BHLPNC"), 8, 8),
    ] {
        measure(name, layouts, layers, heads, rounds, gbps);
    }
}

fn measure(name: &str, layouts: (&str, &str), layers: u16, heads: u16, rounds: usize, gbps: f64) {
    let shape =
        |blocks| KvShape { layers, blocks, heads, tokens_per_block: TOKENS_PER_BLOCK, run_bytes: vec![RUN_BYTES; 2] };
    let blocks = (TOTAL_BYTES / shape(1).block_bytes()) as u32;
    let mut prefill = engine("prefill", layouts.0, shape(blocks), gbps, TOTAL_BYTES);
    let mut decode = engine("decode", layouts.1, shape(blocks), gbps, 0);
    let order = |step| scattered(blocks as usize, step).into_iter().map(|id| BlockId::new(id as u32)).collect();
    let (source, target): (Vec<BlockId>, Vec<BlockId>) = (order(7919), order(104_729));
    let mut figures: [Vec<f64>; 4] = Default::default();
    // Of each round's own figures, so that what changes between rounds does not count.
    let mut ratios: [Vec<f64>; 2] = Default::default();
    let mut number = 0;
    for round in 0..=rounds {
        let mut go = |send, keep| {
            number += 1;
            run(&mut prefill, &mut decode, &Prompt { number, source: &source, target: &target, send, keep })
        };
        let ((alone, _), (_, kept), (transfer, both)) = (go(true, false), go(false, true), go(true, true));
        // The first round wakes everything.
        if round > 0 || rounds == 0 {
            figures.iter_mut().zip([alone, kept, transfer, both]).for_each(|(figure, ms)| figure.push(ms));
            ratios[0].push(transfer / alone);
            ratios[1].push(both / alone.max(kept));
        }
    }
    let [alone, kept, transfer, both] = figures.map(|mut figure| median(&mut figure));
    let ratios = ratios.map(|mut ratio| median(&mut ratio));
    let m = prefill.metrics.snapshot();
    println!(
        "{name:>25}: transfer {alone:6.1}   write-back {kept:6.1}   both: transfer {transfer:6.1}, all {both:6.1}\n\
         {:>25}  transfer with / without {:5.3}   both / the longer {:5.3}   blocks kept {}, dropped {}",
        "",
        ratios[0],
        ratios[1],
        m.tier_stored_blocks_total,
        m.tier_dropped_blocks_total.total(),
    );
}

/// Runs one prompt and returns when decode had it, and when all was over, in milliseconds.
fn run(prefill: &mut Engine, decode: &mut Engine, prompt: &Prompt<'_>) -> (f64, f64) {
    let tokens = prompt.source.len() as u32 * TOKENS_PER_BLOCK;
    let (id, transfer) = (RequestId::new(&prompt.number.to_string()), TransferId::new(prompt.number));
    let began = Instant::now();
    let mut params = None;
    if prompt.send {
        let from = prefill.worker.local_address();
        let fetch = Some(TransferParams::Fetch { transfer, from: vec![from], engine: None, ask: b"ask".to_vec() });
        let fetch = Request { id: id.clone(), prompt_tokens: tokens, params: fetch, hashes: Arc::default() };
        decode.scheduler.allocated(&fetch, prompt.target, 0, tokens).expect("it fits");
        step(decode, &ScheduledStep::default());
        let (peer, _) = prefill.worker.messages().recv().expect("the question");
        params = Some(TransferParams::Keep { transfer, to: Some(peer), readers: 1 });
    }
    let hash = |position: usize| {
        let mut bytes = [0; 32];
        bytes[..16].copy_from_slice(&prompt.number.to_le_bytes());
        bytes[16..24].copy_from_slice(&(position as u64).to_le_bytes());
        BlockHash::new(bytes)
    };
    let hashes = if prompt.keep { (0..prompt.source.len()).map(hash).collect() } else { Arc::default() };
    let request = Request { id: id.clone(), prompt_tokens: tokens, params, hashes };
    prefill.scheduler.allocated(&request, prompt.source, 0, 0).expect("it fits");
    let computed = ScheduledRequest { id: id.clone(), tokens: 0..tokens, blocks: prompt.source.to_vec() };
    step(prefill, &ScheduledStep { requests: vec![computed] });
    // The request runs on until its blocks are kept, as one in an engine with free blocks would.
    let ms = |at: Instant| at.duration_since(began).as_secs_f64() * 1e3;
    let mut loaded = None;
    while decode.scheduler.has_pending() || prefill.scheduler.has_pending() {
        if step(decode, &ScheduledStep::default()) {
            loaded = Some(Instant::now());
        }
        step(prefill, &ScheduledStep::default());
        std::thread::sleep(Duration::from_micros(200));
    }
    let end = Instant::now();
    prefill.scheduler.finished(&id, prompt.source, EngineFinish::Complete);
    decode.scheduler.finished(&id, prompt.target, EngineFinish::Complete);
    (loaded.map_or(0.0, ms), ms(end))
}

/// One step; whether it brought a load.
fn step(engine: &mut Engine, scheduled: &ScheduledStep) -> bool {
    let meta = engine.scheduler.build_step(scheduled);
    engine.worker.begin_step(meta).expect("a step");
    engine.worker.wait_saved();
    let applied = engine.scheduler.apply(vec![engine.worker.poll()]);
    assert!(applied.failed.is_empty(), "{applied:?}");
    !applied.loaded.is_empty()
}

fn engine(role: &str, layout: &str, shape: KvShape, gbps: f64, tier_bytes: u64) -> Engine {
    let text = format!(
        "engine_id = '{role}'\nrole = '{role}'\npaths = ['tcp']\nlink_gbps = {gbps:.3}\ntier_bytes = {tier_bytes}"
    );
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
    let cache = HostKvCache::new(shape, KvDtype::Bf16, layout.parse().expect("an order"), Placement::OneRegion)
        .expect("memory");
    let shard = Shard::default();
    let transport =
        open_transport(&config, greeting(&config, &manifest, shard, cache.layout()).expect("it fits")).expect("a port");
    let (metrics, frames) = (Arc::new(Metrics::new()), HostTier::frames(cache.layout(), tier_bytes));
    let parts = PdWorkerParts { config, manifest, shard, cache: cache.into(), metrics: Arc::clone(&metrics) };
    let worker = PdWorker::start(parts, transport).expect("a worker");
    let tokens_per_block = NonZeroU32::new(TOKENS_PER_BLOCK).expect("not zero");
    let mut scheduler = PdScheduler::new(SchedulerOptions { tokens_per_block, reporters: 1, layerwise: false });
    if frames > 0 {
        let index = FrameIndex::new(frames).expect("frames");
        scheduler = scheduler.with_tier(Box::new(index), Arc::clone(&metrics));
    }
    Engine { scheduler, worker, metrics }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}
