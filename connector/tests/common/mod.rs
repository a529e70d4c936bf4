//! An engine without a model: it stores keys that say where they belong, step by step, through the contract.
#![allow(dead_code, clippy::allow_attributes, reason = "each test binary uses a part of it")]

use std::num::NonZeroU32;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry::RawKvCache;
use kvferry::config::{ConnectorConfig, PreSharedKey, RawConfig, SameHost};
use kvferry::contract::{
    Applied, EngineFinish, Hold, Match, Request, RequestId, ScheduledRequest, ScheduledStep, Scheduler, StepMeta,
    TransferParams, Worker,
};
use kvferry::metrics::Metrics;
use kvferry::pd::{PdScheduler, PdWorker, PdWorkerParts, SchedulerOptions, greeting};
use kvferry::tier::{FrameIndex, Tier};
use kvferry_kernels::copy::{self, RegionTable};
use kvferry_kernels::{HostKvCache, KvDtype, Placement, Slot, store_kv};
use kvferry_protocol::layout::{CacheView, KvLayout, KvShape, LayoutOrder, Selection, Shard, plan};
use kvferry_protocol::manifest::{self, Manifest, Planes, Rope, RopeStyle, ScalePer, Scales};
use kvferry_protocol::{BlockId, Incarnation, LayerId};
use kvferry_transport::{PeerAddress, Transport};

pub(crate) const LAYERS: u16 = 6;
pub(crate) const HEADS: u16 = 2;
pub(crate) const DIM: usize = 8;

/// How long a test waits for what must come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// One engine: a scheduler half, a worker half and a cache.
pub(crate) struct Engine {
    pub(crate) scheduler: PdScheduler,
    pub(crate) worker: PdWorker,
    pub(crate) cache: HostKvCache,
    pub(crate) metrics: Arc<Metrics>,
}

/// What differs between engines.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) name: &'static str,
    pub(crate) role: &'static str,
    pub(crate) order: &'static str,
    pub(crate) layout: &'static str,
    pub(crate) tokens_per_block: u32,
    pub(crate) incarnation: u64,
    pub(crate) model: &'static str,
    pub(crate) extra: &'static str,
    /// The cluster's key; with one the engines speak TCP.
    pub(crate) psk: Option<&'static str>,
    /// Give the connector the cache's addresses only, as an engine with its own memory does.
    pub(crate) raw: bool,
}

impl Setup {
    pub(crate) fn prefill() -> Self {
        Self {
            name: "prefill",
            role: "prefill",
            order: "decode-first",
            layout: "LPBNHC",
            tokens_per_block: 4,
            incarnation: 1,
            model: "toy",
            extra: "",
            psk: None,
            raw: false,
        }
    }

    pub(crate) fn decode() -> Self {
        Self { name: "decode", role: "decode", layout: "BHLPNC", ..Self::prefill() }
    }
}

pub(crate) fn manifest(model: &str) -> Manifest {
    Manifest {
        model: model.into(),
        // Weights of their own for each name.
        model_fingerprint: manifest::Fingerprint([model.len() as u8; 32]),
        kv_dtype: manifest::KvDtype::F32,
        layers: LAYERS,
        kv_heads: HEADS,
        head_size_k: DIM as u32,
        head_size_v: DIM as u32,
        planes: Planes::KeyValue,
        rope: Rope {
            style: RopeStyle::Half,
            theta_bits: 10_000_f64.to_bits(),
            rotary_elements: DIM as u32,
            scaling: "none".into(),
        },
        scales: Scales { per: ScalePer::None, fingerprint: manifest::Fingerprint::default() },
        hash_scheme: "test".into(),
        digest_scheme: "kvferry-1".into(),
        options: manifest::Options::default(),
    }
}

/// Makes an engine's transport from its configuration and greeting.
pub(crate) type MakeTransport<'a> = &'a dyn Fn(&ConnectorConfig, bytes::Bytes) -> Arc<dyn Transport>;

impl Engine {
    pub(crate) fn new(setup: &Setup, make: MakeTransport<'_>) -> Self {
        Self::with_tier(setup, make, |_| None)
    }

