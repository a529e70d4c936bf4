//! What a single process says to a prompt.

use std::path::Path;

use kvferry::config::LoadFailurePolicy;
use kvferry_examples::engine::{DeviceKind, EngineService, Submission};
use kvferry_examples::node::{LoadedModel, NodeConfig, generate, logits_digest};
use kvferry_kernels::KvDtype;

use crate::http::Answer;

/// An engine of the embedded model without a connector.
pub struct Reference {
    model: LoadedModel,
    engine: EngineService,
    runtime: tokio::runtime::Runtime,
}

impl Reference {
    /// Loads the model.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn new(dtype: KvDtype) -> Self {
        let model = LoadedModel::load(Path::new("embedded")).expect("the embedded model loads");
        let config = NodeConfig {
            order: "LPBNHC".parse().expect("a legal order"),
            dtype,
            blocks: 512,
            tokens_per_block: 16,
            tp_size: 1,
            device: DeviceKind::Cpu,
            chunk_tokens: 64,
            max_running: 8,
            on_load_failure: LoadFailurePolicy::Recompute,
            prefix: kvferry::pool::PrefixKind::Off,
            in_place: false,
        };
        let engine = model.start_local(&config).expect("an engine starts");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().expect("a runtime");
        Self { model, engine, runtime }
    }

    /// A prompt of `tokens` tokens; another `seed` is another prompt.
    #[must_use]
    pub fn prompt(&self, tokens: u32, seed: u32) -> Vec<u32> {
        (0..tokens).map(|i| 32 + (i * 7 + i / 11 + seed * 13) % 90).collect()
    }

    /// The answer.
    ///
    /// # Panics
    /// If the engine refuses it.
    #[must_use]
    pub fn answer(&self, prompt: &[u32], max_tokens: u32) -> Answer {
        let submission =
            Submission { keep_first_logits: true, ..self.model.greedy(prompt.to_vec(), max_tokens as usize) };
        let handle = self.engine.handle();
        let generation = self.runtime.block_on(generate(&handle, submission)).expect("the engine answers");
        let first_logits = generation.first_logits.as_deref().map(logits_digest).expect("logits were asked for");
        Answer { tokens: generation.tokens, first_logits }
    }
}
