"""The connector beside vLLM's model runner: translates its calls, and nothing more."""

from __future__ import annotations

import logging
import time
import weakref
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

import kvferry
from kvferry.vllm import eras, layout
from kvferry.vllm.metadata import KvFerryHandshake, KvFerryMetadata, KvFerryWorkerMetadata
from kvferry.vllm.stats import KvFerryStats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvferry")

# Why a load ended that this engine gave up.
_GIVEN_UP = "cancelled"
# How long peers are given to hear of the end.
_GRACE_SECONDS = 1.0
# Counters are read at most so often, and where transfers ended: no step may follow for long.
_STATS_SECONDS = 1.0


class WorkerHalf:
    """All calls come from the model runner's thread."""

    def __init__(
        self, config: kvferry.Config, incarnation: int, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        # In micro-batches a layer is saved more than once in a step: then all of it is handed over when the step is complete.
        layers = () if vllm_config.parallel_config.use_ubatching else layout.layer_names(kv_cache_config)
        self._layers = {name: index for index, name in enumerate(layers)}
        self._worker: kvferry.Worker | None = None
        self._saves = False
        self._released: list[str] = []
        self._bad_blocks: set[int] = set()
        self._report: bytes | None = None
        self._counters: dict[str, int | float] = {}
        self._counted_at = 0.0
        self._has_ended = False

    @property
    def worker(self) -> kvferry.Worker:
        assert self._worker is not None, "the engine registers its caches before it steps"
        return self._worker

    @property
    def address(self) -> str:
        """Where peers reach this worker, `IP:port`."""
        return self.worker.address

    def metrics(self) -> str:
        """All of kvferry's metrics as a Prometheus page."""
        return self.worker.metrics()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        cache = layout.cache_facts(kv_caches, self._vllm_config, self._kv_cache_config)
        model = layout.model_facts(self._vllm_config, self._kv_cache_config)
        worker = kvferry.Worker(
            self._config,
            incarnation=self._incarnation,
            cache=cache,
            model=model,
            tensors=list(kv_caches.values()),
            request_failures=eras.REQUEST_FAILURES,
        )
        self._worker = worker
        self._counters = worker.counters()
        # Its threads end before the interpreter and the tensors do.
        weakref.finalize(self, worker.shutdown, 0.0)
        first = cache.layers[0]
        logger.info(
            "kvferry listens at %s; %d layers of shape %s, strides %s, %s, as %s; model %s (%s)",
            *(worker.address, len(cache.layers), first.shape, first.stride, cache.dtype, worker.layout),
            *(model.name, model.fingerprint[:16]),
        )

    def handshake(self) -> KvFerryHandshake | None:
        return KvFerryHandshake(self._worker.address) if self._worker is not None else None

    def preempted(self, meta: KvFerryMetadata) -> None:
        if meta.has_preempted and meta.step is not None:
            self.worker.preempted(meta.step)

    def begin_step(self, meta: KvFerryMetadata) -> None:
        self._released.extend(meta.released)
        self._saves = False
        if meta.step is not None:
            self._saves = self._guarded(self.worker.begin_step, meta.step) or False

    def start_loads(self, meta: KvFerryMetadata) -> None:
        if meta.step is not None:
            self._guarded(self.worker.start_loads)

    def save_layer(self, layer_name: str) -> None:
        if self._saves:
            layer = self._layers.get(layer_name)
            if layer is not None:
                self.worker.save_layer(layer)

    def wait_saved(self) -> None:
        if self._saves:
            self._saves = False
            self.worker.wait_saved()

    def poll(self) -> Any:
        """What the engine is told of transfers in this step."""
        polled = self.worker.poll()
        self._bad_blocks |= polled.bad_blocks
        self._report = polled.report
        for request_id, reason in polled.failed:
            # A client that goes away is no trouble.
            level = logging.DEBUG if reason == _GIVEN_UP else logging.WARNING
            logger.log(level, "the KV of request %s was not loaded: %s", request_id, reason)
        sent, self._released = set(self._released), []
        self._has_ended |= bool(sent or polled.received or polled.failed)
        return eras.transfer_results(sent, set(polled.received), failed=polled.failed_requests)

    def take_bad_blocks(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> KvFerryWorkerMetadata | None:
        report, self._report = self._report, None
        return KvFerryWorkerMetadata([report]) if report is not None else None

    def take_stats(self) -> KvFerryStats | None:
        now = time.monotonic()
        if self._worker is None or (now - self._counted_at < _STATS_SECONDS and not self._has_ended):
            return None
        self._counted_at, self._has_ended = now, False
        counters = self._worker.counters()
        stats = KvFerryStats({key: value - self._counters.get(key, 0) for key, value in counters.items()})
        self._counters = counters
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown(_GRACE_SECONDS)

    def _guarded(self, call: Any, *args: Any) -> Any:
        """A connector that ended reports its loads as failed at the next poll: the engine goes on without it."""
        try:
            return call(*args)
        except RuntimeError:
            logger.exception("kvferry cannot take this step's work")
            return None
