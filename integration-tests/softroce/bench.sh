#!/usr/bin/env bash
# Measures `kvferry bench` over a soft-RoCE device in the guest, over verbs and over UCX's rc, each in turn with its limit, ib_write_bw and
# ucx_perftest: bench.sh [ARGUMENT of kvferry bench...]
#
# All of it is emulated, device and processors: the ratio says something, the rates do not. Exit code 75: the guest's packages cannot be
# had here.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
cd "$here/../.."
(($#)) || set -- --digest off --verify --block 16KiB,64KiB,512KiB --rounds 5 --requests 5 --memory 4MiB

"$here/run.sh" --prepare || exit $?
cargo build --release -p kvferry-cli
# UCX_...: see inside.sh.
# shellcheck disable=SC2016  # the guest's shell expands it
exec "$here/run.sh" --timeout "${KVFERRY_SOFTROCE_LIMIT_S:-1200}" \
    --env UCX_TLS=rc,ud --env UCX_NET_DEVICES=rxe0:1 --env UCX_IB_GID_INDEX=0 -- "$PWD" \
    bash -c 'for way in rdma ucx; do "$0" bench --transport $way "$@" || exit; done' "${CARGO_TARGET_DIR:-target}/release/kvferry" "$@"
