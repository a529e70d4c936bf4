//! A tier beside a prefill engine: what was computed once is brought, verified, and a tier that misbehaves costs hits only.

mod common;

use std::sync::Arc;
use std::time::Instant;

use common::{Engine, LAYERS, PATIENCE, Setup, fetch, keep, start_load, wait_until_free};
use crossbeam_channel::{Receiver, Sender, bounded};
use kvferry::contract::{EngineFinish, Hold, Match, Request, RequestId, Scheduler, Worker};
use kvferry::metrics::{ReturnRefusal, TierDrop};
use kvferry::pool::{BlockHash, BlockHasher, HashScope};
use kvferry::tier::{HostTier, Tier, TierError};
use kvferry_kernels::{HostKvCache, Slot, store_kv};
use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::KvLayout;
use kvferry_protocol::wire::ClusterKey;
use kvferry_protocol::{BlockId, LayerId, codec};
use kvferry_transport::testing::{Flow, Proxy, ProxyPlan, Towards};
use kvferry_transport::{
    FaultPlan, LoopbackConfig, LoopbackNetwork, PeerAddress, Tcp, TcpConfig, TcpConfigFile, Transport,
};

fn loopback() -> impl Fn(&kvferry::config::ConnectorConfig, bytes::Bytes) -> Arc<dyn Transport> {
    let network = LoopbackNetwork::new();
    move |config, greeting| {
        Arc::new(network.endpoint(config.peer().clone(), greeting, LoopbackConfig::default(), FaultPlan::NONE))
    }
}

/// A tier of so many blocks in host memory.
fn host(frames: u64) -> impl Fn(&KvLayout) -> Option<Arc<dyn Tier>> {
    move |cache| Some(Arc::new(HostTier::new(cache, frames * cache.shape().block_bytes()).unwrap()))
}

fn hashes(tokens_per_block: u32, tokens: u32) -> Arc<[BlockHash]> {
    let scope = HashScope { model: "toy", tokens_per_block: tokens_per_block as usize, adapter: None, salt: b"" };
    BlockHasher::new(&scope).unwrap().chain(&(0..tokens).collect::<Vec<_>>()).into()
}

fn local(engine: &Engine, id: &str, tokens: u32) -> Request {
    let hashes = hashes(engine.tokens_per_block(), tokens);
    Request { id: RequestId::new(id), prompt_tokens: tokens, params: None, hashes }
}

/// Makes the pages' content useless.
fn spoil(cache: &HostKvCache, blocks: &[BlockId], tokens: u32) {
    let per_block = cache.layout().shape().tokens_per_block;
    let slots: Vec<_> =
        (0..tokens).map(|token| Slot::of_position(token as usize, blocks, per_block).unwrap()).collect();
    let rows = vec![-1.0; tokens as usize * usize::from(common::HEADS) * common::DIM];
    for layer in 0..LAYERS {
        store_kv(cache, layer, &slots, &rows, Some(&rows)).unwrap();
    }
}

/// Computes a request that nobody transfers, in steps of 10 tokens from `from` on, and gives its blocks back.
fn compute(engine: &mut Engine, request: &Request, blocks: &[BlockId], from: u32) {
    engine.scheduler.allocated(request, blocks, from, 0).unwrap();
    run(engine, request, blocks, from);
    free(engine, request, blocks);
}

fn run(engine: &mut Engine, request: &Request, blocks: &[BlockId], from: u32) {
    let mut at = from;
    while at < request.prompt_tokens {
        let end = (at + 10).min(request.prompt_tokens);
        engine.prefill_step(request, blocks, at..end);
        let results = engine.worker.poll();
        engine.scheduler.apply(vec![results]);
        at = end;
    }
}

fn free(engine: &mut Engine, request: &Request, blocks: &[BlockId]) {
    if let Hold::Until { .. } = engine.finish(request, blocks, EngineFinish::Complete) {
        engine.idle_until("the release", |applied| applied.released.contains(&request.id));
    }
    // The engine may write them again.
    drop(engine.cache.guard_write(blocks, 0..LAYERS).unwrap());
}

fn matched(engine: &Engine, request: &Request) -> u32 {
    match engine.scheduler.matched_tokens(request, 0) {
        Match::Async(tokens) => tokens.get(),
        Match::None => 0,
        other => panic!("{other:?}"),
    }
}

