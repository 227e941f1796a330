"""The trainer's verbs of the queue: enqueue, pop, acknowledge, pause a lane, cancel."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Iterable, Sequence

from redis.exceptions import OutOfMemoryError

from pipeline.envelope import WORKING
from pipeline.errors import MemoryHigh, QueueFull
from pipeline.leases import Popped, sendable, text_of
from pipeline.payload_verbs import PayloadVerbs


class TrainerVerbs(PayloadVerbs):
    """Rollouts go in, finished ones come out under leases. Raises as QueueCalls does."""

    async def enqueue(
        self,
        group: str,
        task: bytes,
        envelopes: Sequence[tuple[str, bytes]],
        *,
        lane: str = "train",
        priority: int = 0,
        samples: int | None = None,
        queue_ttl: float = 0.0,
        deadline: float | None = None,
        handler: str = "",
        asked: int | None = None,
        wanted: int = 0,
        life: float = 0.0,
        rest: str = "cancel",
        closed: str = "",
    ) -> int:
        """Write a task's samples, all or none; returns how many were new. `handler`: its name in the task.

        Of its `samples`, `asked` were asked for; the group closes with `wanted` scored ones, or `life` seconds after
        its first member's start (0: it does not). `rest`: "later" lets the others go on then. `closed`: of a group that
        the server has lost and whose first part was popped, why it had closed: these are its rest.
        Raises QueueFull, MemoryHigh, PayloadFilesAway or TooOld: nothing was written then. `deadline` is Unix time,
        `queue_ttl` seconds.
        """
        self.check_current()
        flat = [item for pair in envelopes for item in pair]
        held = await self.lay_task(group, task)
        args = (
            group, held, priority, lane, self.config.line.max_length, WORKING[0].value,
            int(queue_ttl * 1000) if queue_ttl else "", int(deadline * 1000) if deadline else "",
            samples if samples is not None else len(envelopes), handler, wanted or "",
            asked or samples or len(envelopes), int(life * 1000) if life else "", rest if rest == "later" else "",
            closed, *flat,
        )  # fmt: skip
        try:
            status, count = await self.verb("enqueue", *args)
        except OutOfMemoryError as error:
            await self.settle_task(group, held)
            raise MemoryHigh(
                f"Redis is full ({error}); task {group} was not enqueued. Pop what is done, or wait"
            ) from error
        if status == b"FULL":
            await self.settle_task(group, held)
            raise QueueFull(
                f"the line holds {int(count)} rollouts, at most line.max_length = {self.config.line.max_length}: "
                f"task {group} with {len(envelopes)} samples was not enqueued. Pop what is done, or wait"
            )
        await self.settle_task(group, held)
        return int(count)

    async def pop(
        self, lane: str, n: int, consumer: str, lease: float, nonce: str | None = None, patience: float | None = None
    ) -> list[Popped]:
        """Lease up to n finished rollouts of a lane for `lease` seconds."""
        args = ("done", n, int(lease * 1000), consumer, nonce or self.nonce(), 0, 0, self.reads, lane, 1, 0)
        rows = await self.verb("claim", *args, patience=patience)
        return [Popped(text_of(row[0]), text_of(row[1])) for row in rows]

    async def pop_groups(
        self, lane: str, n: int, consumer: str, lease: float, nonce: str | None = None, patience: float | None = None
    ) -> list[tuple[str, list[Popped]]]:
        """Lease up to n complete groups of a lane: (group, its members that are not acked)."""
        args = (lane, n, int(lease * 1000), consumer, nonce or self.nonce(), self.reads)
        groups: dict[str, list[Popped]] = {}
        for group, id, token in await self.verb("claim_groups", *args, patience=patience):
            groups.setdefault(text_of(group), []).append(Popped(text_of(id), text_of(token)))
        return list(groups.items())

    async def pop_ids(self, ids: Sequence[str], consumer: str, lease: float, nonce: str | None = None) -> list[Popped]:
        """Lease those of `ids` that have ended and that nobody has popped."""
        nonce, popped = nonce or uuid.uuid4().hex, []
        for at in range(0, len(ids), 500):
            rows = await self.verb("claim_ids", int(lease * 1000), consumer, nonce, self.reads, *ids[at : at + 500])
            popped += [Popped(text_of(row[0]), text_of(row[1])) for row in rows]
        return popped

    async def take(self, popped: Iterable[Popped], *, drop: bool = False) -> list[str]:
        """Acknowledge: OK, AGAIN (it was already) or STALE (another consumer has it) for each.

        `drop`: they are too stale to train on, and count as dropped instead of popped.
        """
        flat = [item for pair in popped for item in pair]
        if not flat:
            return []
        life = int(self.config.keep.gone_hours * 3600)
        return [text_of(reply) for reply in await self.verb("take", life, "drop" if drop else "ack", *flat)]

    async def acked(self, ids: Sequence[str]) -> list[str]:
        """Those of `ids` that were acked, as far as their tombstones tell (keep.gone_hours)."""
        found = await asyncio.gather(*(self.execute("EXISTS", self.key("gone", id)) for id in ids))
        return [id for id, there in zip(ids, found, strict=True) if there]

    async def has_group(self, group: str) -> bool:
        """Whether a member of this group is in the line, not acked."""
        return bool(await self.execute("EXISTS", self.key("g", group)))

    async def hand_back(self, popped: Iterable[Popped]) -> int:
        """Give popped rollouts back at once; returns how many went back."""
        flat = [item for pair in popped for item in pair]
        return int(await self.verb("hand_back", *flat)) if flat else 0

    async def pause_lane(self, lane: str, why: str) -> None:
        """No group of this lane that has not begun begins at INIT, until `resume_lane`."""
        await self.verb("lane_pause", lane, json.dumps({"why": sendable(why), "since": time.time()}))

    async def resume_lane(self, lane: str) -> None:
        await self.verb("lane_resume", lane)

    async def cancel(self, ids: Sequence[str], why: str = "cancelled by the caller") -> list[str]:
        """REMOVED (it waited), ASKED (its worker was told), DONE (too late) or NONE (unknown) for each id."""
        replies: list[str] = []
        for at in range(0, len(ids), 500):
            page = await self.verb("cancel", sendable(why), self.dead_seconds, *ids[at : at + 500])
            replies.extend(text_of(reply) for reply in page)
        return replies
