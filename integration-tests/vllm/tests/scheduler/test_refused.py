"""Legs that do not come to a transfer: rejected by vLLM, refused by the connector, or samples of a request whose prompt is on its way."""

from typing import Any

import pytest
from harness.connectors import new_transfer
from harness.model import prompt
from harness.side import Side
from vllm.v1.engine import FinishReason

from .conftest import Duo, Maker


def loads(side: Side, name: str) -> int:
    """How often the engine was told that a load of the request is over."""
    return sum(name in (one.finished_recving or ()) for one in side.reported)


def refused(side: Side) -> float:
    """Requests whose params made no sense, as vLLM's metrics count them."""
    return side.counted.get("params_refused", 0)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_leg_that_vllm_rejected_lets_prefill_go_though_its_prompt_is_made_up(make_duo: Maker, tp: int) -> None:
    duo = make_duo(prefill_config={"lease_ttl_ms": 600_000}, tp=tp, prefill={"tp": tp}, decode={"tp": tp})
    params = duo.prefilled("r", prompt(80))
    assert duo.prefill.used_blocks() == 3
    # As `notify_kv_transfer_request_rejected` makes it.
    duo.decode.add("r", [0], 1, params, abort_immediately=True)
    duo.until_free()
    assert (loads(duo.decode, "r"), refused(duo.decode)) == (0, 0)


def test_a_rejection_after_the_hand_over_or_in_the_middle_of_it_changes_nothing(make_duo: Maker) -> None:
    duo = make_duo()
    tokens = prompt(80)
    params = duo.prefilled("r", tokens)
    duo.decode.add("r", tokens, 4, params)
    duo.decode.step()
    duo.decode.add("rejected", [0], 1, params, abort_immediately=True)
    duo.until_finished("r")
    assert duo.decode.finished("r").finish_reason == FinishReason.LENGTH
    duo.decode.add("again", [0], 1, params, abort_immediately=True)
    duo.until_free()


@pytest.mark.parametrize("tp", [1, 2])
def test_both_legs_at_one_engine_need_no_hand_over_and_keep_nothing(make_duo: Maker, tp: int) -> None:
    config = {"lease_ttl_ms": 600_000}
    duo = make_duo(prefill_config=config, prefill_role="kv_both", tp=tp, prefill={"tp": tp}, decode={"tp": tp})
    params = duo.prefilled("p", prompt(80))
    assert duo.prefill.used_blocks() == 3
    request = duo.prefill.add("d", prompt(80), 4, params)
    duo.until(lambda: duo.prefill.finished("d") is not None, "the end of the decode leg")
    assert (request.num_output_tokens, loads(duo.prefill, "d"), refused(duo.prefill)) == (4, 0, 0)
    stats = duo.prefill.outputs["d"][0].prefill_stats
    assert stats.num_local_cached_tokens > 0, "the engine's own prefix cache has the prompt"
    duo.until_free()


@pytest.mark.parametrize("tp", [1, 2])
def test_both_legs_at_one_engine_keep_nothing_though_the_prefill_leg_still_waits(make_duo: Maker, tp: int) -> None:
    config = {"lease_ttl_ms": 600_000}
    duo = make_duo(prefill_config=config, prefill_role="kv_both", tp=tp, prefill={"tp": tp}, decode={"tp": tp})
    transfer = new_transfer()
    duo.prefill.add("p", prompt(80), 1, duo.connector.prefill_leg(transfer))
    duo.prefill.add("d", prompt(80), 4, duo.connector.decode_first_leg(transfer))
    duo.until(lambda: duo.prefill.finished("d") is not None, "the end of the decode leg")
    duo.until_free()


def test_samples_of_a_leg_whose_keep_is_spent_offer_nothing(make_duo: Maker) -> None:
    duo = make_duo(prefill={"max_batched_tokens": 48})
    transfer = new_transfer()
    for name in ("0_r", "1_r"):
        duo.prefill.add(name, prompt(120), 1, duo.connector.prefill_leg(transfer))
    duo.prefill.step()
    assert duo.prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    duo.until(lambda: all(duo.prefill.finished(name) for name in ("0_r", "1_r")), "both samples")
    assert [duo.prefill.finished(name).kv_transfer_params for name in ("0_r", "1_r")] == [None, None]
    # A router that tries the leg a second time under the same name is told the same.
    for name in ("0_s", "1_s"):
        duo.prefill.add(name, prompt(120), 1, duo.connector.prefill_leg(transfer))
    duo.until(lambda: all(duo.prefill.finished(name) for name in ("0_s", "1_s")), "both samples")
    assert [duo.prefill.finished(name).kv_transfer_params for name in ("0_s", "1_s")] == [None, None]


def test_a_leg_that_the_connector_refuses_is_computed_and_counted_and_prefill_lets_go(make_duo: Maker) -> None:
    duo = make_duo(prefill_config={"lease_ttl_ms": 600_000})
    params = duo.prefilled("r", prompt(80)) | {"tp_size": "2"}
    request = duo.decode.add("refused", prompt(80), 4, params)
    duo.until_finished("refused")
    assert (request.num_output_tokens, loads(duo.decode, "refused")) == (4, 0)
    duo.until_free()
    assert refused(duo.decode) == 1
    # Who comes with right params is too late, and computes it.
    right = duo.decode.add("right", prompt(80), 4, duo.prefilled("p2", prompt(80)))
    duo.until_finished("right")
    assert right.num_output_tokens == 4


@pytest.mark.parametrize("change", [{"remote_num_tokens": 81}, {}])
def test_a_leg_that_has_another_requests_params_is_computed_and_takes_nothing_from_that_one(
    make_duo: Maker, change: dict[str, Any]
) -> None:
    duo = make_duo(prefill_config={"lease_ttl_ms": 600_000})
    params = duo.prefilled("r", prompt(80))
    # With no change in the params it is another prompt of this length.
    request = duo.decode.add("other", prompt(80, seed=1), 4, params | change)
    duo.until_finished("other")
    assert (request.num_output_tokens, loads(duo.decode, "other"), refused(duo.decode)) == (4, 0, 1)
    assert duo.prefill.used_blocks() == 3
    duo.decode.add("right", prompt(80), 4, params)
    duo.until_finished("right")
    assert loads(duo.decode, "right") == 1
    duo.until_free()


def test_params_without_a_leg_are_counted(duo: Duo) -> None:
    for number, params in enumerate([{"do_remote_prefil": True, "transfer_id": "x"}, {"transfer_id": "x"}, {"ours": 1}, {}]):
        duo.decode.add(f"r{number}", prompt(40), 2, params)
        duo.until_finished(f"r{number}")
    assert refused(duo.decode) == 2


def test_samples_of_one_request_hand_its_prompt_over_once_whichever_ends_last(make_duo: Maker) -> None:
    duo = make_duo(prefill_config={"lease_ttl_ms": 600_000})
    tokens = prompt(80)
    names = [f"{index}_r-1" for index in range(3)]
    for name in names:
        duo.prefill.add(name, tokens, 1, {"do_remote_decode": True})
    duo.until(lambda: all(duo.prefill.finished(name) for name in names), "the samples' ends")
    told = [duo.prefill.finished(name).kv_transfer_params for name in names]
    assert len({(params["transfer_id"], params["remote_prompt"]) for params in told}) == 1
    duo.decode.add("d", tokens, 4, told[2])
    duo.until_finished("d")
    assert loads(duo.decode, "d") == 1
    duo.until_free()
