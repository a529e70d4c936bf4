#!/usr/bin/env bash
# Makes the Python environment in which the tests with the real engine run, and prints its path.
#
#   integration-tests/vllm/environment.sh [wheel] [peers]
#
#   wheel   also builds connector/python and installs it
#   peers   also installs NIXL and Mooncake, for the side by side run
#
# Run again it does only what changed. KVFERRY_CACHE names the folder that holds environments (default ~/.cache/kvferry).
# Exit code 75: PyPI cannot be reached, so that there is nothing to test with; any other but 0 is a failure.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
venv=${KVFERRY_CACHE:-$HOME/.cache/kvferry}/vllm-0.32.0
# shellcheck source=../python.sh
. "$here/../python.sh"

main() {
    local want_wheel=no want_peers=no word
    for word in "$@"; do
        case $word in
        wheel) want_wheel=yes ;;
        peers) want_peers=yes ;;
        *) fail "unknown word '$word': say wheel, peers, both or nothing" ;;
        esac
    done
    install_once engine "$here"/{requirements,constraints,overrides}.txt
    if [ "$want_peers" = yes ]; then install_once peers "$here/requirements-peers.txt"; fi
    if [ "$want_wheel" = yes ]; then install_wheel; fi
    echo "$venv"
}

install_engine() {
    make_venv
    say "installing vLLM for the CPU (6 GB) into $venv"
    "${uv[@]}" pip install --quiet --python "$venv/bin/python" --requirement "$here/requirements.txt" \
        --constraint "$here/constraints.txt" --override "$here/overrides.txt" || explain_failure
}

install_peers() {
    find_uv
    "${uv[@]}" pip install --quiet --python "$venv/bin/python" --no-deps --requirement "$here/requirements-peers.txt" ||
        explain_failure
}

# The wheel is built by the command that connector/python documents, or in the profile $KVFERRY_WHEEL_PROFILE.
install_wheel() {
    local wheels=$repository/connector/python/target/wheels
    command -v cargo >/dev/null || fail "cargo is missing: install Rust with rustup"
    rm -rf "$wheels"
    (cd "$repository/connector/python" && VIRTUAL_ENV=$venv "$venv/bin/maturin" build --quiet --profile "${KVFERRY_WHEEL_PROFILE:-release}" --locked --out "$wheels") >&2 ||
        fail "connector/python does not build"
    find_uv
    "${uv[@]}" pip install --quiet --python "$venv/bin/python" --no-deps --reinstall "$wheels"/*.whl ||
        fail "the wheel of connector/python cannot be installed"
}

main "$@"
