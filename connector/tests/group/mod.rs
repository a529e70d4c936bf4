//! An engine of several tensor-parallel ranks: one scheduler half, and for each rank a worker half and a cache of its heads.

use std::num::NonZeroU32;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use kvferry::config::{ConnectorConfig, PreSharedKey, RawConfig};
use kvferry::contract::{
    Applied, EngineFinish, Hold, Match, Ready, Request, RequestId, ScheduledRequest, ScheduledStep, Scheduler,
    TransferParams, Worker,
};
use kvferry::metrics::Metrics;
use kvferry::pd::{PdScheduler, PdWorker, PdWorkerParts, SchedulerOptions, greeting};
use kvferry_kernels::copy::{self, RegionTable};
use kvferry_kernels::{HostKvCache, KvDtype, Placement, Slot, store_kv};
use kvferry_protocol::layout::{CacheView, KvLayout, KvShape, Selection, Shard, heads_of, plan};
use kvferry_protocol::manifest::Manifest;
use kvferry_protocol::{BlockId, Incarnation, LayerId, PeerId, TpRank, TransferId};
use kvferry_transport::{PeerAddress, Transport};

use crate::common::{self, DIM, LAYERS, MakeTransport, PATIENCE, Setup};

/// KV heads of the model, so that eight ranks hold each of them twice.
pub(crate) const KV_HEADS: u16 = 4;
const BLOCKS: u32 = 64;

/// An engine whose heads are spread over ranks.
pub(crate) struct Group {
    pub(crate) scheduler: PdScheduler,
    pub(crate) ranks: Vec<Rank>,
    tokens_per_block: u32,
    /// Turned at every step: ranks report in any order.
    turn: usize,
}

/// One worker of it.
pub(crate) struct Rank {
    pub(crate) worker: PdWorker,
    pub(crate) cache: HostKvCache,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) heads: Range<u16>,
    transport: Arc<dyn Transport>,
}

pub(crate) fn manifest() -> Manifest {
    Manifest { kv_heads: KV_HEADS, ..common::manifest("toy") }
}

/// A rank's configuration, as its file would give it.
pub(crate) fn config(setup: &Setup, tp_rank: u16, tp_size: u16) -> ConnectorConfig {
    let text = format!(
        "engine_id = \"{}\"\nrole = \"{}\"\norder = \"{}\"\ntransport = \"{}\"\ntp_size = {tp_size}\ntp_rank = {tp_rank}\n{}",
        setup.name,
        setup.role,
        setup.order,
        if setup.psk.is_some() { "tcp" } else { "loopback" },
        setup.extra
    );
    let mut raw = RawConfig::from_toml(&text).unwrap();
    raw.psk = setup.psk.map(|key| PreSharedKey::new(key.as_bytes(), "the test").unwrap());
    ConnectorConfig::try_from((raw, Incarnation::new(setup.incarnation))).unwrap()
}

impl Rank {
    fn new(setup: &Setup, tp_rank: u16, tp_size: u16, make: MakeTransport<'_>) -> Self {
        let config = config(setup, tp_rank, tp_size);
        let heads = heads_of(TpRank::new(tp_rank), tp_size, KV_HEADS).unwrap();
        let shape = KvShape {
            layers: LAYERS,
            blocks: BLOCKS,
            heads: heads.len() as u16,
            tokens_per_block: setup.tokens_per_block,
            run_bytes: vec![4 * DIM as u32; 2],
        };
        let order = setup.layout.parse().unwrap();
        let cache = HostKvCache::new(shape, KvDtype::F32, order, Placement::OneRegion).unwrap();
        let shard = Shard { first_head: heads.start, ..Shard::default() };
        let transport = make(&config, greeting(&config, &manifest(), shard, cache.layout()).unwrap());
        let metrics = Arc::new(Metrics::new());
        let parts = PdWorkerParts {
            config,
            manifest: manifest(),
            shard,
            cache: cache.clone().into(),
            metrics: Arc::clone(&metrics),
        };
        Self { worker: PdWorker::start(parts, Arc::clone(&transport)).unwrap(), cache, metrics, heads, transport }
    }

    /// Every element of some blocks of this rank's pages, as `[block][layer][plane][head][token in the block][d]`.
    fn read(&self, blocks: &[BlockId]) -> Vec<f32> {
        let shape = KvShape { blocks: blocks.len() as u32, ..self.cache.layout().shape().clone() };
        let per_block = shape.tokens_per_block;
        let packed = KvLayout::packed(shape.clone(), "BLPHNC".parse().unwrap()).unwrap();
        let shard = Shard::default();
        let source = CacheView { layout: self.cache.layout(), shard, blocks, first_token: 0 };
        let ids: Vec<_> = (0..shape.blocks).map(BlockId::new).collect();
        let target = CacheView { layout: &packed, shard, blocks: &ids, first_token: 0 };
        let tokens = 0..shape.blocks * per_block;
        let plan = plan(&source, &target, &Selection { layers: 0..LAYERS, heads: 0..shape.heads, tokens }).unwrap();
        let mut out = vec![0.0_f32; plan.bytes() as usize / 4];
        let _pages = self.cache.guard_read(blocks, 0..LAYERS).unwrap();
        let regions = self.cache.regions().iter().map(|region| (region.as_ptr(), region.len())).collect();
        // SAFETY: the cache is alive, and its pages are guarded for reading.
        let source = unsafe { RegionTable::new(regions) };
        let slice = NonNull::from(&mut out[..]);
        // SAFETY: the buffer outlives the table, and nobody else has it.
        let target = unsafe { RegionTable::new(vec![(slice.cast(), slice.len() * 4)]) };
        copy::copy(&plan, &source, &target).unwrap();
        out
    }

