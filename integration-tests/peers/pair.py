"""Two processes with one peer between them: the sender's blocks go to the receiver, timed where the transfer is initiated."""

import json
import multiprocessing
import os
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from blocks import Arena, orders
from engines import ENGINES, enter

REQUEST_BLOCKS = 64
PATIENCE_S = 300


@dataclass(frozen=True)
class Effort:
    """How much is measured in one start."""

    sizes: tuple[int, ...]
    memory: int
    rounds: int
    requests: int


def run(name: str, effort: Effort) -> list[dict[str, Any]]:
    """Starts the two processes of a peer, measures all sizes, and ends them. One row for each size."""
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe(), context.Pipe()
    link = context.Pipe()
    sides = [
        context.Process(target=_side, args=(side, name, effort, end[1], link[at]), daemon=True)
        for at, (side, end) in enumerate(zip(("sender", "receiver"), ends))
    ]
    for side in sides:
        side.start()
    initiator = ends[0 if ENGINES[name].writes else 1][0]
    try:
        if not initiator.poll(PATIENCE_S):
            raise RuntimeError(f"{name}: nothing for {PATIENCE_S} s")
        answer = json.loads(initiator.recv())
    finally:
        for side in sides:
            side.join(5)
            if side.is_alive():
                side.kill()
    if "error" in answer:
        raise RuntimeError(f"{name}: {answer['error']}")
    return answer["rows"]


def _side(side: str, name: str, effort: Effort, report: Connection, link: Connection) -> None:
    """One of the two processes."""
    engine = ENGINES[name]
    enter(engine)
    initiates = (side == "sender") == engine.writes
    try:
        arena = Arena(effort.memory)
        engine.open(side, initiates)
        link.send(engine.register(arena))
        card = link.recv()
        if initiates:
            rows = _initiate(side, name, effort, arena, card, link)
            report.send(json.dumps({"rows": rows}))
        else:
            # Of the two only NIXL must know whoever writes to it or reads from it.
            engine.connect(card)
            _follow(side, arena, link)
    except BaseException as error:  # noqa: BLE001: said to the harness, whatever it is
        traceback.print_exc()
        report.send(json.dumps({"error": repr(error)}))
    # The peers' libraries do not always survive their own destructors.
    sys.stdout.flush()
    os._exit(0)


def _initiate(side: str, name: str, effort: Effort, arena: Arena, card: Any, link: Connection) -> list[dict[str, Any]]:
    engine = ENGINES[name]
    rows: list[dict[str, Any]] = []
    connect_us = None
    for block in effort.sizes:
        count = effort.memory // block
        sources, targets = orders(count)
        mine, theirs = (sources, targets) if side == "sender" else (targets, sources)
        _ready(side, arena, block)
        _tell(link, "ready", block)
        start = time.perf_counter()
        if connect_us is None:
            engine.connect(card)
        engine.prepare(block, mine, theirs)
        engine.move(0, 1)
        if connect_us is None:
            connect_us = _micros(start)
        rates, wrong = [], 0
        for number in range(effort.rounds + 1):
            wrong += _poison(side, arena, link)
            start = time.perf_counter()
            engine.move(0, count)
            seconds = time.perf_counter() - start
            wrong += _wrong(side, arena, link, block)
            # The first pass wakes everything.
            if number > 0:
                rates.append(count * block / seconds / 1e9)
        one = _requests(engine, 1, count, effort.requests)
        request = _requests(engine, REQUEST_BLOCKS, count, effort.requests if block < 512 << 10 else max(effort.requests // 5, 10))
        rows.append(
            {
                "transport": name,
                "block_bytes": block,
                "gbps": rates,
                "one_block_us": one,
                "request_us": request,
                "connect_us": connect_us,
                "verified": wrong == 0,
                "wrong_blocks": wrong,
            }
        )
    _tell(link, "end", 0)
    return rows


def _follow(side: str, arena: Arena, link: Connection) -> None:
    while True:
        word, block = link.recv()
        if word == "ready":
            _ready(side, arena, block)
            link.send(0)
        elif word == "poison":
            arena.poison()
            link.send(0)
        elif word == "compare":
            link.send(arena.wrong_blocks(block, *orders(arena.size // block)))
        else:
            link.send(0)
            return


def _ready(side: str, arena: Arena, block: int) -> None:
    if side == "sender":
        arena.fill(block)


def _poison(side: str, arena: Arena, link: Connection) -> int:
    if side == "receiver":
        arena.poison()
        return 0
    return _tell(link, "poison", 0)


def _wrong(side: str, arena: Arena, link: Connection, block: int) -> int:
    if side == "receiver":
        return arena.wrong_blocks(block, *orders(arena.size // block))
    return _tell(link, "compare", block)


def _tell(link: Connection, word: str, block: int) -> int:
    link.send((word, block))
    return link.recv()


def _requests(engine: Any, blocks: int, count: int, requests: int) -> list[float]:
    blocks = min(blocks, count)
    places = count // blocks
    samples = []
    for number in range(-10, requests):
        first = number % places * blocks
        start = time.perf_counter()
        engine.move(first, blocks)
        if number >= 0:
            samples.append(_micros(start))
    return samples


def _micros(start: float) -> float:
    return (time.perf_counter() - start) * 1e6
