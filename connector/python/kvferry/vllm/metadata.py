"""What crosses between vLLM's processes for this connector: bytes that only kvferry reads, and what the engine itself must know."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass
class KvFerryMetadata(KVConnectorMetadata):
    """One step's work, scheduler to workers."""

    # None if the step has none.
    step: bytes | None = None
    # Whether requests lost their blocks whose transfers must end first.
    has_preempted: bool = False
    # Requests whose blocks the workers give back to the engine.
    released: list[str] = field(default_factory=list)


@dataclass
class KvFerryWorkerMetadata(KVConnectorWorkerMetadata):
    """What workers report of one step, one entry a worker that has something to tell."""

    reports: list[bytes]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvFerryWorkerMetadata:
        assert isinstance(other, KvFerryWorkerMetadata)
        return KvFerryWorkerMetadata(self.reports + other.reports)


@dataclass
class KvFerryHandshake(KVConnectorHandshakeMetadata):
    """Where one worker listens, `IP:port`; its engine's scheduler tells routers."""

    address: str
