//! The contract, one function a sentence.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvferry_protocol::RegionId;
use kvferry_protocol::pages::{Extent, Loop, Pages, Piece};
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestRunner};

use super::node::{Make, Node, contiguous, patience, peer, write};
use super::pages::{Random, scattered_write};
use crate::api::{Event, GrantKey, Slab, Source, Write};
use crate::error::TransportError;

const MIB: usize = 1 << 20;

fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    (0..bytes).map(|_| random.next() as u8).collect()
}

/// Random pages and extents arrive byte for byte, and no other byte changes.
///
/// # Panics
/// If the transport breaks the contract; so do all cases.
pub fn scattered_bytes_arrive_exactly(make: &Make<'_>) {
    const BYTES: usize = 64 << 10;
    let (mut a, mut b) = Node::pair(make, BYTES);
    a.memory.write(0, &pattern(BYTES, 1));
    b.memory.write(0, &pattern(BYTES, 2));
    let bytes = a.memory.read(0, BYTES);
    let mut runner = TestRunner::new(Config { cases: 64, failure_persistence: None, ..Config::default() });
    let strategy = scattered_write(BYTES as u64).no_shrink();
    let nodes = std::cell::RefCell::new((&mut a, &mut b));
    let result = runner.run(&strategy, |scattered| {
        let mut nodes = nodes.borrow_mut();
        let (a, b) = &mut *nodes;
        let want = scattered.apply(&bytes, &b.memory.read(0, BYTES));
        let grant = b.transport.grant(&a.peer, scattered.window.clone()).expect("a grant");
        let write = Write {
            grant,
            sequence: 0,
            extents: scattered.extents.clone(),
            source: Source::Pages(scattered.source.clone()),
            notification: Bytes::new(),
        };
        let post = a.transport.post(&b.peer, write).expect("a post");
        b.wait_landed(grant);
        assert_eq!(b.memory.read(0, BYTES), want);
        a.wait_posted(post).expect("it landed");
        b.transport.revoke(grant);
        Ok(())
    });
    result.expect("every write arrives as the model says");
}

/// Writes that are cut into many frames, over all lanes and both ways at once.
pub fn writes_of_many_frames_land_whole_in_both_directions(make: &Make<'_>) {
    let (mut a, mut b) = Node::pair(make, 12 * MIB);
    // The lower half of each is sent, the upper one is received: runs of 40 KiB and a gap of 8 KiB.
    let (run, gap, count) = (40u64 << 10, 8u64 << 10, 120u32);
    let pages = |offset| Pages {
        bases: vec![0],
        pieces: vec![Piece {
            region: RegionId::new(0),
            offset,
            loops: vec![Loop { count, stride: run + gap }],
            run_bytes: run,
        }],
    };
    let half = 6 * MIB as u64;
    for (node, seed) in [(&a, 3), (&b, 4)] {
        node.memory.write(0, &pattern(6 * MIB, seed));
    }
    let mut started = Vec::new();
    for (from, to) in [(&a, &b), (&b, &a)] {
        let grant = to.transport.grant(&from.peer, pages(half)).expect("a grant");
        let write = Write {
            grant,
            sequence: 7,
            extents: vec![Extent::contiguous(0, run * u64::from(count))],
            source: Source::Pages(vec![pages(0)]),
            notification: Bytes::from_static(b"whole"),
        };
        started.push((grant, from.transport.post(&to.peer, write).expect("a post")));
    }
    assert_eq!(b.wait_landed(started[0].0), (7, run * u64::from(count), Bytes::from_static(b"whole")));
    assert_eq!(a.wait_landed(started[1].0), (7, run * u64::from(count), Bytes::from_static(b"whole")));
    a.wait_posted(started[0].1).expect("it landed");
    b.wait_posted(started[1].1).expect("it landed");
    for (from, to) in [(&a, &b), (&b, &a)] {
        for step in 0..u64::from(count) {
            let at = (step * (run + gap)) as usize;
            let (sent, received) = (from.memory.read(at, run as usize), to.memory.read(at + 6 * MIB, run as usize));
            assert!(sent == received, "run {step} of the write from {}", from.peer);
            let gap_at = at + run as usize + 6 * MIB;
            assert!(to.memory.is_all(gap_at, gap as usize, 0), "the gap after run {step} is untouched");
        }
    }
}

