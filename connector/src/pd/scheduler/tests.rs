use kvferry_protocol::{BlockId, PeerId, TpRank, TransferId};
use kvferry_transport::PeerAddress;

use super::*;
use crate::contract::ScheduledRequest;

fn scheduler(reporters: u16) -> PdScheduler {
    PdScheduler::new(SchedulerOptions { tokens_per_block: NonZeroU32::new(16).unwrap(), reporters, layerwise: false })
}

fn fetch(id: &str, prompt_tokens: u32) -> Request {
    let params = TransferParams::Fetch {
        transfer: TransferId::new(7),
        from: vec![PeerAddress::Loopback(1)],
        engine: None,
        ask: vec![],
    };
    Request { id: RequestId::new(id), prompt_tokens, params: Some(params), hashes: Arc::default() }
}

fn keep(id: &str, prompt_tokens: u32) -> Request {
    let params = TransferParams::Keep { transfer: TransferId::new(9), to: None::<PeerId>, readers: 1 };
    Request { id: RequestId::new(id), prompt_tokens, params: Some(params), hashes: Arc::default() }
}

fn blocks(n: u32) -> Vec<BlockId> {
    (0..n).map(BlockId::new).collect()
}

fn step(id: &str, tokens: std::ops::Range<u32>, n: u32) -> ScheduledStep {
    ScheduledStep { requests: vec![ScheduledRequest { id: RequestId::new(id), tokens, blocks: blocks(n) }] }
}

fn results(rank: u16) -> StepResults {
    StepResults::empty(TpRank::new(rank))
}

fn failure(id: &str, good_tokens: u32) -> LoadFailure {
    LoadFailure { request: RequestId::new(id), good_tokens, good_blocks: vec![], reason: "cut".into() }
}

#[test]
fn a_prompt_is_matched_beyond_its_local_prefix_and_only_until_its_load() {
    let mut s = scheduler(1);
    let request = fetch("a", 40);
    let n = |n| Match::Async(NonZeroU32::new(n).unwrap());
    assert_eq!(s.matched_tokens(&request, 0), n(40));
    assert_eq!(s.matched_tokens(&request, 16), n(24));
    assert_eq!(s.matched_tokens(&request, 48), Match::None);
    s.allocated(&request, &blocks(3), 16, 24).unwrap();
    assert_eq!(s.matched_tokens(&request, 16), Match::None);

    let meta = s.build_step(&ScheduledStep::default());
    let [load] = meta.loads.as_slice() else { panic!("{meta:?}") };
    assert_eq!((load.tokens.clone(), load.blocks.as_slice()), (16..40, &blocks(3)[1..]));
    assert!(s.build_step(&ScheduledStep::default()).is_empty(), "a load is handed down once");

    s.allocated(&request, &blocks(3), 16, 0).unwrap();
    assert!(s.build_step(&ScheduledStep::default()).is_empty(), "the second call admits, it does not load");
}

#[test]
fn a_full_local_hit_still_tells_the_prefill_side() {
    let mut s = scheduler(1);
    s.allocated(&fetch("a", 32), &blocks(2), 32, 0).unwrap();
    let meta = s.build_step(&ScheduledStep::default());
    assert_eq!(meta.loads[0].tokens, 32..32);
    let applied = s.apply(vec![StepResults { loaded: vec![RequestId::new("a")], ..results(0) }]);
    assert_eq!(applied, Applied::default(), "nothing waited for it");
    assert!(!s.has_pending());
}

#[test]
fn blocks_that_cannot_hold_the_tokens_are_refused() {
    let mut s = scheduler(1);
    for (n, local, external) in [(2, 0, 40), (3, 8, 24)] {
        let error = s.allocated(&fetch("a", 40), &blocks(n), local, external).unwrap_err().to_string();
        assert!(error.contains("request a"), "{error}");
    }
}

