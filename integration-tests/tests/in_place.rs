//! Real processes on one host, of which one reads the other's blocks where they lie, and what happens to them meanwhile.

use kvferry_integration_tests::{Node, Reference, Setup, wait_until};
use kvferry_kernels::KvDtype;

/// So many tokens that decode is caught in the middle of its answer.
const ANSWER: u32 = 600;
const PROMPT: u32 = 300;

fn setup() -> Setup {
    Setup::new(env!("CARGO_BIN_EXE_node"))
        .args("--chunk 64")
        .env("KVFERRY_PATHS", "shm,cma,uds,tcp")
        .env("KVFERRY_SAME_HOST", "in-place")
}

/// A pair whose decode is in the middle of an answer to a prompt that it reads in place, and who asked.
fn reading(
    prefill: Setup,
    seed: u32,
) -> (
    Node,
    Node,
    Vec<u32>,
    std::thread::JoinHandle<Result<kvferry_integration_tests::Answer, kvferry_integration_tests::HttpError>>,
) {
    let prefill = prefill.prefill();
    let decode = setup().decode(prefill.address());
    let prompt = Reference::new(KvDtype::F16).prompt(PROMPT, seed);
    let (complete, asked) = (decode.client(), prompt.clone());
    let client = std::thread::spawn(move || complete(&asked, ANSWER));
    wait_until("the prompt was loaded", || decode.metric("kvferry_loaded_tokens_total", "") > 0.0);
    assert!(decode.metric("kvferry_adopted_bytes_total", "") > 0.0);
    (prefill, decode, prompt, client)
}

fn copied(decode: &Node) -> f64 {
    decode.metric("kvferry_in_place_copied_pages_total", "")
}

#[test]
fn prefill_killed_while_decode_reads_its_blocks_costs_no_token() {
    let (prefill, decode, prompt, client) = reading(setup(), 1);
    prefill.kill();
    assert_eq!(client.join().unwrap().unwrap(), Reference::new(KvDtype::F16).answer(&prompt, ANSWER));
    assert!(copied(&decode) > 0.0, "it was killed in the middle");
    assert_eq!(decode.metric("kvferry_recomputed_tokens_total", ""), 0.0, "its memory outlives it");
    decode.wait_until_free("decode");
}

#[test]
fn decode_killed_while_it_reads_gives_prefill_its_blocks_back() {
    let (prefill, decode, _, client) = reading(setup(), 2);
    assert!(prefill.metric("kvferry_held_bytes", "") > 0.0, "it was killed in the middle");
    decode.kill();
    assert!(client.join().unwrap().is_err());
    prefill.wait_until_free("prefill");
}

#[test]
fn a_client_that_hangs_up_gives_prefill_its_blocks_back() {
    let prefill = setup().prefill();
    let decode = setup().decode(prefill.address());
    let client = decode.begin(&Reference::new(KvDtype::F16).prompt(PROMPT, 3), ANSWER);
    wait_until("the prompt was loaded", || decode.metric("kvferry_loaded_tokens_total", "") > 0.0);
    drop(client);
    decode.wait_until_free("decode");
    prefill.wait_until_free("prefill");
}

#[test]
fn prefill_that_is_short_of_blocks_asks_for_them() {
    // Room for one prompt and a half: 300 tokens are 19 blocks.
    let (prefill, decode, first, client) = reading(setup().args("--blocks 28"), 4);
    let reference = Reference::new(KvDtype::F16);
    let second = reference.prompt(PROMPT, 5);
    assert_eq!(decode.complete(&second, 4).unwrap(), reference.answer(&second, 4));
    assert!(prefill.metric("kvferry_recalled_writes_total", "") > 0.0 && copied(&decode) > 0.0);
    assert_eq!(client.join().unwrap().unwrap(), reference.answer(&first, ANSWER));
    assert_eq!(decode.metric("kvferry_recomputed_tokens_total", ""), 0.0);
    decode.wait_until_free("decode");
    prefill.wait_until_free("prefill");
}
