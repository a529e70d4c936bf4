//! A small Llama: weights, and the forward pass in parts that an engine calls layer by layer.
//!
//! Every part works row by row: a token's numbers have the same bits whatever other rows are computed with it.

mod config;
mod embedded;
mod error;
mod gguf;
mod linear;
pub mod ops;
mod tokenizer;

use std::path::Path;

pub use config::ModelConfig;
pub use error::ModelError;
pub use linear::Linear;
pub use tokenizer::{BpeTokenizer, ByteTokenizer, TextStream, Tokenizer};

use ops::{Rope, add, rms_norm, swiglu};

/// A Llama's weights.
pub struct Model {
    config: ModelConfig,
    embedding: Linear,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    /// The output matrix; without one the embedding serves.
    head: Option<Linear>,
    rope: Rope,
}

struct Layer {
    attention_norm: Vec<f32>,
    wq: Linear,
    wk: Linear,
    wv: Linear,
    wo: Linear,
    ffn_norm: Vec<f32>,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// Buffers of one forward pass over some rows; kept from step to step so that nothing is allocated in between.
#[derive(Default)]
pub struct Rows {
    /// f32 `[rows, width]`: the residual stream.
    x: Vec<f32>,
    normed: Vec<f32>,
    /// f32 `[rows, heads, head_dim]`, rotated.
    pub q: Vec<f32>,
    /// f32 `[rows, kv_heads, head_dim]`, rotated.
    pub k: Vec<f32>,
    /// f32 `[rows, kv_heads, head_dim]`.
    pub v: Vec<f32>,
    /// f32 `[rows, heads, head_dim]`: what attention wrote.
    pub attention: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    delta: Vec<f32>,
    /// Cosines and sines, one list a row.
    angles: Vec<Vec<(f32, f32)>>,
}

impl Model {
    /// The name that stands for the built-in model where a path is expected.
    pub const EMBEDDED: &str = "embedded";

    /// Loads a model and its tokenizer: `embedded`, or a GGUF file. `progress(done, all)` hears of every layer.
    ///
    /// # Errors
    /// [`ModelError`]: what is wrong with the file, where, and how to mend it.
    pub fn load(path: &Path, progress: &mut dyn FnMut(usize, usize)) -> Result<(Self, Tokenizer), ModelError> {
        if path == Path::new(Self::EMBEDDED) {
            return Ok((Self::embedded(), Tokenizer::Bytes(ByteTokenizer)));
        }
        let file = gguf::GgufFile::open(path)?;
        let tokenizer = file.tokenizer()?;
        Ok((file.model(progress)?, tokenizer))
    }

    /// The sizes.
    #[must_use]
    pub const fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Begins a pass: looks up the tokens' embeddings and the angles of their positions.
    ///
    /// # Panics
    /// If there are not as many positions as tokens, or a token is not in the vocabulary.
    pub fn embed(&self, tokens: &[u32], positions: &[u32], rows: &mut Rows) {
        assert_eq!(tokens.len(), positions.len(), "one position a token");
        let (count, config) = (tokens.len(), &self.config);
        rows.x.resize(count * config.width, 0.0);
        rows.normed.resize(count * config.width, 0.0);
        rows.delta.resize(count * config.width, 0.0);
        rows.q.resize(count * config.q_width(), 0.0);
        rows.attention.resize(count * config.q_width(), 0.0);
        rows.k.resize(count * config.kv_width(), 0.0);
        rows.v.resize(count * config.kv_width(), 0.0);
        rows.gate.resize(count * config.ffn_width, 0.0);
        rows.up.resize(count * config.ffn_width, 0.0);
        for (&token, row) in tokens.iter().zip(rows.x.chunks_exact_mut(config.width)) {
            self.embedding.row(token as usize, row);
        }
        rows.angles = positions.iter().map(|&position| self.rope.angles(position)).collect();
    }

    /// Computes a layer's `rows.q`, `rows.k` and `rows.v`, rotated.
    pub fn project(&self, layer: usize, rows: &mut Rows) {
        let (layer, config) = (&self.layers[layer], &self.config);
        norm_rows(&rows.x, &layer.attention_norm, config.norm_eps, &mut rows.normed);
        layer.wq.forward(&rows.normed, &mut rows.q);
        layer.wk.forward(&rows.normed, &mut rows.k);
        layer.wv.forward(&rows.normed, &mut rows.v);
        let pairs = rows.q.chunks_exact_mut(config.q_width()).zip(rows.k.chunks_exact_mut(config.kv_width()));
        for ((q, k), angles) in pairs.zip(&rows.angles) {
            Rope::rotate(q, config.head_dim, angles);
            Rope::rotate(k, config.head_dim, angles);
        }
    }

    /// Ends a layer: projects `rows.attention` back and runs the feed-forward part.
    pub fn finish_layer(&self, layer: usize, rows: &mut Rows) {
        let layer = &self.layers[layer];
        layer.wo.forward(&rows.attention, &mut rows.delta);
        add(&mut rows.x, &rows.delta);
        norm_rows(&rows.x, &layer.ffn_norm, self.config.norm_eps, &mut rows.normed);
        layer.gate.forward(&rows.normed, &mut rows.gate);
        layer.up.forward(&rows.normed, &mut rows.up);
        swiglu(&mut rows.gate, &rows.up);
        layer.down.forward(&rows.gate, &mut rows.delta);
        add(&mut rows.x, &rows.delta);
    }

    /// The logits of some rows: f32 `[which.len(), vocab]`, in the order asked for.
    ///
    /// # Panics
    /// If a row is out of range.
    #[must_use]
    pub fn logits(&self, rows: &Rows, which: &[usize]) -> Vec<f32> {
        let width = self.config.width;
        let mut last = vec![0.0; which.len() * width];
        for (&row, last) in which.iter().zip(last.chunks_exact_mut(width)) {
            rms_norm(&rows.x[row * width..(row + 1) * width], &self.norm, self.config.norm_eps, last);
        }
        let mut logits = vec![0.0; which.len() * self.config.vocab];
        self.head.as_ref().unwrap_or(&self.embedding).forward(&last, &mut logits);
        logits
    }
}

fn norm_rows(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    for (x, out) in x.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
        rms_norm(x, weight, eps, out);
    }
}
