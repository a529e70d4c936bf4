//! The runner half: computes a step's tokens and keeps their KV in the paged cache.

use std::sync::Arc;

use kvferry::contract::{Ready, RequestId, Worker};
use kvferry_kernels::{AttentionSequence, KvDtype, Slot, Threads};
use kvferry_protocol::LayerId;
use kvferry_protocol::layout::{LayoutOrder, TpError};

use super::devices::{DeviceKind, DeviceOpenError};
use super::kv::KvError;
use super::ranks::Rank;
use super::sampling::choose;
use super::step::{Sampled, SequenceStep, StepOutput, StepPlan};
use crate::model::{Model, Rows};

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
    /// Tensor-parallel ranks over which KV heads and their attention are spread; each has a cache of this shape for its heads.
    pub tp_size: u16,
    /// Whether its memory is such that other processes of this host may map it.
    pub shareable: bool,
    /// Where the caches are.
    pub device: DeviceKind,
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
        source: KvError,
    },
    /// There is no such device.
    #[error(transparent)]
    Device(#[from] DeviceOpenError),
    /// The model's KV heads do not spread over the ranks.
    #[error("the model cannot be run on so many ranks")]
    Ranks {
        /// Why not.
        #[source]
        source: TpError,
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
        source: KvError,
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

/// Computes steps; owns the memory of the ranks' caches.
pub struct Runner {
    model: Arc<Model>,
    tokens_per_block: u32,
    ranks: Vec<Rank>,
    threads: Threads,
    rows: Rows,
}

impl Runner {
    /// Allocates a cache for each rank.
    ///
    /// # Errors
    /// [`RunnerError::Ranks`] if the KV heads do not spread evenly over the ranks; [`RunnerError::Device`] if there is no such device;
    /// [`RunnerError::Cache`] if there is not enough memory, or the shape has no layout.
    pub fn new(model: Arc<Model>, cache: CacheConfig) -> Result<Self, RunnerError> {
        let ranks = Rank::all(model.config(), cache)?;
        Ok(Self {
            model,
            tokens_per_block: cache.tokens_per_block,
            ranks,
            threads: Threads::single(),
            rows: Rows::default(),
        })
    }

    /// The ranks, by their number.
    #[must_use]
    pub fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    /// Computes a step: every layer's K and V go into the cache, and sequences that sample get their next token.
    ///
    /// `connectors` has one for each rank. Each hears of every layer twice: before its cache is touched, to wait for what still
    /// lands in it, and after its attention, when its new K and V may be read and sent.
    ///
    /// # Errors
    /// [`RunnerError`]; the step's slots are undefined then, so the connector is not told that they are complete.
    pub fn run<W: Worker>(&mut self, plan: &StepPlan, connectors: &mut [W]) -> Result<StepOutput, RunnerError> {
        let mut output = StepOutput::empty(plan.number);
        if !plan.connector.preempted.is_empty() {
            // This step may give their blocks to others.
            connectors.iter_mut().for_each(|connector| connector.preempted(&plan.connector.preempted));
        }
        for connector in &mut *connectors {
            if let Err(error) = connector.begin_step(plan.connector.clone()) {
                // The connector reports the request's failure by itself; the rest of the step goes on.
                tracing::warn!(step = plan.number, %error, "the connector refused a part of the step");
            }
        }
        if !plan.sequences.is_empty() {
            let batch = Batch::of(plan, self.tokens_per_block)?;
            self.compute(plan.number, &batch, connectors, &mut output.void)?;
            output.sampled = self.sample(plan, &batch);
        }
        connectors.iter_mut().for_each(W::wait_saved);
        output.connector = connectors.iter_mut().map(W::poll).collect();
        Ok(output)
    }

    fn compute<W: Worker>(
        &mut self,
        step: u64,
        batch: &Batch<'_>,
        connectors: &mut [W],
        void: &mut Vec<RequestId>,
    ) -> Result<(), RunnerError> {
        self.model.embed(&batch.tokens, &batch.positions, &mut self.rows);
        for layer in 0..self.model.config().layers {
            let id = LayerId::new(layer as u16);
            self.model.project(layer, &mut self.rows);
            for connector in &mut *connectors {
                let failed = connector.wait_layer(id);
                void.extend(failed.into_iter().filter(|request| !void.contains(request)).collect::<Vec<_>>());
            }
            for (rank, connector) in self.ranks.iter_mut().zip(&mut *connectors) {
                rank.attend(id, &batch.slots, &batch.sequences, self.model.config(), &self.threads, &mut self.rows)
                    .map_err(|(what, source)| RunnerError::Kernel { step, layer: id, what, source })?;
                connector.save_layer(id, Ready::Now);
            }
            self.model.finish_layer(layer, &mut self.rows);
        }
        Ok(())
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
