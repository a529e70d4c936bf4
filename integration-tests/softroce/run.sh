#!/usr/bin/env bash
# Runs a command beside a soft-RoCE device: run.sh [options] [--] DIR COMMAND [ARGUMENT...]
#
# Boots Debian's kernel in an emulated machine (no KVM, no device, no network of the host's, no root), loads rdma_rxe and runs
# COMMAND as the guest's root in DIR. The guest's root is this machine's own, read-only below a throw-away layer, so what is built
# here runs there at the same path with the same libraries; only DIR is shared for writing. Output and exit code are COMMAND's.
#
#   --memory MIB       the guest's memory (1536)
#   --cpus N           its processors (2)
#   --timeout S        ends the guest after that, with exit code 124 (300)
#   --network KIND     dummy: rxe0 alone, packets turn round in it (the default); veth: rxe0 and rxe1 with a wire between, where
#                      packets are real and can be delayed and lost (tc netem)
#   --env NAME=VALUE   sets a variable for COMMAND; may be repeated
#   --console          shows what the guest's kernel says
#   --prepare          fills the cache and runs nothing
#
# COMMAND finds SOFTROCE_DEVICE=rxe0 and SOFTROCE_ADDRESS=10.9.0.1; with veth also SOFTROCE_DEVICE2 and SOFTROCE_ADDRESS2.
# Exit codes of its own: 75 the packages cannot be had here (no Debian, or no network), 124 out of time, 125 the guest ended before
# COMMAND did (its console follows), 126 anything else that is not COMMAND's.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)

fail() {
    echo "softroce: $*" >&2
    exit 126
}

memory=1536 cpus=2 timeout=300 network=dummy show_console=0 prepare_only=0 variables=()
while [[ ${1-} == --* ]]; do
    [[ $1 == --console || $1 == --prepare || $1 == -- || $# -ge 2 ]] || fail "$1 needs a value"
    case $1 in
    --memory) memory=$2 && shift 2 ;;
    --cpus) cpus=$2 && shift 2 ;;
    --timeout) timeout=$2 && shift 2 ;;
    --network) network=$2 && shift 2 ;;
    --env) variables+=("$2") && shift 2 ;;
    --console) show_console=1 && shift ;;
    --prepare) prepare_only=1 && shift ;;
    --) shift && break ;;
    *) fail "there is no option $1; the script's head lists them" ;;
    esac
done
[[ $network == dummy || $network == veth ]] || fail "--network is dummy or veth, not $network"
[[ $memory$cpus$timeout =~ ^[0-9]+$ ]] || fail "--memory, --cpus and --timeout are whole numbers"
((prepare_only)) || (($# >= 2)) || fail "usage: run.sh [options] [--] DIR COMMAND [ARGUMENT...]"

cache=$("$here/prepare.sh") || exit $?
((prepare_only)) && exit 0

folder=$(cd "$1" && pwd -P) || fail "there is no folder $1"
shift
control=$(mktemp -d "${TMPDIR:-/tmp}/softroce.XXXXXX")
qemu_process= readers=()
trap '[[ -z $qemu_process ]] || kill "$qemu_process" 2>/dev/null || true; rm -rf "$control"' EXIT
[[ $folder$control$cache != *[,\ ]* ]] || fail "qemu takes no commas or blanks in a path: $folder, $control or $cache has one"

# What the guest reads: where to work, what to run, and how the devices are joined.
printf '%s' "$folder" >"$control/folder"
printf '%s' "$cache/userland" >"$control/userland"
printf '%s' "$network" >"$control/network"
printf '%s' "$((timeout > 40 ? timeout - 30 : 10))" >"$control/patience"
cp "$here/guest.sh" "$control/guest.sh"
{
    printf '#!/bin/bash\ncd %q || exit 126\nexport PATH=%q HOME=%q\n' "$folder" "$PATH:/usr/sbin:/sbin" "$HOME"
    for variable in "${variables[@]}"; do printf 'export %q\n' "$variable"; done
    printf 'exec'
    printf ' %q' "$@"
    echo
} >"$control/command"

if command -v qemu-system-x86_64 >/dev/null; then
    qemu=(qemu-system-x86_64)
else
    libraries=$(find "$cache/qemu" -type d \( -path '*/lib/*-linux-gnu' -o -path '*/lib/*-linux-gnu/pulseaudio' \) | paste -sd:)
    qemu=(env "LD_LIBRARY_PATH=$libraries" "$cache/qemu/usr/bin/qemu-system-x86_64"
        -L "$cache/qemu/usr/share/qemu" -L "$cache/qemu/usr/share/seabios")
fi
share() {
    echo "-fsdev local,id=$1,path=$2,security_model=none,multidevs=remap${3-} -device virtio-9p-pci,fsdev=$1,mount_tag=$1"
}

# A guest takes ten seconds of a processor to come up. One that has not begun after this is started again, once.
boot_limit=200

boot() {
    local waited=0
    rm -f "$control"/{console,out,err}
    mkfifo "$control/out" "$control/err"
    cat "$control/out" &
    readers=($!)
    cat "$control/err" >&2 &
    readers+=($!)
    # shellcheck disable=SC2046  # shares are several words, and paths without blanks
    timeout --kill-after=5 "$timeout" "${qemu[@]}" \
        -machine q35,usb=off,graphics=off -accel tcg,thread=multi -cpu max -smp "$cpus" -m "$memory" \
        -nodefaults -no-user-config -display none -monitor none -no-reboot \
        -kernel "$cache/vmlinux" -initrd "$cache/initramfs" \
        -append "console=ttyS0 quiet panic=-1 mitigations=off nokaslr random.trust_cpu=on" \
        -serial "file:$control/console" -device virtio-serial-pci \
        -chardev "file,id=out,path=$control/out" -device virtserialport,nr=1,chardev=out,name=out \
        -chardev "file,id=err,path=$control/err" -device virtserialport,nr=2,chardev=err,name=err \
        $(share root / ,readonly=on) $(share folder "$folder") $(share control "$control") \
        </dev/null 2>"$control/qemu" &
    qemu_process=$!
    while [[ ! -e $control/begun ]] && kill -0 "$qemu_process" 2>/dev/null && ((waited < boot_limit * 5)); do
        sleep 0.2
        waited=$((waited + 1))
    done
    if [[ ! -e $control/begun ]] && kill "$qemu_process" 2>/dev/null; then
        echo "softroce: the guest has not begun after $boot_limit s" >&2
    fi
    ended=0
    wait "$qemu_process" || ended=$?
    qemu_process=
    # A qemu that never opened the pipes would leave their readers waiting.
    : <>"$control/out" <>"$control/err"
    wait "${readers[@]}"
}

ended=0
for _ in 1 2; do
    boot
    [[ -e $control/begun ]] && break
done
((show_console)) && cat "$control/console" >&2
[[ -s $control/code ]] && exit "$(cat "$control/code")"

((show_console)) || tail -n 200 "$control/console" >&2 || true
cat "$control/qemu" >&2
if ((ended == 124 || ended == 137)); then
    echo "softroce: ended after $timeout s; --timeout allows more" >&2
    exit 124
fi
echo "softroce: the guest ended before the command did (qemu: $ended); its console is above" >&2
exit 125
