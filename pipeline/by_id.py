"""Waiting for rollouts by their ids: for callers that each ask for one, many at once in one process.

`pop` gives whatever is oldest in its lane. Here each caller gets its own, and what others wait for stays in the lane.
Several processes may wait in one lane; a trainer that pops there would take their rollouts away, so let such callers
have a lane of their own (`line.lanes`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from dataclasses import replace
from types import TracebackType
from typing import Self

from pipeline.client import RolloutClient
from pipeline.envelope import Task, rollout_id
from pipeline.errors import Incomplete, LineError, ServiceError, TaskError
from pipeline.inspect import where
from pipeline.missing import why_missing
from pipeline.results import Batch, Rollout

log = logging.getLogger(__name__)

REST_PER_ID = 20e-6
"""Seconds between two looks for each id that is looked for: Redis is busy with looks for a tenth of that."""

LEAVE_SECONDS = 5.0
"""For rollouts that were given up to end, when the waiter closes."""


class Waiter:
    """Finished rollouts of one lane of an open client, each for whoever waits for its id.

    Close it (or leave its `async with`) before the client.
    """

    def __init__(self, client: RolloutClient, lane: str = "train") -> None:
        self.client, self.lane = client, lane
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._given_up: set[str] = set()
        self._kept: dict[str, Rollout] = {}
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every wait. What was given up has LEAVE_SECONDS to end, so that its record does not stay behind; what
        came and was not acked goes back to the line when the client closes."""
        self._closed = True
        self._fail_waiting(ServiceError("the waiter was closed"))
        looking = self._looking
        if looking is not None:
            await asyncio.wait({looking}, timeout=LEAVE_SECONDS if self._given_up else 0)
            looking.cancel()
            await asyncio.wait({looking})

    async def play(self, task: Task, timeout: float | None = None, *, priority: int = 0) -> Rollout:
        """Enqueue one rollout of this task and wait for it, as `rollout` does. A wait that fails or is cancelled
        cancels the rollout. Raises what `enqueue` and `rollout` raise."""
        task = task if task.id else replace(task, id=f"{task.handler.rpartition(':')[2].lower()}-{uuid.uuid4().hex}")
        id = rollout_id(task.id or "", 0)
        try:
            await self.client.enqueue([task], lane=self.lane, priority=priority)
            return await self.rollout(id, timeout)
        except (ServiceError, asyncio.CancelledError) as error:
            with contextlib.suppress(LineError):  # Redis is away: the rollout goes on, for nobody
                await self.give_up(id, str(error)[:200] or "its caller has gone")
            raise

    async def rollout(self, id: str, timeout: float | None = None) -> Rollout:
        """The rollout of this id once it has ended, whatever its outcome; it is leased: `client.ack` forgets it.

        Raises Incomplete after `timeout` seconds: where it is and why it waits; TaskError where the line has no such
        rollout (never enqueued, or acked), or it is waited for already; RedisUnavailable where Redis stays away.
        However the wait ends, the rollout goes on: see `give_up`.
        """
        if id in self._waiting:
            raise TaskError(f"rollout {id} is waited for already: one caller gets it")
        came = self._waiting[id] = asyncio.get_running_loop().create_future()
        began = time.monotonic()
        try:
            if id not in self._kept:
                await self._until(id, came, timeout)
            if id in self._kept:
                return self._kept.pop(id)
            why = (await why_missing(self.client.queue, self.lane, [id]))[id]
            said = f"rollout {id} did not end within {time.monotonic() - began:.0f} s: {why}"
            raise Incomplete(said, batch=Batch((), ()), wanted=1, got=0, missing={id: why})
        finally:
            del self._waiting[id]

    async def give_up(self, id: str, why: str) -> None:
        """Nobody wants this rollout any more: it is cancelled, and its record is acked when it comes."""
        if id in self._kept:
            await self.client.ack(self._kept.pop(id))
            return
        self._given_up.add(id)
        if (await self.client.cancel([id], why))[id] == "NONE":
            self._given_up.discard(id)
        self._look()

    async def _until(self, id: str, came: asyncio.Future[None], timeout: float | None) -> None:
        """Return when it came or `timeout` is over. Raises what ended the looking."""
        if not await where(self.client.queue, [id]):
            raise TaskError(f"the line has no rollout {id}: it was never enqueued, or it is acked")
        self._look()
        await asyncio.wait({came}, timeout=timeout)
        if came.done():
            came.result()

    def _wanted(self) -> list[str]:
        return [*self._waiting.keys() - self._kept.keys(), *self._given_up]

    def _look(self) -> None:
        """See to it that somebody looks."""
        if self._looking is None and not self._closed and self._wanted():
            self._looking = asyncio.create_task(self._watch(), name=f"by-id-{self.lane}")

    async def _watch(self) -> None:
        """Look until nobody waits any more."""
        try:
            async with contextlib.aclosing(self.client.named(self._wanted, self.lane)) as turns:
                async for batch in turns:
                    for rollout in batch:
                        await self._arrived(rollout)
                    wanted = len(self._wanted())
                    if not wanted:
                        break
                    await asyncio.sleep(wanted * REST_PER_ID)
        except Exception as error:  # whatever it is, those that wait must hear of it
            log.warning("rollouts are no longer waited for: %s", error)
            self._given_up.clear()
            self._fail_waiting(error if isinstance(error, LineError) else ServiceError(f"the wait broke: {error!r}"))
        finally:
            self._looking = None
        self._look()  # somebody may have come while it was ending

    async def _arrived(self, rollout: Rollout) -> None:
        if rollout.id in self._given_up:
            self._given_up.discard(rollout.id)
            await self.client.ack(rollout)
            return
        self._kept[rollout.id] = rollout
        came = self._waiting.get(rollout.id)
        if came is not None and not came.done():
            came.set_result(None)

    def _fail_waiting(self, error: LineError) -> None:
        for came in self._waiting.values():
            if not came.done():
                came.set_exception(error)
