"""An engine of two halves for tests: its own memory, a step as vLLM makes one, and no model."""

from __future__ import annotations

import ctypes
import random
import time
from dataclasses import dataclass, field
from typing import Any, Callable

import kvferry

LAYERS, HEADS, TOKENS, SIZE, BLOCKS = 3, 2, 32, 8, 24
FLOAT = 4
PAGE = HEADS * TOKENS * 2 * SIZE * FLOAT
LIMIT_SECONDS = 30.0


@dataclass
class LayerTensor:
    name: str
    data_ptr: int
    storage_ptr: int
    storage_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass
class CacheFacts:
    layers: list[LayerTensor]
    device: str = "cpu"
    dtype: str = "float32"
    axes: str = "BHNC"
    whole_pages: bool = True
    blocks: int = BLOCKS
    heads: int = HEADS
    tokens_per_block: int = TOKENS
    head_size_k: int = SIZE
    head_size_v: int = SIZE


@dataclass
class ModelFacts:
    name: str = "toy"
    fingerprint: str = "1b" * 32
    kv_heads: int = HEADS
    rope_theta: float = 10000.0
    rope_elements: int = SIZE
    rope_scaling: str = "none"
    options: list[tuple[str, str]] = field(default_factory=list)


class Memory:
    """One allocation for all layers, `[L, B, H, N, C]`."""

    def __init__(self) -> None:
        self.bytes = bytearray(random.Random(7).randbytes(LAYERS * BLOCKS * PAGE))
        self._view = (ctypes.c_char * len(self.bytes)).from_buffer(self.bytes)
        self.address = ctypes.addressof(self._view)

    def facts(self, **changes: Any) -> CacheFacts:
        shape = (BLOCKS, HEADS, TOKENS, 2 * SIZE)
        stride = (HEADS * TOKENS * 2 * SIZE, TOKENS * 2 * SIZE, 2 * SIZE, 1)
        start = [self.address + layer * BLOCKS * PAGE for layer in range(LAYERS)]
        layers = [
            LayerTensor(f"layers.{layer}.attn", at, self.address, len(self.bytes), shape, stride)
            for layer, at in enumerate(start)
        ]
        return CacheFacts(**{"layers": layers, **changes})

    def page(self, layer: int, block: int) -> memoryview:
        start = (layer * BLOCKS + block) * PAGE
        return memoryview(self.bytes)[start : start + PAGE]

    def fill(self, blocks: list[int], seed: int) -> None:
        for layer in range(LAYERS):
            for index, block in enumerate(blocks):
                self.page(layer, block)[:] = random.Random(f"{seed} {layer} {index}").randbytes(PAGE)

    def pages(self, blocks: list[int]) -> list[bytes]:
        return [bytes(self.page(layer, block)) for layer in range(LAYERS) for block in blocks]


class Engine:
    """One rank of one engine."""

    def __init__(
        self,
        name: str,
        role: str,
        psk_file: Any,
        *,
        options: dict[str, Any] | None = None,
        model: ModelFacts | None = None,
        incarnation: int | None = None,
        request_failures: bool = False,
    ) -> None:
        written = {"psk_file": str(psk_file), **(options or {})}
        self.config = kvferry.Config(written, engine_id=name, role=role, load_failure_policy="fail")
        self.memory = Memory()
        self.scheduler = kvferry.Scheduler(self.config, tokens_per_block=TOKENS, whole_blocks=True)
        self.worker = kvferry.Worker(
            self.config,
            incarnation=incarnation if incarnation is not None else random.getrandbits(64),
            cache=self.memory.facts(),
            model=model or ModelFacts(),
            tensors=self.memory,
            request_failures=request_failures,
        )
        self.scheduler.set_addresses([self.worker.address])
        # What an engine was told: each id is to stand here once.
        self.received: list[str] = []
        self.failed: dict[str, str] = {}
        self.bad_blocks: set[int] = set()
        self.failed_requests: set[str] = set()
        self.released: list[str] = []

    def step(
        self,
        scheduled: list[tuple[str, int, int, list[int]]] | None = None,
        preempted: list[str] | None = None,
        forward: Callable[[], None] = lambda: None,
    ) -> None:
        """One step: metadata, preemptions, forward with its layers, loads, results."""
        meta, has_preempted, released = self.scheduler.build_step(scheduled or [], preempted or [])
        saves = False
        if meta is not None:
            if has_preempted:
                self.worker.preempted(meta)
            saves = self.worker.begin_step(meta)
        forward()
        if saves:
            for layer in range(LAYERS):
                self.worker.save_layer(layer)
        if meta is not None:
            self.worker.start_loads()
        if saves:
            self.worker.wait_saved()
        polled = self.worker.poll()
        self.received += polled.received
        self.failed.update(polled.failed)
        self.bad_blocks |= polled.bad_blocks
        self.failed_requests |= polled.failed_requests
        self.released += released
        if polled.report is not None:
            self.scheduler.apply([polled.report])

    def add(self, request: str, tokens: int, max_tokens: int, params: dict[str, Any]) -> None:
        """A request with the one prompt that all tests of this length share."""
        assert self.scheduler.add(request, list(range(tokens)), "", max_tokens, params) is None

    def prefill(
        self, request: str, tokens: int, blocks: list[int], seed: int, params: dict[str, Any], is_asked: bool = False
    ) -> Any:
        """Computes a prompt in one step; returns what the router is told. Who asked before (`is_asked`) may have all of it by then."""
        self.add(request, tokens, 1, params)
        assert self.scheduler.matched_tokens(request, 0) == 0
        self.scheduler.allocated(request, blocks, 0)
        assert self.scheduler.unsaved() == [request]
        self.step([(request, 0, tokens, blocks)], forward=lambda: self.memory.fill(blocks, seed))
        held, answer = self.scheduler.finished(request, blocks, True)
        assert held or is_asked
        if not held:
            self.released.append(request)
        return answer

    def load(self, request: str, tokens: int, blocks: list[int], params: dict[str, Any], local: int = 0) -> None:
        """Admits a request whose prompt's KV comes from a peer."""
        self.add(request, tokens, 64, params)
        external = self.scheduler.matched_tokens(request, local)
        assert external == tokens - local
        self.scheduler.allocated(request, blocks, external)
        self.step()


def wait_for(what: str, condition: Callable[[], bool], *engines: Engine) -> None:
    """Steps the engines, as vLLM does while it has nothing to compute, until a condition holds."""
    limit = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < limit, f"{what} did not happen"
        for engine in engines:
            engine.step()
        time.sleep(0.001)
