"""Loads that fail: what the engine is told, what it keeps, and that no block without KV serves anybody.

Of a load of which nothing is good, and before which the engine had nothing, the request is told; of all others the bad blocks. An engine of
an era that does not hear of requests is told bad blocks only, and ends the same way.
"""

from typing import Any

import pytest
from harness.connectors import free_port
from harness.model import prompt
from harness.side import Side
from vllm.v1.engine import FinishReason

from kvferry.vllm import eras

from .conftest import Duo, Maker

BLOCK = 32
LENGTH = 150
"""Five blocks, the last of them in part."""
POLICIES = ["recompute", "fail"]


def told(side: Side) -> tuple[set[str], set[int]]:
    """The requests and the blocks that the engine was told of as failed."""
    failed = set().union(*(one.failed_recving for one in side.reported))
    return failed, set().union(*(one.invalid_block_ids for one in side.reported))


def begin_late(duo: Duo, tokens: list[int]) -> list[int]:
    """A load that is refused, since its peer has let go already; returns the blocks that it was to fill."""
    params = duo.prefilled("r", tokens)
    duo.until(lambda: duo.prefill.used_blocks() == 0, "the lease to end")
    duo.decode.add("r", tokens, 4, params)
    duo.decode.step()
    return duo.decode.blocks("r")


def check_end(duo: Duo, policy: str, tokens: list[int], kept: int) -> None:
    """The request ends as the policy says, and the next one with its text finds `kept` tokens of it where it failed."""
    duo.until_finished("r")
    finished = duo.decode.finished("r")
    assert surfaced(duo.decode) == 1
    if policy == "fail":
        assert (finished.finish_reason, duo.decode.requests["r"].num_output_tokens) == (FinishReason.ERROR, 0)
    else:
        assert (finished.finish_reason, duo.decode.requests["r"].num_output_tokens) == (FinishReason.LENGTH, 4)
    duo.until_free()
    assert duo.decode.stages() == {}

    again = duo.decode.add("again", tokens, 4, None)
    duo.decode.step()
    # What was recomputed is in the prefix cache, all but the block that the prompt does not fill.
    assert duo.decode.local_hit("again") == (kept if policy == "fail" else LENGTH // BLOCK * BLOCK)
    assert duo.decode.wrong_tokens("again", LENGTH) == []
    duo.until_finished("again")
    assert list(again.output_token_ids) == list(duo.decode.requests["r"].output_token_ids) or policy == "fail"
    duo.until_free()


def surfaced(side: Side) -> int:
    """How often the engine was told that the load is over."""
    return sum("r" in (one.finished_recving or ()) for one in side.reported)


@pytest.mark.parametrize("by_request", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_of_a_load_of_which_nothing_is_good_the_request_is_told(
    make_duo: Maker, monkeypatch: pytest.MonkeyPatch, policy: str, by_request: bool
) -> None:
    monkeypatch.setattr(eras, "REQUEST_FAILURES", by_request)
    duo = make_duo(policy=policy, prefill_config={"lease_ttl_ms": 300})
    tokens = prompt(LENGTH)
    blocks = begin_late(duo, tokens)
    check_end(duo, policy, tokens, kept=0)
    assert told(duo.decode) == (({"r"}, set()) if by_request else (set(), set(blocks)))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefix_that_the_engine_has_itself_is_kept_in_its_place(make_duo: Maker, policy: str) -> None:
    duo = make_duo(policy=policy, prefill_config={"lease_ttl_ms": 300})
    tokens = prompt(LENGTH)
    duo.decode.add("warm", tokens[:65], 1, None)
    duo.until_finished("warm")
    blocks = begin_late(duo, tokens)
    assert duo.decode.local_hit("r") == 64
    if policy == "recompute":
        duo.until(lambda: "r" in duo.decode.scheduler.finished_recving_kv_req_ids, "the failure")
        assert duo.decode.requests["r"].num_computed_tokens == 64
        duo.decode.step()
        assert duo.decode.blocks("r")[:2] == blocks[:2]
        assert duo.decode.wrong_tokens("r", LENGTH) == []
    check_end(duo, policy, tokens, kept=64)
    assert told(duo.decode) == (set(), set(blocks[2:]))


@pytest.mark.parametrize("policy", POLICIES)
def test_where_one_rank_got_nothing_the_request_is_told_once_when_all_ranks_are_through(
    make_duo: Maker, policy: str
) -> None:
    ranks: dict[str, Any] = {"tp": 2, "prefill": {"tp": 2}, "decode": {"tp": 2}}
    # The rank of prefill that nobody reaches lets go by itself.
    duo = make_duo(
        policy=policy, prefill_config={"lease_ttl_ms": 3000}, decode_config={"absent_deadline_ms": 500}, **ranks
    )
    tokens = prompt(LENGTH)
    params = duo.prefilled("r", tokens)
    addresses = [params["remote_addresses"][0], f"127.0.0.1:{free_port()}"]
    duo.decode.add("r", tokens, 4, params | {"remote_addresses": addresses})
    check_end(duo, policy, tokens, kept=0)
    assert told(duo.decode)[0] == {"r"}
    assert sum("r" in one.failed_recving for one in duo.decode.reported) == 1