fn settle(engine: &mut Engine) {
    let deadline = Instant::now() + PATIENCE;
    while engine.scheduler.has_pending() {
        engine.idle_step();
        assert!(Instant::now() < deadline, "{:?}", engine.metrics.snapshot());
        std::thread::yield_now();
    }
}

/// Restores what the tier has of a request; `Ok` with the tokens that it promised, `Err` with the good prefix if it had less.
fn restore(engine: &mut Engine, request: &Request, blocks: &[BlockId]) -> Result<u32, u32> {
    let tokens = matched(engine, request);
    engine.scheduler.allocated(request, blocks, 0, tokens).unwrap();
    let applied = engine.idle_until("the blocks", |applied| !applied.loaded.is_empty() || !applied.missed.is_empty());
    engine.scheduler.allocated(request, blocks, 0, 0).unwrap();
    match applied.missed.first() {
        Some(missed) => Err(missed.good_tokens),
        None => Ok(tokens),
    }
}

#[test]
fn a_repeated_prompt_is_brought_and_sent_as_if_it_had_been_computed() {
    for (order, layouts, block_sizes, raw) in [
        ("decode-first", ("LPBNHC", "BHLPNC"), (4, 4), false),
        ("prefill-first", ("BLPNHC", "BLPNHC"), (4, 8), false),
        ("decode-first", ("LBHNPC", "LPBNHC"), (8, 4), true),
    ] {
        let make = loopback();
        let prefill = Setup { order, layout: layouts.0, tokens_per_block: block_sizes.0, raw, ..Setup::prefill() };
        let decode = Setup { order, layout: layouts.1, tokens_per_block: block_sizes.1, ..Setup::decode() };
        let mut prefill = Engine::with_tier(&prefill, &make, host(16));
        let mut decode = Engine::new(&decode, &make);
        let (tokens, whole) = (33, 32);
        let mut want = Vec::new();
        for turn in 0..3_u32 {
            let wanted = fetch(&format!("d{turn}"), u128::from(turn) + 1, tokens, prefill.address());
            let target = decode.blocks(turn, tokens);
            start_load(&mut decode, &wanted, &target, 0);
            let (peer, _) = prefill.worker.messages().recv_timeout(PATIENCE).unwrap();
            let source = Request {
                hashes: hashes(prefill.tokens_per_block(), tokens),
                ..keep(&format!("p{turn}"), u128::from(turn) + 1, tokens, Some(peer))
            };
            let blocks = prefill.blocks(turn * 2, tokens);
            spoil(&prefill.cache, &blocks, tokens);
            let from = if turn == 0 {
                assert_eq!(matched(&prefill, &source), 0);
                prefill.scheduler.allocated(&source, &blocks, 0, 0).unwrap();
                0
            } else {
                assert_eq!(restore(&mut prefill, &source, &blocks), Ok(whole), "all but the incomplete block");
                whole
            };
            run(&mut prefill, &source, &blocks, from);
            decode.idle_until("the load", |applied| {
                assert!(applied.failed.is_empty(), "{applied:?}");
                !applied.loaded.is_empty()
            });
            let meta = decode.step(&wanted, &target, tokens - 1..tokens);
            decode.worker.begin_step(meta).unwrap();
            for layer in 0..LAYERS {
                assert_eq!(decode.worker.wait_layer(LayerId::new(layer)), []);
            }
            decode.worker.wait_saved();
            let got = decode.read(&target, tokens);
            if turn == 0 {
                want = got.clone();
            }
            assert!(got == want, "turn {turn} has the same bytes");
            free(&mut prefill, &source, &blocks);
            decode.finish(&wanted, &target, EngineFinish::Complete);
            wait_until_free(&mut prefill, &mut decode);
            settle(&mut prefill);
        }
        let m = prefill.metrics.snapshot();
        let blocks = u64::from(whole / prefill.tokens_per_block());
        assert_eq!((m.tier_stored_blocks_total, m.tier_blocks_filled), (blocks, blocks), "each once");
        assert_eq!((m.tier_hit_blocks_total, m.tier_restored_tokens_total), (2 * blocks, 2 * u64::from(whole)));
        assert_eq!(m.tier_dropped_blocks_total.total(), 0);
    }
}

