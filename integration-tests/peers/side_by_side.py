#!/usr/bin/env python3
"""kvferry's transports beside NIXL's and Mooncake's: the same blocks between two processes of this machine, in one run.

    python side_by_side.py [--passes 3] [--rounds 3] [--requests 200] [--memory 256] [--block 16,64,512,2048]
                           [--only "kvferry tcp,NIXL tcp write"] [--json FILE]

The peers take turns, pass by pass, in processes that end after their turn, since some have threads that spin while nothing moves; so
what else the machine does falls on all of them. Scattered blocks on both sides, every byte compared after each pass, outside of its
time. Figures are medians: rates of all rounds of all passes, latencies of all requests. kvferry stands there with its digests, made and
compared within the time, and without; the peers verify nothing by themselves.

A request is 64 blocks. A write's latency ends when its initiator knows that the bytes are there, a read's when they are; for kvferry
when they are there, compared, and the measuring side knows it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines import ENGINES
from pair import Effort, run

REPOSITORY = Path(__file__).resolve().parents[2]
UNAVAILABLE = 3
"""What `kvferry bench` exits with for a transport that is not here."""


@dataclass
class Row:
    """What one path did at one block size, over all passes."""

    gbps: list[float] = field(default_factory=list)
    one_p50: list[float] = field(default_factory=list)
    one_p99: list[float] = field(default_factory=list)
    request_p50: list[float] = field(default_factory=list)
    request_p99: list[float] = field(default_factory=list)
    connect: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)
    limit_name: str | None = None
    verified: bool = True

    def figures(self) -> dict[str, Any]:
        """The medians, under the names of `kvferry bench --json`."""
        limit = median(self.limit) if self.limit else None
        return {
            "gbps_median": median(self.gbps),
            "gbps_best": round(max(self.gbps), 3),
            "one_block_us": {"p50": median(self.one_p50), "p99": median(self.one_p99)},
            "request_us": {"p50": median(self.request_p50), "p99": median(self.request_p99)},
            "connect_us": median(self.connect),
            "limit_name": self.limit_name,
            "limit_gbps": limit,
            "verified": self.verified,
        }


def main() -> int:
    options = arguments()
    program = options.kvferry or build()
    sizes = tuple(size << 10 for size in options.block)
    effort = Effort(sizes, options.memory << 20, options.rounds, options.requests)
    rows: dict[tuple[str, int], Row] = {}
    paths = [path for path in all_paths(program) if not options.only or path in options.only]
    if not paths:
        print(f"--only names none of: {', '.join(all_paths(program))}", file=sys.stderr)
        return 2
    for pass_ in range(options.passes):
        for path in paths:
            print(f"pass {pass_ + 1} of {options.passes}: {path}", file=sys.stderr)
            found = run(path, effort) if path in ENGINES else kvferry(program, path, effort)
            for row in found:
                add(rows.setdefault((path, row["block_bytes"]), Row()), row)
    print(table(rows, paths, sizes))
    if options.json:
        found = [{"transport": path, "block_bytes": block} | row.figures() for (path, block), row in rows.items()]
        options.json.write_text(json.dumps({"cores": os.cpu_count(), "effort": vars(effort), "rows": found}, indent=1))
    return 0 if all(row.verified for row in rows.values()) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--passes", type=int, default=3, help="how often each path takes its turn")
    parser.add_argument("--rounds", type=int, default=3, help="measured passes over all blocks in one turn")
    parser.add_argument("--requests", type=int, default=200, help="measured requests of each kind in one turn")
    parser.add_argument("--memory", type=int, default=256, help="MiB of blocks on either side")
    parser.add_argument("--block", type=numbers, default=[16, 64, 512, 2048], help="block sizes in KiB")
    parser.add_argument("--only", type=lambda text: text.split(","), help="paths, with commas")
    parser.add_argument("--kvferry", type=Path, help="the program; built if it is not given")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args()


def build() -> Path:
    """Builds the command as it is released."""
    subprocess.run(["cargo", "build", "--quiet", "--release", "-p", "kvferry-cli"], cwd=REPOSITORY, check=True)
    return Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target")) / "release" / "kvferry"


def all_paths(program: Path) -> list[str]:
    """The peers, and each transport of kvferry that is here, with and without digests."""
    here = [transport for transport in ("tcp", "uds", "shm", "ucx") if is_here(program, transport)]
    ours = [f"kvferry {transport}{digest}" for transport in here for digest in ("", ", no digest")]
    return ours + list(ENGINES)


def is_here(program: Path, transport: str) -> bool:
    tiny = ["--block", "4KiB", "--memory", "64KiB", "--rounds", "1", "--requests", "1"]
    ended = subprocess.run([program, "bench", "--transport", transport, *tiny], capture_output=True, text=True, check=False)
    if ended.returncode not in (0, UNAVAILABLE):
        raise RuntimeError(f"kvferry bench --transport {transport}: {ended.stderr}")
    return ended.returncode == 0


def kvferry(program: Path, path: str, effort: Effort) -> list[dict[str, Any]]:
    """One turn of `kvferry bench`; it pushes, as the peers' writes do."""
    transport, _, without = path.removeprefix("kvferry ").partition(", ")
    words = ["--transport", transport, "--digest", "off" if without else "on", "--verify", "--json"]
    words += ["--block", ",".join(map(str, effort.sizes)), "--memory", str(effort.memory)]
    words += ["--rounds", str(effort.rounds), "--requests", str(effort.requests)]
    ended = subprocess.run([program, "bench", *words], stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"kvferry bench {' '.join(words)} ended with {ended.returncode}")
    return json.loads(ended.stdout)["sizes"]


