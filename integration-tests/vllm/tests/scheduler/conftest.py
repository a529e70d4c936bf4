"""Engines without a model, for the behaviours of vLLM's scheduler and model runner that a connector must live with."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness.connectors import KvFerry, new_transfer
from harness.model import prompt
from harness.side import Side, step_until
from vllm.v1.request import Request, RequestStatus

KEY = "a key for the tests, on both sides"


@dataclass
class Duo:
    """A prefill and a decode engine, each with vLLM's scheduler and both halves of the connector."""

    connector: KvFerry
    prefill: Side
    decode: Side
    transfers: dict[str, str] = field(default_factory=dict)

    def ask(self, name: str, tokens: list[int], count: int = 4, **how: Any) -> Request:
        """Decode's leg; prefill is not told yet, so the load waits."""
        self.transfers[name] = how.pop("transfer", None) or new_transfer()
        params = self.connector.decode_first_leg(self.transfers[name])
        return self.decode.add(name, tokens, count, params, **how)

    def prefill_now(self, name: str, tokens: list[int], count: int = 1, **how: Any) -> Request:
        """Prefill's leg of what decode asked for."""
        transfer = self.transfers.setdefault(name, new_transfer())
        return self.prefill.add(name, tokens, count, self.connector.prefill_leg(transfer), **how)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Steps both engines until something is so."""
        step_until([self.prefill, self.decode], condition, what)

    def until_finished(self, name: str) -> None:
        """Steps both until decode finished the request."""
        self.until(lambda: self.decode.finished(name) is not None, f"decode's end of {name}")

    def until_free(self) -> None:
        """Steps both until no request and no block is held."""
        sides = (self.prefill, self.decode)
        self.until(lambda: not any(side.scheduler.requests for side in sides), "all requests to be gone")
        assert [side.used_blocks() for side in sides] == [0, 0]

    def until_loaded(self, name: str) -> None:
        """Steps both until decode's worker reported the load; the request is not scheduled in that step."""
        request, ready = self.decode.requests[name], self.decode.scheduler.finished_recving_kv_req_ids
        self.until(lambda: name in ready or request.is_finished(), f"{name} to be loaded")
        assert not request.is_finished(), f"the load of {name} failed"

    def prefilled(self, name: str, tokens: list[int]) -> dict[str, Any]:
        """Prefill's leg first; returns what decode must be told."""
        self.transfers[name] = new_transfer()
        self.prefill_now(name, tokens)
        self.until(lambda: self.prefill.finished(name) is not None, f"prefill's end of {name}")
        params = self.prefill.finished(name).kv_transfer_params
        assert params is not None
        return params

    def hand_over(self, name: str, tokens: list[int], count: int = 1) -> None:
        """A whole request, prefill first."""
        self.decode.add(name, tokens, count, self.prefilled(name, tokens))
        self.until_finished(name)


Maker = Callable[..., Duo]


@pytest.fixture
def make_duo(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    """Makes pairs of engines; `prefill` and `decode` are arguments of `Side`, `..._config` keys of kvferry's configuration."""
    monkeypatch.setenv("KVFERRY_PSK", KEY)
    made: list[Side] = []

    def make(prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **connector: Any) -> Duo:
        ferry = KvFerry(**connector)
        for side, how in (("prefill", prefill or {}), ("decode", decode or {})):
            made.append(Side(ferry, side, tiny, **how))
        return Duo(ferry, *made[-2:])

    yield make
    for side in reversed(made):
        side.close()


@pytest.fixture
def duo(make_duo: Maker) -> Duo:
    """A pair with room for everything."""
    return make_duo()


@pytest.fixture(scope="session")
def text() -> Callable[..., list[int]]:
    """Prompts."""
    return prompt
