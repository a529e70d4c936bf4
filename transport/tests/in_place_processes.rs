//! A reader in a process of its own, which is stopped or killed while it reads in place: its sources are held while it can read, and not
//! longer.

mod common;

use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::{address, config, key};
use kvferry_protocol::pages::{Extent, Pages, Piece};
use kvferry_protocol::{PeerId, RegionId};
use kvferry_transport::testing::{Node, PATIENCE, peer};
use kvferry_transport::{
    Event, GrantKey, PathKind, PeerAddress, PostId, Source, Tcp, TcpConfig, TcpConfigFile, Transport, TransportError,
    Write,
};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

const MIB: usize = 1 << 20;
const GOOD: u8 = 0x5a;

/// Kills of each role, unless `KVFERRY_KILLS` says otherwise.
const KILLS: u64 = 8;

/// Which survivor the process serves: unset in the test itself.
const OWNER: &str = "KVFERRY_IN_PLACE_OWNER";
/// What it does.
const ROLE: &str = "KVFERRY_IN_PLACE_ROLE";

fn node(name: &str) -> Node {
    node_of(name, 1)
}

fn node_of(name: &str, incarnation: u64) -> Node {
    let file = TcpConfigFile { paths: PathKind::ALL.to_vec(), keepalive_ms: 200, stall_ms: 2_000, ..config() };
    let make = |peer: PeerId, greeting: Bytes| -> Box<dyn Transport> {
        Box::new(Tcp::bind(TcpConfig::try_from(file.clone()).unwrap(), key(), peer, greeting).unwrap())
    };
    Node::new(&make, peer(name, incarnation), MIB)
}

/// The process that reads: until its session is over, and once more then.
#[test]
#[ignore = "the process that the test stops and kills"]
fn child() {
    let (Ok(owner), Ok(role)) = (std::env::var(OWNER), std::env::var(ROLE)) else { return };
    match role.split_once(' ') {
        Some(("reads", incarnation)) => reads_without_end(&owner, incarnation.parse().unwrap()),
        Some(("owns", incarnation)) => owns_without_end(&owner, incarnation.parse().unwrap()),
        _ => reads_once(&owner),
    }
}

fn reads_without_end(owner: &str, incarnation: u64) {
    let (mut node, other) = (node_of("reader", incarnation), peer("owner", 1));
    node.transport.connect(&PeerAddress::Tcp(owner.parse().unwrap())).unwrap();
    node.wait_up(&other);
    println!("up");
    let mut bytes = vec![0; MIB];
    loop {
        let grant = node.transport.grant_in_place(&other, MIB as u64).unwrap();
        node.transport.send(&other, Bytes::copy_from_slice(&grant.0.to_le_bytes())).unwrap();
        let lent = node.wait("Lent", |event| matches!(event, Event::Lent { .. }));
        let Event::Lent { adopted, .. } = lent else { unreachable!() };
        assert!(adopted.copy(0, &mut bytes));
        node.transport.revoke(grant);
    }
}

fn owns_without_end(reader: &str, incarnation: u64) {
    let (mut node, other) = (node_of("owner", incarnation), peer("survivor", 1));
    node.memory.fill(0, MIB, GOOD);
    node.transport.connect(&PeerAddress::Tcp(reader.parse().unwrap())).unwrap();
    node.wait_up(&other);
    println!("up");
    loop {
        let message = node.wait("a grant", |event| matches!(event, Event::Message { .. }));
        let Event::Message { message, .. } = message else { unreachable!() };
        node.post(&other, key_in(&message), 0, 0, 0, MIB as u64);
    }
}

fn key_in(message: &[u8]) -> GrantKey {
    GrantKey(u128::from_le_bytes(message.try_into().unwrap()))
}

