#!/usr/bin/env bash
# Fills the cache that run.sh boots from, and prints its folder. Nothing is installed, and root is not needed.
#
# Packages come from Debian by apt, into lists of its own: apt checks their hashes against the signed index. What was made out of
# them is checked by SHA-256 before each use. The cache is ${KVFERRY_SOFTROCE_CACHE:-~/.cache/kvferry/softroce} (about 170 MB).
# Exit code 75: the packages cannot be had here.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)

unavailable() {
    echo "softroce: $*" >&2
    exit 75
}

fail() {
    echo "softroce: $*" >&2
    exit 126
}

for tool in apt-get dpkg python3 flock sha256sum; do
    command -v $tool >/dev/null || unavailable "$tool is missing; the guest is made of Debian's packages, on Debian"
done
[[ $(dpkg --print-architecture) == amd64 ]] || unavailable "the guest is x86-64, and this machine is not"

root=${KVFERRY_SOFTROCE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvferry/softroce}
# Another version of these files has a cache of its own.
version=$(cat "$here/prepare.sh" "$here/init.sh" "$here/modules.py" "$here/vmlinux.py" | sha256sum | cut -c1-12)
cache=$root/$version
mkdir -p "$cache"
exec 9>"$cache/lock"
flock --wait 900 9 || fail "another run has filled $cache for a quarter of an hour; remove it if none runs"

is_complete() {
    [[ -e $cache/SHA256SUMS ]] && (cd "$cache" && sha256sum --check --quiet SHA256SUMS) >&2
}

main() {
    if is_complete; then
        echo "$cache"
        return
    fi
    echo "softroce: filling $cache" >&2
    update_lists
    # Loads an image without the firmware's and the decompressor's seconds, and needs no KVM.
    command -v qemu-system-x86_64 >/dev/null || unpack qemu $(with_dependencies qemu-system-x86)
    local image
    image=$(apt_cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)
    [[ $image ]] || unavailable "apt knows no linux-image-amd64"
    unpack kernel "$image" busybox-static
    # What the command needs in the guest and this machine may lack.
    unpack userland libibverbs1 $(with_dependencies ibverbs-providers ibverbs-utils perftest iproute2 libucx0 ucx-utils)
    local kernel=${image#linux-image-}
    python3 "$here/vmlinux.py" "$cache/kernel/boot/vmlinuz-$kernel" "$cache/vmlinux" || fail "the kernel cannot be unpacked"
    make_initramfs "$kernel"
    rm -rf "$cache/kernel" "$cache/tree" "$cache/debs" "$cache/apt"
    (cd "$cache" && find vmlinux initramfs qemu userland -type f -print0 2>/dev/null | sort -z | xargs -0 sha256sum) \
        >"$cache/SHA256SUMS.new"
    mv "$cache/SHA256SUMS.new" "$cache/SHA256SUMS"
    # Caches of other versions.
    find "$root" -mindepth 1 -maxdepth 1 -type d ! -name "$version" -exec rm -rf {} +
    echo "$cache"
}

apt_options=(-o Dir::State="$cache/apt" -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache="$cache/apt"
    -o Debug::NoLocking=1 -o APT::Sandbox::User= -o Acquire::Retries=3 -o Acquire::http::Timeout=30)

apt_cache() {
    apt-cache "${apt_options[@]}" "$@"
}

update_lists() {
    mkdir -p "$cache/apt/lists/partial" "$cache/apt/archives/partial"
    apt-get "${apt_options[@]}" -qq update >&2 || unavailable "apt cannot fetch its lists: is Debian's mirror reachable?"
}

# The packages and what they need that is not installed here.
with_dependencies() {
    local found
    found=$(apt-get "${apt_options[@]}" install --no-install-recommends --print-uris -qq -y "$@" |
        sed -n "s/^'[^']*' \([^_]*\)_.*/\1/p")
    # One that is installed already is not in the answer, and may be gone on the machine that shares this cache.
    printf '%s\n' "$@" $found | sort -u
}

unpack() {
    local folder=$cache/$1 deb
    shift
    rm -rf "$folder" "$cache/debs"
    mkdir -p "$folder" "$cache/debs"
    (cd "$cache/debs" && apt-get "${apt_options[@]}" -qq download "$@") >&2 ||
        unavailable "apt cannot fetch: $*"
    for deb in "$cache"/debs/*.deb; do dpkg -x "$deb" "$folder"; done
}

# A shell, the modules and the script that starts the guest.
make_initramfs() {
    local kernel=$1 busybox tree=$cache/tree
    busybox=$(find "$cache/kernel" -type f -path "*/bin/busybox" | head -n 1)
    rm -rf "$tree"
    mkdir -p "$tree"/{bin,proc,sys,dev,lower,layer,root,modules}
    cp "$busybox" "$tree/bin/busybox"
    "$busybox" depmod -b "$cache/kernel" "$kernel"
    # crc32_generic: rxe asks for "crc32" by name, and cannot be added without it.
    python3 "$here/modules.py" "$cache/kernel/lib/modules/$kernel" "$tree/modules" \
        virtio_pci 9pnet_virtio 9p overlay virtio_console dummy veth sch_netem crc32_generic ib_uverbs rdma_ucm rdma_rxe ||
        fail "the kernel lacks a module"
    cp "$here/init.sh" "$tree/init"
    chmod 755 "$tree/init"
    (cd "$tree" && find . | "$busybox" cpio -o -H newc 2>/dev/null) >"$cache/initramfs"
}

main
