//! Two nodes in one process, over TCP: what happens when the prefill node cannot do what it is asked.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvferry::config::{LoadFailurePolicy, PreSharedKey, RawConfig};
use kvferry_examples::engine::{FinishReason, Submission};
use kvferry_examples::http::Router;
use kvferry_examples::model::Model;
use kvferry_examples::node::{LoadedModel, NodeConfig, generate};
use kvferry_examples::pd::PdNode;

const PROMPT: &str = "A prompt that is longer than one block of sixteen tokens.";

fn node(blocks: u32) -> NodeConfig {
    ranks(blocks, 1)
}

fn ranks(blocks: u32, tp_size: u16) -> NodeConfig {
    NodeConfig {
        order: "BLPNHC".parse().unwrap(),
        dtype: "f16".parse().unwrap(),
        blocks,
        tokens_per_block: 16,
        tp_size,
        device: kvferry_examples::engine::DeviceKind::Cpu,
        chunk_tokens: 64,
        max_running: 4,
        on_load_failure: LoadFailurePolicy::Recompute,
        prefix: kvferry::pool::PrefixKind::Hash,
        in_place: false,
    }
}

fn connector(role: &str, policy: &str) -> RawConfig {
    // Long deadlines: an answer that waits for one would not come within the test.
    let text = format!(
        "engine_id = '{role}'\nrole = '{role}'\nload_failure_policy = '{policy}'\ntransfer_deadline_ms = 600000\n\
         progress_deadline_ms = 600000"
    );
    let mut raw = RawConfig::from_toml(&text).unwrap();
    raw.psk = Some(PreSharedKey::new(&[7; 32], "the test").unwrap());
    raw
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_prompt_that_prefill_refuses_is_computed_by_decode_or_fails_at_once() {
    let model = LoadedModel::load(Model::EMBEDDED.as_ref()).unwrap();
    let submission = |transfer| {
        let tokens = model.tokenizer.encode(PROMPT).unwrap();
        Submission { transfer, ..model.greedy(tokens, 8) }
    };
    let want = generate(&model.start_local(&node(64)).unwrap().handle(), submission(None)).await.unwrap();
    // One block: no cache for this prompt.
    let prefill = Arc::new(PdNode::start(&model, &node(1), connector("prefill", "recompute")).unwrap());
    let address = prefill.prefill_address().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let desk = {
        let (prefill, stop) = (Arc::clone(&prefill), Arc::clone(&stop));
        std::thread::spawn(move || prefill.serve_prefill(&stop))
    };
    for policy in ["recompute", "fail"] {
        let decode = PdNode::start(&model, &node(64), connector("decode", policy)).unwrap();
        let router = decode.router(std::slice::from_ref(&address)).unwrap();
        let transfer = router.route(&model.tokenizer.encode(PROMPT).unwrap()).unwrap();
        let got = generate(&decode.engine.handle(), submission(transfer)).await.unwrap();
        let state = decode.engine.handle().snapshot().await.unwrap();
        match policy {
            "recompute" => {
                assert_eq!((got.tokens, got.reason), (want.tokens.clone(), want.reason.clone()));
                assert_eq!(state.recomputed_tokens, model.tokenizer.encode(PROMPT).unwrap().len() as u64);
            }
            _ => {
                let FinishReason::Failed(why) = got.reason else { panic!("{:?}", got.reason) };
                assert!(why.contains("needs 4 KV blocks, but the cache has 1"), "{why}");
                assert_eq!((got.tokens, state.failed_requests), (vec![], 1));
            }
        }
        assert_eq!((state.pool.free, state.held, state.running), (64, 0, 0));
    }
    stop.store(true, Ordering::Release);
    desk.join().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn ranks_that_do_not_fit_are_refused_with_the_reason() {
    let model = LoadedModel::load(Model::EMBEDDED.as_ref()).unwrap();
    let error = PdNode::start(&model, &ranks(64, 3), connector("prefill", "fail")).err().expect("2 heads over 3 ranks");
    let causes: Vec<_> = std::iter::successors(Some(&error as &dyn std::error::Error), |e| e.source()).collect();
    let text = causes.iter().map(ToString::to_string).collect::<Vec<_>>().join(": ");
    assert!(text.contains("2 KV heads do not spread evenly over 3 ranks"), "{text}");

    // A decode node that was told of one rank of two: the load fails at once, and says what to do.
    let prefill = Arc::new(PdNode::start(&model, &ranks(64, 2), connector("prefill", "fail")).unwrap());
    let address = prefill.prefill_address().unwrap();
    let decode = PdNode::start(&model, &ranks(64, 4), connector("decode", "fail")).unwrap();
    for (listed, want) in [
        (vec![address.ranks()[0]], "is one of 2 ranks, but 1 addresses were given"),
        (vec![address.ranks()[1], address.ranks()[0]], "list the prefill engine's addresses by rank"),
    ] {
        let router = decode.router(&[listed.into()]).unwrap();
        let tokens = model.tokenizer.encode(PROMPT).unwrap();
        let transfer = router.route(&tokens).unwrap();
        let submission = Submission { transfer, ..model.greedy(tokens, 8) };
        let got = generate(&decode.engine.handle(), submission).await.unwrap();
        let FinishReason::Failed(why) = got.reason else { panic!("{:?}", got.reason) };
        assert!(why.contains(want), "{why}");
    }
    let error = decode.router(&["127.0.0.1:1+127.0.0.1:2+127.0.0.1:3".parse().unwrap()]).unwrap_err().to_string();
    assert!(error.contains("its 3 addresses are its tensor-parallel ranks"), "{error}");
}
