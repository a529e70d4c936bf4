//! Prompts that begin alike, through two real processes: what is shared is neither computed nor sent again, and no answer changes by a bit.

use std::collections::BTreeSet;

use clap::Parser;
use kvferry_examples::cli::PairOptions;
use kvferry_examples::pair::{self, Report};

const SYSTEM: &str =
    "You ferry KV cache over the river, from those who compute it to those who need it. Answer in one word.\n";
/// So large that nothing is ever evicted.
const AMPLE: &str = "--prefill-blocks 2048 --decode-blocks 2048";

async fn run(args: &str, system: &str) -> Report {
    let args = std::iter::once("pair").chain(args.split_whitespace()).chain(["--system", system]);
    let options = PairOptions::try_parse_from(args).unwrap();
    let report = pair::run(&options, env!("CARGO_BIN_EXE_pair").as_ref()).await.unwrap();
    let summary = &report.summary;
    assert!(report.all_identical(), "{report}");
    assert_eq!((summary.failed, summary.recomputed, summary.still_held), (0, 0, 0), "{report}");
    report
}

/// Whole blocks that one side has, as the tokens up to their ends.
#[derive(Default)]
struct Known(BTreeSet<Vec<u32>>);

impl Known {
    const BLOCK: usize = 16;

    /// Tokens of a prompt that are there; the last one never is.
    fn local(&self, prompt: &[u32]) -> u64 {
        let ends = (Self::BLOCK..prompt.len()).step_by(Self::BLOCK);
        ends.take_while(|end| self.0.contains(&prompt[..*end])).last().unwrap_or(0) as u64
    }

    fn learn(&mut self, tokens: &[u32]) {
        self.0.extend((Self::BLOCK..=tokens.len()).step_by(Self::BLOCK).map(|end| tokens[..end].to_vec()));
    }
}

#[tokio::test]
async fn exactly_what_is_shared_is_neither_computed_nor_sent_again() {
    for (name, args, system) in [
        ("a system prompt", "--max-tokens 4", SYSTEM),
        ("eight turns", "--max-tokens 5 --turns 8", ""),
        ("branches of a conversation", "--max-tokens 5 --turns 3 --branches 3", SYSTEM),
        ("ranks", "--max-tokens 4 --turns 2 --prefill-tp 2 --decode-tp 4 --order prefill-first", SYSTEM),
    ] {
        let off = run(&format!("{args} {AMPLE} --prefix-cache off"), system).await;
        let cell = off.turns[0].bytes_sent / off.turns[0].prompt_tokens;
        for kind in ["hash", "radix"] {
            let on = run(&format!("{args} {AMPLE} --prefix-cache {kind}"), system).await;
            let (mut prefill, mut decode) = (Known::default(), Known::default());
            for (turn, without) in on.turns.iter().zip(&off.turns) {
                let name = format!("{name}, {kind}, {turn:?}");
                let (mut at_prefill, mut at_decode) = (0, 0);
                for output in on.outputs.iter().filter(|output| output.turn == turn.turn) {
                    at_prefill += prefill.local(&output.prompt_ids);
                    at_decode += decode.local(&output.prompt_ids);
                    prefill.learn(&output.prompt_ids);
                    // The last token that was generated is not computed any more.
                    let answer = output.token_ids.split_last().map_or(&[][..], |(_, computed)| computed);
                    decode.learn(&[&output.prompt_ids, answer].concat());
                }
                assert_eq!((turn.prefill_local, turn.decode_local), (at_prefill, at_decode), "{name}");
                assert_eq!(turn.prefill_computed, turn.prompt_tokens - at_prefill, "{name}");
                assert_eq!(turn.bytes_sent, (turn.prompt_tokens - at_decode) * cell, "{name}");
                assert_eq!((turn.prefill_evicted, turn.decode_evicted, turn.decode_preempted), (0, 0, 0), "{name}");
                assert!(at_decode > 0 && at_prefill > 0 || turn.turn == 0 && system.is_empty(), "{name}");
                assert_eq!(turn.prompt_tokens, without.prompt_tokens, "{name}: the same prompts");
                assert_eq!((without.prefill_local, without.decode_local), (0, 0), "{name}");
                assert_eq!(without.prefill_computed, without.prompt_tokens, "{name}");
                assert_eq!(without.bytes_sent, without.prompt_tokens * cell, "{name}");
            }
        }
    }
}

/// The pools hold little more than the longest conversation, and five are under way. `KVFERRY_CROWDED_ROUNDS` repeats it.
#[tokio::test]
async fn a_pool_that_always_evicts_and_puts_requests_back_changes_no_bit() {
    let args = "--max-tokens 96 --turns 3 --branches 2 --concurrency 5 --prefill-block 8 --decode-block 8 --chunk 48 \
                --prefill-blocks 80 --decode-blocks 80";
    let rounds: usize = std::env::var("KVFERRY_CROWDED_ROUNDS").map_or(1, |text| text.parse().unwrap());
    for (kind, more) in std::iter::repeat_n(
        [("hash", ""), ("hash", "--decode-tp 2"), ("radix", ""), ("radix", "--write-back on --order prefill-first")],
        rounds,
    )
    .flatten()
    {
        let report = run(&format!("{args} --prefix-cache {kind} {more}"), SYSTEM).await;
        let first = &report.turns[0];
        let cell = first.bytes_sent / (first.prompt_tokens - first.decode_local);
        for turn in &report.turns {
            let sent = turn.prompt_tokens - turn.decode_local;
            assert_eq!(turn.bytes_sent, sent * cell, "{kind} {more}: {report}");
            let known = turn.prefill_local + turn.prefill_from_tier;
            assert_eq!(turn.prefill_computed, turn.prompt_tokens - known, "{kind} {more}: {report}");
        }
        let all = |figure: fn(&pair::Turn) -> u64| report.turns.iter().map(figure).sum::<u64>();
        let evicted = (all(|turn| turn.prefill_evicted) > 0, all(|turn| turn.decode_evicted) > 0);
        assert_eq!(evicted, (true, true), "{kind} {more}: {report}");
        assert!(all(|turn| turn.decode_preempted) > 0, "{kind} {more}: {report}");
        assert!(all(|turn| turn.decode_local) > 0, "{kind} {more}: {report}");
    }
}
