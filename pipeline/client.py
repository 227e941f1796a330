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
import logging
import os
import socket
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from pipeline.arrival import arrived
from pipeline.config import Config, load
from pipeline.connection import connect
from pipeline.consumer import Consumer
from pipeline.envelope import Task
from pipeline.feed import Tasks
from pipeline.groups import GroupPolicy, Keep
from pipeline.inspect import counts, depth, workers
from pipeline.outstanding import Outstanding
from pipeline.producer import Producer
from pipeline.queue import Queue
from pipeline.report import Evaluation, Report
from pipeline.results import Batch, Group, Rollout
from pipeline.run_client import RunClient
from pipeline.stream import Stream, make

log = logging.getLogger(__name__)


class RolloutClient(RunClient):
    """asyncio client of one line: tasks and trajectories here, weights and servers in RunClient.

    `config`: a Config; else `load()` reads config.yaml and ROLLOUT_* variables. `url` is a short form for redis.url.
    """

    def __init__(self, url: str | None = None, *, config: Config | None = None) -> None:
        from pipeline.server import located

        config = config or load()
        config = located(config.changed({"redis.url": url, "redis.address_file": ""}) if url else config)
        name = f"client-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._client = connect(config)
        queue = Queue(self._client, config, patience=config.limits.outage)
        self._outstanding = Outstanding(config.keep.gone_hours * 3600)
        self._producer = Producer(queue, self._outstanding)
        self._consumer = Consumer(queue, name, self._outstanding, self._producer)
        super().__init__(queue, name, told=self._consumer.hold_pause)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect; a Redis that may move is waited for, limits.outage at most.

        Raises RedisUnavailable or ConfigError, a sentence that says what is wrong.
        """
        for warning in (await arrived(self._client, self.queue.config)).warnings:
            log.warning("%s", warning)
        await self.queue.check_schema()
        await self.queue.check_files()
        self._consumer.open()

    async def close(self) -> None:
        """Give back what is popped and not acked, end the pause and the run that this client started, strike off the
        servers that it registered; disconnect."""
        await super().close()
        await self._consumer.close()
        await self._client.aclose()

    # -- in ----------------------------------------------------------------------------------------------------------

    async def enqueue(
        self,
        tasks: Iterable[Task],
        *,
        samples: int = 1,
        priority: int = 0,
        lane: str = "train",
        wait: float = 0.0,
        groups: GroupPolicy | None = None,
    ) -> list[str]:
        """Enqueue each task's `samples`, all or none of a task; returns the rollouts' ids, task by task.

        The same task id enqueued again changes nothing; with more samples, a group that has not closed grows, and
        closes as last asked. Higher `priority` goes first. `groups`: how they close, and how many extra samples are
        started for that (None: as the settings say; in the lane eval they are always whole).
        Raises TaskError with nothing enqueued, and QueueFull or MemoryHigh (after `wait` seconds of trying): the tasks
        before the refused one are in, the refused one is not.
        """
        self._check_lane(lane)
        return await self._producer.enqueue(
            tasks, samples=samples, priority=priority, lane=lane, wait=wait, groups=groups
        )

    # -- out ---------------------------------------------------------------------------------------------------------

    async def pop(self, n: int, timeout: float | None = None, lane: str = "train") -> Batch:
        """Lease n finished rollouts of a lane, oldest group first, whatever their outcome.

        Raises Incomplete after `timeout` seconds: it says n of m, each missing id and why, and holds what came in
        `.batch`; RedisUnavailable where Redis is away for that long. A pop that is cancelled, or that fails otherwise,
        gives back what it held. With policy.stale = "drop", stale rollouts are thrown away on the way.
        """
        self._check_lane(lane)
        return await self._consumer.pop(n, timeout, lane)

    async def pop_groups(self, n: int, timeout: float | None = None, lane: str = "train") -> list[Group]:
        """Lease n whole groups of a lane, oldest first. Raises Incomplete as `pop` does; `.batch` is a list of groups.

        A lane is popped by rollouts or by groups, not by both: of a group whose members were popped singly only the
        rest comes.
        """
        self._check_lane(lane)
        return await self._consumer.pop_groups(n, timeout, lane)

    def named(self, wanted: Callable[[], Sequence[str]], lane: str = "train") -> AsyncGenerator[Batch, None]:
        """For `pipeline.by_id`: turn after turn, what has ended of the ids that `wanted` then gives, leased.

        Each turn gives a Batch, often an empty one; close the generator (`contextlib.aclosing`).
        """
        self._check_lane(lane)
        return self._consumer.named(wanted, lane)

    async def ack(self, popped: Batch | Group | Iterable[Group | Rollout] | Rollout, *, drop: bool = False) -> None:
        """The trainer is done with these: the line forgets them. Safe twice.

        `drop`: it does not train on them, so they do not count as popped where new rollouts are bounded.
        Logs a warning for a rollout whose lease ran out before the ack: another consumer may have it too.
        """
        await self._consumer.ack(popped, drop=drop)

    def stream(
        self,
        tasks: Tasks,
        *,
        samples: int = 1,
        batch: int,
        ahead: int = 1,
        groups: GroupPolicy | None = None,
        keep: str | Keep | None = None,
        name: str = "",
        seed: int | None = None,
        epochs: int | None = None,
        lane: str = "train",
        timeout: float | None = None,
    ) -> Stream:
        """Keep the line full, and give one batch after another: `async for groups in stream`, lists of `batch` groups.

        `tasks`: a sequence (each epoch shuffled where there is a `seed`; `epochs` None: for ever), or an iterator, read
        once. When they are over the last list is what is left. `ahead`: batches in flight beyond the one that is asked
        for, so batch * (1 + ahead) groups at most; 0 is the synchronous case. With `start_run(batch=batch * samples,
        max_staleness=ahead)` INIT begins exactly what can be trained on in time. `keep`: "all", "scored", "spread" or a
        function of a Group, also asked of late ones; what it refuses is thrown away and replaced (None: groups.keep).
        `name`: front of the groups' ids, which go on with epoch, position and the task's own id; else a random one.
        `timeout`: s a batch.

        Ack each batch after the optimiser step or after the checkpoint (docs/client.md: what a crash then costs).
        Raises ConfigError; asked for a batch, Incomplete: its time is over, or 10 * batch groups were refused. Its
        `.batch` is what came: ack it, or it is the front of the next one.
        """
        self._check_lane(lane)
        return make(
            self, self._consumer, tasks, samples=samples, batch=batch, ahead=ahead, groups=groups, keep=keep, name=name,
            seed=seed, epochs=epochs, lane=lane, timeout=timeout,
        )  # fmt: skip

    async def evaluate(
        self, tasks: Iterable[Task], *, samples: int = 1, timeout: float | None = None, lane: str = "eval"
    ) -> Report:
        """Play these tasks beside the training and report: whole groups, whatever their outcome, acked.

        Other evaluations in the lane are left alone. Raises Incomplete after `timeout` seconds (the rest is cancelled,
        `.batch` is a list of the groups that came), TaskError, QueueFull, MemoryHigh and RedisUnavailable.
        """
        self._check_lane(lane)
        return await Evaluation(self, lane).run(tasks, samples, timeout)

    # -- care --------------------------------------------------------------------------------------------------------

    async def restore(self) -> int:
        """Enqueue again what this client waits for and the server has no record of (it came back empty); how many."""
        return await self._producer.restore(self._consumer.held)

    async def cancel(self, ids: Iterable[str], why: str = "cancelled by the trainer") -> dict[str, str]:
        """Cancel: REMOVED, ASKED (its worker was told), DONE (too late) or NONE; each still ends in a record."""
        wanted = list(ids)
        return dict(zip(wanted, await self.queue.cancel(wanted, why), strict=True))

    async def status(self) -> dict[str, Any]:
        """Depths by stage, counters, and the living workers."""
        depths, numbers, alive = await asyncio.gather(depth(self.queue), counts(self.queue), workers(self.queue))
        return {"stages": depths, "counts": numbers, "workers": alive, "outstanding": len(self._outstanding)}
