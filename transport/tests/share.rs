//! Memory that two endpoints of one host read in each other: what is agreed, what is lent, and what a peer cannot do with it.

mod common;

use std::os::fd::OwnedFd;

use bytes::Bytes;
use common::unix::{ByHand, board, file, loan, region};
use common::{config, key};
use kvferry_protocol::pages::Extent;
use kvferry_protocol::wire::{BOARD, FrameKind, Reach, Refusal, Share, VERSIONS};
use kvferry_protocol::{PeerId, RegionId};
use kvferry_transport::testing::{Arena, Node, peer};
use kvferry_transport::{
    Event, Memory, MemoryKind, PathKind, PathReport, Tcp, TcpConfig, TcpConfigFile, Transport, TransportError,
};
use rustix::fs::SealFlags;

const MIB: usize = 1 << 20;

fn node(name: &str, paths: &[PathKind], newest_version: u16) -> Node {
    // A session in place ends where one that copies goes on: see in_place.rs.
    let file = TcpConfigFile { paths: paths.to_vec(), newest_version, in_place: false, ..config() };
    let make = |peer: PeerId, greeting: Bytes| -> Box<dyn Transport> {
        Box::new(Tcp::bind(TcpConfig::try_from(file.clone()).unwrap(), key(), peer, greeting).unwrap())
    };
    Node::new(&make, peer(name, 1), 4 * MIB)
}

fn met(a: &mut Node, b: &mut Node) -> [PathReport; 2] {
    a.transport.connect(&b.transport.local_address()).unwrap();
    let (ours, theirs) = (a.peer.clone(), b.peer.clone());
    [(a, theirs), (b, ours)].map(|(node, other)| match node.wait_up(&other) {
        Event::Up { path, .. } => path,
        other => panic!("{other:?}"),
    })
}

/// Sends until something was lent, or enough was sent that it would have been; checks every byte.
fn exchange(a: &mut Node, b: &mut Node, is_lent: bool) {
    let bytes = MIB as u64;
    a.memory.fill(0, MIB, 0x6b);
    for round in 0..200 {
        b.memory.fill(0, MIB, 0);
        let grant = b.grant(&a.peer, 0, bytes);
        let post = a.post(&b.peer, grant, 0, 0, 0, bytes);
        b.wait_landed(grant);
        a.wait_posted(post).unwrap();
        b.transport.revoke(grant);
        assert!(b.memory.is_all(0, MIB, 0x6b));
        let stats = a.transport.stats();
        assert!(stats.lent_bytes <= stats.sent_bytes);
        if is_lent && stats.lent_bytes > 0 {
            return;
        }
        assert!(is_lent || stats.lent_bytes == 0, "round {round}: {stats:?}");
        if !is_lent && round > 2 {
            return;
        }
    }
    panic!("nothing was lent: {:?}", a.transport.stats());
}

#[test]
fn the_best_way_that_both_have_is_taken_and_said() {
    use PathKind::{ProcessMemory, SharedMemory, Tcp, UnixSocket};
    let all = &PathKind::ALL[..];
    for (name, ours, theirs, want, is_lent) in [
        ("all", all, all, SharedMemory, true),
        ("process memory", all, &[ProcessMemory, UnixSocket, Tcp][..], ProcessMemory, true),
        ("sockets", all, &[UnixSocket, Tcp], UnixSocket, false),
        ("TCP", &[Tcp], all, Tcp, false),
    ] {
        let (mut a, mut b) = (node("a", ours, VERSIONS.max), node("b", theirs, VERSIONS.max));
        for report in met(&mut a, &mut b) {
            assert_eq!(report.kind, want, "{name}: {report:?}");
            assert!(report.not.iter().all(|(kind, why)| *kind < want && !why.is_empty()), "{name}: {report:?}");
        }
        exchange(&mut a, &mut b, is_lent);
        exchange(&mut b, &mut a, is_lent);
    }
}

#[test]
fn an_older_peer_gets_tcp_and_the_reason_is_told() {
    let (mut a, mut b) = (node("a", &PathKind::ALL, VERSIONS.max), node("b", &PathKind::ALL, 2));
    for report in met(&mut a, &mut b) {
        assert_eq!(report.kind, PathKind::Tcp);
        assert!(report.not.iter().all(|(_, why)| why.contains("version 2")), "{report:?}");
    }
    exchange(&mut a, &mut b, false);
}

#[test]
fn two_without_a_common_way_do_not_meet_and_hear_why() {
    let (mut a, b) = (node("a", &[PathKind::UnixSocket], VERSIONS.max), node("b", &[PathKind::Tcp], VERSIONS.max));
    a.transport.connect(&b.transport.local_address()).unwrap();
    let Event::Down { reason, .. } = a.wait("Down", |event| matches!(event, Event::Down { .. })) else { panic!() };
    assert!(reason.to_string().contains("no common way") && reason.to_string().contains("`paths`"), "{reason}");
}

