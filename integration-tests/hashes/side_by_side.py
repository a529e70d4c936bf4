"""vLLM's block hashes and block pool beside kvferry's, in one run on one core.

    VENV=$(integration-tests/vllm/environment.sh)
    $VENV/bin/python integration-tests/hashes/side_by_side.py

Builds and runs `cargo bench -p kvferry --bench engine_figures`; with an argument it runs that program instead. All times are CPU time of the
one thread that works, medians of 9. Fails if the hashes differ. What counts is the ratio.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool

BLOCK_TOKENS, BLOCKS, REQUEST_BLOCKS, ROUNDS = 16, 4096, 1000, 9


def median_seconds(times, work):
    rounds = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(times):
            work()
        rounds.append((time.thread_time() - start) / times)
    return sorted(rounds)[ROUNDS // 2]


def chain(hash_function, tokens):
    """As `Request.block_hashes` grows: one call of `hash_block_tokens` a block."""
    parent = None
    for start in range(0, len(tokens), BLOCK_TOKENS):
        parent = kv_cache_utils.hash_block_tokens(hash_function, parent, tokens[start : start + BLOCK_TOKENS])
    return parent


def vllm_figures():
    tokens = [at * 2_654_435_761 % 128_256 for at in range(BLOCKS * BLOCK_TOKENS)]
    figures = {"hash": {}}
    for name in ["sha256", "sha256_cbor"]:
        hash_function = get_hash_fn_by_name(name)
        kv_cache_utils.init_none_hash(hash_function)
        seconds = median_seconds(1, lambda: chain(hash_function, tokens))
        figures["hash"][name] = {"blocks_per_s": BLOCKS / seconds, "last": chain(hash_function, tokens).hex()}
    pool = BlockPool(100_001, True, BLOCK_TOKENS)

    def request():
        pool.free_blocks(reversed(pool.get_new_blocks(REQUEST_BLOCKS)))

    figures["request_us"] = median_seconds(20, request) * 1e6
    return figures


def our_figures():
    root = Path(__file__).resolve().parents[2]
    bench = ["cargo", "bench", "--quiet", "-p", "kvferry", "--bench", "engine_figures"]
    command = [*sys.argv[1:], "--bench"] if len(sys.argv) > 1 else bench
    return json.loads(subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout)


def main():
    theirs, ours = vllm_figures(), our_figures()
    for name, figures in ours["hash"].items():
        line = f"{name:12} kvferry {figures['blocks_per_s'] / 1e6:6.2f} million blocks/s"
        if beside := theirs["hash"].get(name):
            assert beside["last"] == figures["last"], f"{name}: {beside['last']} is not {figures['last']}"
            line += f"   vLLM {beside['blocks_per_s'] / 1e6:6.3f}   ratio {figures['blocks_per_s'] / beside['blocks_per_s']:5.1f}"
        print(line)
    ratio = theirs["request_us"] / ours["request_us"]
    print(f"{REQUEST_BLOCKS} blocks   kvferry {ours['request_us']:6.2f} us   vLLM {theirs['request_us']:6.1f} us   ratio {ratio:5.1f}")


if __name__ == "__main__":
    main()