def add(row: Row, found: dict[str, Any]) -> None:
    """Takes the figures of one turn. The peers give samples; kvferry gives what it made of them."""
    if "gbps" in found:
        row.gbps += found["gbps"]
        for samples, p50, p99 in ((found["one_block_us"], row.one_p50, row.one_p99), (found["request_us"], row.request_p50, row.request_p99)):
            p50.append(statistics.median(samples))
            p99.append(sorted(samples)[min(len(samples) - 1, len(samples) * 99 // 100)])
    else:
        row.gbps += found["gbps_rounds"]
        for micros, p50, p99 in ((found["one_block_us"], row.one_p50, row.one_p99), (found["request_us"], row.request_p50, row.request_p99)):
            p50.append(micros["p50"])
            p99.append(micros["p99"])
        if found["limit_gbps"] is not None:
            row.limit.append(found["limit_gbps"])
            row.limit_name = found["limit_name"]
    # Until the first block is there, as the peers' handshakes are partly in the first transfer.
    row.connect.append(found["connect_us"] + found.get("first_block_us", 0.0))
    row.verified &= found["verified"]


def table(rows: dict[tuple[str, int], Row], paths: list[str], sizes: tuple[int, ...]) -> str:
    """One line for each path and size, in Markdown."""
    lines = [
        "| block | path | GB/s (best) | limit | one block, us p50 / p99 | 64 blocks, us p50 / p99 | connect and first block, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for size in sizes:
        for path in paths:
            row = rows[path, size].figures()
            limit = "" if row["limit_gbps"] is None else f"{row['limit_gbps']:.2f} ({row['limit_name']})"
            one, request = row["one_block_us"], row["request_us"]
            wrong = "" if row["verified"] else " **WRONG BYTES**"
            lines.append(
                f"| {size >> 10} KiB | {path}{wrong} | {row['gbps_median']:.2f} ({row['gbps_best']:.2f}) | {limit} "
                f"| {one['p50']:.0f} / {one['p99']:.0f} | {request['p50']:.0f} / {request['p99']:.0f} | {row['connect_us'] / 1e3:.1f} |"
            )
    return "\n".join(lines)


def median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


if __name__ == "__main__":
    sys.exit(main())
