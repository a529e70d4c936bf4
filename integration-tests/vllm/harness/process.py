"""Engines as processes, seen from a test: start, ask, abort, look at, kill."""

import atexit
import itertools
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import child
from .spec import EngineSpec

PATIENCE_S = float(os.environ.get("TEST_PATIENCE_S", "120"))
"""Longer than anything here may take on a busy machine; no test passes or fails by the time that it took."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["harness.preload"])
_alive: set["EngineProcess"] = set()


class EngineDied(Exception):
    """The engine's process ended, or its engine raised; the text is the end of its log."""


@dataclass
class Answer:
    """How a request ended. `best`: for each step the two best tokens and their logits, best first, if margins were asked for."""

    tokens: list[int]
    reason: str | None
    kv: dict[str, Any] | None
    best: list[list[tuple[int, float]]]
    cached: int | None
    first_token_s: float | None
    """From the request's arrival at the engine to its first token."""
    total_s: float


@dataclass
class Handle:
    """A request that an engine works on."""

    engine: "EngineProcess"
    request: str
    began: float = 0.0
    first_at: float | None = None
    done: dict[str, Any] | None = field(default=None, repr=False)

    def answer(self) -> Answer:
        """Waits for the request's end."""
        self.engine.wait(lambda: self.done is not None, f"the end of {self.request}")
        done = self.done or {}
        if "error" in done:
            raise EngineDied(f"{self.engine.spec.name}: {self.request}: {done['error']}\n{self.engine.log_tail()}")
        first = self.first_at and self.first_at - self.began
        return Answer(
            done["tokens"], done["reason"], done["kv"], done["best"], done["cached"], first, done["at"] - self.began
        )

    def abort(self) -> None:
        """The client hangs up."""
        self.engine.call("abort", request=self.request)


class EngineProcess:
    """One vLLM engine."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.facts: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._calls = itertools.count()
        self._replies: dict[int, Any] = {}
        self._handles: dict[str, Handle] = {}
        self._error: str | None = None
        self._ready = False
        Path(spec.log).touch()
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(target=child.main, args=(theirs, spec), name=spec.name)
        self._process.start()
        theirs.close()
        _alive.add(self)
        threading.Thread(target=self._read, name=f"read-{spec.name}", daemon=True).start()

    def wait_ready(self) -> "EngineProcess":
        """Waits until the engine takes requests."""
        # The first one waits for the import of vLLM, from a disk that may be cold.
        self.wait(lambda: self._ready, "the engine's start", 5 * PATIENCE_S)
        return self

    def start(self, request: str, tokens: list[int], count: int, **how: Any) -> Handle:
        """Asks for `count` tokens after these. `kv`: its `kv_transfer_params`; `margins`: whether to tell the two best tokens."""
        handle = Handle(self, request)
        with self._changed:
            self._handles[request] = handle
        handle.began = self.call("add", request=request, tokens=tokens, count=count, **how)
        return handle

    def ask(self, request: str, tokens: list[int], count: int, **how: Any) -> Answer:
        """`start`, and waits for the answer."""
        return self.start(request, tokens, count, **how).answer()

    def call(self, command: str, **arguments: Any) -> Any:
        """Has the child obey a command, and returns its answer."""
        number = next(self._calls)
        try:
            self._connection.send((command, number, arguments))
        except OSError:
            self._fail("the connection to it broke")
        self.wait(lambda: number in self._replies, f"its answer to '{command}'")
        return self._replies.pop(number)

    def state(self) -> dict[str, Any]:
        """The scheduler's figures, from vLLM itself."""
        return self.call("state")

    def wait_connector_metric(self, name: str, labels: str, least: float) -> None:
        """Waits until kvferry's series is at least as large."""
        self.wait_true(lambda: self.connector_metric(name, labels) >= least, f"{name} of {least}")

    def wait_true(self, condition: Callable[[], bool], what: str) -> None:
        """Asks the engine again and again until something is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                self._fail(f"waited for {what}")
            # The engine's own steps are a millisecond apart.
            threading.Event().wait(0.002)

    def wait_state(self, wanted: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Looks at the state until it is as wanted."""
        seen: dict[str, Any] = {}

        def look() -> bool:
            seen.clear()
            seen.update(self.state())
            return wanted(seen)

        try:
            self.wait_true(look, what)
        except EngineDied as error:
            raise AssertionError(f"the scheduler's state is {seen}") from error
        return seen

    def wait_free(self) -> None:
        """Waits until the engine holds no request and no block, by vLLM's own count."""
        self.wait_state(
            lambda state: not state["requests"] and not state["used_blocks"] and state["usage"] == 0.0,
            "all blocks to be free",
        )

    def connector_metric(self, name: str, labels: str = "") -> float:
        """The sum of kvferry's series of this name whose labels contain `labels`."""
        total = 0.0
        for line in self.call("connector_metrics").splitlines():
            series, _, value = line.rpartition(" ")
            if series.split("{")[0] == name and labels in series:
                total += float(value)
        return total

    def events(self) -> list[dict[str, Any]]:
        """What the observer wrote so far."""
        path = Path((self.spec.observe or {})["events"])
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
        """Waits for something that the child's messages bring about."""
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._error is not None, patience_s)
            if condition():
                return
        self._fail(f"waited for {what}")

    def log_tail(self, lines: int = 40) -> str:
        """The end of the engine's log."""
        return "\n".join(Path(self.spec.log).read_text(errors="replace").splitlines()[-lines:])

    def is_alive(self) -> bool:
        """Whether the process runs and its engine raised nothing."""
        return self._process.is_alive() and self._error is None

    def kill(self) -> None:
        """Ends the process as a crash would: it can say nothing to anybody."""
        self._process.kill()
        self._process.join()
        _alive.discard(self)

    def close(self) -> None:
        """Lets the engine end in order; kills it if it does not."""
        if self not in _alive:
            return
        try:
            self._connection.send(("stop", -1, {}))
        except OSError:
            pass
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        _alive.discard(self)

    def _read(self) -> None:
        try:
            while True:
                kind, *rest = self._connection.recv()
                with self._changed:
                    self._take(kind, *rest)
                    self._changed.notify_all()
        except (EOFError, OSError):
            with self._changed:
                self._error = self._error or "its process ended"
                self._changed.notify_all()

    def _take(self, kind: str, *rest: Any) -> None:
        match kind:
            case "ready":
                self.facts, self._ready = rest[0], True
            case "first":
                self._handles[rest[0]].first_at = rest[1]["at"]
            case "done":
                self._handles[rest[0]].done = rest[1]
            case "reply":
                self._replies[rest[0]] = rest[1]
            case "error":
                self._error = rest[0]

    def _fail(self, doing: str) -> None:
        raise EngineDied(f"{self.spec.name}: {doing}: {self._error or 'nothing came'}\n{self.log_tail()}")


@atexit.register
def _kill_all() -> None:
    """Runs before multiprocessing's own handler, which would wait for the children for ever."""
    for engine in list(_alive):
        engine.kill()
