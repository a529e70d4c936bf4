"""The connector beside vLLM's scheduler: translates its requests and steps, and nothing more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

import kvferry
from kvferry.vllm import eras, layout
from kvferry.vllm.metadata import KvFerryHandshake, KvFerryMetadata, KvFerryWorkerMetadata
from kvferry.vllm.stats import KvFerryStats

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
        # Requests whose params made no sense, since they were last told.
        self._refused = 0

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
        if not isinstance(params, dict):
            return
        prompt, more = list(request.prompt_token_ids or ()), layout.more_of(request)
        if eras.is_rejection(request):
            # Nobody sent this: it runs nowhere, and says with one made-up token that a decode leg was rejected or failed.
            told = self._half.unwanted(request.request_id, prompt, more, params)
            logger.debug("decode leg %s was rejected; prefill %s", request.request_id, "is told" if told else "need not hear")
            return
        if not (params.get("do_remote_prefill") or params.get("do_remote_decode")):
            if keys := kvferry.keys_without_leg(params):
                self._refuse(request, f"keys {', '.join(keys)} but neither do_remote_prefill nor do_remote_decode")
            return
        if request.prompt_token_ids is None:
            self._half.unwanted(request.request_id, prompt, more, params)
            return self._refuse(request, "the prompt has no token ids")
        try:
            if why := self._half.add(request.request_id, prompt, more, min(request.max_tokens, _MANY_TOKENS), params):
                logger.info("request %s has no part in a transfer and is computed here: %s", request.request_id, why)
        except (OverflowError, TypeError, ValueError) as error:
            self._refuse(request, str(error))

    def _refuse(self, request: Request, problem: str) -> None:
        self._refused += 1
        # The error names the request already, where it is kvferry's.
        named = "" if request.request_id in problem else f"kvferry: kv_transfer_params of request {request.request_id}: "
        logger.warning("%s%s; the prompt is computed without a transfer", named, problem)

    def take_stats(self) -> KvFerryStats | None:
        refused, self._refused = self._refused, 0
        return KvFerryStats({"params_refused": refused}) if refused else None

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
