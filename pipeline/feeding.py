"""Keeps the line full: feeds a stream's tasks, and knows what became of those that an earlier life of it fed.

A group's id is the same in every life of a trainer. A group of that id that is in the line is taken over as it is; one
that was acked leaves a tombstone, so its task runs anew under the next id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from pipeline.envelope import Task, rollout_id
from pipeline.errors import MemoryHigh, QueueFull
from pipeline.feed import Feed, Spot
from pipeline.groups import GroupPolicy, Keep

if TYPE_CHECKING:
    from pipeline.client import RolloutClient

log = logging.getLogger(__name__)

MOST_RECENT = 4096
"""Groups that are remembered: those that came before their turn, and those that came at all."""

K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is asked of a stream (see `RolloutClient.stream`)."""

    samples: int
    batch: int
    ahead: int
    groups: GroupPolicy
    keep: Keep
    lane: str
    timeout: float | None

    @property
    def limit(self) -> int:
        """Groups in flight at most."""
        return self.batch * (1 + self.ahead)


class Recent(dict[K, None], Generic[K]):
    """Keys in the order in which they were added; the oldest of more than MOST_RECENT are forgotten."""

    def __init__(self, keys: Iterable[K] = ()) -> None:
        super().__init__(dict.fromkeys(keys))

    def add(self, key: K) -> None:
        self[key] = None
        if len(self) > MOST_RECENT:
            del self[next(iter(self))]


class Feeding:
    """One stream's way into the line.

    `open`: groups in flight, by id. `again`: what is to run anew. `early`: ids of groups that this life did not feed
    and that were popped: their tasks are passed over. `yielded`: groups in the trainer's hands, each with its spot and
    its rollouts' ids (a late rest comes when the others were acked, so a group's id tells them apart). `cursor`: what
    is fed next, None when all tasks were.
    """

    def __init__(self, client: RolloutClient, feed: Feed, shape: Shape) -> None:
        self._client, self._shape = client, shape
        self.feed = feed
        self.cursor: Spot | None = Spot(0, 0)
        self.again: list[Spot] = []
        self.open: dict[str, Spot] = {}
        self.early: Recent[str] = Recent()
        self.yielded: dict[str, tuple[Spot | None, frozenset[str]]] = {}
        self.paused = self.refused = False
        self.anew = 0
        self._strange = ""
        self._found: dict[str, Task] = {}

    async def fill(self) -> bool:
        """Top up the line. False when there is nothing more to feed, now or later."""
        try:
            while not self.paused and len(self.open) < self._shape.limit:
                spot = self._next()
                if spot is None:
                    break
                await self._put(spot)
                if self.again:
                    del self.again[0]
                else:
                    self.cursor = spot.next
            await self._take_over()
        except (QueueFull, MemoryHigh) as error:
            if not self.refused:
                log.warning("stream %s can't be fed now, it is tried again: %s", self.feed.name, error)
            self.refused = True
        else:
            self.refused = False
        return bool(self.again) or self.cursor is not None

    @property
    def held_up(self) -> bool:
        """More is to be fed, and can't be now."""
        return self.paused or self.refused

    def close(self, id: str, late: bool = False) -> Spot | None:
        """It is in flight no more; its spot, None where this life did not feed it."""
        spot = self.open.pop(id, None)
        if not self._strange and self.feed.spot_of(id) is None:
            self._strange = id
            log.warning(
                "stream %s was given group %s, which it never fed: another trainer or an earlier run left it in lane "
                "%s, and it counts as a group of the batch. Let a stream have its lane for itself",
                self.feed.name, id, self._shape.lane,
            )  # fmt: skip
        if spot is not None:
            self.feed.done(spot)
        elif not late:
            self.early.add(id)
        return spot

    def is_behind(self, id: str) -> bool:
        """Whether these weights know its task, though not by this id: it ran anew for weights that were left since."""
        spot = self.feed.spot_of(id)
        if spot is None or id in self.open or spot in self.again:
            return False
        return self.cursor is None or spot[:2] < self.cursor[:2]

    def repeat(self, id: str) -> None:
        """It is worth nothing: its task runs anew."""
        self.again.append(self.open.pop(id).again())
        self.anew += 1

    def _next(self) -> Spot | None:
        """What is fed next, first what runs anew; None when there is nothing."""
        if self.again:
            return self.again[0]
        self.cursor = self.feed.settle(self.cursor) if self.cursor is not None else None
        return self.cursor

    async def _put(self, spot: Spot) -> None:
        """See to it that this task is in the line, or passed over."""
        tried, id, task = await self._free(spot)
        if id in self.early:
            del self.early[id]
            self.feed.done(spot)
            return
        if await self._client.queue.has_group(id):
            self._found[id] = task
        else:
            await self._enqueue([task])
        self.open[id] = tried
        self.anew += tried != spot

    async def _take_over(self) -> None:
        """What an earlier life fed and is in the line: this client looks after it from now on."""
        if self._found:
            await self._enqueue([task for id, task in self._found.items() if id in self.open])
            self._found.clear()

    async def _enqueue(self, tasks: list[Task]) -> None:
        shape = self._shape
        await self._client.enqueue(tasks, samples=shape.samples, lane=shape.lane, groups=shape.groups)

    async def _free(self, spot: Spot) -> tuple[Spot, str, Task]:
        """The spot with the first number of tries whose id is not used up, its group's id, its task.

        An id is used up when its group was acked, or when another task of this stream has the same.
        """
        while True:
            task = self.feed.task(spot)
            id = task.id or ""
            if id in self.early or not await self._is_used_up(id):
                return spot, id, task
            spot = spot.again()

    async def _is_used_up(self, group: str) -> bool:
        if group in self.open or group in self.yielded:
            return True
        queue = self._client.queue
        there, gone = await asyncio.gather(queue.has_group(group), queue.acked([rollout_id(group, 0)]))
        return bool(gone) and not there
