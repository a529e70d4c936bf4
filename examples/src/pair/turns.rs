//! Conversations: a prompt, its answer, a short follow-up, the next answer; and what each turn cost.

use serde::Serialize;

use super::report::sum;
use crate::model::Tokenizer;

/// What one turn of all conversations cost.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Turn {
    /// Which, from 0.
    pub turn: usize,
    /// Tokens of the prompts: of all that was said before, and what is new.
    pub prompt_tokens: u64,
    /// Those that the prefill node computed.
    pub prefill_computed: u64,
    /// Those that the prefill node brought from its tier.
    pub prefill_from_tier: u64,
    /// Those whose blocks were in the prefill node's cache.
    pub prefill_local: u64,
    /// Those whose blocks were in the decode node's cache.
    pub decode_local: u64,
    /// K/V bytes of prompts that were sent to the decode node.
    pub bytes_sent: u64,
    /// K/V bytes of answers that were sent back to the prefill node's tier.
    pub bytes_written_back: u64,
    /// Blocks that the prefill node's cache gave up for others.
    pub prefill_evicted: u64,
    /// Blocks that the decode node's cache gave up for others.
    pub decode_evicted: u64,
    /// How often the decode node put a running request back for want of blocks.
    pub decode_preempted: u64,
}

/// Counters of both nodes at one moment.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct Counters([u64; 9]);

impl Counters {
    /// Reads both nodes' pages of metrics.
    pub(super) fn of(decode: &str, prefill: &str) -> Self {
        // What every rank counts alike is counted once.
        let one = if prefill.contains("tp_rank=") { "tp_rank=\"0\"" } else { "" };
        let received = |page| sum(page, "kvferry_transfer_bytes_total", "side=\"receive\"") as u64;
        let engine = |page, name: &str| sum(page, &format!("kvferry_{name}_total"), "") as u64;
        Self([
            engine(prefill, "computed_prompt_tokens"),
            sum(prefill, "kvferry_tier_restored_tokens_total", one) as u64,
            engine(prefill, "local_prompt_tokens"),
            engine(decode, "local_prompt_tokens"),
            received(decode),
            received(prefill),
            engine(prefill, "pool_evictions"),
            engine(decode, "pool_evictions"),
            engine(decode, "preempted_requests"),
        ])
    }
}

impl Turn {
    /// What happened between two moments.
    pub(super) fn between(turn: usize, prompts: &[Vec<u32>], before: Counters, after: Counters) -> Self {
        let [
            prefill_computed,
            prefill_from_tier,
            prefill_local,
            decode_local,
            bytes_sent,
            bytes_written_back,
            prefill_evicted,
            decode_evicted,
            decode_preempted,
        ] = std::array::from_fn(|at| after.0[at].saturating_sub(before.0[at]));
        let prompt_tokens = prompts.iter().map(|prompt| prompt.len() as u64).sum();
        Self {
            turn,
            prompt_tokens,
            prefill_computed,
            prefill_from_tier,
            prefill_local,
            decode_local,
            bytes_sent,
            bytes_written_back,
            prefill_evicted,
            decode_evicted,
            decode_preempted,
        }
    }
}

/// What the users say after each answer: the same words in turn. After the first answer each may say several things, and every one
/// is a conversation of its own from then on.
pub(super) struct Talk {
    follow_ups: Vec<Vec<u32>>,
    branches: usize,
}

impl Talk {
    pub(super) fn new(tokenizer: &Tokenizer, branches: usize) -> Result<Self, String> {
        let follow_ups = FOLLOW_UPS.iter().map(|text| tokenizer.encode(text)).collect::<Result<_, _>>()?;
        Ok(Self { follow_ups, branches })
    }

    /// How many conversations there are after so many prompts.
    pub(super) const fn conversations(&self, prompts: usize, turns: usize) -> usize {
        if turns > 1 { prompts * self.branches } else { prompts }
    }

    /// The most tokens that users say over all turns after the first.
    pub(super) fn longest(&self, turns: usize) -> usize {
        (1..turns).map(|turn| self.after(turn - 1).map(Vec::len).max().unwrap_or(0)).sum()
    }

    /// The prompts after turn `turn`.
    pub(super) fn go_on<'a>(
        &self,
        turn: usize,
        prompts: &[Vec<u32>],
        answers: impl Iterator<Item = &'a [u32]>,
    ) -> Vec<Vec<u32>> {
        let said = prompts.iter().zip(answers);
        said.flat_map(|(prompt, answer)| self.after(turn).map(move |more| [prompt, answer, more].concat())).collect()
    }

    /// What is said after turn `turn`.
    fn after(&self, turn: usize) -> impl Iterator<Item = &Vec<u32>> {
        let branches = if turn == 0 { self.branches } else { 1 };
        (turn..turn + branches).map(|at| &self.follow_ups[at % self.follow_ups.len()])
    }
}

/// As many as `--branches` may be.
const FOLLOW_UPS: [&str; 3] = ["\nAnd what came after that?", "\nWhy?", "\nTell me more about the last part."];
