//! What only TCP can do wrong: strangers, torn streams, stopped senders, cut connections.

mod common;

use std::io::{Read, Write as _};
use std::net::Shutdown;
use std::time::Instant;

use bytes::Bytes;
use common::{KEY, RawPeer, VERSION, address, config, dialler, head, identity, key, node, node_with, shake, stream_to};
use kvferry_protocol::pages::{Extent, Pages, Piece};
use kvferry_protocol::wire::{
    ClusterKey, ClusterKeys, Declined, Dialler, FrameHeader, FrameKind, HandshakeError, Introduction, Refusal,
    VERSIONS, Verdict, VersionRange,
};
use kvferry_protocol::{PeerId, RegionId};
use kvferry_transport::testing::{Flow, Node, PATIENCE, Proxy, ProxyPlan, Towards, peer};
use kvferry_transport::{
    Event, GrantKey, PeerAddress, Source, Tcp, TcpConfig, TcpConfigFile, Transport, TransportError, Write,
};

const MIB: usize = 1 << 20;

#[test]
fn a_sender_that_stops_in_the_middle_of_a_frame_cannot_write_after_revoke() {
    let mut b = node("b", config(), MIB);
    let mut raw = RawPeer::join(&mut b, "slow");
    let grant = b.grant(&peer("slow", 1), 0, MIB as u64);
    raw.data.write_all(&head(grant.0, 0, 0, MIB as u32)).unwrap();
    raw.data.write_all(&vec![0x11; MIB / 2]).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while !b.memory.is_all(MIB / 2 - 1, 1, 0x11) {
        assert!(Instant::now() < deadline, "the first half did not come");
        std::thread::yield_now();
    }
    b.transport.revoke(grant);
    b.memory.fill(0, MIB, 0xee);
    raw.data.write_all(&vec![0x11; MIB / 2]).unwrap();
    let word = raw.word();
    assert_eq!((word.kind, word.refusal), (FrameKind::Refuse, Some(Refusal::UnknownGrant)));
    b.wait_stats("the rest is thrown away", |stats| stats.dropped_bytes == MIB as u64 / 2);
    assert!(b.memory.is_all(0, MIB, 0xee), "a late byte landed");
    // The stream stayed in step.
    let grant = b.grant(&peer("slow", 1), 64, 64);
    raw.data.write_all(&[head(grant.0, 5, 0, 64), vec![0x22; 64]].concat()).unwrap();
    assert_eq!((raw.word().kind, b.wait_landed(grant).0), (FrameKind::Ack, 5));
    assert!(b.memory.is_all(64, 64, 0x22) && b.memory.is_all(128, MIB - 128, 0xee));
    assert_eq!(b.transport.stats().refused_writes, 1);
}

#[test]
fn a_write_cancelled_by_its_sender_ends_at_the_receiver_too() {
    let mut b = node("b", config(), 4096);
    let mut raw = RawPeer::join(&mut b, "c");
    let grant = b.grant(&peer("c", 1), 0, 4096);
    raw.data.write_all(&head(grant.0, 3, 0, 4096)).unwrap();
    raw.control.write_all(&FrameHeader::about(FrameKind::Cancel, None, grant.0, 3).encode(VERSION)).unwrap();
    let mut bytes = [0; FrameHeader::BYTES];
    loop {
        raw.control.read_exact(&mut bytes).unwrap();
        let word = FrameHeader::decode(&bytes, VERSION).unwrap();
        if word.kind != FrameKind::Ping {
            assert_eq!((word.kind, word.refusal, word.sequence), (FrameKind::Refuse, Some(Refusal::Cancelled), 3));
            break;
        }
    }
    raw.data.write_all(&[0x11; 4096]).unwrap();
    b.wait_stats("its payload is thrown away", |stats| stats.dropped_bytes == 4096);
    assert!(b.memory.is_all(0, 4096, 0));
}

