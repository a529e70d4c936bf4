"""A prefill engine, a decode engine, and the router between them."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .connectors import Connector, KvFerry, new_transfer
from .process import Answer, EngineProcess, Handle
from .spec import EngineSpec

_numbers = itertools.count()


@dataclass
class Pair:
    """Two engines with a connector between them."""

    connector: Connector
    prefill: EngineProcess
    decode: EngineProcess
    requests: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def prefilled(self, tokens: list[int], name: str | None = None, **how: Any) -> tuple[str, str, dict[str, Any] | None]:
        """The router's first leg: prefill computes the prompt. Returns the request's name, its transfer, and decode's params."""
        name = name or f"r{next(self.requests)}"
        transfer = new_transfer()
        answer = self.prefill.ask(name, tokens, 1, kv=self.connector.prefill_leg(transfer), **how)
        return name, transfer, self.connector.decode_leg(transfer, answer.kv)

    def hand_over(self, tokens: list[int], count: int, name: str | None = None, **how: Any) -> Answer:
        """Prefill first: its leg, then decode's."""
        name, _, params = self.prefilled(tokens, name)
        return self.decode.ask(name, tokens, count, kv=params, **how)

    def hand_over_at_once(self, tokens: list[int], count: int, name: str | None = None, **how: Any) -> Answer:
        """Decode first: both legs start together under one transfer id."""
        prefilling, decoding = self.start_at_once(tokens, count, name, **how)
        prefilling.answer()
        return decoding.answer()

    def start_at_once(
        self, tokens: list[int], count: int, name: str | None = None, port: int | None = None, **how: Any
    ) -> tuple[Handle, Handle]:
        """Both legs, decode's a moment earlier; the handles of prefill's and decode's requests."""
        assert isinstance(self.connector, KvFerry), "only kvferry takes the decode leg first"
        name = name or f"r{next(self.requests)}"
        transfer = new_transfer()
        decoding = self.decode.start(name, tokens, count, kv=self.connector.decode_first_leg(transfer, port), **how)
        prefilling = self.prefill.start(name, tokens, 1, kv=self.connector.prefill_leg(transfer))
        return prefilling, decoding

    def wait_free(self) -> None:
        """Waits until neither engine holds a block."""
        self.prefill.wait_free()
        self.decode.wait_free()

    def close(self) -> None:
        """Ends both engines in order."""
        self.decode.close()
        self.prefill.close()


def engine(folder: Path, model: Path, connector: Connector, side: str, **spec: Any) -> EngineProcess:
    """Starts one engine; `side` is prefill, decode, or anything else for an engine without a connector."""
    number = next(_numbers)
    base = folder / f"{number:02}-{side}"
    transfer = connector.transfer(side)
    settings = None
    if transfer is not None:
        timings = spec.pop("timings", False)
        settings = {
            "module": connector.module,
            "class": connector.class_name,
            "before": connector.before,
            "events": None if timings else f"{base}.events.jsonl",
            "timings": timings,
            "corrupt": spec.pop("corrupt", False),
        }
        transfer |= {"kv_connector": "ObservedConnector", "kv_connector_module_path": "harness.observed"}
    env = connector.env(side) | spec.pop("env", {})
    return EngineProcess(
        EngineSpec(
            name=side,
            model=model,
            log=f"{base}.log",
            transfer=transfer,
            observe=settings,
            env=env,
            core=0 if side == "prefill" else 1,
            **spec,
        )
    )


@contextmanager
def pair(
    folder: Path,
    model: Path,
    connector: Connector,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    **both: Any,
) -> Iterator[Pair]:
    """Two engines that are ready; `prefill` and `decode` hold what only one of them gets."""
    engines: list[EngineProcess] = []
    try:
        for side, own in (("prefill", prefill or {}), ("decode", decode or {})):
            engines.append(engine(folder, own.pop("model", model), connector, side, **both, **own))
        for started in engines:
            started.wait_ready()
        yield Pair(connector, *engines)
    finally:
        for started in reversed(engines):
            started.close()


@dataclass
class Landing:
    """What arrived for one request: by layer, the digests of its blocks from block `start` of the prompt on."""

    start: int
    pages: dict[str, list[str]]


def computed(engine: EngineProcess, request: str) -> Landing | None:
    """The prompt's blocks as this engine had them once it had computed the prompt."""
    return _find(engine, request, "computed")


def landed(engine: EngineProcess, request: str) -> Landing | None:
    """The blocks that the connector handed to this engine as good; None if there were none."""
    return _find(engine, request, "landed")


def failures(engine: EngineProcess) -> int:
    """How often the connector told this engine that a load failed, by the request or by its bad blocks."""
    return sum(event["event"] in ("failed request", "bad blocks") for event in engine.events())


def differing(source: Landing, arrived: Landing) -> list[tuple[str, int]]:
    """(layer, block of the prompt) of every page whose bytes are not the source's; all pages are looked at."""
    assert source.pages.keys() == arrived.pages.keys(), "the engines name their layers differently"
    wrong = []
    for layer, digests in arrived.pages.items():
        for index, digest in enumerate(digests, arrived.start):
            if source.pages[layer][index] != digest:
                wrong.append((layer, index))
    return wrong


def _find(engine: EngineProcess, request: str, kind: str) -> Landing | None:
    found = None
    for event in engine.events():
        # vLLM appends a random suffix to the router's name for a request.
        if event["event"] == kind and event["request"].rsplit("-", 1)[0] == request:
            found = event
        elif event["event"] == "bad blocks" and found and event["step"] == found["step"]:
            # Declared bad in the step in which the load ended: the engine does not read them.
            if set(event["blocks"]) & set(found["blocks"]):
                found = None
    return found and Landing(found["start"], found["pages"])
