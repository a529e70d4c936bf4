//! Real processes and what happens to them: the answer is the single process's or an error that says why, within the deadline,
//! and afterwards nothing is held on either side.

use std::net::SocketAddr;

use kvferry_integration_tests::{Node, Reference, Setup, wait_until};
use kvferry_kernels::KvDtype;
use kvferry_transport::testing::{Proxy, ProxyPlan};

/// Slow enough that a transfer of some hundred tokens is caught in the middle.
const SLOW: &str = "--link-gbps 0.004";

fn setup() -> Setup {
    Setup::new(env!("CARGO_BIN_EXE_node")).args("--chunk 64")
}

fn pair() -> (Node, Node) {
    let prefill = setup().prefill();
    let decode = setup().decode(prefill.address());
    (prefill, decode)
}

fn received(decode: &Node) -> f64 {
    decode.metric("kvferry_transfer_bytes_total", "side=\"receive\"")
}

#[test]
fn a_whole_pair_answers_like_one_process_and_holds_nothing_afterwards() {
    let (prefill, decode) = pair();
    let reference = Reference::new(KvDtype::F16);
    for tokens in [1, 15, 16, 17, 200] {
        let prompt = reference.prompt(tokens, tokens);
        assert_eq!(decode.complete(&prompt, 12).unwrap(), reference.answer(&prompt, 12), "{tokens} tokens");
    }
    assert!(received(&decode) > 0.0);
    assert_eq!(decode.metric("kvferry_recomputed_tokens_total", ""), 0.0);
    assert_eq!(decode.metric("kvferry_sessions_by_path", "path=\"tcp\""), 1.0);
    assert_eq!(decode.metric("kvferry_sessions_without_path", "path=\"shm\""), 1.0, "its configuration forbids it");
    decode.wait_until_free("decode");
    prefill.wait_until_free("prefill");
}

#[test]
fn one_byte_flipped_in_flight_is_detected_and_the_request_is_recomputed() {
    let prefill = setup().prefill();
    let proxy = Proxy::new(prefill.address(), ProxyPlan::default());
    // Far enough into each connection to be payload: the control lane never carries as much.
    proxy.set_plan(ProxyPlan { towards_dialler: true, flip_at_byte: Some(30_000), ..ProxyPlan::default() });
    let decode = setup().decode(proxy.address());
    let reference = Reference::new(KvDtype::F16);
    let prompt = reference.prompt(300, 1);
    assert_eq!(decode.complete(&prompt, 12).unwrap(), reference.answer(&prompt, 12));
    // One for each lane that carried as much.
    assert!(decode.metric("kvferry_digest_mismatches_total", "") >= 1.0);
    assert!(decode.metric("kvferry_recomputed_tokens_total", "") > 0.0);
    decode.wait_until_free("decode");
    prefill.wait_until_free("prefill");
}

#[test]
fn prefill_killed_in_the_middle_of_a_transfer_costs_time_but_no_token() {
    let prefill = setup().args(SLOW).prefill();
    let decode = setup().decode(prefill.address());
    let reference = Reference::new(KvDtype::F16);
    let prompt = reference.prompt(900, 2);
    let (complete, asked) = (decode.client(), prompt.clone());
    let client = std::thread::spawn(move || complete(&asked, 12));
    wait_until("something was received", || received(&decode) > 0.0);
    prefill.kill();
    assert_eq!(client.join().unwrap().unwrap(), reference.answer(&prompt, 12));
    assert!(decode.metric("kvferry_recomputed_tokens_total", "") > 0.0, "it was killed in the middle");
    decode.wait_until_free("decode");
}

#[test]
fn decode_killed_in_the_middle_of_a_transfer_leaves_nothing_held_at_prefill() {
    let prefill = setup().args(SLOW).prefill();
    let decode = setup().decode(prefill.address());
    let reference = Reference::new(KvDtype::F16);
    let _client = decode.begin(&reference.prompt(900, 3), 12);
    wait_until("something was received", || received(&decode) > 0.0);
    assert!(prefill.held() > 0.0);
    decode.kill();
    prefill.wait_until_free("prefill");

    // And prefill serves the next decode node.
    let decode = setup().decode(prefill.address());
    let prompt = reference.prompt(20, 4);
    assert_eq!(decode.complete(&prompt, 4).unwrap(), reference.answer(&prompt, 4));
    assert_eq!(decode.metric("kvferry_recomputed_tokens_total", ""), 0.0);
}

