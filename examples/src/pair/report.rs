//! What a comparison found, as JSON and as text.

use std::fmt;

use serde::Serialize;

use super::turns::Turn;
use crate::model::Tokenizer;

/// What one engine answered to one prompt.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Answer {
    pub(super) tokens: Vec<u32>,
    /// Digest of the logits of the first token.
    pub(super) first_logits: Option<String>,
    pub(super) ttft_ms: f64,
}

/// The comparison of all prompts.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Report {
    /// The figures.
    #[serde(flatten)]
    pub summary: Summary,
    /// What each turn of the conversations cost.
    pub turns: Vec<Turn>,
    /// What the two processes generated: for each turn, a prompt each.
    pub outputs: Vec<Output>,
}

/// The figures of a comparison.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Summary {
    /// Prompts.
    pub requests: usize,
    /// Prompts whose tokens are the single process's, and whose first logits have the same bits.
    pub identical: usize,
    /// Tokens that the two processes generated.
    pub tokens: usize,
    /// From submission at the decode node to the first token.
    pub ttft_ms: Times,
    /// The same in the single process.
    pub single_process_ttft_ms: Times,
    /// K/V bytes that landed at the decode node and were verified.
    pub kv_bytes: u64,
    /// Of these, bytes that were read where the prefill node had them; of a prompt's last block they were copied.
    pub in_place_bytes: u64,
    /// `kv_bytes` over the time of all transfers from their first write to their verdict, in 10^9 bits a second. That time
    /// includes what the transfers waited for prefill to compute.
    pub transfer_gbps: f64,
    /// Of that time, the share after the prompt's last layer was computed: what compute did not hide.
    pub exposed_fraction: f64,
    /// How the transfers lay beside prefill's compute.
    pub overlap: Overlap,
    /// Tokens whose KV was lost in transit and computed by the decode node.
    pub recomputed: u64,
    /// Prompts without an answer.
    pub failed: usize,
    /// Transfers, grants, leases and blocks that were still held at the end, on both sides.
    pub still_held: u64,
}

/// Sums over all transfers, in milliseconds. Transfers that were computed in the same steps count those steps each.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Overlap {
    /// Prefill computed the prompts' K/V, up to their last layer.
    pub compute_ms: f64,
    /// Writes occupied the link.
    pub transfer_ms: f64,
    /// From a prompt's last layer to the verdict of its transfer.
    pub exposed_ms: f64,
    /// What no order of whole layers could hide: what the link took longer than compute, and one layer.
    pub lower_bound_ms: f64,
    /// By how much prefill took longer for a token than the single process did, as a share; known with one prompt at a time.
    pub prefill_slowdown: Option<f64>,
}

/// Percentiles of times, in milliseconds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Times {
    /// The median.
    pub p50: f64,
    /// One of a hundred takes longer.
    pub p99: f64,
}