#[test]
fn a_load_surfaces_once_when_every_rank_has_spoken() {
    let mut s = scheduler(2);
    s.allocated(&fetch("a", 40), &blocks(3), 0, 40).unwrap();
    let loaded = |rank| StepResults { loaded: vec![RequestId::new("a")], ..results(rank) };
    assert_eq!(s.apply(vec![loaded(1)]), Applied::default());
    assert_eq!(s.apply(vec![loaded(1)]), Applied::default(), "a rank that speaks twice counts once");
    assert_eq!(s.apply(vec![loaded(0)]).loaded, [RequestId::new("a")]);
    assert_eq!(s.build_step(&ScheduledStep::default()).settled, [RequestId::new("a")]);
    assert_eq!(s.apply(vec![loaded(0)]), Applied::default());
    assert_eq!(s.unknown_results(), 2);
}

#[test]
fn the_shortest_good_prefix_over_the_ranks_counts() {
    let mut s = scheduler(3);
    s.allocated(&fetch("a", 40), &blocks(3), 0, 40).unwrap();
    let applied = s.apply(vec![
        StepResults { failed: vec![failure("a", 32)], ..results(0) },
        StepResults { loaded: vec![RequestId::new("a")], ..results(1) },
        StepResults { failed: vec![failure("a", 16)], ..results(2) },
    ]);
    assert_eq!(applied.failed.iter().map(|f| f.good_tokens).collect::<Vec<_>>(), [16]);
    assert!(applied.loaded.is_empty());
}

/// Whatever the order in which ranks speak, and however often, a request surfaces once, when all have.
#[test]
fn results_of_ranks_may_come_late_twice_and_in_any_order() {
    for (ranks, order) in
        [(2, vec![0, 1]), (2, vec![1, 1, 0]), (3, vec![2, 0, 1]), (3, vec![1, 2, 1, 2, 0]), (3, vec![0, 0, 2, 2, 1, 1])]
    {
        let last = (0..ranks).map(|rank| order.iter().position(|&of| of == rank).unwrap()).max().unwrap();
        let repeats = order.len() - usize::from(ranks);
        let mut load = scheduler(ranks);
        load.allocated(&fetch("a", 40), &blocks(3), 0, 40).unwrap();
        let mut keeping = scheduler(ranks);
        keeping.allocated(&keep("a", 40), &blocks(3), 0, 0).unwrap();
        keeping.build_step(&step("a", 0..40, 3));
        keeping.finished(&RequestId::new("a"), &blocks(3), EngineFinish::Complete);
        for (at, &rank) in order.iter().enumerate() {
            let ids = vec![RequestId::new("a")];
            let applied = load.apply(vec![StepResults { loaded: ids.clone(), ..results(rank) }]);
            assert_eq!(applied.loaded.len(), usize::from(at == last), "{order:?} at {at}");
            let applied = keeping.apply(vec![StepResults { sent: ids, ..results(rank) }]);
            assert_eq!(applied.released.len(), usize::from(at == last), "{order:?} at {at}");
        }
        for s in [&load, &keeping] {
            assert_eq!((s.has_pending(), s.unknown_results()), (!s.next.is_empty(), repeats as u64), "{order:?}");
        }
    }
}

#[test]
fn one_ranks_failure_ends_the_load_on_all_ranks_and_is_the_reason() {
    for last in ["loaded", "failed"] {
        let mut s = scheduler(3);
        s.allocated(&fetch("a", 40), &blocks(3), 0, 40).unwrap();
        s.build_step(&ScheduledStep::default());
        let id = RequestId::new("a");
        let applied = s.apply(vec![
            StepResults { started: vec![id.clone()], ..results(0) },
            StepResults { failed: vec![failure("a", 32)], ..results(1) },
        ]);
        assert_eq!(applied, Applied::default(), "the others may still write");
        let cancel = Cancel { request: id.clone(), transfer: TransferId::new(7), side: Side::Load, waiting: None };
        assert_eq!(s.build_step(&ScheduledStep::default()).cancels, [cancel]);
        let cancelled = LoadFailure { reason: "cancelled".into(), ..failure("a", 16) };
        s.apply(vec![StepResults { failed: vec![cancelled], started: vec![id.clone()], ..results(0) }]);
        assert!(s.build_step(&ScheduledStep::default()).cancels.is_empty(), "once is enough");
        let applied = s.apply(vec![match last {
            "loaded" => StepResults { started: vec![id.clone()], loaded: vec![id.clone()], ..results(2) },
            _ => StepResults { failed: vec![failure("a", 32)], ..results(2) },
        }]);
        assert_eq!((applied.failed, applied.loaded.len()), (vec![failure("a", 16)], 0), "{last}");
        assert_eq!(s.build_step(&ScheduledStep::default()).settled, [id]);
        assert!(!s.has_pending());
    }
}

