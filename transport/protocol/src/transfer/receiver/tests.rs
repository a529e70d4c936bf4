use std::time::Duration;

use super::*;
use crate::message::{Abort, Offer, Stopped, Working, Wrote};

const DEADLINE: u64 = 100;
const PROGRESS: u64 = 21;
const ABSENT: u64 = 10;
const LINGER: u64 = 5;

fn at(seconds: u64) -> Time {
    Time::since_epoch(Duration::from_secs(seconds))
}

fn rect(tokens: std::ops::Range<u32>, layers: std::ops::Range<u16>) -> Rect {
    Rect::new(tokens, layers).unwrap()
}

fn id() -> TransferId {
    TransferId::new(1)
}

fn generation(number: u32) -> Generation {
    Generation::new(number)
}

fn config(order: Order) -> ReceiverConfig {
    ReceiverConfig {
        transfer: id(),
        wanted: rect(16..48, 0..4).into(),
        order,
        deadline: Duration::from_secs(DEADLINE),
        progress: Duration::from_secs(PROGRESS),
        absent: Duration::from_secs(ABSENT),
        lease_ttl: Duration::from_secs(30),
        ask_before_revoke: None,
        linger: Duration::from_secs(LINGER),
        max_cuts: 2,
    }
}

fn new(order: Order) -> Receiver {
    Receiver::new(at(0), config(order)).unwrap()
}

fn outputs(receiver: &mut Receiver) -> Vec<ReceiverOutput> {
    std::iter::from_fn(|| receiver.poll_output()).collect()
}

fn wrote(number: u32, sequence: u32, rect: Rect) -> Wrote {
    Wrote { transfer: id(), generation: generation(number), sequence, rect, digest: Digest::new(sequence.into()) }
}

/// A receiver that granted generation 0.
fn granted() -> Receiver {
    let mut receiver = new(Order::DecodeFirst);
    receiver.peer_up(at(0), 1).unwrap();
    receiver.granted(at(0), generation(0), OpaqueKey::new(9), WindowBytes::default()).unwrap();
    outputs(&mut receiver);
    receiver
}

fn land(receiver: &mut Receiver, now: u64, number: u32, sequence: u32, rect: Rect) {
    receiver.landed(at(now), wrote(number, sequence, rect)).unwrap();
    receiver.digested(at(now), generation(number), sequence, Digest::new(sequence.into())).unwrap();
}

fn ended(verdict: Verdict) -> ReceiverOutput {
    ReceiverOutput::Send(Message::Ended(Ended { transfer: id(), verdict }))
}

/// The end among the outputs: verdict, reason and good tokens; panics unless there is one.
fn end(outputs: &[ReceiverOutput]) -> (Verdict, u32) {
    let ends: Vec<_> = outputs
        .iter()
        .filter_map(|output| match output {
            ReceiverOutput::Finished(end) => Some((end.verdict.clone(), end.good_until_token)),
            _ => None,
        })
        .collect();
    assert_eq!(ends.len(), 1, "{outputs:?}");
    ends[0].clone()
}

fn reason(verdict: &Verdict) -> Reason {
    match verdict {
        Verdict::Failed(failure) => failure.reason,
        other => panic!("not failed: {other}"),
    }
}

fn revoke(number: u32, quiet: bool) -> ReceiverOutput {
    ReceiverOutput::Revoke { generation: generation(number), quiet }
}

