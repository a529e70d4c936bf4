//! The contract of watches. A transport whose payload no thread of ours carries says so, and hands watched writes back.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use kvferry_protocol::RegionId;
use kvferry_protocol::pages::{Extent, Loop, Pages, Piece};

use super::node::{Make, Node, contiguous, write};
use crate::api::{Source, Write};
use crate::error::TransportError;
use crate::watch::{Landing, Leaving};

/// Notes what it is shown.
#[derive(Debug, Default)]
struct Notes {
    landed: Mutex<Vec<(u32, Range<u64>)>>,
    left: Mutex<Vec<Range<u64>>>,
    /// What there is to tell, or why not.
    fails: AtomicBool,
    /// Calls under way, and all.
    inside: AtomicU64,
    calls: AtomicU64,
}

impl Notes {
    fn look(&self) {
        self.calls.fetch_add(1, Ordering::SeqCst);
        self.inside.fetch_add(1, Ordering::SeqCst);
        // Long enough for others to come between.
        (0..200).for_each(|_| std::hint::spin_loop());
        self.inside.fetch_sub(1, Ordering::SeqCst);
    }

    fn left_bytes(&self) -> u64 {
        self.left.lock().expect("nobody panicked").iter().map(|stretch| stretch.end - stretch.start).sum()
    }
}

impl Landing for Notes {
    fn landed(&self, sequence: u32, stretch: Range<u64>) {
        self.look();
        self.landed.lock().expect("nobody panicked").push((sequence, stretch));
    }
}

impl Leaving for Notes {
    fn leaves(&self, stretch: Range<u64>) {
        self.look();
        self.left.lock().expect("nobody panicked").push(stretch);
    }

    fn notification(&self) -> Result<Bytes, String> {
        match self.fails.load(Ordering::SeqCst) {
            true => Err("there is nothing to tell".to_owned()),
            false => Ok(Bytes::from(self.left_bytes().to_string())),
        }
    }
}

/// Whether the pair watches; if not, that it says so in all ways.
fn watch(a: &Node, b: &Node) -> bool {
    if a.transport.watches(&b.peer) {
        return true;
    }
    let watch = Arc::new(Notes::default());
    let pages = contiguous(0, 64);
    let grant = b.transport.grant_watched(&a.peer, pages, Arc::clone(&watch) as _).expect("a grant");
    // A transport that could may say that it should not; one that cannot hands the write back unchanged.
    if let Err(error) = a.transport.post_watched(&b.peer, write(grant, 3, 0, 0, 64), watch) {
        assert_eq!((error.write.grant, error.write.sequence), (grant, 3));
        assert!(matches!(error.reason, TransportError::Refused { .. }), "{error:?}");
    }
    b.transport.revoke(grant);
    false
}

/// Both ends' watches are shown each byte of a write of many frames once, and the receiver is told what the sender's says last.
pub fn watches_see_each_byte_once(make: &Make<'_>) {
    let (run, gap, count) = (40u64 << 10, 8u64 << 10, 100u32);
    let bytes = run * u64::from(count);
    let (mut a, mut b) = Node::pair(make, 12 << 20);
    if !watch(&a, &b) {
        return;
    }
    let pages = |offset| Pages {
        bases: vec![0],
        pieces: vec![Piece {
            region: RegionId::new(0),
            offset,
            loops: vec![Loop { count, stride: run + gap }],
            run_bytes: run,
        }],
    };
    // The second half of the window first, then every other piece of the first.
    let (half, piece) = (bytes / 2, 8u64 << 10);
    let extents = vec![
        Extent::contiguous(half, half),
        Extent {
            offset: 0,
            loops: vec![Loop { count: (half / piece / 2) as u32, stride: 2 * piece }],
            run_bytes: piece,
        },
    ];
    let source_run = Piece { loops: vec![Loop { count: 75, stride: run + gap }], ..pages(0).pieces[0].clone() };
    for sequence in 0..4 {
        let (landing, leaving) = (Arc::new(Notes::default()), Arc::new(Notes::default()));
        let grant = b.transport.grant_watched(&a.peer, pages(6 << 20), Arc::clone(&landing) as _).expect("a grant");
        let write = Write {
            grant,
            sequence,
            extents: extents.clone(),
            source: Source::Pages(vec![Pages { bases: vec![0], pieces: vec![source_run.clone()] }]),
            notification: Bytes::from_static(b"not this one"),
        };
        let post = a.transport.post_watched(&b.peer, write, Arc::clone(&leaving) as _).expect("a post");
        let told = Bytes::from((half + half / 2).to_string());
        assert_eq!(b.wait_landed(grant), (sequence, half + half / 2, told));
        a.wait_posted(post).expect("it landed");
        b.transport.revoke(grant);
        assert_eq!(
            (Arc::strong_count(&landing), Arc::strong_count(&leaving)),
            (1, 1),
            "a watch outlives what it watches"
        );
        let mut shown = landing.landed.lock().expect("nobody panicked").clone();
        assert!(shown.iter().all(|(of, _)| *of == sequence));
        shown.sort_unstable_by_key(|(_, stretch)| stretch.start);
        let left = leaving.left.lock().expect("nobody panicked").clone();
        assert!(left[0].start == half, "it leaves in the order of its extents");
        for mut stretches in [shown.into_iter().map(|(_, stretch)| stretch).collect::<Vec<_>>(), left] {
            stretches.sort_unstable_by_key(|stretch| stretch.start);
            assert!(stretches.windows(2).all(|pair| pair[0].end <= pair[1].start), "shown twice");
            let is_inside = |stretch: &Range<u64>| {
                stretch.start >= half || stretch.start % (2 * piece) + (stretch.end - stretch.start) <= piece
            };
            assert!(stretches.iter().all(is_inside), "shown what is in no extent");
            let shown: u64 = stretches.iter().map(|stretch| stretch.end - stretch.start).sum();
            assert_eq!(shown, half + half / 2);
        }
    }
}

