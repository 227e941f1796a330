"""Rollouts as rows: one sequence each, cut into prompt and response, as every trainer's contract wants it.

What all adapters keep: ids come from the trajectory, a token that was not sampled has mask 0, and a rollout without a
reward is never trained on nor counted as 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pipeline.errors import LineError
from pipeline.results import Group, Rollout
from pipeline.trajectory import Sequence

Many = Literal["split", "refuse"]
"""What becomes of a rollout of k > 1 sequences: k rows that share group and reward, or an AdapterError."""


class AdapterError(LineError):
    """A rollout does not fit the trainer's contract; the sentence names it."""

    kind = "adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence of a rollout. `prompt`: tokens before the first sampled one; the response is all the rest.

    `index` of `count` sequences of the rollout that sampled anything.
    """

    rollout: Rollout
    sequence: Sequence
    prompt: int
    index: int = 0
    count: int = 1

    @property
    def prompt_ids(self) -> npt.NDArray[np.uint32]:
        """uint32 [P]."""
        return self.sequence.token_ids[: self.prompt]

    @property
    def response_ids(self) -> npt.NDArray[np.uint32]:
        """uint32 [R]: what was sampled and what was seen in between."""
        return self.sequence.token_ids[self.prompt :]

    @property
    def mask(self) -> npt.NDArray[np.uint8]:
        """uint8 [R], 1 only where the policy sampled."""
        return self.sequence.loss_mask[self.prompt :]

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """float32 [R], 0.0 where it was not sampled."""
        return self.sequence.logprobs[self.prompt :]

    @property
    def reward(self) -> float:
        """Its rollout's. Raises AdapterError where there is none: a failure is no 0."""
        if self.rollout.reward is None:
            raise AdapterError(
                f"rollout {self.rollout.id} has no reward: its outcome is {self.rollout.outcome}; leave it out"
            )
        return float(self.rollout.reward)

    @property
    def versions(self) -> tuple[int, int]:
        """Oldest and newest version of the weights that sampled a token of this row."""
        found = [run.version for run in self.sequence.versions]
        return min(found), max(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A row as plain lists, which JSON, msgpack and torch take; `response`, `mask` and `logprobs` are equally long."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    logprobs: list[float]


def tokens(row: Row | None, filler: int) -> Tokens:
    """The row's tokens. None stands for a rollout that is not trained on: one `filler` each, mask 0, logprob 0.0."""
    if row is None:
        return Tokens(prompt=[filler], response=[filler], mask=[0], logprobs=[0.0])
    return Tokens(
        prompt=row.prompt_ids.tolist(),
        response=row.response_ids.tolist(),
        mask=row.mask.tolist(),
        logprobs=row.logprobs.tolist(),
    )


def usable(rollout: Rollout) -> bool:
    """Whether it may be trained on: it was scored, and the policy sampled something."""
    scored = rollout.outcome == "scored" and rollout.reward is not None
    return scored and rollout.trajectory is not None and rollout.trajectory.sampled > 0


def why_unusable(rollout: Rollout) -> str:
    """The rest of a sentence about a rollout that is not `usable`: how it ended, and why."""
    if rollout.outcome == "scored":
        return "the policy sampled nothing"
    ended = "it failed" if rollout.outcome == "failed" else "it was cancelled"
    failure = rollout.failure
    return f"{ended} in {failure.stage}, {failure.kind}: {failure.why}" if failure else ended


def rows_of(rollout: Rollout, many: Many = "split") -> list[Row]:
    """The rows of one rollout; none where nothing was sampled. Raises AdapterError for k > 1 under "refuse"."""
    sequences = [item for item in (rollout.trajectory.sequences if rollout.trajectory else ()) if item.loss_mask.any()]
    if many == "refuse" and len(sequences) > 1:
        raise AdapterError(
            f"rollout {rollout.id} has {len(sequences)} sequences (its history was rendered anew), and this trainer "
            "takes one a rollout: use a chat format that goes on behind what was sampled, or raise policy.context"
        )
    return [
        Row(rollout=rollout, sequence=item, prompt=int(np.argmax(item.loss_mask)), index=at, count=len(sequences))
        for at, item in enumerate(sequences)
    ]


def rows(rollouts: Iterable[Rollout], many: Many = "split") -> list[Row]:
    """The rows of all, in order. Raises AdapterError for k > 1 under "refuse"."""
    return [row for rollout in rollouts for row in rows_of(rollout, many)]


def usable_rows(groups: Iterable[Group], many: Many = "split") -> list[Row]:
    """The rows that may be trained on, in the order of groups and samples. Raises AdapterError as `rows_of` does."""
    return rows((rollout for group in groups for rollout in members(group) if usable(rollout)), many)


def places(rollout: Rollout, many: Many) -> list[Row | None]:
    """For contracts that want a row for every rollout: its rows, or one None where it may not be trained on."""
    return [*rows_of(rollout, many)] if usable(rollout) else [None]


def members(group: Group, samples: int | None = None) -> list[Rollout]:
    """The group's members by sample; with `samples` exactly so many of them, those that were scored before others.

    So the members that an early close cut don't come to a trainer that counts on a group's size. Raises AdapterError
    when there are fewer.
    """
    ordered = sorted(group.rollouts, key=lambda rollout: rollout.sample)
    if samples is None:
        return ordered
    if len(ordered) < samples:
        late = " (it is the late rest of a group that had closed)" if group.late else ""
        raise AdapterError(
            f"group {group.id} has {len(ordered)} members{late}, and this trainer counts on {samples} a group"
        )
    best = sorted(ordered, key=lambda rollout: rollout.outcome != "scored")[:samples]
    return sorted(best, key=lambda rollout: rollout.sample)


def mean_rewards(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Each group's mean over its scored members, by group id; 0.0 where none was scored.

    This is the reward of a row in an unscored rollout's place, where a contract wants a number: the group's mean stays
    what it is, and the advantage there is 0.
    """
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        found = rewards.setdefault(rollout.group, [])
        if rollout.outcome == "scored" and rollout.reward is not None:
            found.append(rollout.reward)
    return {group: sum(found) / len(found) if found else 0.0 for group, found in rewards.items()}
