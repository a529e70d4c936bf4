"""kvferry: carries KV cache from the engine that computed it to the engine that needs it.

The extension module `kvferry._kvferry` is both halves of the connector, in Rust. `kvferry.vllm` puts them into vLLM.
"""

from kvferry._kvferry import Config, PollResult, Scheduler, Worker, fingerprint, init_log, keys_without_leg, layout_of

__all__ = ["Config", "PollResult", "Scheduler", "Worker", "fingerprint", "init_log", "keys_without_leg", "layout_of"]
