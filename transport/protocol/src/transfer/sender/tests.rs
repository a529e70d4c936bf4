use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

use super::*;
use crate::message::{Grant, Missing, OpaqueKey, Renew, Stop, WindowBytes, Working};

const TTL: u64 = 30;
const WORD: u64 = 10;
const ABSENT: u64 = 7;

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

fn new(order: Order) -> Sender {
    let mut sender = Sender::new(
        at(0),
        SenderConfig {
            transfer: id(),
            held: rect(0..64, 0..4),
            order,
            lease_ttl: Duration::from_secs(TTL),
            lease_max: Duration::from_secs(100),
            absent: Duration::from_secs(ABSENT),
            word: Duration::from_secs(WORD),
            max_posts_in_flight: NonZeroU32::new(2).unwrap(),
            max_cells_per_post: NonZeroU64::new(64).unwrap(),
            align_tokens: NonZeroU32::new(16).unwrap(),
        },
    );
    sender.peer_up(at(0), 1).unwrap();
    sender
}

fn outputs(sender: &mut Sender) -> Vec<SenderOutput> {
    std::iter::from_fn(|| sender.poll_output()).collect()
}

fn grant(number: u32, missing: &[Rect]) -> Grant {
    Grant {
        transfer: id(),
        generation: generation(number),
        key: OpaqueKey::new(9),
        ttl_ms: 30_000,
        window: WindowBytes::default(),
        missing: Missing::new(missing.to_vec()).unwrap(),
    }
}

fn post(number: u32, sequence: u32, rect: Rect) -> SenderOutput {
    SenderOutput::Post { generation: generation(number), sequence, rect }
}

fn cancel_posts(number: u32) -> SenderOutput {
    SenderOutput::CancelPosts { generation: generation(number) }
}

fn ended(verdict: Verdict) -> Message {
    Message::Ended(Ended { transfer: id(), verdict })
}

fn abort(why: Verdict) -> SenderOutput {
    SenderOutput::Send(Message::Abort(Abort { transfer: id(), why }))
}

fn taken(sender: &mut Sender, now: u64, number: u32, sequence: u32) {
    sender.posted(at(now), generation(number), sequence, PostOutcome::Taken).unwrap();
}

/// A sender with two posts in flight under generation 0 and more to come.
fn posting() -> Sender {
    let mut sender = new(Order::DecodeFirst);
    sender.computed(at(0), rect(0..48, 0..4)).unwrap();
    sender.message(at(0), Message::Grant(grant(0, &[rect(0..64, 0..4)]))).unwrap();
    outputs(&mut sender);
    sender
}

