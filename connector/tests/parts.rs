//! Engines of n and m tensor-parallel ranks: every rank gets the heads that it holds, from whoever holds them.

mod common;
mod group;

use std::sync::Arc;

use common::{LAYERS, MakeTransport, PATIENCE, Setup};
use group::{Group, fetch, keep, wait_until_free};
use kvferry::config::ConnectorConfig;
use kvferry::contract::{EngineFinish, Hold, LoadFailure, Request, Scheduler, Worker};
use kvferry_protocol::{BlockId, LayerId, PeerId};
use kvferry_transport::{FaultPlan, FaultRates, LoopbackConfig, LoopbackNetwork, Transport};

fn loopback(
    network: &LoopbackNetwork,
    faults: FaultPlan,
) -> impl Fn(&ConnectorConfig, bytes::Bytes) -> Arc<dyn Transport> + use<> {
    let network = network.clone();
    move |config, greeting| {
        let limits = LoopbackConfig { frame_bytes: 1024, ..LoopbackConfig::default() };
        Arc::new(network.endpoint(config.peer().clone(), greeting, limits, faults))
    }
}

fn over_tcp(config: &ConnectorConfig, greeting: bytes::Bytes) -> Arc<dyn Transport> {
    kvferry::open_transport(config, greeting).unwrap()
}

/// A hand-over of which decode has asked, and prefill knows.
struct HandOver {
    request: Request,
    blocks: Vec<BlockId>,
    source: Request,
    source_blocks: Vec<BlockId>,
}

fn begin(prefill: &mut Group, decode: &mut Group, tokens: u32, local: u32) -> HandOver {
    let request = fetch("d", 1, tokens, prefill.addresses());
    let blocks = decode.blocks(3, tokens);
    for (rank, layer) in (0..decode.ranks.len()).flat_map(|rank| (0..LAYERS).map(move |layer| (rank, layer))) {
        decode.store(rank, layer, &blocks, 0..local);
    }
    decode.start_load(&request, &blocks, local);
    let peer = prefill.question();
    let (source, source_blocks) = accept(prefill, decode.tp_size(), tokens, Some(peer));
    HandOver { request, blocks, source, source_blocks }
}

fn accept(prefill: &mut Group, readers: u16, tokens: u32, to: Option<PeerId>) -> (Request, Vec<BlockId>) {
    let source = keep("p", 1, tokens, to, readers);
    let source_blocks = prefill.blocks(2, tokens);
    prefill.scheduler.allocated(&source, &source_blocks, 0, 0).unwrap();
    (source, source_blocks)
}

/// Runs one hand-over in chunks and checks every byte of every rank.
fn hand_over(prefill: &mut Group, decode: &mut Group, tokens: u32, chunk: u32, local: u32) {
    let HandOver { request, blocks, source, source_blocks } = begin(prefill, decode, tokens, local);
    let mut released = false;
    for at in (0..tokens).step_by(chunk as usize) {
        prefill.prefill_step(&source, &source_blocks, at..(at + chunk).min(tokens));
        let applied = prefill.poll();
        assert!(applied.unwanted.is_empty() || at + chunk >= tokens, "{applied:?}");
        released |= !applied.unwanted.is_empty();
    }
    let hold = prefill.finish(&source, &source_blocks, EngineFinish::Complete);
    assert_eq!(hold == Hold::Free, released, "{hold:?}");

    let applied = decode.idle_until("the load", |applied| {
        assert!(applied.failed.is_empty(), "{applied:?}");
        !applied.loaded.is_empty()
    });
    assert_eq!(applied.loaded, std::slice::from_ref(&request.id));
    // It may have been started by its first layer: the step that reads it waits for the others.
    decode.step(Some((&request, &blocks, tokens - 1..tokens)));
    for rank in &mut decode.ranks {
        for layer in 0..LAYERS {
            assert_eq!(rank.worker.wait_layer(LayerId::new(layer)), []);
        }
        rank.worker.wait_saved();
    }
    decode.check(&blocks, tokens, true);
    if !released {
        prefill.idle_until("the release", |applied| applied.released.len() == 1);
    }
    // Released means that no reader is left, not that the first has gone.
    prefill.pages_are_free(&source_blocks);
    wait_until_free(prefill, decode);
    decode.pages_are_free(&blocks);
    prefill.pages_are_free(&source_blocks);
}

