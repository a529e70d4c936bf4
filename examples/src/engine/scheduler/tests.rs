use std::num::NonZeroU32;

use kvferry::ConnectorError;
use kvferry::config::LoadFailurePolicy;
use kvferry::contract::{LoadFailure, Match, StepMeta, StepResults, TransferParams};
use kvferry::pool::PrefixKind;
use kvferry_protocol::{BlockId, TransferId};

use super::*;
use crate::engine::Sampling;

/// Request, first position, tokens, whether it samples.
type Shape = (String, u32, usize, bool);

/// A connector whose answers the test sets.
struct Scripted {
    matched: Match,
    holds: bool,
    refuses: bool,
    allocated: Vec<(String, usize, u32)>,
    finished: Vec<EngineFinish>,
    preempted: Vec<String>,
    next: Applied,
}

impl contract::Scheduler for Scripted {
    fn matched_tokens(&self, _: &contract::Request, _: u32) -> Match {
        self.matched
    }

    fn allocated(
        &mut self,
        request: &contract::Request,
        blocks: &[BlockId],
        _: u32,
        external: u32,
    ) -> Result<(), ConnectorError> {
        self.allocated.push((request.id.to_string(), blocks.len(), external));
        match self.refuses {
            true => Err(ConnectorError::Request { request: request.id.clone(), problem: "does not fit".into() }),
            false => Ok(()),
        }
    }

    fn preempted(&mut self, requests: &[RequestId]) {
        self.preempted.extend(requests.iter().map(ToString::to_string));
    }

    fn build_step(&mut self, _: &ScheduledStep) -> StepMeta {
        StepMeta::default()
    }

    fn finished(&mut self, _: &RequestId, blocks: &[BlockId], how: EngineFinish) -> Hold {
        self.finished.push(how);
        match self.holds {
            true => Hold::Until { transfer: Some(TransferId::new(1)), blocks: blocks.to_vec() },
            false => Hold::Free,
        }
    }

    fn apply(&mut self, _: Vec<StepResults>) -> Applied {
        std::mem::take(&mut self.next)
    }

    fn has_pending(&self) -> bool {
        false
    }
}

fn scheduler(matched: Match) -> Scheduler<Scripted> {
    scheduler_of(PrefixKind::Hash, 0, matched)
}

fn scheduler_of(prefix: PrefixKind, watermark_blocks: usize, matched: Match) -> Scheduler<Scripted> {
    let config = SchedulerConfig {
        chunk_tokens: 8,
        max_running: 3,
        max_waiting: 4,
        blocks: 10,
        tokens_per_block: 4,
        context: 64,
        vocab: 100,
        on_load_failure: LoadFailurePolicy::Recompute,
        prefix,
        in_place: false,
        watermark_blocks,
    };
    let (holds, refuses, allocated, finished, preempted, next) = Default::default();
    Scheduler::new(config, Scripted { matched, holds, refuses, allocated, finished, preempted, next }).unwrap()
}

fn tokens(count: u32) -> NonZeroU32 {
    NonZeroU32::new(count).unwrap()
}

fn work(prompt: usize, max_tokens: usize) -> Submission {
    Submission {
        prompt: (0..prompt as u32).collect(),
        max_tokens,
        sampling: Sampling::Greedy,
        ends: vec![99],
        keep_first_logits: false,
        transfer: None,
    }
}

/// Runs a step as a runner would: every sampling sequence gets `token`. Returns the step's shape and the events.
fn step(scheduler: &mut Scheduler<Scripted>, token: u32, applied: Applied) -> (Vec<Shape>, Vec<Event>) {
    let (plan, mut events) = scheduler.plan();
    scheduler.connector().next = applied;
    let output = output(&plan, token);
    events.extend(scheduler.apply(&plan, output));
    (shape(&plan), events)
}

fn output(plan: &StepPlan, token: u32) -> StepOutput {
    let sampled = plan.sequences.iter().filter(|sequence| sequence.sample.is_some());
    let sampled = sampled.map(|sequence| Sampled { request: sequence.request.clone(), token, logits: None }).collect();
    StepOutput { sampled, ..StepOutput::empty(plan.number) }
}

fn shape(plan: &StepPlan) -> Vec<Shape> {
    let of = |s: &SequenceStep| (s.request.to_string(), s.start, s.tokens.len(), s.sample.is_some());
    plan.sequences.iter().map(of).collect()
}

