//! What breaks in a fault plan breaks as planned, and every post still ends once.

use std::time::Instant;

use bytes::Bytes;
use kvferry_protocol::PeerId;
use kvferry_transport::testing::{Node, PATIENCE, peer};
use kvferry_transport::{Event, FaultPlan, FaultRates, LoopbackConfig, LoopbackNetwork, Transport};

const BYTES: usize = 64 << 10;

fn pair(seed: u64, rates: FaultRates) -> (Node, Node) {
    let network = LoopbackNetwork::new();
    let config = LoopbackConfig { frame_bytes: 16 << 10, ..LoopbackConfig::default() };
    let make = move |peer: PeerId, greeting: Bytes| -> Box<dyn Transport> {
        Box::new(network.endpoint(peer, greeting, config, FaultPlan { seed, rates }))
    };
    let mut a = Node::new(&make, peer("a", 1), BYTES);
    let mut b = Node::new(&make, peer("b", 1), BYTES);
    a.meet(&mut b);
    (a, b)
}

#[test]
fn through_cuts_and_lost_words_every_post_ends_once_and_ok_means_landed() {
    for seed in 0..5 {
        let rates = FaultRates { delay: 100_000, duplicate: 100_000, cut: 20_000, lose_ack: 20_000, flip: 0 };
        let (mut a, mut b) = pair(seed, rates);
        let (mut posts, mut ended, mut good, mut landed, mut downs) = (0, 0, 0, 0, 0);
        let count = |events: Vec<Event>, ended: &mut u32, good: &mut u32, landed: &mut u32, downs: &mut u32| {
            for event in events {
                match event {
                    Event::Posted { outcome, .. } => {
                        *ended += 1;
                        *good += u32::from(outcome.is_ok());
                    }
                    Event::Landed { .. } => *landed += 1,
                    Event::Down { .. } => *downs += 1,
                    _ => {}
                }
            }
        };
        let deadline = Instant::now() + PATIENCE;
        while posts < 300 {
            assert!(Instant::now() < deadline, "seed {seed}: only {posts} were posted");
            let Ok(grant) = b.transport.grant(&a.peer, whole()) else {
                // Cut; the dialler comes back.
                count(b.drain(), &mut ended, &mut good, &mut landed, &mut downs);
                std::thread::yield_now();
                continue;
            };
            for sequence in 0..3 {
                let write = kvferry_transport::Write {
                    grant,
                    sequence,
                    extents: vec![kvferry_protocol::pages::Extent::contiguous(0, BYTES as u64)],
                    source: kvferry_transport::Source::Pages(vec![whole()]),
                    notification: Bytes::new(),
                };
                posts += u32::from(a.transport.post(&b.peer, write).is_ok());
            }
            while a.transport.stats().posts_live > 0 {
                count(a.drain(), &mut ended, &mut good, &mut landed, &mut downs);
            }
            b.transport.revoke(grant);
        }
        count(a.drain(), &mut ended, &mut good, &mut landed, &mut downs);
        count(b.drain(), &mut ended, &mut good, &mut landed, &mut downs);
        assert_eq!(ended, posts, "seed {seed}");
        assert!(good <= landed && landed <= posts, "seed {seed}: {good} ended well, {landed} landed, {posts} posted");
        assert!(downs > 0 && good > 0, "seed {seed}: {downs} cuts, {good} ended well");
        assert_eq!((a.transport.stats().posts_live, b.transport.stats().grants_live), (0, 0), "seed {seed}");
    }
}

#[test]
fn a_flip_changes_one_bit_of_each_frame() {
    let (mut a, mut b) = pair(3, FaultRates { flip: 1_000_000, ..FaultRates::default() });
    let grant = b.grant(&a.peer, 0, BYTES as u64);
    let post = a.post(&b.peer, grant, 0, 0, 0, BYTES as u64);
    a.wait_posted(post).unwrap();
    b.wait_landed(grant);
    let bits: u32 = b.memory.read(0, BYTES).iter().map(|byte| byte.count_ones()).sum();
    assert_eq!(bits, 4, "one in each frame of 16 KiB");
}

fn whole() -> kvferry_protocol::pages::Pages {
    kvferry_protocol::pages::Pages {
        bases: vec![0],
        pieces: vec![kvferry_protocol::pages::Piece {
            region: kvferry_protocol::RegionId::new(0),
            offset: 0,
            loops: vec![],
            run_bytes: BYTES as u64,
        }],
    }
}
