//! Two engines, two schedulers, two workers: bytes go from one cache into the other through the contract alone.

mod common;

use std::sync::Arc;

use common::{Engine, MakeTransport, PATIENCE, Setup, fetch, keep, start_load, wait_until_free};
use kvferry::contract::{EngineFinish, Hold, Request, RequestId, ScheduledStep, Scheduler, TransferParams, Worker};
use kvferry_protocol::message::EngineBytes;
use kvferry_protocol::{BlockId, LayerId};
use kvferry_transport::{FaultPlan, LoopbackConfig, LoopbackNetwork, Transport};

fn loopback(
    network: &LoopbackNetwork,
    faults: FaultPlan,
) -> impl Fn(&kvferry::config::ConnectorConfig, bytes::Bytes) -> Arc<dyn Transport> {
    let network = network.clone();
    move |config, greeting| {
        Arc::new(network.endpoint(config.peer().clone(), greeting, LoopbackConfig::default(), faults))
    }
}

/// Runs one hand-over in chunks and returns when decode has all of it.
fn hand_over(prefill: &mut Engine, decode: &mut Engine, tokens: u32, chunk: u32, local: u32) {
    hand_over_as(1, prefill, decode, tokens, chunk, local);
}

/// The same under a number of its own, for more than one between the same engines.
fn hand_over_as(number: u32, prefill: &mut Engine, decode: &mut Engine, tokens: u32, chunk: u32, local: u32) {
    let to = (prefill.worker.local_address(), decode.worker.local_address());
    let request = fetch(&format!("d{number}"), number.into(), tokens, to.0);
    let blocks = decode.blocks(3, tokens);
    for layer in 0..common::LAYERS {
        decode.store(layer, &blocks, 0..local);
    }
    start_load(decode, &request, &blocks, local);
    // The engine message reaches prefill over the connector's own session.
    let (peer, ask) = prefill.worker.messages().recv_timeout(PATIENCE).unwrap();
    assert_eq!(&ask[..], b"please");

    let source = keep(&format!("p{number}"), number.into(), tokens, Some(peer));
    let source_blocks = prefill.blocks(2, tokens);
    prefill.scheduler.allocated(&source, &source_blocks, 0, 0).unwrap();
    let mut at = 0;
    while at < tokens {
        let end = (at + chunk).min(tokens);
        prefill.prefill_step(&source, &source_blocks, at..end);
        let results = prefill.worker.poll();
        prefill.scheduler.apply(vec![results]);
        at = end;
    }
    let hold = prefill.finish(&source, &source_blocks, EngineFinish::Complete);

    decode.idle_until("the load", |applied| {
        assert!(applied.failed.is_empty(), "{applied:?}");
        !applied.loaded.is_empty()
    });
    // It may have been started by its first layer: the step that reads it waits for the others.
    let meta = decode.step(&request, &blocks, tokens - 1..tokens);
    decode.worker.begin_step(meta).unwrap();
    for layer in 0..common::LAYERS {
        assert_eq!(decode.worker.wait_layer(LayerId::new(layer)), []);
    }
    decode.worker.wait_saved();
    assert_eq!(decode.read(&blocks, tokens), prefill.read(&source_blocks, tokens));
    if matches!(hold, Hold::Until { .. }) {
        prefill.idle_until("the release", |applied| applied.released.len() == 1);
    }
    wait_until_free(prefill, decode);
}

fn engines(prefill: &Setup, decode: &Setup, make: MakeTransport<'_>) -> (Engine, Engine) {
    (Engine::new(prefill, make), Engine::new(decode, make))
}

#[test]
fn all_tokens_arrive_in_both_orders_layouts_block_sizes_and_chunkings() {
    for order in ["decode-first", "prefill-first"] {
        for (layouts, block_sizes) in [
            (("LPBNHC", "LPBNHC"), (4, 4)),
            (("BLPNHC", "BLPNHC"), (4, 4)),
            (("LBHNPC", "BHLPNC"), (4, 8)),
            (("BPHLNC", "PLBNHC"), (6, 4)),
            (("BLHNPC", "LBPHNC"), (8, 1)),
        ] {
            for (tokens, chunk) in [(1, 8), (7, 8), (8, 8), (9, 8), (33, 10), (40, 40)] {
                let network = LoopbackNetwork::new();
                let make = loopback(&network, FaultPlan::NONE);
                let prefill = Setup { order, layout: layouts.0, tokens_per_block: block_sizes.0, ..Setup::prefill() };
                let decode = Setup { order, layout: layouts.1, tokens_per_block: block_sizes.1, ..Setup::decode() };
                let (mut prefill, mut decode) = engines(&prefill, &decode, &make);
                hand_over(&mut prefill, &mut decode, tokens, chunk, 0);
            }
        }
    }
}

