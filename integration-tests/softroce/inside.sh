# Runs in the guest: the programs of tests.sh, the last of which is `pair`, and a filter.
set -euo pipefail
read -ra programs <<<"$1"
pair=${programs[-1]}
for program in "${programs[@]::${#programs[@]}-1}"; do
    # Other tests that are ignored need something else; of one program all need a device. What measures runs if it is asked for.
    filter=(rdma --skip bandwidth)
    [[ ${program##*/} == rdma-* ]] && filter=()
    [[ -z $2 ]] || filter=("$2")
    "$program" --ignored --test-threads=1 "${filter[@]}" || exit $?
done
[[ -z $2 ]] || exit 0
log=$(mktemp)
# An emulated machine is slow to answer; a path that is not RDMA would be taken in silence, so the log is looked at.
KVFERRY_PATHS=rdma,tcp KVFERRY_SILENCE_DEADLINE_MS=60000 RUST_LOG=warn,kvferry_transport=info \
    timeout 200 "$pair" --max-tokens 8 2>"$log" || {
    cat "$log" >&2
    echo "softroce: the pair's answers over RDMA are not those of one process" >&2
    exit 1
}
grep -c 'session up.*path="*rdma' "$log" >/dev/null || {
    cat "$log" >&2
    echo "softroce: the pair did not take RDMA" >&2
    exit 1
}
echo "softroce: the pair answers over RDMA as one process does"