/// Messages are written by who sends them, or by the control thread when that is at it or the socket took only a part.
#[test]
fn messages_of_many_threads_arrive_whole_and_each_threads_in_order() {
    const THREADS: usize = 4;
    const EACH: usize = 400;
    // It reads no more than a few messages ahead of who polls, so that the socket is full most of the time.
    let few = TcpConfigFile { max_events: 16, ..config() };
    let (mut a, mut b) = (node("a", config(), 64), node("b", few, 64));
    a.meet(&mut b);
    let message = |thread: usize, number: usize| {
        let mut bytes = vec![(thread * 31 + number) as u8; 1 + (number * 7919 + thread * 104_729) % 50_000];
        bytes.extend([thread as u8, (number >> 8) as u8, number as u8]);
        Bytes::from(bytes)
    };
    let (transport, to) = (&*a.transport, &b.peer.clone());
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                for number in 0..EACH {
                    let deadline = Instant::now() + PATIENCE;
                    while let Err(error) = transport.send(to, message(thread, number)) {
                        assert!(matches!(error, TransportError::Limit { .. }), "{error}");
                        assert!(Instant::now() < deadline, "the queue stays full");
                        std::thread::yield_now();
                    }
                }
            });
        }
        let mut next = [0; THREADS];
        for _ in 0..THREADS * EACH {
            let event = b.wait("a message", |event| matches!(event, Event::Message { .. }));
            let Event::Message { message: found, .. } = event else { unreachable!("the filter takes only messages") };
            let thread = usize::from(found[found.len() - 3]);
            assert!(found == message(thread, next[thread]), "message {} of thread {thread}", next[thread]);
            next[thread] += 1;
        }
    });
}

#[test]
fn a_peer_that_asks_without_end_and_reads_no_answer_is_sent_away() {
    let mut b = node("b", config(), 64);
    let mut raw = RawPeer::join(&mut b, "asks");
    raw.control.set_write_timeout(Some(PATIENCE)).unwrap();
    let pings = FrameHeader::empty(FrameKind::Ping).encode(VERSION).repeat(1 << 14);
    // The answers to this would be 256 MiB.
    let sent = (0..256).take_while(|_| raw.control.write_all(&pings).is_ok()).count();
    assert!(sent < 256, "it listened to the end");
    let Event::Down { reason, .. } = b.wait_down(&peer("asks", 1)) else { unreachable!("wait_down gives Down") };
    assert!(matches!(reason, TransportError::Limit { .. }), "{reason}");
}

#[test]
fn a_peer_with_another_key_is_refused_on_both_sides() {
    let mut a = node_with("a", config(), 64, ClusterKey::new(&[8; 32]).unwrap());
    let mut b = node("b", config(), 64);
    a.transport.connect(&b.transport.local_address()).unwrap();
    let Event::Down { peer: None, reason, .. } = a.wait("Down", |e| matches!(e, Event::Down { .. })) else {
        panic!("it never proved who it is")
    };
    assert!(matches!(reason, TransportError::Authentication { .. }), "{reason}");
    assert!(reason.to_string().contains("key"), "{reason}");
    b.wait_stats("the refusal is counted", |stats| stats.refused_peers > 0);
    assert_eq!(b.transport.stats().sessions_up, 0);
    assert!(b.drain().is_empty(), "a stranger makes no event");
}

/// As `ClusterKeys` says: the new key beside the old one everywhere, then the other way round, then alone.
#[test]
fn a_cluster_changes_its_key_while_sessions_go_on() {
    let [old, new] = [7, 8].map(|byte| ClusterKey::new(&[byte; 32]).unwrap());
    let mut a = node_with("a", config(), 4096, old.clone());
    let mut b = node_with("b", config(), 4096, old.clone());
    a.meet(&mut b);
    let both = |own: &ClusterKey, other: &ClusterKey| ClusterKeys::new(own.clone(), vec![other.clone()]);
    let steps = [
        (both(&old, &new), both(&old, &new)),
        (both(&new, &old), both(&old, &new)),
        (both(&new, &old), both(&new, &old)),
        (both(&new, &old), new.clone().into()),
        (new.clone().into(), new.clone().into()),
    ];
    let works = |a: &mut Node, b: &mut Node| {
        let grant = b.grant(&a.peer, 0, 64);
        let post = a.post(&b.peer, grant, 0, 0, 0, 64);
        a.wait_posted(post).unwrap();
        b.transport.revoke(grant);
    };
    for (at, (of_a, of_b)) in steps.into_iter().enumerate() {
        a.transport.set_credentials(of_a.into());
        b.transport.set_credentials(of_b.into());
        works(&mut a, &mut b); // what is up stays up
        b.transport.disconnect(&a.peer, "to prove itself anew");
        a.wait_down(&b.peer.clone());
        a.wait_up(&b.peer.clone());
        b.wait_up(&a.peer.clone());
        works(&mut a, &mut b);
        assert_eq!(a.transport.stats().refused_peers, 0, "step {at}");
    }
    a.transport.set_credentials(old.into());
    b.transport.disconnect(&a.peer, "to prove itself anew");
    a.wait("a refusal", |event| matches!(event, Event::Down { reason: TransportError::Authentication { .. }, .. }));
}