#[test]
fn only_what_is_behind_the_local_prefix_travels() {
    let network = LoopbackNetwork::new();
    let make = loopback(&network, FaultPlan::NONE);
    let (mut prefill, mut decode) = engines(&Setup::prefill(), &Setup::decode(), &make);
    hand_over(&mut prefill, &mut decode, 30, 8, 12);
    let moved: u64 = decode.metrics.snapshot().transfer_bytes_total.total();
    assert_eq!(moved, 18 * u64::from(common::LAYERS) * u64::from(common::HEADS) * 2 * 4 * common::DIM as u64);
}

#[test]
fn another_model_is_refused_by_the_name_of_the_field() {
    let network = LoopbackNetwork::new();
    let make = loopback(&network, FaultPlan::NONE);
    let other = Setup { model: "other", ..Setup::prefill() };
    let (prefill, mut decode) = engines(&other, &Setup::decode(), &make);
    let request = fetch("d", 1, 20, prefill.address());
    let blocks = decode.blocks(0, 20);
    start_load(&mut decode, &request, &blocks, 0);
    let applied = decode.idle_until("the failure", |applied| !applied.failed.is_empty());
    let reason = &applied.failed[0].reason;
    assert!(reason.contains("model: ours is \"toy\", theirs is \"other\""), "{reason}");
    assert!(decode.holds_nothing());
}

/// Nothing but decode's word ends a lease while a test is patient.
const LONG_LEASE: &str = "lease_ttl_ms = 600000";

/// Prefill computes a prompt and finishes; returns its request.
fn computed(prefill: &mut Engine, transfer: u128) -> Request {
    let source = keep(&format!("p{transfer}"), transfer, 20, None);
    let blocks = prefill.blocks(0, 20);
    prefill.scheduler.allocated(&source, &blocks, 0, 0).unwrap();
    prefill.prefill_step(&source, &blocks, 0..20);
    prefill.finish(&source, &blocks, EngineFinish::Complete);
    source
}

#[test]
fn a_leg_that_decode_refuses_lets_prefill_go_at_once() {
    for keep_comes_first in [true, false] {
        let network = LoopbackNetwork::new();
        let make = loopback(&network, FaultPlan::NONE);
        let setup = Setup { extra: LONG_LEASE, ..Setup::prefill() };
        let (mut prefill, mut decode) = engines(&setup, &Setup::decode(), &make);
        let metrics = Arc::clone(&prefill.metrics);
        let early = keep_comes_first.then(|| computed(&mut prefill, 1));
        prefill.idle_until("the keep", |_| !keep_comes_first || metrics.snapshot().leases_live == 1);
        decode.scheduler.unadmitted(&fetch("refused", 1, 20, prefill.address()));
        let other = fetch("other", 2, 20, prefill.address());
        let blocks = decode.blocks(0, 20);
        start_load(&mut decode, &other, &blocks, 0);
        // The other's question comes behind the refusal, on the same lane.
        prefill.worker.messages().recv_timeout(PATIENCE).unwrap();
        let source = early.unwrap_or_else(|| computed(&mut prefill, 1));
        prefill.idle_until("the release", |applied| applied.released == [source.id.clone()]);
        // The blocks come back first, then the transfer ends.
        prefill.idle_until("the end", |_| metrics.snapshot().leases_live == 0);
        let cancelled = metrics.snapshot().transfers_cancelled_total.total();
        assert_eq!(cancelled, u64::from(keep_comes_first), "what never began is not counted");
    }
}

