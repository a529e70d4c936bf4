#!/usr/bin/env bash
# Makes the Python environment with which block hashes are compared and KV events read, and prints its path.
#
#   KVFERRY_PYTHON=$(integration-tests/hashes/environment.sh)/bin/python \
#       cargo test --workspace --test engine_hashes --test engine_events -- --ignored
#
# Run again it does only what changed. KVFERRY_CACHE names the folder that holds environments (default ~/.cache/kvferry).
# Exit code 75: PyPI cannot be reached, so that there is nothing to compare with; any other but 0 is a failure.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${KVFERRY_CACHE:-$HOME/.cache/kvferry}/hashes-2
# shellcheck source=../python.sh
. "$here/../python.sh"

install_all() {
    make_venv
    say "installing cbor2, xxhash, pyzmq and msgspec into $venv"
    "${uv[@]}" pip install --quiet --python "$venv/bin/python" --requirement "$here/requirements.txt" || explain_failure
}

install_once all "$here/requirements.txt"
echo "$venv"
