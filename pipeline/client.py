"""The trainer's side: enqueue tasks, pop scored trajectories, acknowledge them.

    async with RolloutClient() as line:
        await line.enqueue([Task(handler="math", data={...})], samples=8)
        batch = await line.pop(8, timeout=600)
        ...
        await line.ack(batch)

What is popped is leased: a trainer that dies before `ack` gets the same trajectories again. One line serves one
trainer; any of its processes may pop and ack.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from pipeline.config import Config, load
from pipeline.connection import check, connect, connect_sync
from pipeline.envelope import Envelope, Task, check_task, encode, encode_compressed, rollout_id
from pipeline.errors import Incomplete, MemoryHigh, QueueFull, RedisUnavailable, TaskError
from pipeline.inspect import attempts_of, counts, depth, fields_of, workers
from pipeline.keeper import Keeper
from pipeline.leases import Popped
from pipeline.missing import summed_up, why_missing
from pipeline.outstanding import PAGE, Outstanding
from pipeline.queue import Queue
from pipeline.results import Batch, Group, Rollout, read

log = logging.getLogger(__name__)

MOST_SAMPLES = 10_000
"""Samples of one group: they are enqueued all or none, in one step that holds Redis for 20 us each."""

ASK_EVERY = 5.0
"""Seconds between two looks for rollouts that the server has no record of, while `pop` waits."""


class RolloutClient:
    """asyncio client of one line.

    `config`: a Config; else `load()` reads config.yaml and ROLLOUT_* variables. `url` is a short form for redis.url.
    """

    def __init__(self, url: str | None = None, *, config: Config | None = None) -> None:
        from pipeline.server import find

        config = config or load()
        if url:
            config = config.changed({"redis.url": url})
        state = None if config.redis.url else find(config)
        if state is not None:
            config = config.changed({"redis.url": state.url, "redis.password_file": state.password_file})
        self.config = config
        self.name = f"client-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._client = connect(config)
        self.queue = Queue(self._client, config, patience=config.limits.outage)
        self._keeper: Keeper | None = None
        self._outstanding = Outstanding(config.keep.gone_hours * 3600)
        self._popping = asyncio.Lock()
        self._ticked = self._asked = time.monotonic()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect. Raises RedisUnavailable or ConfigError, a sentence that says what is wrong."""
        for warning in (await check(self._client)).warnings:
            log.warning("%s", warning)
        await self.queue.check_schema()
        self._keeper = Keeper(connect_sync(self.config), self.queue, self.name, self.config.lease.done_seconds)
        self._keeper.start()

    async def close(self) -> None:
        """Give back what is popped and not acked, and disconnect."""
        if self._keeper is not None:
            left = self._keeper.stop()
            self._keeper = None
            if left:
                await self._hand_back(left)
        await self._client.aclose()

    # -- in ----------------------------------------------------------------------------------------------------------

    async def enqueue(
        self, tasks: Iterable[Task], *, samples: int = 1, priority: int = 0, lane: str = "train", wait: float = 0.0
    ) -> list[str]:
        """Enqueue each task's `samples`, all or none of a task; returns the rollouts' ids, task by task.

        The same task id enqueued again changes nothing. Higher `priority` goes first. Raises TaskError with
        nothing enqueued, and QueueFull or MemoryHigh (after `wait` seconds of trying): the tasks before the refused one
        are in, the refused one is not.
        """
        self._check_lane(lane)
        if not 1 <= samples <= MOST_SAMPLES:
            raise TaskError(f"samples is {samples}: a group has 1 to {MOST_SAMPLES} (one step writes them all)")
        if not -1_000_000 <= priority <= 1_000_000:
            raise TaskError(f"priority is {priority}: it must lie within -1000000 and 1000000")
        wanted = list(tasks)
        for task in wanted:
            check_task(task)
        ids: list[str] = []
        known = 0
        for task in wanted:
            named, fresh = await self._enqueue(task, samples, priority, lane, wait)
            ids.extend(named)
            known += len(named) - fresh
        if known:
            log.warning(
                "%d of %d rollouts were in the line already, or are acked: nothing changed for them", known, len(ids)
            )
        return ids

    async def _enqueue(self, task: Task, samples: int, priority: int, lane: str, wait: float) -> tuple[list[str], int]:
        """The rollouts' ids, and how many of them are new."""
        group = task.id or f"{task.handler.rpartition(':')[2].lower()}-{uuid.uuid4().hex[:12]}"
        about = {"samples": samples, "priority": priority, "lane": lane, "enqueued": time.time()}
        ids = [rollout_id(group, sample) for sample in range(samples)]
        until = time.monotonic() + wait
        while True:
            try:
                if await self.queue.memory_high():
                    high = self.config.memory.high
                    raise MemoryHigh(
                        f"Redis is above memory.high = {high:g} of its maxmemory: task {group} was not enqueued"
                    )
                fresh = await self._write(group, task, about, range(samples))
                break
            except (MemoryHigh, QueueFull):
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(0.2)
        self._outstanding.add(group, task, about)
        return ids, fresh

    async def _write(self, group: str, task: Task, about: dict[str, Any], samples: Iterable[int]) -> int:
        envelopes = [
            Envelope(
                id=rollout_id(group, sample),
                group=group,
                handler=task.handler,
                sample=sample,
                samples=about["samples"],
                lane=about["lane"],
                priority=about["priority"],
                policy=task.policy,
                enqueued=about["enqueued"],
                deadline=task.deadline,
            )
            for sample in samples
        ]
        return await self.queue.enqueue(
            group, encode_compressed(task), [(item.id, encode(item)) for item in envelopes], lane=about["lane"],
            priority=about["priority"], samples=about["samples"], queue_ttl=self.config.limits.queue_ttl,
            deadline=task.deadline, handler=task.handler,
        )  # fmt: skip

    def _check_lane(self, lane: str) -> None:
        if lane not in self.config.line.lanes:
            raise TaskError(
                f"lane {lane!r} is unknown (known: {', '.join(self.config.line.lanes)}); line.lanes names them"
            )

    # -- out ---------------------------------------------------------------------------------------------------------

    async def pop(self, n: int, timeout: float | None = None, lane: str = "train") -> Batch:
        """Lease n finished rollouts of a lane, oldest group first, whatever their outcome.

        Raises Incomplete after `timeout` seconds: it says n of m, each missing id and why, and holds what came in
        `.batch`; RedisUnavailable where Redis is away for that long. A pop that is cancelled, or that fails otherwise,
        gives back what it held.
        """
        self._check_lane(lane)
        _check_count(n)
        batch = Batch((), ())
        async with self._popping, contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(lambda: self._give_back(batch))
            async with contextlib.aclosing(self._ticks(timeout, lane)) as ticks:
                async for _ in ticks:
                    lease = self.config.lease.done_seconds
                    leases = await self.queue.pop(lane, n - len(batch), self.name, lease, patience=timeout)
                    if leases:
                        batch = batch + await self._read(leases)
                    if len(batch) >= n:
                        undo.pop_all()
                        return batch
            incomplete = await self._incomplete(batch, n, len(batch), "rollouts", lane, timeout)
            undo.pop_all()
            raise incomplete

    async def pop_groups(self, n: int, timeout: float | None = None, lane: str = "train") -> list[Group]:
        """Lease n whole groups of a lane, oldest first. Raises Incomplete as `pop` does; `.batch` is a list of groups.

        A lane is popped by rollouts or by groups, not by both: of a group whose members were popped singly only the
        rest comes.
        """
        self._check_lane(lane)
        _check_count(n)
        groups: list[Group] = []
        async with self._popping, contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(lambda: self._give_back(groups))
            async with contextlib.aclosing(self._ticks(timeout, lane)) as ticks:
                async for _ in ticks:
                    lease = self.config.lease.done_seconds
                    found = await self.queue.pop_groups(lane, n - len(groups), self.name, lease, patience=timeout)
                    for group, leases in found:
                        groups.append(Group(group, (await self._read(leases)).rollouts))
                    if len(groups) >= n:
                        undo.pop_all()
                        return groups
            incomplete = await self._incomplete(groups, n, len(groups), "groups", lane, timeout)
            undo.pop_all()
            raise incomplete

    async def ack(self, popped: Batch | Group | Iterable[Group | Rollout] | Rollout) -> None:
        """The trainer is done with these: the line forgets them. Safe twice.

        Logs a warning for a rollout whose lease ran out before the ack: another consumer may have it too.
        """
        ids = list(_ids(popped))
        leases = self._keeper.leases(ids) if self._keeper else []
        for at in range(0, len(leases), PAGE):
            page = leases[at : at + PAGE]
            for lease, reply in zip(page, await self.queue.take(page), strict=True):
                if reply == "STALE":
                    log.warning(
                        "rollout %s was acked after its lease had run out: it may be popped a second time", lease.id
                    )
        if self._keeper:
            self._keeper.forget(ids)
        for id in ids:
            self._outstanding.forget(id)

    async def _give_back(self, popped: Any) -> None:
        """Nobody will ever see these: let another pop have them. What can't be given back now returns by itself."""
        if self._keeper is None:
            return
        ids = list(_ids(popped))
        leases = self._keeper.leases(ids)
        self._keeper.forget(ids)
        await self._hand_back(leases)

    async def _hand_back(self, leases: list[Popped]) -> None:
        with contextlib.suppress(RedisUnavailable, TimeoutError):
            async with asyncio.timeout(1.0):
                await self.queue.hand_back(leases)

    async def _ticks(self, timeout: float | None, lane: str) -> AsyncGenerator[None, None]:
        """Turns of a pop: at once, then with each ring, until `timeout`. Lost rollouts are enqueued again meanwhile."""
        until = time.monotonic() + timeout if timeout is not None else None
        bell = connect(self.config, blocking=True)
        task = asyncio.current_task()
        cancels = task.cancelling() if task else 0
        try:
            while True:
                if task and task.cancelling() > cancels:  # wait_for, inside redis-py, swallows one on Python 3.11
                    raise asyncio.CancelledError
                yield
                left = until - time.monotonic() if until is not None else 1.0
                if left <= 0:
                    return
                key = self.queue.key("bell", "done", lane)
                wait = min(1.0, self.config.lease.tick, max(0.01, left))
                await self.queue.wait_for_bell(bell, key, wait, patience=timeout)
                await self._upkeep()
        finally:
            await bell.aclose()

    async def _upkeep(self) -> None:
        """What is due while a pop waits; the times are the client's, so that many short pops do it too."""
        now = time.monotonic()
        if now - self._ticked > self.config.lease.tick:
            self._ticked = now
            await self.queue.tick()  # where no worker lives, nobody else gives a dead trainer's batch back
        if now - self._asked > ASK_EVERY:
            self._asked = now
            try:
                await self.restore()
            except (MemoryHigh, QueueFull) as error:
                log.warning("what the server lost can't be enqueued again now: %s", error)

    async def _read(self, leases: Sequence[Popped]) -> Batch:
        """Records of leased rollouts; the leases are kept alive from here on."""
        if self._keeper is None:
            raise RuntimeError("this client is not open: use `async with RolloutClient()` or call `open()` first")
        self._keeper.hold(leases)
        try:
            rollouts = await asyncio.gather(*(self._read_one(lease) for lease in leases))
        except BaseException:
            self._keeper.forget(lease.id for lease in leases)  # unread, they return by themselves
            raise
        return Batch(tuple(rollouts), tuple(leases))

    async def _read_one(self, lease: Popped) -> Rollout:
        fields, attempts = await asyncio.gather(fields_of(self.queue, lease.id), attempts_of(self.queue, lease.id))
        token = fields.get("payload", b"").decode()
        payload = await self.queue.read_payload(lease.id, token) if token else None
        return read(lease, fields, attempts, payload)

    async def _incomplete(
        self, batch: Any, wanted: int, got: int, what: str, lane: str, timeout: float | None
    ) -> Incomplete:
        popped = set(_ids(batch)) | self._held()
        missing = await why_missing(self.queue, lane, [id for id in self._outstanding.ids(lane) if id not in popped])
        return Incomplete(
            f"{got} of {wanted} {what} came within {timeout if timeout is not None else 0:g} s: "
            f"{summed_up(missing, lane)}",
            batch=batch, wanted=wanted, got=got, missing=missing,
        )  # fmt: skip

    def _held(self) -> set[str]:
        return self._keeper.ids() if self._keeper else set()

    # -- care --------------------------------------------------------------------------------------------------------

    async def restore(self) -> int:
        """Enqueue again what this client waits for and the server has no record of (it came back empty); how many."""
        return await self._outstanding.restore(self.queue, self._held(), self._write)

    async def cancel(self, ids: Iterable[str], why: str = "cancelled by the trainer") -> dict[str, str]:
        """Cancel: REMOVED, ASKED (its worker was told), DONE (too late) or NONE; each still ends in a record."""
        wanted = list(ids)
        return dict(zip(wanted, await self.queue.cancel(wanted, why), strict=True))

    async def status(self) -> dict[str, Any]:
        """Depths by stage, counters, and the living workers."""
        depths, numbers, alive = await asyncio.gather(depth(self.queue), counts(self.queue), workers(self.queue))
        return {"stages": depths, "counts": numbers, "workers": alive, "outstanding": len(self._outstanding)}


def _check_count(n: int) -> None:
    if n < 1:
        raise ValueError(f"pop of {n}: at least 1 is popped")


def _ids(popped: Any) -> Iterable[str]:
    if isinstance(popped, Rollout):
        yield popped.id
    elif isinstance(popped, Group):
        yield from (rollout.id for rollout in popped.rollouts)
    else:
        for item in popped:
            yield from _ids(item)
