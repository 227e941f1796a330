"""Waiting for rollouts by their ids: for callers that each ask for one, many at once in one process.

`pop` gives whatever is oldest in its lane. Here each caller gets its own, and what others wait for stays in the lane.
Several processes may wait in one lane; a trainer that pops there would take their rollouts away, so where there is one,
let these callers have a lane of their own (`line.lanes`).
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
from pipeline.missing import why_missing
from pipeline.results import Batch, Rollout
from pipeline.trouble import troubles

log = logging.getLogger(__name__)

REST_PER_ID = 20e-6
"""Seconds between two looks for each id that is looked for: Redis is busy with looks for a tenth of that."""

LOOK_EVERY = 2.0
"""Seconds between two looks at whether the line can go on, where `dead_after` is given."""

KNOWN_EVERY = 5.0
"""Seconds between two looks at whether the line still knows what is waited for."""

LOST_LOOKS = 3
"""So often in a row a rollout is unknown before its wait ends: whoever enqueued it may do so again until then."""

AGAIN_SECONDS = 1.0
"""Between two tries to get rid of what was given up, while Redis is away."""

LEAVE_SECONDS = 5.0
"""For rollouts that were given up to end, when the waiter closes."""


class Waiter:
    """Finished rollouts of one lane of an open client, each for whoever waits for its id.

    `dead_after`: seconds after which every wait ends with Incomplete when no live worker serves a stage that has work;
    None: only the log says so. Close it (or leave its `async with`) before the client.
    """

    def __init__(self, client: RolloutClient, lane: str = "train", *, dead_after: float | None = None) -> None:
        self.client, self.lane = client, lane
        self._dead_after = dead_after
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._playing: set[str] = set()
        self._given_up: set[str] = set()
        self._kept: dict[str, Rollout] = {}
        self._looking: asyncio.Task[None] | None = None
        self._closed = False
        self._looked, self._dead_since = 0.0, float("inf")
        self._asked = 0.0
        self._lost: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every wait with ServiceError. What `play` enqueued is cancelled, and has LEAVE_SECONDS to end, so that no
        record stays behind; what came and was not acked goes back to the line when the client closes."""
        self._closed = True
        with contextlib.suppress(LineError):  # Redis is away: what runs goes on, for nobody
            for id in list(self._playing):
                await self.give_up(id, "the process that waited for it has ended")
        self._fail(ServiceError("the waiter was closed"))
        looking = self._looking
        if looking is not None:
            await asyncio.wait({looking}, timeout=LEAVE_SECONDS if self._given_up else 0)
            looking.cancel()
            await asyncio.wait({looking})

    async def play(self, task: Task, timeout: float | None = None, *, priority: int = 0) -> Rollout:
        """Enqueue one rollout of this task and wait for it, as `rollout` does; a task without an id gets one. A wait
        that fails or is cancelled cancels the rollout. Raises what `enqueue` and `rollout` raise."""
        self._check_open()
        task = task if task.id else replace(task, id=f"{task.handler.rpartition(':')[2].lower()}-{uuid.uuid4().hex}")
        id = rollout_id(task.id or "", 0)
        self._playing.add(id)
        try:
            await self.client.enqueue([task], lane=self.lane, priority=priority)
            return await self.rollout(id, timeout)
        except (ServiceError, asyncio.CancelledError) as error:
            if not self._closed:
                with contextlib.suppress(LineError):  # Redis is away: it is given up when that is back
                    await self.give_up(id, str(error)[:200] or "its caller has gone")
            raise
        finally:
            self._playing.discard(id)

    async def rollout(self, id: str, timeout: float | None = None) -> Rollout:
        """The rollout of this id once it has ended, whatever its outcome; it is leased: `client.ack` forgets it.

        Raises Incomplete after `timeout` seconds, and for a dead line: where it is and why it waits; TaskError where
        the line has no such rollout (never enqueued, or acked), or it is waited for already; ServiceError where it goes
        from the line meanwhile (another consumer acked it, or the server lost it); RedisUnavailable where Redis stays
        away. However the wait ends, the rollout goes on: see `give_up`.
        """
        self._check_open()
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
            raise _incomplete(id, f"rollout {id} did not end within {time.monotonic() - began:.0f} s: {why}", why)
        finally:
            del self._waiting[id]
            if not came.cancel() and not came.cancelled():
                came.exception()  # its caller left at the very moment at which it was told

    async def give_up(self, id: str, why: str) -> None:
        """Nobody wants this rollout any more: it is cancelled, and its record is acked when it comes."""
        if id in self._kept:
            await self.client.ack(self._kept.pop(id))
            return
        self._given_up.add(id)
        try:
            if (await self.client.cancel([id], why))[id] == "NONE":
                self._given_up.discard(id)
        finally:  # Redis is away: it is cancelled when that is back
            self._look()

    async def _until(self, id: str, came: asyncio.Future[None], timeout: float | None) -> None:
        """Return when it came or `timeout` is over. Raises what ended the looking."""
        queue = self.client.queue
        if not await queue.execute("EXISTS", queue.key("r", id)):
            raise TaskError(f"the line has no rollout {id}: it was never enqueued, or it is acked")
        self._look()
        await asyncio.wait({came}, timeout=timeout)
        if came.done():
            came.result()

    def _check_open(self) -> None:
        if self._closed:
            raise ServiceError("the waiter was closed")

    def _wanted(self) -> list[str]:
        return [*self._waiting.keys() - self._kept.keys(), *self._given_up]

    def _look(self) -> None:
        """See to it that somebody looks."""
        if self._looking is None and self._wanted():
            self._looking = asyncio.create_task(self._watch(), name=f"by-id-{self.lane}")

    async def _watch(self) -> None:
        """Look until nobody waits any more."""
        try:
            await self._cancel_given_up()
            async with contextlib.aclosing(self.client.named(self._wanted, self.lane)) as turns:
                async for batch in turns:
                    for rollout in batch:
                        await self._arrived(rollout)
                    await self._check_alive()
                    await self._check_known()
                    wanted = len(self._wanted())
                    if not wanted:
                        break
                    await asyncio.sleep(wanted * REST_PER_ID)
        except Exception as error:  # whatever it is, those that wait must hear of it
            log.warning("rollouts are no longer waited for: %s", error)
            self._fail(error if isinstance(error, LineError) else ServiceError(f"the wait broke: {error!r}"))
            await asyncio.sleep(AGAIN_SECONDS if self._given_up and not self._closed else 0)
        finally:
            self._looking = None
        if not self._closed:
            self._look()  # somebody may have come while it was ending; what was given up is still to be acked

    async def _cancel_given_up(self) -> None:
        """Again, where the first time Redis was away."""
        replies = await self.client.cancel(list(self._given_up), "nobody waits for it any more")
        self._given_up.difference_update(id for id, reply in replies.items() if reply == "NONE")

    async def _arrived(self, rollout: Rollout) -> None:
        if rollout.id in self._given_up:
            self._given_up.discard(rollout.id)
            await self.client.ack(rollout)
            return
        self._kept[rollout.id] = rollout
        came = self._waiting.get(rollout.id)
        if came is not None and not came.done():
            came.set_result(None)

    async def _check_alive(self) -> None:
        """End the waits when the line has been dead for so long."""
        now = time.monotonic()
        if self._dead_after is None or not self._waiting or now - self._looked < min(LOOK_EVERY, self._dead_after):
            return
        self._looked = now
        found = await troubles(self.client.queue, self.lane, self.client.name)
        why = next((said for kind, said in found.items() if kind.startswith("workers")), "")
        self._dead_since = min(self._dead_since, now) if why else float("inf")
        if now - self._dead_since >= self._dead_after:
            self._dead_since = float("inf")
            for id, came in self._waiting.items():
                if not came.done():
                    came.set_exception(_incomplete(id, f"rollout {id} is not waited for any longer: {why}", why))

    async def _check_known(self) -> None:
        """End the waits for what the line knows no longer: it would never come."""
        now, queue = time.monotonic(), self.client.queue
        if now - self._asked < KNOWN_EVERY:
            return
        self._asked = now
        ids = self._wanted()
        there = await asyncio.gather(*(queue.execute("EXISTS", queue.key("r", id)) for id in ids))
        unknown = [id for id, found in zip(ids, there, strict=True) if not found]
        acked = set(await queue.acked(unknown))
        self._lost = {id: self._lost.get(id, 0) + 1 for id in unknown}
        for id, looks in self._lost.items():
            if id in acked or looks >= LOST_LOOKS:
                self._given_up.discard(id)
                self._tell_lost(id, acked=id in acked)

    def _tell_lost(self, id: str, *, acked: bool) -> None:
        came = self._waiting.get(id)
        if came is None or came.done():
            return
        why = (
            f"another consumer of lane {self.lane!r} acked it: let these callers have a lane of their own (line.lanes)"
            if acked
            else "the server has no record of it (it came back without it), and nobody enqueued it again"
        )
        came.set_exception(ServiceError(f"rollout {id} can't come any more: {why}"))

    def _fail(self, error: LineError) -> None:
        for came in self._waiting.values():
            if not came.done():
                came.set_exception(error)


def _incomplete(id: str, said: str, why: str) -> Incomplete:
    return Incomplete(said, batch=Batch((), ()), wanted=1, got=0, missing={id: why})