fn sequence(request: &str, start: u32, count: usize, samples: bool) -> Shape {
    (request.into(), start, count, samples)
}

fn failure(request: &RequestId, good_tokens: u32) -> Applied {
    let reason = "prefill is gone".to_owned();
    let failure = LoadFailure { request: request.clone(), good_tokens, good_blocks: vec![], reason };
    Applied { failed: vec![failure], ..Applied::default() }
}

#[test]
fn a_load_that_failed_with_all_its_tokens_good_still_gets_its_answer() {
    let mut scheduler = scheduler(Match::Async(tokens(6)));
    let id = scheduler.submit(work(6, 1)).unwrap();
    // Layerwise: it runs while its last layers land, and the verdict voids that step.
    step(&mut scheduler, 1, Applied { loaded: vec![id.clone()], ..Applied::default() });
    let (run, events) = step(&mut scheduler, 1, failure(&id, 6));
    assert_eq!((run, events), (vec![sequence("0", 5, 1, true)], vec![]));
    let (again, events) = step(&mut scheduler, 2, Applied::default());
    assert_eq!(again, [sequence("0", 5, 1, true)]);
    assert_eq!(events[0], Event::Token { request: id.clone(), token: 2, logits: None });
    assert_eq!(events[1], Event::Finished { request: id, reason: FinishReason::Length });
    assert_eq!((scheduler.snapshot().pool.free, scheduler.is_idle()), (10, true));
}

#[test]
fn prompts_are_chunked_and_decode_steps_join_them() {
    let mut scheduler = scheduler(Match::None);
    scheduler.submit(work(5, 3)).unwrap();
    scheduler.submit(work(10, 1)).unwrap();
    let (first, _) = step(&mut scheduler, 1, Applied::default());
    assert_eq!(first, [sequence("0", 0, 5, true), sequence("1", 0, 3, false)]);
    let (second, _) = step(&mut scheduler, 1, Applied::default());
    assert_eq!(second, [sequence("0", 5, 1, true), sequence("1", 3, 7, true)]);
    let (third, events) = step(&mut scheduler, 1, Applied::default());
    assert_eq!(third, [sequence("0", 6, 1, true)]);
    assert_eq!(events.last(), Some(&Event::Finished { request: RequestId::new("0"), reason: FinishReason::Length }));
    assert_eq!((scheduler.snapshot().pool.free, scheduler.is_idle()), (10, true));
}

#[test]
fn a_submission_that_can_never_run_is_refused_with_the_limit() {
    let mut scheduler = scheduler(Match::None);
    for (name, submission, want) in [
        ("empty", work(0, 1), "empty"),
        (
            "vocabulary",
            Submission { prompt: vec![100], ..work(1, 1) },
            "token 100 is not in the model's vocabulary of 100",
        ),
        ("context", work(60, 5), "context of 64"),
        ("overflow", work(60, usize::MAX), "context of 64"),
        ("cache", work(40, 1), "needs 11 KV blocks, but the cache has 10"),
    ] {
        let error = scheduler.submit(submission).unwrap_err().to_string();
        assert!(error.contains(want), "{name}: {error}");
    }
    for _ in 0..4 {
        scheduler.submit(work(1, 1)).unwrap();
    }
    assert_eq!(scheduler.submit(work(1, 1)), Err(SubmitError::Busy { waiting: 4 }));
}

#[test]
fn a_request_waits_for_blocks_and_gets_them_in_its_turn() {
    let mut scheduler = scheduler(Match::None);
    let first = scheduler.submit(work(24, 4)).unwrap(); // 6 blocks
    scheduler.submit(work(24, 4)).unwrap(); // 6 more: 10 are not enough
    scheduler.submit(work(2, 1)).unwrap(); // would fit, but does not jump the queue
    assert_eq!(step(&mut scheduler, 1, Applied::default()).0, [sequence("0", 0, 8, false)]);
    assert_eq!(scheduler.snapshot().waiting, 2);
    scheduler.cancel(&first).unwrap();
    assert_eq!(scheduler.connector().finished, [EngineFinish::Aborted]);
    assert_eq!(step(&mut scheduler, 1, Applied::default()).0, [sequence("1", 0, 8, false)]);
    assert_eq!(scheduler.snapshot().running, 2);
}