#[test]
fn a_client_that_hangs_up_frees_both_sides() {
    let prefill = setup().args(SLOW).prefill();
    let decode = setup().decode(prefill.address());
    let reference = Reference::new(KvDtype::F16);
    let client = decode.begin(&reference.prompt(900, 5), 12);
    wait_until("something was received", || received(&decode) > 0.0);
    drop(client);
    decode.wait_until_free("decode");
    prefill.wait_until_free("prefill");
    assert_eq!(decode.metric("kvferry_transfers_cancelled_total", "side=\"receive\""), 1.0);
}

#[test]
fn a_cut_that_heals_goes_on_where_it_was() {
    let prefill = setup().args(SLOW).prefill();
    let proxy = Proxy::new(prefill.address(), ProxyPlan::default());
    let decode = setup().decode(proxy.address());
    let reference = Reference::new(KvDtype::F16);
    let prompt = reference.prompt(900, 6);
    let (complete, asked) = (decode.client(), prompt.clone());
    let client = std::thread::spawn(move || complete(&asked, 12));
    wait_until("something was received", || received(&decode) > 0.0);
    proxy.cut_all();
    assert_eq!(client.join().unwrap().unwrap(), reference.answer(&prompt, 12));
    assert_eq!(decode.metric("kvferry_recomputed_tokens_total", ""), 0.0, "the session came back");
    assert!(decode.metric("kvferry_sessions_lost_total", "") >= 1.0);
    decode.wait_until_free("decode");
    prefill.wait_until_free("prefill");
}

#[test]
fn what_does_not_fit_together_is_refused_by_name() {
    let prefill = setup().prefill();
    let fail = || setup().env("KVFERRY_LOAD_FAILURE_POLICY", "fail");
    let reference = Reference::new(KvDtype::Bf16);
    let prompt = reference.prompt(40, 7);

    let other_dtype = fail().args("--kv-dtype bf16").decode(prefill.address());
    let error = other_dtype.complete(&prompt, 4).unwrap_err();
    // Both sides find out; either one's word may be the first.
    let named = ["kv_dtype: ours is Bf16, theirs is F16", "kv_dtype: ours is F16, theirs is Bf16"];
    assert!(named.iter().any(|named| error.text.contains(named)), "{}", error.text);
    other_dtype.wait_until_free("decode");

    let other_key = fail().env("KVFERRY_PSK", "another key, by mistake").decode(prefill.address());
    let error = other_key.complete(&prompt, 4).unwrap_err();
    assert!(error.text.contains("key"), "{}", error.text);
    other_key.wait_until_free("decode");

    // The same under the policy that computes here what is not brought.
    let recompute = setup().args("--kv-dtype bf16").decode(prefill.address());
    assert_eq!(recompute.complete(&prompt, 4).unwrap(), reference.answer(&prompt, 4));
    prefill.wait_until_free("prefill");
}

#[test]
fn a_prefill_node_that_is_not_there_costs_its_deadline_and_no_more() {
    // A port that nobody listens on: it was bound here and let go.
    let nobody: SocketAddr = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let decode = setup().decode(nobody);
    let reference = Reference::new(KvDtype::F16);
    let prompt = reference.prompt(40, 8);
    assert_eq!(decode.complete(&prompt, 4).unwrap(), reference.answer(&prompt, 4));
    decode.wait_until_free("decode");
}

