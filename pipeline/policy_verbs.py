"""What a trainer says to the policy's servers as a whole: pause, new weights in force, a run's start and end.

One of them at a time: a pause has an owner, and only that one ends it with new weights.
"""

from __future__ import annotations

from pipeline.errors import PolicyError
from pipeline.leases import sendable, text_of
from pipeline.queue import Queue


class PolicyVerbs:
    """The verbs, on the queue whose prefix is the policy's. Each raises RedisUnavailable as the queue does."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    async def pause(self, owner: str, life: float, why: str, mode: str, target: int | None = None) -> int:
        """Stop all calls; returns the pause's number. `life`: seconds that its owner renews; 0: until `lift`.

        Raises PolicyError while another owner's pause is in force, and for a target that is not above the version.
        """
        to = "" if target is None else target
        status, about = await self._queue.verb("policy_pause", owner, int(life * 1000), sendable(why), mode, to)
        if status == b"BUSY":
            raise PolicyError(
                f"{text_of(about)} has paused the policy: wait until it goes on, or end that pause "
                "(`rollout policy resume`)"
            )
        if status == b"OLD":
            raise PolicyError(
                f"weights {target} can't follow weights {text_of(about)}, which are in force: versions only rise "
                "(`start_run` begins anew, at any version)"
            )
        return int(about)

    async def lift(self, owner: str = "") -> bool:
        """End the pause, the weights in force stay; without an owner, whoever's it is. False when there was none."""
        return bool(await self._queue.verb("policy_resume", owner))

    async def commit(self, owner: str, version: int, path: str) -> bool:
        """These weights are in force: one more update; the pause ends. False when the pause was not this owner's."""
        return bool(await self._queue.verb("policy_commit", owner, version, sendable(path)) == b"OK")

    async def start(
        self,
        version: int,
        path: str,
        *,
        batch: int = 0,
        max_staleness: int = -1,
        lane: str = "",
        moves: bool = False,
        owner: str = "",
    ) -> None:
        """A run begins or goes on at these weights: they are in force, and what was counted starts at 0.

        `moves`: no server has them yet, whatever it had. `owner`: who starts it.
        """
        await self._queue.verb(
            "policy_start", version, sendable(path), batch, max_staleness, lane, "1" if moves else "", owner
        )

    async def end_run(self, owner: str = "") -> bool:
        """The run that `owner` started (without one: any run) bounds nothing any more. False when there was none."""
        return bool(await self._queue.verb("policy_end", owner))
