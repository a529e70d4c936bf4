"""The peers: how each is set up, and how it moves blocks. One object a process; the harness times it."""

import importlib
import os
from typing import Any

import numpy as np

from blocks import Arena


class Engine:
    """A transfer engine between two processes, of which one initiates: the sender if it writes, else the receiver."""

    name = ""
    writes = True
    env: dict[str, str] = {}

    def open(self, side: str, initiates: bool) -> None:
        """Starts it in this process."""
        raise NotImplementedError

    def register(self, arena: Arena) -> Any:
        """Registers the arena, and gives what the other side must know."""
        raise NotImplementedError

    def connect(self, card: Any) -> None:
        """Makes the other side known. Of the initiator's the time is taken, with that of the first block."""
        raise NotImplementedError

    def prepare(self, block: int, mine: np.ndarray, theirs: np.ndarray) -> None:
        """Says which blocks will move, in order, before the clock runs; once for each size."""
        raise NotImplementedError

    def move(self, first: int, count: int) -> None:
        """Moves blocks `first` to `first + count` of the order, and returns when they are there."""
        raise NotImplementedError


class Nixl(Engine):
    """NIXL over UCX, with prepared descriptor lists as vLLM's NixlConnector uses them."""

    def __init__(self, name: str, operation: str, tls: str | None, initiator_thread: bool) -> None:
        self.name, self.operation, self.initiator_thread = name, operation, initiator_thread
        self.writes = operation == "WRITE"
        self.env = {"NIXL_LOG_LEVEL": "ERROR"} | ({"UCX_TLS": tls} if tls else {})

    def open(self, side: str, initiates: bool) -> None:
        api = importlib.import_module("nixl._api")
        # The target needs the thread: nothing else drives its side.
        config = api.nixl_agent_config(enable_prog_thread=self.initiator_thread or not initiates, backends=["UCX"])
        self._agent = api.nixl_agent(side, config)
        self._lists: list[Any] = []

    def register(self, arena: Arena) -> Any:
        self._arena = arena
        self._agent.register_memory([(arena.address, arena.size, 0, "")], "DRAM")
        return self._agent.get_agent_metadata(), arena.address

    def connect(self, card: Any) -> None:
        metadata, self._base = card
        name = self._agent.add_remote_agent(metadata)
        self._other = name.decode() if isinstance(name, bytes) else name
        self._agent.make_connection(self._other)

    def prepare(self, block: int, mine: np.ndarray, theirs: np.ndarray) -> None:
        for one in self._lists:
            self._agent.release_dlist_handle(one)
        local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._places(self._arena.address, block), "DRAM")
        remote = self._agent.prep_xfer_dlist(self._other, self._places(self._base, block), "DRAM")
        self._lists = [local, remote]
        self._mine, self._theirs = mine.astype(np.int32), theirs.astype(np.int32)

    def _places(self, base: int, block: int) -> np.ndarray:
        places = np.zeros((self._arena.size // block, 3), dtype=np.uint64)
        places[:, 0] = base + np.arange(len(places), dtype=np.uint64) * np.uint64(block)
        places[:, 1] = block
        return places

    def move(self, first: int, count: int) -> None:
        span = slice(first, first + count)
        local, remote = self._lists
        transfer = self._agent.make_prepped_xfer(self.operation, local, self._mine[span], remote, self._theirs[span])
        state = self._agent.transfer(transfer)
        while state != "DONE":
            if state == "ERR":
                raise RuntimeError("NIXL says that the transfer failed")
            state = self._agent.check_xfer_state(transfer)
        self._agent.release_xfer_handle(transfer)


class Mooncake(Engine):
    """Mooncake's transfer engine over TCP, without a metadata server, as vLLM's and SGLang's connectors use it."""

    # More blocks in one call than this are slower.
    CALL_BLOCKS = 256

    def __init__(self, name: str, operation: str) -> None:
        self.name, self.operation = name, operation
        self.writes = operation == "WRITE"
        self.env = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}

    def open(self, side: str, initiates: bool) -> None:
        self._engine = importlib.import_module("mooncake.engine").TransferEngine()
        self._check(self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), "initialize")
        self._call = self._engine.batch_transfer_sync_write if self.writes else self._engine.batch_transfer_sync_read

    def register(self, arena: Arena) -> Any:
        self._arena = arena
        self._check(self._engine.register_memory(arena.address, arena.size), "register_memory")
        return f"127.0.0.1:{self._engine.get_rpc_port()}", arena.address

    def connect(self, card: Any) -> None:
        # The handshake is in the first transfer.
        self._other, self._base = card

    def prepare(self, block: int, mine: np.ndarray, theirs: np.ndarray) -> None:
        size = np.uint64(block)
        self._mine = (self._arena.address + mine.astype(np.uint64) * size).tolist()
        self._theirs = (self._base + theirs.astype(np.uint64) * size).tolist()
        self._block = block

    def move(self, first: int, count: int) -> None:
        end = first + count
        for at in range(first, end, self.CALL_BLOCKS):
            to = min(at + self.CALL_BLOCKS, end)
            lengths = [self._block] * (to - at)
            self._check(self._call(self._other, self._mine[at:to], self._theirs[at:to], lengths), self.operation)

    def _check(self, code: int, what: str) -> None:
        if code != 0:
            raise RuntimeError(f"Mooncake's {what} gives {code}")


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in [
        Nixl("NIXL tcp write", "WRITE", "tcp", True),
        # What vLLM's NixlConnector does: decode reads.
        Nixl("NIXL tcp read", "READ", "tcp", True),
        # UCX's own choice on one host: it copies out of the other process's memory. Fastest without a thread that spins.
        Nixl("NIXL shm read", "READ", None, False),
        Mooncake("Mooncake tcp write", "WRITE"),
    ]
}


def enter(engine: Engine) -> None:
    """Sets what must be in the environment before the engine's libraries are loaded."""
    os.environ.update(engine.env)
