"""The connector beside vLLM's scheduler: translates its requests and steps, and nothing more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

import kvferry
from kvferry.vllm import eras, layout
from kvferry.vllm.metadata import KvFerryHandshake, KvFerryMetadata, KvFerryWorkerMetadata

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvferry")

# Requests that ended by themselves, with their prompt computed.
_COMPLETE = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)

# More than any request generates.
_MANY_TOKENS = 2**32


class SchedulerHalf:
    """All calls come from the engine core's thread."""

    def __init__(self, config: kvferry.Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._half = kvferry.Scheduler(
            config,
            tokens_per_block=layout.spec_of(kv_cache_config).block_size,
            whole_blocks=layout.is_packed(vllm_config),
        )

    @property
    def unknown_results(self) -> int:
        """Reports of workers about what nobody awaited, counted and dropped."""
        return self._half.unknown_results

    def set_addresses(self, metadata: dict[int, KvFerryHandshake]) -> None:
        addresses = [metadata[rank].address for rank in sorted(metadata)]
        self._half.set_addresses(addresses)
        logger.info("kvferry listens at %s", ", ".join(addresses))

    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params
        if not isinstance(params, dict) or not (params.get("do_remote_prefill") or params.get("do_remote_decode")):
            return
        if request.prompt_token_ids is None:
            logger.error("request %s has no token ids; it is computed without a transfer", request.request_id)
            return
        max_tokens = min(request.max_tokens, _MANY_TOKENS)
        prompt, more = list(request.prompt_token_ids), layout.more_of(request)
        try:
            if not self._half.add(request.request_id, prompt, more, max_tokens, params):
                logger.info("the prompt of %s is handed over to another request already; it is computed", request.request_id)
        except (OverflowError, TypeError, ValueError) as error:
            logger.error("%s; request %s is computed without a transfer", error, request.request_id)

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int, bool]:
        tokens = self._half.matched_tokens(request.request_id, local_tokens)
        return tokens, tokens > 0

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        if request.kv_transfer_params:
            self._half.allocated(request.request_id, list(blocks.get_block_ids()[0]), external_tokens)

    def build_meta(self, output: SchedulerOutput) -> KvFerryMetadata:
        scheduled = eras.scheduled(output, self._half.unsaved())
        step, has_preempted, released = self._half.build_step(scheduled, eras.preempted(output))
        return KvFerryMetadata(step, has_preempted, released)

    def apply(self, output: KVConnectorOutput) -> None:
        meta = output.kv_connector_worker_meta
        if isinstance(meta, KvFerryWorkerMetadata):
            for request_id in self._half.apply(meta.reports):
                logger.info("nobody takes the KV of request %s any more; it is computed all the same", request_id)

    def finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if not request.kv_transfer_params:
            return False, None
        return self._half.finished(request.request_id, block_ids, request.status in _COMPLETE)

    def has_pending(self) -> bool:
        return self._half.has_pending()
