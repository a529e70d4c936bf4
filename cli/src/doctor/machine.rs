//! Processor, memory and limits of this machine, from its files.

use super::root::{Root, chosen, count_of};
use super::row::Row;
use crate::size::Size;

/// Cores and NUMA nodes; `usable`: how many cores this process may use.
pub(crate) fn cores(root: &Root, usable: usize) -> Row {
    let online = root.text("sys/devices/system/cpu/online").map_or(usable, |list| count_of(&list));
    let nodes = root.names("sys/devices/system/node").into_iter().filter(|name| {
        name.strip_prefix("node").is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
    });
    let nodes = nodes.count().max(1);
    let found = format!("{online} cores online, {usable} for this process, {nodes} NUMA node{}", plural(nodes));
    if usable < 2 {
        let mend =
            "data threads and the engine share one core: give the process more (taskset, cpuset, container limits)";
        return Row::note("cores", found, mend);
    }
    if nodes > 1 {
        let mend = "keep an engine, its cache and its network card on one node: numactl --cpunodebind=N --membind=N";
        return Row::note("cores", found, mend);
    }
    Row::ok("cores", found)
}

/// Vector instructions of the kernels: digests and attention.
pub(crate) fn simd() -> Row {
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        if avx2 && is_x86_feature_detected!("avx512f") {
            return Row::ok("vector instructions", "AVX-512F");
        }
        if avx2 {
            return Row::ok("vector instructions", "AVX2 with FMA and F16C");
        }
    }
    let mend = "attention takes the portable kernels, with the same results, slower: they know AVX2 and AVX-512F";
    Row::note("vector instructions", "none that the kernels know", mend)
}

/// Memory, and what of it is there in huge pages.
pub(crate) fn memory(root: &Root) -> Vec<Row> {
    let info = root.text("proc/meminfo").unwrap_or_default();
    let value = |key: &str| -> Option<u64> {
        let line = info.lines().find(|line| line.split(':').next() == Some(key))?;
        line.split_ascii_whitespace().nth(1)?.parse().ok()
    };
    let kib = |key: &str| value(key).map(|kib| kib << 10);
    let mut rows = Vec::new();
    rows.push(match (kib("MemTotal"), kib("MemAvailable")) {
        (Some(total), Some(available)) => Row::ok("memory", format!("{} of {} available", gib(available), gib(total))),
        _ => Row::note("memory", "unknown", "/proc/meminfo cannot be read: is /proc mounted?"),
    });
    let (free, size) = (value("HugePages_Free").unwrap_or(0), kib("Hugepagesize").unwrap_or(0));
    let reserved = format!("{free} reserved pages of {} free", Size(size));
    rows.push(huge_pages(root.text("sys/kernel/mm/transparent_hugepage/enabled").as_deref(), &reserved));
    let shared = root.text("sys/kernel/mm/transparent_hugepage/shmem_enabled");
    rows.push(shared_huge_pages(shared.as_deref()));
    rows
}

fn huge_pages(setting: Option<&str>, reserved: &str) -> Row {
    const NAME: &str = "huge pages";
    const SET: &str = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root): caches ask for huge pages, and copies \
                       of cold blocks are faster with them";
    match setting.and_then(chosen) {
        Some(word @ ("always" | "madvise")) => Row::ok(NAME, format!("transparent: {word}; {reserved}")),
        Some(word) => Row::note(NAME, format!("transparent: {word}; {reserved}"), SET),
        None => Row::note(
            NAME,
            format!("not transparent in this kernel; {reserved}"),
            "a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
        ),
    }
}

fn shared_huge_pages(setting: Option<&str>) -> Row {
    const NAME: &str = "huge pages, shared";
    match setting.and_then(chosen) {
        Some(word @ ("always" | "within_size" | "advise" | "force")) => Row::ok(NAME, word),
        found => {
            let mend = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (as root): memory that processes share is \
                        else in 4 KiB pages";
            Row::note(NAME, found.unwrap_or("unknown"), mend)
        }
    }
}

/// Limits of this process.
pub(crate) fn limits(root: &Root) -> Vec<Row> {
    let text = root.text("proc/self/limits").unwrap_or_default();
    // `Max locked memory         8388608              8388608              bytes`: the soft limit follows the name.
    let soft = |name: &str| -> Option<String> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_ascii_whitespace().next().map(str::to_owned)
    };
    vec![locked_memory(soft("Max locked memory").as_deref()), open_files(soft("Max open files").as_deref())]
}

fn locked_memory(soft: Option<&str>) -> Row {
    const NAME: &str = "locked memory";
    let mend = "RDMA pins whole caches: ulimit -l unlimited, LimitMEMLOCK=infinity in a unit, --ulimit memlock=-1 in a container";
    match soft {
        Some("unlimited") => Row::ok(NAME, "no limit"),
        Some(bytes) => {
            let shown = bytes.parse().map_or_else(|_| bytes.to_owned(), |bytes| Size(bytes).to_string());
            Row::note(NAME, format!("at most {shown}"), mend)
        }
        None => Row::note(NAME, "unknown", mend),
    }
}

fn open_files(soft: Option<&str>) -> Row {
    const NAME: &str = "open files";
    // A peer takes a control lane and two to four data lanes.
    match soft.and_then(|soft| soft.parse::<u64>().ok()) {
        Some(count) if count < 4096 => {
            let mend = "each peer takes up to 5 sockets: ulimit -n 65536, or LimitNOFILE=65536 in a unit";
            Row::note(NAME, format!("at most {count}"), mend)
        }
        Some(count) => Row::ok(NAME, format!("at most {count}")),
        None => Row::ok(NAME, soft.unwrap_or("unknown").to_owned()),
    }
}

/// What tells time, and what tells hosts apart.
pub(crate) fn clock(root: &Root) -> Vec<Row> {
    let source = root.text("sys/devices/system/clocksource/clocksource0/current_clocksource");
    let clock = match source.as_deref() {
        Some(fast @ ("tsc" | "arch_sys_counter" | "kvm-clock" | "hyperv_clocksource_tsc_page")) => {
            Row::ok("clock", fast)
        }
        Some(slow) => {
            let mend = "reading the time is a system call: see why the kernel gave up the fast one (dmesg | grep -i clocksource)";
            Row::note("clock", slow, mend)
        }
        None => Row::note("clock", "unknown", "/sys/devices/system/clocksource is not there: is /sys mounted?"),
    };
    let boot = match root.text("proc/sys/kernel/random/boot_id") {
        Some(id) => Row::ok("boot id", id),
        None => Row::note(
            "boot id",
            "unknown",
            "processes of one host cannot be told from those of others: is /proc mounted?",
        ),
    };
    vec![clock, boot]
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}
