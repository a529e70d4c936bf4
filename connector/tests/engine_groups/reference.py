"""vLLM's own KV cache managers, asked one JSON line at a time; `engine_groups.rs` asks.

Three things are changed, which kvferry does otherwise and says so: of two blocks of one content one is cached; nothing is cached
inside a block; watermarks are given in blocks.
"""

import json
import sys
from types import SimpleNamespace

import torch
from vllm.v1.core import kv_cache_coordinator, kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager, register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)
from vllm.v1.request import RequestStatus

register_all_kvcache_specs(None)

insert_block_hash = BlockPool._insert_block_hash


def insert_once(pool, key, block, num_tokens):
    if pool.cached_block_hash_to_block.get_one_block(key) is None:
        insert_block_hash(pool, key, block, num_tokens)


BlockPool._insert_block_hash = insert_once
kv_cache_coordinator.partial_hash_hits_enabled = lambda *_, **__: False
kv_cache_utils.partial_hash_hits_enabled = lambda *_, **__: False
FullAttentionManager._cache_partial_tail_block = lambda *_, **__: None
MambaManager._cache_partial_tail_block = lambda *_, **__: None

DTYPES = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}


def spec_of(layer):
    kind, size, padded = layer["kind"], layer["size"], layer["padded"]
    if kind == "state":
        return MambaSpec(
            block_size=size,
            shapes=((layer["bytes"],),),
            dtypes=(torch.int8,),
            page_size_padded=padded,
            mamba_cache_mode=layer["keeping"],
            num_speculative_blocks=layer["speculative"],
        )
    common = {
        "block_size": size,
        "num_kv_heads": layer["heads"],
        "head_size": layer["head_size"],
        "dtype": DTYPES[layer["element"]],
        "page_size_padded": padded,
    }
    if kind == "latent":
        return MLAAttentionSpec(**common)
    common["head_size_v"] = layer["head_size_v"]
    if kind == "full":
        return FullAttentionSpec(**common, sliding_window=layer["window"], attention_chunk_size=layer["chunk"])
    if kind == "window":
        return SlidingWindowSpec(**common, sliding_window=layer["window"], extra_retained_tokens=layer["retained"])
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(**common, attention_chunk_size=layer["chunk"])
    if kind == "sink":
        return SinkFullAttentionSpec(**common, sink_len=layer["sinks"])
    assert kind == "cross", kind
    return CrossAttentionSpec(**common)


def plan(ask):
    layers = {str(at): spec_of(layer) for at, layer in enumerate(ask["layers"])}
    layout = SimpleNamespace(is_block_outermost=ask["packed"])
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=False, max_num_encoder_input_tokens=ask["encoder_tokens"]
        ),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout, mamba_cache_mode=ask["keeping"]),
        attention_config=None,
        speculative_config=None,
        model_config=SimpleNamespace(max_model_len=ask["tokens"]),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, pipeline_parallel_size=1),
        max_in_flight_tokens=ask["in_flight"],
    )
    try:
        groups = kv_cache_utils.get_kv_cache_groups(config, layers)
    except (NotImplementedError, AssertionError) as refused:
        return {"refused": str(refused)}
    except StopIteration:
        return {"lost": True}
    # Of a bucket with more layers of one page size than of another, some are in no group.
    if sum(len(group.layer_names) for group in groups) < len(layers):
        return {"lost": True}
    answer = []
    per_request = 0
    for group in groups:
        spec = group.kv_cache_spec
        mixed = isinstance(spec, UniformTypeKVCacheSpecs)
        pages = [(spec.kv_cache_specs[name] if mixed else spec).page_size_bytes for name in group.layer_names]
        size = next(iter(iter_layer_specs(spec))).block_size
        answer.append({"layers": [int(name) for name in group.layer_names], "pages": pages, "size": size})
        per_request += -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)
    stride = kv_cache_utils._get_kv_cache_bytes_per_block(groups, layout)
    return {"groups": answer, "block_bytes": stride, "per_request": per_request}


