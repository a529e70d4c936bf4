#!/bin/sh
# Runs `pair` over the whole matrix: prompts of 1 to 1,500 tokens, 1 and 8 at a time, both orders, f16 and bf16, layouts and
# block sizes that differ between the sides. Each run compares tokens and first logits with a single process; the first
# difference ends it. The argument is a model (default: SmolLM2, fetched if it is not there); LONGEST and MAX_TOKENS may be set.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
model=${1:-$("$here/fetch-smollm2.sh")}
[ "$model" = embedded ] || [ -f "$model" ] || {
    echo "matrix: there is no model $model; name a GGUF file, or embedded" >&2
    exit 1
}
# The built-in model makes a token of each byte: 500 words are what its context of 4,096 holds.
[ "$model" = embedded ] && longest=${LONGEST:-500} || longest=${LONGEST:-1500}
max_tokens=${MAX_TOKENS:-16}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM

cargo build --quiet --release -p kvferry-examples --bins --manifest-path "$here/../Cargo.toml"
pair=${CARGO_TARGET_DIR:-$here/../target}/release/pair

# Every word is one token of SmolLM2: a block of 16 less one, exact and one more among the lengths.
awk -v longest="$longest" 'BEGIN {
    n = split("The little house by the sea was old but it had a good door and the man who made it", word, " ");
    m = split("1 2 15 16 17 31 33 64 127 129 500 1500", length_, " ");
    for (i = 1; i <= m; i++) {
        if (length_[i] > longest) continue;
        line = word[1];
        for (k = 2; k <= length_[i]; k++) line = line " " word[(k + i * (k > 9)) % n + 1];
        print line;
    }
}' >"$work/prompts"

runs=0
for concurrency in 1 8; do
    for order in decode-first prefill-first; do
        for dtype in f16 bf16; do
            for shape in \
                "BLPNHC BLPNHC 16 16" "LPBNHC LPBNHC 16 16" "LPBNHC BHLPNC 16 16" \
                "BLPNHC LBPHNC 16 32" "BHLPNC PLBNHC 32 7"; do
                # shellcheck disable=SC2086 # four words
                set -- $shape
                start=$(date +%s)
                "$pair" --model "$model" --prompts "$work/prompts" --max-tokens "$max_tokens" --json \
                    --concurrency "$concurrency" --order "$order" --kv-dtype "$dtype" --prefill-layout "$1" \
                    --decode-layout "$2" --prefill-block "$3" --decode-block "$4" >"$work/report" || {
                    cat "$work/report"
                    echo "DIFFERENT: concurrency $concurrency, $order, $dtype, $shape" >&2
                    exit 1
                }
                grep -q '"recomputed": 0,' "$work/report" || {
                    echo "RECOMPUTED: concurrency $concurrency, $order, $dtype, $shape: not all KV was carried" >&2
                    exit 1
                }
                runs=$((runs + 1))
                printf '%3d  %3d s  x%s  %-13s  %-4s  %s\n' "$runs" $(($(date +%s) - start)) \
                    "$concurrency" "$order" "$dtype" "$shape"
            done
        done
    done
done
echo "$runs runs, all identical to a single process"
