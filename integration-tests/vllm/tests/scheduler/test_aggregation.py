"""Several workers' reports, and loads that fail. Behaviours 28 to 33 of the connector contract."""

import functools
import logging
from typing import Any

import pytest
from harness.model import prompt
from harness.proxy import Proxy
from harness.side import Side
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from .conftest import Duo, Maker
from .test_worker_step import received

WAITING = RequestStatus.WAITING_FOR_REMOTE_KVS
TP2: dict[str, Any] = {"tp": 2, "prefill": {"tp": 2}, "decode": {"tp": 2}}


class Withheld:
    """Keeps one worker's word back for some steps, as a worker that is behind the others would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, worker: Any) -> None:
        self.open = False
        self.words: list[Any] = []
        self.received: set[str] = set()
        build, results_of = worker.build_connector_worker_meta, worker.get_transfer_results

        def build_late() -> Any:
            if (word := build()) is not None:
                self.words.append(word)
            if not self.open or not self.words:
                return None
            spoken, self.words = self.words, []
            return functools.reduce(lambda first, second: first.aggregate(second), spoken)

        def results_late(finished_req_ids: set[str]) -> Any:
            results = results_of(finished_req_ids)
            self.received |= results.finished_recving
            results.finished_recving = set()
            if self.open:
                results.finished_recving, self.received = self.received, set()
            return results

        monkeypatch.setattr(worker, "build_connector_worker_meta", build_late)
        monkeypatch.setattr(worker, "get_transfer_results", results_late)


def surfaced(side: Side, kind: str, name: str) -> int:
    """How often the engine was told of a request's end of this kind."""
    return sum(name in (getattr(one, kind) or ()) for one in side.reported)


