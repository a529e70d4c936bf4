//! Memory of a device among processors: pages that kill whoever touches them.

use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use kvferry_protocol::pages::{Extent, Pages, Piece};
use kvferry_protocol::{EngineId, Incarnation, PeerId, PpRank, RegionId, TpRank};

use super::*;
use crate::api::{Event, GrantKey, Memory, MemoryKind, Source, Transport, Write};
use crate::device_memory::DeviceAccess;
use crate::error::TransportError;
use crate::share::{Mapping, memory_file};

const BYTES: u64 = 1 << 20;

fn peer(name: &str) -> PeerId {
    let (engine, incarnation) = (EngineId::new(name).unwrap(), Incarnation::new(1));
    PeerId { engine, incarnation, pp_rank: PpRank::new(0), tp_rank: TpRank::new(0) }
}

/// An endpoint with region 0 in host memory, and region 1 where no processor may go.
struct Node {
    endpoint: Loopback,
    peer: PeerId,
    _memory: [Mapping; 2],
}

fn mapping() -> Mapping {
    let file = memory_file("kvferry-pages", BYTES).unwrap();
    Mapping::new(file.as_fd(), 0, BYTES, true).unwrap()
}

impl Node {
    /// The second region is known as `kind`.
    fn new(network: &LoopbackNetwork, name: &str, kind: MemoryKind) -> Self {
        let endpoint = network.endpoint(peer(name), Bytes::new(), LoopbackConfig::default(), FaultPlan::NONE);
        let memory = [mapping(), mapping()];
        memory[1].forbid().unwrap();
        for (mapping, kind) in memory.iter().zip([MemoryKind::Host, kind]) {
            let memory = Memory { address: mapping.start(), bytes: BYTES as usize, kind, file: None };
            // As an endpoint does whose RDMA devices have registered it.
            endpoint.shared.core.register_beside_devices(memory).unwrap();
        }
        Self { endpoint, peer: peer(name), _memory: memory }
    }

    fn pair(kind: &MemoryKind) -> (Self, Self) {
        let network = LoopbackNetwork::new();
        let (a, b) = (Self::new(&network, "a", kind.clone()), Self::new(&network, "b", kind.clone()));
        a.endpoint.connect(&b.endpoint.local_address()).unwrap();
        for node in [&a, &b] {
            node.wait(|event| matches!(event, Event::Up { .. }).then_some(()));
        }
        (a, b)
    }

    fn wait<T>(&self, mut is_it: impl FnMut(Event) -> Option<T>) -> T {
        let mut events = Vec::new();
        loop {
            self.endpoint.poll(&mut events, Duration::from_secs(30));
            assert!(!events.is_empty(), "nothing happened");
            if let Some(found) = events.drain(..).find_map(&mut is_it) {
                return found;
            }
        }
    }

    /// Posts from a region into a grant; gives how that ended.
    fn post(&self, to: &Self, grant: GrantKey, sequence: u32, region: u32) -> Result<(), TransportError> {
        let write = Write {
            grant,
            sequence,
            extents: vec![Extent::contiguous(0, BYTES)],
            source: Source::Pages(vec![pages(region)]),
            notification: Bytes::new(),
        };
        let post = self.endpoint.post(&to.peer, write).unwrap();
        self.wait(|event| match event {
            Event::Posted { post: ended, outcome } if ended == post => Some(outcome),
            _ => None,
        })
    }
}

fn pages(region: u32) -> Pages {
    let piece = Piece { region: RegionId::new(region), offset: 0, loops: vec![], run_bytes: BYTES };
    Pages { bases: vec![0], pieces: vec![piece] }
}

fn of_device() -> MemoryKind {
    MemoryKind::Device(DeviceAccess::default())
}

#[test]
fn processors_leave_a_source_in_a_devices_memory_alone_and_say_why() {
    let (a, b) = Node::pair(&of_device());
    let grant = b.endpoint.grant(&a.peer, pages(0)).unwrap();
    let refused = a.post(&b, grant, 0, 1).unwrap_err();
    assert!(matches!(&refused, TransportError::DeviceMemory { what: "the source", .. }), "{refused}");
    assert!(refused.to_string().contains("stage it in host memory"), "{refused}");
    // The session goes on, and the number was not used.
    a.post(&b, grant, 0, 0).unwrap();
}

#[test]
fn processors_place_nothing_in_a_devices_memory_even_if_it_was_granted() {
    let (a, b) = Node::pair(&of_device());
    let refused = b.endpoint.grant(&a.peer, pages(1)).unwrap_err();
    assert!(matches!(&refused, TransportError::DeviceMemory { what: "a granted page", .. }), "{refused}");
    let session = b.endpoint.shared.lock().ends[&a.peer].local_session;
    let grant = b.endpoint.shared.core.grant(&a.peer, session, &pages(1), None, || Ok(())).unwrap();
    for sequence in 0..2 {
        let refused = a.post(&b, grant, sequence, 0).unwrap_err();
        let TransportError::Refused { reason } = &refused else { panic!("{refused}") };
        assert!(reason.contains("a device's memory, which no processor of the receiver writes"), "{reason}");
    }
    assert_eq!(b.endpoint.stats().landed_bytes, 0);
}

/// That the pages of these tests would have told: the same as host memory, and the process is killed.
#[test]
fn processors_that_touch_such_pages_die() {
    const VARIABLE: &str = "KVFERRY_TOUCH_FORBIDDEN_PAGES";
    const NAME: &str = "loopback::tests::processors_that_touch_such_pages_die";
    if let Ok(end) = std::env::var(VARIABLE) {
        let (a, b) = Node::pair(&MemoryKind::Host);
        let (source, target) = if end == "source" { (1, 0) } else { (0, 1) };
        let grant = b.endpoint.grant(&a.peer, pages(target)).unwrap();
        let outcome = a.post(&b, grant, 0, source);
        panic!("it lived: {outcome:?}");
    }
    for end in ["source", "target"] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", NAME, "--nocapture", "--test-threads=1"]).env(VARIABLE, end);
        let status = child.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
        assert_eq!(status.signal(), Some(libc::SIGSEGV), "{end}: {status}");
    }
}
