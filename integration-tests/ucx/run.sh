#!/usr/bin/env bash
# Runs the tests that need libucp, over UCX's tcp on this host: integration-tests/ucx/run.sh [short|long]
#
# long: 200 kills and 10,000 revokes; some minutes. Exit code 75: libucp is missing and cannot be fetched.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."

case ${1:-short} in
short) ;;
long) export KVFERRY_KILLS=200 KVFERRY_UCX_KILLS=200 KVFERRY_UCX_REVOKES=10000 KVFERRY_UCX_WITHIN_MS=2000 KVFERRY_UCX_SESSIONS=1000 KVFERRY_UCX_WRITES=400 ;;
*)
    echo "say short or long" >&2
    exit 2
    ;;
esac

variables=$("$here/environment.sh") || exit $?
while IFS= read -r variable; do
    [ -z "$variable" ] || export "${variable?}"
done <<<"$variables"
# `kvferry bench` looks for it there.
[ -z "${KVFERRY_UCX_PERFTEST:-}" ] || PATH=$PATH:$(dirname "$KVFERRY_UCX_PERFTEST")

# The same selection as the other tests: another one has other features, and would build most crates again.
cargo test --workspace --lib --test ucx --test contract --test killed --test bench -- --ignored --nocapture --test-threads=1 --skip the_other_process --skip rdma
