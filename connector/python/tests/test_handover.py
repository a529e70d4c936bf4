"""Prompts carried between two engines of one process, over TCP, byte for byte."""

from __future__ import annotations

import pytest
from engine import LAYERS, PAGE, TOKENS, Engine, ModelFacts, wait_for


# Twenty blocks take two seconds.
SLOW = {"link_gbps": 0.001, "posts_in_flight": 1, "chunk_bytes": 4096, "slab_pool_bytes": 8192}
MANY = list(range(1, 21))


def blocks_for(tokens: int, first: int) -> list[int]:
    """Blocks that do not follow each other."""
    return [first + 3 * index % 11 for index in range(-(-tokens // TOKENS))]


def assert_carried(prefill: Engine, decode: Engine, ours: list[int], theirs: list[int]) -> None:
    assert decode.memory.pages(theirs) == prefill.memory.pages(ours)


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 63, 64, 65, 97])
def test_a_prompt_is_carried_when_prefill_is_asked_first(engines, tokens):
    prefill, decode = engines("p", "prefill"), engines("d", "decode")
    ours, theirs = blocks_for(tokens, 2), blocks_for(tokens, 12)
    params = prefill.prefill("a", tokens, ours, seed=1, params={"do_remote_decode": True, "remote_host": None})
    assert (params["remote_num_tokens"], params["remote_addresses"]) == (tokens, [prefill.worker.address])
    untouched = decode.memory.pages([0, 1, 23])
    decode.load("b", tokens, theirs, params)
    wait_for("the load", lambda: decode.received == ["b"], decode, prefill)
    assert not decode.failed and not decode.bad_blocks
    assert_carried(prefill, decode, ours, theirs)
    assert decode.memory.pages([0, 1, 23]) == untouched
    wait_for("the release", lambda: prefill.released == ["a"], prefill, decode)
    assert decode.scheduler.matched_tokens("b", 0) == 0, "a request is loaded once"
    assert decode.scheduler.finished("b", theirs, True) == (False, None)
    for engine in (prefill, decode):
        wait_for("rest", lambda: not engine.scheduler.has_pending(), engine)
        assert (engine.scheduler.unknown_results, engine.worker.unknown_results) == (0, 0)
    assert decode.worker.counters()["received_bytes"] == len(theirs) * 3 * PAGE


def test_a_prompt_is_carried_when_both_are_asked_at_once(engines):
    prefill, decode = engines("p", "both"), engines("d", "both")
    ours, theirs = blocks_for(97, 2), blocks_for(97, 12)
    decode.load("b", 97, theirs, {"do_remote_prefill": True, "transfer_id": "x-1", "remote_addresses": [prefill.worker.address]})
    for _ in range(20):
        decode.step()
    assert decode.received == []
    params = prefill.prefill("a", 97, ours, seed=2, params={"do_remote_decode": True, "transfer_id": "x-1"}, is_asked=True)
    wait_for("the load", lambda: decode.received == ["b"], decode, prefill)
    assert_carried(prefill, decode, ours, theirs)
    wait_for("the release", lambda: prefill.released == ["a"], prefill, decode)
    assert params["transfer_id"] == "x-1", "the router's own name goes on"


def test_two_engines_that_do_both_load_from_each_other_over_one_session(engines):
    one, other = engines("p", "both"), engines("d", "both")
    for turn, (prefill, decode) in enumerate([(one, other), (other, one), (one, other)]):
        name, ours, theirs = f"x-{turn}", blocks_for(97, 2), blocks_for(97, 12)
        # The params name no engine, only its address.
        params = {"do_remote_prefill": True, "transfer_id": name, "remote_addresses": [prefill.worker.address]}
        decode.load(f"d{turn}", 97, theirs, params)
        offer = {"do_remote_decode": True, "transfer_id": name}
        prefill.prefill(f"p{turn}", 97, ours, seed=turn, params=offer, is_asked=True)
        wait_for("the load", lambda: f"d{turn}" in decode.received, decode, prefill)
        assert not decode.failed
        assert_carried(prefill, decode, ours, theirs)
        wait_for("the release", lambda: f"p{turn}" in prefill.released, prefill, decode)
    assert (one.worker.counters()["sessions_lost"], other.worker.counters()["sessions_lost"]) == (0, 0)


def test_chunks_of_a_prompt_are_carried_as_they_are_computed(engines):
    prefill, decode = engines("p", "prefill"), engines("d", "decode")
    ours, theirs = blocks_for(97, 2), blocks_for(97, 12)
    decode.load("b", 97, theirs, {"do_remote_prefill": True, "transfer_id": "x", "remote_addresses": [prefill.worker.address]})
    prefill.add("a", 97, 1, {"do_remote_decode": True, "transfer_id": "x"})
    prefill.scheduler.allocated("a", ours, 0)
    prefill.step([("a", 0, 40, ours[:2])], forward=lambda: prefill.memory.fill(ours[:2], 5))
    prefill.step([("a", 40, 80, ours[:3])], forward=lambda: prefill.memory.fill(ours[:3], 5))
    prefill.step([("a", 80, 97, ours)], forward=lambda: prefill.memory.fill(ours, 5))
    assert prefill.scheduler.unsaved() == []
    prefill.scheduler.finished("a", ours, True)
    wait_for("the load", lambda: decode.received == ["b"], decode, prefill)
    assert not decode.failed
    assert_carried(prefill, decode, ours, theirs)


def test_only_what_is_behind_a_local_prefix_is_carried(engines):
    prefill, decode = engines("p", "prefill"), engines("d", "decode")
    ours, theirs = blocks_for(97, 2), blocks_for(97, 12)
    params = prefill.prefill("a", 97, ours, seed=1, params={"do_remote_decode": True})
    before = decode.memory.pages(theirs[:2])
    decode.load("b", 97, theirs, params, local=2 * TOKENS)
    wait_for("the load", lambda: decode.received == ["b"], decode)
    assert decode.memory.pages(theirs[:2]) == before
    assert_carried(prefill, decode, ours[2:], theirs[2:])


def test_a_full_local_hit_lets_prefill_go_and_tells_the_engine_nothing(engines):
    prefill, decode = engines("p", "prefill"), engines("d", "decode")
    params = prefill.prefill("a", 64, [2, 3], seed=1, params={"do_remote_decode": True})
    decode.add("b", 64, 8, params)
    decode.scheduler.allocated("b", [4, 5], 0)
    wait_for("the release", lambda: prefill.released == ["a"], prefill, decode)
    assert (decode.received, decode.worker.unknown_results) == ([], 1)


def test_a_request_that_ends_before_it_is_admitted_lets_the_other_side_go(engines):
    prefill, decode = engines("p", "prefill"), engines("d", "decode")
    params = prefill.prefill("a", 64, [2, 3], seed=1, params={"do_remote_decode": True})
    decode.add("b", 64, 8, params)
    assert decode.scheduler.finished("b", [], False) == (False, None)
    assert decode.scheduler.has_pending(), "the engine must step once more"
    wait_for("the release", lambda: prefill.released == ["a"], prefill, decode)

    decode.load("c", 64, [4, 5], {"do_remote_prefill": True, "transfer_id": "y", "remote_addresses": [prefill.worker.address]})
    wait_for("a session", lambda: "kvferry_early_grants_live 1" in prefill.worker.metrics(), decode)
    prefill.add("never", 64, 1, {"do_remote_decode": True, "transfer_id": "y"})
    assert prefill.scheduler.finished("never", [], False) == (False, None)
    wait_for("the failure", lambda: decode.received == ["c"], decode, prefill)
    assert decode.bad_blocks == {4, 5} and "gave the request up" in decode.failed["c"]
    assert prefill.released == ["a"]


def test_a_leg_that_the_engine_rejected_lets_prefill_go_at_once(engines):
    prefill, decode = engines("p", "prefill", options={"lease_ttl_ms": 600_000}), engines("d", "decode")
    params = prefill.prefill("a", 64, [2, 3], seed=1, params={"do_remote_decode": True})
    assert decode.scheduler.unwanted("b", [0], "", params)
    wait_for("the release", lambda: prefill.released == ["a"], prefill, decode)
    wait_for("the count", lambda: prefill.worker.counters()["sent_cancelled"] == 1, prefill)
    assert decode.received == []
    # Who comes with the prompt after all finds nothing there, and is computed.
    assert decode.scheduler.add("c", list(range(64)), "", 8, params)
    assert not decode.scheduler.unwanted("d", [0], "", {"do_remote_prefill": True}), "nobody is named"
    wait_for("rest", lambda: not decode.scheduler.has_pending(), decode)


def test_a_rejection_while_its_transfer_goes_on_is_no_end_of_it(engines):
    prefill, decode = engines("p", "prefill", options=SLOW), engines("d", "decode")
    params = prefill.prefill("a", 640, MANY, seed=1, params={"do_remote_decode": True})
    decode.load("b", 640, MANY, params)
    assert not decode.scheduler.unwanted("c", [0], "", params)
    wait_for("the load", lambda: decode.received == ["b"], decode, prefill)
    assert not decode.failed
    assert_carried(prefill, decode, MANY, MANY)


def test_samples_of_one_request_hand_its_prompt_over_once(engines):
    prefill, decode = engines("p", "prefill"), engines("d", "decode")
    keep = {"do_remote_decode": True}
    prefill.add("0_a", 64, 1, keep)
    assert prefill.scheduler.add("1_a", list(range(64)), "", 1, keep)
    assert prefill.scheduler.add("0_b", list(range(64)), "", 1, keep) is None, "another request"
    assert prefill.scheduler.finished("0_b", [], False) == (False, None)
    prefill.scheduler.allocated("0_a", [2, 3], 0)
    prefill.step([("0_a", 0, 64, [2, 3])], preempted=["0_a"])
    prefill.scheduler.allocated("0_a", [2, 3], 0)
    prefill.step([("0_a", 0, 64, [2, 3])], forward=lambda: prefill.memory.fill([2, 3], 1))
    _, told = prefill.scheduler.finished("0_a", [2, 3], True)
    assert told is not None
    assert prefill.scheduler.finished("1_a", [4, 5], True) == (False, told), "the name that it has now"
    decode.load("d", 64, [6, 7], told)
    wait_for("the load", lambda: decode.received == ["d"], decode, prefill)
    assert_carried(prefill, decode, [2, 3], [6, 7])


def test_an_abort_of_decode_is_reported_once_and_frees_both_sides(engines):
    prefill, decode = engines("p", "prefill", options=SLOW), engines("d", "decode")
    params = prefill.prefill("a", 640, MANY, seed=1, params={"do_remote_decode": True})
    decode.load("b", 640, MANY, params)
    wait_for("first bytes", lambda: prefill.worker.counters()["sent_bytes"] > 0, decode)
    assert decode.scheduler.finished("b", MANY, False) == (False, None), "the engine holds them itself"
    wait_for("the end", lambda: decode.received == ["b"], decode)
    decode.memory.fill(MANY, 77)
    mine = decode.memory.pages(MANY)
    wait_for("the release", lambda: prefill.released == ["a"], prefill, decode)
    assert decode.memory.pages(MANY) == mine, "nothing lands in blocks that were given back"
    assert (decode.received, decode.worker.unknown_results) == (["b"], 0)


def test_an_abort_of_prefill_fails_the_load_with_its_reason(engines):
    prefill, decode = engines("p", "prefill"), engines("d", "decode")
    decode.load("b", 97, [6, 7, 8, 9], {"do_remote_prefill": True, "transfer_id": "x", "remote_addresses": [prefill.worker.address]})
    prefill.add("a", 97, 1, {"do_remote_decode": True, "transfer_id": "x"})
    prefill.scheduler.allocated("a", [2, 3, 4, 5], 0)
    prefill.step([("a", 0, 40, [2, 3])], forward=lambda: prefill.memory.fill([2, 3], 1))
    held, answer = prefill.scheduler.finished("a", [2, 3], False)
    assert (held, answer) == (True, None)
    wait_for("both ends", lambda: decode.received == ["b"] and prefill.released == ["a"], prefill, decode)
    assert "b" in decode.failed and decode.bad_blocks >= {7, 8, 9}


def test_a_preempted_prompt_is_carried_under_a_new_id(engines):
    prefill, decode = engines("p", "prefill"), engines("d", "decode")
    prefill.add("a", 97, 1, {"do_remote_decode": True})
    prefill.scheduler.allocated("a", [2, 3, 4, 5], 0)
    prefill.step([("a", 0, 40, [2, 3])], forward=lambda: prefill.memory.fill([2, 3], 1))
    prefill.step(preempted=["a"], forward=lambda: prefill.memory.fill([2, 3], 99))
    prefill.scheduler.allocated("a", [10, 11, 12, 13], 0)
    prefill.step([("a", 0, 97, [10, 11, 12, 13])], forward=lambda: prefill.memory.fill([10, 11, 12, 13], 3))
    held, params = prefill.scheduler.finished("a", [10, 11, 12, 13], True)
    assert held
    decode.load("b", 97, [6, 7, 8, 9], params)
    wait_for("the load", lambda: decode.received == ["b"], decode, prefill)
    assert not decode.failed
    assert_carried(prefill, decode, [10, 11, 12, 13], [6, 7, 8, 9])
    wait_for("the release", lambda: prefill.released == ["a"], prefill)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": ModelFacts(fingerprint="2c" * 32)}, "model_fingerprint"),
        ({"model": ModelFacts(options=[("page", "CPU_ATTN amx, 32 tokens")])}, "options.page"),
        ({"model": ModelFacts(rope_theta=5e5)}, "rope.theta"),
        ({"psk_file": "other"}, "key"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_with_the_reason(engines, tmp_path, changes, reason):
    if "psk_file" in changes:
        path = tmp_path / "other"
        path.write_text("another key that nobody shares")
        changes = {"psk_file": path}
    prefill, decode = engines("p", "prefill"), engines("d", "decode", **changes)
    params = prefill.prefill("a", 64, [2, 3], seed=1, params={"do_remote_decode": True})
    before = decode.memory.pages([6, 7])
    decode.load("b", 64, [6, 7], params)
    wait_for("the failure", lambda: decode.received == ["b"], decode)
    assert reason in decode.failed["b"] and decode.bad_blocks == {6, 7}
    assert decode.memory.pages([6, 7]) == before


def test_a_prefill_engine_that_dies_fails_the_load_and_the_next_start_is_another(engines):
    prefill = engines("p", "prefill", options=SLOW)
    decode = engines("d", "decode", options={"absent_deadline_ms": 500})
    params = prefill.prefill("a", 640, MANY, seed=1, params={"do_remote_decode": True})
    decode.load("b", 640, MANY, params)
    wait_for("first bytes", lambda: prefill.worker.counters()["sent_bytes"] > 0, decode)
    prefill.worker.shutdown(0.0)
    wait_for("the failure", lambda: decode.received == ["b"], decode)
    assert "b" in decode.failed and decode.bad_blocks

    again = engines("p", "prefill")
    params = again.prefill("a", 97, [2, 3, 4, 5], seed=2, params={"do_remote_decode": True})
    decode.load("c", 97, [6, 7, 8, 9], params)
    wait_for("the load", lambda: decode.received == ["b", "c"], decode, again)
    assert "c" not in decode.failed
    assert_carried(again, decode, [2, 3, 4, 5], [6, 7, 8, 9])


@pytest.mark.parametrize("request_failures", [True, False])
def test_a_load_of_which_nothing_is_good_is_told_by_request_where_the_engine_hears_of_requests(engines, request_failures):
    prefill = engines("p", "prefill", options={"lease_ttl_ms": 300})
    decode = engines("d", "decode", request_failures=request_failures)
    params = prefill.prefill("a", 97, [2, 3, 4, 5], seed=1, params={"do_remote_decode": True})
    wait_for("the release", lambda: prefill.released == ["a"], prefill)
    decode.load("b", 97, [6, 7, 8, 9], params)
    wait_for("the refusal", lambda: decode.received == ["b"], decode)
    assert set(decode.failed) == {"b"}
    told = ({"b"}, set()) if request_failures else (set(), {6, 7, 8, 9})
    assert (decode.failed_requests, decode.bad_blocks) == told


def test_where_the_engine_has_a_prefix_of_its_own_only_the_blocks_behind_it_are_bad(engines):
    prefill = engines("p", "prefill", options={"lease_ttl_ms": 300})
    decode = engines("d", "decode", request_failures=True)
    params = prefill.prefill("a", 97, [2, 3, 4, 5], seed=1, params={"do_remote_decode": True})
    wait_for("the release", lambda: prefill.released == ["a"], prefill)
    decode.load("b", 97, [6, 7, 8, 9], params, local=2 * TOKENS)
    wait_for("the refusal", lambda: decode.received == ["b"], decode)
    assert set(decode.failed) == {"b"}
    assert (decode.failed_requests, decode.bad_blocks) == (set(), {8, 9})


def test_what_landed_of_a_load_that_was_cut_off_is_no_bad_block(engines):
    prefill = engines("p", "prefill", options=SLOW)
    decode = engines("d", "decode", options={"absent_deadline_ms": 500}, request_failures=True)
    params = prefill.prefill("a", 640, MANY, seed=1, params={"do_remote_decode": True})
    decode.load("b", 640, MANY, params)
    wait_for("half", lambda: decode.worker.counters()["received_bytes"] > 10 * LAYERS * PAGE, decode)
    prefill.worker.shutdown(0.0)
    wait_for("the failure", lambda: decode.received == ["b"], decode)
    assert set(decode.failed) == {"b"}
    good = len(MANY) - len(decode.bad_blocks)
    assert decode.bad_blocks == set(MANY[good:]) and (decode.failed_requests == {"b"}) == (good == 0)
    assert_carried(prefill, decode, MANY[:good], MANY[:good])


def test_a_lease_that_nobody_takes_ends_and_who_comes_late_is_refused_at_once(engines):
    prefill, decode = engines("p", "prefill", options={"lease_ttl_ms": 300, "verdict_timeout_ms": 1000}), engines("d", "decode")
    params = prefill.prefill("a", 64, [2, 3], seed=1, params={"do_remote_decode": True})
    wait_for("the release", lambda: prefill.released == ["a"], prefill)
    wait_for("the verdict", lambda: prefill.worker.counters()["sent_failed"] == 1, prefill)
    decode.load("b", 64, [6, 7], params)
    wait_for("the refusal", lambda: decode.received == ["b"], decode)
    assert "the transfer is over" in decode.failed["b"] and "lease" in decode.failed["b"]
    assert decode.bad_blocks == {6, 7}


def test_an_abort_before_anybody_asked_gives_the_blocks_back_at_once(engines):
    prefill = engines("p", "prefill", options={"verdict_timeout_ms": 30000, "lease_ttl_ms": 60000})
    prefill.add("a", 97, 1, {"do_remote_decode": True})
    prefill.scheduler.allocated("a", [2, 3, 4, 5], 0)
    prefill.step([("a", 0, 40, [2, 3])], forward=lambda: prefill.memory.fill([2, 3], 1))
    assert prefill.scheduler.finished("a", [2, 3], False) == (True, None)
    wait_for("the release", lambda: prefill.released == ["a"], prefill)
    assert "kvferry_transfers_live{side=\"send\"} 1" in prefill.worker.metrics(), "its verdict is still awaited"


@pytest.mark.parametrize("way", ["cma", "uds", "tcp"])
def test_a_prompt_is_carried_by_each_way_out_of_the_engines_own_memory(engines, way):
    prefill, decode = engines("p", "prefill"), engines("d", "decode", options={"paths": [way]})
    for turn in range(3):
        ours, theirs = blocks_for(97, 2 + turn), blocks_for(97, 12 - turn)
        params = prefill.prefill(f"a{turn}", 97, ours, seed=turn, params={"do_remote_decode": True})
        decode.load(f"b{turn}", 97, theirs, params)
        wait_for("the load", lambda: f"b{turn}" in decode.received, decode, prefill)
        assert not decode.failed
        assert_carried(prefill, decode, ours, theirs)
    wait_for("rest", lambda: prefill.released == ["a0", "a1", "a2"], prefill)
    lent = prefill.worker.counters()["lent_bytes"]
    assert (lent > 0) == (way == "cma") and lent <= prefill.worker.counters()["sent_bytes"]


@pytest.mark.parametrize("names", [("a", "z"), ("z", "a")])
def test_two_engines_load_from_each_other(engines, names):
    first, second = (engines(name, "both") for name in names)
    for turn, (prefill, decode) in enumerate([(first, second), (second, first), (first, second)]):
        params = prefill.prefill(f"p{turn}", 64, [2, 3], seed=turn, params={"do_remote_decode": True})
        decode.load(f"d{turn}", 64, [6, 7], params)
        wait_for("the load", lambda: f"d{turn}" in decode.received, decode, prefill)
        assert not decode.failed
        assert_carried(prefill, decode, [2, 3], [6, 7])


def test_another_prompt_finds_nothing_under_the_same_name(engines):
    prefill, decode = engines("p", "prefill"), engines("d", "decode", options={"transfer_deadline_ms": 1500})
    named = {"do_remote_decode": True, "transfer_id": "x"}
    for request, prompt in [("right", list(range(64))), ("wrong", list(range(1, 65)))]:
        assert prefill.scheduler.add(request, prompt, "", 1, named) is None
        prefill.scheduler.allocated(request, [2, 3] if request == "right" else [4, 5], 0)
    prefill.step([("right", 0, 64, [2, 3]), ("wrong", 0, 64, [4, 5])], forward=lambda: prefill.memory.fill([2, 3, 4, 5], 1))
    answer = prefill.scheduler.finished("right", [2, 3], True)[1]
    prefill.scheduler.finished("wrong", [4, 5], True)
    decode.load("b", 64, [6, 7], answer)
    wait_for("the load", lambda: decode.received == ["b"], decode, prefill)
    assert not decode.failed
    assert_carried(prefill, decode, [2, 3], [6, 7])

    # Prefill's answer says which prompt it is of, so this ends before it begins.
    for prompt, more in [(list(range(2, 66)), ""), (list(range(64)), "an adapter")]:
        with pytest.raises(ValueError, match="remote_prompt: prefill computed another prompt"):
            decode.scheduler.add("never", prompt, more, 8, answer)

    # A router that posts both legs at once cannot say it, and then the load waits in vain.
    at_once = {"do_remote_prefill": True, "transfer_id": "x", "remote_addresses": [prefill.worker.address]}
    before = decode.memory.pages([8, 9])
    assert decode.scheduler.add("c", list(range(2, 66)), "", 8, at_once) is None
    decode.scheduler.allocated("c", [8, 9], 64)
    assert decode.scheduler.add("e", list(range(64)), "an adapter", 8, at_once) is None
    decode.scheduler.allocated("e", [10, 11], 64)
    wait_for("both failures", lambda: sorted(decode.received) == ["b", "c", "e"], decode, prefill)
    assert set(decode.failed) == {"c", "e"} and decode.memory.pages([8, 9]) == before


def test_a_decode_leg_at_the_engine_of_its_prefill_ends_what_that_keeps(engines):
    both, decode = engines("p", "both", options={"lease_ttl_ms": 600_000}), engines("d", "decode")
    params = both.prefill("a", 64, [2, 3], seed=1, params={"do_remote_decode": True})
    assert "this same engine" in both.scheduler.add("b", list(range(64)), "", 8, params)
    assert both.scheduler.matched_tokens("b", 0) == 0
    wait_for("the release", lambda: both.released == ["a"] and not both.scheduler.has_pending(), both)
    assert (both.scheduler.unknown_results, both.worker.unknown_results) == (0, 0)
    # Another sample of the leg, and another engine that comes for it after all.
    assert both.scheduler.add("1_b", list(range(64)), "", 8, params)
    decode.load("c", 64, [6, 7], params)
    wait_for("the failure", lambda: decode.received == ["c"], decode, both)
    assert set(decode.failed) == {"c"}


def test_a_decode_leg_that_comes_to_the_engine_of_its_prefill_first_needs_no_hand_over(engines):
    both = engines("p", "both")
    at_once = {"do_remote_prefill": True, "transfer_id": "x", "remote_addresses": [both.worker.address]}
    assert "this same engine" in both.scheduler.add("b", list(range(64)), "", 8, at_once)
    assert both.scheduler.add("a", list(range(64)), "", 1, {"do_remote_decode": True, "transfer_id": "x"})
    assert both.scheduler.finished("a", [2, 3], True) == (False, None) and not both.scheduler.has_pending()


def test_a_prompt_is_handed_over_to_one_request_only(engines):
    prefill, decode = engines("p", "prefill"), engines("d", "decode")
    params = prefill.prefill("a", 64, [2, 3], seed=1, params={"do_remote_decode": True})
    decode.load("0_b", 64, [6, 7], params)
    assert decode.scheduler.add("1_b", list(range(64)), "", 8, params)
    assert decode.scheduler.matched_tokens("1_b", 0) == 0
    wait_for("the load", lambda: decode.received == ["0_b"], decode, prefill)
    assert not decode.failed
