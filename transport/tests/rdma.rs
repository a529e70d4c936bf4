//! RDMA as the path of a session: `integration-tests/softroce/tests.sh` runs these over soft-RoCE.

mod common;

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use common::{key, rdma_config};
use kvferry_protocol::pages::{Extent, Pages, Piece};
use kvferry_protocol::{PeerId, RegionId};
use kvferry_transport::testing::{DeviceArena, Node, peer};
use kvferry_transport::{
    DeviceAccess, DmaBuf, Event, Flush, GrantKey, PathKind, PathReport, Planted, Slab, Source, Tcp, TcpConfig,
    TcpConfigFile, Transport, TransportError, Write,
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
fn grant(a: &mut Node, b: &Node) -> GrantKey {
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
    // Where no processor and no module knows an address it is no memory.
    let (node, arena) = (node("a", &rdma_config(), None), DeviceArena::new(BYTES, 0));
    arena.forbid();
    let by_dma_buf = |file: std::fs::File| DeviceAccess {
        dma_buf: Some(DmaBuf { file: Arc::new(file.into()), offset: 0 }),
        flush: None,
    };
    for (access, words) in [
        (DeviceAccess::default(), ["by their address", "no module for it is loaded"]),
        (by_dma_buf(std::fs::File::open("/dev/null").unwrap()), ["rxe0", "registers no dma-buf"]),
    ] {
        #[expect(unsafe_code, reason = "registering is the caller's promise")]
        // SAFETY: it is refused.
        let refused = unsafe { node.transport.register(arena.memory(access)) }.unwrap_err();
        let text = refused.to_string();
        assert!(matches!(refused, TransportError::Memory { .. }), "{text}");
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
}

/// What is done to a device's memory, in the order in which it was.
#[derive(Default)]
struct Log(Mutex<Vec<String>>);

impl Log {
    fn note(&self, what: impl Into<String>) {
        self.0.lock().unwrap().push(what.into());
    }
}

/// A flush that looks whether all of the region was written, as a kernel would that is launched next.
struct Flushed {
    log: Arc<Log>,
    arena: Arc<DeviceArena>,
    value: u8,
}

impl Flush for Flushed {
    fn flush(&self) -> Result<(), String> {
        let is_all = self.arena.view.is_all(0, BYTES, self.value);
        self.log.note(format!("flushed, all written: {is_all}"));
        Ok(())
    }
}

/// Registers an arena as a device's, and takes the processors' access to it away.
fn register(node: &Node, arena: &DeviceArena, flush: Option<Arc<dyn Flush>>) -> RegionId {
    let memory = arena.memory(DeviceAccess { dma_buf: None, flush });
    #[expect(unsafe_code, reason = "registering is the caller's promise")]
    // SAFETY: the test drops the arena after the node; it looks by atomics, at another mapping.
    let region = unsafe { node.transport.register(memory) }.unwrap();
    arena.forbid();
    region
}

fn of(region: RegionId, offset: u64, bytes: u64) -> Pages {
    Pages { bases: vec![0], pieces: vec![Piece { region, offset, loops: vec![], run_bytes: bytes }] }
}

fn write(grant: GrantKey, sequence: u32, offset: u64, source: Source) -> Write {
    let bytes = match &source {
        Source::Pages(pages) => pages[0].pieces[0].run_bytes,
        Source::Packed(slab) => slab.bytes().len() as u64,
    };
    Write { grant, sequence, extents: vec![Extent::contiguous(offset, bytes)], source, notification: Bytes::new() }
}

/// Grants a window to `a`, and waits until it knows.
fn grant_of(a: &mut Node, b: &Node, pages: Pages) -> GrantKey {
    let grant = b.transport.grant(&a.peer, pages).unwrap();
    b.transport.send(&a.peer, Bytes::from_static(b"granted")).unwrap();
    a.wait("Message", |event| matches!(event, Event::Message { .. }));
    grant
}

/// A device's memory to a device's, to the host's and from the host's, where a processor that touched it would die; each write that
/// lands there was flushed before it was told.
#[test]
#[ignore = "needs an RDMA device"]
fn devices_carry_between_memories_of_devices_that_no_processor_touches() {
    let (mut a, mut b) = (node("a", &rdma_config(), None), node("b", &rdma_config(), None));
    let (log, source, target) =
        (Arc::new(Log::default()), DeviceArena::new(BYTES, 0x6b), Arc::new(DeviceArena::new(BYTES, 0)));
    let before = register(&a, &source, None); // known to the peer before the session
    paths(&mut a, &mut b);
    let flush = Flushed { log: Arc::clone(&log), arena: Arc::clone(&target), value: 0x6b };
    let after = register(&b, &target, Some(Arc::new(flush)));
    assert!(a.transport.reaches_device_memory(&b.peer).is_ok());

    let window = grant_of(&mut a, &b, of(after, 0, BYTES as u64));
    let posted = a.transport.post(&b.peer, write(window, 0, 0, Source::Pages(vec![of(before, 0, BYTES as u64)])));
    b.wait_landed(window);
    log.note("landed");
    a.wait_posted(posted.unwrap()).unwrap();
    assert_eq!(*log.0.lock().unwrap(), ["flushed, all written: true", "landed"], "of many frames, in batches");
    assert!(target.view.is_all(0, BYTES, 0x6b));
    b.transport.revoke(window);

    // To the host's memory nothing is flushed.
    let window = grant(&mut a, &b);
    let posted = a.transport.post(&b.peer, write(window, 0, 0, Source::Pages(vec![of(before, 0, BYTES as u64)])));
    b.wait_landed(window);
    a.wait_posted(posted.unwrap()).unwrap();
    assert!(b.memory.is_all(0, BYTES, 0x6b));
    b.transport.revoke(window);
    // And from the host's.
    a.memory.fill(0, BYTES, 0x17);
    let window = grant_of(&mut a, &b, of(after, 0, BYTES as u64));
    let post = a.post(&b.peer, window, 0, 0, 0, BYTES as u64);
    b.wait_landed(window);
    a.wait_posted(post).unwrap();
    assert!(target.view.is_all(0, BYTES, 0x17));
    // Nothing lands there after a revoke, and the source is not what ends the post.
    b.transport.revoke(window);
    let late = a.transport.post(&b.peer, write(window, 1, 0, Source::Pages(vec![of(before, 0, 4096)]))).unwrap();
    let refused = a.wait_posted(late).unwrap_err();
    assert!(matches!(refused, TransportError::Refused { .. }), "{refused}");
    assert!(target.view.is_all(0, BYTES, 0x17));
}

/// What no device carries goes by lanes otherwise. Into and out of a device's memory it ends with its reason.
#[test]
#[ignore = "needs an RDMA device"]
fn what_only_a_lane_could_carry_into_a_devices_memory_ends_with_its_reason_and_the_session_goes_on() {
    #[derive(Debug)]
    struct Packed(Vec<u8>);
    impl Slab for Packed {
        fn bytes(&self) -> &[u8] {
            &self.0
        }
    }
    let (mut a, mut b) = (node("a", &rdma_config(), None), node("b", &rdma_config(), None));
    paths(&mut a, &mut b);
    let (source, target) = (DeviceArena::new(BYTES, 0x6b), DeviceArena::new(BYTES, 0));
    let (ours, theirs) = (register(&a, &source, None), register(&b, &target, None));
    let window = grant_of(&mut a, &b, of(theirs, 0, BYTES as u64));
    // A slab that no card has registered.
    let packed = || Source::Packed(Arc::new(Packed(vec![1; 4096])));
    let posted = a.transport.post(&b.peer, write(window, 0, 0, packed())).unwrap();
    let refused = a.wait_posted(posted).unwrap_err();
    let is_why = matches!(&refused, TransportError::DeviceMemory { what: "the granted window", .. });
    assert!(is_why && refused.to_string().contains("not registered with the RDMA devices"), "{refused}");
    // A number that was used, out of the window, and what is sealed: never by a lane.
    let receiver = b.peer.clone();
    let post = |a: &Node, sequence, offset| {
        let write = write(window, sequence, offset, Source::Pages(vec![of(ours, 0, 4096)]));
        a.transport.post(&receiver, write).unwrap()
    };
    let first = post(&a, 1, 0);
    b.wait_landed(window);
    a.wait_posted(first).unwrap();
    let (again, outside) = (post(&a, 1, 0), post(&a, 2, BYTES as u64 - 1));
    b.transport.seal(window, &[Extent::contiguous(0, 4096)]);
    let (sealed, other) = (post(&a, 3, 0), post(&a, 4, 8192));
    for post in [again, outside, sealed] {
        let refused = a.wait_posted(post);
        assert!(matches!(refused, Err(TransportError::Refused { .. })), "{refused:?}");
    }
    b.wait_landed(window);
    a.wait_posted(other).unwrap();
    // To the host's memory the same slab goes by a lane.
    let window = grant(&mut a, &b);
    let posted = a.transport.post(&b.peer, write(window, 0, 0, packed())).unwrap();
    b.wait_landed(window);
    a.wait_posted(posted).unwrap();
    assert_eq!(a.transport.stats().sessions_down + b.transport.stats().sessions_down, 0);
    assert!(target.view.is_all(8192, 4096, 0x6b) && target.view.is_all(12288, BYTES - 12288, 0));
}

#[test]
#[ignore = "needs an RDMA device"]
fn a_session_without_a_link_takes_no_memory_of_a_device_and_says_why() {
    let spoilt = Some(Planted::PatternSpoilt);
    let only_lanes = TcpConfigFile { paths: vec![PathKind::Tcp], ..rdma_config() };
    for (name, mut a, mut b, why) in [
        ("spoilt", node("a", &rdma_config(), spoilt), node("b", &rdma_config(), None), "spoilt"),
        ("not offered", node("a", &rdma_config(), None), node("b", &only_lanes, None), "does not offer it"),
    ] {
        let arena = DeviceArena::new(BYTES, 0);
        let region = register(&a, &arena, None);
        paths(&mut a, &mut b);
        let window = grant(&mut a, &b);
        let write = write(window, 0, 0, Source::Pages(vec![of(region, 0, 4096)]));
        let posted = a.transport.post(&b.peer, write).unwrap_err().reason;
        let granted = a.transport.grant(&b.peer, of(region, 0, 4096)).unwrap_err();
        for (refused, part) in [(posted, "the source"), (granted, "a granted page")] {
            let is_meant = matches!(&refused, TransportError::DeviceMemory { what, .. } if *what == part);
            assert!(is_meant && refused.to_string().contains(why), "{name}: {refused}");
        }
        assert!(a.transport.reaches_device_memory(&b.peer).is_err(), "{name}");
    }
}

struct Lost;

impl Flush for Lost {
    fn flush(&self) -> Result<(), String> {
        Err("the context is lost".to_owned())
    }
}

#[test]
#[ignore = "needs an RDMA device"]
fn a_flush_that_fails_ends_the_session_and_nothing_is_told_as_landed() {
    let (mut a, mut b) = (node("a", &rdma_config(), None), node("b", &rdma_config(), None));
    paths(&mut a, &mut b);
    let target = DeviceArena::new(BYTES, 0);
    let region = register(&b, &target, Some(Arc::new(Lost)));
    let window = grant_of(&mut a, &b, of(region, 0, BYTES as u64));
    let post = a.post(&b.peer, window, 0, 0, 0, BYTES as u64);
    let event = b.wait("Down", |event| matches!(event, Event::Down { .. } | Event::Landed { .. }));
    let Event::Down { reason, .. } = event else { panic!("{event:?}") };
    assert!(reason.to_string().contains("the context is lost"), "{reason}");
    assert!(a.wait_posted(post).is_err());
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
