//! How large a cache is whose windows keep only what they need: blocks of groups, and how many requests they hold.
//!
//! Source: vLLM 0.32.0, `get_kv_cache_config_from_groups` and `get_max_concurrency_for_kv_cache_config` in `v1/core/kv_cache_utils.py`.

use serde_json::Value;

use super::geometry::text_config;
use super::{Attention, Budget, CacheShape, Geometry, Placement, SizingError};
use crate::pool::groups::{GroupPlan, LayerKind, LayerSpec, PageContent};

/// One rank's cache in groups.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupSizing {
    /// Which layers share a table.
    pub plan: GroupPlan,
    /// How many blocks fit, whichever group has them; one is the null block.
    pub blocks: u64,
    in_flight_tokens: usize,
}

impl GroupSizing {
    /// Sizes a cache for a model's `config.json`, of which `geometry` was read. A request computes at most `in_flight_tokens` tokens at a
    /// time, and windows keep so much more.
    ///
    /// # Errors
    /// What [`Geometry::shape`] refuses; [`SizingError::Key`]; [`SizingError::Share`]; [`SizingError::Memory`]; [`SizingError::Groups`].
    pub fn new(
        json: &str,
        geometry: &Geometry,
        cache: &CacheShape,
        budget: &Budget,
        placement: Placement,
        in_flight_tokens: usize,
    ) -> Result<Self, SizingError> {
        let layers = layers(json, geometry, cache)?;
        let plan = GroupPlan::new(&layers, placement).map_err(|source| SizingError::Groups { source })?;
        let align_bytes = match placement {
            Placement::Packed { align_bytes } => align_bytes.max(1),
            Placement::PerLayer => 1,
        };
        let blocks = budget.blocks_of(plan.block_bytes, plan.block_bytes.next_multiple_of(align_bytes))?;
        Ok(Self { plan, blocks, in_flight_tokens })
    }

    /// How many requests of so many tokens fit at once, if they share nothing.
    #[must_use]
    pub fn requests_of(&self, tokens: u64) -> u64 {
        let tokens = usize::try_from(tokens).unwrap_or(usize::MAX / 2);
        let each = self.plan.blocks_per_request(tokens, self.in_flight_tokens, 0) as u64;
        self.blocks / each.max(1)
    }
}

/// Each layer's cache on one rank.
fn layers(json: &str, geometry: &Geometry, cache: &CacheShape) -> Result<Vec<LayerSpec>, SizingError> {
    let all: Value = serde_json::from_str(json).map_err(|source| SizingError::Json { source })?;
    let config = text_config(&all);
    let shape = geometry.shape(cache, 1)?;
    let element_bytes = cache.element_bytes.unwrap_or(geometry.element_bytes);
    let (head_size, head_size_v) = match geometry.attention {
        Attention::Heads { head_size, head_size_v, .. } => (head_size, head_size_v),
        Attention::Latent { width } => (width, 0),
    };
    let content = PageContent::Tokens { heads: u32::from(shape.heads), head_size, head_size_v, element_bytes };
    let full = match geometry.attention {
        Attention::Heads { .. } => LayerKind::Full { window_tokens: None, chunk_tokens: None },
        Attention::Latent { .. } => LayerKind::Latent,
    };
    let tokens = |key: &'static str| {
        let number = config.get(key).and_then(Value::as_u64).and_then(|tokens| u32::try_from(tokens).ok());
        number.filter(|tokens| *tokens > 0).ok_or(SizingError::Key { key })
    };
    let kind = |layer: Option<&Value>| match layer.and_then(Value::as_str) {
        Some("sliding_attention") => {
            Ok(LayerKind::Window { window_tokens: tokens("sliding_window")?, retained_tokens: 0 })
        }
        Some("chunked_attention") => Ok(LayerKind::Chunked { chunk_tokens: tokens("attention_chunk_size")? }),
        _ => Ok(full),
    };
    let types = config.get("layer_types").and_then(Value::as_array);
    let layer = |at: u16| {
        let kind = kind(types.and_then(|types| types.get(usize::from(at))))?;
        Ok(LayerSpec { kind, tokens_per_block: u32::from(cache.tokens_per_block), content, padded_bytes: None })
    };
    (0..geometry.layers).map(layer).collect()
}
