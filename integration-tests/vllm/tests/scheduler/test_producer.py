"""Prefill's side of a request's life, under vLLM's own scheduler. Behaviours 14 to 19 of the connector contract."""

import pytest
from harness.connectors import new_transfer
from harness.model import prompt
from vllm.v1.engine import FinishReason

from .conftest import Duo, Maker


def references(duo: Duo, name: str) -> list[int]:
    return [duo.prefill.pool().blocks[block].ref_cnt for block in duo.prefill.blocks(name)]


@pytest.mark.parametrize("how", ["length", "stop"])
def test_14_a_finished_prompt_keeps_its_blocks_until_they_are_sent(duo: Duo, how: str) -> None:
    tokens = prompt(80)
    # What stands in for the model samples a token that the text decides.
    stop = [10 + sum(tokens[-8:]) % 2000] if how == "stop" else None
    duo.prefill_now("r", tokens, stop=stop)
    duo.prefill.step()
    output = duo.prefill.finished("r")
    assert output.finish_reason == (FinishReason.LENGTH if how == "length" else FinishReason.STOP)
    params = output.kv_transfer_params
    assert (params["do_remote_prefill"], params["do_remote_decode"], params["remote_num_tokens"]) == (True, False, 80)
    for _ in range(5):
        duo.prefill.step()
    assert references(duo, "r") == [1, 1, 1]

    duo.decode.add("r", tokens, 4, params)
    duo.until_loaded("r")
    assert duo.decode.wrong_tokens("r", 80) == []
    duo.until_finished("r")
    duo.until_free()
    assert sum("r" in (one.finished_sending or ()) for one in duo.prefill.reported) == 1


def test_15_a_prompt_shorter_than_a_block_is_one_partial_block(duo: Duo) -> None:
    tokens = prompt(7)
    params = duo.prefilled("r", tokens)
    assert references(duo, "r") == [1]
    request = duo.decode.add("r", tokens, 4, params)
    duo.until_loaded("r")
    assert request.num_computed_tokens == 7
    assert duo.decode.wrong_tokens("r", 7) == []
    duo.until_finished("r")
    duo.until_free()


def test_16_blocks_that_prefill_had_in_its_cache_are_exported_like_those_it_computed(duo: Duo) -> None:
    begun = prompt(64)
    duo.prefill.add("before", begun, 1, None)
    duo.until(lambda: duo.prefill.finished("before") is not None, "the prefix to be computed")
    tokens = begun + prompt(20, seed=1)
    params = duo.prefilled("r", tokens)
    assert duo.prefill.local_hit("r") == 64
    request = duo.decode.add("r", tokens, 4, params)
    duo.until_loaded("r")
    assert request.num_computed_tokens == 84
    assert duo.decode.wrong_tokens("r", 84) == []
    duo.until_finished("r")
    duo.until_free()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("is_kept", [False, True])
def test_16b_blocks_that_another_request_of_the_step_computes_are_exported_after_it(make_duo: Maker, tp: int, is_kept: bool) -> None:
    duo = make_duo(tp=tp, prefill={"tp": tp}, decode={"tp": tp})
    duo.hand_over("first", prompt(40, seed=9))
    system = prompt(96)
    tokens = system + prompt(30, seed=1)
    request = duo.ask("r", tokens)
    for _ in range(20):
        duo.decode.step()
    # vLLM finds the blocks of "other" by their hashes as soon as it has scheduled them.
    if is_kept:
        duo.prefill_now("other", system + prompt(30, seed=2))
    else:
        duo.prefill.add("other", system + prompt(30, seed=2), 1, None)
    duo.prefill_now("r", tokens)
    duo.until_loaded("r")
    assert request.num_computed_tokens == 126
    assert duo.decode.wrong_tokens("r", 126) == []
    duo.until_finished("r")
    local = duo.decode.add("local", system + prompt(50, seed=3), 3, None)
    duo.decode.step()
    assert duo.decode.local_hit("local") == 96 and duo.decode.wrong_tokens("local", 96) == []
    duo.until_finished("local")
    assert local.num_output_tokens == 3
    if is_kept:
        duo.decode.add("other", system + prompt(30, seed=2), 1, duo.prefill.finished("other").kv_transfer_params)
    duo.until_free()
    assert duo.decode.counted.get("digest_mismatches", 0) == 0


def test_17a_an_abort_after_the_end_does_not_free_what_is_not_sent(duo: Duo) -> None:
    tokens = prompt(80)
    params = duo.prefilled("r", tokens)
    duo.prefill.abort("r")
    for _ in range(5):
        duo.prefill.step()
    assert duo.prefill.used_blocks() == 3
    duo.decode.add("r", tokens, 4, params)
    duo.until_loaded("r")
    assert duo.decode.wrong_tokens("r", 80) == []
    duo.until_finished("r")
    duo.until_free()


def test_17b_an_abort_before_the_end_frees_and_returns_no_params(make_duo: Maker) -> None:
    # No deadline can end it within the test: it is the abort that does.
    duo = make_duo(
        prefill={"max_batched_tokens": 32},
        prefill_config=dict.fromkeys(
            ["lease_ttl_ms", "absent_deadline_ms", "transfer_deadline_ms", "verdict_timeout_ms"], 600_000
        ),
    )
    duo.prefill_now("r", prompt(80))
    duo.prefill.step()
    assert duo.prefill.used_blocks() > 0
    duo.prefill.abort("r")
    duo.until_free()
    assert duo.prefill.finished("r") is None
    assert all(output.kv_transfer_params is None for output in duo.prefill.outputs["r"])


def test_18_blocks_that_nobody_fetches_come_back_and_a_late_consumer_is_refused(make_duo: Maker) -> None:
    # It is prefill's word that ends the late load, not a deadline of decode's.
    patient = {"transfer_deadline_ms": 600_000, "progress_deadline_ms": 600_000, "absent_deadline_ms": 600_000}
    duo = make_duo(prefill_config={"lease_ttl_ms": 300}, decode_config=patient)
    tokens = prompt(80)
    params = duo.prefilled("r", tokens)
    duo.until_free()
    assert sum("r" in (one.finished_sending or ()) for one in duo.prefill.reported) == 1

    duo.decode.add("r", tokens, 4, params)
    duo.until_finished("r")
    assert duo.decode.finished("r").finish_reason == FinishReason.ERROR
    duo.until_free()


def test_19_decode_is_told_how_much_prefill_had_in_its_cache(duo: Duo) -> None:
    tokens = prompt(80)
    assert duo.prefilled("first", tokens)["remote_prefill_cached_tokens"] == 0
    assert duo.prefilled("second", tokens)["remote_prefill_cached_tokens"] == 64


def test_a_prompt_that_its_peer_named_is_handed_over_while_it_is_computed(make_duo: Maker) -> None:
    """Decode first: chunk by chunk, and the last one with the end."""
    duo = make_duo(prefill={"max_batched_tokens": 32})
    tokens = prompt(150)
    transfer = new_transfer()
    duo.ask("r", tokens, transfer=transfer)
    duo.prefill_now("r", tokens)
    duo.until_loaded("r")
    assert duo.decode.wrong_tokens("r", 150) == []
    duo.until_finished("r")
    duo.until_free()