#[test]
fn a_transfer_is_done_when_all_is_verified_and_fenced() {
    let mut receiver = new(Order::DecodeFirst);
    assert_eq!(outputs(&mut receiver), []);
    receiver.peer_up(at(0), 1).unwrap();
    let missing = vec![rect(16..48, 0..4)];
    assert_eq!(
        outputs(&mut receiver),
        [ReceiverOutput::MakeGrant { generation: generation(0), missing: missing.clone() }]
    );
    let window = WindowBytes::new(vec![1, 2, 3]).unwrap();
    receiver.granted(at(0), generation(0), OpaqueKey::new(9), window.clone()).unwrap();
    let grant = Grant {
        transfer: id(),
        generation: generation(0),
        key: OpaqueKey::new(9),
        ttl_ms: 30_000,
        window,
        missing: Missing::new(missing).unwrap(),
    };
    assert_eq!(outputs(&mut receiver), [ReceiverOutput::Send(Message::Grant(grant))]);

    let (first, second) = (rect(16..32, 0..4), rect(32..48, 0..4));
    receiver.landed(at(1), wrote(0, 1, second)).unwrap();
    let verify = ReceiverOutput::Verify { generation: generation(0), sequence: 1, rect: second };
    assert_eq!(outputs(&mut receiver), [verify]);
    receiver.digested(at(1), generation(0), 1, Digest::new(1)).unwrap();
    assert_eq!(outputs(&mut receiver), [ReceiverOutput::Verified(second)]);
    land(&mut receiver, 2, 0, 0, first);
    let verify = ReceiverOutput::Verify { generation: generation(0), sequence: 0, rect: first };
    assert_eq!(outputs(&mut receiver), [verify, ReceiverOutput::Verified(first), revoke(0, true)]);
    receiver.fenced(at(2), generation(0)).unwrap();
    let good = vec![rect(16..48, 0..4)];
    assert_eq!(
        outputs(&mut receiver),
        [
            ended(Verdict::Done),
            ReceiverOutput::Finished(ReceiverEnd { verdict: Verdict::Done, good, good_until_token: 48 })
        ]
    );
    receiver.message(at(3), Message::Ended(Ended { transfer: id(), verdict: Verdict::Done })).unwrap();
    assert!(receiver.is_closed());
    assert_eq!(receiver.poll_timeout(), None);
}

#[test]
fn a_pushed_transfer_is_granted_when_it_is_offered_and_the_offer_suffices() {
    for (name, held, want) in [
        ("all that is wanted", rect(16..48, 0..4), None),
        ("more than is wanted", rect(0..64, 0..8), None),
        ("a token too few", rect(0..47, 0..4), Some(Reason::Range)),
        ("a layer too few", rect(0..48, 1..4), Some(Reason::Range)),
    ] {
        let mut receiver = new(Order::PrefillFirst);
        receiver.peer_up(at(0), 1).unwrap();
        assert_eq!(outputs(&mut receiver), [], "{name}");
        receiver.message(at(1), Message::Offer(Offer { transfer: id(), held })).unwrap();
        let outputs = outputs(&mut receiver);
        match want {
            None => assert!(matches!(outputs[..], [ReceiverOutput::MakeGrant { .. }]), "{name}: {outputs:?}"),
            Some(want) => assert_eq!(reason(&end(&outputs).0), want, "{name}"),
        }
    }
}

#[test]
fn a_wrong_digest_is_never_visible_and_fails_the_transfer_with_what_is_good() {
    let mut receiver = granted();
    land(&mut receiver, 1, 0, 0, rect(16..32, 0..4));
    outputs(&mut receiver);
    let bad = rect(32..48, 0..4);
    receiver.landed(at(2), wrote(0, 1, bad)).unwrap();
    receiver.digested(at(2), generation(0), 1, Digest::new(77)).unwrap();
    let before = outputs(&mut receiver);
    assert!(!before.contains(&ReceiverOutput::Verified(bad)));
    assert_eq!(before.last(), Some(&revoke(0, false)));
    receiver.fenced(at(2), generation(0)).unwrap();
    let (verdict, good_until) = end(&outputs(&mut receiver));
    assert_eq!((reason(&verdict), good_until), (Reason::Digest, 32));
    assert_eq!(receiver.stats().digest_mismatches, 1);
}

#[test]
fn bytes_that_cannot_be_hashed_fail_the_transfer_and_do_not_hold_its_end() {
    let mut receiver = granted();
    receiver.landed(at(1), wrote(0, 0, rect(16..32, 0..4))).unwrap();
    receiver.digest_failed(at(1), generation(0), 0, "no plan").unwrap();
    assert!(receiver.digest_failed(at(1), generation(0), 0, "again").is_err());
    receiver.fenced(at(1), generation(0)).unwrap();
    let (verdict, good_until) = end(&outputs(&mut receiver));
    assert_eq!((reason(&verdict), good_until), (Reason::Digest, 16));
}

