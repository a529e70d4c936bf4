//! How much of a transfer hides behind the compute of its prompt, and what it costs that compute.
//!
//! Two workers over a limited link; between them a model of 32 layers that is a loop of multiply-adds over weights in the L2 cache,
//! of a set time for each layer, and that stores real K/V. The link is set so that the transfer takes half of the compute's time,
//! the same, and double. Groups of layers are sized as measured, or fixed at 1, 4, 8 and all layers. All of it in turn in each
//! round, each beside the same compute without a transfer; medians over rounds.
//!
//! - *exposed*: from the end of the last layer's compute until decode has the whole prompt verified, in ms;
//! - *of T*: that over the transfer's own time (bytes over the link's rate);
//! - *over LB*: by how much it exceeds the lower bound, `max(0, T - C)` and one layer on the link, in shares of that bound;
//! - *slower*: the time of prefill's compute with the transfer over that without; *cpu*: the same for its CPU time, which other
//!   work on the machine changes less; *waited*: the share of its time in which it was ready to run and another thread had the core,
//!   less what that was without the transfer. What is slower and neither of these was taken from the whole machine (a hypervisor);
//! - *writes*: how many.
//!
//! `cargo bench -p kvferry --bench overlap -- [rounds]`

use std::hint::black_box;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry::config::{ConnectorConfig, PreSharedKey, RawConfig};
use kvferry::contract::{
    EngineFinish, Ready, Request, RequestId, ScheduledRequest, ScheduledStep, Scheduler, TransferParams, Worker,
};
use kvferry::metrics::{Metrics, Side};
use kvferry::open_transport;
use kvferry::pd::{PdScheduler, PdWorker, PdWorkerParts, SchedulerOptions, greeting};
use kvferry_kernels::{HostKvCache, KvDtype, Placement, Slot, store_kv};
use kvferry_protocol::layout::{KvShape, Shard};
use kvferry_protocol::manifest::{self, Fingerprint, Manifest, Options, Planes, Rope, RopeStyle, ScalePer, Scales};
use kvferry_protocol::{BlockId, Incarnation, LayerId, TransferId};

const LAYERS: u16 = 32;
const HEADS: u16 = 8;
const HEAD_DIM: usize = 128;
const TOKENS_PER_BLOCK: u32 = 16;
const PROMPT: u32 = 512;
/// Tokens of one step.
const CHUNK: u32 = 256;
/// Compute of one layer of one chunk.
const LAYER: Duration = Duration::from_millis(4);

struct Engine {
    scheduler: PdScheduler,
    worker: PdWorker,
    cache: HostKvCache,
    metrics: Arc<Metrics>,
}

/// One way to hand over, with its engines and what was found in each round.
struct Case {
    name: String,
    prefill: Engine,
    decode: Engine,
    /// The transfer's time on the link.
    transfer_s: f64,
    found: Vec<Found>,
}

#[derive(Clone, Copy)]
struct Found {
    compute: Compute,
    alone: Compute,
    exposed_s: f64,
    writes: u64,
}

/// What the model thread took for a prompt, up to its last layer.
#[derive(Clone, Copy)]
struct Compute {
    wall_s: f64,
    cpu_s: f64,
    queued_s: f64,
}

impl Compute {
    fn waited(&self) -> f64 {
        self.queued_s / self.wall_s
    }
}

fn main() {
    let rounds = std::env::args().skip(1).find_map(|text| text.parse().ok()).unwrap_or(1);
    let mut model = Model::calibrated();
    let compute_s = LAYER.as_secs_f64() * f64::from(LAYERS) * f64::from(PROMPT / CHUNK);
    let bytes = u64::from(PROMPT) * shape().block_bytes() / u64::from(TOKENS_PER_BLOCK);
    println!("{rounds} rounds; {} MiB a prompt, {:.0} ms of compute; medians", bytes >> 20, compute_s * 1e3);
    for (link, factor) in [("half", 0.5), ("equal", 1.0), ("double", 2.0)] {
        let transfer_s = compute_s * factor;
        let gbps = bytes as f64 * 8.0 / transfer_s / 1e9;
        println!("\ntransfer {link} of compute: T = {:.0} ms at {gbps:.2} Gbit/s", transfer_s * 1e3);
        println!("  groups     exposed   of T   over LB   slower      cpu   waited   writes");
        let groups = [None, Some(1), Some(4), Some(8), Some(LAYERS)];
        let mut cases: Vec<Case> = groups.map(|group| Case::new(group, gbps, transfer_s)).into();
        for round in 0..=rounds {
            for case in &mut cases {
                let found = case.run(&mut model, round);
                // The first round wakes everything, and teaches the rates.
                if round > 0 || rounds == 0 {
                    case.found.push(found);
                }
            }
        }
        cases.iter().for_each(Case::print);
    }
}