    fn holds_nothing(&self) -> bool {
        let snapshot = self.metrics.snapshot();
        snapshot.transfers_live.total() == 0
            && snapshot.grants_live == 0
            && snapshot.leases_live == 0
            && snapshot.slab_pool_used_bytes == 0
            && snapshot.early_grants_live == 0
    }
}

impl Group {
    pub(crate) fn new(setup: &Setup, tp_size: u16, make: MakeTransport<'_>) -> Self {
        Self::with(setup, tp_size, |_| make)
    }

    /// Ranks whose transports differ.
    pub(crate) fn with<'a>(setup: &Setup, tp_size: u16, make: impl Fn(u16) -> MakeTransport<'a>) -> Self {
        let ranks = (0..tp_size).map(|rank| Rank::new(setup, rank, tp_size, make(rank))).collect();
        let tokens_per_block = NonZeroU32::new(setup.tokens_per_block).unwrap();
        let layerwise = config(setup, 0, 1).layerwise();
        let scheduler = PdScheduler::new(SchedulerOptions { tokens_per_block, reporters: tp_size, layerwise });
        Self { scheduler, ranks, tokens_per_block: setup.tokens_per_block, turn: 0 }
    }

    pub(crate) fn tp_size(&self) -> u16 {
        self.ranks.len() as u16
    }

    /// Where its workers listen, by rank.
    pub(crate) fn addresses(&self) -> Vec<PeerAddress> {
        self.ranks.iter().map(|rank| rank.worker.local_address()).collect()
    }

    /// Blocks for `tokens` tokens, in an order that no plan may take for granted.
    pub(crate) fn blocks(&self, first: u32, tokens: u32) -> Vec<BlockId> {
        (0..tokens.div_ceil(self.tokens_per_block)).map(|i| BlockId::new(first + (i * 7 + 3) % 43)).collect()
    }

    /// One step in which `request`, if any, computes `tokens`; every rank runs it.
    pub(crate) fn step(&mut self, request: Option<(&Request, &[BlockId], Range<u32>)>) {
        let scheduled = request.map(|(request, blocks, tokens)| ScheduledRequest {
            id: request.id.clone(),
            tokens,
            blocks: blocks.to_vec(),
        });
        let meta = self.scheduler.build_step(&ScheduledStep { requests: scheduled.into_iter().collect() });
        for rank in &mut self.ranks {
            rank.worker.begin_step(meta.clone()).unwrap();
        }
    }

    /// One step that computes `tokens` of a prompt, layer by layer on every rank.
    pub(crate) fn prefill_step(&mut self, request: &Request, blocks: &[BlockId], tokens: Range<u32>) {
        self.step(Some((request, blocks, tokens.clone())));
        for layer in 0..LAYERS {
            for rank in 0..self.ranks.len() {
                self.store(rank, layer, blocks, tokens.clone());
                self.ranks[rank].worker.save_layer(LayerId::new(layer), Ready::Now);
            }
        }
        self.ranks.iter_mut().for_each(|rank| rank.worker.wait_saved());
    }

    /// Stores a rank's keys and values, which say which layer, token and head of the model they are.
    pub(crate) fn store(&self, rank: usize, layer: u16, blocks: &[BlockId], tokens: Range<u32>) {
        let Rank { cache, heads, .. } = &self.ranks[rank];
        let slot = |token| Slot::of_position(token as usize, blocks, self.tokens_per_block).unwrap();
        let slots: Vec<_> = tokens.clone().map(slot).collect();
        let mut rows = [Vec::new(), Vec::new()];
        for (plane, rows) in rows.iter_mut().enumerate() {
            for token in tokens.clone() {
                for head in heads.clone() {
                    rows.extend((0..DIM as u32).map(|d| element(layer, plane as u32, head, token, d)));
                }
            }
        }
        store_kv(cache, layer, &slots, &rows[0], Some(&rows[1])).unwrap();
    }

    /// Polls every rank, in another order each time, and takes what they report.
    pub(crate) fn poll(&mut self) -> Applied {
        let ranks = self.ranks.len();
        self.turn += 1;
        let mut all = Applied::default();
        for i in 0..ranks {
            let results = self.ranks[(self.turn + i) % ranks].worker.poll();
            let applied = self.scheduler.apply(vec![results]);
            all.loaded.extend(applied.loaded);
            all.failed.extend(applied.failed);
            all.released.extend(applied.released);
            all.unwanted.extend(applied.unwanted);
        }
        all
    }

    pub(crate) fn idle_step(&mut self) -> Applied {
        self.step(None);
        self.poll()
    }

    /// Steps until `done` likes what came of it.
    pub(crate) fn idle_until(&mut self, what: &str, mut done: impl FnMut(&Applied) -> bool) -> Applied {
        self.idle_until_state(what, |_, applied| done(applied))
    }

    /// Steps until `done` likes what came of it, or how the engine is now.
    pub(crate) fn idle_until_state(&mut self, what: &str, mut done: impl FnMut(&Self, &Applied) -> bool) -> Applied {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let applied = self.idle_step();
            if done(self, &applied) {
                return applied;
            }
            assert!(Instant::now() < deadline, "{what} did not come");
            std::thread::yield_now();
        }
    }

    /// Asks for all that is not here, and starts the load.
    pub(crate) fn start_load(&mut self, request: &Request, blocks: &[BlockId], local: u32) {
        let n = match self.scheduler.matched_tokens(request, local) {
            Match::Async(n) => n.get(),
            other => panic!("{other:?}"),
        };
        self.scheduler.allocated(request, blocks, local, n).unwrap();
        // What comes of it is for a later poll: it may come at once.
        self.step(None);
    }

    /// The question that its rank 0 was asked; asserts that no other rank was.
    pub(crate) fn question(&self) -> PeerId {
        let (peer, ask) = self.ranks[0].worker.messages().recv_timeout(PATIENCE).unwrap();
        assert_eq!(&ask[..], b"please");
        assert_eq!(peer.tp_rank, TpRank::new(0));
        assert!(self.ranks.iter().all(|rank| rank.worker.messages().is_empty()), "one question for all ranks");
        peer
    }

    pub(crate) fn finish(&mut self, request: &Request, blocks: &[BlockId], how: EngineFinish) -> Hold {
        self.scheduler.finished(&request.id, blocks, how)
    }

    /// Every element of every rank's cache is what it must be: the first `tokens` tokens of `blocks` are the prompt's, and, if
    /// `alone`, all else is as it was made.
    pub(crate) fn check(&self, blocks: &[BlockId], tokens: u32, alone: bool) {
        let per_block = self.tokens_per_block;
        let all: Vec<_> = (0..BLOCKS).map(BlockId::new).collect();
        for (number, rank) in self.ranks.iter().enumerate() {
            let found = rank.read(&all);
            let mut at = 0;
            for block in &all {
                let place = blocks.iter().position(|of| of == block);
                for (layer, plane) in (0..LAYERS).flat_map(|layer| [(layer, 0), (layer, 1)]) {
                    for head in rank.heads.clone() {
                        for (offset, d) in (0..per_block).flat_map(|n| (0..DIM as u32).map(move |d| (n, d))) {
                            let token = place.map(|place| place as u32 * per_block + offset).filter(|&t| t < tokens);
                            let want = token.map(|token| element(layer, plane, head, token, d));
                            if want.is_some() || alone {
                                let what = format!(
                                    "rank {number}, block {block}, layer {layer}, plane {plane}, head {head}, {token:?}, {d}"
                                );
                                assert_eq!(found[at], want.unwrap_or(0.0), "{what}");
                            }
                            at += 1;
                        }
                    }
                }
            }
            assert_eq!(at, found.len());
        }
    }

    pub(crate) fn holds_nothing(&self) -> bool {
        self.ranks.iter().all(Rank::holds_nothing)
    }

    /// A rank dies: its transport is gone from one moment to the next.
    pub(crate) fn kill(&self, rank: usize) {
        self.ranks[rank].transport.shutdown();
    }

    /// Nothing holds any of these pages on any rank.
    pub(crate) fn pages_are_free(&self, blocks: &[BlockId]) {
        for rank in &self.ranks {
            drop(rank.cache.guard_write(blocks, 0..LAYERS).unwrap());
        }
    }
}

