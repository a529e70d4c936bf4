//! Writes that are handed over in place: who may read them, for how long their source is held, and what ends that.

mod common;

use std::os::fd::OwnedFd;

use bytes::Bytes;
use common::unix::{ByHand, board, file, loan, region};
use common::{config, key};
use kvferry_protocol::pages::{Extent, Loop, Pages, Piece};
use kvferry_protocol::wire::{FrameKind, Reach, Refusal, Share, TETHER, VERSIONS};
use kvferry_protocol::{PeerId, RegionId};
use kvferry_transport::testing::{Make, Node, peer};
use kvferry_transport::{
    Adopted, Event, GrantKey, PathKind, Planted, PostId, Source, Tcp, TcpConfig, TcpConfigFile, Transport,
    TransportError, Write,
};
use rustix::fs::SealFlags;

const MIB: usize = 1 << 20;

fn node_with(name: &str, file: TcpConfigFile, bytes: usize) -> Node {
    let make = |peer: PeerId, greeting: Bytes| -> Box<dyn Transport> {
        Box::new(Tcp::bind(TcpConfig::try_from(file.clone()).unwrap(), key(), peer, greeting).unwrap())
    };
    Node::new(&make, peer(name, 1), bytes)
}

fn node(name: &str) -> Node {
    node_with(name, TcpConfigFile { paths: PathKind::ALL.to_vec(), ..config() }, 16 * MIB)
}

fn pair() -> (Node, Node) {
    let (mut a, mut b) = (node("a"), node("b"));
    a.meet(&mut b);
    (a, b)
}

/// Waits for a write under `key`.
fn wait_lent(node: &mut Node, key: GrantKey) -> Adopted {
    match node.wait("Lent", |event| matches!(event, Event::Lent { grant, .. } if *grant == key)) {
        Event::Lent { adopted, .. } => adopted,
        _ => unreachable!("the filter takes only Lent"),
    }
}

fn wait_held(node: &mut Node, id: PostId) {
    node.wait("Held", |event| matches!(event, Event::Held { post } if *post == id));
}

fn wait_recalled(node: &mut Node, key: GrantKey) {
    node.wait("Recalled", |event| matches!(event, Event::Recalled { grant, .. } if *grant == key));
}

/// Hands over the first `bytes` bytes of `a`.
fn hand_over(a: &mut Node, b: &mut Node, bytes: usize) -> (GrantKey, PostId, Adopted) {
    let grant = b.transport.grant_in_place(&a.peer, bytes as u64).unwrap();
    let post = a.post(&b.peer, grant, 0, 0, 0, bytes as u64);
    let adopted = wait_lent(b, grant);
    wait_held(a, post);
    (grant, post, adopted)
}

fn read(adopted: &Adopted, offset: u64, bytes: usize) -> Vec<u8> {
    let mut found = vec![0; bytes];
    assert!(adopted.copy(offset, &mut found));
    found
}

#[test]
fn a_write_is_read_where_it_lies_and_its_post_stands_until_it_is_let_go() {
    let (mut a, mut b) = pair();
    a.memory.fill(0, MIB, 0x3a);
    let (_, post, adopted) = hand_over(&mut a, &mut b, MIB);
    let runs: Vec<_> = adopted.runs().collect();
    assert_eq!((runs.len(), runs[0].offset, runs[0].bytes), (1, 0, MIB));
    assert!(read(&adopted, 0, MIB).iter().all(|byte| *byte == 0x3a) && adopted.is_intact());
    // It is the sender's memory, and no copy.
    a.memory.write(77, &[0x55]);
    assert_eq!(read(&adopted, 76, 3), [0x3a, 0x55, 0x3a]);
    let mut over = [0; 2];
    assert!(!adopted.copy(MIB as u64 - 1, &mut over), "past the end of what was handed over");
    assert_eq!((a.transport.stats().held_bytes, a.transport.stats().posts_live), (MIB as u64, 1));
    assert_eq!((b.transport.stats().landed_bytes, b.transport.stats().adopted_bytes), (0, MIB as u64));
    drop(adopted);
    a.wait_posted(post).unwrap();
    assert_eq!((a.transport.stats().held_bytes, a.transport.stats().posts_live), (0, 0));
    assert_eq!(a.transport.stats().sent_bytes, 0, "nothing went over a lane");
}