#[test]
fn garbage_of_any_length_makes_no_session_and_does_no_harm() {
    let mut b = node("b", config(), 64);
    let mut noise = 0x1234_5678_u32;
    let mut sent = 0;
    let hello = dialler(Introduction::Peer(identity("x")), VERSIONS).poll_output().unwrap();
    for length in (0..200).step_by(7).chain([47, 48, 49, 80, 4096, 100_000]) {
        for begins_well in [false, true] {
            let mut bytes: Vec<u8> = (0..length)
                .map(|_| {
                    noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (noise >> 24) as u8
                })
                .collect();
            if begins_well {
                bytes.splice(0..0, hello.iter().copied());
            }
            let mut stream = stream_to(address(&b));
            // The other side may be done with us before all is sent.
            let _ = stream.write_all(&bytes).and_then(|()| stream.shutdown(Shutdown::Write));
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            assert!(answer.len() <= 48, "more than a challenge: {} bytes", answer.len());
            sent += 1;
        }
    }
    b.wait_stats("all are counted", |stats| stats.refused_peers == sent);
    assert!(b.drain().is_empty(), "strangers make no events");
    let mut a = node("a", config(), 64);
    a.meet(&mut b);
}

#[test]
fn a_peer_of_another_version_learns_both_ranges() {
    let b = node("b", config(), 64);
    let mut stream = stream_to(address(&b));
    let theirs = VersionRange { min: 8, max: 9 };
    let error = shake(&mut stream, dialler(Introduction::Peer(identity("new")), theirs)).unwrap().unwrap_err();
    assert_eq!(
        error,
        HandshakeError::Version { our_min: 8, our_max: 9, their_min: VERSIONS.min, their_max: VERSIONS.max }
    );
}

#[test]
fn an_old_and_a_new_endpoint_speak_the_old_version_and_two_new_ones_the_new() {
    let (old, new) = (VERSIONS.min, VERSIONS.max);
    assert!(old < new, "there is no older version to speak");
    for (a, b, want) in [(old, new, old), (new, old, old), (new, new, new), (old, old, old)] {
        let file = |newest_version| TcpConfigFile { newest_version, ..config() };
        let (mut a, mut b) = (node("a", file(a), 64), node("b", file(b), 64));
        a.transport.connect(&PeerAddress::Tcp(address(&b))).unwrap();
        for (node, other) in [(&mut a, peer("b", 1)), (&mut b, peer("a", 1))] {
            let Event::Up { version, .. } = node.wait_up(&other) else { unreachable!("wait_up gives Up") };
            assert_eq!(version, want);
        }
        let grant = b.grant(&peer("a", 1), 0, 64);
        let post = a.post(&peer("b", 1), grant, 0, 0, 0, 64);
        a.wait_posted(post).expect("frames of the session's version");
    }
}

#[test]
fn a_data_lane_without_its_session_is_declined() {
    let mut b = node("b", config(), 64);
    let raw = RawPeer::join(&mut b, "c");
    // Of an unknown session; again for a lane that is taken.
    for session in [raw.session ^ 1, raw.session] {
        let introduction = Introduction::Lane { session, lane: 0, secret: raw.secret.clone() };
        let refused = shake(&mut stream_to(address(&b)), dialler(introduction, VERSIONS)).unwrap().unwrap_err();
        assert_eq!(refused, HandshakeError::Declined(Declined::UnknownSession));
    }
}