#[test]
fn memory_without_a_file_is_read_in_the_process_and_memory_that_came_late_too() {
    let (mut a, mut b) = (node("a", &PathKind::ALL, VERSIONS.max), node("b", &PathKind::ALL, VERSIONS.max));
    met(&mut a, &mut b);
    exchange(&mut a, &mut b, true);
    let late = Arena::new(MIB, 0x39);
    let memory = Memory { file: None, ..late.memory() };
    assert!(matches!(memory.kind, MemoryKind::Host));
    #[expect(unsafe_code, reason = "registering is the caller's promise")]
    // SAFETY: the arena outlives the node, which is dropped at the end of this function; nobody writes it.
    let region = unsafe { a.transport.register(memory) }.unwrap();
    assert_eq!(region, RegionId::new(1));
    let lent = |a: &Node| a.transport.stats().lent_bytes;
    let before = lent(&a);
    for sequence in 0..200 {
        let grant = b.grant(&a.peer, 0, MIB as u64);
        let piece = kvferry_protocol::pages::Piece { region, offset: 0, loops: Vec::new(), run_bytes: MIB as u64 };
        let pages = kvferry_protocol::pages::Pages { bases: vec![0], pieces: vec![piece] };
        let write = kvferry_transport::Write {
            grant,
            sequence,
            extents: vec![Extent::contiguous(0, MIB as u64)],
            source: kvferry_transport::Source::Pages(vec![pages]),
            notification: Bytes::new(),
        };
        a.transport.post(&b.peer, write).unwrap();
        b.wait_landed(grant);
        b.transport.revoke(grant);
        assert!(b.memory.is_all(0, MIB, 0x39));
        if lent(&a) > before {
            drop((a, b));
            return;
        }
    }
    panic!("it was never lent");
}

#[test]
fn a_loan_counts_while_its_word_stands_and_not_after() {
    let mut b = node("b", &PathKind::ALL, VERSIONS.max);
    let mut hand = ByHand::join(&mut b, "hand");
    let (share, words) = board();
    assert_eq!(hand.share(&share, Some(&words)), None);
    assert_eq!(hand.share(&region(4096), Some(&file(&[0x2d; 4096], SealFlags::SHRINK))), None);
    let grant = b.grant(&peer("hand", 1), 0, 4096);
    hand.lend(grant, 0, &loan(0, 77, &[(0, 0, 1000), (0, 2000, 500)]));
    assert_eq!(b.wait_landed(grant), (0, 1500, Bytes::from_static(b"note")));
    hand.word(FrameKind::Ack);
    assert!(b.memory.is_all(0, 1500, 0x2d) && b.memory.is_all(1500, 100, 0));
    for (sequence, slot, token) in [(1, 0, 78), (2, 1, 77)] {
        hand.lend(grant, sequence, &loan(slot, token, &[(0, 0, 64)]));
        let (header, _) = hand.word(FrameKind::Refuse);
        assert_eq!((header.sequence, header.refusal), (sequence, Some(Refusal::Cancelled)));
    }
    rustix::io::pwrite(&words, &0u64.to_ne_bytes(), 16).unwrap();
    hand.lend(grant, 3, &loan(0, 77, &[(0, 0, 64)]));
    assert_eq!(hand.word(FrameKind::Refuse).0.refusal, Some(Refusal::Cancelled));
    b.transport.revoke(grant);
    assert!(b.drain().is_empty(), "nothing of these landed");
}

#[test]
fn memory_that_could_kill_its_reader_is_not_mapped() {
    let mut b = node("b", &PathKind::ALL, VERSIONS.max);
    let mut hand = ByHand::join(&mut b, "hand");
    let (share, words) = board();
    let wrong = Share { proof: 5, ..share };
    assert!(hand.share(&wrong, Some(&words)).unwrap().contains("proof"));
    assert_eq!(hand.share(&share, Some(&words)), None);
    assert!(hand.share(&share, Some(&words)).unwrap().contains("already"));
    let unsealed = file(&[1; 4096], SealFlags::GROW);
    assert!(hand.share(&region(4096), Some(&unsealed)).unwrap().contains("shrinking"));
    let short = file(&[1; 4096], SealFlags::SHRINK);
    assert!(hand.share(&region(4097), Some(&short)).unwrap().contains("shorter"));
    let (read_end, _write_end) = std::io::pipe().unwrap();
    let read_end = OwnedFd::from(read_end);
    assert!(hand.share(&region(4096), Some(&read_end)).unwrap().contains("no memory file"));
    assert!(hand.share(&region(4096), None).unwrap().contains("no descriptor"));
    let address = Share { reach: Reach::Address { address: 4096 }, ..region(4096) };
    assert!(hand.share(&address, None).unwrap().contains("not proved"));
    let elsewhere = Share { region: BOARD, ..address };
    assert!(hand.share(&elsewhere, None).unwrap().contains("cannot be read"));
    assert_eq!(hand.share(&region(4096), Some(&short)), None, "the session goes on");
    assert!(hand.share(&region(4096), Some(&short)).unwrap().contains("before"));
    drop(hand.control);
}

#[test]
fn what_was_never_shared_cannot_be_lent() {
    for (name, runs) in
        [("no such region", &[(3, 0, 64)][..]), ("past the end", &[(0, 4090, 7)]), ("far away", &[(0, u64::MAX, 1)])]
    {
        let mut b = node("b", &PathKind::ALL, VERSIONS.max);
        let mut hand = ByHand::join(&mut b, "hand");
        let (share, words) = board();
        assert_eq!(hand.share(&share, Some(&words)), None);
        assert_eq!(hand.share(&region(4096), Some(&file(&[1; 4096], SealFlags::SHRINK))), None);
        let grant = b.grant(&peer("hand", 1), 0, 4096);
        hand.lend(grant, 0, &loan(0, 77, runs));
        let Event::Down { reason, .. } = b.wait_down(&peer("hand", 1)) else { panic!() };
        assert!(matches!(reason, TransportError::Protocol { .. }), "{name}: {reason}");
        assert!(b.memory.is_all(0, 4096, 0), "{name}");
    }
    // Before the board is there nothing can be lent.
    let mut b = node("b", &PathKind::ALL, VERSIONS.max);
    let mut hand = ByHand::join(&mut b, "hand");
    let grant = b.grant(&peer("hand", 1), 0, 64);
    hand.lend(grant, 0, &loan(0, 77, &[(0, 0, 64)]));
    b.wait_down(&peer("hand", 1));
}
