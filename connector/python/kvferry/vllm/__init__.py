"""kvferry inside vLLM: `kv_connector = "KvFerryConnector"`, `kv_connector_module_path = "kvferry.vllm"`."""

from kvferry.vllm.connector import KvFerryConnector

__all__ = ["KvFerryConnector"]