#[test]
fn a_lane_secret_of_another_session_binds_nothing() {
    let mut b = node("b", config(), 64);
    let other = RawPeer::join(&mut b, "other");
    let mut control = stream_to(address(&b));
    let established = shake(&mut control, dialler(Introduction::Peer(identity("c")), VERSIONS)).unwrap().unwrap();
    let Verdict::Peer(theirs) = established.verdict else { panic!("no session") };
    let introduction = Introduction::Lane { session: theirs.session, lane: 0, secret: other.secret.clone() };
    let refused = shake(&mut stream_to(address(&b)), dialler(introduction, VERSIONS)).unwrap().unwrap_err();
    assert_eq!(refused, HandshakeError::Declined(Declined::UnknownSession));
}

#[test]
fn torn_streams_end_the_session_with_what_was_wrong() {
    let mut wrong_table = head(1, 0, 0, 64);
    *wrong_table.last_mut().unwrap() ^= 1;
    for (name, is_control, bytes) in [
        ("garbage for a header", false, vec![0x5a; 64]),
        ("garbage for a header", true, vec![0x5a; 64]),
        ("a table that changed", false, wrong_table),
        ("payload on the control lane", true, head(1, 0, 0, 64)),
        ("a message on a data lane", false, FrameHeader::empty(FrameKind::Ping).encode(VERSION).to_vec()),
        ("another version", false, FrameHeader::empty(FrameKind::Ack).encode(VERSION + 1).to_vec()),
    ] {
        let mut b = node("b", config(), 64);
        let mut raw = RawPeer::join(&mut b, "torn");
        let grant = b.grant(&peer("torn", 1), 0, 64);
        if is_control { raw.control.write_all(&bytes) } else { raw.data.write_all(&bytes) }.unwrap();
        let Event::Down { reason, .. } = b.wait_down(&peer("torn", 1)) else { unreachable!() };
        assert!(matches!(reason, TransportError::Protocol { .. }), "{name}: {reason}");
        assert_eq!(b.transport.stats().grants_live, 0, "{name}");
        b.transport.revoke(grant);
    }
}

#[test]
fn a_silent_peer_is_given_up() {
    let mut b = node("b", TcpConfigFile { keepalive_ms: 20, stall_ms: 60, ..config() }, 64);
    let _raw = RawPeer::join(&mut b, "silent");
    let Event::Down { reason, .. } = b.wait_down(&peer("silent", 1)) else { unreachable!() };
    assert!(matches!(reason, TransportError::Stalled { .. }), "{reason}");
}

#[test]
fn a_receiver_that_stops_reading_is_given_up_and_the_source_is_free() {
    let mut b = node("b", TcpConfigFile { keepalive_ms: 20, stall_ms: 200, ..config() }, 8 * MIB);
    let raw = RawPeer::join(&mut b, "stopped");
    let mut control = raw.control.try_clone().unwrap();
    // It answers on the control lane, so only the write stands still.
    let answers = std::thread::spawn(move || {
        let mut bytes = [0; FrameHeader::BYTES];
        while control.read_exact(&mut bytes).is_ok() {
            let _ = control.write_all(&FrameHeader::empty(FrameKind::Pong).encode(VERSION));
        }
    });
    let post = b.post(&peer("stopped", 1), GrantKey(9), 0, 0, 0, 8 * MIB as u64);
    assert!(matches!(b.wait_posted(post), Err(TransportError::Stalled { .. })));
    b.wait_down(&peer("stopped", 1));
    // The node hung up, or does now.
    let _ = (raw.data.shutdown(Shutdown::Both), raw.control.shutdown(Shutdown::Both));
    answers.join().unwrap();
}

#[test]
fn a_cancelled_source_is_not_read_again_even_in_the_middle_of_a_frame() {
    // Buffers that hold a small part of a frame.
    let file = TcpConfigFile { frame_bytes: 4 << 20, socket_buffer_bytes: Some(64 << 10), ..config() };
    let mut a = node("a", file, 8 * MIB);
    a.memory.fill(0, 8 * MIB, 0x33);
    let mut raw = RawPeer::join(&mut a, "slow");
    let grant = GrantKey(9);
    let post = a.post(&peer("slow", 1), grant, 4, 0, 0, 8 * MIB as u64);
    // The frame has begun, and the socket is full long before its end.
    let header = raw.word();
    let mut table = vec![0; header.table_bytes as usize];
    raw.data.read_exact(&mut table).unwrap();
    a.transport.cancel(&peer("slow", 1), grant);
    let mut bytes = [0; FrameHeader::BYTES];
    while FrameHeader::decode(&bytes, VERSION).map(|header| header.kind) != Ok(FrameKind::Cancel) {
        raw.control.read_exact(&mut bytes).unwrap();
    }
    assert!(a.drain().is_empty(), "it does not end before the receiver's word");
    let word = FrameHeader::about(FrameKind::Refuse, Some(Refusal::Cancelled), grant.0, 4);
    raw.control.write_all(&word.encode(VERSION)).unwrap();
    assert!(matches!(a.wait_posted(post), Err(TransportError::Cancelled)));
    a.memory.fill(0, 8 * MIB, 0x77);
    let mut payload = vec![0xff; header.payload_bytes as usize];
    raw.data.read_exact(&mut payload).unwrap();
    assert!(payload.iter().all(|byte| matches!(byte, 0x33 | 0)), "the source was read after its post had ended");
    assert!(payload.contains(&0), "the frame was whole before: the test has no teeth");
}