/// What the two processes generated for one prompt.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Output {
    /// The prompt's index, from 0.
    pub prompt: usize,
    /// The turn of the conversation, from 0.
    #[serde(skip_serializing_if = "is_first")]
    pub turn: usize,
    /// All tokens of the prompt: what was said before, too.
    #[serde(skip)]
    pub prompt_ids: Vec<u32>,
    /// The text.
    pub text: String,
    /// Its tokens.
    pub token_ids: Vec<u32>,
    /// Whether it is the single process's.
    pub identical: bool,
    /// Why there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Report {
    pub(super) fn new(
        answers: Vec<anyhow::Result<Answer>>,
        reference: Vec<(Vec<Vec<u32>>, Vec<Answer>)>,
        turns: Vec<Turn>,
        tokenizer: &Tokenizer,
        decode: &str,
        prefill: &str,
        alone_us_per_token: Option<f64>,
    ) -> Self {
        let ttft = |answers: &mut dyn Iterator<Item = f64>| Times::of(answers.collect());
        let single_process_ttft_ms =
            ttft(&mut reference.iter().flat_map(|(_, answers)| answers).map(|answer| answer.ttft_ms));
        let ttft_ms = ttft(&mut answers.iter().flatten().map(|answer| answer.ttft_ms));
        let reference = reference.into_iter().enumerate().flat_map(|(turn, (prompts, answers))| {
            let asked = prompts.into_iter().zip(answers).enumerate();
            asked.map(move |(prompt, (prompt_ids, answer))| ((prompt, turn, prompt_ids), answer))
        });
        let outputs: Vec<_> = answers
            .into_iter()
            .zip(reference)
            .map(|(answer, (asked, reference))| Output::new(asked, answer, &reference, tokenizer))
            .collect();
        let kv_bytes = sum(decode, "kvferry_transfer_bytes_total", "side=\"receive\"");
        let wire = sum(prefill, "kvferry_wire_seconds_sum", "");
        let exposed = sum(prefill, "kvferry_exposed_transfer_seconds_sum", "");
        let share = |part: f64| if wire > 0.0 { part / wire } else { 0.0 };
        let overlap = Overlap::of(prefill, alone_us_per_token);
        let summary = Summary {
            requests: outputs.len(),
            identical: outputs.iter().filter(|output| output.identical).count(),
            tokens: outputs.iter().map(|output| output.token_ids.len()).sum(),
            ttft_ms,
            single_process_ttft_ms,
            kv_bytes: kv_bytes as u64,
            in_place_bytes: sum(decode, "kvferry_adopted_bytes_total", "") as u64,
            transfer_gbps: share(kv_bytes * 8.0 / 1e9),
            exposed_fraction: share(exposed),
            overlap,
            recomputed: sum(decode, "kvferry_recomputed_tokens_total", "") as u64,
            failed: outputs.iter().filter(|output| output.error.is_some()).count(),
            still_held: still_held(decode) + still_held(prefill),
        };
        Self { summary, turns, outputs }
    }

    /// Whether every prompt has the single process's answer.
    #[must_use]
    pub const fn all_identical(&self) -> bool {
        self.summary.identical == self.summary.requests
    }
}

impl Overlap {
    fn of(prefill: &str, alone_us_per_token: Option<f64>) -> Self {
        let ms = |name: &str| sum(prefill, &format!("kvferry_{name}_seconds_sum"), "") * 1e3;
        let tokens = sum(prefill, "kvferry_prompt_compute_tokens_total", "");
        let us_per_token = sum(prefill, "kvferry_prompt_compute_microseconds_total", "") / tokens;
        Self {
            compute_ms: ms("transfer_compute"),
            transfer_ms: ms("transfer_link"),
            exposed_ms: ms("exposed_transfer"),
            lower_bound_ms: ms("unhideable_transfer"),
            prefill_slowdown: alone_us_per_token
                .map(|alone| us_per_token / alone - 1.0)
                .filter(|share| share.is_finite()),
        }
    }
}

impl Output {
    fn new(
        (prompt, turn, prompt_ids): (usize, usize, Vec<u32>),
        answer: anyhow::Result<Answer>,
        reference: &Answer,
        tokenizer: &Tokenizer,
    ) -> Self {
        match answer {
            Ok(answer) => Self {
                prompt,
                turn,
                prompt_ids,
                text: tokenizer.decode(&answer.tokens).unwrap_or_default(),
                identical: answer.tokens == reference.tokens
                    && answer.first_logits.is_some()
                    && answer.first_logits == reference.first_logits,
                token_ids: answer.tokens,
                error: None,
            },
            Err(error) => {
                let (text, token_ids) = (String::new(), Vec::new());
                Self { prompt, turn, prompt_ids, text, token_ids, identical: false, error: Some(format!("{error:#}")) }
            }
        }
    }
}

impl Times {
    /// The nearest-rank percentiles; zeros if there are no times.
    fn of(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        let rank = |percent: usize| (times.len() * percent).div_ceil(100).clamp(1, times.len().max(1)) - 1;
        let at = |percent| times.get(rank(percent)).copied().unwrap_or(0.0);
        Self { p50: at(50), p99: at(99) }
    }
}

