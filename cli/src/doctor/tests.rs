//! The rows of machines that are not this one: trees of files as kernels write them.

use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use super::root::Root;
use super::row::{Row, State, table};
use super::{machine, network, rdma};

/// A tree that is gone with its value.
struct Tree(PathBuf);

impl Tree {
    fn new(files: &[(&str, &str)]) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let tree = Self(std::env::temp_dir().join(format!("kvferry-doctor-{}-{number}", std::process::id())));
        fs::create_dir_all(&tree.0).unwrap();
        for (path, text) in files {
            let path = tree.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
        tree
    }

    fn root(&self) -> Root {
        Root::at(&self.0)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        // A temporary folder that stays is no failure.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The row's state and text must be these; a row that is not well says how to mend it.
fn is(row: &Row, state: State, found: &str) {
    assert_eq!(row.state, state, "{row:?}");
    assert!(row.found.contains(found), "{row:?} has no {found:?}");
    assert_eq!(row.mend.is_some(), state != State::Ok, "{row:?}");
}

#[test]
fn cores_and_nodes_are_counted() {
    let nodes = [("sys/devices/system/node/node0/cpulist", "0-31"), ("sys/devices/system/node/node1/cpulist", "32-63")];
    let two = Tree::new(
        &[&[("sys/devices/system/cpu/online", "0-63"), ("sys/devices/system/node/online", "0-1")], &nodes[..]].concat(),
    );
    let row = machine::cores(&two.root(), 64);
    is(&row, State::Note, "64 cores online, 64 for this process, 2 NUMA nodes");
    assert!(row.mend.unwrap().contains("numactl"));
    let one = Tree::new(&[("sys/devices/system/cpu/online", "0-3"), nodes[0]]);
    is(&machine::cores(&one.root(), 4), State::Ok, "1 NUMA node");
    is(&machine::cores(&one.root(), 1), State::Note, "1 for this process");
    is(&machine::cores(&Tree::new(&[]).root(), 2), State::Ok, "2 cores online");
}

#[test]
fn huge_pages_and_memory_are_told_from_their_files() {
    let info = "MemTotal:       25165824 kB\nMemAvailable:   12582912 kB\nHugePages_Free:       3\nHugepagesize:       2048 kB";
    let tree = |thp, shmem| {
        let folder = "sys/kernel/mm/transparent_hugepage";
        Tree::new(&[
            ("proc/meminfo", info),
            (&format!("{folder}/enabled"), thp),
            (&format!("{folder}/shmem_enabled"), shmem),
        ])
    };
    let good = tree("always [madvise] never", "always within_size [advise] never deny force");
    let rows = machine::memory(&good.root());
    is(&rows[0], State::Ok, "12.0 GiB of 24.0 GiB available");
    is(&rows[1], State::Ok, "madvise; 3 reserved pages of 2048 KiB free");
    is(&rows[2], State::Ok, "advise");
    let bad = tree("always madvise [never]", "always within_size advise [never] deny force");
    let rows = machine::memory(&bad.root());
    is(&rows[1], State::Note, "never");
    is(&rows[2], State::Note, "never");
    assert!(rows[1].mend.as_ref().unwrap().contains("echo madvise >"), "{rows:?}");
    for row in machine::memory(&Tree::new(&[]).root()) {
        assert_eq!(row.state, State::Note, "{row:?}");
    }
}

#[test]
fn limits_are_the_soft_ones() {
    let limits = "Limit                     Soft Limit           Hard Limit           Units\n\
                  Max open files            1024                 524288               files\n\
                  Max locked memory         8388608              unlimited            bytes";
    let rows = machine::limits(&Tree::new(&[("proc/self/limits", limits)]).root());
    is(&rows[0], State::Note, "at most 8192 KiB");
    assert!(rows[0].mend.as_ref().unwrap().contains("ulimit -l unlimited"));
    is(&rows[1], State::Note, "at most 1024");
    let limits = limits.replace("8388608 ", "unlimited ").replace("1024 ", "65536 ");
    let rows = machine::limits(&Tree::new(&[("proc/self/limits", &limits)]).root());
    is(&rows[0], State::Ok, "no limit");
    is(&rows[1], State::Ok, "65536");
}

#[test]
fn a_slow_clock_is_seen() {
    let path = "sys/devices/system/clocksource/clocksource0/current_clocksource";
    is(&machine::clock(&Tree::new(&[(path, "tsc")]).root())[0], State::Ok, "tsc");
    is(&machine::clock(&Tree::new(&[(path, "hpet")]).root())[0], State::Note, "hpet");
    is(&machine::clock(&Tree::new(&[]).root())[0], State::Note, "unknown");
}

fn card<'a>(name: &str, files: &[(&str, &'a str)]) -> Vec<(String, &'a str)> {
    files.iter().map(|(file, text)| (format!("sys/class/net/{name}/{file}"), *text)).collect()
}

