"""One bit turned in flight: it is found before the engine computes with it, and the request ends as the policy says."""

from harness.model import prompt
from harness.pair import Pair, bad_blocks, computed, differing, landed
from harness.process import EngineProcess
from harness.proxy import Proxy

FAR_INTO_THE_PAYLOAD = 60_000
"""The control lane never carries as much, and a prompt of 300 tokens is 1.2 MB."""


def through(proxy: Proxy, params: dict) -> dict:
    """Decode's params with the proxy in prefill's place."""
    return params | {"remote_port": proxy.port, "remote_addresses": [f"127.0.0.1:{proxy.port}"]}


def test_a_link_that_spoils_nothing_changes_nothing(ferry: Pair, reference: EngineProcess) -> None:
    proxy = Proxy(ferry.connector.port)
    tokens = prompt(300, seed=910)
    name, _, params = ferry.prefilled(tokens)
    answer = ferry.decode.ask(name, tokens, 16, kv=through(proxy, params))
    assert answer.tokens == reference.ask(name, tokens, 16).tokens
    source, arrived = computed(ferry.prefill, name), landed(ferry.decode, name)
    assert source is not None and arrived is not None
    assert differing(source, arrived) == []
    assert proxy.carried > FAR_INTO_THE_PAYLOAD, "the payload did not go through the link"
    proxy.close()
    ferry.wait_free()


def test_a_turned_bit_fails_the_request_where_the_policy_is_fail(ferry: Pair) -> None:
    proxy = Proxy(ferry.connector.port, flip_at=FAR_INTO_THE_PAYLOAD)
    tokens = prompt(300, seed=911)
    name, _, params = ferry.prefilled(tokens)
    answer = ferry.decode.ask(name, tokens, 16, kv=through(proxy, params))
    assert proxy.flipped > 0
    assert (answer.reason, answer.tokens) == ("error", [])
    assert landed(ferry.decode, name) is None, "the engine was given spoilt blocks"
    assert ferry.decode.connector_metric("kvferry_digest_mismatches_total") >= 1
    proxy.close()
    ferry.wait_free()


def test_a_turned_bit_costs_time_and_no_token_where_the_policy_is_recompute(
    forgiving: Pair, reference: EngineProcess
) -> None:
    proxy = Proxy(forgiving.connector.port, flip_at=FAR_INTO_THE_PAYLOAD)
    tokens = prompt(300, seed=912)
    name, _, params = forgiving.prefilled(tokens)
    answer = forgiving.decode.ask(name, tokens, 16, kv=through(proxy, params))
    assert proxy.flipped > 0
    assert answer.tokens == reference.ask(name, tokens, 16).tokens
    assert bad_blocks(forgiving.decode) > 0
    assert landed(forgiving.decode, name) is None
    assert forgiving.decode.connector_metric("kvferry_digest_mismatches_total") >= 1
    proxy.close()
    forgiving.wait_free()
