//! Which address of a port peers are told: the choice among its GIDs, with the reason against each other one.

use std::fs;
use std::net::Ipv6Addr;
use std::path::Path;

/// One entry of a port's GID table, as `/sys/class/infiniband/<device>/ports/<port>` has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GidEntry {
    /// Its place in the table.
    pub index: u32,
    /// The address.
    pub gid: Ipv6Addr,
    /// `RoCE v2`, `IB/RoCE v1`; empty where the kernel does not say.
    pub kind: String,
    /// The network interface that it belongs to; empty on InfiniBand.
    pub interface: String,
}

/// What a configuration may ask of the choice.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GidWish {
    /// Exactly this entry.
    pub index: Option<u32>,
    /// Only entries of this network interface.
    pub interface: Option<String>,
}

/// The chosen entry.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GidChoice {
    /// It.
    pub entry: GidEntry,
    /// Why it.
    pub reason: &'static str,
    /// Each other entry, and why not it.
    pub rejected: Vec<String>,
}

/// Chooses the entry by which peers reach a port; without one, says why against each.
///
/// RoCE v2 travels in UDP, so routers carry it, and an IPv4-mapped GID is the one that peers of another subnet reach as they reach
/// the interface. Source: the GID table's documentation of the Linux kernel, `Documentation/ABI/stable/sysfs-class-infiniband`.
///
/// # Errors
/// The reasons, one an entry.
pub fn choose_gid(entries: &[GidEntry], is_infiniband: bool, wish: &GidWish) -> Result<GidChoice, Vec<String>> {
    let ranked: Vec<_> = entries.iter().map(|entry| (entry, rank(entry, is_infiniband, wish))).collect();
    let best = ranked.iter().filter_map(|(entry, rank)| rank.as_ref().ok().map(|rank| (*rank, entry.index))).min();
    let line = |entry: &GidEntry, why: &str| {
        let GidEntry { index, gid, kind, interface } = entry;
        format!("GID {index} {gid} ({kind}{}{interface}): {why}", if interface.is_empty() { "" } else { ", " })
    };
    let mut rejected = Vec::new();
    let mut chosen = None;
    for (entry, rank) in ranked {
        match rank {
            Err(why) => rejected.push(line(entry, &why)),
            Ok(rank) if Some((rank, entry.index)) == best => chosen = Some((entry.clone(), REASONS[rank])),
            Ok(_) => rejected.push(line(entry, "another one is better")),
        }
    }
    match chosen {
        Some((entry, reason)) => Ok(GidChoice { entry, reason, rejected }),
        None => Err(rejected),
    }
}

const REASONS: [&str; 4] = [
    "InfiniBand: the port is reached by its LID",
    "RoCE v2 with the interface's IPv4 address, which routers carry",
    "RoCE v2 with a global IPv6 address, which routers carry",
    "RoCE v2 with a link-local address: only peers on the same link are reached",
];

/// The lower, the better: an index of [`REASONS`].
fn rank(entry: &GidEntry, is_infiniband: bool, wish: &GidWish) -> Result<usize, String> {
    if entry.gid.is_unspecified() {
        return Err("it is empty".to_owned());
    }
    if let Some(index) = wish.index.filter(|index| *index != entry.index) {
        return Err(format!("the configuration asks for GID {index}"));
    }
    if let Some(interface) = wish.interface.as_ref().filter(|interface| **interface != entry.interface) {
        return Err(format!("it is not of the interface {interface}, which the configuration asks for"));
    }
    if is_infiniband {
        return Ok(0);
    }
    if !entry.kind.is_empty() && entry.kind != "RoCE v2" {
        return Err(format!("{} stays on one link, and peers may have no such entry", entry.kind));
    }
    Ok(match entry.gid.to_ipv4_mapped() {
        Some(address) if address.is_unspecified() => return Err("it is empty".to_owned()),
        Some(address) if address.is_link_local() => 3,
        Some(_) => 1,
        None if entry.gid.is_unicast_link_local() => 3,
        None => 2,
    })
}

