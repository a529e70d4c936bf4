"""What the worker's half does in a step. Behaviours 20 to 25 of the connector contract."""

import socket

import pytest
from harness.connectors import free_port, new_transfer
from harness.model import prompt
from harness.proxy import Proxy
from harness.side import Side
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from .conftest import Duo, Maker

WAITING = RequestStatus.WAITING_FOR_REMOTE_KVS


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch):
    """Notes the names of an object's calls, in order."""

    def watch(watched: object, *names: str) -> list[str]:
        seen: list[str] = []
        for name in names:
            real = getattr(watched, name)

            def noted(*arguments, _real=real, _name=name, **named):
                seen.append(_name)
                return _real(*arguments, **named)

            monkeypatch.setattr(watched, name, noted)
        return seen

    return watch


def loads_failed(side: Side, name: str) -> int:
    """How often the load of a request was reported as ended."""
    return sum(name in (one.finished_recving or ()) for one in side.reported)


def test_20_a_step_without_a_forward_binds_once_waits_for_saves_once_and_clears_once(duo: Duo, calls) -> None:
    duo.ask("r", prompt(80))
    seen = calls(duo.decode.workers[0], "bind_connector_metadata", "start_load_kv", "wait_for_save", "clear_connector_metadata")
    assert duo.decode.step().total_num_scheduled_tokens == 0
    assert seen == ["bind_connector_metadata", "start_load_kv", "wait_for_save", "clear_connector_metadata"]
    assert not duo.decode.workers[0].has_connector_metadata()


def test_21a_a_load_does_not_wait_for_the_handshake(make_duo: Maker) -> None:
    """The peer takes the connection and says nothing: the engine computes on, and then the load ends."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        duo = make_duo(port=mute.getsockname()[1], prefill_config={"listen": "127.0.0.1:0"}, decode_config={"absent_deadline_ms": 2000})
        request = duo.ask("remote", prompt(80))
        local = duo.decode.add("local", prompt(40, seed=1), 10, None)
        for _ in range(10):
            duo.decode.step()
        assert (local.num_output_tokens, request.status) == (10, WAITING)
        duo.until_finished("remote")
        assert duo.decode.finished("remote").finish_reason == FinishReason.ERROR
        duo.until_free()


def test_21b_loads_from_one_peer_share_its_session(make_duo: Maker) -> None:
    # The lanes are counted, so they must pass the link.
    duo = make_duo(decode_config={"paths": ["tcp"]})
    proxy = Proxy(duo.connector.port)
    names = [f"r{index}" for index in range(6)]
    for index, name in enumerate(names):
        tokens, transfer = prompt(70, seed=index), new_transfer()
        duo.transfers[name] = transfer
        duo.decode.add(name, tokens, 1, duo.connector.decode_first_leg(transfer, proxy.port))
    # All at once in one step, before there is a session.
    duo.decode.step()
    assert {duo.decode.requests[name].status for name in names} == {WAITING}
    for index, name in enumerate(names):
        duo.prefill_now(name, prompt(70, seed=index))
    for name in names:
        duo.until_finished(name)
    duo.until_free()
    # One control connection and the lanes of one host.
    assert proxy.connections <= 3
    proxy.close()


def test_22_the_same_request_id_can_load_again_and_again(duo: Duo) -> None:
    for round_ in range(5):
        tokens = prompt(80, seed=round_)
        duo.ask("again", tokens)
        duo.prefill_now("again", tokens)
        duo.until_loaded("again")
        assert duo.decode.wrong_tokens("again", 80) == []
        duo.until_finished("again")
        duo.until_free()
    assert loads_failed(duo.decode, "again") == 5


def test_23_after_a_load_was_reported_nothing_of_it_touches_the_blocks(make_duo: Maker) -> None:
    duo = make_duo(prefill_config={"link_gbps": 0.02})
    tokens = prompt(900)
    params = duo.prefilled("r", tokens)
    duo.decode.add("r", tokens, 4, params)
    duo.until(lambda: "r" in duo.decode.scheduler.requests and received(duo.decode) > 0, "some bytes")
    duo.decode.abort("r")
    duo.until(lambda: "r" not in duo.decode.scheduler.requests, "the receive to be reported")
    # The blocks have a new owner.
    for cache in duo.decode.caches[0].values():
        cache.fill_(7.0)
    duo.until_free()
    for cache in duo.decode.caches[0].values():
        assert bool((cache == 7.0).all())


def test_24_a_receive_that_nobody_waits_for_is_not_reported(make_duo: Maker) -> None:
    duo = make_duo(prefill_config={"lease_ttl_ms": 600_000})
    tokens = prompt(80)
    for name, port in (("answered", duo.connector.port), ("unanswered", free_port())):
        params = duo.prefilled(name, tokens) if name == "answered" else duo.connector.decode_first_leg(new_transfer(), port)
        duo.decode.add(name, tokens, 4, params, abort_immediately=True)
        duo.until_free()
        assert loads_failed(duo.decode, name) == 0


@pytest.mark.parametrize("reason", ["nobody listens", "another key", "unknown transfer"])
def test_25_a_load_that_cannot_begin_is_reported_once_with_all_its_blocks(
    make_duo: Maker, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    quick = {"absent_deadline_ms": 1000, "progress_deadline_ms": 1000, "transfer_deadline_ms": 3000}
    duo = make_duo(decode_config=quick)
    port = free_port() if reason == "nobody listens" else duo.connector.port
    if reason == "another key":
        monkeypatch.setenv("KVFERRY_PSK", "another key, by some mistake")
        duo = make_duo(port=port, prefill_config={"listen": "127.0.0.1:0"}, decode_config=quick)
    tokens = prompt(80)
    duo.decode.add("r", tokens, 4, duo.connector.decode_first_leg(new_transfer(), port))
    duo.decode.step()
    blocks = set(duo.decode.blocks("r"))
    duo.until_finished("r")
    assert duo.decode.finished("r").finish_reason == FinishReason.ERROR
    assert loads_failed(duo.decode, "r") == 1
    bad = set().union(*(one.invalid_block_ids for one in duo.decode.reported))
    failed = set().union(*(one.failed_recving for one in duo.decode.reported))
    assert bad == blocks or failed == {"r"}
    duo.until_free()


def received(side: Side, rank: int = 0) -> float:
    """Payload bytes that this worker took so far."""
    total = 0.0
    for line in side.workers[rank].worker.metrics().splitlines():
        if line.startswith("kvferry_transfer_bytes_total") and 'side="receive"' in line:
            total += float(line.rpartition(" ")[2])
    return total