#[test]
fn a_cut_in_the_middle_of_a_write_ends_it_on_both_sides_and_a_new_session_comes() {
    let mut b = node("b", config(), 8 * MIB);
    let mut a = node("a", config(), 8 * MIB);
    let proxy = Proxy::new(address(&b), ProxyPlan { cut_after_bytes: Some(3 * MIB as u64), ..ProxyPlan::default() });
    a.transport.connect(&PeerAddress::Tcp(proxy.address())).unwrap();
    let Event::Up { session: first, .. } = a.wait_up(&b.peer) else { unreachable!() };
    b.wait_up(&a.peer);
    let grant = b.grant(&a.peer, 0, 8 * MIB as u64);
    proxy.set_plan(ProxyPlan::default());
    // The cut may come between two of them: then there is nobody to post to.
    let posts: Vec<_> = (0..8).map_while(|n| a.transport.post(&b.peer, write(grant, n, 8 * MIB as u64)).ok()).collect();
    let outcomes: Vec<_> = posts.into_iter().map(|post| a.wait_posted(post)).collect();
    assert!(outcomes.iter().any(Result::is_err), "the proxy cut");
    a.wait_down(&b.peer);
    b.wait_down(&a.peer);
    assert_eq!((a.transport.stats().posts_live, b.transport.stats().grants_live), (0, 0));
    let Event::Up { session: second, address: Some(at), .. } = a.wait_up(&b.peer) else { unreachable!() };
    assert!(second > first);
    assert_eq!(at, PeerAddress::Tcp(proxy.address()));
    b.wait_up(&a.peer);
    let grant = b.grant(&a.peer, 0, 64);
    let post = a.post(&b.peer, grant, 0, 0, 0, 64);
    a.wait_posted(post).unwrap();
    drop((a, b));
}

/// TCP does not lose bytes, but what ends it between two hosts can: then whole frames are gone, and nothing is torn.
#[test]
fn a_message_that_is_lost_between_two_hosts_ends_the_session() {
    for towards in [Towards::Dialler, Towards::Target] {
        let file = TcpConfigFile { keepalive_ms: 10, ..config() };
        let (mut a, mut b) = (node("a", file.clone(), 64), node("b", file, 64));
        let proxy = Proxy::new(address(&b), ProxyPlan::default());
        a.transport.connect(&PeerAddress::Tcp(proxy.address())).unwrap();
        a.wait_up(&b.peer);
        b.wait_up(&a.peer);
        let (from, to) = match towards {
            Towards::Dialler => (&b, &mut a),
            Towards::Target => (&a, &mut b),
        };
        let deadline = Instant::now() + PATIENCE;
        let down = loop {
            proxy.set_flow(towards, Flow::Vanish);
            let before = proxy.carried(towards);
            // It fails when the session is down.
            let _ = from.transport.send(&to.peer, Bytes::from_static(b"lost"));
            while from.transport.stats().sessions_up > 0 && proxy.carried(towards) == before {
                std::thread::yield_now();
            }
            proxy.set_flow(towards, Flow::Pass);
            let mut heard = to.drain().into_iter();
            if let Some(down) = heard.find(|event| matches!(event, Event::Down { peer: Some(_), .. })) {
                break down;
            }
            assert!(Instant::now() < deadline, "nobody noticed");
        };
        assert!(format!("{down:?}").contains("loses bytes"), "{towards:?}: {down:?}");
    }
}

