"""slime: groups as `Sample`s (slime/utils/types.py, the form with `rollout_id`), for its whole-rollout hook.

The hook returns `RolloutFnTrainOutput(samples=to_samples(groups, Sample))`. `post_process_rewards` is for slime's
--custom-reward-post-process-path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from pipeline.adapters.rows import AdapterError, Many, Row, mean_rewards, members, places, tokens
from pipeline.results import Group, Rollout

Decode = Callable[[list[int]], str]


def to_samples(
    groups: Iterable[Group],
    cls: Any = dict,
    *,
    many: Many = "refuse",
    filler: int = 0,
    samples: int | None = None,
    decode: Decode | None = None,
) -> list[list[Any]]:
    """An inner list a group, with an item a rollout, in the order of groups and samples.

    many "refuse": an item is one sample, and k > 1 sequences raise AdapterError. "split": each item is a list of
    samples, one a sequence, that share reward and rollout_id, which is how slime counts them once in the loss. It
    flattens by the first item's depth, so all items are lists then. Its default normalisation of rewards knows no
    such groups: name `post_process_rewards` instead.

    `cls`: dict, or slime's Sample. `filler`: the token that stands in an unscored rollout's place. `samples`: members a
    group where it may have more (`pipeline.adapters.rows.members`). `decode`: ids to text, for `prompt` and `response`,
    which slime only logs; without it they are empty.

    A rollout without a reward is `failed` or `aborted` (cancelled), with remove_sample, loss mask 0 and its group's
    mean as reward, so that the mean stays what it is.
    """
    found = list(groups)
    means = mean_rewards(rollout for group in found for rollout in group.rollouts)
    number = 0
    nested: list[list[Any]] = []
    for at, group in enumerate(found):
        inner: list[Any] = []
        for rollout in members(group, samples):
            filled = [
                _filled(cls, _fields(rollout, row, filler, decode, means) | _numbers(at, number))
                for row in places(rollout, many)
            ]
            inner.append(filled if many == "split" else filled[0])
            number += 1
        nested.append(inner)
    return nested


def _numbers(group: int, rollout: int) -> dict[str, int]:
    return {"group_index": group, "index": rollout, "rollout_id": rollout}


def _fields(
    rollout: Rollout, row: Row | None, filler: int, decode: Decode | None, means: dict[str, float]
) -> dict[str, Any]:
    cut = tokens(row, filler)
    turns = row.sequence.turns if row else ()
    return {
        "prompt": decode(cut.prompt) if decode and row else "",
        "tokens": cut.prompt + cut.response,
        "response": decode(cut.response) if decode and row else "",
        "response_length": len(cut.response),
        "reward": means[rollout.group] if rollout.reward is None else float(rollout.reward),
        "loss_mask": cut.mask,
        "weight_versions": [str(run.version) for run in row.sequence.versions] if row else [],
        "rollout_log_probs": cut.logprobs,
        "remove_sample": row is None,
        "status": _status(rollout),
        "non_generation_time": sum(turn.seconds for turn in turns if turn.kind == "observation"),
        "metadata": {
            "rollout_id": rollout.id, "group": rollout.group, "sample": rollout.sample, "outcome": rollout.outcome,
            "sequence_index": row.index if row else 0, "sequence_count": row.count if row else 0,
            "truncated": rollout.truncated, "staleness": rollout.staleness, "parts": dict(rollout.parts),
            "failure": rollout.failure.why if rollout.failure else None,
        },
    }  # fmt: skip


def _status(rollout: Rollout) -> str:
    if rollout.outcome == "scored":
        return "truncated" if rollout.truncated else "completed"
    return "failed" if rollout.outcome == "failed" else "aborted"


def _filled(cls: Any, values: dict[str, Any]) -> Any:
    """An instance of `cls`: names that an older Sample lacks are left out, the status is its enumeration's."""
    known = getattr(cls, "__dataclass_fields__", values)
    if values["metadata"]["sequence_count"] > 1 and "rollout_id" not in known:
        raise AdapterError(
            f"rollout {values['metadata']['rollout_id']} has several sequences, and this {cls.__name__} has no "
            "rollout_id to hold them together: take a newer slime, or many='refuse'"
        )
    if hasattr(cls, "Status"):
        values["status"] = cls.Status(values["status"])
    return cls(**{name: value for name, value in values.items() if name in known})


def post_process_rewards(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """(rewards, normalised rewards) of flat samples: groups by group_index, each rollout_id once, unscored ones never.

    The settings mean what they mean to slime's own: relative to the group for grpo, gspo, cispo and
    reinforce_plus_plus_baseline with `rewards_normalization`; divided by the group's deviation (n - 1) with
    `grpo_std_normalization`, the last of them excepted. A sample of an unscored rollout gets 0.
    """
    raw = [float(sample.reward) for sample in samples]
    relative = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
    if args.advantage_estimator not in relative or not args.rewards_normalization:
        return raw, list(raw)
    divided = args.grpo_std_normalization and args.advantage_estimator != "reinforce_plus_plus_baseline"
    groups: dict[int, dict[int, float]] = {}
    for sample, reward in zip(samples, raw, strict=True):
        if _scored(sample):
            groups.setdefault(sample.group_index, {})[sample.rollout_id] = reward
    return raw, [
        _relative(reward, list(groups[sample.group_index].values()), divided) if _scored(sample) else 0.0
        for sample, reward in zip(samples, raw, strict=True)
    ]


def _scored(sample: Any) -> bool:
    return bool(sample.metadata.get("outcome", "scored") == "scored")


def _relative(reward: float, group: list[float], divided: bool) -> float:
    mean = sum(group) / len(group)
    if not divided:
        return reward - mean
    deviation = math.sqrt(sum((item - mean) ** 2 for item in group) / (len(group) - 1)) if len(group) > 1 else 0.0
    return (reward - mean) / (deviation + 1e-6)