#[test]
fn the_end_token_ends_the_text_and_zero_tokens_only_fill_the_cache() {
    let mut scheduler = scheduler(Match::None);
    let ended = scheduler.submit(work(2, 5)).unwrap();
    let filled = scheduler.submit(work(3, 0)).unwrap();
    let (shape, events) = step(&mut scheduler, 99, Applied::default());
    assert_eq!(shape, [sequence("0", 0, 2, true), sequence("1", 0, 3, false)]);
    assert_eq!(
        events,
        [
            Event::Token { request: ended.clone(), token: 99, logits: None },
            Event::Finished { request: ended, reason: FinishReason::End },
            Event::Finished { request: filled, reason: FinishReason::Length },
        ]
    );
    assert_eq!(scheduler.connector().finished, [EngineFinish::Complete; 2]);
}

#[test]
fn a_background_load_runs_when_it_is_there_and_computes_the_last_token_itself() {
    let mut scheduler = scheduler(Match::Async(tokens(9)));
    let request = scheduler.submit(work(9, 2)).unwrap();
    assert_eq!(step(&mut scheduler, 1, Applied::default()).0, []);
    assert!(!scheduler.is_idle());
    let loaded = Applied { loaded: vec![request], ..Applied::default() };
    assert_eq!(step(&mut scheduler, 1, loaded).0, []);
    assert_eq!(scheduler.connector().allocated, [("0".into(), 3, 9), ("0".into(), 3, 0)]);
    assert_eq!(step(&mut scheduler, 1, Applied::default()).0, [sequence("0", 8, 1, true)]);
}

#[test]
fn what_was_lost_is_computed_here_and_the_steps_token_is_void() {
    let mut scheduler = scheduler(Match::Sync(tokens(9)));
    let request = scheduler.submit(work(9, 2)).unwrap();
    let (shape, events) = step(&mut scheduler, 1, failure(&request, 4));
    assert_eq!((shape, events), (vec![sequence("0", 8, 1, true)], vec![]));
    assert_eq!(scheduler.snapshot().recomputed_tokens, 5);
    assert_eq!(step(&mut scheduler, 1, Applied::default()).0, [sequence("0", 4, 5, true)]);
}

#[test]
fn a_void_request_waits_for_its_verdict() {
    let mut scheduler = scheduler(Match::Sync(tokens(9)));
    let request = scheduler.submit(work(9, 2)).unwrap();
    let (plan, _) = scheduler.plan();
    let void = StepOutput { void: vec![request.clone()], ..output(&plan, 1) };
    assert_eq!(scheduler.apply(&plan, void), []);
    assert_eq!(scheduler.snapshot().loading, 1);
    assert_eq!(step(&mut scheduler, 1, failure(&request, 0)).0, []);
    assert_eq!(step(&mut scheduler, 1, Applied::default()).0, [sequence("0", 0, 8, false)]);
}

#[test]
fn a_failed_load_fails_the_request_where_the_policy_says_so() {
    let mut scheduler = scheduler(Match::Async(tokens(8)));
    scheduler.config.on_load_failure = LoadFailurePolicy::Fail;
    let request = scheduler.submit(work(9, 2)).unwrap();
    let (_, events) = step(&mut scheduler, 1, failure(&request, 4));
    assert_eq!(events, [Event::Finished { request, reason: FinishReason::Failed("prefill is gone".into()) }]);
    assert_eq!((scheduler.snapshot().pool.free, scheduler.is_idle()), (10, true));
}

#[test]
fn a_request_that_the_connector_refuses_fails_and_returns_its_blocks() {
    let mut scheduler = scheduler(Match::Async(tokens(8)));
    scheduler.connector().refuses = true;
    scheduler.submit(work(9, 2)).unwrap();
    let (_, events) = step(&mut scheduler, 1, Applied::default());
    let [Event::Finished { reason: FinishReason::Failed(why), .. }] = &events[..] else { panic!("{events:?}") };
    assert!(why.contains("does not fit"), "{why}");
    assert_eq!(scheduler.snapshot().pool.free, 10);
}

#[test]
fn held_blocks_come_back_on_release_only() {
    let mut scheduler = scheduler(Match::None);
    scheduler.connector().holds = true;
    let request = scheduler.submit(work(4, 0)).unwrap();
    step(&mut scheduler, 0, Applied::default());
    assert_eq!((scheduler.snapshot().held, scheduler.snapshot().pool.free), (1, 9));
    for _ in 0..2 {
        step(&mut scheduler, 0, Applied { released: vec![request.clone()], ..Applied::default() });
        assert_eq!((scheduler.snapshot().held, scheduler.snapshot().pool.free), (0, 10));
    }
}

