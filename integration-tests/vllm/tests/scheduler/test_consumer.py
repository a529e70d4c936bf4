"""Decode's side of a request's life, under vLLM's own scheduler. Behaviours 1 to 13 of the connector contract."""

from harness.model import prompt
from vllm.v1.request import RequestStatus

from .conftest import Duo, Maker

WAITING = RequestStatus.WAITING_FOR_REMOTE_KVS


def test_01_an_admitted_load_waits_with_blocks_that_no_prefix_lookup_finds(duo: Duo) -> None:
    request = duo.ask("r", prompt(80))
    scheduled = duo.decode.step()
    assert scheduled.total_num_scheduled_tokens == 0
    assert (request.status, request.num_computed_tokens) == (WAITING, 80)
    assert len(duo.decode.blocks("r")) == 3
    assert duo.decode.hashed_blocks("r") == 0


def test_02_the_stage_gauge_follows_the_load_and_is_cleared(duo: Duo) -> None:
    duo.ask("r", prompt(80))
    assert duo.decode.stages() == {"waiting_to_start": 1}
    duo.decode.step()
    assert duo.decode.stages() == {"in_progress": 1}
    duo.prefill_now("r", prompt(80))
    duo.until_loaded("r")
    assert duo.decode.stages() == {"completed_waiting": 1}
    duo.decode.step()
    assert duo.decode.stages() == {}

    duo.ask("aborted", prompt(80, seed=1))
    duo.decode.step()
    assert duo.decode.stages() == {"in_progress": 1}
    duo.decode.abort("aborted")
    assert duo.decode.stages() == {}


def test_03_a_loaded_request_is_scheduled_in_the_next_step_not_in_the_same(duo: Duo) -> None:
    tokens = prompt(80)
    duo.ask("r", tokens)
    duo.prefill_now("r", tokens)
    seen = []
    while not seen or not any("r" in (one.finished_recving or ()) for one in duo.decode.reported):
        duo.prefill.step()
        seen.append(duo.decode.step())
    assert all("r" not in step.num_scheduled_tokens for step in seen)
    assert "r" in duo.decode.step().num_scheduled_tokens


def test_04_of_two_and_a_half_blocks_exactly_two_are_hashed_once_loaded(duo: Duo) -> None:
    duo.ask("r", prompt(80))
    duo.prefill_now("r", prompt(80))
    duo.until_loaded("r")
    assert duo.decode.hashed_blocks("r") == 0
    duo.decode.step()
    assert duo.decode.hashed_blocks("r") == 2


def test_05_the_last_token_of_a_prompt_of_whole_blocks_is_computed_again(duo: Duo) -> None:
    duo.ask("r", prompt(64))
    duo.prefill_now("r", prompt(64))
    duo.until_loaded("r")
    assert duo.decode.wrong_tokens("r", 64) == []
    assert duo.decode.step().num_scheduled_tokens == {"r": 1}


def test_06_the_same_prompt_gets_no_hit_on_blocks_that_are_not_filled_yet(duo: Duo) -> None:
    tokens = prompt(80)
    duo.ask("first", tokens)
    duo.decode.step()
    duo.ask("second", tokens)
    duo.decode.step()
    assert not set(duo.decode.blocks("first")) & set(duo.decode.blocks("second"))
    assert duo.decode.local_hit("second") == 0
    for name in ("first", "second"):
        duo.prefill_now(name, tokens)
    for name in ("first", "second"):
        duo.until_finished(name)
    duo.until_free()


def test_07_local_requests_run_while_remote_ones_wait(duo: Duo) -> None:
    remote = duo.ask("remote", prompt(80))
    local = duo.decode.add("local", prompt(80, seed=1), 3, None)
    for _ in range(3):
        duo.decode.step()
    assert (local.num_output_tokens, remote.status) == (3, WAITING)
    duo.prefill_now("remote", prompt(80))
    duo.until_finished("remote")
    duo.until_free()


def test_08a_without_room_to_receive_a_request_waits_without_blocks(make_duo: Maker) -> None:
    duo = make_duo(decode={"blocks": 7})
    duo.decode.add("local", prompt(100), 20, None)
    duo.decode.step()
    request = duo.ask("remote", prompt(120, seed=1))
    duo.decode.step()
    assert (request.status, duo.decode.blocks("remote")) == (RequestStatus.WAITING, [])
    duo.prefill_now("remote", prompt(120, seed=1))
    duo.until_finished("remote")
    duo.until_free()