#[test]
fn a_request_that_nobody_transfers_is_kept_too_and_a_longer_one_shares_its_prefix() {
    let mut engine = Engine::with_tier(&Setup::prefill(), &loopback(), host(16));
    let (short, long) = (local(&engine, "a", 22), local(&engine, "b", 41));
    let blocks = engine.blocks(0, 41);
    compute(&mut engine, &short, &blocks, 0);
    settle(&mut engine);
    assert_eq!(matched(&engine, &long), 20);
    assert_eq!(engine.scheduler.matched_tokens(&long, 20), Match::None);
    let exact = local(&engine, "c", 20);
    assert_eq!(matched(&engine, &exact), 16, "the last token is left to the engine");
    spoil(&engine.cache, &blocks, 41);
    let target = engine.blocks(9, 41);
    assert_eq!(restore(&mut engine, &long, &target), Ok(20));
    run(&mut engine, &long, &target, 20);
    free(&mut engine, &long, &target);
    settle(&mut engine);
    assert_eq!(engine.metrics.snapshot().tier_blocks_filled, 10);
    for layer in 0..LAYERS {
        engine.store(layer, &blocks, 0..41);
    }
    assert_eq!(engine.read(&target, 41), engine.read(&blocks, 41));
}

#[test]
fn blocks_of_generated_tokens_are_kept_when_their_hashes_are_told() {
    let mut engine = Engine::with_tier(&Setup::prefill(), &loopback(), host(16));
    let mut request = local(&engine, "a", 10);
    let all = hashes(4, 18);
    let blocks = engine.blocks(0, 18);
    engine.scheduler.allocated(&request, &blocks, 0, 0).unwrap();
    run(&mut engine, &request, &blocks, 0);
    engine.scheduler.hashed(&request.id, &all[2..]);
    request.prompt_tokens = 18;
    run(&mut engine, &request, &blocks, 10);
    free(&mut engine, &request, &blocks);
    settle(&mut engine);
    let next = local(&engine, "b", 30);
    assert_eq!(matched(&engine, &next), 16);
}

#[test]
fn a_kept_block_that_changed_is_a_miss_and_is_not_offered_again() {
    let make = loopback();
    let mut memory = None;
    let mut engine = Engine::with_tier(&Setup::prefill(), &make, |cache| {
        let tier = Arc::new(HostTier::new(cache, 16 * cache.shape().block_bytes()).unwrap());
        memory = Some(tier.memory().clone());
        Some(tier)
    });
    let memory = memory.unwrap();
    let request = local(&engine, "a", 33);
    let blocks = engine.blocks(0, 33);
    compute(&mut engine, &request, &blocks, 0);
    settle(&mut engine);
    // Frames are given out in order: block 3 of the prompt is in frame 3.
    spoil(&memory, &[BlockId::new(3)], 1);
    let again = local(&engine, "b", 33);
    let target = engine.blocks(9, 33);
    assert_eq!(restore(&mut engine, &again, &target), Err(12), "three blocks are good");
    run(&mut engine, &again, &target, 12);
    assert_eq!(engine.read(&target, 33), engine.read(&blocks, 33));
    free(&mut engine, &again, &target);
    settle(&mut engine);
    assert_eq!(engine.metrics.snapshot().tier_digest_mismatches_total, 1);
    let third = local(&engine, "c", 33);
    assert_eq!(restore(&mut engine, &third, &target), Ok(32), "it was computed and kept anew");
    free(&mut engine, &third, &target);
}

#[test]
fn a_full_tier_gives_up_what_was_used_longest_ago() {
    let mut engine = Engine::with_tier(&Setup::prefill(), &loopback(), host(5));
    let other =
        Request { hashes: hashes(4, 100).iter().rev().copied().take(4).collect(), ..local(&engine, "other", 16) };
    let blocks = engine.blocks(0, 33);
    let first = local(&engine, "a", 16);
    compute(&mut engine, &first, &blocks, 0);
    settle(&mut engine);
    compute(&mut engine, &other, &blocks, 0);
    settle(&mut engine);
    let m = engine.metrics.snapshot();
    assert_eq!((m.tier_blocks, m.tier_blocks_filled, m.tier_evictions_total), (5, 5, 3));
    // A prefix goes last: what is left of the first prompt is its beginning, or nothing.
    let again = local(&engine, "b", 16);
    assert!(matched(&engine, &again) <= 4);
}

