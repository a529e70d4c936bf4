//! A peer's process is killed at a random moment, again and again, over each way: every wait of the survivor ends with a reason,
//! no byte lands after that, the next start of the peer is served, and nothing is left behind.
//!
//! `KVFERRY_KILLS=200 cargo test -p kvferry-transport --test killed` does it as often for each way and role.

mod common;

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::{address, key, rdma_config};
use kvferry_protocol::PeerId;
use kvferry_transport::testing::{Node, PATIENCE, peer};
use kvferry_transport::ucx::UcxConfigFile;
use kvferry_transport::{Event, PathKind, PeerAddress, Tcp, TcpConfig, TcpConfigFile, Transport, TransportError};

const MIB: u64 = 1 << 20;
const WINDOW: u64 = 8 * MIB;
/// Kills for each way and role, unless `KVFERRY_KILLS` says otherwise.
const KILLS: u64 = 10;

/// Which process the test is in: unset in the test itself.
const ROLE: &str = "KVFERRY_KILLED_ROLE";

fn node(name: &str, incarnation: u64, path: &str) -> Node {
    let paths = match path {
        "tcp" => vec![PathKind::Tcp],
        "uds" => vec![PathKind::UnixSocket],
        "cma" => vec![PathKind::ProcessMemory, PathKind::UnixSocket],
        "shm" => vec![PathKind::SharedMemory, PathKind::UnixSocket],
        "rdma" => vec![PathKind::Rdma, PathKind::Tcp],
        "ucx" => vec![PathKind::Ucx, PathKind::Tcp],
        other => panic!("{other} is no way"),
    };
    // An emulated device and its processors are slow.
    let stall_ms = if is_slow(path) { 20_000 } else { 2_000 };
    let ucx = UcxConfigFile { emulated_puts: true, connect_ms: 25_000, ..UcxConfigFile::default() };
    let file = TcpConfigFile { paths, keepalive_ms: 200, stall_ms, ucx, ..rdma_config() };
    let make = |peer: PeerId, greeting: Bytes| -> Box<dyn Transport> {
        Box::new(Tcp::bind(TcpConfig::try_from(file.clone()).unwrap(), key(), peer, greeting).unwrap())
    };
    Node::new(&make, peer(name, incarnation), WINDOW as usize)
}

/// Whether the path is over an emulated device.
fn is_slow(path: &str) -> bool {
    path == "rdma" || path == "ucx" && std::env::var_os("SOFTROCE_DEVICE").is_some()
}

/// The process that is killed: sends without end into the grants that it is told of, or grants and tells of it.
#[test]
#[ignore = "the process that the test kills"]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let [role, path, incarnation, survivor] = words[..] else { panic!("{role}") };
    let mut node = node("child", incarnation.parse().unwrap(), path);
    node.memory.fill(0, WINDOW as usize, 0x5a);
    let survivor: SocketAddr = survivor.parse().unwrap();
    node.transport.connect(&PeerAddress::Tcp(survivor)).unwrap();
    let other = peer("survivor", 1);
    node.wait_up(&other);
    println!("up");
    let mut events = Vec::new();
    if role == "receives" {
        loop {
            let grant = node.grant(&other, 0, WINDOW);
            node.transport.send(&other, Bytes::copy_from_slice(&grant.0.to_le_bytes())).unwrap();
            let landed = |event: &Event| matches!(event, Event::Landed { .. });
            while !events.drain(..).any(|event| landed(&event)) {
                node.transport.poll(&mut events, PATIENCE);
            }
            node.transport.revoke(grant);
        }
    }
    loop {
        let message = node.wait("a grant", |event| matches!(event, Event::Message { .. }));
        let Event::Message { message, .. } = message else { unreachable!() };
        let grant = kvferry_transport::GrantKey(u128::from_le_bytes(message[..].try_into().unwrap()));
        let post = node.post(&other, grant, 0, 0, 0, WINDOW);
        node.wait_posted(post).unwrap();
    }
}

