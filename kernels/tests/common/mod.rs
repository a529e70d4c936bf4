//! Random sequences in a poisoned cache, and attention over them in float64.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]

use std::num::NonZeroU32;

use half::{bf16, f16};
use kvferry_kernels::{
    AttentionBatch, AttentionOptions, AttentionSequence, HostKvCache, KvDtype, Placement, Slot, Threads, Values,
    paged_attention, store_kv,
};
use kvferry_protocol::BlockId;
use kvferry_protocol::layout::KvShape;

/// A model's attention: what must decide the bits.
#[derive(Clone, Debug)]
pub struct Model {
    pub q_heads: usize,
    pub kv_heads: usize,
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    pub mla: bool,
    pub dtype: KvDtype,
    pub window: Option<u32>,
    pub sinks: bool,
    pub soft_cap: Option<f32>,
}

/// Where the cache keeps it: what must not.
#[derive(Clone, Debug)]
pub struct Housing {
    pub order: &'static str,
    pub placement: Placement,
    pub tokens_per_block: u32,
}

pub const PLAIN: Housing = Housing { order: "BLPNHC", placement: Placement::OneRegion, tokens_per_block: 16 };
/// The layer that holds the sequences; its neighbours are poisoned.
pub const LAYER: u16 = 1;

/// Numbers in -1..1 that depend on a seed only.
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5DEE_CE66)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }

    pub fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
    }
}

/// Queries, keys and values of one sequence.
#[derive(Clone, Debug)]
pub struct Sequence {
    pub tokens: usize,
    /// `[tokens, q_heads, key_dim]`.
    pub queries: Vec<f32>,
    /// `[tokens, kv_heads, key_dim]`.
    pub keys: Vec<f32>,
    /// `[tokens, kv_heads, value_dim]`; empty for MLA.
    pub values: Vec<f32>,
}

impl Model {
    pub fn sequence(&self, seed: u64, tokens: usize) -> Sequence {
        let mut numbers = Numbers::new(seed);
        // Larger queries make the softmax uneven, as in real models.
        let queries = numbers.vec(tokens * self.q_heads * self.key_dim).iter().map(|x| x * 4.0).collect();
        let keys = numbers.vec(tokens * self.kv_heads * self.key_dim);
        let values = if self.mla { Vec::new() } else { numbers.vec(tokens * self.kv_heads * self.value_dim) };
        Sequence { tokens, queries, keys, values }
    }

    pub fn sink_logits(&self) -> Option<Vec<f32>> {
        self.sinks.then(|| Numbers::new(77).vec(self.q_heads).iter().map(|x| x * 2.0 + 1.0).collect())
    }

    pub fn options<'a>(&self, sinks: Option<&'a [f32]>) -> AttentionOptions<'a> {
        let values = if self.mla { Values::KeyPrefix { value_dim: self.value_dim } } else { Values::Plane };
        AttentionOptions {
            window: self.window.and_then(NonZeroU32::new),
            sinks,
            soft_cap: self.soft_cap,
            values,
            ..AttentionOptions::causal(1.0 / (self.key_dim as f32).sqrt())
        }
    }

    pub fn shape(&self, housing: &Housing, blocks: u32) -> KvShape {
        let bytes = |dim: usize| (dim * self.dtype.bytes()) as u32;
        let run_bytes =
            if self.mla { vec![bytes(self.key_dim)] } else { vec![bytes(self.key_dim), bytes(self.value_dim)] };
        let (heads, tokens_per_block) = (self.kv_heads as u16, housing.tokens_per_block);
        KvShape { layers: 3, blocks, heads, tokens_per_block, run_bytes }
    }

    fn rounded(&self, x: f32) -> f64 {
        match self.dtype {
            KvDtype::F32 => x.into(),
            KvDtype::F16 => f16::from_f32(x).into(),
            KvDtype::Bf16 => bf16::from_f32(x).into(),
        }
    }

    /// Attention of all tokens of a sequence in float64, `[tokens, q_heads, value_dim]`; only rows from `from` on.
    pub fn reference(&self, sequence: &Sequence, from: usize) -> Vec<f64> {
        let sinks = self.sink_logits();
        let scale = f64::from(1.0 / (self.key_dim as f32).sqrt());
        let mut out = Vec::new();
        for token in from..sequence.tokens {
            for q_head in 0..self.q_heads {
                let head = q_head / (self.q_heads / self.kv_heads);
                let query = &sequence.queries[(token * self.q_heads + q_head) * self.key_dim..][..self.key_dim];
                let first = self.window.map_or(0, |window| (token + 1).saturating_sub(window as usize));
                let score = |position: usize| {
                    let key = &sequence.keys[(position * self.kv_heads + head) * self.key_dim..][..self.key_dim];
                    let dot: f64 = query.iter().zip(key).map(|(&q, &k)| f64::from(q) * self.rounded(k)).sum();
                    let score = dot * scale;
                    self.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                };
                let scores: Vec<f64> = (first..=token).map(score).collect();
                let sink = sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| sinks[q_head].into());
                let largest = scores.iter().copied().fold(sink, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
                let denominator = weights.iter().sum::<f64>() + (sink - largest).exp();
                out.extend((0..self.value_dim).map(|i| {
                    let value = |position: usize| match self.mla {
                        true => sequence.keys[position * self.key_dim + i],
                        false => sequence.values[(position * self.kv_heads + head) * self.value_dim + i],
                    };
                    let weigh = |(j, weight): (usize, &f64)| weight * self.rounded(value(first + j));
                    weights.iter().enumerate().map(weigh).sum::<f64>() / denominator
                }));
            }
        }
        out
    }
}