#[test]
fn a_bit_flipped_in_payload_on_the_way_lands_flipped() {
    let mut b = node("b", config(), MIB);
    let mut a = node("a", config(), MIB);
    // One lane carries the frame; the handshake and the head are far shorter than this.
    let proxy = Proxy::new(address(&b), ProxyPlan { flip_at_byte: Some(100_000), ..ProxyPlan::default() });
    a.transport.connect(&PeerAddress::Tcp(proxy.address())).unwrap();
    a.wait_up(&b.peer);
    b.wait_up(&a.peer);
    let grant = b.grant(&a.peer, 0, MIB as u64);
    let post = a.post(&b.peer, grant, 0, 0, 0, MIB as u64);
    a.wait_posted(post).unwrap();
    b.wait_landed(grant);
    let changed: Vec<u8> = b.memory.read(0, MIB).into_iter().filter(|byte| *byte != 0).collect();
    assert_eq!(changed, [0x10], "one bit; it is for the digest above to notice");
    drop((a, b));
}

#[test]
fn crossing_dials_leave_a_session_that_works_both_ways() {
    for round in 0..10 {
        let mut a = node("a", config(), 4096);
        let mut b = node("b", config(), 4096);
        a.transport.connect(&b.transport.local_address()).unwrap();
        b.transport.connect(&a.transport.local_address()).unwrap();
        let deadline = Instant::now() + PATIENCE;
        let mut good = 0;
        // One session may replace another at first; then all goes well.
        while good < 50 {
            assert!(Instant::now() < deadline, "round {round}: no session stays");
            let went = write_once(&mut a, &mut b) && write_once(&mut b, &mut a);
            good = if went { good + 1 } else { 0 };
            let _ = (a.drain(), b.drain());
        }
    }
}

#[test]
fn a_peer_that_dialled_is_found_at_its_own_address_and_its_session_stays() {
    for (first, second) in [("a", "b"), ("b", "a")] {
        let (mut dialler, mut other) = (node(first, config(), 4096), node(second, config(), 4096));
        dialler.meet(&mut other);
        let at = dialler.transport.local_address();
        // Found again as often as it is asked for.
        for _ in 0..2 {
            other.transport.connect(&at).unwrap();
            let found = other.wait("Found", |event| matches!(event, Event::Found { .. } | Event::Up { .. }));
            let Event::Found { peer, address } = found else { panic!("{first}: {found:?}") };
            assert_eq!((peer, address), (dialler.peer.clone(), at));
            other.transport.forget(&at);
        }
        assert!(write_once(&mut dialler, &mut other) && write_once(&mut other, &mut dialler), "{first}");
        let events: Vec<_> = dialler.drain().into_iter().chain(other.drain()).collect();
        assert!(!events.iter().any(|event| matches!(event, Event::Down { .. } | Event::Up { .. })), "{events:?}");
        // When the session is over, the address leads to a new one.
        other.transport.connect(&at).unwrap();
        other.wait("Found", |event| matches!(event, Event::Found { .. }));
        dialler.transport.disconnect(&other.peer, "the test's end");
        other.wait_down(&dialler.peer);
        let Event::Up { address, .. } = other.wait_up(&dialler.peer) else { unreachable!("wait_up gives Up") };
        assert_eq!(address, Some(at));
    }
}

/// The first bytes of region 0.
fn front(bytes: u64) -> Pages {
    let piece = Piece { region: RegionId::new(0), offset: 0, loops: vec![], run_bytes: bytes };
    Pages { bases: vec![0], pieces: vec![piece] }
}

/// From the front of region 0 to the front of the window.
fn write(grant: GrantKey, sequence: u32, bytes: u64) -> Write {
    let source = Source::Pages(vec![front(bytes)]);
    Write { grant, sequence, extents: vec![Extent::contiguous(0, bytes)], source, notification: Bytes::new() }
}

/// Whether a write of 64 bytes under a grant of its own ends well.
fn write_once(from: &mut Node, to: &mut Node) -> bool {
    let Ok(grant) = to.transport.grant(&from.peer, front(64)) else { return false };
    let ended = from.transport.post(&to.peer, write(grant, 0, 64)).is_ok_and(|post| from.wait_posted(post).is_ok());
    to.transport.revoke(grant);
    ended
}

