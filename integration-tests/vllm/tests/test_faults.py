"""What breaks: the engine that is left survives, the request ends as `kv_load_failure_policy` says, and every block comes back."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.connectors import KvFerry, free_port, new_transfer
from harness.model import OTHER_GEOMETRY, OTHER_WEIGHTS, make, prompt
from harness.pair import Pair, engine, landed, pair
from harness.process import EngineProcess, Handle

SLOW = {"link_gbps": 0.008, "chunk_bytes": 65_536}
"""A megabyte a second, in small pieces: a prompt of 900 tokens (3.7 MB) is caught in the middle."""
LONG = 900
RECEIVED = ("kvferry_transfer_bytes_total", 'side="receive"')
SENT = ("kvferry_transfer_bytes_total", 'side="send"')
POLICIES = ["fail", "recompute"]


@contextmanager
def slow_pair(folder: Path, tiny: Path, policy: str = "fail") -> Iterator[Pair]:
    connector = KvFerry(policy=policy, prefill_config=SLOW | {"lease_ttl_ms": 5000}, decode_config=dict(SLOW))
    with pair(folder, tiny, connector) as both:
        yield both


@pytest.fixture(scope="module")
def slow(folder: Path, tiny: Path) -> Iterator[Pair]:
    with slow_pair(folder, tiny) as both:
        yield both


def ends_as(policy: str, handle: Handle, reference: EngineProcess, tokens: list[int]) -> None:
    """Checks the end of a request whose load failed."""
    answer = handle.answer()
    if policy == "fail":
        assert (answer.reason, answer.tokens) == ("error", [])
    else:
        assert answer.tokens == reference.ask(handle.request, tokens, len(answer.tokens)).tokens


def still_serves(decode: EngineProcess, reference: EngineProcess, seed: int) -> None:
    tokens = prompt(50, seed)
    assert decode.ask(f"after-{seed}", tokens, 8).tokens == reference.ask(f"after-{seed}", tokens, 8).tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_prefill_killed_in_the_middle_of_a_transfer(
    folder: Path, tiny: Path, reference: EngineProcess, policy: str
) -> None:
    with slow_pair(folder, tiny, policy) as both:
        tokens = prompt(LONG, seed=920)
        name, _, params = both.prefilled(tokens)
        decoding = both.decode.start(name, tokens, 8, kv=params)
        both.decode.wait_connector_metric(*RECEIVED, least=1)
        both.prefill.kill()
        ends_as(policy, decoding, reference, tokens)
        assert landed(both.decode, name) is None, "it was killed in the middle"
        both.decode.wait_free()
        still_serves(both.decode, reference, 921)


def test_decode_killed_in_the_middle_leaves_no_block_held_at_prefill(
    folder: Path, tiny: Path, reference: EngineProcess
) -> None:
    with slow_pair(folder, tiny) as both:
        tokens = prompt(LONG, seed=922)
        name, _, params = both.prefilled(tokens)
        both.decode.start(name, tokens, 8, kv=params)
        both.decode.wait_connector_metric(*RECEIVED, least=1)
        assert both.prefill.state()["used_blocks"] > 0
        both.decode.kill()
        both.prefill.wait_free()

        # And prefill serves the next one.
        connector = KvFerry(port=both.connector.port)
        decode = engine(folder, tiny, connector, "decode").wait_ready()
        next_pair = Pair(connector, both.prefill, decode, both.requests)
        tokens = prompt(20, seed=923)
        assert next_pair.hand_over(tokens, 8).tokens == reference.ask("next", tokens, 8).tokens
        next_pair.wait_free()
        decode.close()


def test_an_abort_before_prefill_has_computed_anything(slow: Pair, reference: EngineProcess) -> None:
    tokens, transfer = prompt(LONG, seed=930), new_transfer()
    decoding = slow.decode.start("early", tokens, 8, kv=slow.connector.decode_first_leg(transfer))
    slow.decode.wait_state(lambda state: state["fetching"].get("in_progress") == 1, "the load to wait for its peer")
    decoding.abort()
    slow.decode.wait_free()
    # The router's other leg comes all the same: nobody will take its blocks.
    slow.prefill.ask("early", tokens, 1, kv=slow.connector.prefill_leg(transfer))
    slow.prefill.wait_free()
    still_serves(slow.decode, reference, 931)


def test_an_abort_at_once_after_arrival(slow: Pair, reference: EngineProcess) -> None:
    tokens = prompt(LONG, seed=932)
    name, _, params = slow.prefilled(tokens)
    slow.decode.start(name, tokens, 8, kv=params).abort()
    slow.wait_free()
    still_serves(slow.decode, reference, 933)


def test_an_abort_in_the_middle_of_the_transfer(slow: Pair, reference: EngineProcess) -> None:
    tokens = prompt(LONG, seed=934)
    name, _, params = slow.prefilled(tokens)
    before = slow.decode.connector_metric(*RECEIVED)
    decoding = slow.decode.start(name, tokens, 8, kv=params)
    slow.decode.wait_connector_metric(*RECEIVED, least=before + 1)
    assert slow.decode.state()["fetching"].get("in_progress") == 1, "it was over too early"
    decoding.abort()
    slow.wait_free()
    assert landed(slow.decode, name) is None
    still_serves(slow.decode, reference, 935)


def test_an_abort_after_the_transfer(slow: Pair, reference: EngineProcess) -> None:
    tokens = prompt(64, seed=936)
    name, _, params = slow.prefilled(tokens)
    decoding = slow.decode.start(name, tokens, 1900, kv=params)
    slow.decode.wait(lambda: decoding.first_at is not None, "the first token")
    decoding.abort()
    assert decoding.done is None, "it was finished before the abort"
    slow.wait_free()
    still_serves(slow.decode, reference, 937)


def test_an_abort_at_prefill_while_decode_waits(slow: Pair, reference: EngineProcess) -> None:
    tokens = prompt(LONG, seed=938)
    prefilling, decoding = slow.start_at_once(tokens, 8)
    prefilling.abort()
    answer = decoding.answer()
    # Where the abort came after the prompt was computed there was nothing left to abort.
    if answer.reason == "error":
        assert answer.tokens == []
    else:
        assert answer.tokens == reference.ask("late", tokens, 8).tokens
    slow.wait_free()
    still_serves(slow.decode, reference, 939)


def test_many_aborts_at_any_moment_leave_nothing(slow: Pair, reference: EngineProcess) -> None:
    tokens = prompt(200, seed=940)
    _, _, params = slow.prefilled(tokens)
    for after in range(12):
        name, _, params = slow.prefilled(tokens)
        decoding = slow.decode.start(name, tokens, 4, kv=params)
        # So many steps of the engine, more or less: each call is answered between two of them.
        for _ in range(after * after):
            slow.decode.state()
        decoding.abort()
    slow.wait_free()
    still_serves(slow.decode, reference, 941)


@contextmanager
def decode_for(both: Pair, folder: Path, model: Path, **how: object) -> Iterator[Pair]:
    """Another decode engine for a pair's prefill engine."""
    connector = KvFerry(port=both.connector.port, **how)
    decode = engine(folder, model, connector, "decode").wait_ready()
    yield Pair(connector, both.prefill, decode, both.requests)
    decode.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_wrong_key(ferry: Pair, folder: Path, tiny: Path, reference: EngineProcess, policy: str) -> None:
    with decode_for(ferry, folder, tiny, policy=policy, decode_key="another key, by some mistake") as both:
        tokens = prompt(100, seed=950)
        name, _, params = both.prefilled(tokens)
        ends_as(policy, both.decode.start(name, tokens, 8, kv=params), reference, tokens)
        assert "key" in both.decode.log_tail(400)
        both.decode.wait_free()
        still_serves(both.decode, reference, 951)
    assert ferry.prefill.is_alive()