class Managers:
    def __init__(self, ask):
        groups = [
            KVCacheGroupSpec([str(at)], spec_of(group), is_eagle_group=group["draft"])
            for at, group in enumerate(ask["groups"])
        ]
        caching = ask["sharing"] != "off"
        retention = {"off": None, "dense": None, "replay": 0}.get(ask["sharing"], ask["sharing"])
        config = KVCacheConfig(
            num_blocks=ask["blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=retention if caching else None,
        )
        engine = SimpleNamespace(
            cache_config=SimpleNamespace(
                block_size=groups[0].kv_cache_spec.block_size, prefix_match_unit=None, enable_prefix_caching=caching
            ),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            kv_transfer_config=None,
        )
        self.hit_tokens, self.hash_tokens = kv_cache_utils.resolve_kv_cache_block_sizes(config, engine)
        self.manager = KVCacheManager(
            config,
            max_model_len=ask["max_tokens"],
            scheduler_block_size=self.hit_tokens,
            hash_block_size=self.hash_tokens,
            max_in_flight_tokens=ask["in_flight"],
            enable_caching=caching,
            use_eagle=any(group["draft"] for group in ask["groups"]),
        )
        self.manager.watermark_blocks = ask["watermark"]
        self.requests, self.hits = {}, {}

    def request(self, ask):
        hashes = [bytes.fromhex(text) for text in ask["hashes"]]
        request = self.requests.setdefault(ask["id"], SimpleNamespace(request_id=str(ask["id"])))
        request.__dict__.update(
            block_hashes=hashes,
            num_tokens=ask["tokens"],
            num_prompt_tokens=ask["prompt"],
            num_computed_tokens=ask["computed"],
            num_in_flight_tokens=ask["in_flight"],
            shared_prefix_boundary=ask["junction"],
            skip_reading_prefix_cache=False,
            status=RequestStatus.WAITING if ask["waits"] else RequestStatus.RUNNING,
        )
        return request

    def answer(self, ask):
        op, manager = ask["op"], self.manager
        if op == "step":
            manager.new_step_starts()
            return {}
        request = self.request(ask)
        if op == "lookup":
            blocks, tokens, junction = manager.get_computed_blocks(request)
            self.hits[ask["id"]] = (blocks, tokens)
            return {"tokens": tokens, "junction": junction, "ids": [list(group) for group in blocks.get_block_ids()]}
        answer = {}
        if op == "allocate":
            blocks, tokens = self.hits.pop(ask["id"], (None, 0)) if ask["begins"] else (None, 0)
            given = manager.allocate_slots(
                request,
                ask["new"],
                tokens,
                blocks,
                num_lookahead_tokens=ask["lookahead"],
                num_external_computed_tokens=ask["external"],
                delay_cache_blocks=True,
                num_encoder_tokens=ask["encoder_tokens"],
                full_sequence_must_fit=ask["whole"],
                reserved_blocks=ask["reserved"],
            )
            answer["given"] = given is not None
        elif op == "cache":
            manager.cache_blocks(request, ask["filled"])
        elif op == "free":
            manager.free(request)
        else:
            assert op == "evict", op
            ids = manager.get_block_ids(request.request_id)
            sizes = [group.kv_cache_spec.block_size for group in manager.kv_cache_config.kv_cache_groups]
            bad = {at for group, size in zip(ids, sizes) for at in group[ask["filled"] // size :] if at}
            manager.evict_blocks(bad)
        pool = manager.block_pool
        answer["ids"] = [list(group) for group in manager.get_block_ids(request.request_id)]
        answer["free"] = pool.get_num_free_blocks()
        answer["cached"] = len(pool.cached_block_hash_to_block)
        return answer


managers = None
for line in sys.stdin:
    ask = json.loads(line)
    if ask["op"] == "plan":
        answer = plan(ask)
    elif ask["op"] == "new":
        managers = Managers(ask)
        answer = {"hit_tokens": managers.hit_tokens, "hash_tokens": managers.hash_tokens}
    else:
        answer = managers.answer(ask)
    print(json.dumps(answer), flush=True)
