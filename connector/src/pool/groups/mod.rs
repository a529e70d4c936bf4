//! Models whose layers keep different things: windows, chunks, states, beside full attention.
//!
//! A [`GroupPlan`] puts layers that need the same slots into groups whose blocks take the same bytes, so that one [`GroupPool`] serves all of
//! them: a block that a window has passed is room for a full layer. A request's [`GroupTable`] has a block table for each group. What a
//! group needs no more is null there and free at once.
//!
//! Source: vLLM 0.32.0, `v1/core/kv_cache_coordinator.py` and its neighbours: the same hits, the same blocks in the same order, except that
//! of two blocks of one content one is cached. Not done: hits inside a block of states, context parallelism, R-SWA, rings.
//!
//! ```
//! use kvferry::pool::groups::{Ask, Filled, GroupPlan, GroupPool, GroupsConfig, LayerKind, LayerSpec, PageContent, Slots};
//! use kvferry::pool::{BlockHasher, HashScope};
//! use kvferry::sizing::Placement;
//!
//! let content = PageContent::Tokens { heads: 8, head_size: 128, head_size_v: 128, element_bytes: 2 };
//! let layer = |kind| LayerSpec { kind, tokens_per_block: 4, content, padded_bytes: None };
//! let full = layer(LayerKind::Full { window_tokens: None, chunk_tokens: None });
//! let window = layer(LayerKind::Window { window_tokens: 8, retained_tokens: 0 });
//! let plan = GroupPlan::new(&[window, window, full, window, window, full], Placement::PerLayer)?;
//! assert_eq!(plan.groups.len(), 3, "two layers each");
//!
//! let mut pool = GroupPool::new(&GroupsConfig::new(&plan, 64, 4096))?;
//! let prompt: Vec<u32> = (0..40).collect();
//! let hashes = BlockHasher::new(&HashScope { model: "m", tokens_per_block: 4, adapter: None, salt: b"" })?.chain(&prompt);
//! let mut first = pool.open();
//! assert_eq!(pool.allocate_slots(&mut first, &Ask { new_tokens: 40, ..Ask::default() })?, Slots::Given);
//! let filled = Filled { hashes: &hashes, tokens: 40, prompt_tokens: 40, junction: 0 };
//! pool.cache_full_blocks(&mut first, &filled)?; // once they are computed
//! pool.free(first);
//!
//! let hit = pool.computed_blocks(&hashes, prompt.len());
//! assert_eq!(hit.tokens(), 36); // the last token is computed again
//! assert_eq!(hit.ids(0).iter().filter(|id| id.get() != 0).count(), 2); // of a window's group its tail
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod allocate;
mod error;
mod group_pool;
mod hits;
mod packed;
mod plan;
mod reach;
mod ship;
mod spec;
mod states;
mod table;

pub use error::GroupError;
pub use group_pool::{GroupChange, GroupPool, GroupRule, GroupsConfig};
pub use plan::{GroupPlan, LayerGroup};
pub use reach::Retention;
pub use spec::{LayerKind, LayerSpec, PageContent, StateKeeping};
pub use table::{Ask, Filled, GroupTable, Hit, Shipment, Slots};

#[cfg(test)]
mod tests;
