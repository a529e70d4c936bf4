"""Small Llama checkpoints with random weights: no tokenizer, token ids in and out.

The weights are large enough that every output depends on every prompt token, so a wrong byte in a KV cache shows in the text.
"""

import hashlib
import json
import os
import random
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes. KV bytes of one token: `layers * kv_heads * 2 * head_dim * bytes of the dtype`."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    spread: float
    """Standard deviation of the weights."""
    vocabulary: int = 2048
    max_positions: int = 4096
    seed: int = 0


TINY = Shape("tiny", layers=4, hidden=256, intermediate=512, heads=8, kv_heads=4, head_dim=32, spread=0.2)
OTHER_GEOMETRY = Shape("other-geometry", layers=4, hidden=256, intermediate=512, heads=8, kv_heads=8, head_dim=32, spread=0.2)
OTHER_WEIGHTS = Shape("other-weights", layers=4, hidden=256, intermediate=512, heads=8, kv_heads=4, head_dim=32, spread=0.2, seed=1)
MEDIUM = Shape("medium", layers=16, hidden=512, intermediate=1024, heads=8, kv_heads=8, head_dim=64, spread=0.1)
"""32 KiB of KV a token in bf16, so that 2,048 tokens are 64 MiB."""


def make(shape: Shape) -> Path:
    """Writes the checkpoint into the cache, unless it is there, and returns its folder."""
    identity = hashlib.sha256(json.dumps(asdict(shape), sort_keys=True).encode()).hexdigest()[:12]
    folder = cache() / "models" / f"{shape.name}-{identity}"
    if (folder / "config.json").exists():
        return folder
    write(shape, folder)
    return folder


def cache() -> Path:
    """Where environments and models are kept."""
    return Path(os.environ.get("KVFERRY_CACHE") or Path.home() / ".cache" / "kvferry")


def write(shape: Shape, folder: Path) -> None:
    """Writes the checkpoint into a folder."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(shape.seed)

    def weight(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * shape.spread).to(torch.bfloat16)

    rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors = {
        "model.embed_tokens.weight": weight(shape.vocabulary, shape.hidden),
        "model.norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16),
        "lm_head.weight": weight(shape.vocabulary, shape.hidden),
    }
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "self_attn.q_proj.weight": weight(rows, shape.hidden),
            at + "self_attn.k_proj.weight": weight(kv_rows, shape.hidden),
            at + "self_attn.v_proj.weight": weight(kv_rows, shape.hidden),
            at + "self_attn.o_proj.weight": weight(shape.hidden, rows),
            at + "mlp.gate_proj.weight": weight(shape.intermediate, shape.hidden),
            at + "mlp.up_proj.weight": weight(shape.intermediate, shape.hidden),
            at + "mlp.down_proj.weight": weight(shape.hidden, shape.intermediate),
            at + "input_layernorm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16),
            at + "post_attention_layernorm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16),
        }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    # Under another name first: two test runs may make the model at once, and a half-written one must not be found.
    partial = folder / f"partial-{os.getpid()}"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.rename(folder / "model.safetensors")
    partial.write_text(json.dumps(config, indent=1))
    partial.rename(folder / "config.json")


def prompt(length: int, seed: int = 0) -> list[int]:
    """`length` token ids; texts of two seeds have no beginning in common."""
    drawn = random.Random(seed)
    return [drawn.randrange(10, 2010) for _ in range(length)]
