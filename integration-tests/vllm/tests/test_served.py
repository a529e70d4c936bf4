"""Engines as users start them: AsyncLLM in front, the engine core and the worker in processes of their own.

Here the two halves of the connector live in different processes, so what crosses between them is pickled.
"""

from pathlib import Path

from harness.connectors import KvFerry
from harness.model import prompt
from harness.pair import computed, differing, landed, pair
from harness.process import EngineProcess


def test_hand_overs_an_abort_and_a_rejection_between_engines_of_three_processes_each(
    folder: Path, tiny: Path, reference: EngineProcess
) -> None:
    with pair(folder, tiny, KvFerry(prefill_config={"lease_ttl_ms": 600_000}), served=True) as both:
        for length in (31, 32, 33, 64, 200):
            tokens = prompt(length, seed=length)
            for order, hand_over in (("first", both.hand_over), ("at-once", both.hand_over_at_once)):
                name = f"{order}-{length}"
                answer = hand_over(tokens, 12, name)
                assert answer.tokens == reference.ask(name, tokens, 12).tokens, name
                source, arrived = computed(both.prefill, name), landed(both.decode, name)
                assert source is not None and arrived is not None
                assert differing(source, arrived) == []

        tokens = prompt(64, seed=990)
        name, _, params = both.prefilled(tokens)
        decoding = both.decode.start(name, tokens, 1900, kv=params)
        both.decode.wait(lambda: decoding.first_at is not None, "the first token")
        decoding.abort()

        # A leg that decode's server rejected: nothing but its word ends prefill's lease in time.
        tokens = prompt(64, seed=991)
        name, _, params = both.prefilled(tokens)
        assert params is not None
        both.decode.call("reject", request=name, kv=params)

        # vLLM's gauge is as new as its last step, so each look comes after one more request.
        for engine in (both.prefill, both.decode):

            def free(engine: EngineProcess = engine) -> bool:
                engine.ask(f"look-{engine.spec.name}-{next(both.requests)}", prompt(5), 2)
                return engine.state()["usage"] == 0.0

            engine.wait_true(free, "vLLM's gauge of used blocks to be zero")
        assert "kv_transfer_params of request" not in both.decode.log_tail(2000), "nobody sent what was rejected"