/// Transfers, grants, leases, blocks, and blocks on their way to a tier that a node holds, from its metrics.
pub(super) fn still_held(page: &str) -> u64 {
    let gauges =
        ["transfers_live", "grants_live", "leases_live", "early_grants_live", "tier_queue_blocks", "held_bytes"];
    let blocks = sum(page, "kvferry_pool_blocks", "") - sum(page, "kvferry_pool_blocks_free", "");
    (gauges.iter().map(|gauge| sum(page, &format!("kvferry_{gauge}"), "")).sum::<f64>() + blocks) as u64
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
const fn is_first(turn: &usize) -> bool {
    *turn == 0
}

/// The sum of a metric's samples whose labels contain `label`, from a page in Prometheus's text format.
pub(super) fn sum(page: &str, name: &str, label: &str) -> f64 {
    let samples = page.lines().filter_map(|line| {
        let (sample, value) = line.rsplit_once(' ')?;
        let (found, labels) = sample.split_once('{').unwrap_or((sample, ""));
        (found == name && labels.contains(label)).then(|| value.parse::<f64>().ok()).flatten()
    });
    samples.sum()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for output in &self.outputs {
            let mark = if output.identical { "identical" } else { "DIFFERENT" };
            match &output.error {
                None => writeln!(f, "{:4}  {mark}  {:?}", output.prompt, output.text)?,
                Some(error) => writeln!(f, "{:4}  FAILED     {error}", output.prompt)?,
            }
        }
        if self.turns.len() > 1 {
            let head = "turn  prompt  computed  from tier  local  evicted";
            writeln!(f, "\n{head}  | local at decode  evicted  put back      bytes sent  written back")?;
        }
        for t in self.turns.iter().filter(|_| self.turns.len() > 1) {
            writeln!(
                f,
                "{:4}  {:6}  {:8}  {:9}  {:5}  {:7}  | {:15}  {:7}  {:8}  {:14}  {:12}",
                t.turn,
                t.prompt_tokens,
                t.prefill_computed,
                t.prefill_from_tier,
                t.prefill_local,
                t.prefill_evicted,
                t.decode_local,
                t.decode_evicted,
                t.decode_preempted,
                t.bytes_sent,
                t.bytes_written_back
            )?;
        }
        let s = &self.summary;
        writeln!(f, "\n{} of {} identical to a single process, {} tokens", s.identical, s.requests, s.tokens)?;
        writeln!(f, "time to first token   p50 {:.1} ms, p99 {:.1} ms", s.ttft_ms.p50, s.ttft_ms.p99)?;
        let single = s.single_process_ttft_ms;
        writeln!(f, "in a single process   p50 {:.1} ms, p99 {:.1} ms", single.p50, single.p99)?;
        writeln!(
            f,
            "KV carried            {} bytes, {:.3} Gbit/s while prefill computed",
            s.kv_bytes, s.transfer_gbps
        )?;
        if s.in_place_bytes > 0 {
            writeln!(f, "read in place         {} of them", s.in_place_bytes)?;
        }
        s.overlap.write_lines(f)?;
        write!(f, "recomputed {} tokens, failed {}, still held {}", s.recomputed, s.failed, s.still_held)
    }
}

impl Overlap {
    fn write_lines(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (exposed, bound) = (self.exposed_ms, self.lower_bound_ms);
        writeln!(f, "prefill computed      {:.1} ms, up to the last layers", self.compute_ms)?;
        writeln!(f, "on the link           {:.1} ms", self.transfer_ms)?;
        if self.compute_ms < TELLING_MS {
            writeln!(f, "exposed               {exposed:.1} ms; at least {bound:.1} ms cannot be hidden")?;
            return writeln!(
                f,
                "                      (shares of so short a run say nothing: more and longer prompts, or --model, tell them)"
            );
        }
        let share = if self.transfer_ms > 0.0 { exposed / self.transfer_ms * 100.0 } else { 0.0 };
        writeln!(
            f,
            "exposed               {exposed:.1} ms, {share:.1} % of that; at least {bound:.1} ms cannot be hidden"
        )?;
        self.prefill_slowdown.map_or(Ok(()), |slowdown| {
            writeln!(f, "prefill slower by     {:.1} % than the single process", slowdown * 100.0)
        })
    }
}