fn element(layer: u16, plane: u32, head: u16, token: u32, d: u32) -> f32 {
    (1 + u32::from(layer) * 100_000 + plane * 50_000 + u32::from(head) * 10_000 + token * 10 + d) as f32
}

pub(crate) fn fetch(id: &str, transfer: u128, prompt_tokens: u32, from: Vec<PeerAddress>) -> Request {
    let params =
        TransferParams::Fetch { transfer: TransferId::new(transfer), from, engine: None, ask: b"please".to_vec() };
    Request { id: RequestId::new(id), prompt_tokens, params: Some(params), hashes: Arc::default() }
}

pub(crate) fn keep(id: &str, transfer: u128, prompt_tokens: u32, to: Option<PeerId>, readers: u16) -> Request {
    let params = TransferParams::Keep { transfer: TransferId::new(transfer), to, readers };
    Request { id: RequestId::new(id), prompt_tokens, params: Some(params), hashes: Arc::default() }
}

/// Steps both engines until neither holds anything for a transfer.
pub(crate) fn wait_until_free(a: &mut Group, b: &mut Group) {
    let deadline = Instant::now() + PATIENCE;
    while !(a.holds_nothing() && b.holds_nothing()) {
        a.idle_step();
        b.idle_step();
        assert!(Instant::now() < deadline, "something is still held");
        std::thread::yield_now();
    }
}
