//! The whole engine is invariant: a prompt's tokens and first logits have the same bits whatever the chunking, the batch, the
//! block size and the layout. This is what makes a comparison of two engines fair.

use kvferry::config::LoadFailurePolicy;
use kvferry::pd::KvCache;
use kvferry_examples::engine::{DeviceKind, EngineService, FinishReason, NoConnector, Runner, Scheduler, Submission};
use kvferry_examples::model::{ByteTokenizer, Model};
use kvferry_examples::node::{Generation, LoadedModel, NodeConfig, generate};
use kvferry_protocol::BlockId;

const PROMPTS: [&str; 4] = [
    "a",
    "The quick brown fox jumps over the lazy dog, and then it does so once more.",
    "fifteen tokens.", // with the mark before it: a block of 16 exactly
    "In the beginning the Universe was created. This has made a lot of people very angry and been widely regarded as a bad \
     move. Many races believe that it was created by some sort of god, though the Jatravartid people of Viltvodle VI do not.",
];
const MAX_TOKENS: usize = 12;

fn embedded() -> LoadedModel {
    LoadedModel::load(Model::EMBEDDED.as_ref()).unwrap()
}

fn config(order: &str, dtype: &str, tokens_per_block: u32, chunk_tokens: usize) -> NodeConfig {
    NodeConfig {
        order: order.parse().unwrap(),
        dtype: dtype.parse().unwrap(),
        blocks: 1200 / tokens_per_block,
        tokens_per_block,
        tp_size: 1,
        device: DeviceKind::Cpu,
        chunk_tokens,
        max_running: 8,
        on_load_failure: LoadFailurePolicy::Fail,
        prefix: kvferry::pool::PrefixKind::Off,
        in_place: false,
    }
}

fn submission(model: &LoadedModel, prompt: &str) -> Submission {
    let tokens = model.tokenizer.encode(prompt).unwrap();
    Submission { keep_first_logits: true, ..model.greedy(tokens, MAX_TOKENS) }
}

/// What is compared: tokens, and the bits of the first logits.
fn bits(generation: &Generation) -> (Vec<u32>, Vec<u32>) {
    let logits = generation.first_logits.as_ref().expect("logits were asked for");
    (generation.tokens.clone(), logits.iter().map(|logit| logit.to_bits()).collect())
}

async fn one_by_one(model: &LoadedModel, engine: &EngineService, prompts: &[&str]) -> Vec<(Vec<u32>, Vec<u32>)> {
    let mut all = Vec::new();
    for prompt in prompts {
        all.push(bits(&generate(&engine.handle(), submission(model, prompt)).await.unwrap()));
    }
    all
}

async fn together(model: &LoadedModel, engine: &EngineService, prompts: &[&str]) -> Vec<(Vec<u32>, Vec<u32>)> {
    let handle = engine.handle();
    let running: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let (handle, submission) = (handle.clone(), submission(model, prompt));
            tokio::spawn(async move { bits(&generate(&handle, submission).await.unwrap()) })
        })
        .collect();
    let mut all = Vec::new();
    for one in running {
        all.push(one.await.unwrap());
    }
    all
}

#[tokio::test]
async fn bits_do_not_depend_on_chunking_batch_block_size_or_layout() {
    let model = embedded();
    for dtype in ["f32", "f16", "bf16"] {
        let engine = model.start_local(&config("BLPNHC", dtype, 16, 4096)).unwrap();
        let want = one_by_one(&model, &engine, &PROMPTS).await;
        for (order, tokens_per_block, chunk_tokens) in [
            ("BLPNHC", 16, 1),
            ("BLPNHC", 16, 7),
            ("BLPNHC", 16, 64),
            ("LPBNHC", 16, 64),
            ("BHLPNC", 16, 33),
            ("PLBNHC", 1, 64),
            ("BHLNPC", 5, 64),
            ("LBHPNC", 32, 10),
        ] {
            let engine = model.start_local(&config(order, dtype, tokens_per_block, chunk_tokens)).unwrap();
            let name = format!("{dtype} {order}, blocks of {tokens_per_block}, chunks of {chunk_tokens}");
            assert_eq!(one_by_one(&model, &engine, &PROMPTS).await, want, "{name}, one by one");
            assert_eq!(together(&model, &engine, &PROMPTS).await, want, "{name}, together");
        }
    }
}

/// Two KV heads of two queries each: one rank, a head for each of two, and a head held twice and four times.
#[tokio::test]
async fn bits_do_not_depend_on_tensor_parallel_ranks() {
    let model = embedded();
    for (dtype, order) in [("f32", "BLPNHC"), ("f16", "BHLPNC"), ("bf16", "LPBNHC")] {
        let want = one_by_one(&model, &model.start_local(&config(order, dtype, 16, 64)).unwrap(), &PROMPTS).await;
        for tp_size in [2, 4, 8] {
            let ranks = NodeConfig { tp_size, ..config(order, dtype, 16, 33) };
            let engine = model.start_local(&ranks).unwrap();
            assert_eq!(together(&model, &engine, &PROMPTS).await, want, "{dtype} {order}, {tp_size} ranks");
        }
    }
}

