"""How a group of samples closes: with all its members, or as soon as enough are scored; and which groups to train on.

Everything here is off by default. To close a group early favours short rollouts: those that are cut are the long ones,
so the policy learns less from what takes long, and its rewards look better than they are (docs/client.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pipeline.config import GroupsConfig
from pipeline.errors import TaskError
from pipeline.results import Group

Rest = Literal["cancel", "later"]
Keep = Callable[[Group], bool]
"""Whether a group is worth a place in the trainer's batch."""

EVAL_LANE = "eval"
"""Its groups are always whole: a report must not leave out what took long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPolicy:
    """How a group closes.

    `extra`: samples that are started beyond those that were asked for. `usable`: scored members with which the group
    closes; 0 = as many as were asked for. `deadline`: seconds from its first member's start at INIT, after which it
    closes with what it has; 0 = none. `rest`: what has not ended when it closes is cancelled at once, or goes on and
    comes later, as a further group of the same id whose members are marked late and stale.
    """

    extra: int = 0
    usable: int = 0
    deadline: float = 0.0
    rest: Rest = "cancel"

    @classmethod
    def of(cls, config: GroupsConfig) -> GroupPolicy:
        """What the settings say (section `groups`)."""
        return cls(extra=config.extra, usable=config.usable, deadline=config.deadline, rest=config.rest)

    def wanted(self, samples: int) -> int:
        """Scored members with which a group of `samples` (the extra ones not counted) closes; 0 = it waits for all."""
        return self.usable or (samples if self.extra else 0)

    def why(self, samples: int) -> str:
        """Why such a group most likely closed, as `Group.closed` says it; empty where it waits for all."""
        if self.wanted(samples):
            return "usable"
        return "deadline" if self.deadline else ""

    def check(self, samples: int) -> None:
        """Raise TaskError for what can't be meant."""
        if self.extra < 0 or self.usable < 0 or not 0 <= self.deadline < math.inf:
            raise TaskError(f"a group's policy is {self}: extra, usable and deadline (s) are at least 0")
        if self.usable > samples + self.extra:
            raise TaskError(
                f"a group that closes with {self.usable} usable members has {samples} samples and {self.extra} extra"
            )
        if self.rest not in ("cancel", "later"):
            raise TaskError(f"groups.rest is {self.rest!r}: it is cancel or later")


WHOLE = GroupPolicy()
"""A group ends when all its members have."""


def has_scored(group: Group) -> bool:
    """At least one member has a reward."""
    return bool(group.scored)


def has_spread(group: Group) -> bool:
    """At least two members were scored, and not all alike: else every advantage is 0 and nothing is learnt from it.

    Dynamic sampling: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025, section 3.2.
    """
    rewards = [rollout.reward for rollout in group.scored if rollout.reward is not None]
    return len(rewards) > 1 and max(rewards) > min(rewards)


KEEPS: dict[str, Keep] = {"all": lambda group: True, "scored": has_scored, "spread": has_spread}
"""What `keep` of a stream, and groups.keep of the settings, may say."""