#[test]
fn many_scattered_runs_in_many_frames_are_found_at_their_places_in_the_window() {
    let (mut a, mut b) = pair();
    let bytes: Vec<u8> =
        (0..16 * MIB).map(|at| (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()[7]).collect();
    a.memory.write(0, &bytes);
    // 3000 runs of 4 KiB, taken from the end to the start, into every other place of the window.
    let (runs, run) = (3000u64, 4096u64);
    let bases: Vec<u64> = (0..runs).rev().map(|at| at * run).collect();
    let pieces = vec![Piece { region: RegionId::new(0), offset: 0, loops: Vec::new(), run_bytes: run }];
    let extents =
        vec![Extent { offset: run, loops: vec![Loop { count: runs as u32, stride: 2 * run }], run_bytes: run }];
    let grant = b.transport.grant_in_place(&a.peer, 2 * run * runs).unwrap();
    let source = Source::Pages(vec![Pages { bases, pieces }]);
    let write = Write { grant, sequence: 9, extents, source, notification: Bytes::from_static(b"many") };
    let post = a.transport.post(&b.peer, write).unwrap();
    let lent = b.wait("Lent", |event| matches!(event, Event::Lent { .. }));
    let Event::Lent { sequence, bytes: of_write, notification, adopted, .. } = lent else { unreachable!() };
    assert_eq!((sequence, of_write, &notification[..]), (9, run * runs, &b"many"[..]));
    for at in 0..runs {
        let from = ((runs - 1 - at) * run) as usize;
        assert_eq!(read(&adopted, run + 2 * run * at, run as usize), bytes[from..from + run as usize], "run {at}");
        assert!(!adopted.copy(2 * run * at, &mut [0; 1]), "nothing was handed over between the runs");
    }
    drop(adopted);
    a.wait_posted(post).unwrap();
}

#[test]
fn ordinary_grants_go_on_beside_those_in_place() {
    let (mut a, mut b) = pair();
    a.memory.fill(0, MIB, 0x11);
    let (_, post, adopted) = hand_over(&mut a, &mut b, MIB);
    for round in 0..20u8 {
        b.memory.fill(0, MIB, 0);
        a.memory.fill(2 * MIB, MIB, round);
        let grant = b.grant(&a.peer, 0, MIB as u64);
        let copied = a.post(&b.peer, grant, 0, 2 * MIB as u64, 0, MIB as u64);
        b.wait_landed(grant);
        a.wait_posted(copied).unwrap();
        b.transport.revoke(grant);
        assert!(b.memory.is_all(0, MIB, round));
    }
    assert!(read(&adopted, 0, MIB).iter().all(|byte| *byte == 0x11));
    drop(adopted);
    a.wait_posted(post).unwrap();
}

#[test]
fn who_owns_the_memory_asks_for_it_once_and_waits_for_the_reader() {
    let (mut a, mut b) = pair();
    a.memory.fill(0, MIB, 0x3a);
    let (grant, post, adopted) = hand_over(&mut a, &mut b, MIB);
    a.transport.recall(&b.peer, post);
    a.transport.recall(&b.peer, post);
    wait_recalled(&mut b, grant);
    // The reader takes its time; the answer to a message shows that both words would have been heard by now.
    a.transport.send(&b.peer, Bytes::from_static(b"more?")).unwrap();
    b.wait("a message", |event| matches!(event, Event::Message { .. }));
    assert!(b.drain().is_empty(), "it is asked once");
    assert!(a.drain().is_empty() && a.transport.stats().posts_live == 1, "nobody takes it from the reader");
    let own = read(&adopted, 0, MIB);
    drop(adopted);
    a.wait_posted(post).unwrap();
    a.memory.fill(0, MIB, 0);
    assert!(own.iter().all(|byte| *byte == 0x3a));
    assert_eq!(a.transport.stats().recalled_writes, 1);
}

#[test]
fn a_cancel_asks_for_what_is_held_and_ends_what_is_not() {
    let (mut a, mut b) = pair();
    a.memory.fill(0, MIB, 0x3a);
    let (grant, post, adopted) = hand_over(&mut a, &mut b, MIB);
    a.transport.cancel(&b.peer, grant);
    wait_recalled(&mut b, grant);
    assert!(adopted.is_intact() && a.transport.stats().posts_live == 1);
    b.transport.revoke(grant);
    assert!(adopted.is_intact(), "a revoke takes nothing that was given out");
    drop(adopted);
    a.wait_posted(post).unwrap();
    // The receiver never granted this: nothing is held.
    let late = a.post(&b.peer, grant, 1, 0, 0, 64);
    assert!(matches!(a.wait_posted(late), Err(TransportError::Refused { .. })));
}

#[test]
fn what_is_held_for_long_is_asked_for_without_being_told_so() {
    let paths = PathKind::ALL.to_vec();
    let file = TcpConfigFile { paths, hold_ms: 1, keepalive_ms: 20, stall_ms: 10_000, ..config() };
    let (mut a, mut b) = (node_with("a", file, 4 * MIB), node("b"));
    a.meet(&mut b);
    let (grant, post, adopted) = hand_over(&mut a, &mut b, MIB);
    wait_recalled(&mut b, grant);
    assert!(adopted.is_intact() && a.transport.stats().posts_live == 1, "asked, and nothing else");
    drop(adopted);
    a.wait_posted(post).unwrap();
}

#[test]
fn a_post_that_is_held_does_not_make_its_session_stall() {
    let paths = PathKind::ALL.to_vec();
    // When it is asked back it has been held for longer than a post may take.
    let file = TcpConfigFile { paths, keepalive_ms: 50, stall_ms: 500, hold_ms: 1_200, ..config() };
    let (mut a, mut b) = (node_with("a", file.clone(), 4 * MIB), node_with("b", file, 4 * MIB));
    a.meet(&mut b);
    let (grant, post, adopted) = hand_over(&mut a, &mut b, MIB);
    wait_recalled(&mut b, grant);
    assert!(a.drain().is_empty() && b.drain().is_empty(), "the session goes on");
    drop(adopted);
    a.wait_posted(post).unwrap();
}

#[test]
fn a_cut_ends_nothing_that_is_read_and_the_last_that_is_let_go_ends_all() {
    let file = TcpConfigFile { paths: PathKind::ALL.to_vec(), ..config() };
    a_cut_ends_nothing(&|peer, greeting| {
        Box::new(Tcp::bind(TcpConfig::try_from(file.clone()).unwrap(), key(), peer, greeting).unwrap())
    });
}

#[test]
fn an_owner_that_forgets_its_readers_with_a_session_is_found_out() {
    let file = TcpConfigFile { paths: PathKind::ALL.to_vec(), ..config() };
    let make = |peer: PeerId, greeting: Bytes| -> Box<dyn Transport> {
        let config = TcpConfig::try_from(file.clone()).unwrap();
        Box::new(Tcp::bind_planted(config, key(), peer, greeting, Planted::CutForgetsHeld).unwrap())
    };
    let run = std::panic::AssertUnwindSafe(|| a_cut_ends_nothing(&make));
    assert!(std::panic::catch_unwind(run).is_err());
}

fn a_cut_ends_nothing(make: &Make<'_>) {
    for cut_by_reader in [false, true] {
        let (mut a, mut b) = Node::pair(make, 16 * MIB);
        a.memory.fill(0, 2 * MIB, 0x3a);
        let (_, first, one) = hand_over(&mut a, &mut b, MIB);
        let (_, second, other) = hand_over(&mut a, &mut b, 2 * MIB);
        let (near, far) = (a.peer.clone(), b.peer.clone());
        match cut_by_reader {
            true => b.transport.disconnect(&near, "cut"),
            false => a.transport.disconnect(&far, "cut"),
        }
        a.wait_down(&far);
        b.wait_down(&near);
        drop(one);
        assert!(other.is_intact() && read(&other, 0, 2 * MIB).iter().all(|byte| *byte == 0x3a));
        // Another session with the same peer begins, and serves; it ends nothing of the old one.
        a.transport.connect(&b.transport.local_address()).unwrap();
        a.wait_up(&far);
        b.wait_up(&near);
        let (_, third, new) = hand_over(&mut a, &mut b, 64);
        drop(new);
        a.wait_posted(third).unwrap();
        assert_eq!(a.transport.stats().posts_live, 2);
        assert!(other.is_intact());
        drop(other);
        for post in [first, second] {
            assert!(matches!(a.wait_posted(post), Err(TransportError::Disconnected { .. })));
        }
        assert_eq!((a.transport.stats().posts_live, a.transport.stats().held_bytes), (0, 0));
    }
}

#[test]
fn a_reader_sees_that_the_owner_gave_up_and_can_still_touch_the_memory() {
    let (mut a, mut b) = pair();
    let (_, _, adopted) = hand_over(&mut a, &mut b, MIB);
    let (_, _, later) = hand_over(&mut a, &mut b, 64);
    a.transport.disconnect(&b.peer, "cut");
    let near = a.peer.clone();
    b.wait_down(&near);
    a.transport.shutdown();
    assert!(!adopted.is_intact() && !later.is_intact());
    assert!(!later.copy(0, &mut [0; 64]), "a copy says so, too");
    drop(a);
    let last = adopted.runs().last().unwrap();
    assert_eq!(last.bytes, MIB, "it is mapped as long as it is kept");
    assert!(!adopted.copy(0, &mut [0; 4096]));
}

#[test]
fn where_memory_is_not_shared_no_grant_in_place_is_given() {
    let all = PathKind::ALL.to_vec();
    let tcp = || TcpConfigFile { paths: vec![PathKind::Tcp], ..config() };
    let old = TcpConfigFile { paths: all.clone(), newest_version: 2, ..config() };
    let cma = TcpConfigFile { paths: vec![PathKind::ProcessMemory, PathKind::UnixSocket], ..config() };
    for (name, file) in [("TCP", tcp()), ("an older version", old), ("process memory", cma)] {
        let (mut a, mut b) = (node_with("a", file, MIB), node("b"));
        a.meet(&mut b);
        let refused = b.transport.grant_in_place(&a.peer, 64);
        assert!(matches!(refused, Err(TransportError::Refused { .. })), "{name}: {refused:?}");
    }
    assert_eq!(VERSIONS.max, 3, "versions of today's sessions");
    let missing = node("b").transport.grant_in_place(&peer("nobody", 1), 64);
    assert!(matches!(missing, Err(TransportError::NotConnected { .. })));
}

#[test]
fn what_one_peer_holds_has_a_limit_and_ends_with_what_it_holds() {
    let paths = PathKind::ALL.to_vec();
    let file = TcpConfigFile { paths, max_held_bytes: MIB as u64, max_posts: 8, ..config() };
    let (mut a, mut b) = (node_with("a", file, 4 * MIB), node("b"));
    a.meet(&mut b);
    let (_, post, adopted) = hand_over(&mut a, &mut b, MIB);
    let grant = b.transport.grant_in_place(&a.peer, MIB as u64).unwrap();
    let write = |sequence: u32| Write {
        grant,
        sequence,
        extents: vec![Extent::contiguous(u64::from(sequence) * 64, 64)],
        source: Source::Pages(vec![Pages {
            bases: vec![0],
            pieces: vec![Piece { region: RegionId::new(0), offset: 0, loops: Vec::new(), run_bytes: 64 }],
        }]),
        notification: Bytes::new(),
    };
    let over = a.transport.post(&b.peer, write(0)).unwrap_err();
    assert!(matches!(over.reason, TransportError::Limit { what: "bytes that peers hold in place", .. }), "{over:?}");
    drop(adopted);
    a.wait_posted(post).unwrap();
    let posts: Vec<_> = (0..4).map(|sequence| a.transport.post(&b.peer, write(sequence)).unwrap()).collect();
    let over = a.transport.post(&b.peer, write(4)).unwrap_err();
    assert!(
        matches!(over.reason, TransportError::Limit { what: "writes that one peer holds in place", .. }),
        "{over:?}"
    );
    for post in &posts {
        wait_held(&mut a, *post);
    }
    // The events that carry them are dropped unseen, which lets go of them.
    b.drain();
    posts.into_iter().for_each(|post| a.wait_posted(post).unwrap());
    assert_eq!(a.transport.stats().held_bytes, 0);
}

#[test]
fn memory_without_a_file_is_not_handed_over() {
    let (mut a, b) = pair();
    let late = vec![7u8; 4096];
    let memory = kvferry_transport::Memory {
        address: std::ptr::NonNull::new(late.as_ptr().cast_mut()).unwrap(),
        bytes: late.len(),
        kind: kvferry_transport::MemoryKind::Host,
        file: None,
    };
    #[expect(unsafe_code, reason = "registering is the caller's promise")]
    // SAFETY: the vector outlives the node, which is dropped first below; nobody writes it.
    let region = unsafe { a.transport.register(memory) }.unwrap();
    let grant = b.transport.grant_in_place(&a.peer, 4096).unwrap();
    let pieces = vec![Piece { region, offset: 0, loops: Vec::new(), run_bytes: 4096 }];
    let source = Source::Pages(vec![Pages { bases: vec![0], pieces }]);
    let extents = vec![Extent::contiguous(0, 4096)];
    let write = Write { grant, sequence: 0, extents, source, notification: Bytes::new() };
    let post = a.transport.post(&b.peer, write).unwrap();
    let refused = a.wait_posted(post);
    assert!(
        matches!(&refused, Err(error @ TransportError::Refused { .. }) if error.to_string().contains("memory file")),
        "{refused:?}"
    );
    drop(a);
    drop(late);
}

/// A sender by hand that has shared its board, a tether and 4096 bytes.
fn sender(b: &mut Node) -> (ByHand, OwnedFd, OwnedFd) {
    let mut hand = ByHand::join(b, "hand");
    let (share, words) = board();
    assert_eq!(hand.share(&share, Some(&words)), None);
    let (ours, theirs) = std::io::pipe().unwrap();
    let tether = Share { region: TETHER, bytes: 1, reach: Reach::Descriptor { offset: 0 }, proof: 0 };
    let theirs = OwnedFd::from(theirs);
    assert_eq!(hand.share(&tether, Some(&theirs)), None);
    assert!(hand.share(&tether, Some(&theirs)).unwrap().contains("already"));
    assert_eq!(hand.share(&region(4096), Some(&file(&[0x2d; 4096], SealFlags::SHRINK))), None);
    (hand, words, ours.into())
}

#[test]
fn what_a_sender_by_hand_may_not_hand_over_is_refused_and_gives_nobody_anything() {
    let mut b = node("b");
    let (mut hand, words, _tether) = sender(&mut b);
    let from = peer("hand", 1);
    let grant = b.transport.grant_in_place(&from, 128).unwrap();
    // A word that does not stand, more than the window, and a number that was taken.
    hand.lend(grant, 0, &loan(0, 78, &[(0, 0, 64)]));
    assert_eq!(hand.word(FrameKind::Refuse).0.refusal, Some(Refusal::Cancelled));
    hand.lend(grant, 1, &loan(0, 77, &[(0, 0, 129)]));
    assert_eq!(hand.word(FrameKind::Refuse).0.refusal, Some(Refusal::OutOfWindow));
    hand.lend(grant, 2, &loan(0, 77, &[(0, 100, 64), (0, 0, 32)]));
    hand.word(FrameKind::Held);
    let adopted = wait_lent(&mut b, grant);
    assert_eq!(read(&adopted, 0, 96), [0x2d; 96]);
    hand.lend(grant, 2, &loan(0, 77, &[(0, 0, 96)]));
    assert_eq!(hand.word(FrameKind::Refuse).0.refusal, Some(Refusal::SequenceTaken));
    // Each byte of the window is handed over once at most.
    hand.lend(grant, 3, &loan(0, 77, &[(0, 0, 64)]));
    assert_eq!(hand.word(FrameKind::Refuse).0.refusal, Some(Refusal::TooMany));
    // An ordinary grant copies, and the word tells what became of what is held.
    let copied = b.grant(&from, 0, 64);
    hand.lend(copied, 0, &loan(0, 77, &[(0, 0, 64)]));
    b.wait_landed(copied);
    rustix::io::pwrite(&words, &0u64.to_ne_bytes(), 16).unwrap();
    assert!(!adopted.is_intact());
    assert!(b.drain().is_empty(), "nothing of these was handed over");
}

#[test]
fn runs_that_were_never_shared_end_the_session_and_give_nobody_anything() {
    for (name, runs) in
        [("no such region", &[(3, 0, 64)][..]), ("past the end", &[(0, 4090, 7)]), ("far away", &[(0, u64::MAX, 1)])]
    {
        let mut b = node("b");
        let (mut hand, _words, _tether) = sender(&mut b);
        let grant = b.transport.grant_in_place(&peer("hand", 1), 4096).unwrap();
        hand.lend(grant, 0, &loan(0, 77, runs));
        let Event::Down { reason, .. } = b.wait_down(&peer("hand", 1)) else { panic!() };
        assert!(matches!(reason, TransportError::Protocol { .. }), "{name}: {reason}");
        assert!(b.drain().is_empty(), "{name}");
    }
}

#[test]
fn where_something_shared_cannot_be_mapped_no_grant_in_place_is_given() {
    let mut b = node("b");
    let (mut hand, _words, _tether) = sender(&mut b);
    b.transport.grant_in_place(&peer("hand", 1), 64).unwrap();
    let short = file(&[0x2d; 4096], SealFlags::SHRINK);
    let problem = hand.share(&Share { region: 1, ..region(8192) }, Some(&short)).unwrap();
    let refused = b.transport.grant_in_place(&peer("hand", 1), 64).unwrap_err();
    assert!(refused.to_string().contains(&problem), "{refused}");
}

/// The system throws it away where there is no room for more.
#[test]
fn a_descriptor_that_is_lost_on_its_way_ends_the_session() {
    let mut b = node("b");
    let (mut hand, _words, _tether) = sender(&mut b);
    hand.tell(&Share { region: 1, ..region(8192) }, None);
    let Event::Down { reason, .. } = b.wait_down(&peer("hand", 1)) else { panic!() };
    assert!(format!("{reason:?}").contains("too many files"), "{reason:?}");
}

#[test]
fn without_a_tether_nothing_is_taken_in_place() {
    let mut b = node("b");
    let mut hand = ByHand::join(&mut b, "hand");
    let (share, words) = board();
    assert_eq!(hand.share(&share, Some(&words)), None);
    assert_eq!(hand.share(&region(4096), Some(&file(&[0x2d; 4096], SealFlags::SHRINK))), None);
    let grant = b.transport.grant_in_place(&peer("hand", 1), 64).unwrap();
    hand.lend(grant, 0, &loan(0, 77, &[(0, 0, 64)]));
    assert_eq!(hand.word(FrameKind::Refuse).0.refusal, Some(Refusal::NotInPlace));
    assert!(b.drain().is_empty());
}

#[test]
fn words_of_a_reader_by_hand_end_a_post_once_whatever_their_order() {
    let mut a = node("a");
    let mut hand = ByHand::join(&mut a, "hand");
    let to = peer("hand", 1);
    let grant = GrantKey(0x1234_5679); // odd: in place
    let first = a.post(&to, grant, 0, 0, 0, 64);
    let header = hand.take_shares();
    assert_eq!((header.grant, header.sequence), (grant.0, 0));
    hand.say(FrameKind::Held, 99, 7);
    hand.say(FrameKind::Held, grant.0, 0);
    hand.say(FrameKind::Held, grant.0, 0);
    wait_held(&mut a, first);
    for _ in 0..3 {
        hand.say(FrameKind::Ack, grant.0, 0);
    }
    a.wait_posted(first).unwrap();
    // Let go before it was said to be held.
    let second = a.post(&to, grant, 1, 0, 0, 64);
    hand.take_shares();
    hand.say(FrameKind::Ack, grant.0, 1);
    hand.say(FrameKind::Held, grant.0, 1);
    a.wait_posted(second).unwrap();
    // What is refused is not held.
    let third = a.post(&to, grant, 2, 0, 0, 64);
    hand.take_shares();
    let refusal = kvferry_protocol::wire::FrameHeader::about(FrameKind::Refuse, Some(Refusal::NotInPlace), grant.0, 2);
    std::io::Write::write_all(&mut hand.data, &refusal.encode(VERSIONS.max)).unwrap();
    assert!(matches!(a.wait_posted(third), Err(TransportError::Refused { .. })));
    assert_eq!((a.drain().len(), a.transport.stats().posts_live, a.transport.stats().held_bytes), (0, 0, 0));
    // A reader that throws its end of the tether away holds nothing when its session is over.
    let fourth = a.post(&to, grant, 3, 0, 0, 64);
    hand.take_shares();
    drop(hand);
    assert!(matches!(a.wait_posted(fourth), Err(TransportError::Disconnected { .. })));
}
