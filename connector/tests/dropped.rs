//! What is dropped is told: orders that a dead driver left, questions that an engine does not take.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use bytes::Bytes;
use common::{Engine, LAYERS, PATIENCE, Setup, fetch, keep, start_load, wait_until_free};
use crossbeam_channel::{Receiver, bounded};
use kvferry::config::ConnectorConfig;
use kvferry::contract::{Applied, EngineFinish, Hold, Match, Request, RequestId, ScheduledStep, Scheduler, Worker};
use kvferry::metrics::DropReason;
use kvferry::pool::{BlockHash, BlockHasher, HashScope};
use kvferry::tier::{HostTier, Tier, TierError};
use kvferry_kernels::HostKvCache;
use kvferry_protocol::digest::Digest;
use kvferry_protocol::{BlockId, EngineId, Incarnation, PeerId, PpRank, TpRank};
use kvferry_transport::{FaultPlan, LoopbackConfig, LoopbackNetwork, Transport};

fn loopback() -> impl Fn(&ConnectorConfig, Bytes) -> Arc<dyn Transport> {
    let network = LoopbackNetwork::new();
    move |config, greeting| {
        Arc::new(network.endpoint(config.peer().clone(), greeting, LoopbackConfig::default(), FaultPlan::NONE))
    }
}

/// A tier whose fetches wait for a gate, and which panics on the driver's thread when it is armed.
#[derive(Debug)]
struct Fatal {
    inner: HostTier,
    gate: Receiver<()>,
    is_armed: Arc<AtomicBool>,
}

impl Tier for Fatal {
    fn name(&self) -> &'static str {
        "fatal"
    }
    fn memory(&self) -> &HostKvCache {
        self.inner.memory()
    }
    fn enter(&self, frame: BlockId) -> Result<BlockId, TierError> {
        assert!(!self.is_armed.load(Ordering::SeqCst), "a tier with a bug");
        self.inner.enter(frame)
    }
    fn store(&self, frame: BlockId, berth: BlockId, digest: Digest) -> Result<(), TierError> {
        self.inner.store(frame, berth, digest)
    }
    fn fetch(&self, frame: BlockId) -> Result<(BlockId, Digest), TierError> {
        // Without a sender the test is over.
        let _ = self.gate.recv();
        self.inner.fetch(frame)
    }
    fn leave(&self, berth: BlockId) {
        self.inner.leave(berth);
    }
    fn forget(&self, frame: BlockId) {
        self.inner.forget(frame);
    }
}

fn local(engine: &Engine, id: &str, prompt: u32, tokens: u32) -> Request {
    let tokens_per_block = engine.tokens_per_block() as usize;
    let scope = HashScope { model: "toy", tokens_per_block, adapter: None, salt: b"" };
    let text: Vec<_> = (prompt * 1000..prompt * 1000 + tokens).collect();
    let hashes: Arc<[BlockHash]> = BlockHasher::new(&scope).unwrap().chain(&text).into();
    Request { id: RequestId::new(id), prompt_tokens: tokens, params: None, hashes }
}

/// A step of an engine whose worker may have ended, as an engine takes it that goes on all the same.
fn step_anyhow(engine: &mut Engine) -> Applied {
    let meta = engine.scheduler.build_step(&ScheduledStep::default());
    let _ = engine.worker.begin_step(meta);
    let results = engine.worker.poll();
    engine.scheduler.apply(vec![results])
}

fn until(engine: &mut Engine, what: &str, mut done: impl FnMut(&Applied) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done(&step_anyhow(engine)) {
        assert!(Instant::now() < deadline, "{what} did not come");
        std::thread::yield_now();
    }
}

/// Has the tier bring what it has of a request.
fn restore(engine: &mut Engine, request: &Request, blocks: &[BlockId]) {
    let Match::Async(tokens) = engine.scheduler.matched_tokens(request, 0) else { panic!("the tier has it") };
    engine.scheduler.allocated(request, blocks, 0, tokens.get()).unwrap();
}

