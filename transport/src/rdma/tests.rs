//! Two processes over a real device, which soft-RoCE in a guest is too: `integration-tests/softroce/run.sh`.
//!
//! Each test starts its own program again for the other side, which meets it over a TCP connection, as a session's control lane.

mod pair;

use std::time::{Duration, Instant};

use self::pair::{PAGE, PAGES, Side, WRITES, play};
use crate::rdma::machine::MachineEvent;
use crate::rdma::work::Fault;

const LIMIT: Duration = Duration::from_secs(60);
const POISON: u8 = 0xEE;

/// How often a test that looks for races tries.
fn rounds(or: usize) -> usize {
    std::env::var("KVFERRY_RDMA_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(or)
}

#[test]
#[ignore = "needs an RDMA device"]
fn chains_of_writes_land_in_scattered_pages_byte_for_byte() {
    play(
        "rdma::tests::chains_of_writes_land_in_scattered_pages_byte_for_byte",
        |sender| {
            sender.fill_sources();
            for write in 0..WRITES {
                sender.post_scattered(write as u64, write);
                if !sender.rails.has_room() {
                    sender.wait_for(LIMIT, |events| {
                        events.iter().any(|event| matches!(event, MachineEvent::Sent { .. }))
                    });
                }
            }
            let is_sent = |event: &&MachineEvent| matches!(event, MachineEvent::Sent { .. });
            sender.wait_for(LIMIT, |events| events.iter().filter(is_sent).count() == WRITES);
            assert_eq!(sender.hear(), b"all right");
        },
        |receiver| {
            let mut seen = Vec::new();
            while seen.len() < WRITES {
                for event in receiver.next_events(LIMIT) {
                    let MachineEvent::Landed { head } = event else { panic!("{event:?}") };
                    let write = usize::from(head[0]);
                    receiver.check_scattered(write);
                    seen.push(write);
                }
            }
            seen.sort_unstable();
            assert_eq!(seen, (0..WRITES).collect::<Vec<_>>());
            receiver.say(b"all right");
        },
    );
}

#[test]
#[ignore = "needs an RDMA device"]
fn no_byte_lands_after_a_fence_while_the_peer_goes_on_writing() {
    let rounds = rounds(40);
    play(
        "rdma::tests::no_byte_lands_after_a_fence_while_the_peer_goes_on_writing",
        |sender| {
            for round in 0..rounds {
                let mut id = 0;
                // Some rounds help by a word, as a session does that asks first; in the others the sender finds out alone.
                let is_told = round % 8 != 0;
                let start = Instant::now();
                while !(is_told && sender.was_spoken_to()) {
                    while sender.rails.has_room() {
                        sender.post_scattered(id, id as usize % WRITES);
                        id += 1;
                    }
                    let events = sender.some_events(Duration::from_millis(5));
                    if events.contains(&MachineEvent::Closed) {
                        break;
                    }
                    assert!(start.elapsed() < LIMIT, "nothing told the sender that its peer is gone");
                }
                if is_told {
                    assert_eq!(sender.hear(), b"stop");
                    sender.fence();
                } else {
                    sender.say(b"found out");
                    assert_eq!(sender.hear(), b"stop");
                }
                sender.say(b"stopped");
                sender.renew();
            }
        },
        |receiver| {
            let mut landed_before = 0;
            for round in 0..rounds {
                let landings = 1 + (round * 7) % 13;
                let mut landed = 0;
                while landed < landings {
                    landed += receiver
                        .next_events(LIMIT)
                        .iter()
                        .filter(|event| matches!(event, MachineEvent::Landed { .. }))
                        .count();
                }
                landed_before += landed;
                receiver.fence();
                receiver.poison(POISON);
                if round % 8 == 0 {
                    assert_eq!(receiver.hear(), b"found out");
                    receiver.assert_poison(POISON, round);
                }
                receiver.say(b"stop");
                receiver.assert_poison(POISON, round);
                assert_eq!(receiver.hear(), b"stopped");
                receiver.assert_poison(POISON, round);
                receiver.renew();
            }
            eprintln!("{rounds} fences with writes in flight, {landed_before} landings before them, no late byte");
        },
    );
}

#[test]
#[ignore = "needs an RDMA device"]
fn a_write_outside_of_what_is_registered_is_refused_by_the_peers_device() {
    play(
        "rdma::tests::a_write_outside_of_what_is_registered_is_refused_by_the_peers_device",
        |sender| {
            sender.post_beyond(5);
            let events = sender.wait_for(LIMIT, |events| events.contains(&MachineEvent::Closed));
            let fault = Fault::RemoteAccess;
            assert!(events.contains(&MachineEvent::Broken { fault: fault.clone() }), "{events:?}");
            assert!(events.contains(&MachineEvent::Failed { id: 5, fault }), "{events:?}");
            assert_eq!(sender.hear(), b"unharmed");
        },
        |receiver| {
            receiver.poison(POISON);
            // Its own queue pair is in error too: the device refused something that came by it.
            let events = receiver.wait_for(LIMIT, |events| events.contains(&MachineEvent::Closed));
            assert!(!events.iter().any(|event| matches!(event, MachineEvent::Landed { .. })), "{events:?}");
            receiver.assert_poison(POISON, 0);
            receiver.say(b"unharmed");
        },
    );
}

#[test]
#[ignore = "needs an RDMA device"]
fn a_killed_peer_is_noticed_within_two_seconds_by_the_session_and_by_the_queue_pairs() {
    play(
        "rdma::tests::a_killed_peer_is_noticed_within_two_seconds_by_the_session_and_by_the_queue_pairs",
        |sender| {
            let mut id = 0;
            let mut killed_at = None;
            let mut session_noticed = None;
            let mut broken: Option<(Fault, Duration)> = None;
            loop {
                while sender.rails.has_room() {
                    sender.post_scattered(id, id as usize % WRITES);
                    id += 1;
                }
                let events = sender.some_events(Duration::from_millis(5));
                let is_sent = |event: &MachineEvent| matches!(event, MachineEvent::Sent { .. });
                if killed_at.is_none() && events.iter().any(is_sent) {
                    sender.kill_peer();
                    killed_at = Some(Instant::now());
                }
                let Some(killed_at) = killed_at else { continue };
                if session_noticed.is_none() && sender.is_alone() {
                    session_noticed = Some(killed_at.elapsed());
                }
                let fault = events.iter().find_map(|event| match event {
                    MachineEvent::Broken { fault } => Some((fault.clone(), killed_at.elapsed())),
                    _ => None,
                });
                broken = broken.or(fault);
                if events.contains(&MachineEvent::Closed) {
                    let gone = killed_at.elapsed();
                    eprintln!(
                        "noticed by the session after {session_noticed:?}, by a queue pair {broken:?}, all gone {gone:?}"
                    );
                    break;
                }
                assert!(killed_at.elapsed() < LIMIT, "the queue pairs never noticed");
            }
            // What the survivor promises is a bound in time.
            assert!(session_noticed.is_some_and(|after| after < Duration::from_secs(2)), "{session_noticed:?}");
        },
        |receiver| {
            loop {
                receiver.next_events(LIMIT);
            }
        },
    );
}

/// As `ib_write_bw -s BYTES` measures; both in one guest are comparable.
#[test]
#[ignore = "needs an RDMA device; measures"]
fn bandwidth_of_writes_of_scattered_blocks() {
    const TOTAL: usize = 24 << 20;
    const LONGEST: usize = PAGE * 128;
    let sizes = [16 << 10, 64 << 10, 512 << 10, LONGEST];
    let writes = |block: usize| TOTAL / block.max(PAGE * 16);
    play(
        "rdma::tests::bandwidth_of_writes_of_scattered_blocks",
        |sender| {
            for block in sizes {
                let (start, count) = (Instant::now(), writes(block));
                let (mut id, mut sent) = (0, 0);
                while sent < count {
                    while id < count && sender.rails.has_room() {
                        sender.post_blocks(id as u64, block, block.max(PAGE * 16));
                        id += 1;
                    }
                    let events = sender.next_events(LIMIT);
                    sent += events.iter().filter(|event| matches!(event, MachineEvent::Sent { .. })).count();
                }
                let rate = (count * block.max(PAGE * 16)) as f64 / start.elapsed().as_secs_f64() / 1e6;
                eprintln!("{} KiB blocks: {rate:.1} MB/s", block >> 10);
            }
            sender.say(b"done");
        },
        |receiver| {
            let mut landed = 0;
            while landed < sizes.map(writes).iter().sum() {
                landed += receiver
                    .next_events(LIMIT)
                    .iter()
                    .filter(|event| matches!(event, MachineEvent::Landed { .. }))
                    .count();
            }
            assert_eq!(receiver.hear(), b"done");
        },
    );
}

#[test]
#[ignore = "needs an RDMA device"]
fn memory_is_registered_in_pieces_and_found_by_its_address() {
    let side = Side::alone();
    let keys = side.adapter.region_keys(0).unwrap();
    assert_eq!(keys.bytes, (PAGE * PAGES) as u64);
    assert_eq!(keys.pieces.len() as u64, keys.bytes.div_ceil(keys.piece_bytes));
    assert!(keys.pieces.iter().flatten().all(|key| *key != 0));
    let text = side.adapter.locate(&[side.own_run(0, PAGE), crate::raw::RawRun::of(b"a constant")], &mut Vec::new());
    let text = text.unwrap_err().to_string();
    assert!(text.contains("are not registered: register the region"), "{text}");
}
