"""What this connector does not carry yet is refused when it is built, with what to set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from kvferry.vllm import eras

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def check(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> None:
    """Raises ImportError or ValueError for what is not supported."""
    eras.require()
    problems = list(_engine(vllm_config))
    problems += ["it was built without a KV cache configuration"] if kv_cache_config is None else _cache(kv_cache_config)
    if problems:
        raise ValueError("KvFerryConnector does not support this engine yet: " + "; ".join(problems))


def _engine(config: VllmConfig):
    parallel = config.parallel_config
    if config.device_config.device_type != "cpu":
        yield f"its KV cache is on {config.device_config.device_type}, only host memory is carried: run vLLM on the CPU"
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline_parallel_size must be 1"
    if getattr(parallel, "decode_context_parallel_size", 1) > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        yield "context parallel sizes must be 1"
    if config.lora_config is not None:
        yield "KV depends on a request's adapter, which peers do not compare: turn enable_lora off"
    if config.speculative_config is not None:
        yield "a draft model's KV is not carried: take speculative_config out"
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.enable_permute_local_kv:
        yield "enable_permute_local_kv must be off: layouts are converted on the way, and need no permuted copy"


def _cache(kv_cache_config: KVCacheConfig):
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        yield f"{len(groups)} KV cache groups; set disable_hybrid_kv_cache_manager, or use a model with one kind of attention"
        return
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        yield f"its layers are {type(spec).__name__}; only full attention is carried"
        return
    if spec.kv_quant_mode != KVQuantMode.NONE:
        yield "its KV is quantised: leave kv_cache_dtype at auto"
    if spec.num_heads != spec.num_kv_heads or spec.state_content_bytes is not None or spec.tokens_per_state != 1:
        yield "its attention backend packs heads or tokens together: use another attention backend"
    if spec.page_size_padded not in (None, spec.unpadded_page_size_bytes):
        yield "its pages are padded"