impl Case {
    fn new(group: Option<u16>, gbps: f64, transfer_s: f64) -> Self {
        let name = match group {
            None => "measured".to_owned(),
            Some(LAYERS) => "all".to_owned(),
            Some(group) => group.to_string(),
        };
        // It stands for a network: nothing is to go past it through the host's memory.
        let mut extra = format!("paths = ['tcp']\nlink_gbps = {gbps:?}\n");
        if let Some(group) = group {
            extra.push_str(&format!("layer_group = {group}\n"));
        }
        Self { name, prefill: engine("prefill", &extra), decode: engine("decode", ""), transfer_s, found: Vec::new() }
    }

    fn run(&mut self, model: &mut Model, round: usize) -> Found {
        let (prefill, decode) = (&mut self.prefill, &mut self.decode);
        let blocks: Vec<BlockId> = (0..PROMPT / TOKENS_PER_BLOCK).map(BlockId::new).collect();
        let alone_id = RequestId::new(&format!("alone-{round}"));
        let (alone, _) = prefill_prompt(prefill, model, &alone_id, &blocks);
        prefill.scheduler.finished(&alone_id, &blocks, EngineFinish::Complete);

        let (id, transfer) = (RequestId::new(&round.to_string()), TransferId::new(round as u128 + 1));
        let from = vec![prefill.worker.local_address()];
        let params = Some(TransferParams::Fetch { transfer, from, engine: None, ask: b"ask".to_vec() });
        let fetch = Request { id: id.clone(), prompt_tokens: PROMPT, params, hashes: Arc::default() };
        decode.scheduler.allocated(&fetch, &blocks, 0, PROMPT).expect("it fits");
        turn(decode);
        let (peer, _) = prefill.worker.messages().recv().expect("the question");
        let params = Some(TransferParams::Keep { transfer, to: Some(peer), readers: 1 });
        let keep = Request { id: id.clone(), prompt_tokens: PROMPT, params, hashes: Arc::default() };
        prefill.scheduler.allocated(&keep, &blocks, 0, 0).expect("it fits");
        let writes = |engine: &Engine| engine.metrics.chunks_total.at(Side::Send).get();
        let before = writes(prefill);
        let (compute, last) = prefill_prompt(prefill, model, &id, &blocks);
        let mut exposed_s = None;
        prefill.scheduler.finished(&id, &blocks, EngineFinish::Complete);
        while decode.scheduler.has_pending() || prefill.scheduler.has_pending() {
            if turn(decode) {
                exposed_s.get_or_insert(last.elapsed().as_secs_f64());
            }
            turn(prefill);
            std::thread::sleep(Duration::from_micros(50));
        }
        decode.scheduler.finished(&id, &blocks, EngineFinish::Complete);
        Found { compute, alone, exposed_s: exposed_s.expect("the load was reported"), writes: writes(prefill) - before }
    }

    fn print(&self) {
        let exposed = median(self.found.iter().map(|found| found.exposed_s));
        let bound = |found: &Found| {
            let layer = self.transfer_s / f64::from(LAYERS) / f64::from(PROMPT / CHUNK);
            (self.transfer_s - found.compute.wall_s).max(0.0) + layer
        };
        println!(
            "  {:>8} {:>8.1} ms {:>4.1} %  {:>6.1} %  {:>5.1} %  {:>5.1} %  {:>5.2} %  {:>6.0}",
            self.name,
            exposed * 1e3,
            exposed / self.transfer_s * 100.0,
            (median(self.found.iter().map(|found| found.exposed_s / bound(found))) - 1.0) * 100.0,
            (median(self.found.iter().map(|found| found.compute.wall_s / found.alone.wall_s)) - 1.0) * 100.0,
            (median(self.found.iter().map(|found| found.compute.cpu_s / found.alone.cpu_s)) - 1.0) * 100.0,
            median(self.found.iter().map(|found| found.compute.waited() - found.alone.waited())) * 100.0,
            median(self.found.iter().map(|found| found.writes as f64)),
        );
    }
}

/// Computes a prompt in steps; returns what that took, and when the last layer was saved.
fn prefill_prompt(engine: &mut Engine, model: &mut Model, id: &RequestId, blocks: &[BlockId]) -> (Compute, Instant) {
    let (mut compute, mut last) = (Compute { wall_s: 0.0, cpu_s: 0.0, queued_s: 0.0 }, Instant::now());
    for start in (0..PROMPT).step_by(CHUNK as usize) {
        let tokens = start..start + CHUNK;
        let request = ScheduledRequest { id: id.clone(), tokens: tokens.clone(), blocks: blocks.to_vec() };
        let meta = engine.scheduler.build_step(&ScheduledStep { requests: vec![request] });
        let slot = |token| Slot::of_position(token as usize, blocks, TOKENS_PER_BLOCK).expect("it has a block");
        let slots: Vec<Slot> = tokens.map(slot).collect();
        let (began, cpu, queued) = (Instant::now(), cpu_seconds(), queued_seconds());
        engine.worker.begin_step(meta).expect("a step");
        for layer in 0..LAYERS {
            model.layer();
            store_kv(&engine.cache, layer, &slots, &model.rows, Some(&model.rows)).expect("free pages");
            engine.worker.save_layer(LayerId::new(layer), Ready::Now);
        }
        last = Instant::now();
        compute.wall_s += last.duration_since(began).as_secs_f64();
        compute.cpu_s += cpu_seconds() - cpu;
        compute.queued_s += queued_seconds() - queued;
        engine.worker.wait_saved();
        engine.scheduler.apply(vec![engine.worker.poll()]);
    }
    (compute, last)
}