/// A tier that stores when it is told to, or fails.
#[derive(Debug)]
struct Stuck {
    inner: HostTier,
    gate: Receiver<Result<(), ()>>,
    fetches: bool,
}

impl Stuck {
    fn wait(&self, frame: BlockId) -> Result<(), TierError> {
        let failed = || TierError::Medium { tier: "stuck", frame, problem: "pulled out".into() };
        // Without a sender the test is over.
        self.gate.recv().map_err(|_| failed())?.map_err(|()| failed())
    }
}

impl Tier for Stuck {
    fn name(&self) -> &'static str {
        "stuck"
    }
    fn memory(&self) -> &HostKvCache {
        self.inner.memory()
    }
    fn enter(&self, frame: BlockId) -> Result<BlockId, TierError> {
        self.inner.enter(frame)
    }
    fn store(&self, frame: BlockId, berth: BlockId, digest: Digest) -> Result<(), TierError> {
        if !self.fetches {
            self.wait(frame)?;
        }
        self.inner.store(frame, berth, digest)
    }
    fn fetch(&self, frame: BlockId) -> Result<(BlockId, Digest), TierError> {
        if self.fetches {
            self.wait(frame)?;
        }
        self.inner.fetch(frame)
    }
    fn leave(&self, berth: BlockId) {
        self.inner.leave(berth);
    }
    fn forget(&self, frame: BlockId) {
        self.inner.forget(frame);
    }
}

/// What a stuck call comes to.
type Gate = Sender<Result<(), ()>>;

fn stuck(fetches: bool) -> (Gate, impl Fn(&KvLayout) -> Option<Arc<dyn Tier>>) {
    let (open, gate) = bounded(1000);
    let make = move |cache: &KvLayout| {
        let inner = HostTier::new(cache, 64 * cache.shape().block_bytes()).unwrap();
        Some(Arc::new(Stuck { inner, gate: gate.clone(), fetches }) as Arc<dyn Tier>)
    };
    (open, make)
}

#[test]
fn blocks_are_kept_while_the_link_holds_every_slab() {
    // The link is a proxy: the payload goes through it.
    let extra = "paths = ['tcp']\nlayer_group = 1\nchunk_bytes = 4096\nslab_pool_bytes = 8192";
    let make = |config: &kvferry::config::ConnectorConfig, greeting| kvferry::open_transport(config, greeting).unwrap();
    let psk = Some("0123456789abcdef0123456789abcdef");
    let mut prefill = Engine::with_tier(&Setup { extra, psk, ..Setup::prefill() }, &make, host(16));
    let mut decode = Engine::new(&Setup { psk, ..Setup::decode() }, &make);
    let PeerAddress::Tcp(address) = prefill.address() else { panic!("TCP") };
    let proxy = Proxy::new(address, ProxyPlan::default());
    let wanted = fetch("d", 1, 33, PeerAddress::Tcp(proxy.address()));
    let target = decode.blocks(0, 33);
    start_load(&mut decode, &wanted, &target, 0);
    let (peer, _) = prefill.worker.messages().recv_timeout(PATIENCE).unwrap();
    // No write is acknowledged: slabs do not come back, and most writes wait for one.
    proxy.set_flow(Towards::Dialler, Flow::Hold);
    let source = Request { hashes: hashes(4, 33), ..keep("p", 1, 33, Some(peer)) };
    let blocks = prefill.blocks(0, 33);
    prefill.scheduler.allocated(&source, &blocks, 0, 0).unwrap();
    run(&mut prefill, &source, &blocks, 0);
    let metrics = Arc::clone(&prefill.metrics);
    // The tier may be quicker than the grant.
    prefill.idle_until("the link has both slabs", |_| metrics.slab_pool_used_bytes.get() == 8192);
    prefill.idle_until("the tier", |_| metrics.tier_stored_blocks_total.get() == 8);
    assert_eq!(metrics.slab_pool_used_bytes.get(), 8192, "the link has both slabs");
    proxy.set_flow(Towards::Dialler, Flow::Pass);
    decode.idle_until("the load", |applied| !applied.loaded.is_empty());
    free(&mut prefill, &source, &blocks);
    decode.finish(&wanted, &target, EngineFinish::Complete);
    wait_until_free(&mut prefill, &mut decode);
}

