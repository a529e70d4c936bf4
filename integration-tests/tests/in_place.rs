//! Real processes on one host, of which one reads the other's blocks where they lie, and what happens to them meanwhile.

use kvferry_integration_tests::{Answer, HttpError, Node, Reference, Setup, wait_until};
use kvferry_kernels::KvDtype;

/// A prompt whose answer does not end by itself; so many tokens that decode is caught in the middle of its answer.
const ANSWER: u32 = 1000;
const SEED: u32 = 1;
const PROMPT: u32 = 300;

fn setup() -> Setup {
    Setup::new(env!("CARGO_BIN_EXE_node"))
        .args("--chunk 64")
        .env("KVFERRY_PATHS", "shm,cma,uds,tcp")
        .env("KVFERRY_SAME_HOST", "in-place")
}

type Client = std::thread::JoinHandle<Result<Answer, HttpError>>;

/// A pair whose decode stands still in the middle of an answer to a prompt that it reads in place, and who asked.
fn reading(prefill: &Setup) -> (Node, Node, Vec<u32>, Client) {
    let prefill = prefill.prefill();
    let decode = setup().decode(prefill.address());
    let prompt = Reference::new(KvDtype::F16).prompt(PROMPT, SEED);
    let (complete, asked) = (decode.client(), prompt.clone());
    let client = std::thread::spawn(move || complete(&asked, ANSWER));
    wait_until("the prompt was loaded", || decode.metric("kvferry_loaded_tokens_total", "") > 0.0);
    decode.stop();
    wait_until("prefill has its verdict", || prefill.metric("kvferry_transfers_done_total", "") > 0.0);
    assert!(prefill.metric("kvferry_held_bytes", "") > 0.0, "its answer ended before it was stopped");
    (prefill, decode, prompt, client)
}

fn copied(decode: &Node) -> f64 {
    decode.metric("kvferry_in_place_copied_pages_total", "")
}

#[test]
fn prefill_killed_while_decode_reads_its_blocks_costs_no_token() {
    let (prefill, decode, prompt, client) = reading(&setup());
    prefill.kill();
    decode.go_on();
    assert_eq!(client.join().unwrap().unwrap(), Reference::new(KvDtype::F16).answer(&prompt, ANSWER));
    assert!(copied(&decode) > 0.0);
    assert_eq!(decode.metric("kvferry_recomputed_tokens_total", ""), 0.0, "its memory outlives it");
    decode.wait_until_free("decode");
}

#[test]
fn decode_killed_while_it_reads_gives_prefill_its_blocks_back() {
    let (prefill, decode, _, client) = reading(&setup());
    decode.kill();
    assert!(client.join().unwrap().is_err());
    prefill.wait_until_free("prefill");
}

#[test]
fn a_client_that_hangs_up_gives_prefill_its_blocks_back() {
    let prefill = setup().prefill();
    let decode = setup().decode(prefill.address());
    let client = decode.begin(&Reference::new(KvDtype::F16).prompt(PROMPT, SEED), ANSWER);
    wait_until("the prompt was loaded", || decode.metric("kvferry_loaded_tokens_total", "") > 0.0);
    drop(client);
    decode.wait_until_free("decode");
    prefill.wait_until_free("prefill");
}

/// A reader that stands still has its blocks; when it goes on it hears that they are asked for.
#[test]
fn prefill_that_is_short_of_blocks_asks_for_them() {
    // Room for one prompt and a half: 300 tokens are 19 blocks.
    let (prefill, decode, first, client) = reading(&setup().args("--blocks 28"));
    let (other, reference) = (setup().decode(prefill.address()), Reference::new(KvDtype::F16));
    let second = reference.prompt(PROMPT, 5);
    let (complete, asked) = (other.client(), second.clone());
    let waiting = std::thread::spawn(move || complete(&asked, 4));
    wait_until("they were asked for", || prefill.metric("kvferry_recalled_writes_total", "") > 0.0);
    assert_eq!(prefill.metric("kvferry_transfers_done_total", ""), 1.0, "nobody else got them");
    decode.go_on();
    assert_eq!(waiting.join().unwrap().unwrap(), reference.answer(&second, 4));
    assert_eq!(client.join().unwrap().unwrap(), reference.answer(&first, ANSWER));
    assert!(copied(&decode) > 0.0);
    for node in [&decode, &other] {
        assert_eq!(node.metric("kvferry_recomputed_tokens_total", ""), 0.0);
        node.wait_until_free("decode");
    }
    prefill.wait_until_free("prefill");
}
