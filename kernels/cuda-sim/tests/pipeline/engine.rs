//! An engine without a model, whose cache is on a device or on the host: it stores bytes that say where they belong.

use std::num::NonZeroU32;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry::config::{ConnectorConfig, RawConfig};
use kvferry::contract::{Applied, Ready, Request, ScheduledRequest, ScheduledStep, Scheduler, StepMeta, Worker};
use kvferry::metrics::Metrics;
use kvferry::pd::{KvCache, PdScheduler, PdWorker, PdWorkerParts, SchedulerOptions, greeting};
use kvferry_kernels::copy::{self, RegionTable};
use kvferry_kernels::cuda::{CopyJob, DeviceRegions, Element};
use kvferry_kernels::device::{CopyEnd, Device, DeviceKvCache, DeviceMemory, Event, PinnedRegion, Stream};
use kvferry_kernels::{HostKvCache, HostRegion, KvDtype, Placement};
use kvferry_protocol::layout::{CacheView, CopyPlan, KvLayout, KvShape, Selection, Shard, plan};
use kvferry_protocol::manifest::{self, Manifest, Planes, Rope, RopeStyle, ScalePer, Scales};
use kvferry_protocol::{BlockId, Incarnation, LayerId};
use kvferry_transport::{FaultPlan, LoopbackConfig, LoopbackNetwork, Transport};

pub(crate) const LAYERS: u16 = 3;
pub(crate) const HEADS: u16 = 2;
/// Bytes of one token of one head of one plane.
const RUN: u32 = 16;
/// The longest prompt.
pub(crate) const TOKENS: u32 = 24;
pub(crate) const BLOCKS: u32 = 72;
/// How long a test waits for what must come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What differs between engines.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) name: &'static str,
    pub(crate) role: &'static str,
    pub(crate) layout: &'static str,
    pub(crate) tokens_per_block: u32,
    pub(crate) extra: String,
}

/// Where an engine's cache is: on a device, with the stream on which the engine computes, or on the host.
pub(crate) enum Place {
    Device(Arc<dyn Device>, Arc<dyn Stream>),
    Host,
}

pub(crate) struct Engine {
    pub(crate) scheduler: PdScheduler,
    pub(crate) worker: PdWorker,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) tokens_per_block: u32,
    pub(crate) free: Vec<BlockId>,
    /// What was told so far of any request.
    pub(crate) told: Applied,
    memory: Memory,
}

enum Memory {
    Host(HostKvCache),
    Device(OnDevice),
}

/// A device's cache, and what the engine's own work on it needs.
struct OnDevice {
    device: Arc<dyn Device>,
    stream: Arc<dyn Stream>,
    cache: DeviceKvCache,
    desks: Vec<Desk>,
    next: usize,
}

/// Memory for one batch of work: a whole prompt on the device and on the host, and the tables of each layer's copy.
struct Desk {
    prompt: DeviceMemory,
    tables: DeviceMemory,
    host: PinnedRegion,
    host_tables: PinnedRegion,
    /// Until this is passed the device uses it.
    busy: Option<Arc<dyn Event>>,
}

/// Tables of one layer's copy.
const TABLE_BYTES: usize = 1024;

fn shape(blocks: u32, tokens_per_block: u32) -> KvShape {
    KvShape { layers: LAYERS, blocks, heads: HEADS, tokens_per_block, run_bytes: vec![RUN; 2] }
}

/// A whole prompt in one piece: what a layer has is one run.
fn packed() -> KvLayout {
    KvLayout::packed(shape(1, TOKENS), "LBNHPC".parse().unwrap()).unwrap()
}

const PROMPT_BYTES: usize = LAYERS as usize * LAYER_BYTES;
const LAYER_BYTES: usize = HEADS as usize * 2 * RUN as usize * TOKENS as usize;
const TOKEN_BYTES: usize = LAYER_BYTES / TOKENS as usize;

/// The bytes of a transfer's prompt, as a packed one has them: unlike those of any other.
pub(crate) fn content(transfer: u64) -> Vec<u8> {
    let word = |at: u64| {
        let mut bits = transfer.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    };
    (0..PROMPT_BYTES as u64 / 8).flat_map(|at| word(at).to_le_bytes()).collect()
}

/// Where a layer's tokens lie in a packed prompt.
pub(crate) fn stretch(layer: u16, tokens: &Range<u32>) -> Range<usize> {
    let start = usize::from(layer) * LAYER_BYTES;
    start + tokens.start as usize * TOKEN_BYTES..start + tokens.end as usize * TOKEN_BYTES
}

