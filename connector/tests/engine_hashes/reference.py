"""Names blocks as vLLM and SGLang do, with CPython's own pickle, hashlib, cbor2 and xxhash.

Reads one case a line from stdin, as JSON, and answers the root and all blocks, in hexadecimal. What vLLM does is written down from
its `v1/core/kv_cache_utils.py` (0.32.0): `_gen_mm_extra_hash_keys`, `generate_block_hash_extra_keys`, `hash_block_tokens`.
"""

import hashlib
import json
import pickle
import struct
import sys

import cbor2
import xxhash

SERIALIZED = {
    "sha256": lambda value: hashlib.sha256(pickle.dumps(value, protocol=5)).digest(),
    "sha256_cbor": lambda value: hashlib.sha256(cbor2.dumps(value, canonical=True)).digest(),
    "xxhash": lambda value: xxhash.xxh3_128_digest(pickle.dumps(value, protocol=5)),
    "xxhash_cbor": lambda value: xxhash.xxh3_128_digest(cbor2.dumps(value, canonical=True)),
}


def media_keys(case, start, end, at):
    """The media that the block touches, looked for from `at` on; and where the next block's search begins."""
    keys = []
    while at < len(case["media"]):
        identifier, offset, tokens = case["media"][at]
        if end <= offset:
            break
        if start >= offset + tokens:
            at += 1
            continue
        keys.append(
            {"tagged": ("mm", identifier, offset - start), "bare": (identifier, offset - start), "names": identifier}[
                case["form"]
            ]
        )
        if end < offset + tokens:
            break
        at += 1
    return keys, at


def vllm(case):
    hashed, size = SERIALIZED[case["algorithm"]], case["tokens_per_block"]
    tagged = case["form"] == "tagged"
    parent = hashed(case["seed"])
    hashes, at = [parent], 0
    for block in range(len(case["tokens"]) // size):
        start, end = block * size, (block + 1) * size
        keys = []
        if case["lora"]:
            name, path = case["lora"]
            keys.append(("lora", name, path) if tagged else name)
        media, at = media_keys(case, start, end, at)
        keys += media
        if case["salt"] and block == 0:
            keys.append(("cache_salt", case["salt"]) if tagged else case["salt"])
        if block < len(case["embeds"]):
            digest = bytes.fromhex(case["embeds"][block])
            keys.append(("prompt_embeds", digest) if tagged else digest)
        parent = hashed((parent, tuple(case["tokens"][start:end]), tuple(keys) or None))
        hashes.append(parent)
    return hashes


def sglang(case):
    size, tokens = case["tokens_per_block"], case["tokens"]
    items = [pair for pair in zip(tokens, tokens[1:])] if case["bigrams"] else [(token,) for token in tokens]
    digest = hashlib.sha256(b"sglang-cache-salt-v1\0" + case["salt"].encode()).digest() if case["salt"] else None
    hashes = [digest or bytes(32)]
    for page in range(len(items) // size):
        page_hash = hashlib.sha256(digest or b"")
        for item in items[page * size : (page + 1) * size]:
            for token in item:
                page_hash.update(struct.pack("<I", token))
        digest = page_hash.digest()
        hashes.append(digest)
    return hashes


def twins(case):
    """One string object twice, and two objects of the same text: the hashes that a name with both could have."""
    hashed, text = SERIALIZED[case["algorithm"]], case["salt"]
    other = "".join(list(text))
    assert other == text and other is not text
    return [hashed((b"parent", (1, 2), (text, text))), hashed((b"parent", (1, 2), (text, other)))]


for line in sys.stdin:
    case = json.loads(line)
    answer = {"sglang": sglang, "twins": twins}.get(case["algorithm"] if case["kind"] == "chain" else case["kind"], vllm)(case)
    print(json.dumps([digest.hex() for digest in answer]), flush=True)
