"""What a stream threw away, and why: counted, and said in a sentence when it comes to nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pipeline.groups import KEEPS, Keep
from pipeline.results import Group


@dataclass(slots=True)
class StreamStats:
    """Counts since the stream was made.

    Groups: `yielded`; `refused`, by `keep` or as too stale (`reasons`: why, how often); `late`, the rest of a group
    that had closed; `again`, run anew after a crash because their result was acked for weights that are lost. Rollouts
    of the groups that came: `failed`; `cut`, whose group closed without them.
    """

    yielded: int = 0
    refused: int = 0
    late: int = 0
    again: int = 0
    failed: int = 0
    cut: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def came(self, group: Group) -> None:
        """Count what is in it."""
        self.late += group.late
        self.cut += len(group.cut)
        self.failed += sum(1 for rollout in group.rollouts if rollout.outcome == "failed")

    def refuse(self, reason: str) -> None:
        self.refused += 1
        self.reasons[reason] += 1


def name_of(keep: Keep) -> str:
    """What a sentence calls it: the setting's word, or the function's name."""
    known = {function: name for name, function in KEEPS.items()}
    return known.get(keep) or str(getattr(keep, "__name__", type(keep).__name__))


def why_refused(group: Group) -> str:
    """What is plain to see of a group that nobody wants to train on."""
    rewards = [rollout.reward for rollout in group.scored if rollout.reward is not None]
    if not rewards:
        return "no scored member"
    if len(rewards) == 1:
        return "one scored member"
    if max(rewards) == min(rewards):
        return f"all rewards equal {rewards[0]}"
    return "rewards that differ"


def said(reasons: Counter[str], keep: Keep) -> str:
    """The refusals of one batch in a sentence, the commonest first."""
    listed = "; ".join(f"{count} with {reason}" for reason, count in reasons.most_common(4))
    return f"{sum(reasons.values())} groups were refused by keep={name_of(keep)!r}: {listed}"
