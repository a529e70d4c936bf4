"""Counters for vLLM's log and its metrics page."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# Name, meaning; the names are those of `kvferry.Worker.counters`, and of what the scheduler half counts.
_COUNTERS = {
    "sent_transfers": "Transfers that a decode engine confirmed.",
    "sent_bytes": "Bytes of KV handed to the transport.",
    "sent_cancelled": "Sends that were cancelled.",
    "sent_failed": "Sends that failed.",
    "sent_seconds": "Time from the start of sends to their verdicts, in seconds.",
    "received_transfers": "Transfers that landed and were verified.",
    "received_bytes": "Bytes of KV that landed and were verified.",
    "received_cancelled": "Receives that were cancelled.",
    "received_failed": "Receives that failed.",
    "received_seconds": "Time from the start of receives to their verdicts, in seconds.",
    "lent_bytes": "Bytes of KV that peers on this host copied out of this engine's memory themselves.",
    "loaded_tokens": "Tokens whose KV came from a peer, in whole blocks where the engine packs a block's tokens, as on the CPU.",
    "params_refused": "Requests whose kv_transfer_params made no sense, so that they were computed without a transfer.",
    "digest_mismatches": "Chunks that arrived with another digest than their sender's; none of them was used.",
    "leases_expired": "Leases that ended by their deadline.",
    "sessions_lost": "Sessions that were cut.",
    "peers_refused": "Peers that were refused.",
    "messages_dropped": "Messages and reports that were dropped.",
}


class KvFerryStats(KVConnectorStats):
    """How much the counters grew since they were last told."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, value in other.data.items():
            self.data[key] = self.data.get(key, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        data = {key: self.data.get(key, 0) for key in _COUNTERS}
        reduced: dict[str, int | float] = {}
        for side in ("sent", "received"):
            count = data[f"{side}_transfers"]
            reduced[f"{side} transfers"] = count
            reduced[f"{side} MiB"] = round(data[f"{side}_bytes"] / 2**20, 2)
            ended = count + data[f"{side}_failed"] + data[f"{side}_cancelled"]
            if ended:
                reduced[f"{side} mean ms"] = round(1000 * data[f"{side}_seconds"] / ended, 2)
            reduced[f"{side} failed"] = data[f"{side}_failed"]
        reduced["leases expired"] = data["leases_expired"]
        reduced["params refused"] = data["params_refused"]
        reduced["digest mismatches"] = data["digest_mismatches"]
        return reduced

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KvFerryPromMetrics(KVConnectorPromMetrics):
    """The same counters on vLLM's metrics page, as `vllm:kvferry_..._total`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._by_engine: dict[int, dict[str, Counter]] = {engine: {} for engine in per_engine_labelvalues}
        for name, meaning in _COUNTERS.items():
            family = self._counter_cls(name=f"vllm:kvferry_{name}", documentation=meaning, labelnames=labelnames)
            for engine, values in per_engine_labelvalues.items():
                self._by_engine[engine][name] = family.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        counters = self._by_engine[engine_idx]
        for name, value in transfer_stats_data.items():
            if value > 0 and name in counters:
                counters[name].inc(value)
