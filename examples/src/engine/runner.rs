//! The runner half: computes a step's tokens and keeps their KV in the paged cache.

use std::sync::Arc;

use kvferry::contract::{Ready, RequestId, Worker};
use kvferry_kernels::{
    AttentionBatch, AttentionOptions, AttentionSequence, HostKvCache, KernelError, KvDtype, Placement, Slot, Threads,
    paged_attention, store_kv,
};
use kvferry_protocol::LayerId;
use kvferry_protocol::layout::{KvShape, LayoutOrder};

use super::sampling::choose;
use super::step::{Sampled, SequenceStep, StepOutput, StepPlan};
use crate::model::{Model, ModelConfig, Rows};

/// The shape of a runner's KV cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheConfig {
    /// Order of its axes.
    pub order: LayoutOrder,
    /// Element type.
    pub dtype: KvDtype,
    /// Blocks.
    pub blocks: u32,
    /// Tokens in a block.
    pub tokens_per_block: u32,
}

/// Why a runner cannot start, or a step could not be computed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunnerError {
    /// The cache cannot be made.
    #[error("a KV cache of {blocks} blocks in order {order} cannot be made")]
    Cache {
        /// Blocks asked for.
        blocks: u32,
        /// Order of its axes.
        order: LayoutOrder,
        /// Why.
        #[source]
        source: KernelError,
    },
    /// A kernel refused a layer of a step.
    #[error("step {step}, layer {layer}: {what} was refused")]
    Kernel {
        /// The step.
        step: u64,
        /// The layer.
        layer: LayerId,
        /// Which kernel.
        what: &'static str,
        /// Why.
        #[source]
        source: KernelError,
    },
    /// A plan names tokens that its block table has no place for.
    #[error("step {step}: the block table of request {request} ends before position {position}")]
    Blocks {
        /// The step.
        step: u64,
        /// The request.
        request: RequestId,
        /// The first position without a block.
        position: usize,
    },
}

/// Computes steps; owns the cache's memory.
pub struct Runner {
    model: Arc<Model>,
    cache: HostKvCache,
    threads: Threads,
    rows: Rows,
}

impl Runner {
    /// Allocates the cache.
    ///
    /// # Errors
    /// [`RunnerError::Cache`] if there is not enough memory, or the shape has no layout.
    pub fn new(model: Arc<Model>, cache: CacheConfig) -> Result<Self, RunnerError> {
        let CacheConfig { order, dtype, blocks, tokens_per_block } = cache;
        let shape = kv_shape(model.config(), dtype, blocks, tokens_per_block);
        let cache = HostKvCache::new(shape, dtype, order, Placement::OneRegion)
            .map_err(|source| RunnerError::Cache { blocks, order, source })?;
        Ok(Self { model, cache, threads: Threads::single(), rows: Rows::default() })
    }

    /// The cache, to register it with a connector; clones share its memory.
    #[must_use]
    pub const fn cache(&self) -> &HostKvCache {
        &self.cache
    }

    /// Computes a step: every layer's K and V go into the cache, and sequences that sample get their next token.
    ///
    /// The connector hears of each layer twice: before its cache is touched, to wait for what still lands in it, and after its
    /// attention, when its new K and V may be read and sent.
    ///
    /// # Errors
    /// [`RunnerError`]; the step's slots are undefined then, so the connector is not told that they are complete.
    pub fn run(&mut self, plan: &StepPlan, connector: &mut dyn Worker) -> Result<StepOutput, RunnerError> {
        let mut output = StepOutput::empty(plan.number);
        if let Err(error) = connector.begin_step(plan.connector.clone()) {
            // The connector reports the request's failure by itself; the rest of the step goes on.
            tracing::warn!(step = plan.number, %error, "the connector refused a part of the step");
        }
        if !plan.sequences.is_empty() {
            let batch = Batch::of(plan, self.cache.layout().shape().tokens_per_block)?;
            self.compute(plan.number, &batch, connector, &mut output.void)?;
            output.sampled = self.sample(plan, &batch);
        }
        connector.wait_saved();
        output.connector = connector.poll();
        Ok(output)
    }

