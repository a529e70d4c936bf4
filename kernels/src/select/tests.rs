//! Chosen pages against a sort, scores against float64, attention over them against float64 and against all pages.

use kvferry_protocol::layout::KvShape;

use super::*;
use crate::{
    AttentionBatch, AttentionOptions, AttentionSequence, HostKvCache, KvDtype, Placement, Slot, Threads,
    paged_attention, store_kv,
};

const TOKENS: usize = 75;
const PER_BLOCK: usize = 4;
const PAGES: usize = TOKENS.div_ceil(PER_BLOCK);
const DIM: usize = 20;
const HEADS: usize = 2;
const Q_HEADS: usize = 4;

/// Not in order, and none is block 0.
fn blocks() -> Vec<BlockId> {
    (0..PAGES as u32).map(|page| BlockId::new(page * 7 % PAGES as u32 + 1)).collect()
}

fn slots() -> Vec<Slot> {
    let blocks = blocks();
    let slot = |at: usize| u64::from(blocks[at / PER_BLOCK].get()) * PER_BLOCK as u64 + (at % PER_BLOCK) as u64;
    (0..TOKENS).map(|at| Slot::new(slot(at))).collect()
}

fn wave(len: usize, step: f32) -> Vec<f32> {
    (0..len).map(|i| (i as f32 * step + (i * i % 17) as f32).sin()).collect()
}

struct Stage {
    cache: HostKvCache,
    bounds: KeyBounds,
    keys: Vec<f32>,
    values: Vec<f32>,
    query: Vec<f32>,
}

fn stage() -> Stage {
    let blocks = PAGES as u32 + 1;
    let run_bytes = vec![DIM as u32 * 4; 2];
    let shape = KvShape { layers: 1, blocks, heads: HEADS as u16, tokens_per_block: PER_BLOCK as u32, run_bytes };
    let cache = HostKvCache::new(shape, KvDtype::F32, "LBNHPC".parse().unwrap(), Placement::OneRegion).unwrap();
    let (keys, values) = (wave(TOKENS * HEADS * DIM, 0.7), wave(TOKENS * HEADS * DIM, 1.3));
    store_kv(&cache, 0, &slots(), &keys, Some(&values)).unwrap();
    let mut bounds = KeyBounds::new(blocks, HEADS, DIM, PER_BLOCK as u32);
    bounds.note(&slots(), &keys).unwrap();
    Stage { cache, bounds, keys, values, query: wave(Q_HEADS * DIM, 0.3) }
}

impl Stage {
    fn attend(&self, blocks: &[BlockId], context_len: usize) -> Vec<f32> {
        let sequences = [AttentionSequence { blocks, context_len, queries: 0..1 }];
        let batch = AttentionBatch { queries: &self.query, q_heads: Q_HEADS, sequences: &sequences };
        let mut out = vec![0.0; Q_HEADS * DIM];
        paged_attention(&self.cache, 0, &batch, &AttentionOptions::causal(0.5), &Threads::single(), &mut out).unwrap();
        out
    }

    fn dot(&self, head: usize, token: usize) -> f64 {
        let key = &self.keys[(token * HEADS + head / (Q_HEADS / HEADS)) * DIM..][..DIM];
        self.query[head * DIM..][..DIM].iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum()
    }

    /// Attention over some tokens, in float64.
    fn reference(&self, tokens: &[usize]) -> Vec<f64> {
        let mut out = vec![];
        for head in 0..Q_HEADS {
            let scores: Vec<f64> = tokens.iter().map(|token| 0.5 * self.dot(head, *token)).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for element in 0..DIM {
                let value =
                    |token: usize| f64::from(self.values[(token * HEADS + head / (Q_HEADS / HEADS)) * DIM + element]);
                out.push(tokens.iter().zip(&weights).map(|(token, weight)| weight * value(*token)).sum::<f64>() / sum);
            }
        }
        out
    }
}

#[test]
fn attention_over_chosen_pages_agrees_with_float64_and_over_all_with_itself() {
    let stage = stage();
    let (blocks, all) = (blocks(), stage.attend(&blocks(), TOKENS));
    let scores = stage.bounds.scores(&blocks, Q_HEADS, &stage.query).unwrap();
    for (best, first, last) in [(0, 0, 1), (3, 1, 2), (8, 2, 1), (PAGES, 0, 1), (0, PAGES, 1), (0, 0, PAGES)] {
        let chosen = PageChoice { best, first, last }.choose(&scores);
        let pages = SelectedPages::of(&blocks, TOKENS, PER_BLOCK, &chosen).unwrap();
        let found = stage.attend(&pages.blocks, pages.context_len);
        let tokens: Vec<usize> = (0..TOKENS).filter(|token| chosen.contains(&(token / PER_BLOCK))).collect();
        assert_eq!(tokens.len(), pages.context_len);
        for (found, want) in found.iter().zip(stage.reference(&tokens)) {
            assert!((f64::from(*found) - want).abs() < 5e-6, "{best} {first} {last}: {found} for {want}");
        }
        if chosen.len() == PAGES {
            let bits = |out: &[f32]| out.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&found), bits(&all), "{best} {first} {last}");
        } else {
            assert_ne!(found, all, "{best} {first} {last}: what was left out is not read");
        }
    }
}