#[test]
fn a_tier_that_never_answers_delays_neither_transfer_nor_release_nor_shutdown() {
    let make = loopback();
    let (open, tier) = stuck(false);
    let mut prefill = Engine::with_tier(&Setup::prefill(), &make, tier);
    let mut decode = Engine::new(&Setup::decode(), &make);
    for turn in 0..4_u32 {
        // Different prompts: none is there already.
        let tokens = 33 + turn;
        let wanted = fetch(&format!("d{turn}"), u128::from(turn) + 1, tokens, prefill.address());
        let target = decode.blocks(turn, tokens);
        start_load(&mut decode, &wanted, &target, 0);
        let (peer, _) = prefill.worker.messages().recv_timeout(PATIENCE).unwrap();
        let all = hashes(4, 1000);
        let source = Request {
            hashes: all[turn as usize * 20..][..8].into(),
            ..keep(&format!("p{turn}"), u128::from(turn) + 1, tokens, Some(peer))
        };
        let blocks = prefill.blocks(0, tokens);
        prefill.scheduler.allocated(&source, &blocks, 0, 0).unwrap();
        run(&mut prefill, &source, &blocks, 0);
        decode.idle_until("the load", |applied| !applied.loaded.is_empty());
        // The same blocks are used by each turn: the store that is stuck does not hold them.
        free(&mut prefill, &source, &blocks);
        decode.finish(&wanted, &target, EngineFinish::Complete);
        wait_until_free(&mut prefill, &mut decode);
    }
    settle(&mut prefill);
    let metrics = Arc::clone(&prefill.metrics);
    assert_eq!((metrics.tier_stored_blocks_total.get(), metrics.tier_late_total.get() > 0), (0, true));
    // One is in the call; it ends when the test lets it.
    open.send(Ok(())).unwrap();
    prefill.idle_until("the late one", |_| metrics.tier_stored_blocks_total.get() == 1);
    prefill.worker.shutdown(PATIENCE);
}

#[test]
fn a_tier_that_fails_costs_hits_only() {
    let (open, tier) = stuck(false);
    let mut engine = Engine::with_tier(&Setup::prefill(), &loopback(), tier);
    for _ in 0..8 {
        open.send(Err(())).unwrap();
    }
    let request = local(&engine, "a", 33);
    let blocks = engine.blocks(0, 33);
    compute(&mut engine, &request, &blocks, 0);
    settle(&mut engine);
    let m = engine.metrics.snapshot();
    assert_eq!((m.tier_stored_blocks_total, *m.tier_dropped_blocks_total.get(TierDrop::Failed)), (0, 8));
    let again = local(&engine, "b", 33);
    assert_eq!(matched(&engine, &again), 0);
}

#[test]
fn a_tier_that_does_not_bring_what_it_has_is_a_miss() {
    for stuck_for_good in [false, true] {
        let (open, tier) = stuck(true);
        let mut engine = Engine::with_tier(&Setup::prefill(), &loopback(), tier);
        let request = local(&engine, "a", 33);
        let blocks = engine.blocks(0, 33);
        compute(&mut engine, &request, &blocks, 0);
        settle(&mut engine);
        open.send(Ok(())).unwrap();
        if !stuck_for_good {
            open.send(Err(())).unwrap();
        }
        let again = local(&engine, "b", 33);
        let target = engine.blocks(9, 33);
        assert_eq!(restore(&mut engine, &again, &target), Err(4), "one block came");
        run(&mut engine, &again, &target, 4);
        free(&mut engine, &again, &target);
        settle(&mut engine);
        drop(open);
    }
}

#[test]
fn preempted_blocks_are_free_when_the_call_returns() {
    let mut engine = Engine::with_tier(&Setup::prefill(), &loopback(), host(16));
    for turn in 0..20 {
        let request = Request { hashes: hashes(4, 1000)[turn * 8..][..8].into(), ..local(&engine, "a", 33) };
        let blocks = engine.blocks(0, 33);
        engine.scheduler.allocated(&request, &blocks, 0, 0).unwrap();
        engine.prefill_step(&request, &blocks, 0..33);
        engine.worker.preempted(std::slice::from_ref(&request.id));
        drop(engine.cache.guard_write(&blocks, 0..LAYERS).unwrap());
        engine.finish(&request, &blocks, EngineFinish::Aborted);
        settle(&mut engine);
    }
}

