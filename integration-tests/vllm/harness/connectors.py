"""The connectors that can be put between two engines, and what a router says to each side.

A router's leg is a request with `kv_transfer_params`. Prefill first: the prefill leg's answer holds what decode must be told.
Decode first (kvferry only): both legs start at once under one transfer id.
"""

import json
import random
import secrets
import socket
import urllib.request
from dataclasses import dataclass, field
from typing import Any

PLACEHOLDERS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's example router puts into the prefill leg."""


def free_port(count: int = 1) -> int:
    """The first of some consecutive ports that nobody listens on."""
    for _ in range(1000):
        # Below the ports that the system gives to connections, which come and go meanwhile.
        first = random.randrange(15_000, 32_000)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise RuntimeError("there is no free port")


@dataclass
class Connector:
    """No connector at all: the engine alone. The others say what is different."""

    name: str = "none"
    module: str = ""
    class_name: str = ""
    before: str | None = None

    def transfer(self, side: str) -> dict[str, Any] | None:
        """vLLM's `kv_transfer_config` of the prefill or the decode side, but for the class."""
        return None

    def env(self, side: str) -> dict[str, str]:
        """Variables of that side's process."""
        return {}

    def prefill_leg(self, transfer: str) -> dict[str, Any] | None:
        """`kv_transfer_params` of the prefill request."""
        return None

    def decode_leg(self, transfer: str, answered: dict[str, Any] | None) -> dict[str, Any] | None:
        """`kv_transfer_params` of the decode request, after prefill answered."""
        return answered


@dataclass
class KvFerry(Connector):
    """kvferry. `prefill_config`, `decode_config`: keys of its own configuration."""

    name: str = "kvferry"
    module: str = "kvferry.vllm"
    class_name: str = "KvFerryConnector"
    policy: str = "fail"
    prefill_config: dict[str, Any] = field(default_factory=dict)
    decode_config: dict[str, Any] = field(default_factory=dict)
    prefill_key: str = "a key for the tests, on both sides"
    decode_key: str = "a key for the tests, on both sides"
    port: int = field(default_factory=lambda: free_port(count=8))
    tp: int = 1
    """Ranks of either engine; prefill's listen at consecutive ports."""
    prefill_role: str = "kv_producer"

    def transfer(self, side: str) -> dict[str, Any] | None:
        if side == "prefill":
            extra = {"listen": f"127.0.0.1:{self.port}", **self.prefill_config}
            return {"kv_role": self.prefill_role, "kv_load_failure_policy": self.policy, "kv_connector_extra_config": extra}
        extra = {"listen": "127.0.0.1:0", **self.decode_config}
        return {"kv_role": "kv_consumer", "kv_load_failure_policy": self.policy, "kv_connector_extra_config": extra}

    def env(self, side: str) -> dict[str, str]:
        return {"KVFERRY_PSK": self.prefill_key if side == "prefill" else self.decode_key}

    def prefill_leg(self, transfer: str) -> dict[str, Any] | None:
        return PLACEHOLDERS | {"transfer_id": transfer, "tp_size": self.tp}

    def decode_first_leg(self, transfer: str, port: int | None = None) -> dict[str, Any]:
        """The decode leg of a router that posts both legs at once; `port` is prefill's unless another leads there."""
        return {
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_host": "127.0.0.1",
            "remote_port": port or self.port,
            "tp_size": self.tp,
        }


@dataclass
class Nixl(Connector):
    """vLLM's own NIXL connector (decode reads), over UCX with host memory."""

    name: str = "NIXL"
    module: str = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
    class_name: str = "NixlConnector"
    ucx_tls: str | None = None
    """UCX's transports: "tcp" for TCP only; on one host UCX else copies between the processes."""
    ports: dict[str, int] = field(default_factory=lambda: {"prefill": free_port(), "decode": free_port()})

    def transfer(self, side: str) -> dict[str, Any] | None:
        return {
            "kv_role": "kv_both",
            "engine_id": f"{side}-nixl",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"backends": ["UCX"]},
        }

    def env(self, side: str) -> dict[str, str]:
        values = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.ports[side])}
        return values | ({"UCX_TLS": self.ucx_tls} if self.ucx_tls else {})

    def prefill_leg(self, transfer: str) -> dict[str, Any] | None:
        return dict(PLACEHOLDERS)


@dataclass
class Mooncake(Connector):
    """vLLM's own Mooncake connector (prefill writes), over TCP."""

    name: str = "Mooncake"
    module: str = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
    class_name: str = "MooncakeConnector"
    before: str | None = "harness.mooncake_cpu"
    ports: dict[str, int] = field(default_factory=lambda: {"prefill": free_port(), "decode": free_port()})
    prefill_engine: str | None = None

    def transfer(self, side: str) -> dict[str, Any] | None:
        return {
            "kv_role": "kv_producer" if side == "prefill" else "kv_consumer",
            "engine_id": f"{side}-mooncake",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
        }

    def env(self, side: str) -> dict[str, str]:
        return {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.ports[side])}

    def prefill_leg(self, transfer: str) -> dict[str, Any] | None:
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}

    def decode_leg(self, transfer: str, answered: dict[str, Any] | None) -> dict[str, Any] | None:
        address = f"http://127.0.0.1:{self.ports['prefill']}"
        if self.prefill_engine is None:
            with urllib.request.urlopen(address + "/query", timeout=10) as reply:
                self.prefill_engine = next(iter(json.load(reply).values()))["engine_id"]
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_bootstrap_addr": address,
            "remote_engine_id": self.prefill_engine,
        }


@dataclass
class Example(Connector):
    """vLLM's example: files in a folder that both sides see, loaded before the step that needs them."""

    name: str = "files"
    module: str = "vllm.distributed.kv_transfer.kv_connector.v1.example_connector"
    class_name: str = "ExampleConnector"
    folder: str = ""

    def transfer(self, side: str) -> dict[str, Any] | None:
        return {
            "kv_role": "kv_producer" if side == "prefill" else "kv_consumer",
            "kv_connector_extra_config": {"shared_storage_path": self.folder},
        }



def new_transfer() -> str:
    """A transfer id as a router draws it: 128 random bits, in hexadecimal."""
    return secrets.token_hex(16)