#[test]
fn a_load_without_addresses_is_refused() {
    let mut s = scheduler(1);
    let params = TransferParams::Fetch { transfer: TransferId::new(7), from: vec![], engine: None, ask: vec![] };
    let request = Request { params: Some(params), ..fetch("a", 40) };
    let error = s.allocated(&request, &blocks(3), 0, 40).unwrap_err().to_string();
    assert!(error.contains("no address"), "{error}");
}

#[test]
fn a_layerwise_load_can_fail_after_it_was_started() {
    let mut s = scheduler(1);
    s.allocated(&fetch("a", 40), &blocks(3), 0, 40).unwrap();
    let applied = s.apply(vec![StepResults { started: vec![RequestId::new("a")], ..results(0) }]);
    assert_eq!(applied.loaded, [RequestId::new("a")]);
    s.build_step(&ScheduledStep::default());
    assert_eq!(s.build_step(&step("a", 39..40, 3)).reading, [RequestId::new("a")]);
    let applied = s.apply(vec![StepResults { failed: vec![failure("a", 0)], ..results(0) }]);
    assert_eq!((applied.loaded.len(), applied.failed.len()), (0, 1));
}

#[test]
fn an_aborted_load_holds_its_blocks_until_it_ended() {
    for ended in [
        StepResults { failed: vec![failure("a", 0)], ..results(0) },
        StepResults { loaded: vec![RequestId::new("a")], ..results(0) },
    ] {
        let mut s = scheduler(1);
        s.allocated(&fetch("a", 40), &blocks(3), 0, 40).unwrap();
        let hold = s.finished(&RequestId::new("a"), &blocks(3), EngineFinish::Aborted);
        assert!(matches!(hold, Hold::Until { .. }));
        let meta = s.build_step(&ScheduledStep::default());
        assert_eq!((meta.loads.len(), meta.cancels.len()), (1, 1));
        let applied = s.apply(vec![ended]);
        assert_eq!(applied, Applied { released: vec![RequestId::new("a")], ..Applied::default() });
        assert!(!s.has_pending());
    }
}

#[test]
fn each_prefill_step_is_saved_once_and_the_request_is_held_until_sent() {
    let mut s = scheduler(1);
    s.allocated(&keep("p", 40), &blocks(3), 0, 0).unwrap();
    let save = |meta: StepMeta| (meta.saves[0].computed, meta.saves[0].first);
    assert_eq!(save(s.build_step(&step("p", 0..20, 2))), (20, true));
    assert_eq!(save(s.build_step(&step("p", 20..40, 3))), (40, false));
    assert!(s.build_step(&step("p", 40..41, 3)).saves.is_empty(), "generated tokens are not the prompt's");
    let hold = s.finished(&RequestId::new("p"), &blocks(3), EngineFinish::Complete);
    assert_eq!(hold, Hold::Until { transfer: Some(TransferId::new(9)), blocks: blocks(3) });
    let applied = s.apply(vec![StepResults { sent: vec![RequestId::new("p")], ..results(0) }]);
    assert_eq!(applied.released, [RequestId::new("p")]);
}

#[test]
fn a_consumer_that_goes_away_makes_the_request_unwanted_and_its_blocks_free() {
    let mut s = scheduler(1);
    s.allocated(&keep("p", 40), &blocks(3), 0, 0).unwrap();
    s.build_step(&step("p", 0..20, 2));
    let applied = s.apply(vec![StepResults { sent: vec![RequestId::new("p")], ..results(0) }]);
    assert_eq!(applied.unwanted, [RequestId::new("p")]);
    assert_eq!(s.finished(&RequestId::new("p"), &blocks(3), EngineFinish::Aborted), Hold::Free);
}

