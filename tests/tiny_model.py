"""Random weights for the example's engine: the shape of a Llama, and the size of a test."""

from __future__ import annotations

from pathlib import Path

import torch

SIZES = {
    "num_layers": 2,
    "hidden": 72,
    "ffn": 100,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 8,
    "vocab": 101,
    "rope_base": 1e4,
    "norm_eps": 1e-5,
}


def tiny_model(folder: Path) -> Path:
    """Write weights that the example can load; the same ones each time."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    hidden, ffn, kv = SIZES["hidden"], SIZES["ffn"], SIZES["num_kv_heads"] * SIZES["head_dim"]
    weights = {
        "token_embd.weight": 4 * random(SIZES["vocab"], hidden),
        "output_norm.weight": torch.ones(hidden),
    }
    shapes = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden)}
    for layer in range(SIZES["num_layers"]):
        block = {f"attn_{name}": random(*shape) for name, shape in shapes.items()}
        block |= {"attn_output": random(hidden, hidden), "ffn_down": random(hidden, ffn)}
        block |= {"ffn_gate": random(ffn, hidden), "ffn_up": random(ffn, hidden)}
        block |= {"attn_norm": torch.ones(hidden), "ffn_norm": torch.ones(hidden)}
        weights |= {f"blk.{layer}.{name}.weight": tensor for name, tensor in block.items()}
    torch.save({"config": SIZES, "weights": weights}, folder / "weights.pt")
    return folder