#[test]
fn what_nobody_wants_is_given_up() {
    let mut scheduler = scheduler(Match::None);
    let request = scheduler.submit(work(20, 0)).unwrap();
    let (_, events) = step(&mut scheduler, 0, Applied { unwanted: vec![request.clone()], ..Applied::default() });
    assert!(matches!(&events[..], [Event::Finished { request: r, reason: FinishReason::Failed(_) }] if *r == request));
    assert_eq!(scheduler.connector().finished, [EngineFinish::Aborted]);
}

#[test]
fn what_was_handed_over_before_its_last_step_was_heard_of_is_complete_and_shared() {
    for kind in KINDS {
        let mut scheduler = sharing(kind, Match::None);
        let request = scheduler.submit(work(8, 0)).unwrap();
        let (_, events) = step(&mut scheduler, 0, Applied { unwanted: vec![request.clone()], ..Applied::default() });
        assert_eq!(events, [Event::Finished { request, reason: FinishReason::Length }], "{kind}");
        assert_eq!(scheduler.connector().finished, [EngineFinish::Complete], "{kind}");
        scheduler.submit(work(9, 0)).unwrap();
        assert_eq!(step(&mut scheduler, 0, Applied::default()).0, [sequence("1", 8, 1, false)], "{kind}");
    }
}

#[test]
fn a_match_that_is_not_known_yet_is_asked_again_and_blocks_nobody() {
    let mut scheduler = scheduler(Match::Later);
    scheduler.submit(work(3, 1)).unwrap();
    assert_eq!(step(&mut scheduler, 1, Applied::default()).0, []);
    scheduler.connector().matched = Match::None;
    assert_eq!(step(&mut scheduler, 1, Applied::default()).0, [sequence("0", 0, 3, true)]);
}

/// The kinds of cache that share.
const KINDS: [PrefixKind; 2] = [PrefixKind::Hash, PrefixKind::Radix];

fn sharing(kind: PrefixKind, matched: Match) -> Scheduler<Scripted> {
    let scope = kvferry::pool::HashScope { model: "m", tokens_per_block: 4, adapter: None, salt: b"" };
    scheduler_of(kind, 0, matched).with_names(BlockHasher::new(&scope).unwrap())
}

#[test]
fn a_prompt_that_begins_like_an_earlier_one_computes_only_the_rest() {
    for kind in KINDS {
        let mut scheduler = sharing(kind, Match::None);
        scheduler.submit(work(8, 2)).unwrap();
        assert_eq!(step(&mut scheduler, 8, Applied::default()).0, [sequence("0", 0, 8, true)]);
        // While the first still runs: its blocks are shared, but the last token is computed.
        scheduler.submit(work(8, 0)).unwrap();
        let (both, _) = step(&mut scheduler, 9, Applied::default());
        assert_eq!(both, [sequence("0", 8, 1, true), sequence("1", 4, 4, false)]);
        // The answer's own block: tokens 8 and 9 were generated, 10 and 11 are new.
        let next = Submission { prompt: (0..14).collect(), ..work(0, 1) };
        scheduler.submit(next).unwrap();
        assert_eq!(step(&mut scheduler, 1, Applied::default()).0, [sequence("2", 8, 6, true)]);
        let snapshot = scheduler.snapshot();
        assert_eq!((snapshot.pool.free, snapshot.pool.hit_total, snapshot.computed_prompt_tokens), (10, 3, 8 + 4 + 6));
    }
}

#[test]
fn nothing_that_was_lost_or_not_computed_is_shared() {
    for kind in KINDS {
        let mut scheduler = sharing(kind, Match::Async(tokens(8)));
        let first = scheduler.submit(work(8, 1)).unwrap();
        step(&mut scheduler, 1, Applied::default());
        scheduler.submit(work(8, 1)).unwrap();
        scheduler.plan();
        assert_eq!(scheduler.snapshot().pool.hit_total, 0, "what is still brought is nobody's");
        let (lost, _) = step(&mut scheduler, 1, failure(&first, 4));
        assert!(lost.is_empty());
        assert_eq!(step(&mut scheduler, 1, Applied::default()).0, [sequence("0", 4, 4, true)]);
        scheduler.connector().matched = Match::None;
        scheduler.submit(Submission { prompt: (0..9).collect(), ..work(0, 1) }).unwrap();
        assert_eq!(step(&mut scheduler, 1, Applied::default()).0, [sequence("2", 8, 1, true)]);
    }
}