@pytest.mark.parametrize(("shape", "field"), [(OTHER_GEOMETRY, "kv_heads"), (OTHER_WEIGHTS, "model")])
def test_another_model(ferry: Pair, folder: Path, shape: object, field: str) -> None:
    with decode_for(ferry, folder, make(shape)) as both:
        tokens = prompt(100, seed=952)
        name, _, params = both.prefilled(tokens)
        answer = both.decode.ask(name, tokens, 8, kv=params)
        assert (answer.reason, answer.tokens) == ("error", [])
        assert field in both.decode.log_tail(400)
        both.decode.wait_free()
        # It has its own model's answers all the same.
        assert len(both.decode.ask("own", prompt(40, seed=953), 8).tokens) == 8
    assert ferry.prefill.is_alive()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefill_engine_that_is_not_there(
    ferry: Pair, forgiving: Pair, reference: EngineProcess, policy: str
) -> None:
    both = ferry if policy == "fail" else forgiving
    tokens = prompt(100, seed=954)
    params = both.connector.decode_first_leg(new_transfer(), port=free_port())
    ends_as(policy, both.decode.start(f"nobody-{policy}", tokens, 8, kv=params), reference, tokens)
    both.decode.wait_free()
    still_serves(both.decode, reference, 955)


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "transfer_id": "00" * 16, "remote_host": "prefill.example", "remote_port": 1},
        {"do_remote_prefill": True, "do_remote_decode": True, "transfer_id": "00" * 16},
        {"do_remote_prefill": True, "transfer_id": "00" * 16, "remote_addresses": ["127.0.0.1"]},
        {"do_remote_prefill": "yes", "transfer_id": 7, "remote_addresses": 7, "remote_port": "x"},
    ],
)
def test_params_that_make_no_sense_cost_no_engine(ferry: Pair, reference: EngineProcess, params: dict) -> None:
    tokens = prompt(60, seed=956)
    answer = ferry.decode.ask("nonsense", tokens, 8, kv=params)
    assert answer.reason == "error" or answer.tokens == reference.ask("nonsense", tokens, 8).tokens
    ferry.decode.wait_free()
    still_serves(ferry.decode, reference, 957)


def test_decode_asks_for_a_transfer_that_prefill_never_hears_of(
    folder: Path, tiny: Path, reference: EngineProcess
) -> None:
    connector = KvFerry(decode_config={"progress_deadline_ms": 500, "transfer_deadline_ms": 1000})
    with pair(folder, tiny, connector) as both:
        tokens = prompt(100, seed=958)
        params = connector.decode_first_leg(new_transfer())
        answer = both.decode.ask("orphan", tokens, 8, kv=params)
        assert (answer.reason, answer.tokens) == ("error", [])
        both.wait_free()
        still_serves(both.decode, reference, 959)


def test_prefill_keeps_blocks_for_a_silent_peer_only_as_long_as_the_lease(
    folder: Path, tiny: Path, reference: EngineProcess
) -> None:
    connector = KvFerry(prefill_config={"lease_ttl_ms": 500})
    with pair(folder, tiny, connector) as both:
        tokens = prompt(100, seed=960)
        name, _, params = both.prefilled(tokens)
        both.prefill.wait_free()
        # Whoever comes later is refused, and the engine computes nothing from blocks that have another owner.
        answer = both.decode.ask(name, tokens, 8, kv=params)
        assert (answer.reason, answer.tokens) == ("error", [])
        both.wait_free()
        still_serves(both.prefill, reference, 961)