#[test]
fn good_tokens_end_where_the_first_layer_lacks_one() {
    for (name, landed, want) in [
        ("nothing", vec![], 16),
        ("a token range over all layers", vec![rect(16..32, 0..4)], 32),
        ("not from the first token", vec![rect(32..48, 0..4)], 16),
        ("one layer short", vec![rect(16..48, 0..3), rect(16..24, 3..4)], 24),
        ("one layer missing", vec![rect(16..48, 1..4)], 16),
    ] {
        let mut receiver = granted();
        for (sequence, rect) in (0..).zip(landed) {
            land(&mut receiver, 1, 0, sequence, rect);
        }
        receiver.cancel(at(2)).unwrap();
        receiver.fenced(at(2), generation(0)).unwrap();
        assert_eq!(end(&outputs(&mut receiver)), (Verdict::Cancelled, want), "{name}");
    }
}

#[test]
fn writes_against_the_protocol_end_the_transfer_and_taint_what_they_hit() {
    let first = rect(16..32, 0..4);
    for (name, sequence, rect, good_until) in [
        ("outside the grant", 1, rect(0..16, 0..4), 32),
        ("partly outside the grant", 1, rect(40..49, 0..4), 32),
        ("over verified bytes", 1, rect(31..33, 0..1), 31),
        ("a sequence far ahead", 1_000_000, rect(32..48, 0..4), 32),
    ] {
        let mut receiver = granted();
        land(&mut receiver, 1, 0, 0, first);
        receiver.landed(at(2), wrote(0, sequence, rect)).unwrap();
        receiver.fenced(at(2), generation(0)).unwrap();
        let (verdict, good) = end(&outputs(&mut receiver));
        assert_eq!((reason(&verdict), good), (Reason::Protocol, good_until), "{name}");
        assert_eq!(receiver.stats().violations, 1, "{name}");
    }
}

#[test]
fn a_write_over_a_complete_transfer_before_the_fence_undoes_its_done() {
    let mut receiver = granted();
    land(&mut receiver, 1, 0, 0, rect(16..48, 0..4));
    assert_eq!(receiver.state(), "Fencing(end)");
    receiver.landed(at(1), wrote(0, 1, rect(20..21, 0..1))).unwrap();
    receiver.fenced(at(1), generation(0)).unwrap();
    let (verdict, good_until) = end(&outputs(&mut receiver));
    assert_eq!((reason(&verdict), good_until), (Reason::Protocol, 20));
}

#[test]
fn the_end_waits_for_the_fence_and_for_every_digest() {
    let mut receiver = granted();
    receiver.landed(at(1), wrote(0, 0, rect(16..32, 0..4))).unwrap();
    receiver.cancel(at(1)).unwrap();
    outputs(&mut receiver);
    receiver.fenced(at(2), generation(0)).unwrap();
    assert_eq!(outputs(&mut receiver), [], "its bytes are still being hashed");
    receiver.digested(at(3), generation(0), 0, Digest::new(0)).unwrap();
    assert_eq!(end(&outputs(&mut receiver)), (Verdict::Cancelled, 32), "what landed before the fence is good");
}

#[test]
fn after_a_cut_only_the_rest_is_granted_and_under_a_new_generation() {
    let mut receiver = granted();
    land(&mut receiver, 1, 0, 0, rect(16..32, 0..4));
    receiver.landed(at(1), wrote(0, 1, rect(32..40, 0..4))).unwrap();
    outputs(&mut receiver);
    receiver.peer_down(at(2)).unwrap();
    assert_eq!(outputs(&mut receiver), [revoke(0, true)]);
    receiver.peer_up(at(3), 2).unwrap();
    receiver.fenced(at(3), generation(0)).unwrap();
    assert_eq!(outputs(&mut receiver), [], "a write is still being hashed");
    receiver.digested(at(4), generation(0), 1, Digest::new(1)).unwrap();
    assert_eq!(
        outputs(&mut receiver),
        [
            ReceiverOutput::Verified(rect(32..40, 0..4)),
            ReceiverOutput::MakeGrant { generation: generation(1), missing: vec![rect(40..48, 0..4)] }
        ]
    );
    receiver.granted(at(4), generation(1), OpaqueKey::new(10), WindowBytes::default()).unwrap();
    outputs(&mut receiver);
    let stale = receiver.landed(at(4), wrote(0, 2, rect(40..48, 0..4)));
    assert!(matches!(stale, Err(InputError::Generation { .. })), "{stale:?}");
    land(&mut receiver, 5, 1, 0, rect(40..48, 0..4));
    receiver.fenced(at(5), generation(1)).unwrap();
    assert_eq!(end(&outputs(&mut receiver)), (Verdict::Done, 48));
}