#[test]
fn what_a_dead_driver_left_is_answered_by_the_next_poll() {
    let (open, gate) = bounded(1);
    let is_armed = Arc::new(AtomicBool::new(false));
    let arm = Arc::clone(&is_armed);
    let mut engine = Engine::with_tier(&Setup::prefill(), &loopback(), move |cache| {
        let inner = HostTier::new(cache, 64 * cache.shape().block_bytes()).unwrap();
        Some(Arc::new(Fatal { inner, gate, is_armed }))
    });
    let first = local(&engine, "a", 1, 33);
    let blocks = engine.blocks(0, 33);
    engine.scheduler.allocated(&first, &blocks, 0, 0).unwrap();
    engine.prefill_step(&first, &blocks, 0..33);
    let metrics = Arc::clone(&engine.metrics);
    until(&mut engine, "the blocks are kept", |_| metrics.tier_stored_blocks_total.get() == 8);
    assert_eq!(engine.finish(&first, &blocks, EngineFinish::Complete), Hold::Free);

    // A restore that waits for the tier, a keep that has not begun, and a store on which the driver dies.
    let again = local(&engine, "b", 1, 33);
    let target = engine.blocks(9, 33);
    restore(&mut engine, &again, &target);
    step_anyhow(&mut engine);
    let unbegun = keep("k", 1, 8, None);
    engine.scheduler.allocated(&unbegun, &engine.blocks(30, 8), 0, 0).unwrap();
    arm.store(true, Ordering::SeqCst);
    let other = local(&engine, "c", 2, 16);
    let more = engine.blocks(20, 16);
    engine.scheduler.allocated(&other, &more, 0, 0).unwrap();
    engine.prefill_step(&other, &more, 0..16);

    until(&mut engine, "the restore's end", |applied| {
        let missed = applied.missed.iter().find(|missed| missed.request == again.id);
        assert!(missed.is_none_or(|missed| missed.good_tokens == 0 && missed.good_blocks.is_empty()), "{missed:?}");
        missed.is_some()
    });
    // Nothing touches its pages any more.
    drop(engine.cache.guard_write(&target, 0..LAYERS).unwrap());
    let unbegun_blocks = engine.blocks(30, 8);
    assert!(matches!(engine.finish(&unbegun, &unbegun_blocks, EngineFinish::Aborted), Hold::Until { .. }));
    until(&mut engine, "the keep's end", |applied| applied.released.contains(&unbegun.id));
    assert_eq!(engine.finish(&other, &more, EngineFinish::Complete), Hold::Free, "its stores are over");

    // What is ordered of a driver that is gone is answered, too.
    let late = local(&engine, "d", 1, 33);
    engine.scheduler.finished(&again.id, &target, EngineFinish::Complete);
    restore(&mut engine, &late, &target);
    until(&mut engine, "the late restore's end", |applied| {
        applied.missed.iter().any(|missed| missed.request == late.id)
    });
    assert!(!engine.scheduler.has_pending(), "nobody waits for anything");
    drop(open);
}

fn peer_of(setup: &Setup) -> PeerId {
    PeerId {
        engine: EngineId::new(setup.name).unwrap(),
        incarnation: Incarnation::new(setup.incarnation),
        pp_rank: PpRank::new(0),
        tp_rank: TpRank::new(0),
    }
}

fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::yield_now();
    }
}

/// An engine that prefills, one that decodes, and a session between them; then the first is told `count` things that it does not
/// take.
fn with_unheard(order: &'static str, count: u32) -> (Engine, Engine) {
    let make = loopback();
    let (prefill, decode) = (Setup { order, ..Setup::prefill() }, Setup { order, ..Setup::decode() });
    let peer = peer_of(&prefill);
    let (prefill, decode) = (Engine::new(&prefill, &make), Engine::new(&decode, &make));
    let handle = decode.worker.handle();
    handle.connect(prefill.address()).unwrap();
    wait("there is a session", || handle.reaches(prefill.address()));
    for number in 0..count {
        handle.send_message(peer.clone(), Bytes::copy_from_slice(&number.to_le_bytes())).unwrap();
    }
    (prefill, decode)
}

/// Messages of peers that an engine may leave lying, as the worker says.
const QUEUE: u32 = 256;
/// Those of one peer that wait behind them.
const BEHIND: u32 = 1024;

#[test]
fn what_an_engine_does_not_take_yet_waits_and_comes_in_order() {
    let count = QUEUE + BEHIND;
    let (prefill, _decode) = with_unheard("decode-first", count);
    let waiting = || prefill.metrics.engine_messages_waiting.get();
    wait("all have come", || waiting() == u64::from(BEHIND));
    for number in 0..count {
        let (_, message) = prefill.worker.messages().recv_timeout(PATIENCE).unwrap();
        assert_eq!(message[..], number.to_le_bytes());
    }
    wait("nothing waits", || waiting() == 0);
    assert_eq!(prefill.metrics.snapshot().messages_dropped_total.total(), 0);
}

#[test]
fn a_load_whose_question_is_dropped_hears_of_it_and_asks_again() {
    for order in ["decode-first", "prefill-first"] {
        let (mut prefill, mut decode) = with_unheard(order, QUEUE + BEHIND);
        wait("all have come", || prefill.metrics.engine_messages_waiting.get() == u64::from(BEHIND));
        let request = fetch("d", 1, 20, prefill.address());
        let blocks = decode.blocks(0, 20);
        start_load(&mut decode, &request, &blocks, 0);
        let lost = Arc::clone(&decode.metrics);
        wait("the session ends", || lost.sessions_lost_total.get() == 1);
        let peer = loop {
            let (peer, message) = prefill.worker.messages().recv_timeout(PATIENCE).unwrap();
            if message[..] == *b"please" {
                break peer;
            }
        };
        let dropped = *prefill.metrics.snapshot().messages_dropped_total.get(DropReason::Overflow);
        assert_eq!(dropped, u64::from(BEHIND) + 1);
        let source = keep("p", 1, 20, Some(peer));
        let source_blocks = prefill.blocks(0, 20);
        prefill.scheduler.allocated(&source, &source_blocks, 0, 0).unwrap();
        prefill.prefill_step(&source, &source_blocks, 0..20);
        prefill.finish(&source, &source_blocks, EngineFinish::Complete);
        decode.idle_until("the load", |applied| {
            assert!(applied.failed.is_empty(), "{applied:?}");
            !applied.loaded.is_empty()
        });
        wait_until_free(&mut prefill, &mut decode);
        assert_eq!(decode.read(&blocks, 20), prefill.read(&source_blocks, 20));
    }
}
