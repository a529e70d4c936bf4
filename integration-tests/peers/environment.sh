#!/usr/bin/env bash
# Makes the Python environment in which the peers run beside `kvferry bench`, and prints its path.
#
#   integration-tests/peers/environment.sh
#
# Run again it does only what changed. KVFERRY_CACHE names the folder that holds environments (default ~/.cache/kvferry).
# Exit code 75: PyPI cannot be reached, so that there is nothing to run with; any other but 0 is a failure.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${KVFERRY_CACHE:-$HOME/.cache/kvferry}/peers-1
peers=$here/../vllm/requirements-peers.txt
# shellcheck source=../python.sh
. "$here/../python.sh"

main() {
    install_once all "$here/requirements.txt" "$peers"
    # Mooncake's wheel links them, and they are in no wheel.
    local library missing=()
    for library in libibverbs.so.1 librdmacm.so.1 libnl-3.so.200 libnl-route-3.so.200; do
        ldconfig -p | grep -q "$library" || missing+=("$library")
    done
    if [ ${#missing[@]} -gt 0 ]; then
        say "Mooncake will not load without ${missing[*]}; on Debian: apt-get install libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200"
    fi
    echo "$venv"
}

install_all() {
    make_venv
    say "installing NIXL and Mooncake's transfer engine into $venv"
    "${uv[@]}" pip install --quiet --python "$venv/bin/python" --requirement "$here/requirements.txt" || explain_failure
    # Their dependencies (torch, a second CUDA, a store's services) are not used on a CPU.
    "${uv[@]}" pip install --quiet --python "$venv/bin/python" --no-deps --requirement "$peers" || explain_failure
}

main "$@"
