//! Payload over several addresses of a node, as over several network cards.

mod common;

use std::net::{SocketAddr, TcpListener};
use std::time::Instant;

use common::{address, config, key, node};
use kvferry_protocol::wire::{
    ClusterKeys, Identity, LaneIdentity, Listener, Offer, OfferKind, PeerIdentity, Step, VERSIONS, Verdict, put_rails,
};
use kvferry_transport::TcpConfigFile;
use kvferry_transport::testing::{Node, PATIENCE, peer};

const MIB: usize = 1 << 20;

fn with_rails(rails: &[[u8; 4]]) -> TcpConfigFile {
    let rails = rails.iter().map(|ip| SocketAddr::from((*ip, 0))).collect();
    TcpConfigFile { rails, lanes_same_host: 3, ..config() }
}

/// Both ends of each connection of this process that is up, as `/proc` has them.
fn connections(of: &Node) -> Vec<(String, String)> {
    let port = format!(":{:04X}", address(of).port());
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let rows = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let up = rows.filter(|row| row[3] == "01").map(|row| (row[1].to_owned(), row[2].to_owned()));
    let rails = ["0200007F:", "0300007F:"];
    up.filter(|(_, to)| to.ends_with(&port) || rails.iter().any(|rail| to.starts_with(rail))).collect()
}

fn exchange(a: &mut Node, b: &mut Node) {
    for round in 0..8 {
        a.memory.fill(0, 4 * MIB, round + 1);
        let grant = b.grant(&a.peer, 0, 4 * MIB as u64);
        let post = a.post(&b.peer, grant, 0, 0, 0, 4 * MIB as u64);
        b.wait_landed(grant);
        a.wait_posted(post).unwrap();
        b.transport.revoke(grant);
        assert!(b.memory.is_all(0, 4 * MIB, round + 1));
    }
}

#[test]
fn lanes_go_over_every_rail_each_from_one_of_ours() {
    let mut a = node("a", with_rails(&[[127, 0, 0, 4], [127, 0, 0, 5]]), 4 * MIB);
    let mut b = node("b", with_rails(&[[127, 0, 0, 2], [127, 0, 0, 3]]), 4 * MIB);
    a.meet(&mut b);
    let found = connections(&b);
    for (from, to) in [("0400007F:", "0200007F:"), ("0500007F:", "0300007F:")] {
        let is_it = |(ours, theirs): &(String, String)| ours.starts_with(from) && theirs.starts_with(to);
        assert!(found.iter().any(is_it), "{from} to {to}: {found:?}");
    }
    exchange(&mut a, &mut b);
    exchange(&mut b, &mut a);
}

/// A listener by hand that names a rail where nobody listens: every lane comes to its main address.
#[test]
fn a_rail_that_is_closed_is_left_for_the_main_address() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let closed = TcpListener::bind("127.0.0.2:0").unwrap().local_addr().unwrap();
    let main = listener.local_addr().unwrap();
    let mut a = node("a", with_rails(&[]), 4096);
    a.transport.connect(&kvferry_transport::PeerAddress::Tcp(main)).unwrap();
    let offers = vec![Offer { kind: OfferKind::TCP, parameters: put_rails(&[closed]) }];
    let (mut lanes, mut secret) = (Vec::new(), None);
    let mut streams = Vec::new();
    while lanes.len() < 3 {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let deadline = Instant::now() + PATIENCE;
        let mut machine = Listener::new(ClusterKeys::from(key()), VERSIONS, [9; 32], deadline, false);
        let said = loop {
            use std::io::{Read, Write};
            if let Some(output) = machine.poll_output() {
                stream.write_all(&output).unwrap();
            }
            let mut input = vec![0; machine.wants()];
            stream.read_exact(&mut input).unwrap();
            if let Step::Said(identity) = machine.feed(&input).unwrap() {
                break identity;
            }
        };
        let verdict = match said {
            Identity::Peer(PeerIdentity { lanes, .. }) => {
                secret = machine.session().map(|(_, secret)| secret);
                Verdict::Peer(PeerIdentity {
                    peer: peer("b", 1),
                    lanes,
                    session: 7,
                    greeting: vec![],
                    offers: offers.clone(),
                })
            }
            Identity::Lane(lane @ LaneIdentity { .. }) => {
                assert!(machine.binds(&lane, secret.as_ref().unwrap()));
                lanes.push(lane.lane);
                Verdict::Lane
            }
        };
        machine.judge(&verdict);
        std::io::Write::write_all(&mut stream, &machine.poll_output().unwrap()).unwrap();
        streams.push(stream);
    }
    lanes.sort_unstable();
    assert_eq!(lanes, [0, 1, 2]);
    a.wait_up(&peer("b", 1));
}
