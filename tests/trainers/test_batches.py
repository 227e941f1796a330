"""Batches for a trainer of one's own as torch tensors: the same numbers, in the same memory."""

from __future__ import annotations

import json
from pathlib import Path

from tests.golden_groups import golden
from tests.trainers import trainers


def test_the_tensors_are_the_arrays() -> None:
    found = json.loads(trainers.run(Path(__file__).parent / "torch_batches.py", timeout=120))
    assert found["padded"] == golden("padded")
    assert found["shared"] == [77, 77, 77] and found["shared_flat"] == -9.0, "nothing was copied"
    assert (found["longest"], found["cu_seqlens"]) == (8, [0, 8, 12, 17, 20, 24])
    kinds = found["kinds"]
    assert kinds["input_ids"] == "torch.int64" and kinds["response_mask"] == "torch.bool"
    assert kinds["logprobs"] == kinds["rewards"] == "torch.float32" and kinds["versions"] == "torch.int32"