/// CPU time of this thread.
fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// For how long this thread was ready to run and did not: the second number of its schedstat, in ns. 0 where the kernel keeps none.
fn queued_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_whitespace().nth(1).and_then(|ns| ns.parse::<f64>().ok()).unwrap_or(0.0) / 1e9
}

/// A step without compute; returns whether a load is complete.
fn turn(engine: &mut Engine) -> bool {
    let meta = engine.scheduler.build_step(&ScheduledStep::default());
    engine.worker.begin_step(meta).expect("a step");
    engine.worker.wait_saved();
    let applied = engine.scheduler.apply(vec![engine.worker.poll()]);
    assert!(applied.failed.is_empty(), "{applied:?}");
    !applied.loaded.is_empty()
}

/// What takes a layer's time.
struct Model {
    weights: Vec<f32>,
    passes: u32,
    rows: Vec<f32>,
}

impl Model {
    fn calibrated() -> Self {
        let rows = vec![0.5; CHUNK as usize * usize::from(HEADS) * HEAD_DIM];
        let mut model = Self { weights: vec![0.25; 64 << 10], passes: 64, rows };
        // The quickest of some: what else runs here makes the others longer.
        let quickest = (0..32).map(|_| {
            let began = Instant::now();
            model.layer();
            began.elapsed()
        });
        let quickest = quickest.min().expect("some").as_secs_f64();
        model.passes = (f64::from(model.passes) * LAYER.as_secs_f64() / quickest).round().max(1.0) as u32;
        model
    }

    fn layer(&mut self) {
        for pass in 0..self.passes {
            let factor = black_box(1.0 + f32::from(pass as u16) * 1e-6);
            let mut sums = [0.0_f32; 64];
            for weights in self.weights.chunks_exact(64) {
                sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum = *sum * factor + *weight);
            }
            black_box(sums);
        }
    }
}

fn shape() -> KvShape {
    let run_bytes = vec![2 * HEAD_DIM as u32; 2];
    let blocks = PROMPT / TOKENS_PER_BLOCK;
    KvShape { layers: LAYERS, blocks, heads: HEADS, tokens_per_block: TOKENS_PER_BLOCK, run_bytes }
}

fn engine(role: &str, extra: &str) -> Engine {
    let mut raw = RawConfig::from_toml(&format!("engine_id = '{role}'\nrole = '{role}'\n{extra}")).expect("TOML");
    raw.psk = Some(PreSharedKey::new(&[7; 32], "bench").expect("a legal key"));
    let config = ConnectorConfig::try_from((raw, Incarnation::new(1))).expect("a legal configuration");
    let manifest = Manifest {
        model: "bench".into(),
        model_fingerprint: Fingerprint::default(),
        kv_dtype: manifest::KvDtype::Bf16,
        layers: LAYERS,
        kv_heads: HEADS,
        head_size_k: HEAD_DIM as u32,
        head_size_v: HEAD_DIM as u32,
        planes: Planes::KeyValue,
        rope: Rope { style: RopeStyle::None, theta_bits: 0, rotary_elements: 0, scaling: "none".into() },
        scales: Scales { per: ScalePer::None, fingerprint: Fingerprint::default() },
        hash_scheme: "none".into(),
        digest_scheme: "kvferry-1".into(),
        options: Options::default(),
    };
    let order = "BLPNHC".parse().expect("an order");
    let cache = HostKvCache::new(shape(), KvDtype::Bf16, order, Placement::OneRegion).expect("memory");
    let shard = Shard::default();
    let greeting = greeting(&config, &manifest, shard, cache.layout()).expect("it fits");
    let transport = open_transport(&config, greeting).expect("a port");
    let metrics = Arc::new(Metrics::new());
    let parts = PdWorkerParts { config, manifest, shard, cache: cache.clone().into(), metrics: Arc::clone(&metrics) };
    let worker = PdWorker::start(parts, transport).expect("a worker");
    let tokens_per_block = NonZeroU32::new(TOKENS_PER_BLOCK).expect("not zero");
    let scheduler = PdScheduler::new(SchedulerOptions { tokens_per_block, reporters: 1, layerwise: false });
    Engine { scheduler, worker, cache, metrics }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}
