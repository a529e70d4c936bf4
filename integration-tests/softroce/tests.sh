#!/usr/bin/env bash
# Runs the tests that need an RDMA device, in a guest with soft-RoCE: tests.sh [FILTER]
#
# Last comes `pair` over RDMA, whose answers must be those of a single process; a FILTER leaves that out. How often, if not as often as
# the defaults below say: KVFERRY_RDMA_ROUNDS races of fences, KVFERRY_KILLS kills of either side, KVFERRY_ABORTS transfers that are
# given up. UCX over the same device runs some tests of the contract, or with KVFERRY_UCX_ALL=1 all of it and two minutes longer, and
# its own tests: KVFERRY_UCX_KILLS, KVFERRY_UCX_REVOKES. Exit code 75: the guest's packages cannot be had here.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
cd "$here/../.."

"$here/run.sh" --prepare || exit $?
# The same selection as the other tests, so that nothing is built twice.
cargo test --workspace --no-run --message-format json-render-diagnostics >"${CARGO_TARGET_DIR:-target}/softroce-build.json"
programs=$(python3 - "${CARGO_TARGET_DIR:-target}/softroce-build.json" <<'P'
import json
import sys

# The transport's own tests of its queue pairs, the contract that every transport runs, and what ends sessions and transfers.
wanted = {("kvferry_transport", "lib"), ("contract", "test"), ("rdma", "test"), ("ucx", "test"), ("killed", "test"), ("aborts", "test"), ("pair", "bin")}
found = {}
for line in open(sys.argv[1]):
    message = json.loads(line)
    target = message.get("target", {})
    kind = (target.get("name"), (target.get("kind") or [""])[0])
    # The program `pair` itself, not its unit tests.
    is_meant = kind in wanted and (message.get("profile", {}).get("test") or kind[1] == "bin")
    if message.get("executable") and is_meant and not (kind[1] == "bin" and message["profile"]["test"]):
        found[kind] = message["executable"]
if wanted - found.keys():
    sys.exit(f"softroce: these were not built: {sorted(wanted - found.keys())}")
# `pair` is the last.
print(*[program for kind, program in sorted(found.items(), key=lambda item: item[0][1] == "bin")])
P
)
# shellcheck disable=SC2016  # the guest's shell expands it
exec "$here/run.sh" --timeout "${KVFERRY_SOFTROCE_LIMIT_S:-600}" --env RUST_BACKTRACE=1 \
    --env "KVFERRY_RDMA_ROUNDS=${KVFERRY_RDMA_ROUNDS:-40}" --env "KVFERRY_KILLS=${KVFERRY_KILLS:-2}" \
    --env "KVFERRY_ABORTS=${KVFERRY_ABORTS:-100}" --env "KVFERRY_UCX_ALL=${KVFERRY_UCX_ALL:-0}" \
    --env "KVFERRY_UCX_KILLS=${KVFERRY_UCX_KILLS:-3}" --env "KVFERRY_UCX_REVOKES=${KVFERRY_UCX_REVOKES:-2}" \
    -- "$PWD" bash integration-tests/softroce/inside.sh "$programs" "${1-}"
