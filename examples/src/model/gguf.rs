//! Reads a Llama out of a GGUF file.

use std::fs::File;
use std::io::BufReader;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use candle_core::Device;
use candle_core::quantized::gguf_file::{Content, Value};

use super::config::ModelConfig;
use super::error::ModelError;
use super::linear::Linear;
use super::ops::Rope;
use super::tokenizer::Tokenizer;
use super::{Layer, Model};

/// A GGUF file, open for reading: its metadata was parsed, its tensors are read one by one.
pub(super) struct GgufFile {
    path: PathBuf,
    content: Content,
    reader: BufReader<File>,
}

impl GgufFile {
    pub(super) fn open(path: &Path) -> Result<Self, ModelError> {
        let open = |source| ModelError::Open { path: path.into(), source };
        // Before it is opened: a pipe would wait for a writer.
        let kind = std::fs::metadata(path).map_err(open)?.file_type();
        if !kind.is_file() {
            let found = if kind.is_dir() { "a folder" } else { "no regular file" };
            return Err(open(std::io::Error::new(std::io::ErrorKind::InvalidInput, format!("it is {found}"))));
        }
        let file = File::open(path).map_err(open)?;
        let mut reader = BufReader::new(file);
        let header = |problem: String| ModelError::Header { path: path.into(), problem };
        // The parser checks lengths against the file's, but some arithmetic on them (an alignment of 0) panics.
        let content = catch_unwind(AssertUnwindSafe(|| Content::read(&mut reader)))
            .map_err(|_| header("its header holds numbers that cannot be computed with".into()))?
            .map_err(|error| header(error.to_string()))?;
        Ok(Self { path: path.into(), content, reader })
    }

    pub(super) fn tokenizer(&self) -> Result<Tokenizer, ModelError> {
        Tokenizer::from_gguf(&self.path, &self.content)
    }

    pub(super) fn model(mut self, progress: &mut dyn FnMut(usize, usize)) -> Result<Model, ModelError> {
        let config = self.config()?;
        let (width, q, kv, ffn) = (config.width, config.q_width(), config.kv_width(), config.ffn_width);
        let embedding = self.linear("token_embd.weight", config.vocab, width)?;
        let mut layers = Vec::with_capacity(config.layers);
        for layer in 0..config.layers {
            progress(layer, config.layers);
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            layers.push(Layer {
                attention_norm: self.vector(&name("attn_norm"), width)?,
                wq: self.linear(&name("attn_q"), q, width)?,
                wk: self.linear(&name("attn_k"), kv, width)?,
                wv: self.linear(&name("attn_v"), kv, width)?,
                wo: self.linear(&name("attn_output"), width, q)?,
                ffn_norm: self.vector(&name("ffn_norm"), width)?,
                gate: self.linear(&name("ffn_gate"), ffn, width)?,
                up: self.linear(&name("ffn_up"), ffn, width)?,
                down: self.linear(&name("ffn_down"), width, ffn)?,
            });
        }
        let norm = self.vector("output_norm.weight", width)?;
        // Without an output matrix the embedding serves as one.
        let head = match self.has("output.weight") {
            true => Some(self.linear("output.weight", config.vocab, width)?),
            false => None,
        };
        let factors = match self.has("rope_freqs.weight") {
            true => Some(self.vector("rope_freqs.weight", config.rope_dims / 2)?),
            false => None,
        };
        progress(config.layers, config.layers);
        let rope = Rope::new(config.rope_theta, config.rope_dims, factors.as_deref());
        Ok(Model { config, embedding, layers, norm, head, rope })
    }

    fn config(&self) -> Result<ModelConfig, ModelError> {
        let architecture = self.text("general.architecture")?;
        if architecture != "llama" {
            return Err(ModelError::Architecture { path: self.path.clone(), found: architecture });
        }
        let heads = self.size("llama.attention.head_count")?;
        let width = self.size("llama.embedding_length")?;
        let head_dim = match self.content.metadata.contains_key("llama.attention.key_length") {
            true => self.size("llama.attention.key_length")?,
            false => width.checked_div(heads).unwrap_or(0),
        };
        let or = |key: &str, default: usize| match self.content.metadata.contains_key(key) {
            true => self.size(key),
            false => Ok(default),
        };
        self.refuse_what_is_not_computed(head_dim)?;
        let stem = self.path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let config = ModelConfig {
            name: self.text("general.name").ok().or(stem).unwrap_or_default(),
            layers: self.size("llama.block_count")?,
            width,
            ffn_width: self.size("llama.feed_forward_length")?,
            heads,
            kv_heads: or("llama.attention.head_count_kv", heads)?,
            head_dim,
            vocab: self.vocab()?,
            context: self.size("llama.context_length")?,
            rope_theta: self
                .number("llama.rope.freq_base")
                .or_else(|error| self.absent("llama.rope.freq_base", 1e4, error))?,
            rope_dims: or("llama.rope.dimension_count", head_dim)?,
            norm_eps: self.number("llama.attention.layer_norm_rms_epsilon")?,
        };
        config.check().map_err(|(size, problem)| self.key(key_of(size), problem))?;
        Ok(config)
    }