fn manifest() -> Manifest {
    Manifest {
        model: "toy".into(),
        model_fingerprint: manifest::Fingerprint([3; 32]),
        kv_dtype: manifest::KvDtype::F16,
        layers: LAYERS,
        kv_heads: HEADS,
        head_size_k: RUN / 2,
        head_size_v: RUN / 2,
        planes: Planes::KeyValue,
        rope: Rope { style: RopeStyle::Half, theta_bits: 0, rotary_elements: RUN / 2, scaling: "none".into() },
        scales: Scales { per: ScalePer::None, fingerprint: manifest::Fingerprint::default() },
        hash_scheme: "test".into(),
        digest_scheme: "kvferry-1".into(),
        options: manifest::Options::default(),
    }
}

impl Engine {
    pub(crate) fn new(setup: &Setup, place: Place, network: &LoopbackNetwork) -> Self {
        let Setup { name, role, layout, tokens_per_block, extra } = setup;
        // A machine that does other things, too, may not run a thread for a while: nothing here is about time.
        let deadlines = "progress_deadline_ms = 30000\nverdict_timeout_ms = 30000\nabsent_deadline_ms = 30000\n";
        let text = format!("engine_id = \"{name}\"\nrole = \"{role}\"\ntransport = \"loopback\"\n{extra}{deadlines}");
        let raw = RawConfig::from_toml(&text).unwrap();
        let config = ConnectorConfig::try_from((raw, Incarnation::new(1))).unwrap();
        let (shape, order) = (shape(BLOCKS, *tokens_per_block), layout.parse().unwrap());
        let memory = match place {
            Place::Host => {
                let cache = HostKvCache::new(shape, KvDtype::F16, order, Placement::OneRegion);
                Memory::Host(cache.unwrap())
            }
            Place::Device(device, stream) => {
                let cache =
                    DeviceKvCache::allocate(Arc::clone(&device), Arc::clone(&stream), shape, Element::F16, order);
                let desks = (0..4).map(|_| Desk::new(&device)).collect();
                Memory::Device(OnDevice { device, stream, cache: cache.unwrap(), desks, next: 0 })
            }
        };
        let cache: KvCache = match &memory {
            Memory::Host(cache) => cache.clone().into(),
            Memory::Device(on) => on.cache.clone().into(),
        };
        let (manifest, shard) = (manifest(), Shard::default());
        let greeting = greeting(&config, &manifest, shard, cache.layout()).unwrap();
        let endpoint = network.endpoint(config.peer().clone(), greeting, LoopbackConfig::default(), FaultPlan::NONE);
        let transport: Arc<dyn Transport> = Arc::new(endpoint);
        let metrics = Arc::new(Metrics::new());
        let layerwise = config.layerwise();
        let parts = PdWorkerParts { config, manifest, shard, cache, metrics: Arc::clone(&metrics) };
        let worker = PdWorker::start(parts, transport).unwrap();
        let options =
            SchedulerOptions { tokens_per_block: NonZeroU32::new(*tokens_per_block).unwrap(), reporters: 1, layerwise };
        let free = (0..BLOCKS).map(BlockId::new).collect();
        let scheduler = PdScheduler::new(options);
        Self { scheduler, worker, metrics, tokens_per_block: *tokens_per_block, free, told: Applied::default(), memory }
    }

    pub(crate) fn take_blocks(&mut self, tokens: u32) -> Vec<BlockId> {
        // The last that were given back are taken first.
        let rest = self.free.len() - tokens.div_ceil(self.tokens_per_block) as usize;
        let mut blocks = self.free.split_off(rest);
        blocks.reverse();
        blocks
    }

    pub(crate) fn step(&mut self, request: &Request, blocks: &[BlockId], tokens: Range<u32>) -> StepMeta {
        let scheduled = ScheduledRequest { id: request.id.clone(), tokens, blocks: blocks.to_vec() };
        self.scheduler.build_step(&ScheduledStep { requests: vec![scheduled] })
    }

    pub(crate) fn idle_step(&mut self) {
        let meta = self.scheduler.build_step(&ScheduledStep::default());
        self.worker.begin_step(meta).unwrap();
        self.poll();
    }

    fn poll(&mut self) {
        let results = self.worker.poll();
        let Applied { loaded, failed, released, .. } = self.scheduler.apply(vec![results]);
        self.told.loaded.extend(loaded);
        self.told.failed.extend(failed);
        self.told.released.extend(released);
    }

    /// Steps until `done` likes what was told.
    pub(crate) fn idle_until(&mut self, what: &str, mut done: impl FnMut(&Applied) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(&self.told) {
            self.idle_step();
            assert!(Instant::now() < deadline, "{what} did not come: {:?}", self.metrics.snapshot());
            std::thread::yield_now();
        }
    }

