"""One bit turned in flight: it is found before the engine computes with it, and the request ends as the policy says."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.connectors import KvFerry
from harness.model import prompt
from harness.pair import Pair, computed, differing, engine, failures, landed
from harness.process import EngineProcess
from harness.proxy import Proxy

FAR_INTO_THE_PAYLOAD = 60_000
"""The control lane carries less, and a prompt of 300 tokens is 1.2 MB in two lanes."""


@contextmanager
def linked(ferry: Pair, folder: Path, tiny: Path, policy: str) -> Iterator[tuple[Pair, Proxy]]:
    """Another decode engine, which knows prefill by the link's address only."""
    proxy = Proxy(ferry.connector.port)
    # By any other way the payload would not pass the link: this is one host, and decode would read prefill's memory.
    connector = KvFerry(policy=policy, port=ferry.connector.port, decode_config={"paths": ["tcp"]})
    decode = engine(folder, tiny, connector, "decode").wait_ready()
    yield Pair(connector, ferry.prefill, decode, ferry.requests), proxy
    decode.close()
    proxy.close()


@pytest.fixture(scope="module")
def failing(ferry: Pair, folder: Path, tiny: Path) -> Iterator[tuple[Pair, Proxy]]:
    with linked(ferry, folder, tiny, "fail") as both:
        yield both


@pytest.fixture(scope="module")
def recomputing(ferry: Pair, folder: Path, tiny: Path) -> Iterator[tuple[Pair, Proxy]]:
    with linked(ferry, folder, tiny, "recompute") as both:
        yield both


def through(proxy: Proxy, params: dict) -> dict:
    """Decode's params with the link in prefill's place."""
    return params | {"remote_port": proxy.port, "remote_addresses": [f"127.0.0.1:{proxy.port}"]}


def check_whole(both: Pair, proxy: Proxy, reference: EngineProcess, seed: int) -> None:
    tokens, carried = prompt(300, seed), proxy.carried
    name, _, params = both.prefilled(tokens)
    answer = both.decode.ask(name, tokens, 16, kv=through(proxy, params))
    assert answer.tokens == reference.ask(name, tokens, 16).tokens
    source, arrived = computed(both.prefill, name), landed(both.decode, name)
    assert source is not None and arrived is not None
    assert differing(source, arrived) == []
    assert proxy.carried > carried + 2 * FAR_INTO_THE_PAYLOAD, "the payload did not go through the link"
    both.wait_free()


def test_a_turned_bit_fails_the_request_where_the_policy_is_fail(
    failing: tuple[Pair, Proxy], reference: EngineProcess
) -> None:
    both, proxy = failing
    check_whole(both, proxy, reference, seed=910)

    tokens = prompt(300, seed=911)
    name, _, params = both.prefilled(tokens)
    proxy.flip(FAR_INTO_THE_PAYLOAD)
    answer = both.decode.ask(name, tokens, 16, kv=through(proxy, params))
    assert proxy.flipped > 0
    assert (answer.reason, answer.tokens) == ("error", [])
    assert landed(both.decode, name) is None, "the engine was given spoilt blocks"
    assert both.decode.connector_metric("kvferry_digest_mismatches_total") >= 1
    both.wait_free()

    proxy.flip(None)
    check_whole(both, proxy, reference, seed=912)


def test_a_turned_bit_costs_time_and_no_token_where_the_policy_is_recompute(
    recomputing: tuple[Pair, Proxy], reference: EngineProcess
) -> None:
    both, proxy = recomputing
    proxy.flip(FAR_INTO_THE_PAYLOAD)
    tokens = prompt(300, seed=913)
    name, _, params = both.prefilled(tokens)
    answer = both.decode.ask(name, tokens, 16, kv=through(proxy, params))
    assert proxy.flipped > 0
    assert answer.tokens == reference.ask(name, tokens, 16).tokens
    assert failures(both.decode) == 1
    assert landed(both.decode, name) is None
    assert both.decode.connector_metric("kvferry_digest_mismatches_total") >= 1
    both.wait_free()
