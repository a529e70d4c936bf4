"""An engine without a model: vLLM's real scheduler, both halves of the connector, and real KV tensors.

What stands in for the model writes, for each token that the scheduler schedules, rows that depend on the whole text up to that
token, its layer and its head, so a block of another prompt, position, layer or rank is told from the right one. The order of the
connector's calls is vLLM's own: its model runner's mixin makes them.
"""

import copy
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm import EngineArgs, SamplingParams
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache

from .connectors import Connector
from .model import TINY
from .process import PATIENCE_S

LAYERS, HEADS, HEAD_DIM = TINY.layers, TINY.kv_heads, TINY.head_dim
"""The model's, whose configuration the connector reads."""
LAYOUT = KVCacheLayout.LBHNC
"""The only one that vLLM's CPU attention reads."""


class Side:
    """One engine. `scheduler`, `workers` and `caches` are what a real engine has; one worker and one dict of tensors a rank. `counted` is what
    the connector's counters grew by, as vLLM's metrics hear it."""

    def __init__(
        self,
        connector: Connector,
        side: str,
        model: Path,
        blocks: int = 32,
        max_requests: int = 8,
        max_batched_tokens: int = 4096,
        tp: int = 1,
        prefix_caching: bool = True,
    ) -> None:
        self.name = side
        transfer = connector.transfer(side) | {
            "kv_connector": connector.class_name,
            "kv_connector_module_path": connector.module,
        }
        self.config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            block_size=32,
            max_model_len=32 * (blocks - 1),
            max_num_seqs=max_requests,
            max_num_batched_tokens=max_batched_tokens,
            enable_prefix_caching=prefix_caching,
            num_gpu_blocks_override=blocks,
            kv_transfer_config=KVTransferConfig(**transfer),
        ).create_engine_config()
        self.config.parallel_config.tensor_parallel_size = tp
        self.config.cache_config.kv_cache_layout = LAYOUT.name
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.requests: dict[str, Request] = {}
        self.reported: list[KVConnectorOutput] = []
        self.counted: dict[str, float] = {}
        with set_current_vllm_config(self.config):
            self._build(tp, blocks)

    def _build(self, tp: int, blocks: int) -> None:
        specs = {
            f"model.layers.{layer}.self_attn.attn": FullAttentionSpec(
                block_size=32, num_kv_heads=HEADS // tp, head_size=HEAD_DIM, dtype=torch.float32
            )
            for layer in range(LAYERS)
        }
        memory = sum(spec.page_size_bytes for spec in specs.values()) * blocks
        per_rank = get_kv_cache_configs(self.config, [specs] * tp, [memory] * tp)
        for rank_config in per_rank:
            rank_config.kv_cache_layout = LAYOUT.name
        cache_config = generate_scheduler_kv_cache_config(per_rank)
        self.config.cache_config.num_gpu_blocks = cache_config.num_blocks
        block_size, hash_block_size = resolve_kv_cache_block_sizes(cache_config, self.config)
        self.block_size = block_size

        self.workers = []
        self.caches = []
        group = Group()
        for rank, rank_config in enumerate(per_rank):
            config = copy.deepcopy(self.config)
            config.parallel_config.rank = rank
            config.compilation_config.static_forward_context = {name: AttentionLayer() for name in specs}
            with group.as_rank(rank):
                worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, rank_config)
            caches = allocate_kv_cache(rank_config, torch.device("cpu"), LAYOUT)
            worker.register_kv_caches(caches)
            self.workers.append(worker)
            self.caches.append(caches)

        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        handshakes = {
            (0, rank): answer
            for rank, worker in enumerate(self.workers)
            if (answer := worker.get_handshake_metadata()) is not None
        }
        if handshakes:
            self.connector.set_xfer_handshake_metadata_pp_aware(handshakes)
        self.aggregator = KVOutputAggregator.from_connector(self.connector, tp)
        hash_function = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(hash_block_size, hash_function)

    # What a front end does.

    def add(self, request_id: str, tokens: list[int], count: int, kv: dict[str, Any] | None, **how: Any) -> Request:
        """A request arrives."""
        sampling = SamplingParams(
            temperature=0,
            max_tokens=count,
            ignore_eos=True,
            stop_token_ids=how.pop("stop", None),
            extra_args={"kv_transfer_params": kv} if kv is not None else None,
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=tokens,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self.hasher,
            **how,
        )
        self.requests[request_id] = request
        self.outputs[request_id] = []
        self.scheduler.add_request(request)
        if request.abort_immediately:
            self.abort(request_id)
        return request

    def abort(self, request_id: str) -> None:
        """A client hangs up."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    # What the engine core does.

    def step(self, before_results: Callable[[], None] = lambda: None) -> SchedulerOutput:
        """One step. `before_results` runs between the model and the scheduler's taking of its output, as aborts may."""
        with set_current_vllm_config(self.config):
            scheduled = self.scheduler.schedule()
            # Copies, as if they came from other processes: an empty output is one object for all of vLLM, and what aggregates writes
            # into it.
            outputs = [copy.copy(self.run_worker(rank, scheduled)) for rank in range(len(self.workers))]
            before_results()
            output = self.aggregator.aggregate(outputs)
            if output.kv_connector_output is not None:
                self.reported.append(output.kv_connector_output)
            self.take(scheduled, output)
        return scheduled

    def take(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """The scheduler takes a step's output."""
        for produced in self.scheduler.update_from_output(scheduled, output).values():
            for one in produced.outputs:
                self.outputs[one.request_id].append(one)
            counted = produced.scheduler_stats and produced.scheduler_stats.kv_connector_stats
            for name, count in (counted or {}).items():
                self.counted[name] = self.counted.get(name, 0) + count

    def run_worker(self, rank: int, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """What vLLM's CPU model runner does around a forward, with its own mixin."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.workers[rank]
        try:
            self.workers[rank].handle_preemptions(scheduled.kv_connector_metadata)
            if scheduled.total_num_scheduled_tokens == 0:
                return KVConnectorModelRunnerMixin.kv_connector_no_forward(scheduled, self.config)
            with (
                set_forward_context(None, self.config),
                KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduled) as transfers,
            ):
                sampled = self.forward(rank, scheduled)
            ids = list(scheduled.num_scheduled_tokens)
            return ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={name: index for index, name in enumerate(ids)},
                sampled_token_ids=[sampled[name] for name in ids],
                kv_connector_output=transfers,
            )
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None

    def forward(self, rank: int, scheduled: SchedulerOutput) -> dict[str, list[int]]:
        """Writes the rows of the scheduled tokens; returns what is sampled after each request's last token."""
        sampled = {}
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            # The scheduler has counted them as computed already.
            end = request.num_computed_tokens
            text = list(request.all_token_ids)
            blocks = self.blocks(request_id)
            for position in range(end - count, end):
                for name, cache in self.caches[rank].items():
                    row = expected_row(text[: position + 1], name, rank, cache)
                    cache[blocks[position // self.block_size], :, position % self.block_size] = row
            sampled[request_id] = [_next_token(text)] if end >= len(text) else []
        return sampled

    # What a test looks at.

    def blocks(self, request_id: str) -> list[int]:
        """The request's block ids."""
        return self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]

    def wrong_tokens(self, request_id: str, until: int, since: int = 0) -> list[int]:
        """The positions whose rows are, in any layer or rank, not those of this request's text."""
        text = list(self.requests[request_id].all_token_ids)
        blocks = self.blocks(request_id)
        wrong = []
        for position in range(since, until):
            for rank, caches in enumerate(self.caches):
                for name, cache in caches.items():
                    row = cache[blocks[position // self.block_size], :, position % self.block_size]
                    if not torch.equal(row, expected_row(text[: position + 1], name, rank, cache)):
                        wrong.append(position)
        return sorted(set(wrong))

    def pool(self) -> Any:
        """vLLM's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    def used_blocks(self) -> int:
        """Blocks that some request holds; one belongs to the pool itself."""
        return self.pool().num_gpu_blocks - 1 - self.pool().get_num_free_blocks()

    def hashed_blocks(self, request_id: str) -> int:
        """How many of the request's blocks are in the prefix cache."""
        return sum(self.pool().blocks[block].block_hash is not None for block in self.blocks(request_id))

    def local_hit(self, request_id: str) -> int:
        """Tokens of the prompt that this engine's own cache had, as vLLM counts them."""
        counted = [output.prefill_stats for output in self.outputs[request_id]] + [self.requests[request_id].prefill_stats]
        return next(stats.num_local_cached_tokens for stats in counted if stats is not None)

    def stages(self) -> dict[str, int]:
        """vLLM's gauge of requests by what their load is doing, without those that are zero."""
        return {stage: count for stage, count in self.scheduler.make_stats().num_kv_fetch_reqs_by_stage.items() if count}

    def finished(self, request_id: str) -> EngineCoreOutput | None:
        """The request's last output, once it is finished."""
        return next((output for output in self.outputs[request_id] if output.finish_reason is not None), None)

    def close(self) -> None:
        """Ends both halves."""
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()


class AttentionLayer:
    """What a connector may ask a layer of the model: its backend, and how the CPU's kernels place tokens."""

    isa = "vec"

    def get_attn_backend(self) -> type[CPUAttentionBackend]:
        """The backend of all layers on the CPU."""
        return CPUAttentionBackend


class Group:
    """Ranks that are made one after the other in this process, in place of vLLM's group of processes."""

    def __init__(self) -> None:
        self._said: list[Any] = []
        self._heard = 0

    @contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """What runs in it is this rank."""
        real = parallel_state.get_tensor_model_parallel_rank, parallel_state.get_tp_group
        parallel_state.get_tensor_model_parallel_rank = lambda: rank
        parallel_state.get_tp_group = lambda: self
        self._heard = 0
        try:
            yield
        finally:
            parallel_state.get_tensor_model_parallel_rank, parallel_state.get_tp_group = real

    def broadcast_object(self, said: Any, src: int = 0) -> Any:
        """Rank 0, which comes first, is heard by the others."""
        assert src == 0
        if self._heard == len(self._said):
            self._said.append(said)
        self._heard += 1
        return self._said[self._heard - 1]


def step_until(sides: list[Side], condition: Callable[[], bool], what: str) -> None:
    """Steps the engines in turn until something is so. Only engines with work step, as the engine core does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            states = {side.name: [str(r.status) for r in side.scheduler.requests.values()] for side in sides}
            raise AssertionError(f"waited for {what}; requests: {states}")
        for side in sides:
            if side.scheduler.has_requests():
                side.step()
        time.sleep(0.001)


def expected_row(text: list[int], layer: str, rank: int, cache: torch.Tensor) -> torch.Tensor:
    """The K and V of a text's last token for this rank's heads: `[heads, 2 * head_dim]` of finite float32."""
    heads, width = cache.shape[1], cache.shape[3]
    seed = zlib.crc32(repr((layer, text)).encode())
    first = rank * heads * width
    bits = (torch.arange(first, first + heads * width, dtype=torch.int64) + seed) * 2654435761
    return (bits & 0x3FFFFFFF).to(torch.int32).view(torch.float32).reshape(heads, width)


def _next_token(text: list[int]) -> int:
    return 10 + sum(text[-8:]) % 2000