/// One event a write, with its bytes in place; one completion a post.
pub fn each_write_lands_once_after_its_bytes_with_its_notification(make: &Make<'_>) {
    const WRITES: u32 = 200;
    const BYTES: u64 = 3000;
    let (mut a, mut b) = Node::pair(make, MIB);
    a.memory.write(0, &pattern(MIB, 5));
    let grant = b.grant(&a.peer, 0, MIB as u64);
    let posts: Vec<_> = (0..WRITES)
        .map(|sequence| {
            a.post(&b.peer, grant, sequence, u64::from(sequence) * BYTES, u64::from(sequence) * BYTES, BYTES)
        })
        .collect();
    let mut seen = vec![false; WRITES as usize];
    for _ in 0..WRITES {
        let (sequence, bytes, notification) = b.wait_landed(grant);
        assert_eq!((bytes, &notification[..]), (BYTES, &sequence.to_le_bytes()[..]));
        assert!(!std::mem::replace(&mut seen[sequence as usize], true), "write {sequence} twice");
        let at = sequence as usize * BYTES as usize;
        assert_eq!(b.memory.read(at, BYTES as usize), a.memory.read(at, BYTES as usize), "write {sequence}");
    }
    for post in posts {
        a.wait_posted(post).expect("it landed");
    }
    assert!(a.drain().is_empty() && b.drain().is_empty(), "nothing comes twice");
    b.transport.revoke(grant);
    let (sent, landed) = (a.transport.stats(), b.transport.stats());
    assert_eq!((sent.posts_live, landed.grants_live), (0, 0));
    assert_eq!((sent.sent_bytes, landed.landed_bytes), (u64::from(WRITES) * BYTES, u64::from(WRITES) * BYTES));
}

/// More than a thousand races between writes and revokes; what the receiver stores after the revoke stays.
pub fn nothing_lands_after_revoke_returned(make: &Make<'_>) {
    const ROUNDS: usize = 1200;
    const BYTES: usize = 256 << 10;
    const TAIL: usize = 64;
    const RACES: usize = 20;
    let (mut a, b) = Node::pair(make, 2 * BYTES);
    a.memory.fill(0, 2 * BYTES, 0x11);
    let mut random = Random(6);
    let mut posts = Vec::new();
    let (mut whole, mut cut_short) = (0, 0);
    let mut deadline = None;
    let mut round = 0;
    // On a busy machine a copy is often over before this thread runs again; such rounds prove nothing.
    while round < ROUNDS || cut_short < RACES {
        // A slow device may need long for the rounds; only races that never come are given up.
        if round >= ROUNDS {
            let deadline = deadline.get_or_insert_with(|| Instant::now() + patience());
            assert!(Instant::now() < *deadline, "no race was run: {whole} whole, {cut_short} cut short");
        }
        let half = round % 2 * BYTES;
        b.memory.fill(half, BYTES, 0);
        let grant = b.grant(&a.peer, half as u64, BYTES as u64);
        posts.push(a.post(&b.peer, grant, 0, 0, 0, BYTES as u64));
        // Most often as soon as a byte near the front has changed: then the rest is being copied at this moment.
        let probe = half + random.next() as usize % (BYTES / 4);
        let patience = if round % 4 == 0 { random.next() % 2000 } else { 1_000_000 };
        for _ in 0..patience {
            if b.memory.is_all(probe, 1, 0x11) {
                break;
            }
            std::hint::spin_loop();
        }
        b.transport.revoke(grant);
        // The last bytes first: a copy that still goes on comes there last, and cannot hide behind this one.
        b.memory.fill(half + BYTES - TAIL, TAIL, 0xee);
        if b.memory.is_all(half, BYTES - TAIL, 0x11) {
            whole += 1
        } else {
            cut_short += 1
        }
        b.memory.fill(half, BYTES - TAIL, 0xee);
        // What this round left on the way has a round's time to do harm.
        if round > 0 {
            assert!(b.memory.is_all(BYTES - half, BYTES, 0xee), "late bytes of round {}", round - 1);
        }
        round += 1;
    }
    for post in posts {
        match a.wait_posted(post) {
            Ok(()) | Err(TransportError::Refused { .. }) => {}
            Err(other) => panic!("a revoked write ends refused or landed, not: {other}"),
        }
    }
    assert!(b.memory.is_all(0, 2 * BYTES, 0xee), "late bytes of the last round");
    assert_eq!(b.transport.stats().grants_live, 0);
}