#[tokio::test]
async fn the_cache_dtype_is_felt() {
    // Else the test above would compare the same computation with itself.
    let model = embedded();
    let mut all = Vec::new();
    for dtype in ["f32", "f16", "bf16"] {
        let engine = model.start_local(&config("BLPNHC", dtype, 16, 64)).unwrap();
        all.push(one_by_one(&model, &engine, &PROMPTS[1..2]).await.remove(0).1);
    }
    assert!(all[0] != all[1] && all[1] != all[2] && all[0] != all[2]);
}

#[tokio::test]
async fn the_embedded_model_listens_to_every_token_of_a_prompt() {
    let model = embedded();
    let engine = model.start_local(&config("BLPNHC", "f32", 16, 64)).unwrap();
    let base = "abcdefghijklmnopqrstuvwxyz0123456789 The same text but for one letter of it.";
    let mut seen = std::collections::BTreeSet::new();
    for at in [0, 20, 40, 60, 75] {
        let mut prompt = base.to_owned();
        prompt.replace_range(at..=at, "#");
        let (tokens, _) = bits(&generate(&engine.handle(), submission(&model, &prompt)).await.unwrap());
        let kinds: std::collections::BTreeSet<_> = tokens.iter().collect();
        assert!(kinds.len() > MAX_TOKENS / 2, "{prompt:?} gives a monotone answer: {tokens:?}");
        assert!(tokens.iter().all(|token| (0x20..0x7f).contains(token) || *token == ByteTokenizer::EOS));
        seen.insert(tokens);
    }
    assert_eq!(seen.len(), 5, "each changed letter changes the answer");
}

#[tokio::test]
async fn a_step_that_cannot_be_computed_fails_its_requests_and_the_engine_goes_on() {
    let model = embedded();
    let config = config("BLPNHC", "f16", 16, 64);
    let runner = Runner::new(model.model.clone(), config.cache()).unwrap();
    let KvCache::Host(cache) = runner.ranks()[0].cache() else { panic!("it is on the host") };
    let scheduler = Scheduler::new(config.scheduler(&model.model), NoConnector).unwrap();
    let engine = EngineService::start(scheduler, runner, vec![NoConnector]).unwrap();
    let all: Vec<_> = (0..config.blocks).map(BlockId::new).collect();
    let guards = cache.guard_write(&all, 2..3).unwrap();
    let refused = generate(&engine.handle(), submission(&model, PROMPTS[1])).await.unwrap();
    let FinishReason::Failed(why) = &refused.reason else { panic!("{:?}", refused.reason) };
    assert!(why.contains("layer 2: store_kv was refused: page (layer 2, block"), "{why}");
    drop(guards);
    let want = model.start_local(&config).unwrap();
    assert_eq!(one_by_one(&model, &engine, &PROMPTS).await, one_by_one(&model, &want, &PROMPTS).await);
    let state = engine.handle().snapshot().await.unwrap();
    assert_eq!((state.running, state.pool.free), (0, config.blocks as usize));
}

/// The same on real weights, over fewer shapes: a token here costs as much as a hundred of the embedded model.
#[tokio::test]
#[ignore = "needs SmolLM2: examples/fetch-smollm2.sh"]
async fn smollm2_answers_in_english_with_the_same_bits_in_every_shape() {
    let model = LoadedModel::load(&smollm2()).unwrap();
    let prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n";
    for dtype in ["f16", "bf16"] {
        let engine = model.start_local(&config("BLPNHC", dtype, 16, 4096)).unwrap();
        let want = one_by_one(&model, &engine, &[prompt, PROMPTS[1]]).await;
        let text = model.tokenizer.decode(&want[0].0).unwrap();
        assert!(text.contains("Paris"), "{dtype}: {text:?}");
        for (order, tokens_per_block, chunk_tokens) in [("LPBNHC", 16, 7), ("BHLPNC", 5, 11)] {
            let engine = model.start_local(&config(order, dtype, tokens_per_block, chunk_tokens)).unwrap();
            let got = together(&model, &engine, &[prompt, PROMPTS[1]]).await;
            assert!(got == want, "{dtype} {order}, blocks of {tokens_per_block}, chunks of {chunk_tokens}");
        }
    }
}

/// Where examples/fetch-smollm2.sh puts the model.
fn smollm2() -> std::path::PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(std::path::PathBuf::from);
    let cache = cache.or_else(|| std::env::home_dir().map(|home| home.join(".cache"))).expect("a home directory");
    cache.join("kvferry/SmolLM2-135M-Instruct.Q4_1.gguf")
}
