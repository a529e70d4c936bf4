//! A small Llama made from a seed: it loads in milliseconds and needs no download.
//!
//! Its text means nothing, but it depends on every token before it, and it is the same on every start: all that a
//! comparison of two engines needs.

use super::config::ModelConfig;
use super::linear::Linear;
use super::ops::Rope;
use super::tokenizer::ByteTokenizer;
use super::{Layer, Model};

const SEED: u64 = 0x6b76_6665_7272_7931; // any seed will do; tests/embedded.rs looks at what this one says

impl Model {
    /// Builds the embedded model: 4 layers, 4 query and 2 KV heads of 32, a vocabulary of bytes.
    #[must_use]
    pub fn embedded() -> Self {
        let config = ModelConfig {
            name: "kvferry-embedded-1".into(),
            layers: 4,
            width: 128,
            ffn_width: 256,
            heads: 4,
            kv_heads: 2,
            head_dim: 32,
            vocab: ByteTokenizer::VOCAB,
            context: 4096,
            rope_theta: 10_000.0,
            rope_dims: 32,
            norm_eps: 1e-5,
        };
        debug_assert!(config.check().is_ok());
        let mut random = Random(SEED);
        let (width, q, kv, ffn) = (config.width, config.q_width(), config.kv_width(), config.ffn_width);
        let embedding = random.linear(config.vocab, width, 1.0);
        let layers = (0..config.layers)
            .map(|_| Layer {
                attention_norm: vec![1.0; width],
                // Sharp attention: scores must spread, or every prompt looks like its mean.
                wq: random.linear(q, width, 2.0),
                wk: random.linear(kv, width, 2.0),
                wv: random.linear(kv, width, 1.0),
                wo: random.linear(width, q, 1.5),
                ffn_norm: vec![1.0; width],
                gate: random.linear(ffn, width, 1.5),
                up: random.linear(ffn, width, 1.5),
                down: random.linear(width, ffn, 1.0),
            })
            .collect();
        let head = random.readable_head(&config);
        let rope = Rope::new(config.rope_theta, config.rope_dims, None);
        Self { norm: vec![1.0; width], embedding, layers, head: Some(head), rope, config }
    }
}

/// Numbers from a seed: splitmix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform numbers of the variance that keeps a row's scale times `gain`.
    fn numbers(&mut self, count: usize, inputs: usize, gain: f32) -> Vec<f32> {
        let bound = gain * (3.0 / inputs as f32).sqrt();
        (0..count).map(|_| ((self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * bound).collect()
    }

    fn linear(&mut self, outputs: usize, inputs: usize, gain: f32) -> Linear {
        Linear::quantise(&self.numbers(outputs * inputs, inputs, gain), outputs, inputs)
    }

    /// An output matrix whose rows are zero but for the printable bytes and the end of text: only they are ever chosen.
    fn readable_head(&mut self, config: &ModelConfig) -> Linear {
        let mut weights = self.numbers(config.vocab * config.width, config.width, 4.0);
        for (token, row) in weights.chunks_exact_mut(config.width).enumerate() {
            let chosen = (0x20..0x7f).contains(&token) || token == ByteTokenizer::EOS as usize;
            if !chosen {
                row.fill(0.0);
            }
        }
        Linear::quantise(&weights, config.vocab, config.width)
    }
}
