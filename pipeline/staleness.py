"""How old the weights were that sampled a rollout: counted in updates, not as the difference of the version numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pipeline.config import TRAINED
from pipeline.queue import Queue
from pipeline.results import Rollout


@dataclasses.dataclass(frozen=True, slots=True)
class Ages:
    """The updates up to now. `ordinal`: number of the last one; `limit`: updates that are tolerated, -1 any number."""

    ordinal: int
    limit: int
    oldest: int
    ordinals: dict[int, int]

    def of(self, version: int) -> int:
        """Updates since this version was in force. One that nobody knows is older than all that are known."""
        return max(0, self.ordinal - self.ordinals.get(version, self.oldest - 1))


async def with_staleness(queue: Queue, rollouts: Sequence[Rollout], lane: str) -> tuple[Rollout, ...]:
    """The same rollouts with `staleness` and `stale`; they stay None and False where no trainer has named a version."""
    ages = await _ages(queue, {version for rollout in rollouts for version in _versions(rollout)}, lane)
    return tuple(_judged(rollout, ages) for rollout in rollouts) if ages else tuple(rollouts)


def _judged(rollout: Rollout, ages: Ages) -> Rollout:
    versions = _versions(rollout)
    if not versions:
        return rollout
    staleness = max(ages.of(version) for version in versions)
    stale = rollout.outcome == "scored" and 0 <= ages.limit < staleness
    return dataclasses.replace(rollout, staleness=staleness, stale=stale)


def _versions(rollout: Rollout) -> set[int]:
    """Of the trained policy's weights; those of another policy are not what the trainer updates."""
    if rollout.policy != TRAINED:
        return set()
    sequences = rollout.trajectory.sequences if rollout.trajectory else ()
    return {run.version for sequence in sequences for run in sequence.versions}


async def _ages(queue: Queue, versions: set[int], lane: str) -> Ages | None:
    """None for a policy without versions. The limit is the run's, for its lane; without a run the configuration's."""
    if not versions:
        return None
    known = queue.key("versions")
    scores = await queue.execute("ZMSCORE", known, *versions)
    first = await queue.execute("ZRANGE", known, 0, 0, "WITHSCORES")
    policy = await queue.execute("HMGET", queue.key("policy"), "ordinal", "lane", "max_staleness")
    ordinal, run_lane, limit = policy  # asked last: an update meanwhile makes a rollout older, never newer
    if not first or ordinal is None:
        return None
    flat = first[0] if isinstance(first[0], list | tuple) else first
    bounded = not run_lane or run_lane == lane.encode()
    return Ages(
        ordinal=int(ordinal),
        limit=int(limit if run_lane else queue.config.policy.max_staleness) if bounded else -1,
        oldest=int(float(flat[1])),
        ordinals={v: int(float(score)) for v, score in zip(versions, scores, strict=True) if score is not None},
    )