@pytest.mark.parametrize("late", [0, 1])
def test_28_a_load_surfaces_once_and_only_when_every_worker_has_spoken(
    make_duo: Maker, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    duo = make_duo(**TP2)
    withheld = Withheld(monkeypatch, duo.decode.workers[late])
    tokens = prompt(80)
    duo.ask("r", tokens)
    duo.prefill_now("r", tokens)
    duo.until(lambda: "r" in withheld.received, "the late worker to have its load")
    for _ in range(20):
        duo.prefill.step()
        duo.decode.step()
    assert surfaced(duo.decode, "finished_recving", "r") == 0
    withheld.open = True
    duo.until_loaded("r")
    assert duo.decode.wrong_tokens("r", 80) == []
    duo.until_finished("r")
    duo.until_free()
    assert surfaced(duo.decode, "finished_recving", "r") == 1


def test_28b_a_send_surfaces_once_and_only_when_every_worker_has_spoken(
    make_duo: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    duo = make_duo(**TP2)
    tokens = prompt(80)
    params = duo.prefilled("r", tokens)
    withheld = Withheld(monkeypatch, duo.prefill.workers[1])
    duo.decode.add("r", tokens, 4, params)
    duo.until_finished("r")
    duo.until(lambda: bool(withheld.words), "the send to be over")
    for _ in range(20):
        duo.prefill.step()
    assert surfaced(duo.prefill, "finished_sending", "r") == 0
    assert duo.prefill.used_blocks() == 3
    withheld.open = True
    duo.until_free()
    assert surfaced(duo.prefill, "finished_sending", "r") == 1


def test_29_one_workers_bad_block_is_the_requests_bad_block(make_duo: Maker) -> None:
    # By any other way the payload would not pass the link.
    duo = make_duo(policy="recompute", decode_config={"paths": ["tcp"]}, **TP2)
    tokens = prompt(300)
    params = duo.prefilled("r", tokens)
    first, second = params["remote_addresses"]
    proxy = Proxy(int(second.rpartition(":")[2]), flip_at=100_000)
    duo.decode.add("r", tokens, 4, params | {"remote_addresses": [first, f"127.0.0.1:{proxy.port}"]})
    duo.until_finished("r")
    assert proxy.flipped > 0
    assert surfaced(duo.decode, "finished_recving", "r") == 1
    bad = set().union(*(one.invalid_block_ids for one in duo.decode.reported))
    failed = set().union(*(one.failed_recving for one in duo.decode.reported))
    assert bad or failed == {"r"}
    duo.until_free()
    proxy.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_30_the_number_of_expected_reports_is_the_number_of_workers(make_duo: Maker, tp: int) -> None:
    duo = make_duo(tp=tp, prefill={"tp": tp}, decode={"tp": tp})
    duo.hand_over("r", prompt(80))
    duo.until_free()
    for side in (duo.prefill, duo.decode):
        assert side.connector.get_finished_count() in (None, tp)
        assert {one.expected_finished_count for one in side.reported} <= {0, tp}


def test_31_what_workers_said_is_taken_once_however_often_it_comes(
    duo: Duo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Duplicates and late reports, forced: none may reach the engine, whose asserts would end it."""
    words: dict[Side, list[Any]] = {duo.prefill: [], duo.decode: []}
    for side, kept in words.items():
        real = side.connector.update_connector_output

        def take(output: KVConnectorOutput, real=real, kept=kept) -> None:
            if output.kv_connector_worker_meta is not None:
                kept.append(output.kv_connector_worker_meta)
            real(output)

        monkeypatch.setattr(side.connector, "update_connector_output", take)

    def say_again() -> None:
        for side, kept in words.items():
            for word in list(kept):
                side.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(kv_connector_worker_meta=word))

    for round_ in range(3):
        tokens = prompt(80, seed=round_)
        name = f"r{round_}"
        duo.ask(name, tokens)
        duo.prefill_now(name, tokens)
        say_again()
        duo.until_loaded(name)
        say_again()
        assert duo.decode.wrong_tokens(name, 80) == []
        duo.until_finished(name)
        say_again()
        duo.until_free()
        say_again()
    for kept in words.values():
        assert kept, "no worker said anything, so nothing was said twice"
    for side, kind in ((duo.decode, "finished_recving"), (duo.prefill, "finished_sending")):
        for round_ in range(3):
            assert surfaced(side, kind, f"r{round_}") == 1


class CutOff:
    """A load of 900 tokens that ends when most of it has arrived: its peer is gone."""

    TOKENS = 900

    def __init__(self, make_duo: Maker, policy: str) -> None:
        self.duo = make_duo(
            policy=policy,
            prefill_config={"link_gbps": 0.02, "chunk_bytes": 65_536, "absent_deadline_ms": 2000},
            # By any other way than TCP the payload would not pass the link.
            decode_config={"absent_deadline_ms": 1000, "paths": ["tcp"]},
            decode={"blocks": 64},
            prefill={"blocks": 64},
        )
        self.text = prompt(self.TOKENS)
        params = self.duo.prefilled("r", self.text)
        proxy = Proxy(self.duo.connector.port)
        params |= {"remote_port": proxy.port, "remote_addresses": [f"127.0.0.1:{proxy.port}"]}
        self.request = self.duo.decode.add("r", self.text, 4, params)
        page_bytes = sum(cache[0].nbytes for cache in self.duo.decode.caches[0].values())
        most = 0.75 * page_bytes * self.TOKENS / 32
        self.duo.until(lambda: received(self.duo.decode) > most, "most of the blocks")
        proxy.close()


def test_32_after_a_failed_load_only_the_good_prefix_counts_and_is_cached(make_duo: Maker) -> None:
    cut = CutOff(make_duo, "recompute")
    duo, request = cut.duo, cut.request
    assert request.status == WAITING
    blocks = duo.decode.blocks("r")
    duo.until_loaded("r")
    bad = set().union(*(one.invalid_block_ids for one in duo.decode.reported))
    good = min(blocks.index(block) for block in bad)
    assert 0 < good < len(blocks)
    assert (request.status, request.num_computed_tokens) == (WAITING, good * 32)
    assert duo.decode.wrong_tokens("r", good * 32) == []
    duo.decode.step()
    assert duo.decode.blocks("r")[:good] == blocks[:good]
    assert duo.decode.wrong_tokens("r", cut.TOKENS) == []
    assert surfaced(duo.decode, "finished_recving", "r") == 1
    duo.until_finished("r")
    duo.until_free()


def test_33_where_the_policy_is_fail_the_request_ends_and_its_blocks_serve_nobody(make_duo: Maker) -> None:
    cut = CutOff(make_duo, "fail")
    duo = cut.duo
    duo.until_finished("r")
    assert duo.decode.finished("r").finish_reason == FinishReason.ERROR
    duo.until_free()
    duo.decode.add("again", cut.text, 4, None)
    duo.until_finished("again")
    assert duo.decode.local_hit("again") == 0
    assert duo.decode.finished("again").finish_reason == FinishReason.LENGTH
    duo.until_free()


@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1)])
def test_sizes_may_differ_where_the_prefill_leg_names_decodes(
    make_duo: Maker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ours: int, theirs: int
) -> None:
    # What is offered to nobody ends with its lease.
    duo = make_duo(prefill={"tp": ours}, decode={"tp": theirs}, prefill_config={"lease_ttl_ms": 3000})
    # vLLM's loggers need not propagate to the root's.
    monkeypatch.setattr(logging.getLogger("vllm.kvferry"), "handlers", [caplog.handler])
    for seed, (said, reason) in enumerate([({}, FinishReason.ERROR), ({"tp_size": theirs}, FinishReason.LENGTH)]):
        name, tokens = f"r{seed}", prompt(80, seed)
        duo.prefill.add(name, tokens, 1, {"do_remote_decode": True} | said)
        duo.until(lambda: duo.prefill.finished(name) is not None, "prefill's end")
        duo.decode.add(name, tokens, 4, duo.prefill.finished(name).kv_transfer_params)
        duo.until_finished(name)
        assert duo.decode.finished(name).finish_reason == reason
        assert f'`"tp_size": {theirs}` in vLLM\'s kv_transfer_params' in caplog.text
    duo.until_free()
