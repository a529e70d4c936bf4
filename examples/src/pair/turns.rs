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
}

/// Counters of both nodes at one moment.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct Counters([u64; 6]);

impl Counters {
    /// Reads both nodes' pages of metrics.
    pub(super) fn of(decode: &str, prefill: &str, decode_block: u32, prefill_block: u32) -> Self {
        // What every rank counts alike is counted once.
        let one = if prefill.contains("tp_rank=") { "tp_rank=\"0\"" } else { "" };
        let received = |page| sum(page, "kvferry_transfer_bytes_total", "side=\"receive\"") as u64;
        let local = |page, block: u32| sum(page, "kvferry_prefix_hit_blocks_total", "") as u64 * u64::from(block);
        Self([
            sum(prefill, "kvferry_computed_prompt_tokens_total", "") as u64,
            sum(prefill, "kvferry_tier_restored_tokens_total", one) as u64,
            local(prefill, prefill_block),
            local(decode, decode_block),
            received(decode),
            received(prefill),
        ])
    }
}

impl Turn {
    /// What happened between two moments.
    pub(super) fn between(turn: usize, prompts: &[Vec<u32>], before: Counters, after: Counters) -> Self {
        let [prefill_computed, prefill_from_tier, prefill_local, decode_local, bytes_sent, bytes_written_back] =
            std::array::from_fn(|at| after.0[at].saturating_sub(before.0[at]));
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
        }
    }
}

/// What the user says after each answer, as tokens, so many times.
pub(super) fn follow_ups(tokenizer: &Tokenizer, count: usize) -> Result<Vec<Vec<u32>>, String> {
    (0..count).map(|turn| tokenizer.encode(FOLLOW_UPS[turn % FOLLOW_UPS.len()])).collect()
}

/// The next turn's prompts.
pub(super) fn go_on<'a>(
    prompts: &[Vec<u32>],
    answers: impl Iterator<Item = &'a [u32]>,
    follow_up: &[u32],
) -> Vec<Vec<u32>> {
    prompts.iter().zip(answers).map(|(prompt, answer)| [prompt, answer, follow_up].concat()).collect()
}

const FOLLOW_UPS: [&str; 3] = ["\nAnd what came after that?", "\nWhy?", "\nTell me more about the last part."];
