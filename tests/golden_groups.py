"""The groups of tests/golden/rollouts.json, and what was written down by hand for each trainer beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.builder import TrajectoryBuilder
from pipeline.results import Failed, Group, Rollout
from pipeline.trajectory import Trajectory

GOLDEN = Path(__file__).parent / "golden"


def golden(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def golden_groups() -> list[Group]:
    """g1: rewards 1, 0 and 1 (cut by its length), and one failed. g2: one of two sequences, and one cut."""
    return [
        Group(item["group"], tuple(_rollout(item, at) for at in range(len(item["rollouts"]))))
        for item in golden("rollouts")
    ]


def _rollout(group: dict[str, Any], at: int) -> Rollout:
    about = dict(group["rollouts"][at])
    sequences, failure = about.pop("sequences", None), about.pop("failure", None)
    return Rollout(
        group=group["group"], sample=at, samples=len(group["rollouts"]), lane="train", handler="golden",
        trajectory=_trajectory(sequences) if sequences else None,
        failure=Failed(kind=failure[0], stage=failure[1], why=failure[2]) if failure else None, **about,
    )  # fmt: skip


def _trajectory(sequences: list[list[dict[str, Any]]]) -> Trajectory:
    builder = TrajectoryBuilder()
    for turns in sequences:
        builder.begin()
        for turn in turns:
            kind, ids, seconds = turn["kind"], turn["ids"], turn.get("seconds", 0.0)
            if kind == "action":
                runs = [(turn["version"], 0, len(ids))]
                builder.action(ids, turn["logprobs"], runs, seconds=seconds, sampling=turn.get("sampling"))
            else:
                getattr(builder, kind)(ids, seconds=seconds)
    return builder.build()
