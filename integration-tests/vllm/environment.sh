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
unreachable=75
uv_version=0.13.9

main() {
    local want_wheel=no want_peers=no word
    for word in "$@"; do
        case $word in
        wheel) want_wheel=yes ;;
        peers) want_peers=yes ;;
        *) fail "unknown word '$word': say wheel, peers, both or nothing" ;;
        esac
    done
    # uv reads another variable than pip where a proxy has certificates of its own.
    if [ -z "${SSL_CERT_FILE:-}" ] && [ -n "${PIP_CERT:-}" ]; then export SSL_CERT_FILE=$PIP_CERT; fi

    install_once engine "$here"/{requirements,constraints,overrides}.txt
    if [ "$want_peers" = yes ]; then install_once peers "$here/requirements-peers.txt"; fi
    if [ "$want_wheel" = yes ]; then install_wheel; fi
    echo "$venv"
}

# Installs a part of the environment unless these files, as they are, were installed already.
install_once() {
    local part=$1 stamp
    shift
    stamp=$(cat "$@" | sha256sum)
    if [ "$(cat "$venv/.kvferry-$part" 2>/dev/null)" != "$stamp" ]; then
        "install_$part"
        echo "$stamp" >"$venv/.kvferry-$part"
    fi
}

install_engine() {
    command -v python3 >/dev/null || fail "python3 (3.10 or later) is missing"
    if [ ! -x "$venv/bin/python" ]; then
        mkdir -p "$(dirname "$venv")"
        python3 -m venv "$venv" || fail "python3 -m venv failed; on Debian: apt-get install python3-venv"
    fi
    find_uv
    say "installing vLLM for the CPU (6 GB) into $venv"
    "${uv[@]}" pip install --quiet --python "$venv/bin/python" --requirement "$here/requirements.txt" \
        --constraint "$here/constraints.txt" --override "$here/overrides.txt" || explain_failure
}

install_peers() {
    find_uv
    "${uv[@]}" pip install --quiet --python "$venv/bin/python" --no-deps --requirement "$here/requirements-peers.txt" ||
        explain_failure
}

# The wheel is built by the command that connector/python documents.
install_wheel() {
    local wheels=$repository/connector/python/target/wheels
    command -v cargo >/dev/null || fail "cargo is missing: install Rust with rustup"
    rm -rf "$wheels"
    (cd "$repository/connector/python" && VIRTUAL_ENV=$venv "$venv/bin/maturin" build --quiet --release --locked --out "$wheels") >&2 ||
        fail "connector/python does not build"
    find_uv
    "${uv[@]}" pip install --quiet --python "$venv/bin/python" --no-deps --reinstall "$wheels"/*.whl ||
        fail "the wheel of connector/python cannot be installed"
}

find_uv() {
    if command -v uv >/dev/null; then
        uv=(uv)
    else
        [ -x "$venv/bin/uv" ] || "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$uv_version" >&2 ||
            explain_failure
        uv=("$venv/bin/uv")
    fi
}

# A failed install is the network's fault only if a small package of known name and version cannot be fetched either.
explain_failure() {
    local probe
    probe=$(mktemp -d)
    if "$venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$probe" iniconfig==2.1.0 >&2; then
        rm -rf "$probe"
        fail "the packages cannot be installed; the lines above say why"
    fi
    rm -rf "$probe"
    say "PyPI cannot be reached, so there is no vLLM to test with"
    exit $unreachable
}

say() {
    echo "environment.sh: $*" >&2
}

fail() {
    say "$*"
    exit 1
}

main "$@"
