"""Prefill and decode as two processes of vLLM: the bytes that arrive, and the tokens that come of them."""

from pathlib import Path

import pytest
from harness.connectors import Connector, KvFerry
from harness.margins import difference, noise, unit
from harness.model import prompt
from harness.pair import Pair, computed, differing, engine, landed, pair
from harness.process import Answer, EngineProcess

BLOCK = 32
AROUND_BLOCKS = [1, 2, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 255, 256, 257]
LONG = [500, 1000, 1537]
ANSWER = 16
ORDERS = {"prefill first": 10_000, "decode first": 20_000}


def check_hand_over(both: Pair, reference: EngineProcess, length: int, order: str) -> None:
    # Texts of their own, so that neither engine has a part of them in its cache.
    tokens, name = prompt(length, seed=length + ORDERS[order]), f"{order}-{length}"
    hand_over = both.hand_over if order == "prefill first" else both.hand_over_at_once
    answer = hand_over(tokens, ANSWER, name)
    wanted = reference.ask(name, tokens, ANSWER)

    source, arrived = computed(both.prefill, name), landed(both.decode, name)
    assert source is not None and arrived is not None, "the blocks were not transferred"
    blocks = -(-length // BLOCK)
    assert (arrived.start, {len(pages) for pages in arrived.pages.values()}) == (0, {blocks})
    assert differing(source, arrived) == []
    assert answer.tokens == wanted.tokens


@pytest.mark.parametrize("order", ORDERS)
def test_bytes_and_tokens_are_the_same_around_every_block_boundary(
    ferry: Pair, reference: EngineProcess, order: str
) -> None:
    for length in AROUND_BLOCKS:
        check_hand_over(ferry, reference, length, order)
    ferry.wait_free()


@pytest.mark.full
@pytest.mark.parametrize("order", ORDERS)
def test_bytes_and_tokens_are_the_same_for_long_prompts(ferry: Pair, reference: EngineProcess, order: str) -> None:
    for length in LONG:
        check_hand_over(ferry, reference, length, order)
    ferry.wait_free()


def lent_and_sent(prefill: EngineProcess) -> tuple[float, float]:
    """Bytes that decode read out of this engine's memory itself, and all that were sent."""
    lent = prefill.connector_metric("kvferry_lent_bytes_total")
    return lent, prefill.connector_metric("kvferry_transfer_bytes_total", 'side="send"')


def way_told(engine: EngineProcess) -> str:
    """What the log says of the way of an engine's only session."""
    [told] = [line for line in engine.log_tail(2000).splitlines() if "payload's way" in line]
    return told


def test_on_one_host_decode_reads_the_blocks_out_of_prefills_own_tensors(ferry: Pair, reference: EngineProcess) -> None:
    # The first one waits until decode has seen that it can read prefill's memory.
    check_hand_over(ferry, reference, 290, "prefill first")
    # vLLM's tensors have no file that another process could map.
    assert 'path="shm for memory files, cma for other memory" not="none"' in way_told(ferry.decode)
    if "cannot be read" in (log := ferry.decode.log_tail(2000)):
        pytest.skip(next(line for line in log.splitlines() if "cannot be read" in line))
    ferry.wait_free()
    before = lent_and_sent(ferry.prefill)
    check_hand_over(ferry, reference, 291, "prefill first")
    check_hand_over(ferry, reference, 292, "decode first")
    ferry.wait_free()
    lent, sent = (now - then for now, then in zip(lent_and_sent(ferry.prefill), before))
    assert lent == sent > 0


@pytest.mark.parametrize(("way", "better"), [("cma", "shm"), ("uds", "cma"), ("tcp", "uds")])
def test_bytes_and_tokens_are_the_same_by_each_way_and_the_log_says_why_not_a_better_one(
    folder: Path, tiny: Path, reference: EngineProcess, way: str, better: str
) -> None:
    with pair(folder, tiny, KvFerry(decode_config={"paths": [way]})) as both:
        for length in (1, 33, 64, 300):
            check_hand_over(both, reference, length, "prefill first")
            check_hand_over(both, reference, length + 1, "decode first")
        both.wait_free()
        told = way_told(both.decode)
        assert f'path="{way}"' in told
        assert f"{better}: this side's configuration does not allow it" in told.split("not=")[1]
        lent, sent = lent_and_sent(both.prefill)
        if way == "cma" and "cannot be read" not in both.decode.log_tail(2000):
            assert 0 < lent <= sent
        else:
            assert (lent, sent > 0) == (0, True)


def test_a_prompt_that_prefill_computes_in_chunks_arrives_whole(
    folder: Path, tiny: Path, reference: EngineProcess
) -> None:
    with pair(folder, tiny, KvFerry(), prefill={"max_batched_tokens": 100}) as both:
        for length in (99, 100, 101, 300):
            check_hand_over(both, reference, length, "prefill first")
            check_hand_over(both, reference, length + 1, "decode first")
        both.wait_free()


def test_blocks_that_decode_has_are_not_sent_again(ferry: Pair, reference: EngineProcess) -> None:
    begun = prompt(3 * BLOCK, seed=900)
    longer = begun + prompt(40, seed=901)
    ferry.hand_over(begun, 1, "prefix")
    answer = ferry.hand_over(longer, ANSWER, "longer")
    assert answer.tokens == reference.ask("longer", longer, ANSWER).tokens

    source, arrived = computed(ferry.prefill, "longer"), landed(ferry.decode, "longer")
    assert source is not None and arrived is not None
    assert arrived.start == 3
    assert differing(source, arrived) == []
    ferry.wait_free()


def test_prompts_that_begin_alike_and_are_computed_together_arrive_as_they_were_computed(
    ferry: Pair, reference: EngineProcess
) -> None:
    """vLLM shares a block from the moment it is scheduled: all but one of these find what that one still computes."""
    system = prompt(10 * BLOCK, seed=910)
    prompts = [system + prompt(20 + i, seed=911 + i) for i in range(6)]
    ferry.hand_over(prompt(40, seed=920), 1, "before")
    ferry.prefill.call("hold", on=True)
    started = [ferry.start_at_once(tokens, 1, f"alike{i}") for i, tokens in enumerate(prompts)]
    ferry.prefill.call("hold", on=False)
    answers = [decoding.answer() for _, decoding in started]
    for i, answer in enumerate(answers):
        source, arrived = computed(ferry.prefill, f"alike{i}"), landed(ferry.decode, f"alike{i}")
        assert source is not None and arrived is not None
        assert differing(source, arrived) == []
        assert len(answer.tokens) == 1
    # What decode's own cache has of it by now is right, too.
    local = ferry.decode.ask("after", system + prompt(9, seed=930), ANSWER)
    assert local.tokens == reference.ask("after", system + prompt(9, seed=930), ANSWER).tokens
    ferry.wait_free()


def test_a_request_that_the_router_says_nothing_of_stays_local(ferry: Pair, reference: EngineProcess) -> None:
    tokens = prompt(70, seed=902)
    wanted = reference.ask("local", tokens, ANSWER).tokens
    for side in (ferry.prefill, ferry.decode):
        answer = side.ask("local", tokens, ANSWER)
        assert answer.tokens == wanted
        assert answer.kv is None
    assert landed(ferry.decode, "local") is None
    ferry.wait_free()


def test_a_spoilt_landing_fails_the_comparison(ferry: Pair, reference: EngineProcess) -> None:
    """The negative control: were bytes wrong in decode's cache, the two checks above would see it."""
    tokens = prompt(100, seed=903)
    ferry.decode.call("corrupt_landings", on=True)
    answer = ferry.hand_over(tokens, ANSWER, "spoilt")
    ferry.decode.call("corrupt_landings", on=False)

    source, arrived = computed(ferry.prefill, "spoilt"), landed(ferry.decode, "spoilt")
    assert source is not None and arrived is not None
    assert len(differing(source, arrived)) == len(arrived.pages) * 4
    assert answer.tokens != reference.ask("spoilt", tokens, ANSWER).tokens
    # Its blocks must not serve the next prompt.
    ferry.wait_free()
    ferry.decode.call("reset_prefix_cache")


class Run:
    """Eight prompts through one dtype's aggregated engine, alone and together, and through a pair."""

    def __init__(self, folder: Path, model: Path, dtype: str) -> None:
        self.dtype = dtype
        self.prompts = [prompt(length, seed=length) for length in (31, 32, 33, 64, 65, 130, 257, 500)]
        alone = engine(folder, model, Connector(), "aggregated", dtype=dtype, prefix_caching=False).wait_ready()
        self.one_by_one = [alone.ask(f"a{i}", tokens, 32, margins=True) for i, tokens in enumerate(self.prompts)]
        alone.call("hold", on=True)
        started = [alone.start(f"b{i}", tokens, 32, margins=True) for i, tokens in enumerate(self.prompts)]
        alone.call("hold", on=False)
        together = [handle.answer() for handle in started]
        assert alone.call("hold", on=False) == len(self.prompts)
        alone.close()
        # What a batch of another size does to the logits of the same text, in one engine without any transfer.
        self.noise = max(noise(*both) for both in zip(self.one_by_one, together))
        self.unit = max(unit(answer, dtype) for answer in self.one_by_one)

    def check(self, answers: list[Answer], how: str) -> None:
        bound = 2 * max(self.noise, self.unit)
        print(f"\n{self.dtype}, {how}: noise of the engine alone {self.noise:.4g}, one unit {self.unit:.4g}")
        for tokens, wanted, found in zip(self.prompts, self.one_by_one, answers):
            parted = difference(wanted, found)
            if parted is None:
                print(f"  {len(tokens):4} tokens: equal")
                continue
            print(f"  {len(tokens):4} tokens: differs at step {parted.step}, where the two best are {parted.margin:.4g} apart")
            assert parted.among_best_two and parted.margin <= bound


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_eight_at_a_time_differ_only_where_two_tokens_are_within_float_noise(
    folder: Path, tiny: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(folder, tiny, dtype)
    with pair(folder, tiny, KvFerry(), dtype=dtype) as both:
        alone = [both.hand_over(tokens, 32, f"o{i}") for i, tokens in enumerate(run.prompts)]
        both.wait_free()
        both.decode.call("reset_prefix_cache")
        both.prefill.call("reset_prefix_cache")
        for engine_ in (both.prefill, both.decode):
            engine_.call("hold", on=True)
        started = [both.start_at_once(tokens, 32, f"t{i}") for i, tokens in enumerate(run.prompts)]
        for engine_ in (both.prefill, both.decode):
            engine_.call("hold", on=False)
        together = [decoding.answer() for _, decoding in started]
        assert both.decode.call("hold", on=False) > 1, "the requests did not run together"
        for name in [f"{kind}{i}" for kind in "ot" for i in range(len(run.prompts))]:
            source, arrived = computed(both.prefill, name), landed(both.decode, name)
            assert source is not None and arrived is not None
            assert differing(source, arrived) == []
        both.wait_free()
    with capsys.disabled():
        run.check(alone, "one at a time")
        run.check(together, "eight at a time")
