"""Rollouts as rows: one sequence each, cut into prompt and response, as every trainer's contract wants it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pipeline.errors import LineError
from pipeline.results import Rollout
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
    def versions(self) -> tuple[int, int]:
        """Oldest and newest version of the weights that sampled a token of this row."""
        found = [run.version for run in self.sequence.versions]
        return min(found), max(found)


def usable(rollout: Rollout) -> bool:
    """Whether it may be trained on: it was scored, and the policy sampled something."""
    return rollout.outcome == "scored" and rollout.trajectory is not None and rollout.trajectory.sampled > 0


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