fn groups(prefill: (&Setup, u16), decode: (&Setup, u16), make: MakeTransport<'_>) -> (Group, Group) {
    (Group::new(prefill.0, prefill.1, make), Group::new(decode.0, decode.1, make))
}

#[test]
fn every_rank_gets_its_heads_whatever_the_sizes_layouts_and_block_sizes() {
    let layouts = [("LPBNHC", "LPBNHC"), ("BHLPNC", "BLPNHC"), ("LBHNPC", "BHLPNC"), ("BLPNHC", "LBPHNC")];
    let block_sizes = [(4, 4), (4, 8), (6, 4), (8, 1)];
    let mut case = 0;
    for from in [1, 2, 4, 8] {
        for to in [1, 2, 4, 8] {
            for order in ["decode-first", "prefill-first"] {
                // Each pair of sizes meets another pair of layouts in each order.
                let (layout, per_block) = (layouts[case % 4], block_sizes[(case / 4 + case) % 4]);
                case += 1;
                let network = LoopbackNetwork::new();
                let make = loopback(&network, FaultPlan::NONE);
                let prefill = Setup { order, layout: layout.0, tokens_per_block: per_block.0, ..Setup::prefill() };
                let decode = Setup { order, layout: layout.1, tokens_per_block: per_block.1, ..Setup::decode() };
                let (mut prefill, mut decode) = groups((&prefill, from), (&decode, to), &make);
                hand_over(&mut prefill, &mut decode, 33, 10, 0);
            }
        }
    }
}

#[test]
fn only_what_is_behind_the_local_prefix_travels_and_only_once_for_each_rank() {
    for (from, to) in [(2, 4), (8, 2), (1, 8), (8, 8)] {
        let network = LoopbackNetwork::new();
        let make = loopback(&network, FaultPlan::NONE);
        let (mut prefill, mut decode) = groups((&Setup::prefill(), from), (&Setup::decode(), to), &make);
        hand_over(&mut prefill, &mut decode, 30, 8, 12);
        for (side, group) in [(0, &prefill), (1, &decode)] {
            let moved: u64 = group.ranks.iter().map(|rank| rank.metrics.snapshot().transfer_bytes_total.total()).sum();
            // Every decode rank holds its heads once, however often prefill holds them.
            let heads = u64::from(group::KV_HEADS.max(to));
            assert_eq!(moved, 18 * u64::from(LAYERS) * heads * 2 * 4 * common::DIM as u64, "{from} to {to}, {side}");
        }
    }
}

#[test]
fn the_same_over_tcp() {
    let psk = Some("a key for the whole cluster");
    for (order, from, to) in [("decode-first", 2, 4), ("prefill-first", 4, 1), ("decode-first", 1, 8)] {
        let (mut prefill, mut decode) = groups(
            (&Setup { order, psk, layout: "BLPNHC", ..Setup::prefill() }, from),
            (&Setup { order, psk, tokens_per_block: 8, ..Setup::decode() }, to),
            &over_tcp,
        );
        hand_over(&mut prefill, &mut decode, 33, 10, 0);
    }
}

/// Ends with a failure on every rank, once; returns it.
fn failure(decode: &mut Group) -> LoadFailure {
    let applied = decode.idle_until("the failure", |applied| !applied.failed.is_empty());
    assert_eq!((applied.failed.len(), applied.loaded.len()), (1, 0), "{applied:?}");
    applied.failed.into_iter().next().unwrap()
}

/// Steps decode until nothing is under way; the load may be started by its first layer before it ends.
fn end_of_load(decode: &mut Group) -> Option<LoadFailure> {
    let mut failed = Vec::new();
    let deadline = std::time::Instant::now() + PATIENCE;
    while decode.scheduler.has_pending() {
        failed.extend(decode.idle_step().failed);
        assert!(std::time::Instant::now() < deadline, "the load does not end");
        std::thread::yield_now();
    }
    assert!(failed.len() <= 1, "{failed:?}");
    failed.pop()
}