    /// One step that computes some tokens of a prompt, layer by layer.
    pub(crate) fn prefill_step(&mut self, request: &Request, blocks: &[BlockId], tokens: Range<u32>, content: &[u8]) {
        let meta = self.step(request, blocks, tokens.clone());
        self.worker.begin_step(meta).unwrap();
        self.store(blocks, tokens, content, |worker, layer, ready| {
            worker.save_layer(LayerId::new(layer), ready);
        });
        self.worker.wait_saved();
        self.poll();
    }

    /// Stores some tokens of a packed prompt, layer by layer.
    pub(crate) fn store(
        &mut self,
        blocks: &[BlockId],
        tokens: Range<u32>,
        content: &[u8],
        mut each: impl FnMut(&mut PdWorker, u16, Ready),
    ) {
        let packed = packed();
        match &mut self.memory {
            Memory::Host(cache) => {
                let mut content = content.to_vec();
                let (per_block, until) = (self.tokens_per_block, tokens.end.div_ceil(self.tokens_per_block));
                let written = &blocks[(tokens.start / per_block) as usize..until as usize];
                for layer in 0..LAYERS {
                    let plan = plan_of((&packed, &[BlockId::new(0)]), (cache.layout(), blocks), layer, &tokens);
                    let _pages = cache.guard_write(written, layer..layer + 1).unwrap();
                    copy::copy(&plan, &table(&mut content), &table_of(cache)).unwrap();
                    drop(_pages);
                    each(&mut self.worker, layer, Ready::Now);
                }
            }
            Memory::Device(on) => {
                let (device, stream, cache) = (Arc::clone(&on.device), Arc::clone(&on.stream), on.cache.clone());
                let desk = on.desk();
                desk.put(&*device, content);
                for layer in 0..LAYERS {
                    let plan = plan_of((&packed, &[BlockId::new(0)]), (cache.layout(), blocks), layer, &tokens);
                    desk.bring(&*stream, &stretch(layer, &tokens));
                    let job = CopyJob::copy(&plan, &desk.regions(), cache.regions()).unwrap();
                    desk.launch(&*device, &*stream, &job, layer);
                    each(&mut self.worker, layer, Ready::Queued);
                }
                desk.busy = Some(stream.record().unwrap());
            }
        }
    }

    /// Reads some tokens, layer by layer: `before` is called ahead of each. With `looks` waits and returns them as in a packed
    /// prompt; otherwise the work is queued and nobody waits for it.
    pub(crate) fn read(
        &mut self,
        blocks: &[BlockId],
        tokens: &Range<u32>,
        looks: bool,
        mut before: impl FnMut(&mut PdWorker, u16),
    ) -> Vec<u8> {
        let packed = packed();
        let mut out = vec![0; PROMPT_BYTES];
        match &mut self.memory {
            Memory::Host(cache) => {
                for layer in 0..LAYERS {
                    before(&mut self.worker, layer);
                    let plan = plan_of((cache.layout(), blocks), (&packed, &[BlockId::new(0)]), layer, tokens);
                    let _pages = cache.guard_read(blocks, layer..layer + 1).unwrap();
                    copy::copy(&plan, &table_of(cache), &table(&mut out)).unwrap();
                }
            }
            Memory::Device(on) => {
                let (device, stream, cache) = (Arc::clone(&on.device), Arc::clone(&on.stream), on.cache.clone());
                let desk = on.desk();
                for layer in 0..LAYERS {
                    before(&mut self.worker, layer);
                    let plan = plan_of((cache.layout(), blocks), (&packed, &[BlockId::new(0)]), layer, tokens);
                    let job = CopyJob::copy(&plan, cache.regions(), &desk.regions()).unwrap();
                    desk.launch(&*device, &*stream, &job, layer);
                    if looks {
                        desk.take_out(&*stream, &stretch(layer, tokens));
                    }
                }
                let done = stream.record().unwrap();
                if looks {
                    done.wait().unwrap();
                    for layer in 0..LAYERS {
                        let stretch = stretch(layer, tokens);
                        out[stretch.clone()].copy_from_slice(&desk.get(&*device, stretch));
                    }
                }
                desk.busy = Some(done);
            }
        }
        out
    }

    /// All gauges of what a transfer holds are at zero.
    pub(crate) fn holds_nothing(&self) -> bool {
        let snapshot = self.metrics.snapshot();
        snapshot.transfers_live.total() == 0
            && snapshot.grants_live == 0
            && snapshot.leases_live == 0
            && snapshot.slab_pool_used_bytes == 0
            && snapshot.staging_used_bytes == 0
    }
}

