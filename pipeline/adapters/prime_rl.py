"""prime-rl: groups as the fields of `TrainingSample` (src/prime_rl/transports/rollouts/types.py, read at a608ad9).

This is the form without a cut between prompt and completion, all arrays as long as `token_ids`, with `advantages` per
token. Older releases had prompt_ids and completion_ids instead. `TrainingSample(**fields)` leaves the rest at its
defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pipeline.adapters.rows import AdapterError, Many, Row, usable_rows
from pipeline.results import Group, Rollout

Advantage = Callable[[Group, Rollout], float]


def above_mean(group: Group, rollout: Rollout) -> float:
    """Reward minus the mean of the group's scored members; no deviation (Liu et al., "Understanding R1-Zero-Like
    Training: A Critical Perspective", 2025).

    Raises AdapterError for the late rest of a group that had closed: its mean is not the group's.
    """
    if group.late:
        raise AdapterError(
            f"group {group.id} is the late rest of one that had closed, and the mean of its first part is not here: "
            "give an `advantage` that knows it, or set groups.rest to cancel"
        )
    if rollout.reward is None or group.mean is None:
        raise AdapterError(f"rollout {rollout.id} has no reward, so no advantage")
    return float(rollout.reward) - group.mean


def training_samples(
    groups: Iterable[Group], *, env_name: str = "", advantage: Advantage = above_mean, many: Many = "split"
) -> list[dict[str, Any]]:
    """One dict of fields for each sequence, in the order of groups and samples.

    token_ids list[int]; mask list[bool], True where it was sampled; logprobs list[float], 0.0 elsewhere; temperatures
    list[float], what the turn was sampled with, 1.0 elsewhere; env_name, by default the rollout's handler; advantages
    list[float], the rollout's number where it was sampled, 0.0 elsewhere. prime-rl's trainer wants advantages for
    every sample and takes no rewards, so the group's algorithm is applied here: `advantage`.

    A rollout without a reward has no sample. A truncated one has its own, unmarked: the contract has no place for it.
    k > 1: a sample a sequence, all with the rollout's advantage; many "refuse" raises AdapterError instead, as does a
    turn sampled at temperature 0, by which prime-rl would divide.
    """
    return [
        _fields(row, env_name or row.rollout.handler, advantage(group, row.rollout))
        for group in groups
        for row in usable_rows([group], many)
    ]


def _fields(row: Row, env_name: str, advantage: float) -> dict[str, Any]:
    sequence = row.sequence
    mask = sequence.loss_mask.astype(bool)
    return {
        "token_ids": sequence.token_ids.tolist(),
        "mask": mask.tolist(),
        "logprobs": sequence.logprobs.tolist(),
        "temperatures": _temperatures(row),
        "env_name": env_name,
        "advantages": np.where(mask, advantage, 0.0).tolist(),
    }


def _temperatures(row: Row) -> list[float]:
    """float a token. A turn that names no temperature was sampled at the engine's default, 1.0."""
    values = np.ones(len(row.sequence))
    for turn in row.sequence.turns:
        if turn.kind == "action" and turn.sampling:
            temperature = float(turn.sampling.get("temperature", 1.0))
            if temperature <= 0.0:
                raise AdapterError(
                    f"rollout {row.rollout.id} was sampled at temperature {temperature}: prime-rl divides by it"
                )
            values[turn.start : turn.end] = temperature
    found: list[float] = values.tolist()
    return found
