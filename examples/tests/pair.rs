//! Two real processes against one: the answers are the same to the bit, and nothing is held at the end.

use clap::Parser;
use kvferry_examples::cli::PairOptions;
use kvferry_examples::pair::{self, Report};

async fn run(args: &str) -> Report {
    let options = PairOptions::try_parse_from(std::iter::once("pair").chain(args.split_whitespace())).unwrap();
    pair::run(&options, env!("CARGO_BIN_EXE_pair").as_ref()).await.unwrap()
}

fn assert_identical(report: &Report, name: &str) {
    assert!(report.all_identical(), "{name}: {report}");
    let summary = &report.summary;
    assert_eq!((summary.failed, summary.recomputed, summary.still_held), (0, 0, 0), "{name}: {report}");
    assert!(summary.kv_bytes > 0, "{name}: nothing was carried");
}

#[tokio::test]
async fn the_embedded_model_answers_alike_in_both_orders_and_across_layouts() {
    for (name, args) in [
        ("defaults", "--max-tokens 12"),
        ("prefill first", "--max-tokens 12 --order prefill-first --concurrency 8"),
        (
            "layer-outermost to cross-layer",
            "--max-tokens 8 --prefill-layout LPBNHC --decode-layout BHLPNC --kv-dtype bf16",
        ),
        (
            "other blocks, other chunks",
            "--max-tokens 8 --prefill-block 16 --decode-block 7 --chunk 10 --concurrency 8 --order prefill-first",
        ),
        (
            "tokens as blocks",
            "--max-tokens 8 --prefill-layout PLBNHC --prefill-block 1 --decode-block 32 --kv-dtype f32",
        ),
    ] {
        assert_identical(&run(args).await, name);
    }
}

#[tokio::test]
async fn a_conversation_computes_and_sends_only_what_the_caches_lack() {
    let on = run("--turns 3 --max-tokens 24 --write-back on").await;
    assert_identical(&on, "write-back on");
    let off = run("--turns 3 --max-tokens 24 --write-back off").await;
    assert_identical(&off, "write-back off");
    let cell = on.turns[0].bytes_sent / on.turns[0].prompt_tokens;
    for (on, off) in on.turns.iter().zip(&off.turns) {
        let known = on.prefill_from_tier + on.prefill_local;
        assert_eq!(on.prefill_computed, on.prompt_tokens - known, "{on:?}");
        assert_eq!(
            on.bytes_sent,
            (on.prompt_tokens - on.decode_local) * cell,
            "only what decode lacks travels: {on:?}"
        );
        assert_eq!((on.prompt_tokens, on.bytes_sent), (off.prompt_tokens, off.bytes_sent), "the same conversation");
        assert_eq!((off.prefill_from_tier, off.bytes_written_back), (0, 0), "{off:?}");
        if on.turn > 0 {
            assert!(on.decode_local > 0 && on.prefill_from_tier > 0, "{on:?}");
            assert!(on.prefill_computed < off.prefill_computed, "{on:?} {off:?}");
        }
        assert!(on.bytes_written_back > 0, "{on:?}");
    }
}

/// The real model, with short prompts: the full matrix is `examples/matrix.sh`.
#[tokio::test]
#[ignore = "needs SmolLM2: examples/fetch-smollm2.sh"]
async fn smollm2_answers_alike_in_both_orders_and_across_layouts() {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(std::path::PathBuf::from);
    let cache = cache.or_else(|| std::env::home_dir().map(|home| home.join(".cache"))).expect("a home directory");
    let model = cache.join("kvferry/SmolLM2-135M-Instruct.Q4_1.gguf");
    for (name, args) in [
        ("defaults", "--max-tokens 8"),
        (
            "other layouts and blocks",
            "--max-tokens 8 --order prefill-first --concurrency 8 --kv-dtype bf16 --prefill-layout LPBNHC \
             --decode-layout BHLPNC --decode-block 7 --chunk 16",
        ),
    ] {
        assert_identical(&run(&format!("{args} --model {}", model.display())).await, name);
    }
}
