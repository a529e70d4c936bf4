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
program=$(python3 - "${CARGO_TARGET_DIR:-target}/softroce-build.json" <<'P'
import json
import sys

for line in open(sys.argv[1]):
    message = json.loads(line)
    target = message.get("target", {})
    if message.get("executable") and target.get("name") == "kvferry_transport" and "lib" in target.get("kind", []):
        print(message["executable"])
P
)
[ -x "$program" ] || {
    echo "softroce: the transport's tests were not built" >&2
    exit 1
}
exec "$here/run.sh" --timeout "${KVFERRY_SOFTROCE_LIMIT_S:-420}" --env RUST_BACKTRACE=1 \
    --env "KVFERRY_RDMA_ROUNDS=${KVFERRY_RDMA_ROUNDS:-40}" \
    -- "$PWD" "$program" --ignored --test-threads=1 --nocapture "${1:-rdma::tests::}"