#[test]
fn a_transfer_is_cut_only_so_often() {
    let mut receiver = granted();
    for number in 0..3 {
        receiver.peer_down(at(1)).unwrap();
        receiver.fenced(at(1), generation(number)).unwrap();
        if number < 2 {
            receiver.peer_up(at(1), u64::from(number) + 2).unwrap();
            receiver.granted(at(1), generation(number + 1), OpaqueKey::new(9), WindowBytes::default()).unwrap();
        }
    }
    assert_eq!(reason(&end(&outputs(&mut receiver)).0), Reason::Cuts);
}

#[test]
fn every_wait_has_an_end() {
    type Setup = fn() -> Receiver;
    let waiting: Setup = || new(Order::DecodeFirst);
    let offer: Setup = || {
        let mut receiver = new(Order::PrefillFirst);
        receiver.peer_up(at(0), 1).unwrap();
        receiver
    };
    let cut: Setup = || {
        let mut receiver = granted();
        receiver.peer_down(at(50)).unwrap();
        receiver.fenced(at(50), generation(0)).unwrap();
        receiver
    };
    let regrant: Setup = || {
        let mut receiver = granted();
        receiver.peer_down(at(1)).unwrap();
        receiver
    };
    let granting: Setup = || {
        let mut receiver = new(Order::DecodeFirst);
        receiver.peer_up(at(0), 1).unwrap();
        receiver
    };
    for (name, setup, when, why, state) in [
        ("no session at the start", waiting, ABSENT, "peer absent", "Lingering"),
        ("no offer", offer, DEADLINE, "deadline", "Lingering"),
        ("no session after a cut", cut, 50 + ABSENT, "peer absent", "Lingering"),
        ("a grant that is never made", granting, DEADLINE, "deadline", "Granting(end)"),
        ("a fence before a new grant", regrant, DEADLINE, "deadline", "Fencing(end)"),
    ] {
        let mut receiver = setup();
        assert_eq!(receiver.poll_timeout(), Some((at(when), why)), "{name}");
        receiver.timeout(at(when));
        assert_eq!(receiver.state(), state, "{name}");
        assert!(receiver.poll_timeout().is_none_or(|(next, _)| next > at(when)), "{name}");
    }
    let mut stalled = granted();
    let renew = ReceiverOutput::Send(Message::Renew(Renew { transfer: id(), ttl_ms: 30_000 }));
    for when in [7, 14] {
        assert_eq!(stalled.poll_timeout(), Some((at(when), "renew")));
        stalled.timeout(at(when));
        assert_eq!(outputs(&mut stalled), std::slice::from_ref(&renew));
    }
    assert_eq!(stalled.poll_timeout(), Some((at(21), "progress")));
    land(&mut stalled, 19, 0, 0, rect(16..17, 0..1));
    assert_eq!(stalled.poll_timeout(), Some((at(21), "renew")), "progress moves the limit");
    outputs(&mut stalled);
    stalled.message(at(20), Message::Working(Working { transfer: id() })).unwrap();
    stalled.timeout(at(40));
    assert_eq!(stalled.state(), "Granted", "the sender's word that it computes moves it, too");
    stalled.timeout(at(41));
    stalled.fenced(at(41), generation(0)).unwrap();
    assert_eq!(reason(&end(&outputs(&mut stalled)).0), Reason::Stalled);
    assert_eq!(stalled.poll_timeout(), Some((at(41 + LINGER), "linger")));
    stalled.timeout(at(41 + LINGER));
    assert!(stalled.is_closed());
}

