"""Imported once by the process from which all engines are forked: importing vLLM takes longer than starting a small engine."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# With more, the fork would leave a pool of threads behind that no longer exist.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import vllm  # noqa: E402, F401
import vllm.model_executor.models.llama  # noqa: E402, F401
import vllm.v1.engine.async_llm  # noqa: E402, F401
import vllm.v1.engine.llm_engine  # noqa: E402, F401
import vllm.v1.worker.cpu_worker  # noqa: E402, F401