#[test]
fn a_load_that_the_worker_refuses_lets_prefill_go_at_once_and_harms_no_other() {
    let network = LoopbackNetwork::new();
    let make = loopback(&network, FaultPlan::NONE);
    let setup = Setup { extra: LONG_LEASE, ..Setup::prefill() };
    let (mut prefill, mut decode) = engines(&setup, &Setup { extra: "max_transfers = 1", ..Setup::decode() }, &make);
    let (first, second) = (fetch("d1", 1, 20, prefill.address()), fetch("d2", 2, 20, prefill.address()));
    let blocks = decode.blocks(0, 20);
    start_load(&mut decode, &first, &blocks, 0);
    let source = computed(&mut prefill, 2);
    let more = decode.blocks(20, 20);
    start_load(&mut decode, &second, &more, 0);
    let applied = decode.idle_until("the refusal", |applied| !applied.failed.is_empty());
    assert!(applied.failed[0].reason.contains("raise max_transfers"), "{}", applied.failed[0].reason);
    prefill.idle_until("the release", |applied| applied.released == [source.id.clone()]);
    // A leg that names what another request loads is refused, and the load goes on.
    decode.scheduler.unadmitted(&Request { id: RequestId::new("again"), ..first.clone() });
    let source = computed(&mut prefill, 1);
    decode.idle_until("the load", |applied| {
        assert!(applied.failed.is_empty(), "{applied:?}");
        applied.loaded == [first.id.clone()]
    });
    prefill.idle_until("the release", |applied| applied.released == [source.id.clone()]);
}

#[test]
fn an_abort_on_either_side_ends_both_and_frees_everything() {
    for aborted in ["decode", "prefill"] {
        let network = LoopbackNetwork::new();
        let make = loopback(&network, FaultPlan::NONE);
        let (mut prefill, mut decode) = engines(&Setup::prefill(), &Setup::decode(), &make);
        let request = fetch("d", 1, 40, prefill.address());
        let blocks = decode.blocks(0, 40);
        start_load(&mut decode, &request, &blocks, 0);
        prefill.worker.messages().recv_timeout(PATIENCE).unwrap();
        let source = keep("p", 1, 40, None);
        let source_blocks = prefill.blocks(0, 40);
        prefill.scheduler.allocated(&source, &source_blocks, 0, 0).unwrap();
        prefill.prefill_step(&source, &source_blocks, 0..16);
        if aborted == "decode" {
            let hold = decode.finish(&request, &blocks, EngineFinish::Aborted);
            assert!(matches!(hold, Hold::Until { .. }));
            decode.idle_until("the release", |applied| applied.released.len() == 1);
            prefill.idle_until("the consumer's end", |applied| applied.unwanted.len() == 1);
            assert_eq!(prefill.finish(&source, &source_blocks, EngineFinish::Aborted), Hold::Free);
        } else {
            assert!(matches!(prefill.finish(&source, &source_blocks, EngineFinish::Aborted), Hold::Until { .. }));
            prefill.idle_until("the release", |applied| applied.released.len() == 1);
            let applied = decode.idle_until("the failure", |applied| !applied.failed.is_empty());
            assert!(applied.failed[0].good_tokens <= 16);
        }
        wait_until_free(&mut prefill, &mut decode);
        // Nothing holds the pages any more.
        drop(decode.cache.guard_write(&blocks, 0..common::LAYERS).unwrap());
        drop(prefill.cache.guard_write(&source_blocks, 0..common::LAYERS).unwrap());
    }
}

fn over_tcp(config: &kvferry::config::ConnectorConfig, greeting: bytes::Bytes) -> Arc<dyn Transport> {
    kvferry::open_transport(config, greeting).unwrap()
}

#[test]
fn the_same_over_tcp() {
    let psk = Some("a key for the whole cluster");
    for order in ["decode-first", "prefill-first"] {
        for (from, to) in [("LPBNHC", "BLPNHC"), ("BHLPNC", "BHLPNC")] {
            let (mut prefill, mut decode) = engines(
                &Setup { order, psk, layout: from, ..Setup::prefill() },
                &Setup { order, psk, layout: to, tokens_per_block: 8, ..Setup::decode() },
                &over_tcp,
            );
            hand_over(&mut prefill, &mut decode, 33, 10, 0);
        }
    }
}