/// What is called good is right on every rank, and nothing is held on either side.
fn check_end(prefill: &mut Group, decode: &mut Group, hand_over: &HandOver, failure: Option<&LoadFailure>) {
    wait_until_free(prefill, decode);
    let good = failure.map_or(hand_over.request.prompt_tokens, |failure| failure.good_tokens);
    decode.check(&hand_over.blocks, good, false);
    decode.pages_are_free(&hand_over.blocks);
    prefill.pages_are_free(&hand_over.source_blocks);
}

const SHORT: &str = "transfer_deadline_ms = 15000\nprogress_deadline_ms = 3000\nverdict_timeout_ms = 2000\n\
                     absent_deadline_ms = 1000\nlease_ttl_ms = 4000\nchunk_bytes = 4096\nslab_pool_bytes = 16384";

#[test]
fn a_corrupted_part_takes_the_load_with_it_on_all_ranks_and_its_good_prefix_is_the_shortest() {
    for (from, to) in [(2, 1), (2, 4), (4, 2)] {
        let network = LoopbackNetwork::new();
        let rates = FaultRates { flip: 1_000_000, ..FaultRates::default() };
        let (good, bad) = (loopback(&network, FaultPlan::NONE), loopback(&network, FaultPlan { seed: 3, rates }));
        let extra = "chunk_bytes = 4096\nslab_pool_bytes = 16384\nlayerwise = false";
        // Only the last prefill rank's bytes break.
        let make = |rank| -> MakeTransport<'_> { if rank + 1 == from { &bad } else { &good } };
        let mut prefill = Group::with(&Setup { extra, ..Setup::prefill() }, from, make);
        let mut decode = Group::new(&Setup { extra, ..Setup::decode() }, to, &good);
        let started = begin(&mut prefill, &mut decode, 40, 8);
        for start in (0..40).step_by(8) {
            prefill.prefill_step(&started.source, &started.source_blocks, start..start + 8);
        }
        prefill.finish(&started.source, &started.source_blocks, EngineFinish::Complete);
        let failure = failure(&mut decode);
        assert_eq!(failure.good_tokens, 8, "{from} to {to}: nothing of the broken part is good, the local prefix is");
        assert!(failure.reason.contains("digest"), "{}", failure.reason);
        check_end(&mut prefill, &mut decode, &started, Some(&failure));
        let blocks = failure.good_blocks;
        assert_eq!(blocks, [], "the load's own blocks");
    }
}

#[test]
fn cuts_of_some_ranks_heal_or_end_the_load_with_its_good_prefix() {
    let mut done = 0;
    for seed in 0..8 {
        let network = LoopbackNetwork::new();
        let rates = FaultRates { cut: 30_000, delay: 100_000, lose_ack: 20_000, ..FaultRates::default() };
        let make = loopback(&network, FaultPlan { seed, rates });
        let order = if seed % 2 == 0 { "decode-first" } else { "prefill-first" };
        let (from, to) = [(2, 4), (4, 2), (8, 1), (1, 8)][seed as usize % 4];
        let mut prefill = Group::new(&Setup { order, extra: SHORT, ..Setup::prefill() }, from, &make);
        let calm = loopback(&network, FaultPlan::NONE);
        let mut decode = Group::new(&Setup { order, extra: SHORT, ..Setup::decode() }, to, &calm);
        let started = begin(&mut prefill, &mut decode, 40, 0);
        for start in (0..40).step_by(8) {
            prefill.prefill_step(&started.source, &started.source_blocks, start..start + 8);
        }
        prefill.finish(&started.source, &started.source_blocks, EngineFinish::Complete);
        let failure = end_of_load(&mut decode);
        done += usize::from(failure.is_none());
        check_end(&mut prefill, &mut decode, &started, failure.as_ref());
    }
    assert!(done > 0, "some loads heal");
}