def test_08b_without_room_to_go_on_a_loaded_request_is_set_back_and_loses_nothing(make_duo: Maker) -> None:
    duo = make_duo(decode={"blocks": 7})
    tokens = prompt(64, seed=1)
    duo.decode.add("local", prompt(90), 40, None)
    duo.decode.step()
    remote = duo.ask("remote", tokens, count=60)
    duo.prefill_now("remote", tokens)
    duo.until_loaded("remote")
    assert duo.decode.wrong_tokens("remote", 64) == []
    duo.until_finished("remote")
    assert remote.num_preemptions > 0, "there was room, so nothing was tested"
    assert len(remote.output_token_ids) == 60
    assert duo.decode.finished("local") is not None
    duo.until_free()


def test_09_a_second_load_must_not_take_the_blocks_of_the_one_in_flight(make_duo: Maker) -> None:
    duo = make_duo(decode={"blocks": 9})
    first, second = duo.ask("first", prompt(150)), duo.ask("second", prompt(150, seed=1))
    duo.decode.step()
    assert (first.status, second.status) == (WAITING, RequestStatus.WAITING)
    for name, seed in (("first", 0), ("second", 1)):
        duo.prefill_now(name, prompt(150, seed))
    for name in ("first", "second"):
        duo.until_finished(name)
    duo.until_free()

    roomy = make_duo(decode={"blocks": 24})
    both = roomy.ask("first", prompt(150)), roomy.ask("second", prompt(150, seed=1))
    roomy.decode.step()
    assert [request.status for request in both] == [WAITING, WAITING]


def test_10_a_lookup_that_is_not_answered_yet_does_not_stop_a_parked_load_behind_it(duo: Duo, monkeypatch) -> None:
    tokens = prompt(80)
    connector = duo.decode.connector
    ask = type(connector).get_num_new_matched_tokens

    def unanswered(self, request, num_computed_tokens):
        if request.request_id == "asking":
            return None, False
        return ask(self, request, num_computed_tokens)

    monkeypatch.setattr(type(connector), "get_num_new_matched_tokens", unanswered)
    asking = duo.ask("asking", prompt(80, seed=1))
    duo.ask("parked", tokens)
    duo.prefill_now("parked", tokens)
    duo.until_finished("parked")
    assert asking.status == RequestStatus.WAITING
    monkeypatch.undo()


def test_11_what_decode_has_already_is_not_waited_for_and_prefill_hears_of_it(make_duo: Maker) -> None:
    # A lease that no test would wait for: the blocks come back because decode says so.
    duo = make_duo(prefill_config={"lease_ttl_ms": 600_000})
    tokens = prompt(65)
    duo.hand_over("first", tokens)
    duo.until_free()
    duo.hand_over("second", tokens)
    assert duo.decode.local_hit("second") == 64
    duo.until_free()

    # vLLM never takes a whole prompt from its own cache; were a connector asked so, it has nothing to add and waits for nothing.
    request = duo.ask("third", tokens)
    assert duo.decode.connector.get_num_new_matched_tokens(request, len(tokens)) == (0, False)
    duo.decode.abort("third")


def test_12_a_request_that_is_aborted_on_arrival_lets_prefill_go(make_duo: Maker) -> None:
    duo = make_duo(prefill_config={"lease_ttl_ms": 600_000})
    tokens = prompt(80)
    params = duo.prefilled("r", tokens)
    assert duo.prefill.used_blocks() == 3
    duo.decode.add("r", tokens, 4, params, abort_immediately=True)
    duo.until_free()
    assert all("r" not in (one.finished_recving or ()) for one in duo.decode.reported)


def test_13_after_an_abort_in_mid_load_the_blocks_are_held_until_the_load_is_over(duo: Duo) -> None:
    tokens = prompt(80)
    request = duo.ask("r", tokens)
    duo.decode.step()
    duo.decode.abort("r")
    assert request.status == RequestStatus.FINISHED_ABORTED
    assert duo.decode.used_blocks() == 3
    duo.until(lambda: "r" not in duo.decode.scheduler.requests, "the receive to be reported")
    assert sum("r" in (one.finished_recving or ()) for one in duo.decode.reported) == 1
    assert duo.decode.used_blocks() == 0
