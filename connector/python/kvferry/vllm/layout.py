"""Reads vLLM's objects for kvferry: what the KV cache is, where it lies, and of which model."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec

import kvferry
from kvferry.vllm import eras

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass(frozen=True)
class LayerTensor:
    """One attention layer's tensor."""

    name: str
    data_ptr: int
    storage_ptr: int
    storage_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class CacheFacts:
    """One worker's KV cache."""

    device: str
    dtype: str
    axes: str
    whole_pages: bool
    blocks: int
    heads: int
    tokens_per_block: int
    head_size_k: int
    head_size_v: int
    layers: list[LayerTensor]


@dataclass(frozen=True)
class ModelFacts:
    """What the KV cache is of."""

    name: str
    fingerprint: str
    kv_heads: int
    rope_theta: float
    rope_elements: int
    rope_scaling: str
    options: list[tuple[str, str]]


def spec_of(kv_cache_config: KVCacheConfig) -> FullAttentionSpec:
    """The one kind of attention that all layers have."""
    return kv_cache_config.kv_cache_groups[0].kv_cache_spec


def is_packed(vllm_config: VllmConfig) -> bool:
    """Whether the engine's kernels place a block's tokens in an order of their own; known before any layer exists."""
    return vllm_config.device_config.device_type == "cpu"


def layer_names(kv_cache_config: KVCacheConfig) -> list[str]:
    """The attention layers in the model's order."""
    return sorted(kv_cache_config.kv_cache_groups[0].layer_names, key=extract_layer_index)


def cache_facts(
    kv_caches: dict[str, torch.Tensor], vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> CacheFacts:
    """What the engine's tensors and its configuration say of the cache."""
    spec = spec_of(kv_cache_config)
    names = layer_names(kv_cache_config)
    tensors = [kv_caches[name] for name in names]
    return CacheFacts(
        device=tensors[0].device.type,
        dtype=str(tensors[0].dtype).removeprefix("torch."),
        axes=eras.LAYER_AXES,
        whole_pages=is_packed(vllm_config),
        blocks=kv_cache_config.num_blocks,
        heads=spec.num_kv_heads,
        tokens_per_block=spec.block_size,
        head_size_k=spec.head_size,
        head_size_v=spec.head_size_v,
        layers=[_layer(name, tensor) for name, tensor in zip(names, tensors)],
    )


def model_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> ModelFacts:
    """What the engine's configuration says of the model."""
    model = vllm_config.model_config
    rope = _rope(model.hf_text_config)
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    theta = rope.get("rope_theta") or getattr(model.hf_text_config, "rope_theta", None) or 0.0
    elements = int(model.get_head_size() * float(rope.get("partial_rotary_factor") or 1.0))
    weights = _weights(vllm_config)
    options = {
        "engine": "vllm",
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization or "none"),
        "page": _page_format(vllm_config, kv_cache_config),
    }
    if not weights:
        options["weights"] = f"{vllm_config.load_config.load_format} of seed {model.seed}"
    return ModelFacts(
        name=_name(model),
        fingerprint=kvferry.fingerprint(_config_text(model.hf_config), weights),
        kv_heads=model.get_total_num_kv_heads(),
        rope_theta=float(theta),
        rope_elements=elements,
        rope_scaling=_canonical(scaling) if scaling else "none",
        options=sorted(options.items()),
    )


def more_of(request: Request) -> str:
    """What beside a prompt's tokens decides its KV, in one canonical text: an adapter, and images and the like by their hashes."""
    adapter = request.lora_request.lora_name if request.lora_request is not None else None
    media = [
        (feature.identifier, feature.mm_position.offset, feature.mm_position.length) for feature in request.mm_features
    ]
    return _canonical([adapter, media]) if adapter or media else ""


def _layer(name: str, tensor: torch.Tensor) -> LayerTensor:
    storage = tensor.untyped_storage()
    return LayerTensor(
        name=name,
        data_ptr=tensor.data_ptr(),
        storage_ptr=storage.data_ptr(),
        storage_bytes=storage.nbytes(),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
    )


def _page_format(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """How the tokens of one block and head lie: two engines with another one cannot read each other's pages."""
    if not is_packed(vllm_config):
        return "rows of tokens"
    names = layer_names(kv_cache_config)
    layers = [vllm_config.compilation_config.static_forward_context[name] for name in names]
    formats = {(layer.get_attn_backend().get_name(), getattr(layer, "isa", None)) for layer in layers}
    [(backend, isa)] = formats if len(formats) == 1 else [(None, None)]
    if backend not in eras.PACKED_BACKENDS or isa is None:
        found = ", ".join(sorted(f"{backend} ({isa})" for backend, isa in formats))
        raise ValueError(
            f"kvferry does not know how attention backend {found} places KV on the CPU; use one of "
            f"{', '.join(sorted(eras.PACKED_BACKENDS))} for all layers"
        )
    return f"{backend} {isa}, {spec_of(kv_cache_config).block_size} tokens"


def _name(model: Any) -> str:
    """The name for people: what the model is served as, without the folders of this machine."""
    served = model.served_model_name or model.model
    served = served[0] if isinstance(served, list) else served
    return os.path.basename(str(served).rstrip("/")) or str(served)


def _config_text(hf_config: Any) -> str:
    """The model's configuration without what differs between two copies of one model."""
    local = ("transformers_version", "torch_dtype", "dtype")
    config = {key: value for key, value in hf_config.to_dict().items() if not key.startswith("_") and key not in local}
    return _canonical(config)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _rope(hf_config: Any) -> dict[str, Any]:
    parameters = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None)
    return dict(parameters) if isinstance(parameters, dict) else {}


def _weights(vllm_config: VllmConfig) -> list[str]:
    """The files of the model's weights on this machine; none for weights that are made up at the start."""
    if vllm_config.load_config.load_format == "dummy":
        return []
    path = Path(vllm_config.model_config.model)
    if not path.exists():
        from huggingface_hub import snapshot_download

        # In the cache already: the model was loaded.
        path = Path(snapshot_download(str(path), revision=vllm_config.model_config.revision, local_files_only=True))
    if path.is_file():
        return [str(path)]
    for suffix in ("*.safetensors", "*.gguf", "*.bin", "*.pt"):
        if files := sorted(path.glob(suffix)):
            return [str(file) for file in files]
    raise ValueError(f"no weights (safetensors, gguf, bin, pt) are in {path}, so kvferry cannot tell this model from others")