#[test]
fn what_a_tier_lacks_is_computed_whatever_the_policy() {
    for kind in KINDS {
        let mut scheduler = sharing(kind, Match::Async(tokens(8)));
        scheduler.config.on_load_failure = LoadFailurePolicy::Fail;
        let first = scheduler.submit(work(10, 1)).unwrap();
        step(&mut scheduler, 1, Applied::default());
        let missed = failure(&first, 4).failed;
        step(&mut scheduler, 1, Applied { missed, ..Applied::default() });
        assert_eq!(step(&mut scheduler, 1, Applied::default()).0, [sequence("0", 4, 6, true)]);
        let snapshot = scheduler.snapshot();
        assert_eq!((snapshot.recomputed_tokens, snapshot.failed_requests), (0, 0));
    }
}

#[test]
fn a_running_request_takes_a_block_when_a_token_needs_it() {
    let mut scheduler = scheduler(Match::None);
    scheduler.submit(work(7, 4)).unwrap();
    // The token that was sampled last has no KV yet: 7 and 8 tokens are 2 blocks, 9 and 10 are 3.
    for free in [8, 8, 7, 7] {
        let (plan, _) = scheduler.plan();
        assert_eq!(scheduler.snapshot().pool.free, free);
        let output = output(&plan, 1);
        scheduler.apply(&plan, output);
    }
    assert_eq!((scheduler.snapshot().pool.free, scheduler.is_idle()), (10, true));
}

/// Three requests of 12 tokens and 3 blocks each: the tenth block is the first one's, for its thirteenth token.
fn crowded(kind: PrefixKind) -> Scheduler<Scripted> {
    let mut scheduler = sharing(kind, Match::None).with_kv_events();
    scheduler.config.chunk_tokens = 64;
    for first in [10, 20, 30] {
        scheduler.submit(Submission { prompt: (first..first + 12).collect(), ..work(0, 3) }).unwrap();
    }
    let all: Vec<_> = ["0", "1", "2"].map(|id| sequence(id, 0, 12, true)).into();
    assert_eq!(step(&mut scheduler, 1, Applied::default()).0, all);
    scheduler
}

#[test]
fn the_youngest_is_put_back_when_blocks_are_short_and_goes_on_from_what_is_cached() {
    for kind in KINDS {
        let mut scheduler = crowded(kind);
        let (shape, events) = step(&mut scheduler, 2, Applied::default());
        assert_eq!(shape, [sequence("0", 12, 1, true), sequence("1", 12, 1, true)], "{kind}");
        assert_eq!((events.len(), &scheduler.connector().preempted[..]), (2, &["2".to_owned()][..]), "{kind}");
        let state = scheduler.snapshot();
        assert_eq!((state.preempted_requests, state.waiting, state.pool.free), (1, 1, 2), "{kind}");
        // It asks for four blocks, of which the last one was reused: two or, where runs go together, none are there.
        let mut again = None;
        let mut said = vec![];
        while !scheduler.is_idle() {
            let (shape, events) = step(&mut scheduler, 2, Applied::default());
            again = again.or_else(|| shape.into_iter().find(|(request, ..)| request == "2"));
            said.extend(events);
        }
        let again = again.expect("it comes back");
        match kind {
            PrefixKind::Hash => assert_eq!(again, sequence("2", 8, 5, true)),
            _ => assert_eq!(again, sequence("2", 0, 13, true)),
        }
        let of_last = said.iter().filter(|e| matches!(e, Event::Token { request, .. } if request.as_str() == "2"));
        assert_eq!(of_last.count(), 2, "{kind}: the first token was told before, and is not told again");
        let state = scheduler.snapshot();
        assert_eq!((state.pool.free, state.preempted_requests), (10, 1), "{kind}");
        assert_eq!(scheduler.connector().finished, [EngineFinish::Complete; 3], "{kind}");
    }
}