fn tree_of(files: &[(String, &str)]) -> Tree {
    Tree::new(&files.iter().map(|(path, text)| (path.as_str(), *text)).collect::<Vec<_>>())
}

#[test]
fn interfaces_have_their_addresses_speed_and_mtu() {
    let files = [
        card("lo", &[("type", "772"), ("mtu", "65536"), ("operstate", "unknown")]),
        card("eth0", &[("type", "1"), ("mtu", "1500"), ("operstate", "up"), ("speed", "100000")]),
        card("eth1", &[("type", "1"), ("mtu", "9000"), ("operstate", "up"), ("speed", "100000")]),
        card("eth2", &[("type", "1"), ("mtu", "1500"), ("operstate", "up"), ("speed", "1000")]),
        card("eth3", &[("type", "1"), ("mtu", "1500"), ("operstate", "up"), ("speed", "-1")]),
        card("idle", &[("type", "1"), ("mtu", "1500"), ("operstate", "down")]),
    ]
    .concat();
    let tree = tree_of(&files);
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    let addresses: Vec<(String, IpAddr)> = [
        ("lo", "127.0.0.1"),
        ("lo", "::1"),
        ("eth0", "10.0.0.7"),
        ("eth1", "10.0.1.7"),
        ("eth2", "10.0.2.7"),
        ("eth3", "10.0.3.7"),
    ]
    .map(|(name, text)| (name.to_owned(), ip(text)))
    .into();
    let rows = network::interfaces(&tree.root(), &addresses);
    let row = |name: &str| rows.iter().find(|row| row.found.starts_with(name)).unwrap();
    is(row("lo"), State::Ok, "127.0.0.1, ::1; loopback, MTU 65536");
    is(row("eth0"), State::Note, "10.0.0.7; 100 Gbit/s, MTU 1500");
    is(row("eth1"), State::Ok, "MTU 9000");
    is(row("eth2"), State::Note, "1 Gbit/s");
    is(row("eth3"), State::Ok, "speed unknown");
    assert!(!rows.iter().any(|row| row.found.starts_with("idle")), "it has no address: {rows:?}");
    let alone = network::interfaces(&tree.root(), &addresses[..2]);
    is(alone.last().unwrap(), State::Note, "no address but loopback");
}

#[test]
fn small_socket_buffers_are_named_with_the_command_that_raises_them() {
    let files = |core: &'static str, tcp: &'static str| {
        Tree::new(&[
            ("proc/sys/net/core/rmem_max", core),
            ("proc/sys/net/core/wmem_max", core),
            ("proc/sys/net/ipv4/tcp_rmem", tcp),
            ("proc/sys/net/ipv4/tcp_wmem", tcp),
        ])
    };
    let rows = network::buffers(&files("212992", "4096 16384 1048576").root());
    is(&rows[0], State::Note, "rmem_max 208 KiB");
    assert!(rows[0].mend.as_ref().unwrap().contains("sysctl -w net.core.rmem_max=524288"));
    is(&rows[1], State::Note, "grow to 1024 KiB");
    let rows = network::buffers(&files("4194304", "4096\t16384\t6291456").root());
    is(&rows[0], State::Ok, "4096 KiB");
    is(&rows[1], State::Ok, "6144 KiB");
    for row in network::buffers(&Tree::new(&[]).root()) {
        is(&row, State::Note, "unknown");
    }
}

