//! A router that hears nothing of an engine but its KV events knows what a prompt finds in its cache.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use kvferry::config::LoadFailurePolicy;
use kvferry::events::{BlockName, Dialect, EventBatch, EventLog, KvEvent};
use kvferry::pool::PrefixKind;
use kvferry_examples::engine::{DeviceKind, EngineService};
use kvferry_examples::model::Model;
use kvferry_examples::node::{LoadedModel, NodeConfig, generate};

const BLOCK: usize = 4;
const MAX_TOKENS: usize = 8;

fn config(prefix: PrefixKind, blocks: u32) -> NodeConfig {
    NodeConfig {
        order: "BLPNHC".parse().unwrap(),
        dtype: "f16".parse().unwrap(),
        blocks,
        tokens_per_block: BLOCK as u32,
        tp_size: 1,
        device: DeviceKind::Cpu,
        chunk_tokens: 16,
        max_running: 2,
        on_load_failure: LoadFailurePolicy::Fail,
        prefix,
        in_place: false,
    }
}

/// Which blocks can be found: their tokens after their parent.
#[derive(Default)]
struct Router {
    blocks: BTreeMap<BlockName, (Option<BlockName>, Vec<u32>)>,
    removed: usize,
}

impl Router {
    fn hear(&mut self, batch: &EventBatch) {
        for event in &batch.events {
            match event {
                KvEvent::Stored(stored) => {
                    let mut parent = stored.parent.clone();
                    for (name, tokens) in stored.blocks.iter().zip(stored.tokens.chunks(BLOCK)) {
                        let before = self.blocks.insert(name.clone(), (parent, tokens.to_vec()));
                        assert_eq!(before, None, "{name:?} was told twice");
                        parent = Some(name.clone());
                    }
                }
                KvEvent::Removed(removed) => {
                    for name in &removed.blocks {
                        assert!(self.blocks.remove(name).is_some(), "{name:?} was never told");
                    }
                    self.removed += removed.blocks.len();
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Tokens of a prompt that are there, but for its last one.
    fn finds(&self, prompt: &[u32]) -> u64 {
        let mut parent = None;
        let blocks = prompt[..prompt.len() - 1].chunks_exact(BLOCK);
        let found = blocks.take_while(|tokens| {
            let child = self.blocks.iter().find(|(_, (after, of))| *after == parent && of == tokens);
            parent = child.map(|(name, _)| name.clone());
            parent.is_some()
        });
        (found.count() * BLOCK) as u64
    }
}

async fn local(engine: &EngineService) -> u64 {
    engine.handle().snapshot().await.unwrap().local_prompt_tokens
}

#[tokio::test]
async fn a_router_knows_what_every_prompt_finds() {
    let model = LoadedModel::load(Model::EMBEDDED.as_ref()).unwrap();
    let prompts = [
        "One, two, three, four, five, six,",
        "One, two, three, four, five, seven,",
        "Something else that takes most of the cache for itself, and whose end is far away from its start.",
        "One, two, three,",
        "Something else that takes most of the cache for itself, and is another text.",
    ];
    for kind in [PrefixKind::Hash, PrefixKind::Radix] {
        let heard = Arc::new(Mutex::new((Router::default(), EventLog::new(Dialect::default(), 8, 1 << 20))));
        let publish = Arc::clone(&heard);
        let publish = move |batch: &EventBatch| {
            let (router, log) = &mut *publish.lock().unwrap();
            router.hear(batch);
            let number = log.next();
            assert_eq!(log.append(batch).sequence, number);
        };
        let engine = model.start_publishing(&config(kind, 32), Some(Box::new(publish))).unwrap();
        let mut hits = 0;
        for prompt in prompts.iter().chain(&prompts) {
            let prompt = model.tokenizer.encode(prompt).unwrap();
            let before = local(&engine).await;
            let expected = heard.lock().unwrap().0.finds(&prompt);
            let answer = generate(&engine.handle(), model.greedy(prompt.clone(), MAX_TOKENS)).await.unwrap();
            // The step that ended the answer is told of before the engine answers anybody again.
            assert_eq!(local(&engine).await - before, expected, "{kind}");
            hits += expected;
            // What is there now: a next turn would find it.
            let said = [&prompt[..], &answer.tokens].concat();
            let whole = (said.len() - 1) / BLOCK * BLOCK;
            assert_eq!(heard.lock().unwrap().0.finds(&said), whole as u64, "{kind}");
        }
        let (router, log) = &*heard.lock().unwrap();
        assert!(hits > 0 && router.removed > 0, "{kind}: {hits} found, {} removed", router.removed);
        let kept: Vec<u64> = log.since(0).map(|batch| batch.sequence).collect();
        assert_eq!(kept, (log.next() - 8..log.next()).collect::<Vec<_>>(), "{kind}: as many as are kept");
    }
}