#[test]
fn what_was_put_back_and_is_cancelled_is_told_to_the_connector_once() {
    let mut scheduler = crowded(PrefixKind::Hash);
    step(&mut scheduler, 2, Applied::default());
    let cancelled = scheduler.cancel(&RequestId::new("2")).unwrap();
    assert_eq!(cancelled, Event::Finished { request: RequestId::new("2"), reason: FinishReason::Cancelled });
    assert_eq!(scheduler.connector().finished, [EngineFinish::Aborted]);
    assert_eq!((scheduler.cancel(&RequestId::new("2")), scheduler.snapshot().waiting), (None, 0));
    let never = scheduler.submit(work(40, 0)).unwrap();
    scheduler.plan();
    scheduler.cancel(&never).unwrap();
    assert_eq!(scheduler.connector().finished.len(), 1, "the connector never heard of it");
}

#[test]
fn what_a_peer_waits_for_or_a_load_still_fills_is_not_put_back() {
    let keep = TransferParams::Keep { transfer: TransferId::new(1), to: None, readers: 1 };
    let mut scheduler = scheduler(Match::None);
    scheduler.config.chunk_tokens = 12;
    let grows = scheduler.submit(work(12, 6)).unwrap();
    scheduler.submit(Submission { transfer: Some(keep), ..work(15, 0) }).unwrap();
    assert_eq!(step(&mut scheduler, 1, Applied::default()).0, [sequence("0", 0, 12, true)]);
    scheduler.connector().matched = Match::Async(tokens(8));
    let loads = scheduler.submit(work(8, 1)).unwrap();
    scheduler.config.chunk_tokens = 2;
    for position in 12..16 {
        let (shape, _) = step(&mut scheduler, 1, Applied::default());
        assert_eq!(shape, [sequence("0", position, 1, true), sequence("1", 2 * (position - 12), 2, false)]);
    }
    // All ten blocks are taken, and the first request's seventeenth token needs one: no other may go.
    assert_eq!((scheduler.snapshot().loading, scheduler.snapshot().pool.free), (1, 0));
    let loaded = Applied { loaded: vec![loads], ..Applied::default() };
    assert_eq!(step(&mut scheduler, 1, loaded).0, [sequence("1", 8, 2, false)]);
    assert_eq!(scheduler.connector().preempted, ["0"]);
    scheduler.config.chunk_tokens = 64;
    scheduler.connector().matched = Match::None;
    let (shape, _) = step(&mut scheduler, 1, Applied::default());
    assert_eq!(shape, [sequence("1", 10, 5, false), sequence("2", 7, 1, true)], "five blocks are not free yet");
    let (shape, events) = step(&mut scheduler, 1, Applied::default());
    assert_eq!(shape, [sequence("0", 0, 17, true)]);
    assert_eq!(events.last(), Some(&Event::Finished { request: grows, reason: FinishReason::Length }));
    assert_eq!((scheduler.snapshot().pool.free, scheduler.is_idle()), (10, true));
}

#[test]
fn an_admission_leaves_the_watermark_free_for_those_that_run() {
    let mut scheduler = scheduler_of(PrefixKind::Hash, 2, Match::None);
    scheduler.submit(work(36, 1)).unwrap();
    step(&mut scheduler, 1, Applied::default());
    assert_eq!(scheduler.snapshot().running, 1, "nobody else runs: 9 of 10 blocks are its own");
    scheduler.cancel(&RequestId::new("0")).unwrap();
    scheduler.submit(work(24, 1)).unwrap();
    scheduler.submit(work(9, 1)).unwrap();
    step(&mut scheduler, 1, Applied::default());
    assert_eq!((scheduler.snapshot().running, scheduler.snapshot().waiting), (1, 1), "6 and 3 leave 1");
}

#[test]
fn a_router_that_hears_the_events_knows_what_the_cache_has() {
    for kind in KINDS {
        let mut scheduler = crowded(kind);
        let mut known = std::collections::BTreeSet::new();
        let mut removed = 0;
        while !scheduler.is_idle() {
            step(&mut scheduler, 2, Applied::default());
            for event in scheduler.take_kv_events() {
                match event {
                    KvEvent::Stored(stored) => {
                        assert_eq!(stored.tokens.len(), 4 * stored.blocks.len());
                        stored.blocks.into_iter().for_each(|name| assert!(known.insert(name), "{kind}"));
                    }
                    KvEvent::Removed(gone) => {
                        removed += gone.blocks.len();
                        gone.blocks.iter().for_each(|name| assert!(known.remove(name), "{kind}"));
                    }
                    other => panic!("{kind}: {other:?}"),
                }
            }
        }
        assert!(removed > 0, "{kind}");
        assert_eq!(scheduler.snapshot().pool.registered, known.len(), "{kind}");
    }
}