/// Brings a prompt of 10 tokens to decode and lets it generate until 22 tokens have their KV; returns its blocks.
fn answer(prefill: &mut Engine, decode: &mut Engine, transfer: u128) -> Vec<BlockId> {
    let (prompt, all) = (10, 22);
    let known = hashes(decode.tokens_per_block(), all);
    let complete = (prompt / decode.tokens_per_block()) as usize;
    let id = format!("d{transfer}");
    let wanted = Request { hashes: known[..complete].into(), ..fetch(&id, transfer, prompt, prefill.address()) };
    let target = decode.blocks(0, all);
    start_load(decode, &wanted, &target, 0);
    let (peer, _) = prefill.worker.messages().recv_timeout(PATIENCE).unwrap();
    let source = Request {
        hashes: hashes(prefill.tokens_per_block(), prompt),
        ..keep(&format!("p{transfer}"), transfer, prompt, Some(peer))
    };
    let blocks = prefill.blocks(0, prompt);
    prefill.scheduler.allocated(&source, &blocks, 0, 0).unwrap();
    run(prefill, &source, &blocks, 0);
    decode.idle_until("the load", |applied| !applied.loaded.is_empty());
    free(prefill, &source, &blocks);
    for token in prompt..all {
        let blocks = &target[..(token / decode.tokens_per_block() + 1) as usize];
        let meta = decode.step(&wanted, blocks, token..token + 1);
        decode.worker.begin_step(meta).unwrap();
        for layer in 0..LAYERS {
            assert_eq!(decode.worker.wait_layer(LayerId::new(layer)), []);
            decode.store(layer, blocks, token..token + 1);
        }
        decode.worker.wait_saved();
        let results = decode.worker.poll();
        decode.scheduler.apply(vec![results]);
        if (token + 1).is_multiple_of(decode.tokens_per_block()) {
            let block = (token / decode.tokens_per_block()) as usize;
            decode.scheduler.hashed(&wanted.id, &known[block..=block]);
        }
    }
    let held = matches!(decode.finish(&wanted, &target, EngineFinish::Complete), Hold::Until { .. });
    let deadline = Instant::now() + PATIENCE;
    let mut released = !held;
    while !released || prefill.scheduler.has_pending() || !decode.holds_nothing() {
        if prefill.worker.wakes().try_recv().is_ok() || prefill.scheduler.has_pending() {
            prefill.idle_step();
        }
        released |= decode.idle_step().released.contains(&wanted.id);
        assert!(Instant::now() < deadline, "{:?} {:?}", prefill.metrics.snapshot(), decode.metrics.snapshot());
        std::thread::yield_now();
    }
    drop(decode.cache.guard_write(&target, 0..LAYERS).unwrap());
    target
}

const RETURNS: Setup = Setup {
    name: "decode",
    role: "decode",
    order: "decode-first",
    layout: "BHLPNC",
    tokens_per_block: 4,
    incarnation: 1,
    model: "toy",
    extra: "write_back_blocks = 2",
    psk: None,
    raw: false,
};

#[test]
fn an_answers_blocks_go_back_and_the_next_turn_finds_them() {
    for order in ["decode-first", "prefill-first"] {
        let make = loopback();
        let mut prefill = Engine::with_tier(&Setup { order, ..Setup::prefill() }, &make, host(16));
        let mut decode = Engine::new(&Setup { order, ..RETURNS }, &make);
        let target = answer(&mut prefill, &mut decode, 1);
        let m = prefill.metrics.snapshot();
        assert_eq!(
            (m.tier_blocks_filled, m.taken_blocks_total),
            (5, 3),
            "two of the prompt, three of the answer: {m:?}"
        );
        assert_eq!(decode.metrics.snapshot().returned_blocks_total, 3);
        let next = local(&prefill, "next", 30);
        let blocks = prefill.blocks(20, 30);
        spoil(&prefill.cache, &blocks, 20);
        assert_eq!(restore(&mut prefill, &next, &blocks), Ok(20));
        assert_eq!(prefill.read(&blocks, 20), decode.read(&target, 20));
        free(&mut prefill, &next, &blocks);

        answer(&mut prefill, &mut decode, 2);
        let m = prefill.metrics.snapshot();
        assert_eq!((m.tier_blocks_filled, m.taken_blocks_total), (5, 3), "nothing is taken twice");
        assert_eq!(*m.returns_refused_total.get(ReturnRefusal::Present), 2);
    }
}

