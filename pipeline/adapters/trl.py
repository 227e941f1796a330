"""TRL: groups as what a `rollout_func` of GRPOTrainer returns (trl/trainer/grpo_trainer.py, read at 1.16.0).

`pipeline.adapters.trl_rollout` is the thin client over it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipeline.adapters.rows import Row, members, places, tokens
from pipeline.results import Group, Rollout


def rollout_rows(groups: Iterable[Group], *, filler: int, samples: int | None = None) -> dict[str, list[Any]]:
    """One row a rollout, in the order of groups and samples: TRL takes num_generations rows in succession as a group.

    prompt_ids, completion_ids, logprobs (0.0 where it was not sampled) and env_mask (1 where it was) are lists of
    lists. The other keys reach the reward functions, one item a row: reward (None unless scored), rollout_id, group,
    outcome, truncated, staleness, version_min and version_max (-1 where there is none).

    A rollout without a reward, or one that sampled nothing, is a row of `filler` (a pad or eos token) with env_mask 0.
    `samples`: rows a group, where groups may have more members than num_generations (`pipeline.adapters.rows.members`).
    Raises AdapterError, naming the rollout, for k > 1 sequences: TRL can't tell several rows of one rollout.
    """
    rows: dict[str, list[Any]] = {
        name: []
        for name in (
            "prompt_ids", "completion_ids", "logprobs", "env_mask", "reward", "rollout_id", "group", "outcome",
            "truncated", "staleness", "version_min", "version_max",
        )
    }  # fmt: skip
    for group in groups:
        for rollout in members(group, samples):
            for row in places(rollout, "refuse"):
                for name, value in _row(rollout, row, filler).items():
                    rows[name].append(value)
    return rows


def _row(rollout: Rollout, row: Row | None, filler: int) -> dict[str, Any]:
    cut = tokens(row, filler)
    oldest, newest = row.versions if row else (-1, -1)
    return {
        "prompt_ids": cut.prompt, "completion_ids": cut.response, "logprobs": cut.logprobs, "env_mask": cut.mask,
        "reward": None if rollout.reward is None else float(rollout.reward),
        "rollout_id": rollout.id, "group": rollout.group, "outcome": rollout.outcome,
        "truncated": rollout.truncated, "staleness": rollout.staleness,
        "version_min": oldest, "version_max": newest,
    }  # fmt: skip


def rollout_reward(reward: list[float | None], **others: Any) -> list[float | None]:
    """The reward function for `reward_funcs`: it hands on what the line scored, None for a rollout without a reward.

    TRL 1.16.0 leaves a row for which every reward function gives None out of its group's mean and deviation, with
    advantage 0; a group of nothing else has advantage 0 throughout. Releases that don't would count it as 0. So a
    further reward function must give None too where `outcome` is not "scored".
    """
    del others
    return reward
