//! The contract at its borders: other peers, sessions that ended, limits that come back.

use std::time::Instant;

use bytes::Bytes;

use super::node::{Make, Node, contiguous, patience, peer};
use super::pages::Random;
use crate::api::Event;
use crate::error::TransportError;

/// More posts and grants than any transport here may have under way at once.
const MORE_THAN_THE_LIMIT: usize = 5000;

/// What one peer was granted is of no use to another, nor to the same one in its next session.
///
/// # Panics
/// If the transport breaks the contract; so do all cases.
pub fn a_grant_is_of_no_use_to_another_peer(make: &Make<'_>) {
    let (mut a, mut b) = Node::pair(make, 8192);
    let mut thief = Node::new(make, peer("thief", 1), 8192);
    thief.meet(&mut b);
    thief.memory.fill(0, 8192, 0x66);
    let grant = b.grant(&a.peer, 0, 4096);
    let stolen = thief.post(&b.peer, grant, 0, 0, 0, 4096);
    let outcome = thief.wait_posted(stolen);
    assert!(matches!(outcome, Err(TransportError::Refused { .. })), "{outcome:?}");
    assert!(b.memory.is_all(0, 8192, 0), "a stranger wrote");
    // Nor does the attempt spoil it for its owner.
    let post = a.post(&b.peer, grant, 0, 0, 0, 4096);
    a.wait_posted(post).expect("the owner's write lands");
    let landed = b.drain().into_iter().filter(|event| matches!(event, Event::Landed { .. })).count();
    assert_eq!(landed, 1, "only the owner's");
}

/// Races between writes and the end of their session; what the receiver stores after it heard of the end stays.
pub fn nothing_lands_after_a_session_ended(make: &Make<'_>) {
    const BYTES: usize = 4 << 20;
    const TAIL: usize = 64;
    const RACES: usize = 12;
    let (mut a, mut b) = Node::pair(make, BYTES);
    a.memory.fill(0, BYTES, 0x11);
    let mut random = Random(8);
    let (mut round, mut cut_short) = (0, 0);
    let deadline = Instant::now() + patience();
    while cut_short < RACES {
        assert!(Instant::now() < deadline, "no race was run: {cut_short} of {round} rounds were cut short");
        b.memory.fill(0, BYTES, 0);
        let grant = b.grant(&a.peer, 0, BYTES as u64);
        let posts: Vec<_> = (0..4).map(|sequence| a.post(&b.peer, grant, sequence, 0, 0, BYTES as u64)).collect();
        let probe = random.next() as usize % (BYTES / 4);
        for _ in 0..10_000_000 {
            if b.memory.is_all(probe, 1, 0x11) {
                break;
            }
            std::hint::spin_loop();
        }
        b.transport.disconnect(&a.peer, "a race");
        b.wait_down(&a.peer);
        // The last bytes first: what still comes there comes last, and cannot hide behind this one.
        b.memory.fill(BYTES - TAIL, TAIL, 0xee);
        b.memory.fill(0, BYTES - TAIL, 0xee);
        // All may have landed before: such rounds prove nothing.
        let outcomes: Vec<_> = posts.into_iter().map(|post| a.wait_posted(post)).collect();
        cut_short += usize::from(outcomes.iter().any(Result::is_err));
        a.wait_down(&b.peer);
        a.wait_up(&b.peer);
        b.wait_up(&a.peer);
        assert!(b.memory.is_all(0, BYTES, 0xee), "late bytes after the end of session {round}");
        let _ = (a.drain(), b.drain());
        round += 1;
    }
}

/// Posts and grants that ended make room for as many others, again and again.
pub fn what_is_limited_comes_back(make: &Make<'_>) {
    const AT_ONCE: usize = 50;
    let (mut a, mut b) = Node::pair(make, 4096);
    let grant = b.grant(&a.peer, 0, 4096);
    for first in (0..MORE_THAN_THE_LIMIT).step_by(AT_ONCE) {
        let posts: Vec<_> =
            (first..first + AT_ONCE).map(|sequence| a.post(&b.peer, grant, sequence as u32, 0, 0, 8)).collect();
        for post in posts {
            a.wait_posted(post).expect("it landed");
        }
        let _ = b.drain();
    }
    b.transport.revoke(grant);
    let grant_all = || std::iter::from_fn(|| b.transport.grant(&a.peer, contiguous(0, 64)).ok());
    let grants: Vec<_> = grant_all().collect();
    let limit = grants.len();
    assert!(limit > 1, "there are grants at all");
    grants.into_iter().for_each(|grant| b.transport.revoke(grant));
    assert_eq!(grant_all().take(limit).count(), limit, "as many as before");
}

/// Of endpoints whose queue holds few events (the one called `b`): what comes waits at its sender, and all of it comes.
pub fn a_receiver_that_does_not_poll_holds_its_peers_back_and_loses_nothing(make: &Make<'_>) {
    const COUNT: u32 = 300;
    let (mut a, mut b) = Node::pair(make, 4096);
    let grant = b.grant(&a.peer, 0, 4096);
    let posts: Vec<_> = (0..COUNT).map(|sequence| a.post(&b.peer, grant, sequence, 0, 0, 64)).collect();
    for number in 0..COUNT {
        a.transport.send(&b.peer, Bytes::copy_from_slice(&number.to_le_bytes())).expect("there is room");
    }
    let (mut landed, mut messages) = (0, 0);
    while landed < COUNT || messages < COUNT {
        match b.wait("any", |_| true) {
            Event::Landed { .. } => landed += 1,
            Event::Message { message, .. } => {
                assert_eq!(message[..], messages.to_le_bytes());
                messages += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    for post in posts {
        a.wait_posted(post).expect("it landed");
    }
}