#[test]
fn a_prefill_that_is_aborted_tells_its_worker() {
    let mut s = scheduler(1);
    s.allocated(&keep("p", 40), &blocks(3), 0, 0).unwrap();
    assert!(matches!(s.finished(&RequestId::new("p"), &[], EngineFinish::Aborted), Hold::Until { .. }));
    assert_eq!(s.build_step(&ScheduledStep::default()).cancels.len(), 1);
    assert!(s.has_pending());
}

#[test]
fn a_local_request_leaves_no_trace() {
    let mut s = scheduler(1);
    let request = Request { params: None, ..fetch("l", 40) };
    assert_eq!(s.matched_tokens(&request, 0), Match::None);
    s.allocated(&request, &blocks(3), 0, 0).unwrap();
    assert!(s.build_step(&step("l", 0..40, 3)).is_empty());
    assert_eq!(s.finished(&request.id, &blocks(3), EngineFinish::Complete), Hold::Free);
    assert!(!s.has_pending());
}

#[test]
fn whole_blocks_travel_with_what_follows_the_prompt_in_the_last() {
    let mut s = scheduler(1).with_whole_blocks();
    s.allocated(&fetch("a", 40), &blocks(3), 16, 24).unwrap();
    let load = s.build_step(&ScheduledStep::default()).loads.remove(0);
    assert_eq!((load.tokens, load.blocks.len()), (16..48, 2));
    s.allocated(&fetch("b", 32), &blocks(2), 32, 0).unwrap();
    assert!(s.build_step(&ScheduledStep::default()).loads[0].tokens.is_empty(), "a full local hit loads nothing");

    s.allocated(&keep("p", 40), &blocks(3), 0, 0).unwrap();
    let saved = |s: &mut PdScheduler, tokens, n| {
        let save = s.build_step(&step("p", tokens, n)).saves.remove(0);
        (save.computed, save.prompt_tokens)
    };
    assert_eq!(saved(&mut s, 0..20, 2), (20, 48));
    assert_eq!(saved(&mut s, 20..40, 3), (48, 48));
    assert_eq!(s.unsaved().count(), 0);
}

#[test]
fn a_preempted_keep_begins_anew_only_under_another_transfer() {
    for (name, transfer, begins) in [("the router's id", 9, false), ("an id of our own", 10, true)] {
        let mut s = scheduler(1);
        let id = RequestId::new("p");
        s.allocated(&keep("p", 40), &blocks(3), 0, 0).unwrap();
        s.build_step(&step("p", 0..20, 2));
        s.preempted(std::slice::from_ref(&id));
        let meta = s.build_step(&ScheduledStep::default());
        assert_eq!((meta.preempted.as_slice(), meta.cancels.len()), ([id.clone()].as_slice(), 0), "{name}");

        let again = Request {
            params: Some(TransferParams::Keep { transfer: TransferId::new(transfer), to: None, readers: 1 }),
            ..keep("p", 40)
        };
        s.allocated(&again, &blocks(3), 0, 0).unwrap();
        let save = s.build_step(&step("p", 0..40, 3)).saves.pop();
        assert_eq!(save.map(|save| (save.transfer.get(), save.first)), begins.then_some((10, true)), "{name}");
        let sent = || StepResults { sent: vec![id.clone()], ..results(0) };
        assert_eq!(s.apply(vec![sent()]), Applied::default(), "{name}: the end of the first beginning");
        let hold = s.finished(&id, &blocks(3), EngineFinish::Complete);
        assert_eq!(matches!(hold, Hold::Until { .. }), begins, "{name}");
        assert_eq!(s.apply(vec![sent()]).released.len(), usize::from(begins), "{name}");
        assert_eq!((s.has_pending(), s.unknown_results()), (false, u64::from(!begins)), "{name}");
    }
}

