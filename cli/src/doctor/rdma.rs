//! RDMA devices of this machine, from sysfs.

use std::net::Ipv6Addr;

use super::root::Root;
use super::row::Row;

const CLASS: &str = "sys/class/infiniband";

/// One row for each port, or one that says that there is none.
pub(crate) fn devices(root: &Root) -> Vec<Row> {
    let devices = root.names(CLASS);
    if devices.is_empty() {
        let mend =
            "the transport rdma needs a card and its driver, or soft-RoCE: rdma link add rxe0 type rxe netdev IFACE";
        return vec![Row::note("RDMA", "no device in /sys/class/infiniband", mend)];
    }
    let mut rows = Vec::new();
    for device in &devices {
        for port in root.names(&format!("{CLASS}/{device}/ports")) {
            rows.push(port_row(root, device, &port));
        }
    }
    if root.names("dev/infiniband").iter().all(|name| !name.starts_with("uverbs")) {
        let mend = "no /dev/infiniband/uverbs*: modprobe ib_uverbs, and in a container pass the devices (--device /dev/infiniband)";
        rows.push(Row::note("RDMA verbs", "not reachable from this process", mend));
    }
    rows
}

fn port_row(root: &Root, device: &str, port: &str) -> Row {
    let path = format!("{CLASS}/{device}/ports/{port}");
    let text = |file: &str| root.text(&format!("{path}/{file}"));
    // `4: ACTIVE`
    let word = |text: Option<String>| {
        let text = text.unwrap_or_default();
        text.split_once(": ").map_or(text.clone(), |(_, word)| word.to_owned())
    };
    let (state, physical) = (word(text("state")), word(text("phys_state")));
    let link = text("link_layer").unwrap_or_default();
    let numa = root.number(&format!("{CLASS}/{device}/device/numa_node")).filter(|node| *node >= 0);
    let near = numa.map_or_else(String::new, |node| format!(", NUMA node {node}"));
    let gids = gids(root, &path);
    let shown: Vec<&str> = gids.iter().map(|gid| gid.shown.as_str()).collect();
    let rate = text("rate").unwrap_or_default();
    let found =
        format!("{device} port {port}: {state}, {physical}, {link}, {rate}{near}; {}", or_none(&shown.join("; ")));
    if state != "ACTIVE" {
        let mend = match link.as_str() {
            "Ethernet" => "bring its interface up and give it an address (ip link set IFACE up)",
            _ => "plug the cable in, and see that a subnet manager runs (opensm)",
        };
        return Row::note("RDMA port", found, mend);
    }
    if link == "Ethernet" && !gids.iter().any(|gid| gid.is_routable) {
        let mend = "no RoCE v2 GID of an IP address: give its interface an IPv4 or a global IPv6 address (ip addr add)";
        return Row::note("RDMA port", found, mend);
    }
    Row::ok("RDMA port", found)
}

struct Gid {
    shown: String,
    /// RoCE v2 over an address that is not only of the link.
    is_routable: bool,
}

/// The GIDs that are set; a table has up to 256 places, most of them empty.
fn gids(root: &Root, port: &str) -> Vec<Gid> {
    let mut found = Vec::new();
    for index in root.names(&format!("{port}/gids")) {
        let Some(gid) = root.text(&format!("{port}/gids/{index}")).and_then(|text| text.parse::<Ipv6Addr>().ok())
        else {
            continue;
        };
        if gid.is_unspecified() {
            continue;
        }
        let kind = root.text(&format!("{port}/gid_attrs/types/{index}")).unwrap_or_else(|| "type unknown".to_owned());
        let over = root
            .text(&format!("{port}/gid_attrs/ndevs/{index}"))
            .map_or_else(String::new, |name| format!(" of {name}"));
        let (address, scope) = in_words(gid);
        let is_routable = kind == "RoCE v2" && scope != Scope::Link;
        found.push(Gid { shown: format!("GID {index}: {kind}, {address}{over}"), is_routable });
    }
    found
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Scope {
    Link,
    Wide,
}

fn in_words(gid: Ipv6Addr) -> (String, Scope) {
    match gid.to_ipv4_mapped() {
        Some(ip) => (format!("IPv4 {ip}"), Scope::Wide),
        None if gid.is_unicast_link_local() => (format!("{gid} (this link only)"), Scope::Link),
        None => (gid.to_string(), Scope::Wide),
    }
}

fn or_none(text: &str) -> &str {
    if text.is_empty() { "no GID" } else { text }
}
