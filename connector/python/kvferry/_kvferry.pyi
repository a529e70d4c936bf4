"""Both halves of kvferry's connector. Nothing here waits or copies while it holds the interpreter's lock."""

import os
from collections.abc import Sequence
from typing import Any, Protocol, final

class LayerTensor(Protocol):
    """One attention layer's tensor: strides in elements, lengths in bytes."""

    name: str
    data_ptr: int
    storage_ptr: int
    storage_bytes: int
    shape: Sequence[int]
    stride: Sequence[int]

class CacheFacts(Protocol):
    """One worker's KV cache, as the engine describes it."""

    device: str
    dtype: str
    axes: str
    whole_pages: bool
    blocks: int
    heads: int
    tokens_per_block: int
    head_size_k: int
    head_size_v: int
    layers: Sequence[LayerTensor]

class ModelFacts(Protocol):
    """What the KV cache is of; compared with each peer's, field by field."""

    name: str
    fingerprint: str
    kv_heads: int
    rope_theta: float
    rope_elements: int
    rope_scaling: str
    options: Sequence[tuple[str, str]]

@final
class Config:
    """kvferry's configuration inside an engine.

    `options` are kvferry's keys, beside `config_file`, a TOML file with the same keys. The later wins: defaults, file, environment
    (`KVFERRY_...`), options. Rank n listens `port_offset` + n above the configured port. Raises ValueError, which names the key, what
    was found, and what to write instead.
    """

    def __new__(
        cls,
        options: dict[str, Any],
        *,
        engine_id: str,
        role: str,
        load_failure_policy: str,
        tp_rank: int = 0,
        tp_size: int = 1,
        port_offset: int = 0,
    ) -> Config: ...

@final
class Scheduler:
    """The half that stands beside the engine's scheduler. Bookkeeping only: nothing here waits or talks to a peer."""

    def __new__(cls, config: Config, *, tokens_per_block: int, whole_blocks: bool) -> Scheduler: ...
    def set_addresses(self, addresses: list[str]) -> None:
        """Where this engine's workers listen, `IP:port` by rank."""

    def add(self, request_id: str, prompt: Sequence[int], more: str, max_tokens: int, params: dict[str, Any]) -> str | None:
        """A request came, with its `kv_transfer_params`; `more` says what beside the tokens decides its KV. Returns why it has no part in a
        transfer, or None if it has one or its params speak of none. Raises ValueError for params that make no sense here; prefill need not
        keep what they name."""

    def unwanted(self, request_id: str, prompt: Sequence[int], more: str, params: dict[str, Any]) -> bool:
        """A decode leg will not run here, so prefill need not keep what its params name; the prompt may be made up. Returns whether prefill is
        told."""

    def matched_tokens(self, request_id: str, local_tokens: int) -> int:
        """How many tokens beyond the block-aligned local hit a peer provides; always asynchronously."""

    def allocated(self, request_id: str, blocks: list[int], external_tokens: int) -> None:
        """A request was given blocks; `external_tokens` of its prompt are to be loaded."""

    def unsaved(self) -> list[str]:
        """Requests of which `build_step` must hear when they are scheduled."""

    def build_step(
        self, scheduled: list[tuple[str, int, int, list[int]]], preempted: list[str]
    ) -> tuple[bytes | None, bool, list[str]]:
        """The step's metadata or None if there is nothing to do, whether it names preempted requests, and the requests that the workers
        give back to the engine. `scheduled`: id, first and last position + 1 that the step computes, all blocks."""

    def finished(self, request_id: str, blocks: list[int], is_complete: bool) -> tuple[bool, dict[str, Any] | None]:
        """The engine has finished a request: whether its blocks stay here, and what the router is told."""

    def apply(self, results: list[bytes]) -> list[str]:
        """Takes what the workers reported; returns requests whose KV nobody takes any more, though the engine still computes them."""

    def has_pending(self) -> bool:
        """Whether the engine must go on stepping although it may have nothing to compute."""

    @property
    def unknown_results(self) -> int:
        """Reports of workers about what nobody awaited, counted and dropped."""

@final
class PollResult:
    """What one poll of a worker brought: requests whose loads ended; those of them that failed, and why; the bad blocks of failed requests with
    a good prefix; failed requests of which nothing is good; what the scheduler half must be told."""

    received: list[str]
    failed: list[tuple[str, str]]
    bad_blocks: set[int]
    failed_requests: set[str]
    report: bytes | None

@final
class Worker:
    """The half that stands beside one worker's model; all calls come from the model's thread."""

    def __new__(
        cls,
        config: Config,
        *,
        incarnation: int,
        cache: CacheFacts,
        model: ModelFacts,
        tensors: object,
        request_failures: bool,
    ) -> Worker: ...
    @property
    def address(self) -> str:
        """Where peers reach it, `IP:port`."""

    @property
    def layout(self) -> str:
        """The order of its cache's axes in memory, such as `LBHPNC`."""

    @property
    def unknown_results(self) -> int:
        """Reports that the engine did not await, counted and dropped."""

    def preempted(self, meta: bytes) -> None:
        """Ends the transfers of requests that lost their blocks; returns when nothing touches those any more."""

    def begin_step(self, meta: bytes) -> bool:
        """Takes a step's work; returns whether the step computes something that a peer wants."""

    def start_loads(self) -> None:
        """Starts the step's loads."""

    def save_layer(self, layer: int) -> None:
        """A layer's keys and values of this step are in the cache; `layer` counts from 0 in the model's order."""

    def wait_saved(self) -> None:
        """The step is complete: what no `save_layer` told is ready."""

    def poll(self) -> PollResult:
        """What happened since the last call."""

    def counters(self) -> dict[str, int | float]:
        """Counters since the worker's start."""

    def metrics(self) -> str:
        """All of kvferry's metrics as a Prometheus page."""

    def shutdown(self, grace_seconds: float) -> None:
        """Ends all transfers; returns when nothing touches the tensors."""

def fingerprint(config: str, files: Sequence[str | os.PathLike[str]]) -> str:
    """64 hexadecimal digits that name a model, from its configuration's text and samples of its files of weights."""

def keys_without_leg(said: dict[str, Any]) -> list[str]:
    """The keys of `kv_transfer_params` that speak of a transfer and say no leg, since that is misspelt or missing; none if all is well."""

def layout_of(cache: CacheFacts) -> tuple[str, int]:
    """The order of the axes of a cache's tensors in memory, and in how many allocations they lie."""

def init_log(level: str) -> None:
    """Shows kvferry's log on standard error, from a level on; once in a process."""