    /// The engine would compute something else than the model's authors meant: better to say so.
    fn refuse_what_is_not_computed(&self, head_dim: usize) -> Result<(), ModelError> {
        let key = "llama.rope.scaling.type";
        if let Some(scaling) = self.content.metadata.get(key)
            && !scaling.to_string().is_ok_and(|scaling| scaling == "none")
        {
            return Err(self.key(key, format!("{scaling:?} is not supported, only \"none\"")));
        }
        for (key, only) in [("llama.expert_count", 0), ("llama.attention.value_length", head_dim)] {
            if self.content.metadata.contains_key(key) && self.size(key)? != only {
                return Err(self.key(key, format!("{} is not supported, only {only}", self.size(key)?)));
            }
        }
        Ok(())
    }

    fn vocab(&self) -> Result<usize, ModelError> {
        let key = "tokenizer.ggml.tokens";
        match self.content.metadata.get(key) {
            Some(Value::Array(tokens)) => Ok(tokens.len()),
            Some(_) => Err(self.key(key, "it is not a list".into())),
            None => Err(self.key(key, "it is missing".into())),
        }
    }

    fn linear(&mut self, tensor: &str, outputs: usize, inputs: usize) -> Result<Linear, ModelError> {
        let weights = self.numbers(tensor, &[outputs, inputs])?;
        Ok(Linear::quantise(&weights, outputs, inputs))
    }

    fn vector(&mut self, tensor: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        self.numbers(tensor, &[len])
    }

    fn has(&self, tensor: &str) -> bool {
        self.content.tensor_infos.contains_key(tensor)
    }

    /// A tensor's numbers as f32, after its shape was compared with the expected one.
    fn numbers(&mut self, tensor: &str, expected: &[usize]) -> Result<Vec<f32>, ModelError> {
        let Some(info) = self.content.tensor_infos.get(tensor) else {
            let (path, expected) = (self.path.clone(), expected.to_vec());
            return Err(ModelError::MissingTensor { path, tensor: tensor.into(), expected });
        };
        if info.shape.dims() != expected {
            let (path, found) = (self.path.clone(), info.shape.dims().to_vec());
            return Err(ModelError::Shape { path, tensor: tensor.into(), expected: expected.to_vec(), found });
        }
        let offset = self.content.tensor_data_offset;
        let numbers = info
            .read(&mut self.reader, offset, &Device::Cpu)
            .and_then(|tensor| tensor.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>())
            .map_err(|error| self.tensor(tensor, error.to_string()))?;
        match numbers.iter().position(|number| !number.is_finite()) {
            Some(at) => Err(self.tensor(tensor, format!("number {at} is {}", numbers[at]))),
            None => Ok(numbers),
        }
    }

    fn value(&self, key: &str) -> Result<&Value, ModelError> {
        self.content.metadata.get(key).ok_or_else(|| self.key(key, "it is missing".into()))
    }

    fn text(&self, key: &str) -> Result<String, ModelError> {
        self.value(key)?.to_string().cloned().map_err(|error| self.key(key, error.to_string()))
    }

    fn size(&self, key: &str) -> Result<usize, ModelError> {
        let size = self.value(key)?.to_u64().map_err(|error| self.key(key, error.to_string()))?;
        usize::try_from(size).map_err(|error| self.key(key, error.to_string()))
    }

    fn number(&self, key: &str) -> Result<f32, ModelError> {
        self.value(key)?.to_f32().map_err(|error| self.key(key, error.to_string()))
    }

    fn absent(&self, key: &str, default: f32, error: ModelError) -> Result<f32, ModelError> {
        if self.content.metadata.contains_key(key) { Err(error) } else { Ok(default) }
    }

    fn key(&self, key: impl Into<String>, problem: String) -> ModelError {
        ModelError::Key { path: self.path.clone(), key: key.into(), problem }
    }

    fn tensor(&self, tensor: &str, problem: String) -> ModelError {
        ModelError::Tensor { path: self.path.clone(), tensor: tensor.into(), problem }
    }
}

/// The metadata key that a size of [`ModelConfig`] was read from.
fn key_of(size: &str) -> &'static str {
    match size {
        "layers" => "llama.block_count",
        "width" => "llama.embedding_length",
        "ffn_width" => "llama.feed_forward_length",
        "heads" => "llama.attention.head_count",
        "kv_heads" => "llama.attention.head_count_kv",
        "head_dim" => "llama.attention.key_length",
        "vocab" => "tokenizer.ggml.tokens",
        "context" => "llama.context_length",
        "rope_dims" => "llama.rope.dimension_count",
        "rope_theta" => "llama.rope.freq_base",
        _ => "llama.attention.layer_norm_rms_epsilon",
    }
}
