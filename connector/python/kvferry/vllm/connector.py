"""The class that vLLM loads. Which of its methods are called in which process, and in which order: vLLM's
`distributed/kv_transfer/kv_connector/v1/base.py`, `v1/core/sched/scheduler.py`, `v1/worker/kv_connector_model_runner_mixin.py` and
`v1/worker/gpu/kv_connector.py`."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import kvferry
from kvferry.vllm import support
from kvferry.vllm.metadata import KvFerryHandshake, KvFerryMetadata
from kvferry.vllm.scheduler import SchedulerHalf
from kvferry.vllm.stats import KvFerryPromMetrics, KvFerryStats
from kvferry.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}


class KvFerryConnector(KVConnectorBase_V1):
    """Carries prompts' KV between vLLM engines, verified. One object beside the scheduler, one beside each worker's model."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        support.check(vllm_config, kv_cache_config)
        kvferry.init_log(_log_level())
        is_worker = role == KVConnectorRole.WORKER
        config = _config(vllm_config, _tp_rank(vllm_config) if is_worker else 0)
        self._scheduler_half = None if is_worker else SchedulerHalf(config, vllm_config, kv_cache_config)
        self._worker_half = (
            WorkerHalf(config, _incarnation(vllm_config), vllm_config, kv_cache_config) if is_worker else None
        )

    @property
    def scheduler(self) -> SchedulerHalf:
        """What is beside the engine's scheduler."""
        assert self._scheduler_half is not None, "this connector is a worker's"
        return self._scheduler_half

    @property
    def worker(self) -> WorkerHalf:
        """What is beside a worker's model."""
        assert self._worker_half is not None, "this connector is the scheduler's"
        return self._worker_half

    # Scheduler.

    def on_new_request(self, request: Request) -> None:
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        # The prompt's own blocks, the last one included.
        return self._kv_cache_config.transfer_group_ids

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler.build_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler.apply(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self.scheduler.has_pending()

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.scheduler.set_addresses({rank: meta for rank, meta in metadata.items() if isinstance(meta, KvFerryHandshake)})

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker.handshake()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, KvFerryMetadata)
        self.worker.preempted(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, KvFerryMetadata)
        super().bind_connector_metadata(connector_metadata)
        # Before the forward: its layers are saved one by one.
        self.worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, KvFerryMetadata)
        self.worker.start_loads(meta)

    def wait_for_layer_load(self, layer_name: str) -> None:
        # Loads are complete before their request runs.
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        self.worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        # The source blocks stay with the scheduler half until they are sent, so this does not wait for the wire.
        self.worker.wait_saved()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return self.worker.poll()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker.take_report()

    # Both.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return (self._worker_half or self.scheduler).take_stats()

    def shutdown(self) -> None:
        if self._worker_half is not None:
            self._worker_half.shutdown()

    # The class.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KvFerryStats(data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics | None:
        return KvFerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        # Registered memory must stay where it is.
        return False


def _config(vllm_config: VllmConfig, tp_rank: int) -> kvferry.Config:
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    return kvferry.Config(
        dict(transfer.kv_connector_extra_config),
        engine_id=transfer.engine_id,
        role=_ROLES[transfer.kv_role],
        load_failure_policy=transfer.kv_load_failure_policy,
        tp_rank=tp_rank,
        tp_size=parallel.tensor_parallel_size,
        port_offset=parallel.data_parallel_index * parallel.tensor_parallel_size,
    )


def _tp_rank(vllm_config: VllmConfig) -> int:
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return 0
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank()


def _incarnation(vllm_config: VllmConfig) -> int:
    """64 random bits that name this start of the engine; its ranks share them."""
    drawn = int.from_bytes(os.urandom(8), "little")
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return drawn
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().broadcast_object(drawn, src=0)


def _log_level() -> str:
    level = logging.getLogger("vllm").getEffectiveLevel()
    return "debug" if level <= logging.DEBUG else "info" if level <= logging.INFO else "warn"