/// Some hundred races between writes to a part and its seal; what the receiver stores there after the seal stays. The other part
/// takes writes all the while.
pub fn nothing_lands_in_what_is_sealed_and_the_rest_stays_open(make: &Make<'_>) {
    const HALF: u64 = 96 << 10;
    let (mut a, b) = Node::pair(make, 4 * HALF as usize);
    a.memory.write(0, &vec![1; 4 * HALF as usize]);
    for round in 0..150 {
        let grant = b.grant(&a.peer, 0, 2 * HALF);
        let racing: Vec<_> = (0..3).map(|sequence| a.post(&b.peer, grant, sequence, 0, 0, HALF)).collect();
        b.transport.seal(grant, &[Extent::contiguous(0, HALF)]);
        b.memory.write(0, &vec![9; HALF as usize]);
        let late = a.post(&b.peer, grant, 3, 0, HALF - 1, 2);
        let beside = a.post(&b.peer, grant, 4, 0, HALF, HALF);
        for post in racing {
            match a.wait_posted(post) {
                Ok(()) | Err(TransportError::Refused { .. }) => {}
                Err(other) => panic!("a write to a sealed part ends refused or landed, not: {other}"),
            }
        }
        assert!(matches!(a.wait_posted(late), Err(TransportError::Refused { .. })), "it begins in the sealed part");
        a.wait_posted(beside).expect("this part is open");
        assert!(b.memory.is_all(0, HALF as usize, 9), "round {round}: a byte landed in the sealed part");
        assert!(b.memory.is_all(HALF as usize, HALF as usize, 1), "round {round}: the open part was written");
        b.transport.revoke(grant);
    }
}

/// Unknown, revoked and foreign grants, ranges outside, overlapping loops, numbers taken before.
pub fn what_may_not_be_written_is_refused_and_the_session_goes_on(make: &Make<'_>) {
    let (mut a, mut b) = Node::pair(make, 8192);
    a.memory.fill(0, 8192, 0x33);
    let grant = b.grant(&a.peer, 1024, 1024);
    let revoked = b.grant(&a.peer, 4096, 1024);
    b.transport.revoke(revoked);
    let good = a.post(&b.peer, grant, 1, 0, 0, 16);
    a.wait_posted(good).expect("the grant is good");
    let nest = |offset, count, stride, run_bytes| Extent { offset, loops: vec![Loop { count, stride }], run_bytes };
    let cases = [
        ("unknown key", GrantKey(7), 0, Extent::contiguous(0, 16)),
        ("revoked key", revoked, 0, Extent::contiguous(0, 16)),
        ("number taken before", grant, 1, Extent::contiguous(16, 16)),
        ("one byte past the window", grant, 2, Extent::contiguous(1009, 16)),
        ("far outside", grant, 3, Extent::contiguous(u64::MAX - 16, 16)),
        ("loops that leave the window", grant, 4, nest(0, 2, 1020, 8)),
        ("loops that overlap", grant, 5, nest(0, 2, 4, 8)),
        ("the same run again and again", grant, 6, nest(0, 2, 0, 8)),
    ];
    let count = cases.len() as u64;
    for (name, key, sequence, extent) in cases {
        let write = Write { extents: vec![extent], ..write(key, sequence, 0, 0, 16) };
        let post = a.transport.post(&b.peer, write).expect("the sender cannot know");
        let outcome = a.wait_posted(post);
        assert!(matches!(outcome, Err(TransportError::Refused { .. })), "{name}: {outcome:?}");
    }
    assert!(b.memory.is_all(0, 1024, 0) && b.memory.is_all(1040, 8192 - 1040, 0), "nothing was placed outside");
    let last = a.post(&b.peer, grant, 9, 0, 1008, 16);
    a.wait_posted(last).expect("the session goes on");
    assert_eq!(b.transport.stats().refused_writes, count);
    let landed = b.drain().into_iter().filter(|event| matches!(event, Event::Landed { .. })).count();
    assert_eq!(landed, 2, "only the good ones");
}

