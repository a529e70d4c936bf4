//! What sessions that share memory leave behind: nothing. Alone in its process, since it counts that process's descriptors.

mod common;

use std::fs;

use bytes::Bytes;
use common::{config, key};
use kvferry_protocol::PeerId;
use kvferry_transport::testing::{Node, peer};
use kvferry_transport::{Event, PathKind, Tcp, TcpConfig, TcpConfigFile, Transport};

const MIB: usize = 1 << 20;
const SESSIONS: u64 = 100;

fn make(peer: PeerId, greeting: Bytes) -> Box<dyn Transport> {
    let config = TcpConfig::try_from(TcpConfigFile { paths: PathKind::ALL.to_vec(), ..config() }).unwrap();
    Box::new(Tcp::bind(config, key(), peer, greeting).unwrap())
}

/// Sends until something was lent.
fn lend(a: &mut Node, b: &mut Node) {
    let before = a.transport.stats().lent_bytes;
    for _ in 0..1000 {
        let grant = b.grant(&a.peer, 0, MIB as u64);
        let post = a.post(&b.peer, grant, 0, 0, 0, MIB as u64);
        b.wait_landed(grant);
        a.wait_posted(post).unwrap();
        b.transport.revoke(grant);
        if a.transport.stats().lent_bytes > before {
            return;
        }
    }
    panic!("nothing was lent");
}

/// Hands over in place, and lets go.
fn hand_over(a: &mut Node, b: &mut Node) {
    let grant = b.transport.grant_in_place(&a.peer, MIB as u64).unwrap();
    let post = a.post(&b.peer, grant, 0, 0, 0, MIB as u64);
    drop(b.wait("Lent", |event| matches!(event, Event::Lent { .. })));
    a.wait_posted(post).unwrap();
    b.transport.revoke(grant);
}

#[test]
fn descriptors_mappings_and_memory_files_go_with_their_sessions() {
    let count = || {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let maps = maps.lines().filter(|line| line.contains("memfd:kvferry")).count();
        (fs::read_dir("/proc/self/fd").unwrap().count(), maps)
    };
    let mut b = Node::new(&make, peer("b", 1), MIB);
    let mut round = |incarnation| {
        let mut a = Node::new(&make, peer("a", incarnation), MIB);
        a.meet(&mut b);
        lend(&mut a, &mut b);
        lend(&mut b, &mut a);
        hand_over(&mut a, &mut b);
        hand_over(&mut b, &mut a);
        drop(a);
        b.wait_down(&peer("a", incarnation));
    };
    // A data thread lets go of a lane in its next round, so one session may be left at any count.
    round(1);
    round(2);
    let before = count();
    (3..SESSIONS).for_each(&mut round);
    let after = count();
    assert!(after.0 <= before.0 + 8 && after.1 <= before.1 + 8, "{before:?}, then {after:?}");
}