/// A cache whose every slot is NaN until a token is stored there, and the block tables of some sequences.
pub struct Stage {
    pub model: Model,
    pub cache: HostKvCache,
    pub tables: Vec<Vec<BlockId>>,
    stored: Vec<usize>,
}

impl Stage {
    pub fn new(model: &Model, housing: &Housing, lens: &[usize], seed: u64) -> Self {
        let per_block = housing.tokens_per_block as usize;
        let needed: usize = lens.iter().map(|len| len.div_ceil(per_block)).sum();
        // Two blocks stay unused, so that reading a wrong block is seen.
        let mut free: Vec<u32> = (0..needed as u32 + 2).collect();
        let mut numbers = Numbers::new(seed);
        let tables = lens.iter().map(|len| {
            let mut take = |_| BlockId::new(free.swap_remove(numbers.below(free.len())));
            (0..len.div_ceil(per_block)).map(&mut take).collect()
        });
        let tables = tables.collect();
        let shape = model.shape(housing, needed as u32 + 2);
        let order = housing.order.parse().unwrap();
        let cache = HostKvCache::new(shape, model.dtype, order, housing.placement).unwrap();
        let slots: Vec<Slot> = (0..(needed as u64 + 2) * u64::from(housing.tokens_per_block)).map(Slot::new).collect();
        let keys = vec![f32::NAN; slots.len() * model.kv_heads * model.key_dim];
        let values = (!model.mla).then(|| vec![f32::NAN; slots.len() * model.kv_heads * model.value_dim]);
        for layer in 0..3 {
            store_kv(&cache, layer, &slots, &keys, values.as_deref()).unwrap();
        }
        Self { model: model.clone(), cache, tables, stored: vec![0; lens.len()] }
    }

    /// Stores and computes the next `counts[i]` tokens of each sequence in one call; returns each one's output rows.
    pub fn step(&mut self, sequences: &[Sequence], counts: &[usize], threads: &Threads) -> Vec<Vec<f32>> {
        let model = &self.model;
        let per_block = self.cache.layout().shape().tokens_per_block;
        let (mut queries, mut spans, mut row) = (Vec::new(), Vec::new(), 0);
        for (index, (sequence, &count)) in sequences.iter().zip(counts).enumerate() {
            let tokens = self.stored[index]..self.stored[index] + count;
            let slot = |position| Slot::of_position(position, &self.tables[index], per_block).unwrap();
            let slots: Vec<Slot> = tokens.clone().map(slot).collect();
            let part = |rows: &[f32], width: usize| rows[tokens.start * width..tokens.end * width].to_vec();
            let keys = part(&sequence.keys, model.kv_heads * model.key_dim);
            let values = (!model.mla).then(|| part(&sequence.values, model.kv_heads * model.value_dim));
            store_kv(&self.cache, LAYER, &slots, &keys, values.as_deref()).unwrap();
            queries.extend(part(&sequence.queries, model.q_heads * model.key_dim));
            spans.push((tokens.end, row..row + count));
            row += count;
            self.stored[index] = tokens.end;
        }
        let batch: Vec<_> = spans
            .iter()
            .zip(&self.tables)
            .map(|((context_len, queries), blocks)| AttentionSequence {
                blocks,
                context_len: *context_len,
                queries: queries.clone(),
            })
            .collect();
        let width = model.q_heads * model.value_dim;
        let sinks = model.sink_logits();
        // Whatever was in the output must not matter either.
        let mut out = vec![f32::NAN; row * width];
        let batch = AttentionBatch { queries: &queries, q_heads: model.q_heads, sequences: &batch };
        let options = model.options(sinks.as_deref());
        paged_attention(&self.cache, LAYER, &batch, &options, threads, &mut out).unwrap();
        spans.into_iter().map(|(_, rows)| out[rows.start * width..rows.end * width].to_vec()).collect()
    }
}

/// The farthest that any element is from the reference.
pub fn distance(found: &[f32], reference: &[f64]) -> f64 {
    assert_eq!(found.len(), reference.len());
    let distances = found.iter().zip(reference).map(|(&x, &y)| (f64::from(x) - y).abs());
    // NaN is farther than anything.
    distances.fold(0.0, |a: f64, b: f64| if a.is_nan() || b <= a { a } else { b })
}