/// A post that cannot be comes back with its write, and nothing was sent.
pub fn a_write_that_makes_no_sense_is_handed_back(make: &Make<'_>) {
    let (a, b) = Node::pair(make, 8192);
    let grant = b.grant(&a.peer, 0, 8192);
    let limits = a.transport.capabilities();
    let good = || write(grant, 3, 0, 0, 64);
    let deep = Extent { offset: 0, loops: vec![Loop { count: 1, stride: 1 }; Extent::MAX_LOOPS + 1], run_bytes: 64 };
    for (name, wrong) in [
        ("more source than extents", Write { extents: vec![Extent::contiguous(0, 63)], ..good() }),
        ("less source than extents", Write { extents: vec![Extent::contiguous(0, 65)], ..good() }),
        ("nothing", Write { extents: vec![], source: Source::Pages(vec![]), ..good() }),
        ("a source outside its region", Write { source: Source::Pages(vec![contiguous(8192 - 63, 64)]), ..good() }),
        ("too deep a nest", Write { extents: vec![deep], ..good() }),
        ("too many extents", Write { extents: vec![Extent::contiguous(0, 1); limits.max_extents + 1], ..good() }),
        ("too long a word", Write { notification: vec![0; limits.max_notification_bytes + 1].into(), ..good() }),
    ] {
        let error = a.transport.post(&b.peer, wrong).expect_err(name);
        assert_eq!((error.write.grant, error.write.sequence), (grant, 3), "{name}");
    }
    let stranger = a.transport.post(&peer("stranger", 1), good()).expect_err("nobody is there");
    assert!(matches!(stranger.reason, TransportError::NotConnected { .. }));
    let outside = b.transport.grant(&a.peer, contiguous(1, 8192)).expect_err("one byte too many");
    assert!(matches!(outside, TransportError::Range { .. }), "{outside}");
    assert_eq!(a.transport.stats().posts_live, 0);
}

/// Posts that wait, that are on their way and that landed.
pub fn cancel_ends_each_post_once(make: &Make<'_>) {
    const POSTS: u32 = 64;
    let each = 256u64 << 10;
    let (mut a, mut b) = Node::pair(make, 16 * MIB);
    a.memory.fill(0, 16 * MIB, 0x44);
    for round in 0..4 {
        let grant = b.grant(&a.peer, 0, 16 * MIB as u64);
        let posts: Vec<_> = (0..POSTS)
            .map(|sequence| {
                a.post(&b.peer, grant, sequence, u64::from(sequence) * each, u64::from(sequence) * each, each)
            })
            .collect();
        if round > 0 {
            b.wait_landed(grant);
        }
        a.transport.cancel(&b.peer, grant);
        let (mut landed, mut cancelled) = (0, 0);
        for post in posts {
            match a.wait_posted(post) {
                Ok(()) => landed += 1,
                Err(TransportError::Cancelled) => cancelled += 1,
                Err(other) => panic!("{other}"),
            }
        }
        assert_eq!(landed + cancelled, POSTS);
        assert_eq!(a.transport.stats().posts_live, 0);
        // What ended cancelled never lands, and what landed had ended well.
        b.transport.revoke(grant);
        let events = b.drain();
        let seen = events.iter().filter(|event| matches!(event, Event::Landed { .. })).count() as u32;
        assert_eq!(seen + u32::from(round > 0), landed);
        assert!(a.drain().is_empty(), "each post ended once");
    }
    let grant = b.grant(&a.peer, 0, 64);
    let post = a.post(&b.peer, grant, 0, 0, 0, 64);
    a.wait_posted(post).expect("the session goes on");
}

