#!/usr/bin/env python3
"""kvferry, NIXL and Mooncake between two real vLLM engines: the same model, the same prompts, one run.

    python side_by_side.py [--passes 3] [--rounds 4] [--lengths 512,1024,2048] [--json FILE]
                           [--connectors kvferry,kvferry-tcp,nixl,nixl-tcp,mooncake]

Each engine is one process with one thread that computes, prefill on core 0 and decode on core 1. Prefill answers first; then
decode is asked. One pair runs at a time, since some connectors' threads spin while they have nothing to do; the connectors take turns,
pass by pass, so that what else the machine does falls on all of them. Medians of:

- TTFT: from the request's arrival at decode to its first token: the hand-over and one token's compute;
- transfer: from the step that orders the load to the step in which the connector says that it is there;
- engine thread: time inside the connector's methods, per engine step, scheduler and worker half together, on either side;
- prefill: the prompt's time at prefill, which a connector's own threads can make longer.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.connectors import Connector, KvFerry, Mooncake, Nixl, new_transfer
from harness.model import MEDIUM, make, prompt
from harness.pair import Pair, engine

KINDS = {
    "kvferry": ("kvferry (memory of the other process, digests)", KvFerry),
    "kvferry-tcp": ("kvferry (TCP, digests)", lambda: KvFerry(decode_config={"paths": ["tcp"]})),
    "nixl": ("NIXL 1.5.1 (UCX: memory of the other process)", Nixl),
    "nixl-tcp": ("NIXL 1.5.1 (UCX over TCP)", lambda: Nixl(ucx_tls="tcp")),
    "mooncake": ("Mooncake 0.3.13 (TCP)", Mooncake),
}
ANSWER = 8
KV_BYTES = 192 << 20


@dataclass
class Row:
    """What one connector did with prompts of one length, in milliseconds; a number for each round."""

    ttft: list[float] = field(default_factory=list)
    transfer: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    prefill_steps: list[float] = field(default_factory=list)
    decode_steps: list[float] = field(default_factory=list)
    wrong: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[512, 1024, 2048])
    parser.add_argument("--connectors", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    unknown = set(options.connectors) - set(KINDS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")

    folder = Path(tempfile.mkdtemp(prefix="side-by-side-"))
    model = make(MEDIUM)
    print(f"logs: {folder}", file=sys.stderr)
    wanted = answers_alone(folder, model, options)
    rows = {(kind, length): Row() for kind in options.connectors for length in options.lengths}
    for pass_ in range(options.passes):
        for kind in options.connectors:
            print(f"pass {pass_ + 1} of {options.passes}: {KINDS[kind][0]}", file=sys.stderr)
            both = start(folder, model, KINDS[kind][1](), options.dtype)
            try:
                for round_ in range(-1, options.rounds):
                    for length in options.lengths:
                        text = prompt(length, seed_of(length, round_))
                        measure(both, rows[kind, length], text, wanted[length, round_], warm_up=round_ < 0)
            finally:
                both.close()
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([{"connector": kind, "tokens": length} | vars(row) for (kind, length), row in rows.items()]))
    return 1 if any(row.wrong for row in rows.values()) else 0


def start(folder: Path, model: Path, connector: Connector, dtype: str) -> Pair:
    how: dict[str, Any] = {"dtype": dtype, "kv_bytes": KV_BYTES, "max_len": 4096, "prefix_caching": False, "timings": True}
    engines = [engine(folder, model, connector, side, **how) for side in ("prefill", "decode")]
    for one in engines:
        one.wait_ready()
    return Pair(connector, *engines)


def answers_alone(folder: Path, model: Path, options: argparse.Namespace) -> dict[tuple[int, int], list[int]]:
    """What an engine says that computes prompt and answer itself."""
    alone = engine(folder, model, Connector(), "aggregated", dtype=options.dtype, max_len=4096, prefix_caching=False, kv_bytes=KV_BYTES)
    alone.wait_ready()
    answers = {}
    for length in options.lengths:
        for round_ in range(-1, options.rounds):
            tokens = prompt(length, seed_of(length, round_))
            answers[length, round_] = alone.ask(f"a{length}-{round_}", tokens, ANSWER).tokens
    alone.close()
    return answers


def seed_of(length: int, round_: int) -> int:
    """The same prompts for every connector."""
    return 1000 * length + round_ + 1


def measure(both: Pair, row: Row, tokens: list[int], wanted: list[int], warm_up: bool) -> None:
    """One request through the pair. The first of each length is for connections, caches and page faults, and does not count."""
    both.prefill.call("timings")
    both.decode.call("timings")
    name, transfer = f"r{next(both.requests)}", new_transfer()
    computed = both.prefill.ask(name, tokens, 1, kv=both.connector.prefill_leg(transfer))
    answer = both.decode.ask(name, tokens, ANSWER, kv=both.connector.decode_leg(transfer, computed.kv))
    both.prefill.wait_state(lambda state: not state["requests"], "prefill to free the blocks")
    prefill, decode = both.prefill.call("timings"), both.decode.call("timings")
    if warm_up:
        return
    # At bfloat16 two tokens may be within float noise; the tests look into that. Here it is counted and shown.
    row.wrong += answer.tokens[:1] != wanted[:1]
    row.ttft.append(1e3 * (answer.first_token_s or 0.0))
    row.transfer += [1e3 * seconds for seconds in decode["transfers"]]
    row.prefill.append(1e3 * computed.total_s)
    row.prefill_steps += [1e3 * seconds for seconds in prefill["steps"]]
    row.decode_steps += [1e3 * seconds for seconds in decode["steps"]]


def table(rows: dict[tuple[str, int], Row]) -> str:
    """Markdown, as it goes into the README."""
    lines = [
        "| prompt | connector | TTFT at decode | transfer | engine thread per step, decode (p99) | prefill (p99) | prompt at prefill |",
        "|---|---|---|---|---|---|---|",
    ]
    for (kind, length), row in sorted(rows.items(), key=lambda item: item[0][1]):
        note = f" ({row.wrong} answers differ)" if row.wrong else ""
        lines.append(
            f"| {length} | {KINDS[kind][0]}{note} | {_ms(row.ttft)} | {_ms(row.transfer)} | {_steps(row.decode_steps)} "
            f"| {_steps(row.prefill_steps)} | {_ms(row.prefill)} |"
        )
    return "\n".join(lines)


def _ms(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ms" if values else "none"


def _steps(values: list[float]) -> str:
    if not values:
        return "none"
    ranked = sorted(values)
    return f"{1e3 * statistics.median(ranked):.0f} µs ({1e3 * ranked[int(0.99 * (len(ranked) - 1))]:.0f})"


if __name__ == "__main__":
    sys.exit(main())
