use super::*;
use crate::ids::{EngineId, Generation, Incarnation, PpRank, TpRank};
use crate::message::{Grant, Missing, Offer, OpaqueKey, Renew, Stop, WindowBytes, Working};
use crate::transfer::Rect;

const TTL: Duration = Duration::from_secs(5);

fn at(seconds: u64) -> Time {
    Time::since_epoch(Duration::from_secs(seconds))
}

fn peer(name: &str) -> PeerId {
    PeerId {
        engine: EngineId::new(name).unwrap(),
        incarnation: Incarnation::new(1),
        pp_rank: PpRank::new(0),
        tp_rank: TpRank::new(0),
    }
}

fn id(number: u128) -> TransferId {
    TransferId::new(number)
}

fn table() -> Early {
    Early::new(EarlyConfig { max_messages: 4, max_messages_per_peer: 2, ttl: TTL })
}

fn grant(number: u128, generation: u32) -> Message {
    Message::Grant(Grant {
        transfer: id(number),
        generation: Generation::new(generation),
        key: OpaqueKey::new(7),
        ttl_ms: 1000,
        window: WindowBytes::default(),
        missing: Missing::default(),
    })
}

fn offer(number: u128) -> Message {
    Message::Offer(Offer { transfer: id(number), held: Rect::new(0..8, 0..2).unwrap() })
}

fn reason(answer: &Message) -> (&'static str, Reason) {
    match answer {
        Message::Abort(Abort { why: Verdict::Failed(failure), .. })
        | Message::Ended(Ended { verdict: Verdict::Failed(failure), .. }) => (answer.name(), failure.reason),
        other => panic!("no negative answer: {other:?}"),
    }
}

#[test]
fn an_early_message_is_handed_out_once_to_who_comes_for_it() {
    let (mut early, alice, bob) = (table(), peer("alice"), peer("bob"));
    assert_eq!(early.message(at(0), &alice, grant(1, 0)), None);
    assert_eq!(early.message(at(0), &alice, grant(1, 1)), None);
    assert_eq!(early.take(&bob, id(1)), None, "another peer's grant");
    assert_eq!(early.take(&alice, id(1)), Some(grant(1, 1)), "the newest");
    assert_eq!(early.take(&alice, id(1)), None);
}

#[test]
fn a_full_table_refuses_in_writing_and_a_peer_cannot_fill_it_alone() {
    let (mut early, alice, bob) = (table(), peer("alice"), peer("bob"));
    assert_eq!(early.message(at(0), &alice, grant(1, 0)), None);
    assert_eq!(early.message(at(0), &alice, offer(2)), None);
    assert_eq!(reason(&early.message(at(0), &alice, grant(3, 0)).unwrap()), ("Abort", Reason::Unknown));
    assert_eq!(reason(&early.message(at(0), &alice, offer(4)).unwrap()), ("Ended", Reason::Unknown));
    assert_eq!(early.message(at(0), &bob, offer(1)), None);
    assert_eq!(early.message(at(0), &bob, offer(2)), None);
    assert_eq!(reason(&early.message(at(0), &peer("carol"), offer(1)).unwrap()), ("Ended", Reason::Unknown));
    assert_eq!((early.len(), early.stats().refused), (4, 3));
}

#[test]
fn what_nobody_comes_for_is_answered_in_the_negative_at_its_time() {
    let (mut early, alice) = (table(), peer("alice"));
    early.message(at(0), &alice, grant(1, 0));
    early.message(at(1), &alice, offer(2));
    let renew = Message::Renew(Renew { transfer: id(1), ttl_ms: 1000 });
    let working = Message::Working(Working { transfer: id(1) });
    assert_eq!(
        early.message(at(2), &alice, renew),
        Some(working),
        "the receiver still wants it, and the request may come"
    );
    assert_eq!(early.poll_timeout(), Some((at(6), "early message")));
    assert_eq!(early.timeout(at(5)), []);
    let answers = early.timeout(at(6));
    assert_eq!((answers[0].0.clone(), reason(&answers[0].1)), (alice.clone(), ("Ended", Reason::Unknown)));
    assert_eq!(reason(&early.timeout(at(7))[0].1), ("Abort", Reason::Unknown));
    assert!(early.is_empty());
    assert_eq!(early.poll_timeout(), None);
}

