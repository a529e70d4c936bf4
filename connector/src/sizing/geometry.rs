//! What of a model's configuration decides the size of its KV.

use kvferry_protocol::layout::KvShape;
use serde_json::Value;

use super::SizingError;

/// What a model keeps of each token, in each layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Attention {
    /// Keys and values of some heads.
    Heads {
        /// KV heads of the whole model.
        kv_heads: u16,
        /// Elements of a head's key.
        head_size: u32,
        /// Elements of a head's value.
        head_size_v: u32,
    },
    /// One latent vector for all heads (MLA): every tensor-parallel rank keeps all of it.
    Latent {
        /// Its elements: `kv_lora_rank` and `qk_rope_head_dim`.
        width: u32,
    },
}

/// A model's KV, before it is spread over ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Layers with KV.
    pub layers: u16,
    /// Of these, how many need only a window of it. [`Sizing`](super::Sizing) counts them like the others, as without groups;
    /// [`GroupSizing`](super::GroupSizing) as windows.
    pub window_layers: u16,
    /// What each keeps.
    pub attention: Attention,
    /// Bytes of an element as the model computes, which its KV has too unless it is quantised.
    pub element_bytes: u32,
}

impl Geometry {
    /// Reads a model's `config.json` (Hugging Face).
    ///
    /// # Errors
    /// [`SizingError::Json`]; [`SizingError::Key`] for one that is missing or has no such value; [`SizingError::Unsized`] for models that
    /// keep more than KV: recurrent state, an indexer's keys, an encoder's.
    pub fn from_config(json: &str) -> Result<Self, SizingError> {
        let all: Value = serde_json::from_str(json).map_err(|source| SizingError::Json { source })?;
        let config = text_config(&all);
        for key in STATE_KEYS {
            if is_set(config, key) || is_set(&all, key) {
                return Err(SizingError::Unsized { what: (*key).to_owned() });
            }
        }
        let layers = number(config, "num_hidden_layers")?;
        let attention = match optional(config, "kv_lora_rank")? {
            Some(rank) => Attention::Latent { width: rank.saturating_add(number(config, "qk_rope_head_dim")?) },
            None => heads(config)?,
        };
        let layers = few(layers, "num_hidden_layers")?;
        let element_bytes =
            element_bytes(config).or_else(|| element_bytes(&all)).ok_or(SizingError::Key { key: "dtype" })?;
        Ok(Self { layers, window_layers: window_layers(config)?, attention, element_bytes })
    }

    /// The cache of one rank of `tp_size`; a head that more ranks need than there are heads is kept by each of them.
    ///
    /// # Errors
    /// [`SizingError::Ranks`] if neither of heads and ranks divides the other.
    pub fn shape(&self, cache: &CacheShape, blocks: u32) -> Result<KvShape, SizingError> {
        let CacheShape { tp_size, tokens_per_block, element_bytes } = *cache;
        let element_bytes = element_bytes.unwrap_or(self.element_bytes);
        let (heads, run_bytes) = match self.attention {
            Attention::Latent { width } => (1, vec![width * element_bytes]),
            Attention::Heads { kv_heads, head_size, head_size_v } => {
                let whole = tp_size > 0 && (kv_heads.is_multiple_of(tp_size) || tp_size.is_multiple_of(kv_heads));
                if !whole {
                    return Err(SizingError::Ranks { kv_heads, tp_size });
                }
                ((kv_heads / tp_size).max(1), vec![head_size * element_bytes, head_size_v * element_bytes])
            }
        };
        let tokens_per_block = u32::from(tokens_per_block);
        Ok(KvShape { layers: self.layers, blocks, heads, tokens_per_block, run_bytes })
    }
}

/// How an engine keeps a model's KV on one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheShape {
    /// Tensor-parallel ranks.
    pub tp_size: u16,
    /// Tokens in a block.
    pub tokens_per_block: u16,
    /// Bytes of an element of the cache; the model's own if none.
    pub element_bytes: Option<u32>,
}

/// Multimodal models keep their language model's keys apart.
pub(super) fn text_config(all: &Value) -> &Value {
    match (all.get("num_hidden_layers"), all.get("text_config")) {
        (None, Some(text)) => text,
        _ => all,
    }
}

fn heads(config: &Value) -> Result<Attention, SizingError> {
    let heads = number(config, "num_attention_heads")?;
    let kv_heads = optional(config, "num_key_value_heads")?.unwrap_or(heads);
    let head_size = match optional(config, "head_dim")? {
        Some(size) => size,
        None => {
            number(config, "hidden_size")?.checked_div(heads).ok_or(SizingError::Key { key: "num_attention_heads" })?
        }
    };
    let head_size_v = optional(config, "v_head_dim")?.unwrap_or(head_size);
    let kv_heads = few(kv_heads, "num_key_value_heads")?;
    Ok(Attention::Heads { kv_heads, head_size, head_size_v })
}

fn window_layers(config: &Value) -> Result<u16, SizingError> {
    let Some(types) = config.get("layer_types").and_then(Value::as_array) else { return Ok(0) };
    let mut window = 0;
    for layer in types {
        match layer.as_str() {
            Some("full_attention") => {}
            Some("sliding_attention" | "chunked_attention") => window += 1,
            other => return Err(SizingError::Unsized { what: other.unwrap_or("layer_types").to_owned() }),
        }
    }
    Ok(window)
}

fn element_bytes(config: &Value) -> Option<u32> {
    let name = config.get("dtype").or_else(|| config.get("torch_dtype"))?.as_str()?;
    match name {
        "bfloat16" | "float16" => Some(2),
        "float32" => Some(4),
        _ => None,
    }
}

fn optional(config: &Value, key: &'static str) -> Result<Option<u32>, SizingError> {
    match config.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => {
            // None is anywhere near this, and so their products fit.
            let number = value.as_u64().filter(|number| (1..=1 << 16).contains(number));
            number.map(|number| Some(number as u32)).ok_or(SizingError::Key { key })
        }
    }
}

fn number(config: &Value, key: &'static str) -> Result<u32, SizingError> {
    optional(config, key)?.ok_or(SizingError::Key { key })
}

fn few(number: u32, key: &'static str) -> Result<u16, SizingError> {
    u16::try_from(number).ok().filter(|number| *number <= 4096).ok_or(SizingError::Key { key })
}

fn is_set(config: &Value, key: &str) -> bool {
    !matches!(config.get(key), None | Some(Value::Null | Value::Bool(false)))
}

/// Of models that keep something else than KV: Mamba, linear attention, a sparse indexer, an encoder.
const STATE_KEYS: &[&str] = &[
    "is_encoder_decoder",
    "ssm_state_size",
    "mamba_d_state",
    "state_size",
    "linear_num_key_heads",
    "linear_attn_config",
    "hybrid_override_pattern",
    "attn_type_list",
    "index_topk",
];