#[test]
fn a_limited_link_carries_the_same_bytes() {
    let file = TcpConfigFile { link_gbps: Some(0.8), frame_bytes: 64 << 10, ..config() };
    let (mut a, mut b) = (node("a", file, 4 * MIB), node("b", config(), 4 * MIB));
    a.meet(&mut b);
    let bytes: Vec<u8> = (0..4 * MIB).map(|at| (at / 7) as u8).collect();
    a.memory.write(0, &bytes);
    let grant = b.grant(&a.peer, 0, 4 * MIB as u64);
    let post = a.post(&b.peer, grant, 0, 0, 0, 4 * MIB as u64);
    a.wait_posted(post).unwrap();
    assert!(b.memory.read(0, 4 * MIB) == bytes);
}

#[test]
fn an_advertised_address_keeps_the_port_that_was_bound() {
    let file = TcpConfigFile { advertise: Some("192.0.2.1:0".parse().unwrap()), ..config() };
    let a = node("a", file, 64);
    let PeerAddress::Tcp(address) = a.transport.local_address() else { panic!("not TCP") };
    assert_eq!(address.ip().to_string(), "192.0.2.1");
    assert_ne!(address.port(), 0);
}

#[test]
fn an_endpoint_that_dials_itself_is_told_so() {
    let mut a = node("a", config(), 64);
    a.transport.connect(&a.transport.local_address()).unwrap();
    let event = a.wait("Down", |event| matches!(event, Event::Down { .. }));
    assert!(format!("{event:?}").contains("own"), "{event:?}");
}

#[test]
fn a_recorded_proof_is_worth_nothing_to_another_listener_nonce() {
    let b = node("b", config(), 64);
    let mut recorded = Vec::new();
    for attempt in 0..2 {
        let mut stream = stream_to(address(&b));
        let introduction = Introduction::Peer(identity("replay"));
        let mut dialler = Dialler::new(key(), VERSIONS, introduction, [3; 32], Instant::now());
        stream.write_all(&dialler.poll_output().unwrap()).unwrap();
        let mut challenge = [0; 48];
        stream.read_exact(&mut challenge).unwrap();
        dialler.feed(&challenge).unwrap();
        let proof = dialler.poll_output().unwrap();
        let sent = if attempt == 0 { &proof } else { &recorded };
        stream.write_all(sent).unwrap();
        let answered = stream.read_exact(&mut [0; 32]).is_ok();
        assert_eq!(answered, attempt == 0);
        recorded = proof;
    }
    assert_ne!(recorded, KEY);
}

#[test]
fn an_older_start_that_was_away_meanwhile_does_not_replace_the_newer_one() {
    let mut b = node("b", config(), 64);
    let mut old = start(1);
    let proxy = Proxy::new(address(&b), ProxyPlan::default());
    old.transport.connect(&PeerAddress::Tcp(proxy.address())).unwrap();
    b.wait_up(&peer("a", 1));
    old.wait_up(&b.peer);
    // Its host is cut off, so its engine is started elsewhere; then the host comes back.
    proxy.set_plan(ProxyPlan { cut_after_bytes: Some(1), ..ProxyPlan::default() });
    proxy.cut_all();
    b.wait_down(&peer("a", 1));
    let new = start(2);
    new.transport.connect(&b.transport.local_address()).unwrap();
    b.wait_up(&peer("a", 2));
    old.wait_down(&b.peer);
    proxy.set_plan(ProxyPlan::default());
    let is_judged = |event: &Event| match event {
        Event::Up { .. } => true,
        Event::Down { reason, .. } => matches!(reason, TransportError::Ended { .. }),
        _ => false,
    };
    let judged = old.wait("Up or a refusal", is_judged);
    assert!(matches!(judged, Event::Down { .. }), "{judged:?}");
    assert!(!b.drain().iter().any(|event| matches!(event, Event::Down { peer: Some(_), .. })), "the newer one stays");
}

/// The engine `a`, started for the `incarnation`-th time.
fn start(incarnation: u64) -> Node {
    let bind = |peer: PeerId, greeting: Bytes| -> Box<dyn Transport> {
        Box::new(Tcp::bind(TcpConfig::try_from(config()).unwrap(), key(), peer, greeting).unwrap())
    };
    Node::new(&bind, peer("a", incarnation), 64)
}