#[test]
fn a_page_scores_no_less_than_any_key_of_it() {
    let stage = stage();
    let scores = stage.bounds.scores(&blocks(), Q_HEADS, &stage.query).unwrap();
    for (page, score) in scores.iter().enumerate() {
        let tokens = page * PER_BLOCK..TOKENS.min((page + 1) * PER_BLOCK);
        let keys = tokens.flat_map(|token| (0..Q_HEADS).map(move |head| (head, token)));
        let best = keys.map(|(head, token)| stage.dot(head, token)).fold(f64::NEG_INFINITY, f64::max);
        assert!(f64::from(*score) >= best - 1e-5, "page {page}: {score} for {best}");
    }
}

#[test]
fn a_block_that_begins_anew_forgets_its_keys_and_an_empty_one_is_not_chosen() {
    let mut bounds = KeyBounds::new(3, 1, 2, 2);
    bounds.note(&[Slot::new(2), Slot::new(3)], &[9.0, -9.0, 1.0, 1.0]).unwrap();
    let (old, empty) = (BlockId::new(1), BlockId::new(2));
    assert_eq!(bounds.scores(&[old, empty], 1, &[1.0, 1.0]).unwrap(), [10.0, f32::NEG_INFINITY]);
    bounds.note(&[Slot::new(2), Slot::SKIP], &[1.0, 2.0, 9.0, 9.0]).unwrap();
    assert_eq!(bounds.scores(&[old], 2, &[1.0, 1.0, -1.0, 3.0]).unwrap(), [5.0], "the largest of its heads");
}

#[test]
fn an_indexer_scores_pages_by_their_best_token() {
    let mut index = IndexKeys::new(PAGES as u32 + 1, PER_BLOCK as u32, 3);
    let keys = wave(TOKENS * 3, 0.9);
    index.note(&slots(), &keys).unwrap();
    let (queries, weights) = (wave(6, 0.4), [0.5, -0.25]);
    let scores = index.scores(&blocks(), TOKENS, &queries, &weights).unwrap();
    for (page, score) in scores.iter().enumerate() {
        let token = |token: usize| -> f64 {
            let dot = |head: usize| {
                (0..3).map(|at| f64::from(queries[head * 3 + at]) * f64::from(keys[token * 3 + at])).sum::<f64>()
            };
            (0..2).map(|head| f64::from(weights[head]) * dot(head).max(0.0)).sum()
        };
        let tokens = page * PER_BLOCK..TOKENS.min((page + 1) * PER_BLOCK);
        let best = tokens.map(token).fold(f64::NEG_INFINITY, f64::max);
        assert!((f64::from(*score) - best).abs() < 1e-6, "page {page}: {score} for {best}");
    }
}

#[test]
fn the_best_pages_are_those_of_a_sort() {
    for seed in 0..200_usize {
        let pages = seed % 23;
        let scores: Vec<f32> = (0..pages).map(|page| ((page * 31 + seed * 17) % 7) as f32).collect();
        let choice = PageChoice { best: seed % 5, first: seed % 3, last: seed % 4 };
        let tail = pages.saturating_sub(choice.last.max(1));
        let first = choice.first.min(tail);
        let mut sorted: Vec<usize> = (first..tail).collect();
        sorted.sort_by(|left, right| scores[*right].total_cmp(&scores[*left]));
        sorted.truncate(choice.best);
        let mut want: Vec<usize> = (0..first).chain(sorted).chain(tail..pages).collect();
        want.sort_unstable();
        assert_eq!(choice.choose(&scores), want, "{seed}: {choice:?} of {scores:?}");
    }
    let choice = PageChoice { best: 1, first: 0, last: 1 };
    assert_eq!(choice.choose(&[1.0, f32::NAN, 3.0, 0.0]), [1, 3], "a NaN is not hidden");
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut bounds = KeyBounds::new(2, 2, 3, 4);
    let long = bounds.note(&[Slot::new(8)], &[0.0; 6]);
    assert!(matches!(long, Err(KernelError::SlotOutOfRange { token: 0, slot: 8, slots: 8 })), "{long:?}");
    assert!(matches!(bounds.note(&[Slot::new(0)], &[0.0; 5]), Err(KernelError::Length { expected: 6, .. })));
    let scores = |blocks: &[BlockId], heads, query: &[f32]| bounds.scores(blocks, heads, query).unwrap_err();
    assert!(matches!(scores(&[], 3, &[0.0; 9]), KernelError::Heads { q_heads: 3, kv_heads: 2 }));
    assert!(matches!(scores(&[BlockId::new(2)], 2, &[0.0; 6]), KernelError::BlockOutOfRange { blocks: 2, .. }));
    let index = IndexKeys::new(2, 4, 3);
    assert!(matches!(index.scores(&[], 1, &[0.0; 3], &[1.0]), Err(KernelError::Length { expected: 1, .. })));
    let blocks = [BlockId::new(0), BlockId::new(1)];
    for chosen in [vec![], vec![0], vec![1, 1], vec![1, 0, 1], vec![2]] {
        assert!(SelectedPages::of(&blocks, 7, 4, &chosen).is_err(), "{chosen:?}");
    }
}