    /// An engine with the tier that `tier` makes for its cache.
    pub(crate) fn with_tier(
        setup: &Setup,
        make: MakeTransport<'_>,
        tier: impl FnOnce(&KvLayout) -> Option<Arc<dyn Tier>>,
    ) -> Self {
        let text = format!(
            "engine_id = \"{}\"\nrole = \"{}\"\norder = \"{}\"\ntransport = \"{}\"\n{}",
            setup.name,
            setup.role,
            setup.order,
            if setup.psk.is_some() { "tcp" } else { "loopback" },
            setup.extra
        );
        let mut raw = RawConfig::from_toml(&text).unwrap();
        raw.psk = setup.psk.map(|key| PreSharedKey::new(key.as_bytes(), "the test").unwrap());
        let config = ConnectorConfig::try_from((raw, Incarnation::new(setup.incarnation))).unwrap();
        let shape = KvShape {
            layers: LAYERS,
            blocks: 64,
            heads: HEADS,
            tokens_per_block: setup.tokens_per_block,
            run_bytes: vec![4 * DIM as u32; 2],
        };
        let order: LayoutOrder = setup.layout.parse().unwrap();
        let cache = HostKvCache::shareable(shape, KvDtype::F32, order, Placement::OneRegion).unwrap();
        let (manifest, shard) = (manifest(setup.model), Shard::default());
        let transport = make(&config, greeting(&config, &manifest, shard, cache.layout()).unwrap());
        let given = if setup.raw {
            let regions: Vec<_> = cache.regions().iter().map(|region| (region.as_ptr(), region.len())).collect();
            // SAFETY: the engine keeps the cache for longer than the worker, and keeps to the rules of loads and saves.
            unsafe { RawKvCache::new(cache.layout().clone(), KvDtype::F32, &regions) }.unwrap().into()
        } else {
            cache.clone().into()
        };
        let metrics = Arc::new(Metrics::new());
        let (layerwise, every) = (config.layerwise(), config.limits().write_back_blocks);
        let in_place = config.network().same_host == SameHost::InPlace;
        let parts = PdWorkerParts { config, manifest, shard, cache: given, metrics: Arc::clone(&metrics) };
        let tier = tier(cache.layout());
        let frames = tier.as_ref().map(|tier| tier.memory().layout().shape().blocks);
        let worker = PdWorker::start_with_tier(parts, transport, tier).unwrap();
        let tokens_per_block = NonZeroU32::new(setup.tokens_per_block).unwrap();
        let mut scheduler =
            PdScheduler::new(SchedulerOptions { tokens_per_block, reporters: 1, layerwise }).with_returns(every);
        if in_place {
            scheduler = scheduler.with_reading_in_place();
        }
        if let Some(frames) = frames {
            let index = Box::new(FrameIndex::new(frames).unwrap());
            scheduler = scheduler.with_tier(index, Arc::clone(&metrics));
        }
        Self { scheduler, worker, cache, metrics }
    }

    pub(crate) fn address(&self) -> PeerAddress {
        self.worker.local_address()
    }

    pub(crate) fn tokens_per_block(&self) -> u32 {
        self.cache.layout().shape().tokens_per_block
    }

    /// Blocks for `tokens` tokens, in an order that no plan may take for granted.
    pub(crate) fn blocks(&self, first: u32, tokens: u32) -> Vec<BlockId> {
        // 43 is prime, so these are distinct; neither rising nor falling nor adjacent.
        (0..tokens.div_ceil(self.tokens_per_block())).map(|i| BlockId::new(first + (i * 7 + 3) % 43)).collect()
    }

    /// One step that computes `tokens` of a request, layer by layer.
    pub(crate) fn prefill_step(&mut self, request: &Request, blocks: &[BlockId], tokens: Range<u32>) {
        let meta = self.step(request, blocks, tokens.clone());
        self.worker.begin_step(meta).unwrap();
        for layer in 0..LAYERS {
            self.store(layer, blocks, tokens.clone());
            self.worker.save_layer(LayerId::new(layer), kvferry::contract::Ready::Now);
        }
        self.worker.wait_saved();
    }

    pub(crate) fn step(&mut self, request: &Request, blocks: &[BlockId], tokens: Range<u32>) -> StepMeta {
        let scheduled = ScheduledRequest { id: request.id.clone(), tokens, blocks: blocks.to_vec() };
        self.scheduler.build_step(&ScheduledStep { requests: vec![scheduled] })
    }

    pub(crate) fn idle_step(&mut self) -> Applied {
        let meta = self.scheduler.build_step(&ScheduledStep::default());
        self.worker.begin_step(meta).unwrap();
        let results = self.worker.poll();
        self.scheduler.apply(vec![results])
    }

