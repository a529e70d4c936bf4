//! Engines of n and m tensor-parallel ranks: every rank gets the heads that it holds, from whoever holds them.

mod common;
mod group;

use std::sync::Arc;

use common::{LAYERS, MakeTransport, Setup};
use group::{Group, fetch, keep, wait_until_free};
use kvferry::config::ConnectorConfig;
use kvferry::contract::{EngineFinish, Hold, Request, Worker};
use kvferry_protocol::{BlockId, LayerId, PeerId};
use kvferry_transport::{FaultPlan, LoopbackConfig, LoopbackNetwork, Transport};

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
    use kvferry::contract::Scheduler;
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