#[test]
fn what_is_packed_is_lent_to_a_peer_of_this_host_as_pages_are() {
    let psk = Some("a key for the whole cluster");
    for extra in ["paths = [\"shm\"]\npacked_run_bytes = 65536\n", "paths = [\"cma\"]\npacked_run_bytes = 65536\n"] {
        let sender = std::sync::OnceLock::new();
        let keep = |config: &kvferry::config::ConnectorConfig, greeting| {
            let transport = over_tcp(config, greeting);
            sender.get_or_init(|| Arc::clone(&transport));
            transport
        };
        let (mut prefill, mut decode) = engines(
            &Setup { psk, extra, ..Setup::prefill() },
            &Setup { psk, extra, layout: "BLPNHC", tokens_per_block: 8, ..Setup::decode() },
            &keep,
        );
        // What is posted before the peer has said that it can read the memory goes over the lanes.
        let all_lent = (1..=50).any(|number| {
            let before = sender.get().unwrap().stats();
            hand_over_as(number, &mut prefill, &mut decode, 33, 10, 0);
            let after = sender.get().unwrap().stats();
            assert!(after.sent_bytes > before.sent_bytes);
            after.sent_bytes - before.sent_bytes == after.lent_bytes - before.lent_bytes
        });
        assert!(all_lent, "{extra}: {:?}", sender.get().unwrap().stats());
    }
}

#[test]
fn another_key_fails_the_load_at_once_and_says_so() {
    let (prefill, mut decode) = engines(
        &Setup { psk: Some("a key for the whole cluster"), ..Setup::prefill() },
        &Setup { psk: Some("another key, by mistake"), ..Setup::decode() },
        &over_tcp,
    );
    let request = fetch("d", 1, 20, prefill.address());
    let blocks = decode.blocks(0, 20);
    start_load(&mut decode, &request, &blocks, 0);
    let applied = decode.idle_until("the failure", |applied| !applied.failed.is_empty());
    assert!(applied.failed[0].reason.contains("same key"), "{}", applied.failed[0].reason);
}

#[test]
fn an_engines_own_memory_is_used_in_place() {
    let network = LoopbackNetwork::new();
    let make = loopback(&network, FaultPlan::NONE);
    for (raw_prefill, raw_decode) in [(true, false), (false, true), (true, true)] {
        let (mut prefill, mut decode) = engines(
            &Setup { raw: raw_prefill, ..Setup::prefill() },
            &Setup { raw: raw_decode, ..Setup::decode() },
            &make,
        );
        hand_over(&mut prefill, &mut decode, 33, 10, 0);
    }
}

#[test]
fn a_save_that_comes_after_the_transfers_end_begins_no_new_one() {
    let network = LoopbackNetwork::new();
    let make = loopback(&network, FaultPlan::NONE);
    let (mut prefill, mut decode) = engines(&Setup::prefill(), &Setup::decode(), &make);
    let request = fetch("d", 1, 40, prefill.address());
    let blocks = decode.blocks(0, 40);
    start_load(&mut decode, &request, &blocks, 0);
    let (peer, _) = prefill.worker.messages().recv_timeout(PATIENCE).unwrap();
    let source = keep("p", 1, 40, Some(peer));
    let source_blocks = prefill.blocks(0, 40);
    prefill.scheduler.allocated(&source, &source_blocks, 0, 0).unwrap();
    prefill.prefill_step(&source, &source_blocks, 0..16);
    // The consumer goes, and the engine has planned its next step before it hears of that.
    decode.finish(&request, &blocks, EngineFinish::Aborted);
    decode.idle_until("the release", |applied| applied.released.len() == 1);
    let deadline = std::time::Instant::now() + PATIENCE;
    while !prefill.holds_nothing() {
        assert!(std::time::Instant::now() < deadline);
        std::thread::yield_now();
    }
    prefill.prefill_step(&source, &source_blocks, 16..40);
    let results = prefill.worker.poll();
    assert_eq!(prefill.scheduler.apply(vec![results]).unwanted, std::slice::from_ref(&source.id));
    assert_eq!(prefill.finish(&source, &source_blocks, EngineFinish::Aborted), Hold::Free);
    prefill.worker.preempted(&[]); // the driver has taken all commands
    assert!(prefill.holds_nothing());
    drop(prefill.cache.guard_write(&source_blocks, 0..common::LAYERS).expect("free blocks are nobody's"));
}