#[test]
fn an_abort_on_either_side_ends_every_part_and_frees_everything() {
    for (from, to) in [(2, 4), (4, 1), (8, 2)] {
        for aborted in ["decode", "prefill", "preempted"] {
            let network = LoopbackNetwork::new();
            let make = loopback(&network, FaultPlan::NONE);
            let (mut prefill, mut decode) = groups((&Setup::prefill(), from), (&Setup::decode(), to), &make);
            let started = begin(&mut prefill, &mut decode, 40, 0);
            prefill.prefill_step(&started.source, &started.source_blocks, 0..16);
            match aborted {
                "decode" => {
                    let hold = decode.finish(&started.request, &started.blocks, EngineFinish::Aborted);
                    assert!(matches!(hold, Hold::Until { .. }));
                    decode.idle_until("the release", |applied| applied.released.len() == 1);
                    prefill.idle_until("the consumer's end", |applied| applied.unwanted.len() == 1);
                    let hold = prefill.finish(&started.source, &started.source_blocks, EngineFinish::Aborted);
                    assert_eq!(hold, Hold::Free);
                    wait_until_free(&mut prefill, &mut decode);
                    decode.pages_are_free(&started.blocks);
                    prefill.pages_are_free(&started.source_blocks);
                }
                "prefill" => {
                    let hold = prefill.finish(&started.source, &started.source_blocks, EngineFinish::Aborted);
                    assert!(matches!(hold, Hold::Until { .. }));
                    prefill.idle_until("the release", |applied| applied.released.len() == 1);
                    let failure = failure(&mut decode);
                    assert!(failure.good_tokens <= 16, "{failure:?}");
                    check_end(&mut prefill, &mut decode, &started, Some(&failure));
                }
                _ => {
                    // Pages are free when `preempted` returns, whatever the other ranks do.
                    let id = std::slice::from_ref(&started.request.id);
                    decode.ranks[0].worker.preempted(id);
                    drop(decode.ranks[0].cache.guard_write(&started.blocks, 0..LAYERS).unwrap());
                    let failure = failure(&mut decode);
                    assert!(failure.reason.contains("ancelled"), "{}", failure.reason);
                    check_end(&mut prefill, &mut decode, &started, Some(&failure));
                }
            }
        }
    }
}

#[test]
fn a_prefill_rank_that_dies_fails_the_load_and_frees_the_others() {
    for (from, to) in [(2, 1), (4, 2), (2, 4)] {
        let network = LoopbackNetwork::new();
        let make = loopback(&network, FaultPlan::NONE);
        let extra = SHORT;
        let prefill = Setup { extra, ..Setup::prefill() };
        let (mut prefill, mut decode) = groups((&prefill, from), (&Setup { extra, ..Setup::decode() }, to), &make);
        let started = begin(&mut prefill, &mut decode, 40, 0);
        prefill.prefill_step(&started.source, &started.source_blocks, 0..16);
        prefill.kill(usize::from(from) - 1);
        let failure = failure(&mut decode);
        assert!(failure.good_tokens <= 16, "{failure:?}");
        check_end(&mut prefill, &mut decode, &started, Some(&failure));
    }
}

#[test]
fn what_does_not_fit_together_is_refused_with_what_to_set() {
    let network = LoopbackNetwork::new();
    let make = loopback(&network, FaultPlan::NONE);
    for (from, to, pick, want) in [
        (2, 2, vec![1, 0], "list the prefill engine's addresses by rank"),
        (2, 1, vec![0], "is one of 2 ranks, but 1 addresses were given"),
        (4, 2, vec![0, 1], "is one of 4 ranks, but 2 addresses were given"),
        (1, 1, vec![0, 0, 0], "4 KV heads do not spread evenly over 3 ranks"),
    ] {
        let (prefill, mut decode) = groups((&Setup::prefill(), from), (&Setup::decode(), to), &make);
        let addresses = prefill.addresses();
        let listed = pick.iter().map(|&rank: &usize| addresses[rank]).collect();
        let request = fetch("d", 1, 20, listed);
        let blocks = decode.blocks(0, 20);
        decode.start_load(&request, &blocks, 0);
        let failure = failure(&mut decode);
        assert!(failure.reason.contains(want), "{from} to {to}, {pick:?}: {}", failure.reason);
        assert!(decode.holds_nothing());
        decode.pages_are_free(&blocks);
    }
    // Two engines in one list.
    let (prefill, mut decode) = groups((&Setup::prefill(), 2), (&Setup::decode(), 1), &make);
    let other = Group::new(&Setup { name: "other", ..Setup::prefill() }, 2, &make);
    let request = fetch("d", 1, 20, vec![prefill.addresses()[0], other.addresses()[1]]);
    let blocks = decode.blocks(0, 20);
    decode.start_load(&request, &blocks, 0);
    let failure = failure(&mut decode);
    assert!(failure.reason.contains("are two engines"), "{}", failure.reason);
}

