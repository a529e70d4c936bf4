//! Rails: more addresses of a node that carry payload, one for each network card.

use std::net::{IpAddr, SocketAddr};

use kvferry_protocol::PeerId;

/// Where a data lane goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Way {
    /// The local address to dial from; the system's choice without one.
    pub(crate) from: Option<IpAddr>,
    pub(crate) to: SocketAddr,
    /// Whether it is a rail: another way is tried if this one is closed.
    pub(crate) is_rail: bool,
}

impl Way {
    /// The address that the peer is known by.
    pub(crate) fn main(to: SocketAddr) -> Self {
        Self { from: None, to, is_rail: false }
    }
}

/// Spreads lanes over the address that was dialled and the peer's rails, in turn.
///
/// A rail is dialled from the one of ours that is nearest to it: with which it shares most leading bits, and of several such the
/// one at the same place in its list, so that cards of one subnet are joined one to one.
pub(crate) fn spread(lanes: usize, main: SocketAddr, ours: &[IpAddr], theirs: &[SocketAddr]) -> Vec<Way> {
    let rails = theirs.iter().enumerate().map(|(at, &to)| {
        let near = ours.iter().enumerate().filter(|(_, from)| from.is_ipv4() == to.is_ipv4());
        let from = near.max_by_key(|&(place, from)| (shared_bits(*from, to.ip()), place == at));
        Way { from: from.map(|(_, &from)| from), to, is_rail: true }
    });
    let ways: Vec<Way> = std::iter::once(Way::main(main)).chain(rails).collect();
    ways.into_iter().cycle().take(lanes).collect()
}

/// Says that a rail could not be used.
pub(crate) fn warn_closed(peer: &PeerId, way: Way, reason: &dyn std::fmt::Display) {
    let from = way.from.map_or_else(|| "any address".to_owned(), |from| from.to_string());
    tracing::warn!(%peer, rail = %way.to, %from, %reason, "a rail cannot be used; its lane goes over the peer's main address");
}

fn shared_bits(a: IpAddr, b: IpAddr) -> u32 {
    match (a.to_canonical(), b.to_canonical()) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn at(texts: &[&str]) -> Vec<SocketAddr> {
        ips(texts).into_iter().map(|ip| SocketAddr::new(ip, 1)).collect()
    }

    #[test]
    fn lanes_go_over_all_in_turn_each_from_the_nearest_of_ours() {
        let main = "10.0.0.9:7400".parse().unwrap();
        for (name, ours, theirs, want) in [
            ("no rails", &["10.1.0.5"][..], &[][..], &[None, None, None, None][..]),
            (
                "a subnet each",
                &["10.2.0.5", "10.1.0.5"],
                &["10.1.0.9", "10.2.0.9"],
                &[None, Some("10.1.0.5"), Some("10.2.0.5"), None],
            ),
            (
                "one subnet",
                &["10.1.0.16", "10.1.0.17"],
                &["10.1.0.64", "10.1.0.65"],
                &[None, Some("10.1.0.16"), Some("10.1.0.17"), None],
            ),
            ("none of ours", &[], &["10.1.0.9"], &[None, None, None, None]),
            ("another family", &["fd00::1"], &["10.1.0.9"], &[None, None, None, None]),
        ] {
            let ways = spread(4, main, &ips(ours), &at(theirs));
            let from: Vec<Option<IpAddr>> = ways.iter().map(|way| way.from).collect();
            let want: Vec<Option<IpAddr>> = want.iter().map(|want| want.map(|ip| ip.parse().unwrap())).collect();
            assert_eq!(from, want, "{name}");
            let mut to: Vec<SocketAddr> = ways.iter().map(|way| way.to).collect();
            to.dedup();
            assert_eq!(to.len(), if theirs.is_empty() { 1 } else { 4 }, "{name}: {ways:?}");
            assert!(ways.iter().all(|way| way.is_rail == (way.to != main)), "{name}");
        }
    }
}
