//! What goes wrong on the way: every end is one verdict, a good prefix, and nothing held.

mod common;

use std::sync::Arc;
use std::time::Instant;

use common::{Engine, PATIENCE, Setup, fetch, keep, start_load, wait_until_free};
use kvferry::config::ConnectorConfig;
use kvferry::contract::{Applied, EngineFinish, Scheduler};
use kvferry_transport::{FaultPlan, FaultRates, LoopbackConfig, LoopbackNetwork, PeerAddress, Transport};

const TOKENS: u32 = 40;

/// Runs one hand-over on a network that breaks what prefill sends, and returns how it ended for decode.
fn run(order: &'static str, rates: FaultRates, seed: u64) -> Applied {
    let network = LoopbackNetwork::new();
    let make = |faults: FaultPlan| {
        let network = network.clone();
        move |config: &ConnectorConfig, greeting: bytes::Bytes| -> Arc<dyn Transport> {
            let limits = LoopbackConfig { frame_bytes: 256, ..LoopbackConfig::default() };
            Arc::new(network.endpoint(config.peer().clone(), greeting, limits, faults))
        }
    };
    let extra = "transfer_deadline_ms = 15000\nprogress_deadline_ms = 3000\nverdict_timeout_ms = 3000\nchunk_bytes = 4096\nslab_pool_bytes = 16384";
    let mut prefill = Engine::new(&Setup { order, extra, ..Setup::prefill() }, &make(FaultPlan { seed, rates }));
    let mut decode = Engine::new(&Setup { order, extra, ..Setup::decode() }, &make(FaultPlan::NONE));
    let request = fetch("d", 1, TOKENS, prefill.address());
    let blocks = decode.blocks(0, TOKENS);
    start_load(&mut decode, &request, &blocks, 0);
    let (peer, _) = prefill.worker.messages().recv_timeout(PATIENCE).unwrap();
    let source = keep("p", 1, TOKENS, Some(peer));
    let source_blocks = prefill.blocks(0, TOKENS);
    prefill.scheduler.allocated(&source, &source_blocks, 0, 0).unwrap();
    for start in (0..TOKENS).step_by(8) {
        prefill.prefill_step(&source, &source_blocks, start..start + 8);
    }
    prefill.finish(&source, &source_blocks, EngineFinish::Complete);
    let mut seen = decode.idle_until("an end", |applied| !applied.loaded.is_empty() || !applied.failed.is_empty());
    if seen.failed.is_empty() && decode.metrics.snapshot().transfers_live.total() > 0 {
        // Started by its first layer: the end is still to come.
        let metrics = Arc::clone(&decode.metrics);
        let rest = decode.idle_until("the end", |applied| {
            !applied.failed.is_empty() || metrics.snapshot().transfers_live.total() == 0
        });
        seen.failed.extend(rest.failed);
    }
    wait_until_free(&mut prefill, &mut decode);
    let good = seen.failed.first().map_or(TOKENS, |failure| failure.good_tokens);
    let good_blocks: Vec<_> = blocks[..good.div_ceil(decode.tokens_per_block()) as usize].to_vec();
    assert_eq!(decode.read(&good_blocks, good), prefill.read(&source_blocks, good), "what is called good is right");
    // Nothing holds a page on either side.
    drop(decode.cache.guard_write(&blocks, 0..common::LAYERS).unwrap());
    drop(prefill.cache.guard_write(&source_blocks, 0..common::LAYERS).unwrap());
    seen
}

#[test]
fn a_flipped_byte_is_detected_and_nothing_wrong_is_called_good() {
    for order in ["decode-first", "prefill-first"] {
        let applied = run(order, FaultRates { flip: 1_000_000, ..FaultRates::default() }, 1);
        let failure = applied.failed.first().expect("every frame is flipped");
        assert_eq!(failure.good_tokens, 0);
        assert!(failure.reason.contains("digest"), "{}", failure.reason);
    }
}

#[test]
fn a_load_survives_cuts_or_ends_with_its_good_prefix() {
    let mut done = 0;
    for seed in 0..12 {
        let rates = FaultRates { cut: 30_000, delay: 100_000, ..FaultRates::default() };
        let order = if seed % 2 == 0 { "decode-first" } else { "prefill-first" };
        done += usize::from(run(order, rates, seed).failed.is_empty());
    }
    assert!(done > 0, "some loads heal");
}

#[test]
fn lost_acknowledgements_and_duplicates_harm_nobody() {
    for seed in 0..4 {
        let rates = FaultRates { lose_ack: 200_000, duplicate: 200_000, delay: 200_000, ..FaultRates::default() };
        run("decode-first", rates, seed);
    }
}

/// A load from an address where nobody is: once it failed nobody dials that address, while one that was asked for is kept.
#[test]
fn an_address_that_no_request_waits_for_is_not_dialled_any_more() {
    let network = LoopbackNetwork::new();
    let make = |config: &ConnectorConfig, greeting: bytes::Bytes| -> Arc<dyn Transport> {
        Arc::new(network.endpoint(config.peer().clone(), greeting, LoopbackConfig::default(), FaultPlan::NONE))
    };
    let mut decode = Engine::new(&Setup { extra: "absent_deadline_ms = 50", ..Setup::decode() }, &make);
    let nowhere = PeerAddress::Loopback(u64::MAX);
    let wait_dialled = |engine: &mut Engine, want: u64| {
        let deadline = Instant::now() + PATIENCE;
        while engine.metrics.snapshot().addresses_dialled != want {
            assert!(Instant::now() < deadline, "{want} should be dialled: {:?}", engine.metrics.snapshot());
            engine.idle_step();
            std::thread::yield_now();
        }
    };
    for (number, id, kept) in [(1, "d1", 0), (2, "d2", 1)] {
        let request = fetch(id, number, TOKENS, nowhere);
        let blocks = decode.blocks(0, TOKENS);
        start_load(&mut decode, &request, &blocks, 0);
        let seen = decode.idle_until("the failure", |applied| !applied.failed.is_empty());
        assert!(seen.failed[0].reason.contains("reach a loopback endpoint"), "{}", seen.failed[0].reason);
        decode.finish(&request, &blocks, EngineFinish::Complete);
        wait_dialled(&mut decode, kept);
        // From now on it is to be reached in any case.
        decode.worker.handle().connect(nowhere).unwrap();
        wait_dialled(&mut decode, 1);
    }
}