/// A source may change as soon as its post was cancelled: a write lands as it was posted, or not at all.
pub fn what_lands_is_what_was_posted(make: &Make<'_>) {
    const POSTS: u32 = 8;
    const POSTED: u8 = 0x51;
    const LATER: u8 = 0x15;
    let (mut a, mut b) = Node::pair(make, 8 * MIB);
    for round in 0..12 {
        a.memory.fill(0, 8 * MIB, POSTED);
        b.memory.fill(0, 8 * MIB, 0);
        let grant = b.grant(&a.peer, 0, 8 * MIB as u64);
        let at = |sequence: u32| u64::from(sequence) * MIB as u64;
        let post = |sequence| a.post(&b.peer, grant, sequence, at(sequence), at(sequence), MIB as u64);
        let posts: Vec<_> = (0..POSTS).map(post).collect();
        let mut landed = Vec::new();
        for _ in 0..round % 3 {
            landed.push(b.wait_landed(grant).0);
        }
        a.transport.cancel(&b.peer, grant);
        a.memory.fill(0, 8 * MIB, LATER);
        let ended: Vec<_> = posts.into_iter().map(|post| a.wait_posted(post).is_ok()).collect();
        b.transport.revoke(grant);
        landed.extend(b.drain().into_iter().filter_map(|event| match event {
            Event::Landed { sequence, .. } => Some(sequence),
            _ => None,
        }));
        assert_eq!(landed.len(), ended.iter().filter(|landed| **landed).count());
        for sequence in landed {
            assert!(ended[sequence as usize], "write {sequence} landed and its post was cancelled");
            assert!(b.memory.is_all(at(sequence) as usize, MIB, POSTED), "write {sequence} landed with later bytes");
        }
    }
}

/// A slab's last owner is the caller again after the completion.
pub fn a_packed_source_is_let_go_with_its_post(make: &Make<'_>) {
    #[derive(Debug)]
    struct Packed(Vec<u8>);
    impl Slab for Packed {
        fn bytes(&self) -> &[u8] {
            &self.0
        }
    }
    let (mut a, mut b) = Node::pair(make, 3 * MIB);
    let slab = Arc::new(Packed(pattern(3 * MIB, 7)));
    for (sequence, is_granted) in [(0, true), (1, false)] {
        let grant = if is_granted { b.grant(&a.peer, 0, 3 * MIB as u64) } else { GrantKey(1) };
        let source = Source::Packed(Arc::clone(&slab) as Arc<dyn Slab>);
        let write = Write { source, ..write(grant, sequence, 0, 0, 3 * MIB as u64) };
        let post = a.transport.post(&b.peer, write).expect("a post");
        assert_eq!(a.wait_posted(post).is_ok(), is_granted);
        assert_eq!(Arc::strong_count(&slab), 1, "nobody else holds the slab");
    }
    assert!(b.memory.read(0, 3 * MIB) == slab.0);
    let landed = b.wait("Landed", |event| matches!(event, Event::Landed { .. }));
    assert!(matches!(landed, Event::Landed { sequence: 0, .. }));
}

/// Messages both ways, in order, each once, while payload flows.
pub fn messages_come_in_order_beside_payload(make: &Make<'_>) {
    const MESSAGES: u32 = 500;
    let (mut a, mut b) = Node::pair(make, 4 * MIB);
    let grant = b.grant(&a.peer, 0, 4 * MIB as u64);
    let posts: Vec<_> = (0..8).map(|sequence| a.post(&b.peer, grant, sequence, 0, 0, 4 * MIB as u64)).collect();
    for number in 0..MESSAGES {
        let message = Bytes::from([&number.to_le_bytes()[..], &vec![1; number as usize % 300]].concat());
        a.transport.send(&b.peer, message.clone()).expect("there is room");
        b.transport.send(&a.peer, message).expect("there is room");
    }
    for (node, from) in [(&mut b, a.peer.clone()), (&mut a, peer("b", 1))] {
        for number in 0..MESSAGES {
            let Event::Message { peer, message } = node.wait("Message", |e| matches!(e, Event::Message { .. })) else {
                unreachable!("the filter takes only messages")
            };
            assert_eq!(peer, from);
            assert_eq!(message[..4], number.to_le_bytes(), "in order, none missing, none twice");
            assert_eq!(message.len(), 4 + number as usize % 300);
        }
    }
    for post in posts {
        a.wait_posted(post).expect("it landed");
    }
}

