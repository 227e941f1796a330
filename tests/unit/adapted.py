"""A strategy for groups of rollouts, for the tests of the adapters."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from pipeline.results import Failed, Group, Rollout
from tests.unit import strategies as made


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    """A few groups of rollouts with any outcome and trajectory: none, empty, prompt alone, several sequences ..."""
    found = []
    for at in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 4))
        members = [draw(_member(f"g{at}", sample, size)) for sample in range(size)]
        found.append(Group(f"g{at}", tuple(draw(st.permutations(members))), wanted=size))
    return found


@st.composite
def _member(draw: st.DrawFn, group: str, sample: int, samples: int) -> Rollout:
    outcome: Any = draw(st.sampled_from(["scored", "scored", "scored", "failed", "cancelled"]))
    scored = outcome == "scored"
    built = draw(made.builders()).build() if draw(st.integers(0, 3)) else None
    reward = draw(st.sampled_from([0.0, 1.0, 0.5]) | st.floats(-1e6, 1e6)) if scored else None
    return Rollout(
        id=f"{group}.{sample}", group=group, sample=sample, samples=samples, lane="train", outcome=outcome,
        reward=reward,
        parts={"part": reward} if reward is not None else {}, handler="any",
        truncated=draw(st.sampled_from([None, "context", "turns", "length"])) if built else None,
        failure=None if scored else Failed(kind="sandbox", stage="run", why="it died"),
        trajectory=built, staleness=draw(st.none() | st.integers(0, 3)),
    )  # fmt: skip


def without_big_ids(found: list[Group]) -> list[Group]:
    """The same with ids of at most 31 bits."""
    for group in found:
        for rollout in group.rollouts:
            for sequence in rollout.trajectory.sequences if rollout.trajectory else ():
                np.bitwise_and(sequence.token_ids, 2**31 - 1, out=sequence.token_ids)
    return found
