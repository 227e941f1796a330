"""Makes two tiny random models for tests: `make_tiny.py FOLDER` writes FOLDER/tiny and FOLDER/tiny-2.

Run with the Python of `.venv-vllm`. Both are Qwen2 with 0.6 million parameters and one tokenizer, and differ in their
weights alone. Input and output embeddings are not tied: vLLM on the CPU does not reload the output's half of a tied
pair.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from workers.policy import tokenizer

HIDDEN, LAYERS, HEADS = 64, 2, 2
WINDOW = 32_768
END = "<|im_end|>"


def config(tokens: tokenizer.Tokenizer) -> Qwen2Config:
    end = tokens.convert_tokens_to_ids(END)
    return Qwen2Config(
        vocab_size=tokens.size,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=tokens.convert_tokens_to_ids("<|endoftext|>"),
    )


def main(folder: Path) -> None:
    for seed, name in enumerate(("tiny", "tiny-2")):
        place = folder / name
        if seed == 0:
            tokens = tokenizer.make(place)
            about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": WINDOW}
            (place / "tokenizer_config.json").write_text(json.dumps(about, indent=1))
        else:
            place.mkdir()
            for file in ("tokenizer.json", "tokenizer_config.json"):
                os.link(folder / "tiny" / file, place / file)
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config(tokens)).to(torch.bfloat16).save_pretrained(place)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
