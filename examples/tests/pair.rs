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

/// Both nodes and the single process keep their KV on simulated devices, each in an order of events of its own.
#[tokio::test]
async fn kernels_on_a_device_answer_alike_in_both_orders_and_across_layouts() {
    for (name, args) in [
        ("defaults", "--max-tokens 3"),
        (
            "other layouts and blocks, prefill first",
            "--max-tokens 3 --order prefill-first --concurrency 3 --kv-dtype bf16 --chunk 24 --prefill-layout LPBNHC \
             --decode-layout BHLPNC --decode-block 7",
        ),
        ("ranks", "--max-tokens 3 --prefill-tp 2 --decode-tp 1 --concurrency 3"),
    ] {
        assert_identical(&run(&format!("--device cpu-sim {args}")).await, name);
    }
}

#[tokio::test]
async fn what_a_device_cannot_hold_is_refused_by_name() {
    for (args, want) in [
        ("--device cpu-sim --kv-dtype f32", "the cache cannot be f32; use f16, bf16 or e4m3"),
        ("--device cuda:3", "--features cuda"),
    ] {
        let options = PairOptions::try_parse_from(std::iter::once("pair").chain(args.split_whitespace())).unwrap();
        let error = format!("{:#}", pair::run(&options, env!("CARGO_BIN_EXE_pair").as_ref()).await.unwrap_err());
        assert!(error.contains(want), "{args}: {error}");
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
    let ranks = run("--turns 2 --max-tokens 20 --write-back on --prefill-tp 2 --decode-tp 2").await;
    assert_identical(&ranks, "two ranks on either side");
    assert!(ranks.turns[1].prefill_from_tier > 0 && ranks.turns[1].bytes_written_back > 0, "{ranks}");
    let unequal = run("--turns 2 --max-tokens 20 --write-back on --prefill-tp 1 --decode-tp 2").await;
    assert_identical(&unequal, "unequal ranks");
    assert_eq!(unequal.turns[1].bytes_written_back, 0, "refused, not garbled");
}

/// The embedded model has two KV heads: four ranks hold each twice.
#[tokio::test]
async fn every_pair_of_tensor_parallel_sizes_answers_alike() {
    for prefill in [1, 2, 4] {
        for decode in [1, 2, 4] {
            let order = if prefill == decode { "prefill-first" } else { "decode-first" };
            let args = format!(
                "--max-tokens 6 --prefill-tp {prefill} --decode-tp {decode} --order {order} --concurrency 4 --chunk 24 \
                 --decode-layout BHLPNC --decode-block 8"
            );
            assert_identical(&run(&args).await, &args);
        }
    }
}

/// Decode reads prefill's blocks where they lie; only what it writes into is its own.
#[tokio::test]
async fn a_pair_that_reads_in_place_answers_alike() {
    for args in [
        "--max-tokens 20",
        "--max-tokens 6 --order prefill-first --concurrency 4 --chunk 24 --kv-dtype bf16",
        "--max-tokens 6 --prefill-tp 2 --decode-tp 2 --prefill-layout LPBNHC --decode-layout LPBNHC",
        "--max-tokens 6 --turns 3 --decode-block 8 --prefill-block 8 --concurrency 2",
        "--max-tokens 20 --turns 2 --write-back on",
        "--max-tokens 40 --concurrency 4 --decode-blocks 16 --prefill-blocks 16",
    ] {
        let report = run(&format!("{args} --same-host in-place")).await;
        assert_identical(&report, args);
        assert_eq!(report.summary.in_place_bytes, report.summary.kv_bytes, "{args}: {report}");
        assert_eq!((report.summary.recomputed, report.summary.still_held), (0, 0), "{args}: {report}");
    }
    // Other heads, or another layout: by a copy.
    for args in ["--max-tokens 6 --decode-tp 2", "--max-tokens 6 --decode-layout BHLPNC"] {
        let report = run(&format!("{args} --same-host in-place")).await;
        assert_identical(&report, args);
        assert!(report.summary.in_place_bytes < report.summary.kv_bytes, "{args}: {report}");
    }
}

#[tokio::test]
async fn two_prefill_and_two_decode_nodes_answer_alike() {
    for args in [
        "--max-tokens 6 --prefill-nodes 2 --decode-nodes 2 --concurrency 4",
        "--max-tokens 6 --prefill-nodes 2 --decode-nodes 2 --prefill-tp 2 --decode-tp 4 --order prefill-first",
    ] {
        assert_identical(&run(args).await, args);
    }
}

#[tokio::test]
async fn ranks_over_which_the_heads_do_not_spread_are_refused_by_the_options_name() {
    for (args, option) in [("--prefill-tp 3", "--prefill-tp 3"), ("--decode-tp 5", "--decode-tp 5")] {
        let options = PairOptions::try_parse_from(std::iter::once("pair").chain(args.split_whitespace())).unwrap();
        let error = format!("{:#}", pair::run(&options, env!("CARGO_BIN_EXE_pair").as_ref()).await.unwrap_err());
        assert!(error.contains(option) && error.contains("2 KV heads do not spread evenly"), "{error}");
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
        // Three KV heads of three queries each: an even spread, and two ranks that share a head's queries unevenly.
        ("three ranks to one", "--max-tokens 8 --prefill-tp 3 --concurrency 4"),
        ("six ranks to three", "--max-tokens 8 --prefill-tp 6 --decode-tp 3 --concurrency 4 --decode-layout BHLPNC"),
        ("one rank to six", "--max-tokens 8 --decode-tp 6 --order prefill-first"),
    ] {
        assert_identical(&run(&format!("{args} --model {}", model.display())).await, name);
    }
    let uneven = format!("pair --prefill-tp 2 --model {}", model.display());
    let options = PairOptions::try_parse_from(uneven.split_whitespace()).unwrap();
    let error = format!("{:#}", pair::run(&options, env!("CARGO_BIN_EXE_pair").as_ref()).await.unwrap_err());
    assert!(error.contains("3 KV heads do not spread evenly over 2 ranks"), "{error}");
}