/// Limits are errors, and the longest of everything passes.
pub fn what_is_too_long_is_refused_in_writing(make: &Make<'_>) {
    let (mut a, mut b) = Node::pair(make, 8192);
    let limits = a.transport.capabilities();
    let too_long = a.transport.send(&b.peer, vec![0; limits.max_message_bytes + 1].into()).expect_err("over the limit");
    assert!(matches!(too_long, TransportError::Limit { .. }), "{too_long}");
    let longest = Bytes::from(vec![9; limits.max_message_bytes]);
    a.transport.send(&b.peer, longest.clone()).expect("at the limit");
    let Event::Message { message, .. } = b.wait("Message", |e| matches!(e, Event::Message { .. })) else {
        unreachable!("the filter takes only messages")
    };
    assert!(message == longest);
    let grant = b.grant(&a.peer, 0, 64);
    let notification = Bytes::from(vec![8; limits.max_notification_bytes]);
    let post = Write { notification: notification.clone(), ..write(grant, 0, 0, 0, 64) };
    let post = a.transport.post(&b.peer, post).expect("at the limit");
    a.wait_posted(post).expect("it landed");
    assert_eq!(b.wait_landed(grant).2, notification);
    let nobody = a.transport.send(&peer("nobody", 1), Bytes::new()).expect_err("nobody is there");
    assert!(matches!(nobody, TransportError::NotConnected { .. }), "{nobody}");
}

/// Whoever ends a session, posts and grants end before it does, on both sides; then the dialler comes back.
pub fn disconnect_ends_posts_and_grants_first_and_the_dialler_comes_back(make: &Make<'_>) {
    let (mut a, mut b) = Node::pair(make, 16 * MIB);
    let grant = b.grant(&a.peer, 0, 16 * MIB as u64);
    let posts: Vec<_> = (0..16).map(|sequence| a.post(&b.peer, grant, sequence, 0, 0, 16 * MIB as u64)).collect();
    b.transport.disconnect(&a.peer, "a test");
    let Event::Down { reason, .. } = b.wait_down(&a.peer) else { unreachable!("wait_down gives Down") };
    assert!(matches!(reason, TransportError::Disconnected { .. }), "{reason}");
    assert_eq!(b.transport.stats().grants_live, 0);
    b.memory.fill(0, 16 * MIB, 0xee);
    let mut ended = 0;
    let mut up = false;
    while !up {
        match a.wait("any", |_| true) {
            Event::Posted { .. } => ended += 1,
            Event::Down { peer: Some(_), .. } => assert_eq!(ended, posts.len(), "posts end before the session does"),
            Event::Up { session, .. } => {
                assert!(session > 1, "a new session has a higher number");
                up = true;
            }
            _ => {}
        }
    }
    b.wait_up(&a.peer);
    assert_eq!(a.transport.stats().posts_live, 0);
    let stale = a.post(&b.peer, grant, 99, 0, 0, 64);
    assert!(matches!(a.wait_posted(stale), Err(TransportError::Refused { .. })), "the old grant is dead");
    assert!(b.memory.is_all(0, 16 * MIB, 0xee), "nothing of the old session landed");
    let fresh = b.grant(&a.peer, 0, 64);
    let post = a.post(&b.peer, fresh, 0, 0, 0, 64);
    a.wait_posted(post).expect("the new session carries");
    a.transport.disconnect(&b.peer, "for good");
    a.wait_down(&b.peer);
    b.wait_down(&a.peer);
    assert_eq!(b.transport.stats().grants_live, 0);
}

