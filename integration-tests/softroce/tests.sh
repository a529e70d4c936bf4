#!/usr/bin/env bash
# Runs the tests that need an RDMA device, in a guest with soft-RoCE: tests.sh [FILTER]
#
# Exit code 75: the guest's packages cannot be had here. KVFERRY_RDMA_ROUNDS sets how often races are tried.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
cd "$here/../.."

"$here/run.sh" --prepare || exit $?
# The same selection as the other tests, so that nothing is built twice.
cargo test --workspace --no-run --message-format json-render-diagnostics >"${CARGO_TARGET_DIR:-target}/softroce-build.json"
programs=$(python3 - "${CARGO_TARGET_DIR:-target}/softroce-build.json" <<'P'
import json
import sys

# The transport's own tests of its queue pairs, and the contract that every transport runs.
for line in open(sys.argv[1]):
    message = json.loads(line)
    target = message.get("target", {})
    kind = (target.get("name"), (target.get("kind") or [""])[0])
    if message.get("executable") and kind in {("kvferry_transport", "lib"), ("contract", "test")}:
        print(message["executable"])
P
)
[ "$(wc -w <<<"$programs")" = 2 ] || {
    echo "softroce: the transport's tests were not built, or others of that name were: $programs" >&2
    exit 1
}
# shellcheck disable=SC2016  # the guest's shell expands it
exec "$here/run.sh" --timeout "${KVFERRY_SOFTROCE_LIMIT_S:-600}" --env RUST_BACKTRACE=1 \
    --env "KVFERRY_RDMA_ROUNDS=${KVFERRY_RDMA_ROUNDS:-40}" \
    -- "$PWD" bash -c 'for program in $1; do "$program" --ignored --test-threads=1 "$2" || exit $?; done' bash \
    "$programs" "${1:-rdma::}"
