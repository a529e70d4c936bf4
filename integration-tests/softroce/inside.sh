# Runs in the guest: the programs of tests.sh, the last of which is `pair`, and a filter.
set -euo pipefail
read -ra programs <<<"$1"
pair=${programs[-1]}
# UCX takes this device too. Its 1.13 cannot use the IPv4 entry of a soft-RoCE device, and needs ud to set rc up; a peer that is gone is
# found in half a second, not in eight, and a guest moves some MB/s.
export UCX_TLS=rc,ud UCX_NET_DEVICES=rxe0:1 UCX_IB_GID_INDEX=0 UCX_RC_TIMEOUT=100ms UCX_RC_RETRY_COUNT=4
export KVFERRY_UCX_ARENA_MIB=1 KVFERRY_UCX_WRITES=4
ucx=(scattered_bytes a_note a_node_shuts nothing_lands a_killed)
of_contract=(the_path_is_told scattered_bytes each_write what_lands what_may_not cancel_ends)
[[ ${KVFERRY_UCX_ALL:-0} == 0 ]] || ucx=() of_contract=("")
export KVFERRY_UCX_SESSIONS=${KVFERRY_UCX_SESSIONS:-20}
for program in "${programs[@]::${#programs[@]}-1}"; do
    # Other tests that are ignored need something else; of one program all need a device. What measures runs if it is asked for.
    filter=(rdma --skip bandwidth)
    [[ ${program##*/} == rdma-* ]] && filter=()
    case ${program##*/} in
    ucx-*) filter=("${ucx[@]}") ;;
    contract-*) filter+=("${of_contract[@]/#/ucx::}") ;;
    killed-* | aborts-*) filter+=(over_ucx) ;;
    esac
    [[ -z $2 ]] || filter=("$2")
    "$program" --ignored --test-threads=1 "${filter[@]}" || exit $?
done
[[ -z $2 ]] || exit 0
log=$(mktemp)
# An emulated machine is slow to answer; a path that is not the wanted one would be taken in silence, so the log is looked at.
for path in rdma ucx; do
    KVFERRY_PATHS=$path,tcp KVFERRY_SILENCE_DEADLINE_MS=60000 RUST_LOG=warn,kvferry_transport=info \
        timeout 200 "$pair" --max-tokens 8 2>"$log" || {
        cat "$log" >&2
        echo "softroce: the pair's answers over $path are not those of one process" >&2
        exit 1
    }
    case $path in
    rdma) taken='session up.*path="*rdma' ;;
    ucx) taken='payload goes over UCX.*rc_verbs' ;;
    esac
    grep -c "$taken" "$log" >/dev/null || {
        cat "$log" >&2
        echo "softroce: the pair did not take $path" >&2
        exit 1
    }
    echo "softroce: the pair answers over $path as one process does"
done
