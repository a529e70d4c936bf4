//! Interfaces and sockets of this machine.

use std::net::IpAddr;

use super::root::Root;
use super::row::Row;
use crate::size::Size;

/// What the transport asks the kernel for, each way, between processes of one host.
const WANTED_BUFFER: u64 = 512 << 10;
/// What a connection of 100 Gbit/s over 1 ms needs.
const WANTED_FAR: u64 = 16 << 20;

/// One row for each interface that is up; `addresses` as the system told them.
pub(crate) fn interfaces(root: &Root, addresses: &[(String, IpAddr)]) -> Vec<Row> {
    let mut rows = Vec::new();
    for name in root.names("sys/class/net") {
        let ips: Vec<String> = addresses.iter().filter(|(of, _)| *of == name).map(|(_, ip)| ip.to_string()).collect();
        if !ips.is_empty() {
            rows.push(interface(root, &name, &ips.join(", ")));
        }
    }
    if !addresses.iter().any(|(_, ip)| !ip.is_loopback()) {
        let mend = "only processes of this host can be reached: give an interface an address (ip addr add)";
        rows.push(Row::note("network", "no address but loopback", mend));
    }
    rows
}

fn interface(root: &Root, name: &str, ips: &str) -> Row {
    let number = |file: &str| root.number(&format!("sys/class/net/{name}/{file}"));
    let mtu = number("mtu").unwrap_or(0);
    // ARPHRD_LOOPBACK of linux/if_arp.h.
    let is_loopback = number("type") == Some(772);
    // Megabits a second; -1 or no value where the driver does not know, as in most virtual machines.
    let speed = number("speed").filter(|speed| *speed > 0);
    let state = root.text(&format!("sys/class/net/{name}/operstate")).unwrap_or_default();
    let shown = match (is_loopback, speed) {
        (true, _) => "loopback".to_owned(),
        (false, Some(megabits)) => format!("{} Gbit/s", megabits as f64 / 1000.0),
        (false, None) => "speed unknown".to_owned(),
    };
    let found = format!("{name}: {ips}; {shown}, MTU {mtu}");
    if state == "down" {
        return Row::note("interface", format!("{found}, down"), format!("ip link set {name} up"));
    }
    if speed.is_some_and(|megabits| megabits >= 25_000) && mtu < 9000 {
        let mend = format!(
            "packets of 1500 bytes cost CPU at this speed: ip link set {name} mtu 9000, here and on the switch"
        );
        return Row::note("interface", found, mend);
    }
    if speed.is_some_and(|megabits| megabits < 10_000) {
        return Row::note(
            "interface",
            found,
            "KV cache wants 10 Gbit/s or more: advertise an address of a faster card if there is one",
        );
    }
    Row::ok("interface", found)
}

/// Limits of socket buffers.
pub(crate) fn buffers(root: &Root) -> Vec<Row> {
    let limit =
        |name: &str| root.number(&format!("proc/sys/net/core/{name}")).and_then(|limit| u64::try_from(limit).ok());
    let near = match (limit("rmem_max"), limit("wmem_max")) {
        (Some(read), Some(write)) => {
            let found = format!("rmem_max {}, wmem_max {}", Size(read), Size(write));
            if read.min(write) < WANTED_BUFFER {
                let mend = format!(
                    "lanes between processes of one host ask for {}: sysctl -w net.core.rmem_max={WANTED_BUFFER} \
                     net.core.wmem_max={WANTED_BUFFER}",
                    Size(WANTED_BUFFER)
                );
                Row::note("socket buffers", found, mend)
            } else {
                Row::ok("socket buffers", found)
            }
        }
        // A network namespace of its own does not show them.
        _ => Row::note(
            "socket buffers",
            "unknown",
            "net.core.rmem_max is not shown here: look on the host, outside of the container",
        ),
    };
    let most = |name: &str| -> Option<u64> {
        root.text(&format!("proc/sys/net/ipv4/{name}"))?.split_ascii_whitespace().nth(2)?.parse().ok()
    };
    let far = match (most("tcp_rmem"), most("tcp_wmem")) {
        (Some(read), Some(write)) => {
            let found = format!("grow to {} read, {} write", Size(read), Size(write));
            if read.min(write) < 4 << 20 {
                let mend = format!(
                    "a fast path between hosts needs more: sysctl -w net.ipv4.tcp_rmem='4096 131072 {WANTED_FAR}' \
                     net.ipv4.tcp_wmem='4096 65536 {WANTED_FAR}'"
                );
                Row::note("TCP buffers", found, mend)
            } else {
                Row::ok("TCP buffers", found)
            }
        }
        _ => Row::note("TCP buffers", "unknown", "net.ipv4.tcp_rmem is not shown here: is /proc mounted?"),
    };
    vec![near, far]
}