/// The session with who is at a forgotten address carries on; when it ends, nobody dials.
pub fn a_forgotten_address_is_not_dialled_again_and_its_session_stays(make: &Make<'_>) {
    let (mut a, mut b) = Node::pair(make, 8192);
    a.transport.forget(&b.transport.local_address());
    let grant = b.grant(&a.peer, 0, 64);
    let post = a.post(&b.peer, grant, 0, 0, 0, 64);
    a.wait_posted(post).expect("the session carries");
    b.transport.disconnect(&a.peer, "a test");
    a.wait_down(&b.peer);
    // Meanwhile it would have dialled.
    for number in 1..=3 {
        let mut c = Node::new(make, peer("c", number), 64);
        a.meet(&mut c);
        a.transport.disconnect(&c.peer, "a test");
        a.wait_down(&c.peer);
    }
    let came_back = |event: &Event| matches!(event, Event::Up { peer, .. } if *peer == b.peer);
    assert!(!a.drain().iter().any(came_back), "a forgotten address was dialled");
    a.meet(&mut b);
}

/// Another incarnation ends the sessions and grants of the one before.
pub fn a_restarted_peer_is_a_new_one(make: &Make<'_>) {
    let (a, mut b) = Node::pair(make, 8192);
    let old = b.grant(&a.peer, 0, 64);
    let mut restarted = Node::new(make, peer("a", 2), 8192);
    restarted.transport.connect(&b.transport.local_address()).expect("an address");
    let mut was_down = false;
    loop {
        match b.wait("Down, then Up", |_| true) {
            Event::Down { peer: Some(peer), .. } if peer == a.peer => was_down = true,
            Event::Up { peer, .. } if peer == restarted.peer => break,
            _ => {}
        }
    }
    assert!(was_down, "the old one ended first");
    restarted.wait_up(&b.peer);
    assert_eq!(b.transport.stats().grants_live, 0, "its grants went with it");
    let stale = restarted.post(&b.peer, old, 0, 0, 0, 64);
    assert!(matches!(restarted.wait_posted(stale), Err(TransportError::Refused { .. })));
    let refused = b.transport.grant(&a.peer, contiguous(0, 64)).expect_err("it is gone");
    assert!(matches!(refused, TransportError::NotConnected { .. }));
    let grant = b.grant(&restarted.peer, 0, 64);
    let post = restarted.post(&b.peer, grant, 0, 0, 0, 64);
    restarted.wait_posted(post).expect("the new one may write");
}

/// Everything ends, on both sides, and nothing is touched afterwards.
pub fn shutdown_amid_traffic_ends_everything(make: &Make<'_>) {
    for is_sender in [true, false] {
        let (mut a, mut b) = Node::pair(make, 16 * MIB);
        a.memory.fill(0, 16 * MIB, 0x55);
        let grant = b.grant(&a.peer, 0, 16 * MIB as u64);
        let posts: Vec<_> = (0..16).map(|sequence| a.post(&b.peer, grant, sequence, 0, 0, 16 * MIB as u64)).collect();
        b.wait_landed(grant);
        if is_sender {
            a.transport.shutdown()
        } else {
            b.transport.shutdown()
        }
        if !is_sender {
            b.memory.fill(0, 16 * MIB, 0xee);
        }
        for post in posts {
            // Some landed before.
            let _ = a.wait_posted(post);
        }
        a.wait_down(&b.peer);
        b.wait_down(&a.peer);
        assert_eq!((a.transport.stats().posts_live, b.transport.stats().grants_live), (0, 0));
        if !is_sender {
            assert!(b.memory.is_all(0, 16 * MIB, 0xee), "nothing lands after shutdown");
        }
        let other = if is_sender { &b } else { &a };
        other.transport.shutdown();
        other.transport.shutdown();
    }
}

/// An address where nobody listens is reported, tried again, and found when somebody comes.
pub fn a_peer_that_is_not_there_is_reported_and_found_later(make: &Make<'_>) {
    let mut a = Node::new(make, peer("a", 1), 64);
    let gone = Node::new(make, peer("b", 1), 64);
    let address = gone.transport.local_address();
    gone.transport.shutdown();
    a.transport.connect(&address).expect("an address");
    a.transport.connect(&address).expect("asking again is harmless");
    for _ in 0..2 {
        let event = a.wait("Down", |event| matches!(event, Event::Down { peer: None, .. }));
        assert!(matches!(event, Event::Down { address: Some(at), .. } if at == address), "{event:?}");
    }
    let mut events = Vec::new();
    a.transport.poll(&mut events, Duration::ZERO);
    a.transport.shutdown();
}
