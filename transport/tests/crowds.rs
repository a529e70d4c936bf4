//! Peers and strangers in excess.

mod common;

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::{RawPeer, address, config, dialler, identity, node, stream_to};
use kvferry_protocol::wire::{Challenge, Introduction, VERSIONS};
use kvferry_transport::testing::{Node, PATIENCE, peer};
use kvferry_transport::{Event, TcpConfigFile, TransportError};

/// What the node answers to a hello.
fn challenge(stream: &mut TcpStream) -> Challenge {
    let hello = dialler(Introduction::Peer(identity("x")), VERSIONS).poll_output().unwrap();
    stream.write_all(&hello).unwrap();
    let mut challenge = [0; 48];
    stream.read_exact(&mut challenge).unwrap();
    Challenge::decode(&challenge).unwrap()
}

fn is_hung_up(mut stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    match stream.read(&mut [0]) {
        Ok(0) => true,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
        Ok(_) => panic!("it says something"),
    }
}

#[test]
fn strangers_that_say_nothing_are_few_and_are_let_go() {
    let limit = 4;
    // They are safe from each other for longer than the test takes.
    let file = TcpConfigFile { max_unauthenticated_per_address: limit, handshake_ms: 3_600_000, ..config() };
    let b = node("b", file, 64);
    let silent: Vec<TcpStream> = (0..limit).map(|_| stream_to(address(&b))).collect();
    assert!(challenge(&mut stream_to(address(&b))).busy);
    assert!(!silent.iter().any(is_hung_up));

    let file = TcpConfigFile { max_unauthenticated_per_address: limit, handshake_ms: 300, ..config() };
    let mut b = node("b", file, 64);
    for mut stream in (0..limit).map(|_| stream_to(address(&b))).collect::<Vec<_>>() {
        assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "hung up at the deadline");
    }
    RawPeer::join(&mut b, "later");
}

/// Far more than are let in, from the peer's own address, and a new one for each that is let go.
#[test]
fn strangers_that_are_replaced_all_the_time_keep_nobody_out() {
    let limit = 8;
    // Without letting the oldest go, none would leave before the test gives up.
    let file = TcpConfigFile {
        max_unauthenticated_per_address: limit,
        handshake_ms: 2 * PATIENCE.as_millis() as u64,
        ..config()
    };
    let mut b = node("b", file, 64);
    let a = node("a", config(), 64);
    let mut silent: VecDeque<TcpStream> = (0..4 * limit).map(|_| stream_to(address(&b))).collect();
    a.transport.connect(&b.transport.local_address()).unwrap();
    let (deadline, mut events) = (Instant::now() + PATIENCE, Vec::new());
    while !events.iter().any(|event| matches!(event, Event::Up { .. })) {
        assert!(Instant::now() < deadline, "it is kept out: {events:?}");
        a.transport.poll(&mut events, Duration::from_millis(5));
        for _ in 0..silent.len() {
            let stream = silent.pop_front().unwrap();
            silent.push_back(if is_hung_up(&stream) { stream_to(address(&b)) } else { stream });
        }
    }
    b.wait_up(&a.peer);
}

#[test]
fn a_peer_too_many_is_told_so_and_comes_when_another_leaves() {
    let mut b = node("b", TcpConfigFile { max_peers: 2, ..config() }, 64);
    let mut peers: Vec<Node> = ["a", "c"].map(|name| node(name, config(), 64)).into();
    peers.iter_mut().for_each(|peer| peer.meet(&mut b));
    let mut third = node("d", config(), 64);
    third.transport.connect(&b.transport.local_address()).unwrap();
    let Event::Down { reason, .. } = third.wait("Down", |event| matches!(event, Event::Down { .. })) else {
        unreachable!("the filter takes only Down")
    };
    assert!(matches!(reason, TransportError::Ended { .. }), "{reason}");
    drop(peers.pop());
    third.wait_up(&b.peer);
    b.wait_up(&peer("d", 1));
}