#[test]
fn a_wrong_number_of_readers_is_refused_on_both_sides_with_what_to_set() {
    let cases = [
        (1, 2, 1, "`\"tp_size\": 2` in vLLM's kv_transfer_params, `readers` in Rust"),
        (2, 1, 2, "`\"tp_size\": 1` in vLLM's kv_transfer_params, `readers` in Rust"),
        (2, 2, 3, "4 KV heads do not spread evenly over 3 ranks"),
    ];
    for ((from, to, said, want), asked_first) in cases.into_iter().flat_map(|case| [(case, true), (case, false)]) {
        let network = LoopbackNetwork::new();
        let make = loopback(&network, FaultPlan::NONE);
        let (send, load) = (Setup { extra: SHORT, ..Setup::prefill() }, Setup { extra: SHORT, ..Setup::decode() });
        let (mut prefill, mut decode) = groups((&send, from), (&load, to), &make);
        let request = fetch("d", 1, 20, prefill.addresses());
        let blocks = decode.blocks(0, 20);
        let reader = group::config(&load, 0, to).peer().clone();
        if asked_first {
            decode.start_load(&request, &blocks, 0);
            assert_eq!(prefill.question(), reader);
        }
        let (source, source_blocks) = accept(&mut prefill, said, 20, Some(reader));
        prefill.prefill_step(&source, &source_blocks, 0..20);
        if !asked_first {
            decode.start_load(&request, &blocks, 0);
        }
        let failure = failure(&mut decode);
        assert!(failure.reason.contains(want), "{from} to {to}, {said}, {asked_first}: {}", failure.reason);
        prefill.idle_until("the end", |applied| applied.unwanted.len() == 1);
        wait_until_free(&mut prefill, &mut decode);
        decode.pages_are_free(&blocks);
        prefill.pages_are_free(&source_blocks);
    }
}

#[test]
fn a_worker_whose_heads_are_not_its_ranks_does_not_start() {
    let config = group::config(&Setup::prefill(), 1, 4);
    let layout = Group::new(&Setup::prefill(), 2, &loopback(&LoopbackNetwork::new(), FaultPlan::NONE)).ranks[1]
        .cache
        .layout()
        .clone();
    let shard = kvferry_protocol::layout::Shard { first_head: 2, ..Default::default() };
    let error = kvferry::pd::greeting(&config, &group::manifest(), shard, &layout).unwrap_err().to_string();
    assert!(error.contains("tp_rank 1 of 4 holds 1..2"), "{error}");
    let config = group::config(&Setup::prefill(), 1, 3);
    let error = kvferry::pd::greeting(&config, &group::manifest(), shard, &layout).unwrap_err().to_string();
    assert!(error.contains("tp_size is 3") && error.contains("do not spread evenly"), "{error}");
}

#[test]
fn a_request_is_sent_when_its_last_reader_is_done_not_its_first() {
    let network = LoopbackNetwork::new();
    let make = loopback(&network, FaultPlan::NONE);
    let (mut prefill, mut decode) = groups((&Setup::prefill(), 1), (&Setup::decode(), 2), &make);
    let started = begin(&mut prefill, &mut decode, 40, 0);
    prefill.prefill_step(&started.source, &started.source_blocks, 0..16);
    // Rank 1 goes; rank 0 still waits for the rest, since its scheduler has not heard of it.
    decode.ranks[1].worker.preempted(std::slice::from_ref(&started.request.id));
    let live = |group: &Group| group.ranks[0].metrics.snapshot().transfers_live.total();
    prefill.idle_until_state("one reader is left", |group, applied| {
        assert!(applied.unwanted.is_empty(), "rank 0 still reads");
        live(group) == 1
    });
    assert!(prefill.poll().unwanted.is_empty(), "rank 0 still reads");
    assert!(
        prefill.ranks[0].cache.guard_write(&started.source_blocks[..1], 0..1).is_err(),
        "for it the pages are held"
    );
    let failure = failure(&mut decode);
    prefill.idle_until("the last reader's end", |applied| applied.unwanted.len() == 1);
    check_end(&mut prefill, &mut decode, &started, Some(&failure));
}