/// Endpoints of a release whose newest protocol version this is.
fn tcp(newest_version: u16) -> impl Fn(&kvferry::config::ConnectorConfig, bytes::Bytes) -> Arc<dyn Transport> {
    move |config, greeting| {
        let file = TcpConfigFile { newest_version, ..TcpConfigFile::default() };
        let key = ClusterKey::new(&[7; 32]).unwrap();
        Arc::new(Tcp::bind(TcpConfig::try_from(file).unwrap(), key, config.peer().clone(), greeting).unwrap())
    }
}

#[test]
fn an_old_and_a_new_release_hand_over_in_the_version_of_the_old() {
    let (old, new) = (*codec::VERSIONS.start(), *codec::VERSIONS.end());
    assert!(old < new, "there is no older version to speak");
    for order in ["decode-first", "prefill-first"] {
        for (from, to, taken) in [(old, new, 0), (new, old, 0), (old, old, 0), (new, new, 3)] {
            let name = format!("{order}: prefill speaks {from}, decode {to}");
            let prefill = Setup { order, ..Setup::prefill() };
            let mut prefill = Engine::with_tier(&prefill, &tcp(from), host(16));
            let mut decode = Engine::new(&Setup { order, ..RETURNS }, &tcp(to));
            answer(&mut prefill, &mut decode, 1);
            let (p, d) = (prefill.metrics.snapshot(), decode.metrics.snapshot());
            assert_eq!((p.sessions_lost_total, d.sessions_lost_total), (0, 0), "{name}: a word was not understood");
            assert_eq!(d.loaded_tokens_total, 10, "{name}");
            // The old version has no message for what goes back: nothing is offered, and nobody waits.
            assert_eq!((d.returned_blocks_total, p.taken_blocks_total), (taken, taken), "{name}");
            assert_eq!(p.returns_refused_total.total(), 0, "{name}");
        }
    }
}

#[test]
fn what_the_peers_tier_does_not_want_costs_a_message() {
    for (name, frames, tokens_per_block, why) in
        [("other blocks", Some(16), 8, ReturnRefusal::BlockSize), ("no tier", None, 4, ReturnRefusal::NoTier)]
    {
        let make = loopback();
        let mut prefill =
            Engine::with_tier(&Setup::prefill(), &make, |cache| frames.and_then(|frames| host(frames)(cache)));
        let mut decode = Engine::new(&Setup { tokens_per_block, ..RETURNS }, &make);
        answer(&mut prefill, &mut decode, 1);
        let m = prefill.metrics.snapshot();
        assert!(*m.returns_refused_total.get(why) > 0, "{name}: {m:?}");
        assert_eq!(
            (m.returns_refused_total.total(), m.taken_blocks_total),
            (*m.returns_refused_total.get(why), 0),
            "{name}"
        );
    }
}

#[test]
fn a_prefill_engine_that_does_not_step_holds_decodes_blocks_for_a_moment_only() {
    let make = loopback();
    let mut prefill = Engine::with_tier(&Setup::prefill(), &make, host(16));
    let mut decode = Engine::new(&RETURNS, &make);
    let known = hashes(4, 16);
    let wanted = Request { hashes: known[..2].into(), ..fetch("d", 1, 10, prefill.address()) };
    let target = decode.blocks(0, 16);
    start_load(&mut decode, &wanted, &target, 0);
    let (peer, _) = prefill.worker.messages().recv_timeout(PATIENCE).unwrap();
    let source = keep("p", 1, 10, Some(peer));
    let blocks = prefill.blocks(0, 10);
    prefill.scheduler.allocated(&source, &blocks, 0, 0).unwrap();
    prefill.prefill_step(&source, &blocks, 0..10);
    decode.idle_until("the load", |applied| !applied.loaded.is_empty());
    decode.scheduler.hashed(&wanted.id, &known[2..]);
    decode.prefill_step(&wanted, &target, 10..16);
    assert!(matches!(decode.finish(&wanted, &target, EngineFinish::Complete), Hold::Until { .. }));
    decode.idle_until("the release", |applied| applied.released.contains(&wanted.id));
    // Prefill goes on later: nothing of it is taken, and nothing stays.
    free(&mut prefill, &source, &blocks);
    settle(&mut prefill);
    assert_eq!(prefill.metrics.snapshot().taken_blocks_total, 0);
}