#[test]
fn a_costly_fence_comes_after_the_senders_word_or_a_wait_for_it() {
    let stop = ReceiverOutput::Send(Message::Stop(Stop { transfer: id(), generation: generation(0) }));
    let stopped = |number| Message::Stopped(Stopped { transfer: id(), generation: generation(number) });
    let asking = || {
        let config = ReceiverConfig { ask_before_revoke: Some(Duration::from_secs(3)), ..config(Order::DecodeFirst) };
        let mut receiver = Receiver::new(at(0), config).unwrap();
        receiver.peer_up(at(0), 1).unwrap();
        receiver.granted(at(0), generation(0), OpaqueKey::new(9), WindowBytes::default()).unwrap();
        outputs(&mut receiver);
        receiver.cancel(at(1)).unwrap();
        receiver
    };
    let mut asked = asking();
    assert_eq!(outputs(&mut asked), std::slice::from_ref(&stop));
    assert_eq!(asked.poll_timeout(), Some((at(4), "sender's word that it stopped")));
    let other = asked.message(at(2), stopped(7));
    assert!(matches!(other, Err(InputError::Generation { .. })), "{other:?}");
    asked.message(at(2), stopped(0)).unwrap();
    assert_eq!(outputs(&mut asked), [revoke(0, true)]);

    let mut silent = asking();
    silent.timeout(at(4));
    assert_eq!(outputs(&mut silent), [stop.clone(), revoke(0, false)]);

    let mut gone = asking();
    gone.peer_down(at(2)).unwrap();
    assert_eq!(outputs(&mut gone), [stop, revoke(0, true)]);
    gone.fenced(at(2), generation(0)).unwrap();
    assert_eq!(end(&outputs(&mut gone)).0, Verdict::Cancelled);
}

#[test]
fn an_abort_ends_the_transfer_unless_its_end_is_decided() {
    let abort = |why| Message::Abort(Abort { transfer: id(), why });
    let engine = Verdict::failed(Reason::Engine, "out of memory");
    for (name, why, want) in [
        ("cancelled", Verdict::Cancelled, Verdict::Cancelled),
        ("failed", engine.clone(), engine),
        ("done, which makes no sense", Verdict::Done, Verdict::failed(Reason::Protocol, "")),
    ] {
        let mut receiver = granted();
        receiver.message(at(1), abort(why)).unwrap();
        receiver.fenced(at(1), generation(0)).unwrap();
        let verdict = end(&outputs(&mut receiver)).0;
        assert_eq!(
            (verdict.name(), matches!(verdict, Verdict::Failed(_)).then(|| reason(&verdict))),
            { (want.name(), matches!(want, Verdict::Failed(_)).then(|| reason(&want))) },
            "{name}"
        );
    }
    let mut complete = granted();
    land(&mut complete, 1, 0, 0, rect(16..48, 0..4));
    complete.message(at(1), abort(Verdict::Cancelled)).unwrap();
    complete.fenced(at(1), generation(0)).unwrap();
    assert_eq!(end(&outputs(&mut complete)).0, Verdict::Done, "all is there");
    complete.message(at(2), abort(Verdict::Cancelled)).unwrap();
    assert_eq!(outputs(&mut complete), [ended(Verdict::Done)], "the word is repeated");
}

#[test]
fn the_word_is_repeated_in_the_next_session_until_it_is_answered() {
    let mut receiver = granted();
    land(&mut receiver, 1, 0, 0, rect(16..48, 0..4));
    receiver.peer_down(at(1)).unwrap();
    receiver.fenced(at(1), generation(0)).unwrap();
    let outputs_without_session = outputs(&mut receiver);
    assert_eq!(end(&outputs_without_session).0, Verdict::Done);
    assert!(!outputs_without_session.contains(&ended(Verdict::Done)), "there is no session");
    receiver.peer_up(at(2), 2).unwrap();
    assert_eq!(outputs(&mut receiver), [ended(Verdict::Done)]);
}