#[test]
fn a_keep_that_is_preempted_before_anything_was_computed_owes_nothing() {
    let mut s = scheduler(2);
    let id = RequestId::new("p");
    s.allocated(&keep("p", 40), &blocks(3), 0, 0).unwrap();
    s.preempted(std::slice::from_ref(&id));
    assert!(s.build_step(&ScheduledStep::default()).is_empty());
    assert_eq!(s.finished(&id, &[], EngineFinish::Aborted), Hold::Free);
    assert!(!s.has_pending());
}

#[test]
fn who_waits_for_a_request_that_was_never_admitted_hears() {
    let mut s = scheduler(1);
    s.unadmitted(&fetch("a", 40));
    s.unadmitted(&keep("p", 40));
    let meta = s.build_step(&ScheduledStep::default());
    assert_eq!((meta.loads[0].tokens.clone(), meta.loads[0].blocks.len()), (0..0, 0), "the peer may let go");
    assert!(meta.cancels[0].waiting.is_some(), "the peer need not wait");
    let (loaded, sent) = (vec![RequestId::new("a")], vec![RequestId::new("p")]);
    let applied = s.apply(vec![StepResults { loaded, sent, ..results(0) }]);
    assert_eq!((applied, s.has_pending(), s.unknown_results()), (Applied::default(), false, 0));
}

#[test]
fn both_values_come_back_from_their_bytes() {
    let mut s = scheduler(1);
    s.allocated(&fetch("a", 40), &blocks(3), 0, 40).unwrap();
    s.allocated(&keep("p", 40), &blocks(3), 0, 0).unwrap();
    s.build_step(&step("p", 0..20, 2));
    s.preempted(&[RequestId::new("p")]);
    let meta = s.build_step(&step("p", 0..20, 2));
    assert_eq!(StepMeta::from_bytes(&meta.to_bytes().unwrap()).unwrap(), meta);
    let reported = StepResults { failed: vec![failure("a", 16)], sent: vec![RequestId::new("p")], ..results(3) };
    assert!(!reported.is_empty() && results(3).is_empty());
    let bytes = reported.to_bytes().unwrap();
    assert_eq!(StepResults::from_bytes(&bytes).unwrap(), reported);
    assert!(StepResults::from_bytes(&bytes[..bytes.len() - 1]).is_err());
}

#[test]
fn what_another_request_of_the_step_may_compute_is_not_ready_before_it() {
    for (early, ready) in [(false, [32, 40]), (true, [0, 40])] {
        let mut s = scheduler(1);
        if early {
            s = s.with_early_sharing();
        }
        s.allocated(&keep("p", 64), &blocks(4), 32, 0).unwrap();
        for (tokens, ready) in [(32..40, ready[0]), (40..64, ready[1])] {
            let meta = s.build_step(&step("p", tokens.clone(), 4));
            let [save] = meta.saves.as_slice() else { panic!("{meta:?}") };
            assert_eq!((save.ready, save.cached, save.computed), (ready, tokens.start, tokens.end), "{early}");
        }
    }
}

#[test]
fn a_keep_that_nobody_will_read_and_whose_blocks_are_taken_is_ended_first() {
    let mut s = scheduler(1);
    s.allocated(&keep("p", 64), &blocks(4), 0, 0).unwrap();
    s.build_step(&step("p", 0..32, 4));
    s.unread(&RequestId::new("p"));
    s.preempted(&[RequestId::new("p")]);
    let meta = s.build_step(&ScheduledStep::default());
    assert_eq!(meta.preempted, [RequestId::new("p")], "the worker ends it before the pages are written");
}

