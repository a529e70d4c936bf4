//! Tensor-parallel ranks of one process: each holds the KV of some heads and computes their queries' attention.
//!
//! Projections are computed once for all ranks; each rank takes its heads from them, and what it computes is put back in place
//! before the output projection. So every number is made by the same operations as with one rank, and has the same bits.

use std::ops::Range;
use std::sync::Arc;

use kvferry::pd::KvCache;
use kvferry_kernels::device::Device;
use kvferry_kernels::{AttentionBatch, AttentionOptions, AttentionSequence, Slot, Threads};
use kvferry_protocol::layout::{KvShape, Shard, TpError, heads_of};
use kvferry_protocol::{LayerId, TpRank};

use super::kv::{Kv, Refused};
use super::runner::{CacheConfig, RunnerError};
use crate::model::{ModelConfig, Rows};

/// One rank: a cache of its KV heads, and the query heads whose attention it computes.
pub struct Rank {
    kv: Kv,
    heads: Range<u16>,
    queries: Range<usize>,
    whole: bool,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    out: Vec<f32>,
}

impl Rank {
    /// All ranks of a model, with their caches.
    ///
    /// # Errors
    /// [`RunnerError::Ranks`] if the KV heads do not spread evenly over them, [`RunnerError::Device`] if there is no such device,
    /// [`RunnerError::Cache`] if a cache cannot be made.
    pub(super) fn all(model: &ModelConfig, cache: CacheConfig) -> Result<Vec<Self>, RunnerError> {
        let device = cache.device.open()?;
        (0..cache.tp_size.max(1)).map(|rank| Self::new(model, cache, device.as_ref(), TpRank::new(rank))).collect()
    }

    fn new(
        model: &ModelConfig,
        config: CacheConfig,
        device: Option<&Arc<dyn Device>>,
        rank: TpRank,
    ) -> Result<Self, RunnerError> {
        let CacheConfig { order, dtype, blocks, tokens_per_block, .. } = config;
        let ranks = |source| RunnerError::Ranks { source };
        let heads = heads_of(rank, config.tp_size.max(1), model.kv_heads as u16).map_err(ranks)?;
        let queries = queries_of(rank, config.tp_size.max(1), model).map_err(ranks)?;
        let run = (model.head_dim * dtype.bytes()) as u32;
        let shape = KvShape {
            layers: model.layers as u16,
            blocks,
            heads: heads.len() as u16,
            tokens_per_block,
            run_bytes: vec![run, run],
        };
        let kv = Kv::new(shape, config, device).map_err(|source| RunnerError::Cache { blocks, order, source })?;
        let whole = queries == (0..model.heads);
        let (q, k, v, out) = Default::default();
        Ok(Self { kv, heads, queries, whole, q, k, v, out })
    }

    /// The cache, to register it with a connector; it shares the memory.
    #[must_use]
    pub fn cache(&self) -> KvCache {
        self.kv.cache()
    }

    /// Which part of the model the cache holds.
    #[must_use]
    pub const fn shard(&self) -> Shard {
        Shard { first_layer: LayerId::new(0), first_head: self.heads.start }
    }

    /// Stores this rank's K and V of a layer, and writes its heads' attention into `rows.attention`.
    pub(super) fn attend(
        &mut self,
        layer: LayerId,
        slots: &[Slot],
        sequences: &[AttentionSequence<'_>],
        model: &ModelConfig,
        threads: &Threads,
        rows: &mut Rows,
    ) -> Result<(), Refused> {
        let options = AttentionOptions::causal(1.0 / (model.head_dim as f32).sqrt());
        let layer = layer.get();
        if self.whole {
            self.kv.store(layer, slots, &rows.k, &rows.v)?;
            let queries = AttentionBatch { queries: &rows.q, q_heads: model.heads, sequences };
            return self.kv.attend(layer, &queries, &options, threads, &mut rows.attention);
        }
        let kv = usize::from(self.heads.start)..usize::from(self.heads.end);
        take(&rows.k, model.kv_heads, model.head_dim, kv.clone(), &mut self.k);
        take(&rows.v, model.kv_heads, model.head_dim, kv, &mut self.v);
        self.kv.store(layer, slots, &self.k, &self.v)?;
        if self.queries.is_empty() {
            return Ok(()); // More ranks hold the KV head than it has queries.
        }
        take(&rows.q, model.heads, model.head_dim, self.queries.clone(), &mut self.q);
        self.out.resize(self.q.len(), 0.0);
        let queries = AttentionBatch { queries: &self.q, q_heads: self.queries.len(), sequences };
        self.kv.attend(layer, &queries, &options, threads, &mut self.out)?;
        put(&self.out, model.heads, model.head_dim, self.queries.clone(), &mut rows.attention);
        Ok(())
    }
}

/// The query heads of a rank: those of its KV heads. Ranks that hold the same KV head share its queries; where there are more
/// ranks than queries, some have none.
fn queries_of(rank: TpRank, tp_size: u16, model: &ModelConfig) -> Result<Range<usize>, TpError> {
    let kv = heads_of(rank, tp_size, model.kv_heads as u16)?;
    let group = model.heads / model.kv_heads;
    let (first, end) = (usize::from(kv.start) * group, usize::from(kv.end) * group);
    let holders = usize::from(tp_size).div_ceil(model.kv_heads);
    let copy = usize::from(rank.get()) % holders;
    Ok(first + (end - first) * copy / holders..first + (end - first) * (copy + 1) / holders)
}

/// Copies some heads of every row: f32 `[rows, heads, dim]` to f32 `[rows, which.len(), dim]`.
fn take(from: &[f32], heads: usize, dim: usize, which: Range<usize>, to: &mut Vec<f32>) {
    to.clear();
    for row in from.chunks_exact(heads * dim) {
        to.extend_from_slice(&row[which.start * dim..which.end * dim]);
    }
}

/// The way back: f32 `[rows, which.len(), dim]` into those heads of f32 `[rows, heads, dim]`.
fn put(from: &[f32], heads: usize, dim: usize, which: Range<usize>, to: &mut [f32]) {
    let rows = to.chunks_exact_mut(heads * dim);
    for (row, part) in rows.zip(from.chunks_exact(which.len() * dim)) {
        row[which.start * dim..which.end * dim].copy_from_slice(part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Model;

    #[test]
    fn every_query_head_is_computed_once_beside_its_kv_head() {
        // SmolLM2's heads, the embedded model's, and a model whose KV heads are no fewer than its queries.
        for (heads, kv_heads, sizes) in
            [(9, 3, vec![1, 3, 6, 9, 12]), (4, 2, vec![1, 2, 4, 8]), (8, 8, vec![1, 2, 4, 8, 16])]
        {
            let model = ModelConfig { heads, kv_heads, ..Model::embedded().config().clone() };
            for tp_size in sizes {
                let mut seen = vec![0; heads];
                for rank in (0..tp_size).map(TpRank::new) {
                    let kv = heads_of(rank, tp_size, kv_heads as u16).unwrap();
                    for query in queries_of(rank, tp_size, &model).unwrap() {
                        seen[query] += 1;
                        assert!(kv.contains(&((query * kv_heads / heads) as u16)), "{query} of {rank}, {tp_size}");
                    }
                }
                assert_eq!(seen, vec![1; heads], "{heads} and {kv_heads} heads over {tp_size}");
            }
        }
    }
}
