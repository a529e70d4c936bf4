#!/bin/sh
# Shows what compute hides of the transfers: `pair` on a link that takes as long for a prompt's KV as prefill takes to compute it,
# half as long, and double. The link is set from a run without a limit. The argument is a model (default: SmolLM2, fetched if it is
# not there). PROMPT_TOKENS, PROMPTS, CHUNK and ROUNDS may be set; with TRACES=folder each run leaves its timeline there.
#
# Columns: the prompts' compute, the link's time, what was exposed after the last layer, its share of the link's time, the least
# that cannot be hidden, by how much more was exposed, and by how much prefill computed slower than a single process did.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
model=${1:-$("$here/fetch-smollm2.sh")}
tokens=${PROMPT_TOKENS:-512}
prompts=${PROMPTS:-2}
chunk=${CHUNK:-128}
rounds=${ROUNDS:-3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM

cargo build --quiet --release -p kvferry-examples --bins --manifest-path "$here/../Cargo.toml"
pair=${CARGO_TARGET_DIR:-$here/../target}/release/pair

# Every word is one token of SmolLM2.
awk -v prompts="$prompts" -v tokens="$tokens" 'BEGIN {
    n = split("The little house by the sea was old but it had a good door and the man who made it", word, " ");
    for (i = 1; i <= prompts; i++) {
        line = word[i % n + 1];
        for (k = 2; k <= tokens; k++) line = line " " word[(k * i) % n + 1];
        print line;
    }
}' >"$work/prompts"

run() {
    "$pair" --model "$model" --prompts "$work/prompts" --max-tokens 1 --chunk "$chunk" --json "$@" >"$work/report" || {
        cat "$work/report" >&2
        echo "the answers were not those of a single process" >&2
        exit 1
    }
}

# A number of the report.
figure() {
    sed -n "s/^ *\"$1\": \\([0-9.e-]*\\),*\$/\\1/p" "$work/report" | head -n 1
}

printf '%5s  %-6s %10s %10s %10s %9s %10s %9s %9s\n' round link 'Gbit/s' compute link-ms exposed 'of it' 'least' 'slower'
for round in $(seq "$rounds"); do
    run
    bytes=$(figure kv_bytes)
    compute=$(figure compute_ms)
    for link in half:0.5 equal:1 double:2; do
        gbps=$(awk -v bytes="$bytes" -v ms="$compute" -v factor="${link#*:}" \
            'BEGIN { printf "%.6f", bytes * 8 / (ms * factor) / 1e6 }')
        if [ -n "${TRACES:-}" ]; then
            run --link-gbps "$gbps" --trace "$TRACES/${link%:*}-$round.json"
        else
            run --link-gbps "$gbps"
        fi
        awk -v round="$round" -v link="${link%:*}" -v gbps="$gbps" -v compute="$(figure compute_ms)" \
            -v transfer="$(figure transfer_ms)" -v exposed="$(figure exposed_ms)" -v least="$(figure lower_bound_ms)" \
            -v slower="$(figure prefill_slowdown)" 'BEGIN {
                printf "%5d  %-6s %10s %10.1f %10.1f %9.1f %8.1f %% %9.1f %7.1f %%\n", round, link, gbps, compute, transfer,
                    exposed, exposed / transfer * 100, least, slower * 100
            }'
    done
done
