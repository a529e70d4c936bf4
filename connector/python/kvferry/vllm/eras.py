"""What differs between vLLM's releases, in one place: the rest of the package knows one vLLM.

Written for the contract of 0.30 to 0.33. A release with another one gets its own answers here, and an older one is refused by what it
lacks, not by its number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.version import __version__ as VLLM_VERSION

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

# Axes of one layer's tensor, outermost first, in a layout's letters; C holds K and V together. Source: RFC 42082, since 0.29.
LAYER_AXES = "BHNC"

# Attention backends by how they place the tokens of one block and head: rows of tokens, or an order that their kernels choose.
PACKED_BACKENDS = frozenset({"CPU_ATTN"})


# Whether workers may report failed requests, not bad blocks only; since 0.30.
REQUEST_FAILURES = "failed_recving" in getattr(
    getattr(base, "KVConnectorTransferResults", None), "__dataclass_fields__", {}
)


def require() -> None:
    """Raises ImportError for a vLLM whose connectors are called in another way."""
    if not hasattr(base, "KVConnectorTransferResults"):
        raise ImportError(
            f"kvferry.vllm is written for the connector interface of vLLM 0.30 to 0.33; this is vLLM {VLLM_VERSION}"
        )


def scheduled(output: SchedulerOutput, wanted: list[str]) -> list[tuple[str, int, int, list[int]]]:
    """The wanted requests that a step computes: id, first position, last position + 1, all blocks."""
    counts = output.num_scheduled_tokens
    wanted = [request_id for request_id in wanted if request_id in counts]
    if not wanted:
        return []
    starts = dict(zip(output.scheduled_cached_reqs.req_ids, output.scheduled_cached_reqs.num_computed_tokens))
    starts.update((request.req_id, request.num_computed_tokens) for request in output.scheduled_new_reqs)
    state = output.kv_connector_block_state
    assert state is not None, "the scheduler tells block tables while metadata is built"
    steps = []
    for request_id in wanted:
        block_ids = state.get_block_ids(request_id)
        assert block_ids is not None, f"{request_id} is scheduled, so its blocks are known"
        start = starts[request_id]
        steps.append((request_id, start, start + counts[request_id], list(block_ids[0])))
    return steps


def is_rejection(request: Request) -> bool:
    """Whether the engine made this request itself, to have a rejected decode leg's peer let go: `notify_kv_transfer_request_rejected` of
    `v1/engine/async_llm.py`. It is aborted as soon as it has come."""
    return getattr(request, "abort_immediately", False)


def preempted(output: SchedulerOutput) -> list[str]:
    """Requests that lost their blocks since the last step."""
    return list(output.preempted_req_ids or ())


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """What a worker tells the engine of transfers; `failed` are requests of `received`, none where REQUEST_FAILURES is false."""
    more = {"failed_recving": failed} if REQUEST_FAILURES else {}
    return base.KVConnectorTransferResults(finished_sending=sent, finished_recving=received, **more)
