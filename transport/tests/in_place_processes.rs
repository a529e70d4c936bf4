//! A reader in a process of its own, which is stopped or killed while it reads in place: its sources are held while it can read, and not
//! longer.

mod common;

use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use common::{address, config, key};
use kvferry_protocol::PeerId;
use kvferry_transport::testing::{Node, peer};
use kvferry_transport::{
    Event, GrantKey, PathKind, PeerAddress, PostId, Tcp, TcpConfig, TcpConfigFile, Transport, TransportError,
};
use rustix::process::{Pid, Signal, kill_process};

const MIB: usize = 1 << 20;
const GOOD: u8 = 0x5a;

/// Which survivor the process serves: unset in the test itself.
const OWNER: &str = "KVFERRY_IN_PLACE_OWNER";

fn node(name: &str) -> Node {
    let file = TcpConfigFile { paths: PathKind::ALL.to_vec(), keepalive_ms: 200, stall_ms: 2_000, ..config() };
    let make = |peer: PeerId, greeting: Bytes| -> Box<dyn Transport> {
        Box::new(Tcp::bind(TcpConfig::try_from(file.clone()).unwrap(), key(), peer, greeting).unwrap())
    };
    Node::new(&make, peer(name, 1), MIB)
}

/// The process that reads: until its session is over, and once more then.
#[test]
#[ignore = "the process that the test stops and kills"]
fn child() {
    let Ok(owner) = std::env::var(OWNER) else { return };
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
    fn start(owner: &Node) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--ignored", "--nocapture"])
            .env(OWNER, address(owner).to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Self { process, lines }
    }

    /// Waits for a line that ends so.
    fn says(&mut self, what: &str) {
        let is_said = self.lines.by_ref().map_while(Result::ok).find(|line| {
            assert!(!line.ends_with("read something else"), "{line}");
            line.ends_with(what)
        });
        assert!(is_said.is_some(), "{what} was not said");
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
    let mut reader = Reader::start(owner);
    let message = owner.wait("a grant", |event| matches!(event, Event::Message { .. }));
    let Event::Message { message, .. } = message else { unreachable!() };
    let grant = GrantKey(u128::from_le_bytes(message[..].try_into().unwrap()));
    let post = owner.post(&peer("reader", 1), grant, 0, 0, 0, MIB as u64);
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
    reader.signal(Signal::STOP);
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
    reader.signal(Signal::STOP);
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
            reader.signal(Signal::STOP);
            owner.transport.disconnect(&peer("reader", 1), "cut");
            owner.wait_down(&peer("reader", 1));
            does_something_else(&mut owner, "c");
            assert!(is_held(&mut owner, post));
        }
        reader.process.kill().unwrap();
        reader.process.wait().unwrap();
        ends_with_its_reader(&mut owner, post);
    }
}
