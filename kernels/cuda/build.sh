#!/usr/bin/env bash
# Compiles the kernels for devices, and writes down what they need of one:
#
#   kernels/cuda/build.sh           writes kernels/cuda/built: the fatbins, the sources' hashes, and what each kernel needs
#   kernels/cuda/build.sh --check   compares with what is there instead, byte for byte
#
# Needs g++ and python3 with venv and pip: the compiler comes from PyPI (toolkit.txt, 105 MB, kept in target/cuda-toolkit). No
# device or driver. A spilled register is an error. Fatbins hold code for compute capability 8.x, 9.0, 10.0 and 12.0, and PTX for
# what comes after. With CUDA_HOME set that toolkit is taken; then the bytes are its own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

built=built
toolkit=../../target/cuda-toolkit
# Fused multiply-add only where the source says so: then a device's bits are those of the tests (kernels/cuda-sim).
flags=(-std=c++17 -O3 -fmad=false --compress-mode=size -Xptxas -v -fatbin)
for sm in 80 90 100 120; do
    flags+=(-gencode "arch=compute_$sm,code=sm_$sm")
done
flags+=(-gencode arch=compute_80,code=compute_80)

main() {
    find_toolkit
    local out=$built
    if [ "${1:-}" = --check ]; then
        out=$(mktemp -d)
        # shellcheck disable=SC2064
        trap "rm -rf '$out'" EXIT
    fi
    mkdir -p "$out"
    local family
    for family in copy store attention; do
        "$CUDA_HOME/bin/nvcc" "${flags[@]}" -o "$out/$family.fatbin" "$family.cu" 2>"$out/log" || { cat "$out/log"; exit 1; }
        resources "$family" <"$out/log"
    done | LC_ALL=C sort >"$out/resources.txt"
    rm -f "$out/log"
    sha256sum ./*.cu ./*.cuh build.sh toolkit.txt >"$out/sources.sha256"
    if grep -v ' spilled 0$' "$out/resources.txt"; then
        echo "the kernels above spill registers" >&2
        exit 1
    fi
    [ "$out" = "$built" ] || compare "$out"
}

find_toolkit() {
    [ -n "${CUDA_HOME:-}" ] && return
    if ! ls "$toolkit"/lib/python3*/site-packages/nvidia/cu13/bin/nvcc >/dev/null 2>&1; then
        python3 -m venv "$toolkit"
        "$toolkit/bin/pip" install --quiet --disable-pip-version-check --requirement toolkit.txt
    fi
    CUDA_HOME=$(cd "$toolkit"/lib/python3*/site-packages/nvidia/cu13 && pwd)
}

# What ptxas says of each kernel, a line each.
resources() {
    awk -v family="$1" -v quote="'" '
        /Compiling entry function/ { split($0, part, quote); kernel = part[2]; sm = part[4] }
        /bytes spill stores/ {
            for (i = 1; i < NF; i++) if ($i == "spill") spilled += $(i - 2)
        }
        /Used [0-9]+ registers/ {
            registers = $0; sub(/.*Used /, "", registers); sub(/ registers.*/, "", registers)
            shared = 0
            if (match($0, /[0-9]+ bytes smem/)) shared = substr($0, RSTART, RLENGTH - 11)
            print family, sm, kernel, "registers", registers, "shared", shared, "spilled", spilled + 0
            spilled = 0
        }'
}

compare() {
    local file
    for file in copy.fatbin store.fatbin attention.fatbin resources.txt sources.sha256; do
        cmp "$1/$file" "$built/$file" || { echo "$built/$file is not what its source gives: run $0" >&2; exit 1; }
    done
    echo "kernels/cuda/$built is what its source gives"
}

main "$@"
exit