#[test]
fn a_grant_that_cannot_be_made_ends_or_waits() {
    let granting = || {
        let mut receiver = new(Order::DecodeFirst);
        receiver.peer_up(at(0), 1).unwrap();
        outputs(&mut receiver);
        receiver
    };
    let mut full = granting();
    full.grant_refused(at(0), generation(0), GrantRefusal::Impossible("too many grants".into())).unwrap();
    assert_eq!(reason(&end(&outputs(&mut full)).0), Reason::Grant);

    let mut unconnected = granting();
    unconnected.grant_refused(at(0), generation(0), GrantRefusal::NotConnected).unwrap();
    assert_eq!((outputs(&mut unconnected), unconnected.state()), (vec![], "Waiting"));
    unconnected.peer_up(at(1), 2).unwrap();
    let again = ReceiverOutput::MakeGrant { generation: generation(1), missing: vec![rect(16..48, 0..4)] };
    assert_eq!(outputs(&mut unconnected), [again]);

    let mut cancelled = granting();
    cancelled.cancel(at(0)).unwrap();
    assert_eq!(outputs(&mut cancelled), [], "the grant may exist by now");
    cancelled.granted(at(0), generation(0), OpaqueKey::new(9), WindowBytes::default()).unwrap();
    assert_eq!(outputs(&mut cancelled), [revoke(0, true)], "nobody was told of it");
    cancelled.fenced(at(0), generation(0)).unwrap();
    assert_eq!(end(&outputs(&mut cancelled)).0, Verdict::Cancelled);
}

#[test]
fn a_restarted_peer_ends_the_transfer_at_once() {
    let mut receiver = granted();
    land(&mut receiver, 1, 0, 0, rect(16..32, 0..4));
    receiver.peer_restarted(at(2)).unwrap();
    receiver.fenced(at(2), generation(0)).unwrap();
    let (verdict, good_until) = end(&outputs(&mut receiver));
    assert_eq!((reason(&verdict), good_until), (Reason::PeerRestarted, 32));
    assert!(receiver.is_closed(), "nobody is left to hear the word");
}

#[test]
fn what_does_not_fit_is_a_typed_error_counted_and_changes_nothing() {
    let mut receiver = granted();
    let foreign = Wrote { transfer: TransferId::new(2), ..wrote(0, 0, rect(16..32, 0..4)) };
    let missing = Missing::default();
    let grant = Grant {
        transfer: id(),
        generation: generation(0),
        key: OpaqueKey::new(1),
        ttl_ms: 1,
        window: WindowBytes::default(),
        missing,
    };
    for (name, error) in [
        ("a foreign write", receiver.landed(at(1), foreign)),
        ("a later generation", receiver.landed(at(1), wrote(5, 0, rect(16..32, 0..4)))),
        ("a digest that was not asked for", receiver.digested(at(1), generation(0), 3, Digest::new(0))),
        ("a digest of another generation", receiver.digested(at(1), generation(4), 0, Digest::new(0))),
        ("a fence that was not asked for", receiver.fenced(at(1), generation(0))),
        ("a grant that was not asked for", {
            receiver.granted(at(1), generation(0), OpaqueKey::new(0), WindowBytes::default())
        }),
        ("a sender's input", receiver.message(at(1), Message::Grant(grant))),
        ("an old session", receiver.peer_up(at(1), 1)),
        ("a second session", receiver.peer_up(at(1), 2)),
    ] {
        assert!(error.is_err(), "{name}");
    }
    assert_eq!(outputs(&mut receiver), []);
    assert_eq!(receiver.state(), "Granted");
    let ignored = receiver.stats().ignored;
    assert_eq!(
        (ignored.state, ignored.generation, ignored.sequence, ignored.transfer, ignored.session),
        (4, 2, 1, 1, 1)
    );
    let shown = receiver.fenced(at(1), generation(0)).unwrap_err().to_string();
    assert!(shown.ends_with("fenced does not fit a receiver that is Granted"), "{shown}");
}

#[test]
fn a_transfer_that_cannot_be_is_refused_at_the_start() {
    let nothing = ReceiverConfig { wanted: Coverage::new(), ..config(Order::DecodeFirst) };
    assert!(matches!(Receiver::new(at(0), nothing), Err(ReceiverConfigError::Nothing { .. })));
    let rects: Vec<Rect> = (0..300).map(|token| rect(2 * token..2 * token + 1, 0..1)).collect();
    let shredded = ReceiverConfig { wanted: Coverage::of(&rects).unwrap(), ..config(Order::DecodeFirst) };
    assert!(matches!(Receiver::new(at(0), shredded), Err(ReceiverConfigError::Rects { found: 300, .. })));
    let forever = ReceiverConfig { lease_ttl: Duration::from_secs(1 << 40), ..config(Order::DecodeFirst) };
    assert!(matches!(Receiver::new(at(0), forever), Err(ReceiverConfigError::LeaseTtl { .. })));
}