fn finished(outputs: &[SenderOutput]) -> Verdict {
    let ends: Vec<_> = outputs
        .iter()
        .filter_map(|output| match output {
            SenderOutput::Finished(verdict) => Some(verdict.clone()),
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

#[test]
fn what_is_computed_and_missing_is_posted_once_in_order_and_done_is_the_receivers_word() {
    let mut sender = new(Order::DecodeFirst);
    sender.computed(at(0), rect(0..32, 0..4)).unwrap();
    assert_eq!(outputs(&mut sender), [], "no grant yet");
    let grant = grant(0, &[rect(16..64, 0..4)]);
    sender.message(at(1), Message::Grant(grant.clone())).unwrap();
    assert_eq!(outputs(&mut sender), [SenderOutput::Adopt(grant), post(0, 0, rect(16..32, 0..4))]);
    sender.computed(at(2), rect(32..64, 0..2)).unwrap();
    assert_eq!(outputs(&mut sender), [post(0, 1, rect(32..64, 0..2))]);
    sender.computed(at(2), rect(32..64, 2..4)).unwrap();
    assert_eq!(outputs(&mut sender), [], "two posts are in flight");
    taken(&mut sender, 3, 0, 0);
    assert_eq!(outputs(&mut sender), [post(0, 2, rect(32..64, 2..4))]);
    sender.computed(at(3), rect(0..64, 0..4)).unwrap();
    taken(&mut sender, 3, 0, 2);
    assert_eq!(outputs(&mut sender), [], "never twice");
    taken(&mut sender, 4, 0, 1);
    assert_eq!(sender.state(), "Granted(all posted)");
    sender.message(at(5), ended(Verdict::Done)).unwrap();
    let last = outputs(&mut sender);
    assert_eq!(
        last,
        [
            cancel_posts(0),
            SenderOutput::ReleaseLease,
            SenderOutput::Send(ended(Verdict::Done)),
            SenderOutput::Finished(Verdict::Done)
        ]
    );
    assert!(sender.is_closed());
    assert_eq!(sender.poll_timeout(), None);
}

#[test]
fn a_pushing_sender_offers_in_each_session_until_it_has_a_grant() {
    let offer = SenderOutput::Send(Message::Offer(Offer { transfer: id(), held: rect(0..64, 0..4) }));
    let mut sender = new(Order::PrefillFirst);
    assert_eq!(outputs(&mut sender), std::slice::from_ref(&offer));
    sender.peer_down(at(1)).unwrap();
    sender.peer_up(at(2), 2).unwrap();
    assert_eq!(outputs(&mut sender), [offer]);
    sender.message(at(2), Message::Grant(grant(0, &[rect(0..16, 0..4)]))).unwrap();
    sender.peer_down(at(3)).unwrap();
    outputs(&mut sender);
    sender.peer_up(at(4), 3).unwrap();
    assert_eq!(outputs(&mut sender), [], "the receiver knows of it");
}

#[test]
fn no_word_in_time_is_a_failure_of_its_own() {
    let mut sender = new(Order::DecodeFirst);
    sender.computed(at(0), rect(0..16, 0..4)).unwrap();
    sender.message(at(0), Message::Grant(grant(0, &[rect(0..16, 0..4)]))).unwrap();
    taken(&mut sender, 1, 0, 0);
    assert_eq!(sender.poll_timeout(), Some((at(1 + WORD), "receiver's word")));
    outputs(&mut sender);
    sender.timeout(at(1 + WORD));
    assert_eq!(reason(&finished(&outputs(&mut sender))), Reason::NoWord);
}

#[test]
fn a_cancelled_sender_drains_releases_and_takes_the_receivers_word() {
    let engine = Verdict::failed(Reason::Engine, "x");
    for (name, word, want) in [
        ("done after all", Verdict::Done, Verdict::Done),
        ("cancelled", Verdict::Cancelled, Verdict::Cancelled),
        ("failed", engine.clone(), engine),
    ] {
        let mut sender = posting();
        sender.cancel(at(1)).unwrap();
        assert_eq!(outputs(&mut sender), [cancel_posts(0), abort(Verdict::Cancelled)], "{name}");
        sender.posted(at(2), generation(0), 0, PostOutcome::Taken).unwrap();
        assert_eq!(outputs(&mut sender), [], "{name}: a post still reads the blocks");
        sender.posted(at(2), generation(0), 1, PostOutcome::Lost).unwrap();
        assert_eq!(outputs(&mut sender), [SenderOutput::ReleaseLease], "{name}");
        sender.message(at(3), ended(word)).unwrap();
        assert_eq!(finished(&outputs(&mut sender)), want, "{name}");
    }
    let mut silent = posting();
    silent.cancel(at(1)).unwrap();
    silent.message(at(2), Message::Grant(grant(1, &[]))).unwrap();
    assert_eq!(
        outputs(&mut silent),
        [cancel_posts(0), abort(Verdict::Cancelled), abort(Verdict::Cancelled)],
        "a grant that crossed the abort is answered by it"
    );
    silent.timeout(at(1 + WORD));
    assert_eq!(outputs(&mut silent), [], "two posts in flight");
    taken(&mut silent, 12, 0, 0);
    taken(&mut silent, 12, 0, 1);
    assert_eq!(reason(&finished(&outputs(&mut silent))), Reason::NoWord);
}

#[test]
fn a_failed_sender_keeps_its_reason_unless_the_receiver_is_done() {
    for (name, word, want) in [
        ("failed", Verdict::failed(Reason::Deadline, "late"), Some(Reason::Engine)),
        ("cancelled", Verdict::Cancelled, Some(Reason::Engine)),
        ("done after all", Verdict::Done, None),
        ("forgotten, perhaps done", Verdict::failed(Reason::Unknown, "x"), Some(Reason::NoWord)),
    ] {
        let mut sender = new(Order::DecodeFirst);
        sender.fail(at(1), "the device is gone").unwrap();
        assert!(sender.fail(at(1), "again").is_err() && sender.cancel(at(1)).is_err(), "{name}");
        sender.message(at(2), ended(word)).unwrap();
        let verdict = finished(&outputs(&mut sender));
        assert_eq!(matches!(verdict, Verdict::Failed(_)).then(|| reason(&verdict)), want, "{name}");
    }
}

#[test]
fn a_lease_that_runs_out_drains_first() {
    let mut sender = posting();
    sender.message(at(20), Message::Renew(Renew { transfer: id(), ttl_ms: 20_000 })).unwrap();
    assert_eq!(sender.poll_timeout(), Some((at(40), "lease")));
    sender.timeout(at(39));
    assert_eq!(outputs(&mut sender), []);
    sender.timeout(at(40));
    let text = "the lease ran out and was not renewed";
    assert_eq!(outputs(&mut sender), [cancel_posts(0), abort(Verdict::failed(Reason::LeaseExpired, text))]);
    taken(&mut sender, 41, 0, 0);
    assert_eq!(outputs(&mut sender), []);
    taken(&mut sender, 41, 0, 1);
    assert_eq!(outputs(&mut sender), [SenderOutput::ReleaseLease]);
}

#[test]
fn a_stop_is_answered_when_nothing_up_to_its_generation_is_posted() {
    let stop = |number| Message::Stop(Stop { transfer: id(), generation: generation(number) });
    let stopped =
        |number| SenderOutput::Send(Message::Stopped(Stopped { transfer: id(), generation: generation(number) }));
    let mut sender = posting();
    sender.message(at(1), stop(0)).unwrap();
    assert_eq!(outputs(&mut sender), [cancel_posts(0)]);
    taken(&mut sender, 2, 0, 1);
    assert_eq!(outputs(&mut sender), []);
    sender.message(at(2), Message::Grant(grant(1, &[rect(0..16, 0..4)]))).unwrap();
    assert_eq!(outputs(&mut sender).len(), 2, "a newer grant is used meanwhile");
    taken(&mut sender, 3, 0, 0);
    assert_eq!(outputs(&mut sender), [stopped(0)], "generation 1 may be in flight");
    sender.message(at(4), stop(5)).unwrap();
    taken(&mut sender, 4, 1, 0);
    assert_eq!(outputs(&mut sender), [cancel_posts(1), stopped(5)]);
    let late = sender.message(at(5), Message::Grant(grant(5, &[rect(0..16, 0..4)])));
    assert!(matches!(late, Err(InputError::Generation { .. })), "a stopped grant is dead");
}

#[test]
fn after_a_lost_post_or_a_cut_nothing_goes_under_the_old_grant() {
    let mut sender = posting();
    sender.posted(at(1), generation(0), 0, PostOutcome::Lost).unwrap();
    assert_eq!(outputs(&mut sender), [cancel_posts(0)]);
    sender.peer_down(at(1)).unwrap();
    sender.posted(at(1), generation(0), 1, PostOutcome::Lost).unwrap();
    sender.computed(at(2), rect(48..64, 0..4)).unwrap();
    assert_eq!(outputs(&mut sender), []);
    sender.peer_up(at(3), 2).unwrap();
    let old = sender.message(at(3), Message::Grant(grant(0, &[rect(0..64, 0..4)])));
    assert!(matches!(old, Err(InputError::Generation { .. })), "{old:?}");
    let rest = grant(1, &[rect(48..64, 0..4)]);
    sender.message(at(3), Message::Grant(rest.clone())).unwrap();
    assert_eq!(outputs(&mut sender), [SenderOutput::Adopt(rest), post(1, 0, rect(48..64, 0..4))]);
}

#[test]
fn a_newer_grant_replaces_the_one_in_use() {
    let mut sender = posting();
    let newer = grant(1, &[rect(32..48, 0..4)]);
    sender.message(at(1), Message::Grant(newer.clone())).unwrap();
    assert_eq!(outputs(&mut sender), [cancel_posts(0), SenderOutput::Adopt(newer)], "two posts are in flight");
    sender.posted(at(1), generation(0), 0, PostOutcome::Lost).unwrap();
    assert_eq!(outputs(&mut sender), [post(1, 0, rect(32..48, 0..4))], "an old post's loss is not the new grant's");
}

#[test]
fn a_post_lies_inside_one_rectangle_of_the_grant() {
    let mut sender = new(Order::DecodeFirst);
    sender.computed(at(0), rect(0..16, 0..4)).unwrap();
    sender.message(at(0), Message::Grant(grant(0, &[rect(0..32, 0..2), rect(8..16, 2..4)]))).unwrap();
    let posts = outputs(&mut sender).split_off(1);
    assert_eq!(posts, [post(0, 0, rect(0..16, 0..2)), post(0, 1, rect(8..16, 2..4))]);
    let mut sender = new(Order::DecodeFirst);
    sender.computed(at(0), rect(0..16, 0..4)).unwrap();
    sender.message(at(0), Message::Grant(grant(0, &[rect(0..16, 2..4), rect(0..16, 0..2)]))).unwrap();
    let posts = outputs(&mut sender).split_off(1);
    assert_eq!(
        posts,
        [post(0, 0, rect(0..16, 0..2)), post(0, 1, rect(0..16, 2..4))],
        "though they make up one rectangle"
    );
}

#[test]
fn a_grant_beyond_the_lease_is_refused_with_both_ranges() {
    let mut sender = new(Order::DecodeFirst);
    sender.message(at(0), Message::Grant(grant(0, &[rect(0..16, 0..4), rect(60..65, 0..1)]))).unwrap();
    let outputs = outputs(&mut sender);
    let [SenderOutput::Send(Message::Abort(Abort { why: Verdict::Failed(failure), .. })), SenderOutput::ReleaseLease] =
        &outputs[..]
    else {
        panic!("{outputs:?}")
    };
    assert_eq!(failure.reason, Reason::Range);
    let text = failure.text.as_str();
    assert!(text.contains("60..65") && text.contains("0..64"), "{text}");
}

#[test]
fn a_dead_peer_frees_the_lease_within_its_time() {
    let mut sender = posting();
    sender.posted(at(1), generation(0), 0, PostOutcome::Lost).unwrap();
    sender.posted(at(1), generation(0), 1, PostOutcome::Lost).unwrap();
    sender.peer_down(at(1)).unwrap();
    assert_eq!(sender.poll_timeout(), Some((at(1 + ABSENT), "peer absent")));
    sender.timeout(at(1 + ABSENT));
    let last = outputs(&mut sender);
    assert!(last.contains(&SenderOutput::ReleaseLease));
    assert_eq!(reason(&finished(&last)), Reason::NoWord);

    let mut restarted = posting();
    restarted.peer_restarted(at(2)).unwrap();
    restarted.posted(at(2), generation(0), 0, PostOutcome::Lost).unwrap();
    restarted.posted(at(2), generation(0), 1, PostOutcome::Lost).unwrap();
    assert_eq!(reason(&finished(&outputs(&mut restarted))), Reason::NoWord);
}

#[test]
fn an_abort_is_repeated_in_the_next_session() {
    let mut sender = new(Order::DecodeFirst);
    sender.peer_down(at(0)).unwrap();
    sender.cancel(at(1)).unwrap();
    assert_eq!(outputs(&mut sender), [SenderOutput::ReleaseLease], "there is no session");
    sender.peer_up(at(2), 2).unwrap();
    assert_eq!(outputs(&mut sender), [abort(Verdict::Cancelled)]);
}

#[test]
fn what_does_not_fit_is_a_typed_error_counted_and_changes_nothing() {
    let mut sender = posting();
    let foreign = Message::Renew(Renew { transfer: TransferId::new(2), ttl_ms: 1 });
    for (name, error) in [
        ("a post that never was", sender.posted(at(1), generation(0), 7, PostOutcome::Taken)),
        ("a foreign message", sender.message(at(1), foreign)),
        (
            "a receiver's input",
            sender.message(at(1), Message::Stopped(Stopped { transfer: id(), generation: generation(0) })),
        ),
        ("cells that are not held", sender.computed(at(1), rect(60..65, 0..4))),
        ("an old session", sender.peer_up(at(1), 1)),
        ("a second session", sender.peer_up(at(1), 2)),
    ] {
        assert!(error.is_err(), "{name}");
    }
    assert_eq!((outputs(&mut sender), sender.state()), (vec![], "Granted"));
    let ignored = sender.stats().ignored;
    assert_eq!((ignored.state, ignored.sequence, ignored.transfer, ignored.session, ignored.computed), (2, 1, 1, 1, 1));
}

#[test]
fn a_sender_that_waits_for_its_engine_says_so_when_it_is_asked() {
    let renew = || Message::Renew(Renew { transfer: id(), ttl_ms: 30_000 });
    let working = SenderOutput::Send(Message::Working(Working { transfer: id() }));
    let mut sender = new(Order::DecodeFirst);
    sender.message(at(1), Message::Grant(grant(0, &[rect(0..32, 0..4)]))).unwrap();
    outputs(&mut sender);
    sender.message(at(2), renew()).unwrap();
    assert_eq!(outputs(&mut sender), [working], "nothing is computed yet");
    sender.computed(at(3), rect(0..16, 0..4)).unwrap();
    assert_eq!(outputs(&mut sender), [post(0, 0, rect(0..16, 0..4))]);
    sender.message(at(4), renew()).unwrap();
    assert_eq!(outputs(&mut sender), [], "bytes that travel speak for themselves");
    taken(&mut sender, 5, 0, 0);
    sender.computed(at(6), rect(16..32, 0..4)).unwrap();
    outputs(&mut sender);
    taken(&mut sender, 7, 0, 1);
    sender.message(at(8), renew()).unwrap();
    assert_eq!(outputs(&mut sender), [], "all is sent: it is for the receiver to speak");
}
