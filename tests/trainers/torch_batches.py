"""The golden batches as torch tensors; prints what came out as JSON. Runs in `.venv-trainers`."""

from __future__ import annotations

import json
import sys

import torch

from pipeline.adapters.padded import flat, padded, to_torch
from pipeline.adapters.rows import usable_rows
from tests.golden_groups import golden_groups


def main() -> None:
    rows = usable_rows(golden_groups())
    wide, ends = padded(rows, pad=99), flat(rows)
    tensors, packed = to_torch(wide), to_torch(ends)
    told = {name: value.int().tolist() for name, value in tensors.items() if value.dtype == torch.bool}
    told |= {name: value.tolist() for name, value in tensors.items() if value.dtype != torch.bool}
    tensors["input_ids"][0, 0] = 77
    shared = [int(wide.input_ids[0, 0]), int(wide.prompts[0, 0]), int(tensors["prompts"][0, 0])]
    packed["logprobs"][3] = -9.0
    sys.stdout.write(json.dumps({
        "padded": told, "shared": shared, "shared_flat": float(ends.logprobs[3]), "longest": packed["longest"],
        "cu_seqlens": packed["cu_seqlens"].tolist(), "kinds": {name: str(item.dtype) for name, item in tensors.items()},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
