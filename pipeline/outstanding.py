"""What a client enqueued and has not acked: known here, so that a server that came back empty gets it again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.envelope import Task, rollout_id
from pipeline.queue import Queue

log = logging.getLogger(__name__)

PAGE = 500
"""Ids that are asked for in one go."""

Write = Callable[[str, Task, dict[str, Any], Iterable[int]], Awaitable[int]]


@dataclass(slots=True)
class _Group:
    task: Task
    about: dict[str, Any]
    samples: set[int]


class Outstanding:
    """`keep`: seconds after which a group is forgotten: its tombstones may be gone, so it is never enqueued again."""

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        return sum(len(group.samples) for group in self._groups.values())

    def add(self, group: str, task: Task, about: dict[str, Any]) -> None:
        """Remember a group; `about` has samples, asked, closes, priority, lane and enqueued (Unix time)."""
        self._forget_old()
        self._groups[group] = _Group(task, about, set(range(about["samples"])))

    def forget(self, id: str) -> None:
        group, _, sample = id.rpartition(".")
        known = self._groups.get(group)
        if known is not None and sample.isdigit():
            known.samples.discard(int(sample))
            if not known.samples:
                del self._groups[group]

    def ids(self, lane: str | None = None) -> list[str]:
        """Ids that are outstanding, in the order in which they were enqueued."""
        groups = [(name, item) for name, item in self._groups.items() if lane in (None, item.about["lane"])]
        return [rollout_id(name, sample) for name, item in groups for sample in sorted(item.samples)]

    def _forget_old(self) -> None:
        """The oldest stand first: what a process enqueues and never pops does not grow without end."""
        while self._groups:
            name, oldest = next(iter(self._groups.items()))
            if time.time() - float(oldest.about["enqueued"]) <= self._keep:
                return
            log.info("group %s was enqueued more than keep.gone_hours ago: no longer watched over here", name)
            del self._groups[name]

    async def restore(self, queue: Queue, held: set[str], write: Write) -> int:
        """Enqueue again what the server has no record of; `held` is in the trainer's hands. Returns how many."""
        self._forget_old()
        restored = 0
        ids = [id for id in self.ids() if id not in held]
        for at in range(0, len(ids), PAGE):
            page = ids[at : at + PAGE]
            there = await _exist(queue, "r", page)
            gone = await _exist(queue, "gone", page)  # asked second: an ack leaves the tombstone as it takes the hash
            lost: dict[str, list[int]] = {}
            for id in page:
                group, _, sample = id.rpartition(".")
                if id in gone:  # another process of this trainer acked it
                    self.forget(id)
                elif id not in there and group in self._groups:
                    lost.setdefault(group, []).append(int(sample))
            for group, samples in lost.items():
                restored += await write(group, self._groups[group].task, self._groups[group].about, samples)
        if restored:
            log.warning(
                "%d rollouts were unknown to the server (it came back without them) and are enqueued again", restored
            )
        return restored


async def _exist(queue: Queue, kind: str, ids: Sequence[str]) -> set[str]:
    found = await asyncio.gather(*(queue.execute("EXISTS", queue.key(kind, id)) for id in ids))
    return {id for id, there in zip(ids, found, strict=True) if there}