fn reads_once(owner: &str) {
    let mut node = node("reader");
    let other = peer("owner", 1);
    node.transport.connect(&PeerAddress::Tcp(owner.parse().unwrap())).unwrap();
    node.wait_up(&other);
    let grant = node.transport.grant_in_place(&other, MIB as u64).unwrap();
    node.transport.send(&other, Bytes::copy_from_slice(&grant.0.to_le_bytes())).unwrap();
    let Event::Lent { adopted, .. } = node.wait("Lent", |event| matches!(event, Event::Lent { .. })) else { panic!() };
    println!("reads");
    let mut bytes = vec![0; MIB];
    let mut events = Vec::new();
    let mut is_down = false;
    loop {
        let is_good = adopted.copy(0, &mut bytes) && bytes.iter().all(|byte| *byte == GOOD);
        if is_down || !is_good {
            println!("{}", if is_good { "all was good" } else { "read something else" });
            break;
        }
        node.transport.poll(&mut events, Duration::from_millis(1));
        is_down = events.drain(..).any(|event| matches!(event, Event::Down { .. }));
    }
    drop(adopted);
    // Its end of the tether is closed, and it lives on.
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// A process that is killed at the latest when the test ends.
struct Reader {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Reader {
    fn start(owner: &Node, role: &str) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--ignored", "--nocapture"])
            .env(OWNER, address(owner).to_string())
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Self { process, lines }
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Waits for a line that ends so.
    fn says(&mut self, what: &str) {
        let is_said = self.lines.by_ref().map_while(Result::ok).find(|line| {
            assert!(!line.ends_with("read something else"), "{line}");
            line.ends_with(what)
        });
        assert!(is_said.is_some(), "{what} was not said");
    }

    /// Returns when none of its threads runs any more.
    fn stop(&self) {
        self.signal(Signal::STOP);
        waitid(WaitId::Pid(Pid::from_child(&self.process)), WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT).unwrap();
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // It fails if that was done.
        let _ = (self.process.kill(), self.process.wait());
    }
}

/// A reader that has what it reads, and the post that it holds.
fn reading(owner: &mut Node) -> (Reader, PostId) {
    owner.memory.fill(0, MIB, GOOD);
    let mut reader = Reader::start(owner, "once");
    let message = owner.wait("a grant", |event| matches!(event, Event::Message { .. }));
    let Event::Message { message, .. } = message else { unreachable!() };
    let post = owner.post(&peer("reader", 1), key_in(&message), 0, 0, 0, MIB as u64);
    owner.wait("Held", |event| matches!(event, Event::Held { post: held } if *held == post));
    reader.says("reads");
    (reader, post)
}

/// Whatever the owner was going to hear of the cut, it has heard: it met another peer since, and moved bytes.
fn does_something_else(owner: &mut Node, name: &str) {
    let mut other = node(name);
    owner.meet(&mut other);
    let grant = other.grant(&owner.peer, 0, 64);
    let post = owner.post(&other.peer, grant, 0, 0, 0, 64);
    other.wait_landed(grant);
    owner.wait_posted(post).unwrap();
}

fn is_held(owner: &mut Node, post: PostId) -> bool {
    let is_ended = owner.drain().iter().any(|event| matches!(event, Event::Posted { post: of, .. } if *of == post));
    !is_ended && owner.transport.stats().held_bytes == MIB as u64
}

fn ends_with_its_reader(owner: &mut Node, post: PostId) {
    let outcome = owner.wait_posted(post);
    assert!(matches!(outcome, Err(TransportError::Disconnected { .. })), "{outcome:?}");
    assert_eq!(owner.transport.stats().held_bytes, 0);
    // Now it may be used for something else.
    owner.memory.fill(0, MIB, 0xee);
}

#[test]
fn a_reader_that_is_stopped_keeps_what_it_reads_however_long_and_lets_go_when_it_goes_on() {
    let mut owner = node("owner");
    let (mut reader, post) = reading(&mut owner);
    reader.stop();
    owner.transport.disconnect(&peer("reader", 1), "cut");
    owner.wait_down(&peer("reader", 1));
    for name in ["c", "d"] {
        does_something_else(&mut owner, name);
        assert!(is_held(&mut owner, post), "a stopped process may read when it goes on");
    }
    reader.signal(Signal::CONT);
    ends_with_its_reader(&mut owner, post);
    reader.says("all was good");
}

#[test]
fn a_reader_that_stands_still_loses_its_session_and_not_what_it_reads() {
    let mut owner = node("owner");
    let (mut reader, post) = reading(&mut owner);
    reader.stop();
    // Nobody cuts it: it does not answer for so long that it is given up.
    owner.wait_down(&peer("reader", 1));
    does_something_else(&mut owner, "c");
    assert!(is_held(&mut owner, post));
    reader.signal(Signal::CONT);
    ends_with_its_reader(&mut owner, post);
    reader.says("all was good");
}

#[test]
fn a_reader_that_is_killed_holds_nothing() {
    for is_stopped in [false, true] {
        let mut owner = node("owner");
        let (mut reader, post) = reading(&mut owner);
        if is_stopped {
            reader.stop();
            owner.transport.disconnect(&peer("reader", 1), "cut");
            owner.wait_down(&peer("reader", 1));
            does_something_else(&mut owner, "c");
            assert!(is_held(&mut owner, post));
        }
        reader.kill();
        ends_with_its_reader(&mut owner, post);
    }
}

fn kills() -> u64 {
    std::env::var("KVFERRY_KILLS").map_or(KILLS, |text| text.parse().expect("KVFERRY_KILLS is a number"))
}

/// After how many exchanges the other process is killed, and how long after that: mostly at once.
fn moment(round: u64) -> (u64, Duration) {
    let mixed = (round + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
    (mixed % 20, Duration::from_micros(mixed / 20 % 800))
}

/// Works with the other process, and kills it in the middle of that; `on` gets each event until the session's end.
fn kills_amid_work(node: &mut Node, other: &mut Reader, round: u64, mut on: impl FnMut(&mut Node, Event)) {
    let (exchanges, later) = moment(round);
    let (mut seen, mut until, mut is_killed) = (0, None, false);
    // What came with the session's beginning is there already.
    let mut events = node.drain();
    let patience = Instant::now() + PATIENCE;
    loop {
        assert!(Instant::now() < patience, "round {round}: the survivor still waits");
        if !is_killed && until.is_some_and(|until| Instant::now() >= until) {
            other.kill();
            is_killed = true;
        }
        for event in events.drain(..) {
            if let Event::Down { reason, .. } = &event {
                assert!(is_killed, "it went down by itself: {reason}");
                return;
            }
            seen += u64::from(matches!(event, Event::Message { .. } | Event::Lent { .. }));
            if seen > exchanges && until.is_none() {
                until = Some(Instant::now() + later);
            }
            on(node, event);
        }
        node.transport.poll(&mut events, Duration::from_micros(100));
    }
}

#[test]
fn readers_that_are_killed_at_any_moment_leave_every_source_to_its_owner() {
    let mut owner = node("owner");
    owner.memory.fill(0, MIB, GOOD);
    for round in 1..=kills() {
        let mut reader = Reader::start(&owner, &format!("reads {round}"));
        reader.says("up");
        let who = peer("reader", round);
        owner.wait_up(&who);
        let piece = Piece { region: RegionId::new(0), offset: 0, loops: Vec::new(), run_bytes: MIB as u64 };
        let all = Pages { bases: vec![0], pieces: vec![piece] };
        kills_amid_work(&mut owner, &mut reader, round, |owner, event| {
            if let Event::Message { message, .. } = event {
                let write = Write {
                    grant: key_in(&message),
                    sequence: 0,
                    extents: vec![Extent::contiguous(0, MIB as u64)],
                    source: Source::Pages(vec![all.clone()]),
                    notification: Bytes::new(),
                };
                // It may be gone.
                let _ = owner.transport.post(&who, write);
            }
        });
        owner.wait_stats("all is its own again", |stats| (stats.posts_live, stats.held_bytes) == (0, 0));
        owner.drain();
    }
}

#[test]
fn owners_that_are_killed_at_any_moment_leave_what_is_read_as_it_was() {
    let mut survivor = node("survivor");
    let mut bytes = vec![0; MIB];
    for round in 1..=kills() {
        let mut owner = Reader::start(&survivor, &format!("owns {round}"));
        owner.says("up");
        let who = peer("owner", round);
        survivor.wait_up(&who);
        let ask = |survivor: &Node| {
            // It may be gone.
            if let Ok(grant) = survivor.transport.grant_in_place(&who, MIB as u64) {
                let _ = survivor.transport.send(&who, Bytes::copy_from_slice(&grant.0.to_le_bytes()));
            }
        };
        ask(&survivor);
        let mut kept = None;
        kills_amid_work(&mut survivor, &mut owner, round, |survivor, event| {
            if let Event::Lent { adopted, grant, .. } = event {
                assert!(adopted.copy(0, &mut bytes) && bytes.iter().all(|byte| *byte == GOOD), "round {round}");
                survivor.transport.revoke(grant);
                kept = Some(adopted);
                ask(survivor);
            }
        });
        // Nobody is left who could write there, and the memory is there for as long as it is kept.
        if let Some(adopted) = kept {
            assert!(adopted.copy(0, &mut bytes) && bytes.iter().all(|byte| *byte == GOOD), "round {round}");
        }
        survivor.drain();
        assert_eq!(survivor.transport.stats().grants_live, 0);
    }
}