#[test]
fn full_block_pools_make_requests_wait_and_lose_none() {
    // Room for one request at a time on either side.
    let prefill = setup().args("--blocks 8").prefill();
    let decode = setup().args("--blocks 9").decode(prefill.address());
    let reference = Reference::new(KvDtype::F16);
    let clients: Vec<_> = (0..6)
        .map(|seed| {
            let (complete, prompt) = (decode.client(), reference.prompt(120, seed));
            std::thread::spawn(move || complete(&prompt, 8))
        })
        .collect();
    for (seed, client) in (0..6).zip(clients) {
        assert_eq!(client.join().unwrap().unwrap(), reference.answer(&reference.prompt(120, seed), 8), "prompt {seed}");
    }
    decode.wait_until_free("decode");
    prefill.wait_until_free("prefill");

    // One that prefill can never hold is refused there at once, and computed here.
    let decode = setup().decode(prefill.address());
    let prompt = reference.prompt(200, 9);
    assert_eq!(decode.complete(&prompt, 8).unwrap(), reference.answer(&prompt, 8));
    assert_eq!(decode.metric("kvferry_transfers_failed_total", "reason=\"unknown\""), 1.0);
    decode.wait_until_free("decode");
    prefill.wait_until_free("prefill");
}

#[test]
fn a_restarted_prefill_node_is_a_new_peer_and_serves_again() {
    let first = setup().prefill();
    let address = first.address();
    let decode = setup().decode(address);
    let reference = Reference::new(KvDtype::F16);
    let prompt = reference.prompt(40, 10);
    assert_eq!(decode.complete(&prompt, 4).unwrap(), reference.answer(&prompt, 4));
    first.kill();
    wait_until("the old one is gone", || decode.metric("kvferry_sessions_live", "") == 0.0);
    let second = setup().prefill_at(address);
    wait_until("the new one is met", || decode.metric("kvferry_sessions_live", "") == 1.0);
    assert_eq!(decode.complete(&prompt, 4).unwrap(), reference.answer(&prompt, 4));
    assert_eq!(decode.metric("kvferry_recomputed_tokens_total", ""), 0.0);
    decode.wait_until_free("decode");
    second.wait_until_free("prefill");
}

#[test]
fn clients_that_come_and_go_leave_no_page_held_and_no_step_refused() {
    let prefill = setup().prefill();
    let decode = setup().decode(prefill.address());
    let reference = Reference::new(KvDtype::F16);
    for round in 0..30 {
        drop(decode.begin(&reference.prompt(700, round), 12));
        if round % 5 == 0 {
            let prompt = reference.prompt(90, 100 + round);
            assert_eq!(decode.complete(&prompt, 4).unwrap(), reference.answer(&prompt, 4), "round {round}");
        }
    }
    decode.wait_until_free("decode");
    prefill.wait_until_free("prefill");
}

#[test]
fn every_pair_of_block_sizes_carries_all_of_it() {
    let reference = Reference::new(KvDtype::F16);
    let prompt = reference.prompt(500, 11);
    let answer = reference.answer(&prompt, 4);
    for (from, to) in [(24, 16), (12, 8), (3, 5), (16, 24), (7, 16), (1, 64)] {
        let prefill = setup().args(&format!("--block {from} --layout LPBNHC")).prefill();
        let decode = setup().args(&format!("--block {to} --layout BHLPNC")).decode(prefill.address());
        assert_eq!(decode.complete(&prompt, 4).unwrap(), answer, "{from} to {to}");
        assert_eq!(decode.metric("kvferry_recomputed_tokens_total", ""), 0.0, "{from} to {to}");
    }
}

#[test]
fn two_decode_nodes_without_names_share_one_prefill_node() {
    let prefill = setup().prefill();
    let nodes = [setup().decode(prefill.address()), setup().decode(prefill.address())];
    let reference = Reference::new(KvDtype::F16);
    for round in 0..6 {
        let prompt = reference.prompt(40, round);
        let node = &nodes[round as usize % 2];
        assert_eq!(node.complete(&prompt, 4).unwrap(), reference.answer(&prompt, 4));
    }
    for node in &nodes {
        assert_eq!(node.metric("kvferry_recomputed_tokens_total", ""), 0.0);
        node.wait_until_free("decode");
    }
    prefill.wait_until_free("prefill");
}
