"""Logprobs of stored tokens, computed anew by transformers: `recompute.py MODEL IN.npz OUT.npz`.

Run with the Python of `.venv-vllm`. In float32, as the server that sampled them: in bfloat16 two implementations differ
by 0.04 from rounding alone. IN: `ids` (all sequences one after another), `ends` (where each ends). OUT: `logprobs`,
float32, one per token, of that token after all before it in its sequence; 0 for a sequence's first.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def main(model_folder: str, source: str, target: str) -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    given = np.load(source)
    ids, ends = torch.from_numpy(given["ids"].astype(np.int64)), given["ends"]
    found = torch.zeros(len(ids), dtype=torch.float32)
    start = 0
    with torch.inference_mode():
        for end in map(int, ends):
            row = ids[start:end]
            logits = model(row[None]).logits[0, :-1].float()
            chosen = logits.gather(1, row[1:, None])[:, 0]
            found[start + 1 : end] = chosen - logits.logsumexp(dim=1)
            start = end
    np.savez(target, logprobs=found.numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
