"""Samples that a trainer asks for one by one, played as groups: those of one prompt that are asked for together.

verl calls its agent loop once a sample, all samples of a prompt in one process and at the same moment. Here they become
one group of the line, and each caller waits for its own rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from dataclasses import dataclass, field, replace

from pipeline.adapters.rows import usable
from pipeline.by_id import Waiter
from pipeline.client import RolloutClient
from pipeline.envelope import SCHEMA, Task, encode
from pipeline.errors import LineError
from pipeline.groups import WHOLE
from pipeline.results import Rollout

log = logging.getLogger(__name__)

LEFT_SECONDS = 60.0
"""So long after the time-out the rollouts of a trainer that has died end by themselves."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What one sample needs to know of another: its reward, and the oldest and newest weights that sampled it."""

    reward: float
    versions: tuple[int, int]


@dataclass(slots=True)
class _Party:
    """One group while its members play. `ended`: one future each, done with None where it can't be trained on."""

    entering: asyncio.Task[list[str]] | None = None
    ended: list[asyncio.Future[Scored | None]] = field(default_factory=list)


class Session:
    """One sample that has ended: its rollout, leased until `Sessions.done`."""

    def __init__(self, rollout: Rollout, party: _Party) -> None:
        self.rollout = rollout
        self._party = party

    async def scored(self) -> list[Scored]:
        """Those of its group that can be trained on, once all have ended."""
        ended = await asyncio.gather(*map(asyncio.shield, self._party.ended))
        return [item for item in ended if item is not None]


class Sessions:
    """Plays samples on an open client, and is closed before it. `timeout`: seconds that each may take, None for ever.

    Several processes may do so in one lane; nothing else may pop there.
    """

    def __init__(self, client: RolloutClient, lane: str = "train", timeout: float | None = None) -> None:
        self._client, self._lane, self._timeout = client, lane, timeout
        self._waiter = Waiter(client, lane)
        self._gathering: dict[tuple[str, bytes], _Party] = {}
        self._entering: set[asyncio.Task[list[str]]] = set()
        self._open: set[str] = set()

    async def close(self) -> None:
        """End every wait; what waits is told so. What the line has for it is cancelled, and given a moment to end."""
        await asyncio.gather(*self._entering, return_exceptions=True)  # who waits for an error hears of it there
        with contextlib.suppress(LineError):  # Redis is away: what runs ends with its deadline
            for id in list(self._open):
                await self._waiter.give_up(id, "the process that waited for it has ended")
        await self._waiter.close()

    async def play(self, prompt: str, task: Task) -> Session:
        """One sample of this task, in a group with those that are asked for at the same moment under the same `prompt`.

        `prompt`: the trainer's name of it; the group gets an id that begins with it, and the task's own is not used. An
        ended rollout is returned whatever its outcome. Raises what `enqueue` raises, and Incomplete after the
        time-out, where the rollout is cancelled; so it is when the caller is.
        """
        key = (prompt, encode(replace(task, id=None), SCHEMA))
        party = self._gathering.get(key)
        if party is None:
            party = self._gathering[key] = _Party()
            party.entering = asyncio.create_task(self._enter(key, task), name=f"enter-{prompt}")
            self._entering.add(party.entering)
            party.entering.add_done_callback(self._entering.discard)
        entering, mine = party.entering, len(party.ended)
        assert entering is not None
        party.ended.append(asyncio.get_running_loop().create_future())
        try:
            id = (await asyncio.shield(entering))[mine]
            rollout = await self._waiter.rollout(id, self._timeout)
            self._open.discard(id)
        except BaseException as error:
            party.ended[mine].set_result(None)
            await self._give_up(entering, mine, str(error)[:200] or "its trainer has gone")
            raise
        party.ended[mine].set_result(_scored(rollout))
        return Session(rollout, party)

    async def done(self, rollout: Rollout) -> None:
        """The trainer has it: the line forgets it. Where Redis is away it comes back, for nobody: a warning."""
        try:
            await self._client.ack(rollout)
        except LineError as error:
            log.warning("rollout %s is used and could not be acked, so it stays in the line: %s", rollout.id, error)

    async def _enter(self, key: tuple[str, bytes], task: Task) -> list[str]:
        """Enqueue all that have come by the end of this turn of the loop, and the next."""
        await asyncio.sleep(0)
        party = self._gathering.pop(key)
        named = replace(task, id=f"{key[0]}-{uuid.uuid4().hex[:8]}")
        if self._timeout is not None and task.deadline is None:
            named = replace(named, deadline=time.time() + self._timeout + LEFT_SECONDS)
        ids = await self._client.enqueue(
            [named], samples=len(party.ended), lane=self._lane, wait=self._timeout or 0.0, groups=WHOLE
        )
        self._open.update(ids)
        return ids

    async def _give_up(self, entering: asyncio.Task[list[str]], mine: int, why: str) -> None:
        """Cancel what nobody waits for any more, where it was enqueued."""
        with contextlib.suppress(LineError):
            ids = await asyncio.shield(entering)
            await self._waiter.give_up(ids[mine], why)
            self._open.discard(ids[mine])


def _scored(rollout: Rollout) -> Scored | None:
    if not usable(rollout) or rollout.reward is None or rollout.versions is None:
        return None
    return Scored(rollout.reward, rollout.versions)