    /// Steps until `done` likes what came of it.
    pub(crate) fn idle_until(&mut self, what: &str, mut done: impl FnMut(&Applied) -> bool) -> Applied {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let applied = self.idle_step();
            if done(&applied) {
                return applied;
            }
            assert!(Instant::now() < deadline, "{what} did not come");
            std::thread::yield_now();
        }
    }

    /// Stores keys and values that say which layer, token and head they are.
    pub(crate) fn store(&self, layer: u16, blocks: &[BlockId], tokens: Range<u32>) {
        self.store_as(layer, blocks, tokens, element);
    }

    /// Stores what `element` says of a layer, plane, head, token and place in the head.
    pub(crate) fn store_as(
        &self,
        layer: u16,
        blocks: &[BlockId],
        tokens: Range<u32>,
        element: impl Fn(u16, u32, u32, u32, u32) -> f32,
    ) {
        let element = &element;
        let slots: Vec<_> = tokens
            .clone()
            .map(|token| Slot::of_position(token as usize, blocks, self.tokens_per_block()).unwrap())
            .collect();
        let rows = |plane: u32| {
            tokens
                .clone()
                .flat_map(|token| (0..u32::from(HEADS)).map(move |head| (token, head)))
                .flat_map(|(token, head)| (0..DIM as u32).map(move |d| element(layer, plane, head, token, d)))
                .collect::<Vec<f32>>()
        };
        store_kv(&self.cache, layer, &slots, &rows(0), Some(&rows(1))).unwrap();
    }

    /// The bytes of a request's tokens, in one canonical order.
    pub(crate) fn read(&self, blocks: &[BlockId], tokens: u32) -> Vec<u8> {
        if tokens == 0 {
            return Vec::new();
        }
        let shape = KvShape { blocks: 1, tokens_per_block: tokens, ..self.cache.layout().shape().clone() };
        let packed = KvLayout::packed(shape, "BLPHNC".parse().unwrap()).unwrap();
        let source = CacheView { layout: self.cache.layout(), shard: Shard::default(), blocks, first_token: 0 };
        let one = [BlockId::new(0)];
        let target = CacheView { layout: &packed, shard: Shard::default(), blocks: &one, first_token: 0 };
        let selection = Selection { layers: 0..LAYERS, heads: 0..HEADS, tokens: 0..tokens };
        let plan = plan(&source, &target, &selection).unwrap();
        let mut out = vec![0_u8; plan.bytes() as usize];
        let _pages = self.cache.guard_read(blocks, 0..LAYERS).unwrap();
        let regions = self.cache.regions().iter().map(|region| (region.as_ptr(), region.len())).collect();
        // SAFETY: the cache is alive, and its pages are guarded for reading.
        let source = unsafe { RegionTable::new(regions) };
        let slice = NonNull::from(&mut out[..]);
        // SAFETY: the buffer outlives the table, and nobody else has it.
        let target = unsafe { RegionTable::new(vec![(slice.cast(), slice.len())]) };
        copy::copy(&plan, &source, &target).unwrap();
        out
    }

    pub(crate) fn finish(&mut self, request: &Request, blocks: &[BlockId], how: EngineFinish) -> Hold {
        self.scheduler.finished(&request.id, blocks, how)
    }

    /// All gauges of what a transfer holds are at zero.
    pub(crate) fn holds_nothing(&self) -> bool {
        let snapshot = self.metrics.snapshot();
        snapshot.transfers_live.total() == 0
            && snapshot.grants_live == 0
            && snapshot.leases_live == 0
            && snapshot.slab_pool_used_bytes == 0
            && snapshot.early_grants_live == 0
    }
}

fn element(layer: u16, plane: u32, head: u32, token: u32, d: u32) -> f32 {
    (u32::from(layer) * 100_000 + plane * 50_000 + head * 20_000 + token * 10 + d) as f32
}

pub(crate) fn fetch(id: &str, transfer: u128, prompt_tokens: u32, from: PeerAddress) -> Request {
    let params = TransferParams::Fetch {
        transfer: kvferry_protocol::TransferId::new(transfer),
        from: vec![from],
        engine: None,
        ask: b"please".to_vec(),
    };
    Request { id: RequestId::new(id), prompt_tokens, params: Some(params), hashes: Arc::default() }
}

pub(crate) fn keep(id: &str, transfer: u128, prompt_tokens: u32, to: Option<kvferry_protocol::PeerId>) -> Request {
    let params = TransferParams::Keep { transfer: kvferry_protocol::TransferId::new(transfer), to, readers: 1 };
    Request { id: RequestId::new(id), prompt_tokens, params: Some(params), hashes: Arc::default() }
}

/// Asks for all that is not here, and starts the load.
pub(crate) fn start_load(engine: &mut Engine, request: &Request, blocks: &[BlockId], local: u32) {
    let n = match engine.scheduler.matched_tokens(request, local) {
        Match::Async(n) => n.get(),
        other => panic!("{other:?}"),
    };
    engine.scheduler.allocated(request, blocks, local, n).unwrap();
    // What comes of it is for a later poll: it may come at once.
    let meta = engine.scheduler.build_step(&ScheduledStep::default());
    engine.worker.begin_step(meta).unwrap();
}

/// Steps both engines until neither holds anything for a transfer.
pub(crate) fn wait_until_free(a: &mut Engine, b: &mut Engine) {
    let deadline = Instant::now() + PATIENCE;
    while !(a.holds_nothing() && b.holds_nothing()) {
        a.idle_step();
        b.idle_step();
        assert!(Instant::now() < deadline, "{:?} {:?}", a.metrics.snapshot(), b.metrics.snapshot());
        std::thread::yield_now();
    }
}
