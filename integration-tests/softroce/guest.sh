# Runs in the guest, as its first process: brings soft-RoCE up, runs the command and turns the guest off.
busybox=/run/bin/busybox
export PATH=$PATH:/usr/sbin:/sbin SOFTROCE_DEVICE=rxe0 SOFTROCE_ADDRESS=10.9.0.1
ulimit -l unlimited

# What the host lacks, into the throw-away layer; what it has stays as it is.
userland=$(cat /run/control/userland)
for folder in "$userland"/*/; do
    cp -an "$folder." "/$(basename "$folder")/"
done

up() {
    # An IB packet of 4096 bytes fits.
    ip link set "$1" mtu 9000
    ip addr add "$2/24" dev "$1"
    ip link set "$1" up
}

set_network() {
    echo "$2" >"/proc/sys/net/ipv4/conf/$1"
}

ip link set lo up
case $(cat /run/control/network) in
dummy)
    ip link add rx0 type dummy
    up rx0 10.9.0.1
    rdma link add rxe0 type rxe netdev rx0
    ;;
veth)
    # rxe of this kernel knows one network namespace only. So that packets between two addresses of one host take the wire, they
    # are routed by rules of their own before the kernel finds that both addresses are its own.
    ip link add rx0 type veth peer name rx1
    for i in 0 1; do
        set_network rx$i/accept_local 1
        set_network rx$i/rp_filter 0
        set_network rx$i/arp_ignore 1
        set_network rx$i/arp_announce 2
        up rx$i 10.9.0.$((i + 1))
        ip route add 10.9.0.$((2 - i)) dev rx$i table 1$i
        ip rule add pref 1 iif rx$i lookup local
        ip rule add pref 2 from 10.9.0.$((i + 1)) to 10.9.0.$((2 - i)) lookup 1$i
    done
    set_network all/rp_filter 0
    ip rule add pref 3 lookup local
    ip rule del pref 0
    for i in 0 1; do rdma link add rxe$i type rxe netdev rx$i; done
    export SOFTROCE_DEVICE2=rxe1 SOFTROCE_ADDRESS2=10.9.0.2
    ;;
esac

# Shortly before the guest is ended, what hangs in its kernel goes to the console, which is shown then.
(
    $busybox sleep "$(cat /run/control/patience)"
    echo 8 >/proc/sys/kernel/printk
    echo w >/proc/sysrq-trigger
    echo l >/proc/sysrq-trigger
) &

code=126
if [ -e /sys/class/infiniband/rxe0 ]; then
    : >/run/control/begun
    $busybox setsid bash /run/control/command </dev/null >/dev/vport0p1 2>/dev/vport0p2
    code=$?
else
    : >/run/control/begun
    echo "softroce: rxe0 did not come up; see the console (--console)" >/dev/vport0p2
fi
echo $code >/run/control/code.new
mv /run/control/code.new /run/control/code
$busybox sync
$busybox reboot -f
