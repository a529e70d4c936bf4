# Sourced by the scripts that make Python environments: vllm/environment.sh, peers/environment.sh.
#
# They set `venv` and define `install_PART` for each `install_once PART FILES`: run when one of the files has changed.
# shellcheck shell=bash
unreachable=75
uv_version=0.13.9

# uv reads another variable than pip where a proxy has certificates of its own.
if [ -z "${SSL_CERT_FILE:-}" ] && [ -n "${PIP_CERT:-}" ]; then export SSL_CERT_FILE=$PIP_CERT; fi

make_venv() {
    command -v python3 >/dev/null || fail "python3 (3.10 or later) is missing"
    if [ ! -x "$venv/bin/python" ]; then
        mkdir -p "$(dirname "$venv")"
        python3 -m venv "$venv" || fail "python3 -m venv failed; on Debian: apt-get install python3-venv"
    fi
    find_uv
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

find_uv() {
    if command -v uv >/dev/null; then
        uv=(uv)
    else
        [ -x "$venv/bin/uv" ] || "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$uv_version" >&2 ||
            explain_failure
        # shellcheck disable=SC2034
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
    say "PyPI cannot be reached, so there is nothing to run with"
    exit $unreachable
}

say() {
    echo "environment.sh: $*" >&2
}

fail() {
    say "$*"
    exit 1
}