impl OnDevice {
    /// The desk that was used longest ago, once the device is through with it.
    fn desk(&mut self) -> &mut Desk {
        self.next = (self.next + 1) % self.desks.len();
        let desk = &mut self.desks[self.next];
        if let Some(busy) = desk.busy.take() {
            busy.wait().unwrap();
        }
        desk
    }
}

impl Desk {
    fn new(device: &Arc<dyn Device>) -> Self {
        let tables = TABLE_BYTES * usize::from(LAYERS);
        let pinned = |bytes| device.pin(Arc::new(HostRegion::new(bytes).unwrap())).unwrap();
        Self {
            prompt: device.allocate(PROMPT_BYTES).unwrap(),
            tables: device.allocate(tables).unwrap(),
            host: pinned(PROMPT_BYTES),
            host_tables: pinned(tables),
            busy: None,
        }
    }

    fn regions(&self) -> DeviceRegions {
        DeviceRegions::new(vec![(self.prompt.ptr(), PROMPT_BYTES as u64)])
    }

    fn put(&self, device: &dyn Device, content: &[u8]) {
        write(device, &self.host, 0, content);
    }

    fn get(&self, device: &dyn Device, stretch: Range<usize>) -> Vec<u8> {
        let start = at(&self.host, stretch.start);
        device.host_reads(start, stretch.len());
        // SAFETY: inside the region; what the device copies there is over.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), stretch.len()) }.to_vec()
    }

    fn bring(&self, stream: &dyn Stream, stretch: &Range<usize>) {
        let to = CopyEnd::Device(self.prompt.ptr().offset(stretch.start as u64));
        // SAFETY: both are so long; the desk is busy until the device is through.
        unsafe { stream.copy(CopyEnd::Host(at(&self.host, stretch.start)), to, stretch.len()) }.unwrap();
    }

    fn take_out(&self, stream: &dyn Stream, stretch: &Range<usize>) {
        let from = CopyEnd::Device(self.prompt.ptr().offset(stretch.start as u64));
        // SAFETY: as above.
        unsafe { stream.copy(from, CopyEnd::Host(at(&self.host, stretch.start)), stretch.len()) }.unwrap();
    }

    fn launch(&self, device: &dyn Device, stream: &dyn Stream, job: &CopyJob, layer: u16) {
        let offset = TABLE_BYTES * usize::from(layer);
        write(device, &self.host_tables, offset, job.tables());
        let tables = self.tables.ptr().offset(offset as u64);
        let from = CopyEnd::Host(at(&self.host_tables, offset));
        // SAFETY: as above.
        unsafe { stream.copy(from, CopyEnd::Device(tables), job.tables().len()) }.unwrap();
        // SAFETY: the device checks who uses what.
        unsafe { job.launch(stream, tables, None) }.unwrap();
    }
}

fn at(region: &PinnedRegion, offset: usize) -> NonNull<u8> {
    assert!(offset < region.region().len());
    // SAFETY: inside the region.
    unsafe { region.region().as_ptr().add(offset) }
}

fn write(device: &dyn Device, region: &PinnedRegion, offset: usize, bytes: &[u8]) {
    assert!(offset + bytes.len() <= region.region().len());
    device.host_writes(at(region, offset), bytes.len());
    // SAFETY: inside the region, which the device is through with.
    unsafe { at(region, offset).copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
}

fn plan_of(
    (from, source): (&KvLayout, &[BlockId]),
    (to, target): (&KvLayout, &[BlockId]),
    layer: u16,
    tokens: &Range<u32>,
) -> CopyPlan {
    let selection = Selection { layers: layer..layer + 1, heads: 0..HEADS, tokens: tokens.clone() };
    fn view<'a>(layout: &'a KvLayout, blocks: &'a [BlockId]) -> CacheView<'a> {
        CacheView { layout, shard: Shard::default(), blocks, first_token: 0 }
    }
    plan(&view(from, source), &view(to, target), &selection).unwrap()
}

fn table(bytes: &mut [u8]) -> RegionTable {
    let slice = NonNull::from(bytes);
    // SAFETY: the buffer outlives the call that the table is made for, and nobody else has it.
    unsafe { RegionTable::new(vec![(slice.cast(), slice.len())]) }
}

fn table_of(cache: &HostKvCache) -> RegionTable {
    let regions = cache.regions().iter().map(|region| (region.as_ptr(), region.len())).collect();
    // SAFETY: the caller guards the pages, and the cache is alive.
    unsafe { RegionTable::new(regions) }
}