#[test]
fn peers_that_would_wait_for_each_other_are_refused_by_name() {
    let network = LoopbackNetwork::new();
    let make = loopback(&network, FaultPlan::NONE);
    let other = Setup { order: "prefill-first", ..Setup::prefill() };
    let (prefill, mut decode) = engines(&other, &Setup::decode(), &make);
    for round in 0..2 {
        let request = fetch(&format!("d{round}"), round, 20, prefill.address());
        let blocks = decode.blocks(0, 20);
        start_load(&mut decode, &request, &blocks, 0);
        let applied = decode.idle_until("the failure", |applied| !applied.failed.is_empty());
        let reason = &applied.failed[0].reason;
        assert!(reason.contains("order"), "{reason}");
    }
}

#[test]
fn a_prompt_that_is_given_up_before_its_first_chunk_ends_the_load_at_once() {
    for (order, granted, named) in [
        ("decode-first", true, true),
        ("decode-first", true, false),
        ("decode-first", false, true),
        ("prefill-first", false, true),
    ] {
        let network = LoopbackNetwork::new();
        let make = loopback(&network, FaultPlan::NONE);
        // Longer than a test waits: only prefill's word can end the load.
        let extra = "transfer_deadline_ms = 600000\nprogress_deadline_ms = 600000";
        let (mut prefill, mut decode) =
            engines(&Setup { extra, order, ..Setup::prefill() }, &Setup { extra, order, ..Setup::decode() }, &make);
        let request = fetch("d", 1, 40, prefill.address());
        let blocks = decode.blocks(0, 40);
        start_load(&mut decode, &request, &blocks, 0);
        let (peer, _) = prefill.worker.messages().recv_timeout(PATIENCE).unwrap();
        if granted {
            // The grant follows the question.
            let deadline = std::time::Instant::now() + PATIENCE;
            while prefill.metrics.snapshot().early_grants_live == 0 {
                assert!(std::time::Instant::now() < deadline);
                std::thread::yield_now();
            }
        }
        let source = keep("p", 1, 40, named.then_some(peer));
        let source_blocks = prefill.blocks(0, 40);
        prefill.scheduler.allocated(&source, &source_blocks, 0, 0).unwrap();
        assert!(matches!(prefill.finish(&source, &source_blocks, EngineFinish::Aborted), Hold::Until { .. }));
        prefill.idle_until("the release", |applied| applied.released.len() == 1);
        let applied = decode.idle_until("the failure", |applied| !applied.failed.is_empty());
        assert!(applied.failed[0].reason.contains("gave the request up"), "{}", applied.failed[0].reason);
        wait_until_free(&mut prefill, &mut decode);
    }
}

#[test]
fn the_longest_question_arrives_and_a_longer_one_fails_at_once() {
    let network = LoopbackNetwork::new();
    let make = loopback(&network, FaultPlan::NONE);
    let (prefill, mut decode) = engines(&Setup::prefill(), &Setup::decode(), &make);
    for (id, transfer, bytes) in [("longest", 1, EngineBytes::MAX_BYTES), ("longer", 2, EngineBytes::MAX_BYTES + 1)] {
        let mut request = fetch(id, transfer, 20, prefill.address());
        let Some(TransferParams::Fetch { ask, .. }) = &mut request.params else { unreachable!("fetch makes a Fetch") };
        *ask = vec![7; bytes];
        let blocks = decode.blocks(0, 20);
        start_load(&mut decode, &request, &blocks, 0);
        if bytes <= EngineBytes::MAX_BYTES {
            let (_, asked) = prefill.worker.messages().recv_timeout(PATIENCE).unwrap();
            assert_eq!(asked.len(), bytes);
            decode.finish(&request, &blocks, EngineFinish::Aborted);
            decode.idle_until("the release", |applied| applied.released.len() == 1);
        } else {
            let applied = decode.idle_until("the failure", |applied| !applied.failed.is_empty());
            let reason = &applied.failed[0].reason;
            assert!(reason.contains("engine message"), "{reason}");
        }
    }
}