/// With less compute than this, a wake-up of some thread is a large share of it.
const TELLING_MS: f64 = 500.0;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ByteTokenizer;

    fn answer(tokens: &[u32], logits: &str) -> Answer {
        Answer { tokens: tokens.to_vec(), first_logits: Some(logits.into()), ttft_ms: 2.0 }
    }

    #[test]
    fn only_equal_tokens_and_logits_count_as_identical() {
        let reference = (vec![vec![64]; 5], vec![answer(&[65, 66], "x"); 5]);
        let without_logits = Answer { first_logits: None, ..answer(&[65, 66], "") };
        let answers = vec![
            Ok(answer(&[65, 66], "x")),
            Ok(answer(&[65, 67], "x")),
            Ok(answer(&[65, 66], "y")),
            Ok(without_logits),
            Err(anyhow::anyhow!("gone")),
        ];
        let page = "# TYPE kvferry_transfer_bytes_total counter\nkvferry_transfer_bytes_total{side=\"send\"} 7\n\
                    kvferry_transfer_bytes_total{side=\"receive\"} 1000000000\n\
                    kvferry_pool_blocks 9\nkvferry_pool_blocks_free 8\nkvferry_leases_live 1\n";
        let prefill = "kvferry_wire_seconds_sum 2\nkvferry_exposed_transfer_seconds_sum 0.5\n\
                       kvferry_transfer_link_seconds_sum 1\nkvferry_transfer_compute_seconds_sum 3\n\
                       kvferry_unhideable_transfer_seconds_sum 0.25\nkvferry_prompt_compute_tokens_total 10\n\
                       kvferry_prompt_compute_microseconds_total 55\n";
        let report =
            Report::new(answers, vec![reference], vec![], &Tokenizer::Bytes(ByteTokenizer), page, prefill, Some(5.0));
        let s = &report.summary;
        assert_eq!((s.requests, s.identical, s.failed, s.tokens), (5, 1, 1, 8));
        assert_eq!((s.kv_bytes, s.transfer_gbps, s.exposed_fraction, s.still_held), (1_000_000_000, 4.0, 0.25, 2));
        let o = s.overlap;
        assert_eq!((o.compute_ms, o.transfer_ms, o.exposed_ms, o.lower_bound_ms), (3000.0, 1000.0, 500.0, 250.0));
        assert!((o.prefill_slowdown.unwrap() - 0.1).abs() < 1e-9);
        assert!(report.to_string().contains("exposed               500.0 ms, 50.0 % of that; at least 250.0 ms"));
        let mut report = report;
        report.summary.overlap.compute_ms = 10.0;
        let text = report.to_string();
        assert!(text.contains("exposed               500.0 ms; at least") && !text.contains("slower"), "{text}");
        assert!(!report.all_identical());
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(
            json["outputs"][0],
            serde_json::json!({ "prompt": 0, "text": "AB", "token_ids": [65, 66], "identical": true })
        );
        assert_eq!(json["ttft_ms"], serde_json::json!({ "p50": 2.0, "p99": 2.0 }));
    }

    #[test]
    fn percentiles_are_those_of_the_nearest_rank() {
        assert_eq!(Times::of(vec![]), Times { p50: 0.0, p99: 0.0 });
        assert_eq!(Times::of((1..=200).rev().map(f64::from).collect()), Times { p50: 100.0, p99: 198.0 });
        assert_eq!(Times::of(vec![3.0]), Times { p50: 3.0, p99: 3.0 });
    }
}
