"""What an engine process is started with."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KV_CACHE_BYTES = 64 << 20


@dataclass
class EngineSpec:
    """One engine. Everything in it crosses a pipe to the new process."""

    name: str
    model: Path
    log: str
    dtype: str = "float32"
    block_size: int = 32
    blocks: int | None = None
    """How many KV blocks the engine has; as many as fit `kv_bytes`, if None."""
    kv_bytes: int = KV_CACHE_BYTES
    max_len: int = 2048
    max_requests: int = 8
    max_batched_tokens: int | None = None
    prefix_caching: bool = True
    transfer: dict[str, Any] | None = None
    """vLLM's `kv_transfer_config`."""
    observe: dict[str, Any] | None = None
    """Settings of `harness.observed`, which wraps the connector's class."""
    served: bool = False
    env: dict[str, str] = field(default_factory=dict)
    core: int = 0
    """The CPU core on which the model computes."""

    def environment(self) -> dict[str, str]:
        """The variables that the engine's process gets."""
        values = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_CPU_OMP_THREADS_BIND": str(self.core),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if self.served else "0",
            # One thread, so that the same sums are made in the same order in every engine.
            "OMP_NUM_THREADS": "1",
        }
        if self.observe is not None:
            values["OBSERVED_KV_CONNECTOR"] = json.dumps(self.observe)
        return values | self.env

    def engine_arguments(self) -> dict[str, Any]:
        """vLLM's `EngineArgs`."""
        arguments: dict[str, Any] = {
            "model": str(self.model),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": self.dtype,
            "block_size": self.block_size,
            "max_model_len": self.max_len,
            "max_num_seqs": self.max_requests,
            "enable_prefix_caching": self.prefix_caching,
            "kv_cache_memory_bytes": self.kv_bytes,
            "logprobs_mode": "raw_logits",
            "seed": 0,
        }
        if self.blocks is not None:
            arguments["num_gpu_blocks_override"] = self.blocks
        if self.max_batched_tokens is not None:
            arguments["max_num_batched_tokens"] = self.max_batched_tokens
        if self.transfer is not None:
            # Only here, in the engine's own process: the parent need not import vLLM.
            from vllm.config import KVTransferConfig

            arguments["kv_transfer_config"] = KVTransferConfig(**self.transfer)
        return arguments