/// A watch that has nothing to tell ends its post, and no other.
pub fn a_watch_that_fails_ends_its_post_alone(make: &Make<'_>) {
    const BYTES: u64 = 3 << 20;
    let (mut a, mut b) = Node::pair(make, 2 * BYTES as usize);
    if !watch(&a, &b) {
        return;
    }
    let grant = b.grant(&a.peer, 0, 2 * BYTES);
    let failing = Arc::new(Notes::default());
    failing.fails.store(true, Ordering::SeqCst);
    let fails = a.transport.post_watched(&b.peer, write(grant, 0, 0, 0, BYTES), Arc::clone(&failing) as _);
    let fails = fails.expect("a post");
    let watch = Arc::new(Notes::default());
    let stays = a.transport.post_watched(&b.peer, write(grant, 1, 0, BYTES, BYTES), watch).expect("a post");
    match a.wait_posted(fails) {
        Err(TransportError::Refused { reason }) => assert!(reason.contains("nothing to tell"), "{reason}"),
        other => panic!("a watch failed, and the post ended with {other:?}"),
    }
    assert_eq!(b.wait_landed(grant), (1, BYTES, Bytes::from(BYTES.to_string())));
    a.wait_posted(stays).expect("it landed");
    assert_eq!(Arc::strong_count(&failing), 1);
    b.transport.revoke(grant);
}

/// Hundreds of races with revokes and cancels: nobody looks after them, and each post ends once.
pub fn watches_look_no_more_after_a_revoke_or_a_cancel(make: &Make<'_>) {
    const BYTES: u64 = 1 << 20;
    let (mut a, b) = Node::pair(make, 2 * BYTES as usize);
    if !watch(&a, &b) {
        return;
    }
    for round in 0..300 {
        let (landing, leaving) = (Arc::new(Notes::default()), Arc::new(Notes::default()));
        let pages = contiguous(BYTES, BYTES);
        let grant = b.transport.grant_watched(&a.peer, pages, Arc::clone(&landing) as _).expect("a grant");
        let write = write(grant, 0, 0, 0, BYTES);
        let post = a.transport.post_watched(&b.peer, write, Arc::clone(&leaving) as _).expect("a post");
        let watched = if round % 4 < 2 { &landing } else { &leaving };
        for _ in 0..1_000_000 {
            if watched.calls.load(Ordering::SeqCst) > u64::from(round % 2 == 1) {
                break;
            }
            std::hint::spin_loop();
        }
        if round % 4 < 2 {
            b.transport.revoke(grant);
        } else {
            a.transport.cancel(&b.peer, grant);
        }
        let calls = watched.calls.load(Ordering::SeqCst);
        assert_eq!(watched.inside.load(Ordering::SeqCst), 0, "round {round}: somebody still looks");
        assert_eq!(Arc::strong_count(watched), 1, "round {round}");
        match a.wait_posted(post) {
            Ok(()) | Err(TransportError::Refused { .. } | TransportError::Cancelled) => {}
            Err(other) => panic!("round {round}: {other}"),
        }
        assert_eq!(watched.calls.load(Ordering::SeqCst), calls, "round {round}: somebody looked later");
        b.transport.revoke(grant);
    }
}