#[test]
fn messages_of_unknown_transfers_have_the_right_answer() {
    let (mut early, alice) = (table(), peer("alice"));
    let stop = |generation| Message::Stop(Stop { transfer: id(1), generation: Generation::new(generation) });
    let stopped = |generation| Message::Stopped(Stopped { transfer: id(1), generation: Generation::new(generation) });
    let ended = |verdict| Message::Ended(Ended { transfer: id(1), verdict });

    early.message(at(0), &alice, grant(1, 3));
    assert_eq!(early.message(at(0), &alice, stop(2)), Some(stopped(2)));
    assert_eq!(early.len(), 1, "a newer grant stays");
    assert_eq!(early.message(at(0), &alice, stop(3)), Some(stopped(3)));
    assert_eq!(early.len(), 0, "a stopped grant is gone");

    let renew = Message::Renew(Renew { transfer: id(1), ttl_ms: 1000 });
    assert_eq!(reason(&early.message(at(0), &alice, renew).unwrap()), ("Abort", Reason::Unknown));

    early.message(at(0), &alice, grant(1, 4));
    assert_eq!(early.message(at(0), &alice, ended(Verdict::Cancelled)), None);
    assert_eq!(early.take(&alice, id(1)), None, "the receiver ended");
    assert!(early.is_declined(&alice, id(1)), "the request that may come must hear it");
    early.peer_down(&alice);
    assert!(!early.is_declined(&alice, id(1)));

    early.message(at(0), &alice, offer(1));
    assert_eq!(early.message(at(0), &alice, ended(Verdict::failed(Reason::NoWord, "x"))), None);
    let abort = Message::Abort(Abort { transfer: id(1), why: Verdict::failed(Reason::NoWord, "x") });
    assert_eq!(early.take(&alice, id(1)), Some(abort), "the sender ended");

    early.message(at(0), &alice, offer(1));
    early.peer_down(&alice);
    assert!(early.is_empty(), "a session's end takes its messages");
}

#[test]
fn what_the_engine_declines_is_answered_now_and_when_it_comes() {
    let (mut early, alice, bob) = (table(), peer("alice"), peer("bob"));
    early.message(at(0), &alice, grant(1, 0));
    let answer = early.decline(at(1), &alice, id(1), "the prompt is too long").unwrap();
    assert_eq!(reason(&answer), ("Abort", Reason::Unknown));
    assert_eq!(early.decline(at(1), &alice, id(2), "too long"), None, "nothing was said yet");
    assert_eq!(reason(&early.message(at(2), &alice, grant(2, 0)).unwrap()), ("Abort", Reason::Unknown));
    assert_eq!(early.message(at(2), &bob, grant(2, 0)), None, "another peer's transfer is another transfer");
    while let Some((next, _)) = early.poll_timeout() {
        early.timeout(next);
    }
    assert_eq!(early.message(at(100), &alice, grant(2, 0)), None, "it is not remembered for ever");
}

#[test]
fn a_peer_that_says_much_pushes_out_its_own_refusals_first() {
    let (mut early, alice, bob, carol) = (table(), peer("alice"), peer("bob"), peer("carol"));
    assert_eq!(early.decline(at(0), &alice, id(1), "no room"), None);
    let ended = |number| Message::Ended(Ended { transfer: id(number), verdict: Verdict::Cancelled });
    for number in 10..20 {
        assert_eq!(early.message(at(1), &bob, ended(number)), None);
    }
    assert_eq!((early.declined_to(&alice), early.declined_to(&bob)), (1, 2), "two are for each peer");
    assert!(early.is_declined(&bob, id(19)) && early.is_declined(&bob, id(18)), "the newest are kept");
    // The table takes four: who has most of them gives one up.
    for number in 30..32 {
        assert_eq!(early.decline(at(2), &carol, id(number), "no room"), None);
    }
    assert!(early.is_declined(&alice, id(1)), "the one refusal to a silent peer stands");
    assert_eq!(early.declined_len(), 4);
}