    fn compute(
        &mut self,
        step: u64,
        batch: &Batch<'_>,
        connector: &mut dyn Worker,
        void: &mut Vec<RequestId>,
    ) -> Result<(), RunnerError> {
        self.model.embed(&batch.tokens, &batch.positions, &mut self.rows);
        for layer in 0..self.model.config().layers {
            let id = LayerId::new(layer as u16);
            self.model.project(layer, &mut self.rows);
            void.extend(
                connector.wait_layer(id).into_iter().filter(|request| !void.contains(request)).collect::<Vec<_>>(),
            );
            self.attend(step, id, batch)?;
            connector.save_layer(id, Ready::Now);
            self.model.finish_layer(layer, &mut self.rows);
        }
        Ok(())
    }

    fn attend(&mut self, step: u64, layer: LayerId, batch: &Batch<'_>) -> Result<(), RunnerError> {
        let refused = |what| move |source| RunnerError::Kernel { step, layer, what, source };
        let (rows, config) = (&mut self.rows, self.model.config());
        store_kv(&self.cache, layer.get(), &batch.slots, &rows.k, Some(&rows.v)).map_err(refused("store_kv"))?;
        let queries = AttentionBatch { queries: &rows.q, q_heads: config.heads, sequences: &batch.sequences };
        let options = AttentionOptions::causal(1.0 / (config.head_dim as f32).sqrt());
        paged_attention(&self.cache, layer.get(), &queries, &options, &self.threads, &mut rows.attention)
            .map_err(refused("paged_attention"))
    }

    fn sample(&self, plan: &StepPlan, batch: &Batch<'_>) -> Vec<Sampled> {
        let vocab = self.model.config().vocab;
        let sampling: Vec<(&SequenceStep, usize)> = plan
            .sequences
            .iter()
            .zip(&batch.sequences)
            .filter(|(sequence, _)| sequence.sample.is_some())
            .map(|(sequence, rows)| (sequence, rows.queries.end - 1))
            .collect();
        let last: Vec<usize> = sampling.iter().map(|&(_, row)| row).collect();
        let logits = self.model.logits(&self.rows, &last);
        let choose = |((sequence, row), logits): (&(&SequenceStep, usize), &[f32])| {
            let token = choose(logits, sequence.sample?, batch.positions[*row]);
            Some(Sampled {
                request: sequence.request.clone(),
                token,
                logits: sequence.keep_logits.then(|| logits.to_vec()),
            })
        };
        sampling.iter().zip(logits.chunks_exact(vocab)).filter_map(choose).collect()
    }
}

/// The cache's shape for a model.
#[must_use]
pub fn kv_shape(model: &ModelConfig, dtype: KvDtype, blocks: u32, tokens_per_block: u32) -> KvShape {
    let run = (model.head_dim * dtype.bytes()) as u32;
    KvShape {
        layers: model.layers as u16,
        blocks,
        heads: model.kv_heads as u16,
        tokens_per_block,
        run_bytes: vec![run, run],
    }
}

/// A step's rows: all tokens of all sequences, one after another.
struct Batch<'a> {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    slots: Vec<Slot>,
    sequences: Vec<AttentionSequence<'a>>,
}

impl<'a> Batch<'a> {
    fn of(plan: &'a StepPlan, tokens_per_block: u32) -> Result<Self, RunnerError> {
        let mut batch = Self { tokens: vec![], positions: vec![], slots: vec![], sequences: vec![] };
        for sequence in &plan.sequences {
            let first_row = batch.tokens.len();
            for (position, &token) in (sequence.start..).zip(&sequence.tokens) {
                let slot = Slot::of_position(position as usize, &sequence.blocks, tokens_per_block);
                let (step, request) = (plan.number, sequence.request.clone());
                let slot = slot.ok_or(RunnerError::Blocks { step, request, position: position as usize })?;
                batch.tokens.push(token);
                batch.positions.push(position);
                batch.slots.push(slot);
            }
            batch.sequences.push(AttentionSequence {
                blocks: &sequence.blocks,
                context_len: sequence.start as usize + sequence.tokens.len(),
                queries: first_row..batch.tokens.len(),
            });
        }
        Ok(batch)
    }
}
