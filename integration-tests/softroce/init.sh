#!/bin/busybox sh
# The guest's first process: loads the modules, lays a throw-away layer over the host's root, and goes on there.
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sysfs /sys
$b mount -t devtmpfs dev /dev
for module in $($b cat /modules/order); do
    $b insmod "/modules/$module" || echo "softroce: $module does not load"
done
nine=trans=virtio,version=9p2000.L,msize=512000
$b mount -t tmpfs -o size=75% layer /layer
$b mkdir /layer/upper /layer/work
$b mount -t 9p -o ro,cache=loose,$nine root /lower &&
    $b mount -t overlay -o lowerdir=/lower,upperdir=/layer/upper,workdir=/layer/work overlay /root ||
    $b reboot -f
for folder in proc sys dev; do $b mount --move /$folder /root/$folder; done
r=/root
$b mkdir -p $r/dev/shm $r/dev/pts $r/run $r/tmp
$b mount -t tmpfs tmpfs $r/dev/shm
$b mount -t devpts devpts $r/dev/pts
$b mount -t tmpfs tmpfs $r/run
$b chmod 1777 $r/tmp $r/dev/shm
$b mkdir -p $r/run/control $r/run/bin
$b mount -t 9p -o cache=none,$nine control $r/run/control
folder=$($b cat $r/run/control/folder)
$b mkdir -p "$r$folder"
$b mount -t 9p -o cache=mmap,$nine folder "$r$folder"
$b cp /bin/busybox $r/run/bin/busybox
exec $b switch_root $r /bin/bash /run/control/guest.sh