/// A port's table, from a folder that is laid out as `/sys/class/infiniband/<device>/ports/<port>`; empty entries are left out.
pub(crate) fn read_gids(port: &Path) -> Vec<GidEntry> {
    let Ok(files) = fs::read_dir(port.join("gids")) else { return Vec::new() };
    let word = |folder: &str, index: u32| {
        // The kernel refuses to tell about an entry that is empty.
        let read = fs::read_to_string(port.join(folder).join(index.to_string()));
        read.map(|text| text.trim().to_owned()).unwrap_or_default()
    };
    let indices = files.flatten().filter_map(|file| file.file_name().to_str()?.parse().ok());
    let entry = |index: u32| {
        let gid: Ipv6Addr = word("gids", index).parse().ok()?;
        let (kind, interface) = (word("gid_attrs/types", index), word("gid_attrs/ndevs", index));
        (!gid.is_unspecified()).then_some(GidEntry { index, gid, kind, interface })
    };
    let mut entries: Vec<_> = indices.filter_map(entry).collect();
    entries.sort_by_key(|entry| entry.index);
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u32, gid: &str, kind: &str, interface: &str) -> GidEntry {
        GidEntry { index, gid: gid.parse().unwrap(), kind: kind.to_owned(), interface: interface.to_owned() }
    }

    fn table() -> Vec<GidEntry> {
        vec![
            entry(0, "fe80::1", "IB/RoCE v1", "eth0"),
            entry(1, "fe80::1", "RoCE v2", "eth0"),
            entry(2, "::ffff:10.0.0.1", "IB/RoCE v1", "eth0"),
            entry(3, "::ffff:10.0.0.1", "RoCE v2", "eth0"),
            entry(4, "2001:db8::1", "RoCE v2", "eth0"),
            entry(5, "::ffff:10.7.0.1", "RoCE v2", "eth0.7"),
            entry(6, "::", "RoCE v2", "eth0"),
        ]
    }

    #[test]
    fn the_best_gid_is_chosen_and_each_other_has_a_reason_against_it() {
        let wish = |index, interface: Option<&str>| GidWish { index, interface: interface.map(str::to_owned) };
        let without =
            |gone: &[u32]| table().into_iter().filter(|entry| !gone.contains(&entry.index)).collect::<Vec<_>>();
        for (name, entries, is_infiniband, wish, want) in [
            ("RoCE v2 with IPv4, the first", table(), false, wish(None, None), Some(3)),
            ("the interface that is asked for", table(), false, wish(None, Some("eth0.7")), Some(5)),
            ("the index that is asked for", table(), false, wish(Some(1), None), Some(1)),
            ("a RoCE v1 index that is asked for", table(), false, wish(Some(0), None), None),
            ("without IPv4 a global address", without(&[3, 5]), false, wish(None, None), Some(4)),
            ("without either a link-local one", without(&[3, 4, 5]), false, wish(None, None), Some(1)),
            ("only RoCE v1", without(&[1, 3, 4, 5]), false, wish(None, None), None),
            ("an interface that is not there", table(), false, wish(None, Some("eth9")), None),
            ("none", vec![], false, wish(None, None), None),
            (
                "a kernel that tells no kinds",
                vec![entry(0, "::ffff:10.0.0.1", "", "")],
                false,
                wish(None, None),
                Some(0),
            ),
            ("InfiniBand", vec![entry(0, "fe80::2", "IB/RoCE v1", "")], true, wish(None, None), Some(0)),
        ] {
            let count = entries.len();
            match (choose_gid(&entries, is_infiniband, &wish), want) {
                (Ok(choice), Some(index)) => {
                    assert_eq!(choice.entry.index, index, "{name}");
                    assert_eq!(choice.rejected.len(), count - 1, "{name}: {:?}", choice.rejected);
                }
                (Err(rejected), None) => assert_eq!(rejected.len(), count, "{name}: {rejected:?}"),
                (got, want) => panic!("{name}: {got:?}, wanted {want:?}"),
            }
        }
        let choice = choose_gid(&table(), false, &GidWish::default()).unwrap();
        let text = choice.rejected.join("\n");
        assert!(text.contains("GID 2 ::ffff:10.0.0.1 (IB/RoCE v1, eth0): IB/RoCE v1 stays on one link"), "{text}");
        assert!(text.contains("GID 6 :: (RoCE v2, eth0): it is empty"), "{text}");
    }

    #[test]
    fn a_table_is_read_as_the_kernel_lays_it_out() {
        let port = std::env::temp_dir().join(format!("kvferry-gids-{}", std::process::id()));
        for (file, text) in [
            ("gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001\n"),
            ("gids/1", "0000:0000:0000:0000:0000:ffff:0a09:0001\n"),
            ("gids/2", "0000:0000:0000:0000:0000:0000:0000:0000\n"),
            ("gid_attrs/types/0", "IB/RoCE v1\n"),
            ("gid_attrs/types/1", "RoCE v2\n"),
            ("gid_attrs/ndevs/1", "eth0\n"),
        ] {
            let path = port.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let read = read_gids(&port);
        fs::remove_dir_all(&port).unwrap();
        assert_eq!(read, [entry(0, "fe80::1", "IB/RoCE v1", ""), entry(1, "::ffff:10.9.0.1", "RoCE v2", "eth0")]);
        assert_eq!(read_gids(&port), []);
    }
}