/// A process that is killed when it is told so, and at the latest when the test ends.
struct Doomed(Child);

impl Doomed {
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Doomed {
    fn drop(&mut self) {
        // It fails if that was done.
        let _ = (self.0.kill(), self.0.wait());
    }
}

fn start(role: &str, path: &str, incarnation: u64, survivor: SocketAddr) -> Doomed {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--ignored", "--nocapture"])
        .env(ROLE, format!("{role} {path} {incarnation} {survivor}"))
        .stdout(Stdio::piped())
        // What it says if it does not come up; once it is killed it says nothing.
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let stdout = child.stdout.take().unwrap();
    let child = Doomed(child);
    let is_up = BufReader::new(stdout).lines().map_while(Result::ok).any(|line| line.ends_with("up"));
    assert!(is_up, "round {incarnation}: the child did not come up");
    child
}

/// How long the survivor works with the child before that is killed: mostly a few milliseconds, so that the first frames and the
/// sharing of memory are hit, too.
fn moment(path: &str, round: u64) -> Duration {
    let mixed = (round + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
    let moment = Duration::from_micros(mixed % if round.is_multiple_of(3) { 20_000 } else { 2_000 });
    // An emulated device takes a quarter of a second for the window.
    if is_slow(path) { 10 * moment } else { moment }
}

/// Waits for the child's session, whose way must be the one that is tested.
fn wait_up(node: &mut Node, other: &PeerId, path: &str) {
    let Event::Up { path: taken, .. } = node.wait_up(other) else { unreachable!("wait_up gives Up") };
    assert_eq!(taken.kind.name(), path, "{taken:?}");
}

/// What a session takes of the kernel's RDMA objects, and of pinned memory: all of it is given back before its end is told.
fn devices() -> (String, Vec<String>) {
    let shown = Command::new("rdma").args(["resource", "show"]).output().unwrap();
    assert!(shown.status.success(), "{shown:?}");
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let is_pinned = |line: &&str| line.starts_with("VmPin") || line.starts_with("VmLck");
    (String::from_utf8(shown.stdout).unwrap(), status.lines().filter(is_pinned).map(str::to_owned).collect())
}

fn kills() -> u64 {
    std::env::var("KVFERRY_KILLS").map_or(KILLS, |text| text.parse().expect("KVFERRY_KILLS is a number"))
}

/// The survivor sends: its posts end, and its sources are its own again.
fn a_receiver_is_killed(path: &str) {
    let mut node = node("survivor", 1, path);
    node.memory.fill(0, WINDOW as usize, 0x21);
    let alone = (path == "rdma").then(devices);
    for round in 1..=kills() {
        let mut child = start("receives", path, round, address(&node));
        let other = peer("child", round);
        wait_up(&mut node, &other, path);
        let until = Instant::now() + moment(path, round);
        let mut posts = 0;
        let mut events = Vec::new();
        let mut is_down = false;
        let mut is_killed = false;
        while !is_down {
            if !is_killed && Instant::now() >= until {
                child.kill();
                is_killed = true;
            }
            assert!(until.elapsed() < PATIENCE, "round {round}: the survivor still waits");
            node.transport.poll(&mut events, Duration::from_micros(200));
            for event in events.drain(..) {
                match event {
                    Event::Message { message, .. } => {
                        let grant = kvferry_transport::GrantKey(u128::from_le_bytes(message[..].try_into().unwrap()));
                        let write = kvferry_transport::Write {
                            grant,
                            sequence: 0,
                            extents: vec![kvferry_protocol::pages::Extent::contiguous(0, WINDOW)],
                            source: kvferry_transport::Source::Pages(vec![all()]),
                            notification: Bytes::new(),
                        };
                        // It may be down already.
                        posts += u64::from(node.transport.post(&other, write).is_ok());
                    }
                    Event::Posted { outcome, .. } => {
                        posts -= 1;
                        assert!(!matches!(outcome, Err(TransportError::Refused { .. })), "{outcome:?}");
                    }
                    Event::Down { reason, .. } => {
                        assert!(is_killed, "it went down by itself: {reason}");
                        is_down = true;
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        assert_eq!((posts, node.transport.stats().posts_live), (0, 0), "round {round}");
        assert_eq!((path == "rdma").then(devices), alone, "round {round}");
    }
}

/// The survivor receives: no byte comes any more once it knows.
fn a_sender_is_killed(path: &str) {
    let mut node = node("survivor", 1, path);
    let alone = (path == "rdma").then(devices);
    for round in 1..=kills() {
        let mut child = start("sends", path, round, address(&node));
        let other = peer("child", round);
        wait_up(&mut node, &other, path);
        let until = Instant::now() + moment(path, round);
        let mut grant = node.grant(&other, 0, WINDOW);
        let tell = |node: &Node, grant: kvferry_transport::GrantKey| {
            node.transport.send(&other, Bytes::copy_from_slice(&grant.0.to_le_bytes())).is_ok()
        };
        tell(&node, grant);
        let (mut is_killed, mut is_down, mut events) = (false, false, Vec::new());
        while !is_down {
            if !is_killed && Instant::now() >= until {
                child.kill();
                is_killed = true;
            }
            assert!(until.elapsed() < PATIENCE, "round {round}: the survivor still waits");
            node.transport.poll(&mut events, Duration::from_micros(200));
            for event in events.drain(..) {
                match event {
                    Event::Landed { grant: of, .. } => {
                        assert_eq!(of, grant);
                        assert!(node.memory.is_all(0, WINDOW as usize, 0x5a), "round {round}: it landed torn");
                        node.transport.revoke(grant);
                        if let Ok(next) = node.transport.grant(&other, all()) {
                            grant = next;
                            tell(&node, grant);
                        }
                    }
                    Event::Down { reason, .. } => {
                        assert!(is_killed, "it went down by itself: {reason}");
                        is_down = true;
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        node.memory.fill(0, WINDOW as usize, 0x77);
        std::thread::yield_now();
        assert!(node.memory.is_all(0, WINDOW as usize, 0x77), "round {round}: late bytes");
        assert_eq!(node.transport.stats().grants_live, 0);
        assert_eq!((path == "rdma").then(devices), alone, "round {round}");
    }
}

fn all() -> kvferry_protocol::pages::Pages {
    let region = kvferry_protocol::RegionId::new(0);
    let piece = kvferry_protocol::pages::Piece { region, offset: 0, loops: Vec::new(), run_bytes: WINDOW };
    kvferry_protocol::pages::Pages { bases: vec![0], pieces: vec![piece] }
}

/// One after the other, since descriptors and mappings of this process are counted.
#[test]
fn a_peer_that_is_killed_at_any_moment_holds_nothing_up_and_leaves_nothing() {
    run(&["tcp", "uds", "cma", "shm"]);
}

#[test]
#[ignore = "needs an RDMA device"]
fn a_peer_that_is_killed_over_rdma_holds_nothing_up_and_leaves_nothing() {
    run(&["rdma"]);
}

#[test]
#[ignore = "needs libucp"]
fn a_peer_that_is_killed_over_ucx_holds_nothing_up_and_leaves_nothing() {
    run(&["ucx"]);
}

fn run(paths: &[&str]) {
    let count = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let maps = maps.lines().filter(|line| line.contains("memfd:kvferry")).count();
        (std::fs::read_dir("/proc/self/fd").unwrap().count(), maps)
    };
    for path in paths {
        for run in [a_receiver_is_killed, a_sender_is_killed] {
            let before = count();
            run(path);
            // The endpoint is gone, with its threads and all that its sessions had.
            assert_eq!(count(), before, "{path}");
        }
        eprintln!("{path}: {} kills of a receiver and as many of a sender", kills());
    }
}
