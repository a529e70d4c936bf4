//! How large blocks are, and how many fit: from a model's configuration and a device's memory.
//!
//! ```
//! use kvferry::sizing::{Budget, CacheShape, Geometry, Placement, Sizing};
//!
//! let config = r#"{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16"}"#;
//! let cache = CacheShape { tp_size: 1, tokens_per_block: 16, element_bytes: None };
//! let budget = Budget { memory_bytes: 80 << 30, share: 0.9, weights_bytes: 15 << 30, activations_bytes: 2 << 30, graphs_bytes: 1 << 30 };
//! let sizing = Sizing::new(&Geometry::from_config(config)?, &cache, &budget, Placement::Packed { align_bytes: 1 })?;
//! assert_eq!((sizing.run_bytes, sizing.block_bytes, sizing.blocks), (32 << 10, 2 << 20, 27_648));
//! # Ok::<(), kvferry::sizing::SizingError>(())
//! ```

mod geometry;
mod groups;

use crate::pool::groups::GroupError;

pub use geometry::{Attention, CacheShape, Geometry};
pub use groups::GroupSizing;

/// Why a cache cannot be sized.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SizingError {
    /// The configuration is no JSON.
    #[error("the model's configuration is not JSON: give its config.json")]
    Json {
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// A key is missing, or its value is none that it can have.
    #[error("{key} is missing in the model's configuration, or is not a number or name that it can be")]
    Key {
        /// The key.
        key: &'static str,
    },
    /// The model keeps more than KV per token.
    #[error("{what} in the model's configuration means that it keeps more than KV, which is not sized here")]
    Unsized {
        /// What says so.
        what: String,
    },
    /// Heads cannot be spread evenly.
    #[error("{kv_heads} KV heads cannot be spread over {tp_size} ranks: use a number of which one divides the other")]
    Ranks {
        /// The model's KV heads.
        kv_heads: u16,
        /// Ranks.
        tp_size: u16,
    },
    /// Nothing is left for KV.
    #[error(
        "{wanted} bytes of weights, activations and graphs leave no block of {block_bytes} bytes of the {given} that may be used: \
         use more ranks or a larger share"
    )]
    Memory {
        /// What is taken.
        wanted: u64,
        /// What may be used of the device.
        given: u64,
        /// One block.
        block_bytes: u64,
    },
    /// The layers cannot be grouped.
    #[error("the model's layers cannot be put into groups")]
    Groups {
        /// Why.
        #[source]
        source: GroupError,
    },
    /// A share that is none.
    #[error("a share of {share} of the memory cannot be used: it is above 0 and at most 1")]
    Share {
        /// As it was given.
        share: f64,
    },
}

/// The memory of one rank's device, and what takes of it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Budget {
    /// All of it.
    pub memory_bytes: u64,
    /// How much of that the engine may use: above 0, at most 1 (vLLM's `gpu_memory_utilization`).
    pub share: f64,
    /// The rank's weights.
    pub weights_bytes: u64,
    /// The most that a step takes beside weights and KV.
    pub activations_bytes: u64,
    /// Kept for captured graphs.
    pub graphs_bytes: u64,
}

impl Budget {
    /// A budget whose weights and activations are measured: `profile` loads the model, runs its largest step, and answers the bytes of
    /// the weights and the most that was allocated, weights included.
    ///
    /// # Errors
    /// What `profile` answers.
    pub fn profiled<E>(
        memory_bytes: u64,
        share: f64,
        graphs_bytes: u64,
        profile: impl FnOnce() -> Result<(u64, u64), E>,
    ) -> Result<Self, E> {
        let (weights_bytes, peak_bytes) = profile()?;
        let activations_bytes = peak_bytes.saturating_sub(weights_bytes);
        Ok(Self { memory_bytes, share, weights_bytes, activations_bytes, graphs_bytes })
    }
}

impl Budget {
    /// How many blocks of `block_bytes` fit, `stride_bytes` apart.
    fn blocks_of(&self, block_bytes: u64, stride_bytes: u64) -> Result<u64, SizingError> {
        let Self { memory_bytes, share, weights_bytes, activations_bytes, graphs_bytes } = *self;
        if !(share > 0.0 && share <= 1.0) {
            return Err(SizingError::Share { share });
        }
        let given = (memory_bytes as f64 * share) as u64;
        let wanted = weights_bytes.saturating_add(activations_bytes).saturating_add(graphs_bytes);
        let blocks = given.saturating_sub(wanted).checked_div(stride_bytes).filter(|blocks| *blocks > 0);
        blocks.ok_or(SizingError::Memory { wanted, given, block_bytes })
    }
}

/// How blocks lie in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placement {
    /// All layers of a block together, each block at a multiple of `align_bytes`.
    Packed {
        /// 1 and above.
        align_bytes: u64,
    },
    /// An allocation per layer, all of one size.
    PerLayer,
}

/// One rank's cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sizing {
    /// Bytes of KV per token.
    pub token_bytes: u64,
    /// What one copy moves where layers and K and V lie apart: one plane of one layer of a block.
    pub run_bytes: u64,
    /// A whole block, which is one copy where it is packed. Without padding.
    pub block_bytes: u64,
    /// How many blocks fit.
    pub blocks: u64,
    /// How many tokens these hold.
    pub tokens: u64,
    tokens_per_block: u64,
}

impl Sizing {
    /// Sizes a cache.
    ///
    /// # Errors
    /// [`SizingError::Ranks`], [`SizingError::Share`], or [`SizingError::Memory`] if not one block fits.
    pub fn new(
        geometry: &Geometry,
        cache: &CacheShape,
        budget: &Budget,
        placement: Placement,
    ) -> Result<Self, SizingError> {
        let shape = geometry.shape(cache, 1)?;
        let (block_bytes, layers) = (shape.block_bytes(), u64::from(shape.layers));
        let tokens_per_block = u64::from(cache.tokens_per_block);
        let stride = match placement {
            Placement::Packed { align_bytes } => block_bytes.next_multiple_of(align_bytes.max(1)),
            Placement::PerLayer => block_bytes,
        };
        let blocks = budget.blocks_of(block_bytes, stride)?;
        Ok(Self {
            token_bytes: block_bytes / tokens_per_block,
            run_bytes: block_bytes / (layers * shape.run_bytes.len() as u64),
            block_bytes,
            blocks,
            tokens: blocks * tokens_per_block,
            tokens_per_block,
        })
    }

    /// How many requests of so many tokens fit at once, if they share nothing.
    #[must_use]
    pub fn requests_of(&self, tokens: u64) -> u64 {
        self.blocks / tokens.div_ceil(self.tokens_per_block).max(1)
    }
}

#[cfg(test)]
mod tests;
