"""The trainer's way in: a task's rollouts are written all or none, and again where the server lost them."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable
from typing import Any

from pipeline.envelope import Envelope, Task, check_task, encode, encode_compressed, rollout_id
from pipeline.errors import MemoryHigh, QueueFull, TaskError
from pipeline.groups import EVAL_LANE, WHOLE, GroupPolicy
from pipeline.outstanding import Outstanding
from pipeline.queue import Queue

log = logging.getLogger(__name__)

MOST_SAMPLES = 10_000
"""Samples of one group: they are enqueued all or none, in one step that holds Redis for 20 us each."""


class Producer:
    """Enqueues on `queue`, and remembers in `outstanding` what is not acked."""

    def __init__(self, queue: Queue, outstanding: Outstanding) -> None:
        self._queue = queue
        self._config = queue.config
        self._outstanding = outstanding

    async def enqueue(
        self,
        tasks: Iterable[Task],
        *,
        samples: int,
        priority: int,
        lane: str,
        wait: float,
        groups: GroupPolicy | None = None,
    ) -> list[str]:
        """What `RolloutClient.enqueue` promises."""
        closes = self._closes(groups, lane)
        if not 1 <= samples <= samples + closes.extra <= MOST_SAMPLES:
            more = f" and {closes.extra} extra" if closes.extra else ""
            raise TaskError(f"samples is {samples}{more}: a group has 1 to {MOST_SAMPLES} (one step writes them all)")
        closes.check(samples)
        if not -1_000_000 <= priority <= 1_000_000:
            raise TaskError(f"priority is {priority}: it must lie within -1000000 and 1000000")
        wanted = list(tasks)
        for task in wanted:
            check_task(task)
        ids: list[str] = []
        known = 0
        for task in wanted:
            named, fresh = await self._enqueue(task, samples, closes, priority, lane, wait)
            ids.extend(named)
            known += len(named) - fresh
        if known:
            log.info(
                "%d of %d rollouts were in the line already, or are acked: nothing changed for them", known, len(ids)
            )
        return ids

    def _closes(self, groups: GroupPolicy | None, lane: str) -> GroupPolicy:
        """How these groups close: as the caller says, else as the settings do; those of the lane `eval` are whole."""
        if lane != EVAL_LANE:
            return GroupPolicy.of(self._config.groups) if groups is None else groups
        if groups not in (None, WHOLE):
            raise TaskError(f"a group of lane {lane!r} is always whole, or its report would leave out what took long")
        return WHOLE

    async def _enqueue(
        self, task: Task, asked: int, closes: GroupPolicy, priority: int, lane: str, wait: float
    ) -> tuple[list[str], int]:
        """The rollouts' ids, and how many of them are new."""
        samples = asked + closes.extra
        group = task.id or f"{task.handler.rpartition(':')[2].lower()}-{uuid.uuid4().hex[:12]}"
        about = {
            "samples": samples, "priority": priority, "lane": lane, "enqueued": time.time(), "asked": asked,
            "closes": closes,
        }  # fmt: skip
        ids = [rollout_id(group, sample) for sample in range(samples)]
        until = time.monotonic() + wait
        while True:
            try:
                if await self._queue.memory_high():
                    high = self._config.memory.high
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
        """Enqueue these members of a group; where they are not all, the trainer has or had the others."""
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
        closes: GroupPolicy = about["closes"]
        schema = self._queue.schema
        parted = closes.rest == "later" and len(envelopes) < about["samples"]
        return await self._queue.enqueue(
            group, encode_compressed(task, schema), [(item.id, encode(item, schema)) for item in envelopes],
            lane=about["lane"],
            priority=about["priority"], samples=about["samples"], queue_ttl=self._config.limits.queue_ttl,
            deadline=task.deadline, handler=task.handler, asked=about["asked"], wanted=closes.wanted(about["asked"]),
            life=closes.deadline, rest=closes.rest, closed=closes.why(about["asked"]) if parted else "",
        )  # fmt: skip

    async def restore(self, held: set[str]) -> int:
        """Enqueue again what the server has no record of; `held` is in the trainer's hands. Returns how many."""
        return await self._outstanding.restore(self._queue, held, self._write)