/// An Ethernet card with three GIDs that are set, and one that is not.
const ROCE: &[(&str, &str)] = &[
    ("device/numa_node", "1"),
    ("ports/1/state", "4: ACTIVE"),
    ("ports/1/phys_state", "5: LinkUp"),
    ("ports/1/link_layer", "Ethernet"),
    ("ports/1/rate", "100 Gb/sec (4X EDR)"),
    ("ports/1/gids/0", "fe80:0000:0000:0000:0a00:27ff:fe00:0001"),
    ("ports/1/gid_attrs/types/0", "IB/RoCE v1"),
    ("ports/1/gid_attrs/ndevs/0", "eth1"),
    ("ports/1/gids/1", "0000:0000:0000:0000:0000:ffff:0a00:0107"),
    ("ports/1/gid_attrs/types/1", "IB/RoCE v1"),
    ("ports/1/gids/3", "0000:0000:0000:0000:0000:ffff:0a00:0107"),
    ("ports/1/gid_attrs/types/3", "RoCE v2"),
    ("ports/1/gid_attrs/ndevs/3", "eth1"),
    ("ports/1/gids/4", "0000:0000:0000:0000:0000:0000:0000:0000"),
];

fn with_device(files: &[(&str, &'static str)], verbs: bool) -> Tree {
    let mut all: Vec<(String, &str)> =
        files.iter().map(|(path, text)| (format!("sys/class/infiniband/mlx5_0/{path}"), *text)).collect();
    if verbs {
        all.push(("dev/infiniband/uverbs0".to_owned(), ""));
    }
    tree_of(&all)
}

#[test]
fn an_rdma_port_is_told_with_its_gids_in_words() {
    let rows = rdma::devices(&with_device(ROCE, true).root());
    assert_eq!(rows.len(), 1, "{rows:?}");
    is(&rows[0], State::Ok, "mlx5_0 port 1: ACTIVE, LinkUp, Ethernet, 100 Gb/sec (4X EDR), NUMA node 1");
    is(&rows[0], State::Ok, "GID 0: IB/RoCE v1, fe80::a00:27ff:fe00:1 (this link only) of eth1");
    is(&rows[0], State::Ok, "GID 3: RoCE v2, IPv4 10.0.1.7 of eth1");
    assert!(!rows[0].found.contains("GID 4"), "an empty place is none: {}", rows[0].found);
}

#[test]
fn what_keeps_an_rdma_port_from_use_is_said() {
    let without: Vec<_> = ROCE.iter().copied().filter(|(path, _)| !path.contains("gids/3")).collect();
    let rows = rdma::devices(&with_device(&without, true).root());
    is(&rows[0], State::Note, "GID 1");
    assert!(rows[0].mend.as_ref().unwrap().contains("no RoCE v2 GID"));
    let down: Vec<_> =
        ROCE.iter().map(|&(path, text)| (path, if path.ends_with("/state") { "1: DOWN" } else { text })).collect();
    is(&rdma::devices(&with_device(&down, true).root())[0], State::Note, "DOWN");
    let rows = rdma::devices(&with_device(ROCE, false).root());
    is(&rows[1], State::Note, "not reachable");
    assert!(rows[1].mend.as_ref().unwrap().contains("modprobe ib_uverbs"));
    is(&rdma::devices(&Tree::new(&[]).root())[0], State::Note, "no device");
}

#[test]
fn a_table_says_under_a_row_how_to_mend_it() {
    let text = table(&[Row::ok("clock", "tsc"), Row::broken("key", "differs", "give both the same")]);
    assert_eq!(text, "ok     clock  tsc\nBROKEN key    differs\n              -> give both the same\n");
}
