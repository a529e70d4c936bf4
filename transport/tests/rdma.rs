//! RDMA as the path of a session: `integration-tests/softroce/tests.sh` runs these over soft-RoCE.

mod common;

use bytes::Bytes;
use common::{key, rdma_config};
use kvferry_protocol::PeerId;
use kvferry_transport::testing::{Node, peer};
use kvferry_transport::{
    Event, Memory, MemoryKind, PathKind, PathReport, Planted, Tcp, TcpConfig, TcpConfigFile, Transport, TransportError,
};

const BYTES: usize = 1 << 20;

fn node(name: &str, file: &TcpConfigFile, bug: Option<Planted>) -> Node {
    let make = |peer: PeerId, greeting: Bytes| -> Box<dyn Transport> {
        let config = TcpConfig::try_from(file.clone()).unwrap();
        Box::new(match bug {
            Some(bug) => Tcp::bind_planted(config, key(), peer, greeting, bug).unwrap(),
            None => Tcp::bind(config, key(), peer, greeting).unwrap(),
        })
    };
    Node::new(&make, peer(name, 1), BYTES)
}

/// Joins the two; gives the way that each says it takes.
fn paths(a: &mut Node, b: &mut Node) -> [PathReport; 2] {
    a.transport.connect(&b.transport.local_address()).unwrap();
    let (ours, theirs) = (a.peer.clone(), b.peer.clone());
    [(a, theirs), (b, ours)].map(|(node, other)| match node.wait_up(&other) {
        Event::Up { path, .. } => path,
        other => panic!("{other:?}"),
    })
}

/// Grants all of `b` to `a`, and waits until it knows.
fn grant(a: &mut Node, b: &Node) -> kvferry_transport::GrantKey {
    let grant = b.grant(&a.peer, 0, BYTES as u64);
    // A grant's key reaches its sender by a message, behind the window.
    b.transport.send(&a.peer, Bytes::from_static(b"granted")).unwrap();
    a.wait("Message", |event| matches!(event, Event::Message { .. }));
    grant
}

/// Packets that soft-RoCE received.
fn packets() -> u64 {
    let devices = std::fs::read_dir("/sys/class/infiniband").unwrap().flatten();
    let counter = |device: std::fs::DirEntry| device.path().join("ports/1/hw_counters/rcvd_pkts");
    devices.map(|device| std::fs::read_to_string(counter(device)).unwrap().trim().parse::<u64>().unwrap()).sum()
}

#[test]
#[ignore = "needs an RDMA device"]
fn memory_of_a_device_is_refused_with_what_the_card_could_do() {
    let config = rdma_config().rdma.try_into().unwrap();
    for port in kvferry_transport::rdma::probe(&config).unwrap().usable {
        // soft-RoCE copies by the processor.
        let answer = port.device_memory.dma_buf;
        assert!(answer.is_err() || !port.device.starts_with("rxe"), "{answer:?}");
    }
    let node = node("a", &rdma_config(), None);
    let memory = Memory { kind: MemoryKind::Device, ..node.memory.memory() };
    #[expect(unsafe_code, reason = "registering is the caller's promise")]
    // SAFETY: the memory is the node's own, and is refused.
    let refused = unsafe { node.transport.register(memory) };
    let text = refused.unwrap_err().to_string();
    for word in ["a device's", "rxe0: dma-buf: its driver", "peer memory: no module"] {
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[test]
#[ignore = "needs an RDMA device"]
fn the_path_is_said_and_its_payload_goes_by_the_device() {
    let (mut a, mut b) = (node("a", &rdma_config(), None), node("b", &rdma_config(), None));
    for path in paths(&mut a, &mut b) {
        assert_eq!(path.kind, PathKind::Rdma, "{path:?}");
    }
    a.memory.fill(0, BYTES, 0x6b);
    let before = packets();
    for _ in 0..4 {
        b.memory.fill(0, BYTES, 0);
        let grant = grant(&mut a, &b);
        let post = a.post(&b.peer, grant, 0, 0, 0, BYTES as u64);
        b.wait_landed(grant);
        a.wait_posted(post).unwrap();
        b.transport.revoke(grant);
        assert!(b.memory.is_all(0, BYTES, 0x6b));
    }
    // A packet carries at most 4096 bytes.
    assert!(packets() - before >= 4 * BYTES as u64 / 4096, "{} packets", packets() - before);
}

#[test]
#[ignore = "needs an RDMA device"]
fn where_the_test_pattern_comes_spoilt_payload_goes_the_next_way_and_both_sides_say_why() {
    for bugs in [[Some(Planted::PatternSpoilt), None], [None, Some(Planted::PatternSpoilt)]] {
        let (mut a, mut b) = (node("a", &rdma_config(), bugs[0]), node("b", &rdma_config(), bugs[1]));
        for path in paths(&mut a, &mut b) {
            assert_eq!(path.kind, PathKind::Tcp, "{path:?}");
            let is_said = |(kind, why): &(PathKind, String)| *kind == PathKind::Rdma && why.contains("spoilt: 1 bytes");
            assert!(path.not.iter().any(is_said), "{path:?}");
        }
        a.memory.fill(0, BYTES, 0x6b);
        let grant = grant(&mut a, &b);
        let post = a.post(&b.peer, grant, 0, 0, 0, BYTES as u64);
        b.wait_landed(grant);
        a.wait_posted(post).unwrap();
        b.transport.revoke(grant);
        assert!(b.memory.is_all(0, BYTES, 0x6b));
    }
}

#[test]
#[ignore = "needs an RDMA device"]
fn queue_pairs_that_cannot_be_joined_leave_the_session_to_the_next_way() {
    let mut other = rdma_config();
    other.rdma.queue_pairs_per_device = 3;
    let (mut a, mut b) = (node("a", &rdma_config(), None), node("b", &other, None));
    for path in paths(&mut a, &mut b) {
        assert_eq!(path.kind, PathKind::Tcp, "{path:?}");
        assert!(path.not.iter().any(|(kind, why)| *kind == PathKind::Rdma && why.contains("same number")), "{path:?}");
    }
}

/// The receiver gives no place back while nobody polls, so some writes cannot be under way; a revoke by the one who would poll must
/// not wait for those.
#[test]
#[ignore = "needs an RDMA device"]
fn a_revoke_by_who_does_not_poll_is_over_while_writes_wait_for_places() {
    const EACH: u64 = 4 << 10;
    let few = TcpConfigFile { max_events: 8, ..rdma_config() };
    let (mut a, mut b) = (node("a", &rdma_config(), None), node("b", &few, None));
    paths(&mut a, &mut b);
    let window = grant(&mut a, &b);
    let posts: Vec<_> =
        (0..BYTES as u64 / EACH).map(|at| a.post(&b.peer, window, at as u32, at * EACH, at * EACH, EACH)).collect();
    // Nobody polls here: the queue of events fills, and then nothing lands any more.
    while b.transport.stats().landed_bytes < 8 * EACH {
        std::thread::yield_now();
    }
    b.transport.revoke(window);
    let mut refused = 0;
    for post in posts {
        match a.wait_posted(post) {
            Ok(()) => {}
            Err(TransportError::Refused { .. }) => refused += 1,
            Err(other) => panic!("the session did not stay: {other}"),
        }
        b.drain();
    }
    assert!(refused > 0, "all had landed");
    assert_eq!(b.transport.stats().sessions_down, 0);
}
