#!/usr/bin/env bash
# Finds libucp, or fetches it, and prints the variables with which programs here find it, one assignment a line.
#
#   export $(integration-tests/ucx/environment.sh)
#
# An installed libucp.so.0 needs no variables. Otherwise Debian's or Ubuntu's packages libucx0 and ucx-utils are downloaded and
# unpacked into a cache folder ($KVFERRY_CACHE, default ~/.cache/kvferry); nothing is installed, and no root is needed.
# KVFERRY_UCX_WHEEL=1 takes UCX from PyPI (libucx-cu12: newer, without RDMA) instead, whatever is installed.
# Exit code 75: there is no libucp, and neither apt's nor PyPI's archive can be reached.
set -euo pipefail
cache=${KVFERRY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvferry}
wheel=libucx-cu12==1.22.0
unreachable=75

main() {
    if [ "${KVFERRY_UCX_WHEEL:-0}" = 1 ]; then
        folder=$cache/ucx-wheel
        [ -e "$folder/done" ] || fetch_wheel || give_up "PyPI does not give $wheel"
        say "$folder/libucx/lib" "$folder/libucx/bin"
    elif ldconfig -p 2>/dev/null | grep -q 'libucp\.so\.0'; then
        # Installed: nothing to say.
        :
    else
        folder=$cache/ucx-$(dpkg --print-architecture 2>/dev/null || uname -m)
        [ -e "$folder/done" ] || fetch_packages || give_up "apt does not give libucx0"
        libraries=$(dirname "$(find "$folder" -name libucp.so.0 -print -quit)")
        say "$libraries" "$folder/usr/bin"
    fi
}

say() {
    echo "LD_LIBRARY_PATH=$1${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    echo "UCX_MODULE_DIR=$1/ucx"
    echo "KVFERRY_UCX_LIB=$1/libucp.so.0"
    echo "KVFERRY_UCX_PERFTEST=$2/ucx_perftest"
}

# Puts what is in the packages below $folder, in one step, so that an interrupted run leaves no half of it.
fetch_packages() {
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 1
    make_work
    local packages=(libucx0 ucx-utils) package
    # What libucx0's RDMA transports link with, where it is missing: without it they are not found, but tcp is.
    for package in libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200; do
        dpkg -s "$package" >/dev/null 2>&1 || packages+=("$package")
    done
    (cd "$work" && apt-get -qq download "${packages[@]}" >&2) || (apt-get -qq update && cd "$work" && apt-get -qq download "${packages[@]}") >&2 || return 1
    mkdir "$work/unpacked"
    for package in "$work"/*.deb; do
        dpkg -x "$package" "$work/unpacked" || return 1
    done
    keep
}

fetch_wheel() {
    make_work
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" "$wheel" >&2 || return 1
    python3 -m zipfile -e "$work"/*.whl "$work/unpacked" || return 1
    chmod +x "$work/unpacked/libucx/bin/"*
    keep
}

make_work() {
    mkdir -p "$cache"
    work=$(mktemp -d "$cache/ucx.XXXXXX")
    trap 'rm -rf "$work"' EXIT
}

keep() {
    touch "$work/unpacked/done"
    rm -rf "$folder"
    mv "$work/unpacked" "$folder"
}

give_up() {
    echo "ucx/environment.sh: libucp is missing, and $1; install libucx0 (Debian, Ubuntu) or ucx (Fedora, RHEL)" >&2
    exit $unreachable
}

main