#[test]
fn another_stage_of_an_engines_pipeline_is_not_its_restart() {
    let network = LoopbackNetwork::new();
    let make = loopback(&network, FaultPlan::NONE);
    let (mut prefill, mut decode) = engines(&Setup::prefill(), &Setup::decode(), &make);
    let stage = Engine::new(&Setup { incarnation: 2, extra: "pp_rank = 1", ..Setup::prefill() }, &make);
    let request = fetch("d", 1, 20, prefill.address());
    let blocks = decode.blocks(0, 20);
    start_load(&mut decode, &request, &blocks, 0);
    let (peer, _) = prefill.worker.messages().recv_timeout(PATIENCE).unwrap();
    decode.worker.handle().connect(stage.address()).unwrap();
    let deadline = std::time::Instant::now() + PATIENCE;
    while decode.metrics.snapshot().sessions_live < 2 {
        assert!(std::time::Instant::now() < deadline);
        std::thread::yield_now();
    }
    let source = keep("p", 1, 20, Some(peer));
    let source_blocks = prefill.blocks(0, 20);
    prefill.scheduler.allocated(&source, &source_blocks, 0, 0).unwrap();
    prefill.prefill_step(&source, &source_blocks, 0..20);
    decode.idle_until("the load", |applied| {
        assert!(applied.failed.is_empty(), "{applied:?}");
        !applied.loaded.is_empty()
    });
}

#[test]
fn a_transfer_carries_the_request_that_began_it_and_no_other() {
    let network = LoopbackNetwork::new();
    let make = loopback(&network, FaultPlan::NONE);
    let (mut prefill, mut decode) = engines(&Setup::prefill(), &Setup::decode(), &make);
    let request = fetch("d", 1, 20, prefill.address());
    let blocks = decode.blocks(0, 20);
    start_load(&mut decode, &request, &blocks, 0);
    let (peer, _) = prefill.worker.messages().recv_timeout(PATIENCE).unwrap();
    let (first, second) = (keep("first", 1, 20, Some(peer.clone())), keep("second", 1, 20, Some(peer)));
    let first_blocks = prefill.blocks(0, 20);
    let second_blocks: Vec<_> = (50..55).map(BlockId::new).collect();
    prefill.scheduler.allocated(&first, &first_blocks, 0, 0).unwrap();
    prefill.scheduler.allocated(&second, &second_blocks, 0, 0).unwrap();
    prefill.prefill_step(&first, &first_blocks, 0..8);
    // The second one's pages hold something else.
    let meta = prefill.step(&second, &second_blocks, 0..20);
    prefill.worker.begin_step(meta).unwrap();
    prefill.worker.wait_saved();
    prefill.idle_until("the refusal", |applied| applied.unwanted == std::slice::from_ref(&second.id));
    prefill.prefill_step(&first, &first_blocks, 8..20);
    decode.idle_until("the load", |applied| {
        assert!(applied.failed.is_empty(), "{applied:?}");
        !applied.loaded.is_empty()
    });
    let deadline = std::time::Instant::now() + PATIENCE;
    while !decode.holds_nothing() {
        assert!(std::time::Instant::now() < deadline);
        std::thread::yield_now();
    }
    assert_eq!(decode.read(&blocks, 20), prefill.read(&first_blocks, 20));
}

#[test]
fn a_scheduler_half_with_another_block_size_than_the_cache_is_told_so() {
    let network = LoopbackNetwork::new();
    let make = loopback(&network, FaultPlan::default());
    let (prefill, mut decode) = engines(&Setup::prefill(), &Setup::decode(), &make);
    let request = fetch("d", 1, 40, prefill.worker.local_address());
    let blocks = decode.blocks(3, 40);
    decode.scheduler.allocated(&request, &blocks, 0, 40).unwrap();
    let mut meta = decode.scheduler.build_step(&ScheduledStep::default());
    meta.loads[0].blocks.pop();
    decode.worker.begin_step(meta).unwrap();
    decode.idle_until("the refusal", |applied| {
        let told = applied.failed.first().is_some_and(|failure| failure.reason.contains("tokens_per_block"));
        assert!(applied.failed.is_empty() || told, "{applied:?}");
        told
    });
}
