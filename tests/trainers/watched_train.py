"""The example's train.py, with a record of what the trainer gets and of what it computes its loss on.

Writes two files of JSON lines into the output folder, each process its own. rows-RANK.jsonl: for each call, what the
reward function sees. trained-RANK.jsonl: for each loss, every row's prompt ids, completion ids, mask and advantage,
padding left out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "trl_grpo"


def main() -> None:
    sys.path.insert(0, str(EXAMPLE))
    spec = importlib.util.spec_from_file_location("train", EXAMPLE / "train.py")
    assert spec is not None and spec.loader is not None
    train: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    out, rank = train.arguments().out, os.environ.get("RANK", "0")
    out.mkdir(parents=True, exist_ok=True)
    plain_reward, Plain = train.rollout_reward, train.GRPOTrainer

    def rollout_reward(reward: list[float | None], **others: Any) -> list[float | None]:
        kept = ("rollout_id", "completion_ids", "outcome", "version_min", "version_max", "staleness")
        _add(out / f"rows-{rank}.jsonl", {name: others[name] for name in kept} | {"reward": reward})
        given: list[float | None] = plain_reward(reward, **others)
        return given

    class Watched(Plain):  # type: ignore[misc, valid-type]
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            _add(out / f"trained-{rank}.jsonl", [_row(inputs, at) for at in range(len(inputs["completion_ids"]))])
            return super()._compute_loss(model, inputs)

    class Silent:
        """Beside the first process's record."""

        def __init__(self, *_: object) -> None: ...
        def close(self) -> None: ...

    train.rollout_reward, train.GRPOTrainer = rollout_reward, Watched
    if rank != "0":
        train.Record = Silent
    train.main()


def _row(inputs: dict[str, Any], at: int) -> dict[str, Any]:
    prompt, completion = inputs["prompt_mask"][at].bool(), inputs["completion_mask"][at].bool()
    return {
        "prompt": inputs["prompt_ids"][at][prompt].tolist(),
        "completion": inputs["completion_ids"][at][completion].tolist(),
        "mask": inputs["tool_mask"][at][completion].tolist(),
        "advantage": float(inputs["advantages"][at]),
    }


def _add(file: Path, value: Any) -> None:
    with file.open("a") as out:
        out.write(json.dumps(value) + "\n")


if __name__ == "__main__":
    main()