#[test]
fn a_keep_that_nobody_will_read_ends_at_any_point_of_its_request() {
    for (name, computed, is_finished) in [
        ("before anything was computed", 0, false),
        ("half computed", 16, false),
        ("computed", 32, false),
        ("held for its reader", 32, true),
    ] {
        let mut s = scheduler(1);
        let id = RequestId::new("p");
        s.allocated(&keep("p", 32), &blocks(2), 0, 0).unwrap();
        if computed > 0 {
            assert_eq!(s.build_step(&step("p", 0..computed, 2)).saves.len(), 1, "{name}");
        }
        if is_finished {
            assert!(matches!(s.finished(&id, &blocks(2), EngineFinish::Complete), Hold::Until { .. }), "{name}");
        }
        s.unread(&id);
        s.unread(&id);
        let meta = s.build_step(&step("p", computed..32, 2));
        assert!(meta.saves.is_empty(), "{name}: {meta:?}");
        assert_eq!(meta.cancels.len(), usize::from(computed > 0), "{name}: {meta:?}");
        let sent = if computed > 0 { vec![id.clone()] } else { vec![] };
        let applied = s.apply(vec![StepResults { sent, ..results(0) }]);
        if is_finished {
            assert_eq!(applied.released, [id], "{name}");
        } else {
            assert_eq!(applied, Applied::default(), "{name}: its own answer is still wanted");
            assert_eq!(s.finished(&id, &blocks(2), EngineFinish::Complete), Hold::Free, "{name}");
        }
        assert!(!s.has_pending() && s.unknown_results() == 0, "{name}");
    }
}

/// Ranks whose load succeeded read in place what the request computes into after another rank's failure.
#[test]
fn what_failed_on_one_rank_is_let_go_on_all_and_has_nothing_good() {
    let mut s = scheduler(2).with_reading_in_place();
    let id = RequestId::new("a");
    s.allocated(&fetch("a", 60), &blocks(4), 16, 44).unwrap();
    assert!(s.build_step(&ScheduledStep::default()).finished.is_empty());
    let applied = s.apply(vec![
        StepResults { loaded: vec![id.clone()], ..results(0) },
        StepResults { failed: vec![failure("a", 48)], ..results(1) },
    ]);
    assert_eq!(applied.failed.iter().map(|f| (f.good_tokens, f.good_blocks.len())).collect::<Vec<_>>(), [(16, 0)]);
    assert!(s.has_pending(), "before anything is computed into its blocks");
    assert_eq!(s.build_step(&ScheduledStep::default()).finished, [id]);
}

#[test]
fn what_was_withdrawn_on_one_rank_fails_once_and_is_let_go_on_all() {
    let mut s = scheduler(2).with_reading_in_place();
    let id = RequestId::new("a");
    let withdrawn = |rank| StepResults { withdrawn: vec![failure("a", 0)], ..results(rank) };
    let loaded = |rank| StepResults { loaded: vec![RequestId::new("a")], ..results(rank) };
    s.allocated(&fetch("a", 40), &blocks(3), 0, 40).unwrap();
    // One rank is still loading: its step is void, and the failure comes with the end.
    let applied = s.apply(vec![loaded(0), withdrawn(0)]);
    assert_eq!((applied.void, applied.failed.len(), applied.loaded.len()), (vec![id.clone()], 0, 0));
    assert_eq!(s.apply(vec![loaded(1)]).failed.len(), 1);
    assert_eq!(s.build_step(&ScheduledStep::default()).finished, std::slice::from_ref(&id));

    let mut s = scheduler(2).with_reading_in_place();
    s.allocated(&fetch("a", 40), &blocks(3), 0, 40).unwrap();
    assert_eq!(s.apply(vec![loaded(0), loaded(1)]).loaded, std::slice::from_ref(&id));
    let applied = s.apply(vec![withdrawn(0), withdrawn(1)]);
    assert_eq!((applied.failed.len(), s.unknown_results()), (1, 1));
    assert_eq!(s.build_step(&ScheduledStep::default()).finished, std::slice::from_ref(&id));
    assert_eq!(s.finished(&id, &blocks(3), EngineFinish::Complete), Hold::Free);
    assert_eq!(s.build_step(&ScheduledStep::default()).finished, std::slice::from_ref(&id));
    assert_eq!(s.apply(vec![withdrawn(0)]).failed, [], "it is over");

    // Another engine's results make no such thing.
    let mut s = scheduler(1);
    s.allocated(&fetch("a", 40), &blocks(3), 0, 40).unwrap();
    s.apply(vec![loaded(0)]);
    s.short_of_blocks();
    let _ = s.finished(&id, &blocks(3), EngineFinish::Complete);
    let meta = s.build_step(&ScheduledStep::default());
    assert!(meta.finished.is_empty() && meta.recall);
}
