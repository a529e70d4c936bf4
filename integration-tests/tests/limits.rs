//! Nodes at the end of what their system or their configuration gives them: they say so, serve slower or from what they have, and
//! recover when it is there again.

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use kvferry_integration_tests::{Chance, Cluster, Node, Reference, Setup, Shape, Tally, wait_until};
use kvferry_kernels::KvDtype;

fn setup() -> Setup {
    Setup::new(env!("CARGO_BIN_EXE_node"))
        .args("--chunk 64 --blocks 256")
        .env("KVFERRY_TRANSFER_DEADLINE_MS", "3000")
        .env("KVFERRY_PROGRESS_DEADLINE_MS", "600")
        .env("KVFERRY_ABSENT_DEADLINE_MS", "400")
        .env("KVFERRY_LEASE_TTL_MS", "800")
        .env("KVFERRY_VERDICT_TIMEOUT_MS", "400")
        .env("KVFERRY_SILENCE_DEADLINE_MS", "800")
}

fn cluster(setup: &Setup, prefill: usize, decode: usize) -> Cluster {
    Cluster::new(setup, Shape::default(), prefill, decode, Arc::new(Reference::new(KvDtype::F16)))
}

/// Connections that say nothing: more than the node may accept.
fn crowd(address: SocketAddr) -> Vec<TcpStream> {
    (0..100).map(|_| TcpStream::connect(address).expect("the system queues it")).collect()
}

/// Runs `meanwhile` and fails if the node was busy all the time: one that asks a listener again and again would be.
fn without_spinning(node: &Node, meanwhile: impl FnOnce()) {
    let (ticks, began) = (node.cpu_ticks(), Instant::now());
    meanwhile();
    let (busy_ms, all_ms) = (10 * u128::from(node.cpu_ticks() - ticks), began.elapsed().as_millis());
    assert!(busy_ms < all_ms / 2, "it computed for {busy_ms} of {all_ms} ms");
}

#[test]
fn a_prefill_node_without_descriptors_recovers_when_they_are_back() {
    let cluster = cluster(&setup(), 1, 1);
    let mut chance = Chance::new(1);
    let node = &cluster.prefill()[0];
    for _ in 0..3 {
        node.limit_descriptors(node.descriptors() as u64 + 4);
        let crowd = crowd(node.address());
        wait_until("it says so", || node.logged("cannot be accepted") > 0);
        // The node's own connections are gone, and new ones wait behind the crowd: decode computes.
        without_spinning(node, || {
            cluster.links().for_each(kvferry_transport::testing::Proxy::cut_all);
            for _ in 0..3 {
                cluster.load(3, &mut chance).check(cluster.reference(), &[]);
            }
        });
        drop(crowd);
        cluster.settle(&mut chance);
    }
    // Not once for each connection that waited, nor for each time that it looked.
    assert!(node.logged("cannot be accepted") <= 6, "{} lines", node.logged("cannot be accepted"));
}

#[test]
fn a_decode_node_without_descriptors_answers_what_it_has_and_recovers() {
    let cluster = cluster(&setup().args("--link-gbps 0.01"), 1, 1);
    let mut chance = Chance::new(2);
    let node = &cluster.decode()[0];
    for _ in 0..3 {
        let load = cluster.load(4, &mut chance);
        cluster.wait_for_moment(&load, &mut chance);
        node.limit_descriptors(node.descriptors() as u64 + 2);
        let crowd = crowd(node.http_address());
        // It cannot dial any more either: what was under way is computed here.
        let lost = node.logged("KV was lost");
        cluster.links().for_each(kvferry_transport::testing::Proxy::cut_all);
        without_spinning(node, || {
            wait_until("what was lost is computed", || node.logged("KV was lost") > lost || load.is_over());
        });
        // A client may still wait behind the crowd.
        drop(crowd);
        load.check(cluster.reference(), &[]);
        cluster.settle(&mut chance);
    }
}

#[test]
fn a_slab_pool_that_holds_no_two_chunks_is_refused_by_name() {
    let refusal = setup().env("KVFERRY_CHUNK_BYTES", "65536").env("KVFERRY_SLAB_POOL_BYTES", "65536").refusal();
    assert!(refusal.contains("KVFERRY_SLAB_POOL_BYTES") && refusal.contains("131072"), "{refusal}");
}

#[test]
fn the_smallest_slab_pool_is_slow_but_right() {
    // Layouts that differ in everything: all is packed. One token of all layers is a quarter of a chunk.
    let setup = setup().env("KVFERRY_CHUNK_BYTES", "4096").env("KVFERRY_SLAB_POOL_BYTES", "8192");
    let cluster = cluster(&setup.args("--layout LPBNHC --block 7"), 1, 1);
    let mut chance = Chance::new(3);
    for _ in 0..4 {
        cluster.load(8, &mut chance).check(cluster.reference(), &[]);
    }
    cluster.settle(&mut chance);
    assert!(Tally::of(&cluster).slab_waits > 0.0, "there were slabs enough");
}

#[test]
fn a_stopped_decode_node_keeps_no_slab_from_another() {
    let setup = setup()
        .env("KVFERRY_CHUNK_BYTES", "8192")
        .env("KVFERRY_SLAB_POOL_BYTES", "16384")
        // Its session stays.
        .env("KVFERRY_SILENCE_DEADLINE_MS", "600000");
    let cluster = cluster(&setup.args("--layout LPBNHC"), 1, 2);
    let mut chance = Chance::new(4);
    let [sleeper, other] = cluster.decode() else { panic!("two nodes") };
    for _ in 0..4 {
        let load = cluster.load(6, &mut chance);
        cluster.wait_for_moment(&load, &mut chance);
        sleeper.stop();
        let done = || other.metric("kvferry_transfers_done_total", "side=\"receive\"");
        let before = done();
        wait_until("the other is served", || {
            cluster.load_on(1, 2, &mut chance).check(cluster.reference(), &[]);
            done() > before
        });
        sleeper.go_on();
        load.check(cluster.reference(), &[]);
        cluster.settle(&mut chance);
    }
}
