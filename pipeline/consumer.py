"""The trainer's way out: finished rollouts are leased, read, judged by their age, and acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pipeline.connection import connect, connect_sync
from pipeline.errors import ConfigError, Incomplete, MemoryHigh, QueueFull, RedisUnavailable
from pipeline.keeper import Keeper
from pipeline.leases import Popped
from pipeline.missing import summed_up, why_missing
from pipeline.outstanding import PAGE, Outstanding
from pipeline.producer import Producer
from pipeline.queue import Queue
from pipeline.reading import read_all
from pipeline.results import Batch, Group, Rollout
from pipeline.staleness import with_staleness
from pipeline.trouble import troubles
from pipeline.waiting import IDLE, Watch

log = logging.getLogger(__name__)

ASK_EVERY = 5.0
"""Seconds between two looks for rollouts that the server has no record of, while `pop` waits."""


class Consumer:
    """Pops as `name` from `queue`. What the server lost meanwhile is enqueued again by `producer`."""

    def __init__(self, queue: Queue, name: str, outstanding: Outstanding, producer: Producer) -> None:
        self._queue, self._name, self._config = queue, name, queue.config
        self._outstanding, self._producer = outstanding, producer
        self._keeper: Keeper | None = None
        self._popping = asyncio.Lock()
        self._ticked = self._asked = time.monotonic()
        self._dropped: list[Rollout] = []
        self._watches: dict[str, Watch] = {}
        self._streams: dict[str, str] = {}

    def open(self) -> None:
        """From now on what is popped is kept alive."""
        self._keeper = Keeper(connect_sync(self._config), self._queue, self._name, self._config.lease.done_seconds)
        self._keeper.start()

    async def close(self) -> None:
        """Give back what is popped and not acked."""
        if self._keeper is not None:
            left = self._keeper.stop()
            self._keeper = None
            if left:
                await self._hand_back(left)

    def hold_pause(self, held: bool) -> None:
        """Keep a pause of the policy alive too, or do so no longer."""
        if self._keeper is not None:
            self._keeper.hold_pause(held)

    @property
    def held(self) -> set[str]:
        """Ids that are popped and not acked."""
        return self._keeper.ids() if self._keeper else set()

    def watching(self, lane: str) -> Watch:
        """Inside of its `async with`, what keeps the lane from going on is logged (pipeline/waiting.py)."""
        return self._watches.setdefault(lane, Watch(self._config, lane, self._name))

    @contextlib.contextmanager
    def streaming(self, lane: str, name: str) -> Iterator[None]:
        """This stream asks for a batch. Raises ConfigError where another one of this client does, in the same lane."""
        if lane in self._streams:
            raise ConfigError(
                f"stream {name} was asked for a batch of lane {lane!r} while stream {self._streams[lane]} was: each "
                "would be given the other's groups. Let each have a lane of its own (line.lanes)"
            )
        self._streams[lane] = name
        try:
            yield
        finally:
            del self._streams[lane]

    async def pop(self, n: int, timeout: float | None, lane: str) -> Batch:
        """What `RolloutClient.pop` promises."""
        _check_count(n)
        batch = Batch((), ())
        async with self._popping, contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(lambda: self._give_back(batch))
            async with contextlib.aclosing(self._ticks(timeout, lane)) as ticks:
                async for _ in ticks:
                    lease = self._config.lease.done_seconds
                    leases = await self._queue.pop(lane, n - len(batch), self._name, lease, patience=timeout)
                    if leases:
                        self.watching(lane).delivered()
                        batch = batch + await self._read(leases, lane)
                    if len(batch) >= n:
                        undo.pop_all()
                        return batch
            incomplete = await self._incomplete(batch, n, len(batch), "rollouts", lane, timeout)
            undo.pop_all()
            raise incomplete

    async def pop_groups(
        self, n: int, timeout: float | None, lane: str, *, least: int | None = None, dropped: list[str] | None = None
    ) -> list[Group]:
        """What `RolloutClient.pop_groups` promises. `least`: so few are enough; those that were dropped for their age
        count too, their ids are added to `dropped`."""
        _check_count(n)
        groups: list[Group] = []
        popped = Batch((), ())
        gone: list[str] = [] if dropped is None else dropped
        async with self._popping, contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(lambda: self._give_back(popped))
            async with contextlib.aclosing(self._ticks(timeout, lane)) as ticks:
                async for _ in ticks:
                    lease = self._config.lease.done_seconds
                    found = await self._queue.pop_groups(lane, n - len(groups), self._name, lease, patience=timeout)
                    if found:
                        self.watching(lane).delivered()
                    batch = await self._read([lease for _, leases in found for lease in leases], lane, whole=True)
                    popped = popped + batch
                    of = {rollout.id: rollout for rollout in batch}
                    members = [(group, tuple(of[id] for id, _ in leases if id in of)) for group, leases in found]
                    groups += await asyncio.gather(*(self._group(group, left) for group, left in members if left))
                    gone += [group for group, left in members if not left]
                    if len(groups) >= n or (least is not None and len(groups) + len(gone) >= least):
                        undo.pop_all()
                        return groups
            incomplete = await self._incomplete(groups, n, len(groups), "groups", lane, timeout)
            undo.pop_all()
            raise incomplete

    async def named(self, wanted: Callable[[], Sequence[str]], lane: str) -> AsyncGenerator[Batch, None]:
        """Turn after turn what has ended, leased, of the ids that `wanted` then gives; other rollouts stay in the lane.

        Nothing is dropped for its age: whoever asked for it by name is told.
        """
        async with contextlib.aclosing(self._ticks(None, lane)) as ticks:
            async for _ in ticks:
                leases = await self._queue.pop_ids(wanted(), self._name, self._config.lease.done_seconds)
                yield await self._read(leases, lane, keep=True) if leases else Batch((), ())

    async def _group(self, group: str, rollouts: tuple[Rollout, ...]) -> Group:
        """The group of these members, which are leased: so its hash is there."""
        names = ("samples", "asked", "wanted", "closed")
        samples, asked, wanted, closed = await self._queue.execute("HMGET", self._queue.key("g", group), *names)
        return Group(
            group, rollouts, wanted=int(wanted or asked or samples or len(rollouts)), closed=(closed or b"").decode(),
            late=all(rollout.late for rollout in rollouts),
        )  # fmt: skip

    async def ack(self, popped: Any, *, drop: bool = False) -> None:
        """The line forgets them. `drop`: they don't count as trained on."""
        ids = list(ids_of(popped))
        leases = self._keeper.leases(ids) if self._keeper else []
        for at in range(0, len(leases), PAGE):
            page = leases[at : at + PAGE]
            for lease, reply in zip(page, await self._queue.take(page, drop=drop), strict=True):
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
        ids = list(ids_of(popped))
        leases = self._keeper.leases(ids)
        self._keeper.forget(ids)
        await self._hand_back(leases)

    async def _hand_back(self, leases: list[Popped]) -> None:
        with contextlib.suppress(RedisUnavailable, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._queue.hand_back(leases)

    async def _ticks(self, timeout: float | None, lane: str) -> AsyncGenerator[None, None]:
        """Turns of a pop: at once, then with each ring, until `timeout`. Lost rollouts are enqueued again meanwhile."""
        until = time.monotonic() + timeout if timeout is not None else None
        self._dropped = []
        bell = connect(self._config, blocking=True)
        task = asyncio.current_task()
        cancels = task.cancelling() if task else 0
        try:
            async with self.watching(lane):
                while True:
                    if task and task.cancelling() > cancels:  # wait_for, inside redis-py, swallows one on Python 3.11
                        raise asyncio.CancelledError
                    yield
                    left = until - time.monotonic() if until is not None else 1.0
                    if left <= 0:
                        return
                    key = self._queue.key("bell", "done", lane)
                    wait = min(1.0, self._config.lease.tick, max(0.01, left))
                    await self._queue.wait_for_bell(bell, key, wait, patience=timeout)
                    await self._upkeep()
        finally:
            if self._dropped:
                log.warning("of lane %s %s", lane, self._said_of_dropped())
            await bell.aclose()

    async def _upkeep(self) -> None:
        """What is due while a pop waits; the times are the client's, so that many short pops do it too."""
        now = time.monotonic()
        if now - self._ticked > self._config.lease.tick:
            self._ticked = now
            await self._queue.tick()  # where no worker lives, nobody else gives a dead trainer's batch back
        if now - self._asked > ASK_EVERY:
            self._asked = now
            try:
                await self._producer.restore(self.held)
            except (MemoryHigh, QueueFull) as error:
                log.warning("what the server lost can't be enqueued again now: %s", error)

    async def _read(self, leases: Sequence[Popped], lane: str, *, whole: bool = False, keep: bool = False) -> Batch:
        """Records of leased rollouts; the leases are kept alive from here on. What is too stale is dropped, where
        policy.stale says so and not `keep`: alone, or with its whole group (`whole`)."""
        if self._keeper is None:
            raise RuntimeError("this client is not open: use `async with RolloutClient()` or call `open()` first")
        self._keeper.hold(leases)
        try:
            records = await read_all(self._queue, leases)
            rollouts = await with_staleness(self._queue, records, lane)
            drops = self._config.policy.stale == "drop" and not keep
            old = [rollout for rollout in rollouts if rollout.stale] if drops else []
            if old:
                groups = {rollout.group for rollout in old}
                old = [rollout for rollout in rollouts if rollout.group in groups] if whole else old
                await self.ack(old, drop=True)
                self._dropped += old
        except BaseException:
            self._keeper.forget(lease.id for lease in leases)
            await self._hand_back(list(leases))  # unread; where Redis is away, they return by themselves
            raise
        gone = {rollout.id for rollout in old}
        return Batch(
            tuple(marked(rollout) for rollout in rollouts if rollout.id not in gone),
            tuple(lease for lease in leases if lease.id not in gone),
        )

    async def _incomplete(
        self, batch: Any, wanted: int, got: int, what: str, lane: str, timeout: float | None
    ) -> Incomplete:
        popped = set(ids_of(batch)) | self.held
        missing = await why_missing(self._queue, lane, [id for id in self._outstanding.ids(lane) if id not in popped])
        found, summary = await troubles(self._queue, lane, self._name), summed_up(missing, lane)
        told = {
            *IDLE,
            "paused",
            "bound",
            *(kind for kind in found if f"rollout work {kind.partition(':')[2]})" in summary),
        }
        reasons = [why for kind, why in found.items() if kind not in told]
        said = filter(None, (*reasons, summary, self._said_of_dropped()))
        return Incomplete(
            f"{got} of {wanted} {what} came within {timeout if timeout is not None else 0:g} s: {'; '.join(said)}",
            batch=batch, wanted=wanted, got=got, missing=missing,
        )  # fmt: skip

    def _said_of_dropped(self) -> str:
        """How many this pop threw away; empty when there were none."""
        if not self._dropped:
            return ""
        ages = sorted(rollout.staleness or 0 for rollout in self._dropped)
        return f"{len(ages)} rollouts were dropped: too stale by max_staleness (up to {ages[-1]} updates old)"


def marked(rollout: Rollout) -> Rollout:
    """What its group let go on past its close is stale, however old its weights are."""
    return replace(rollout, stale=True) if rollout.late else rollout


def _check_count(n: int) -> None:
    if n < 1:
        raise ValueError(f"pop of {n}: at least 1 is popped")


def ids_of(popped: Any) -> Iterable[str]:
    """Ids in whatever `pop` and `pop_groups` gave."""
    if isinstance(popped, Rollout):
        yield popped.id
    elif isinstance(popped, Group):
        yield from (rollout.id for rollout in popped.rollouts)
    else:
        for item in popped:
            yield from ids_of(item)
