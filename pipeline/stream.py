"""Continuous feeding: a stream keeps the line full of groups and gives the trainer one batch of them after another.

What is fed, in flight and trained on is known by the groups' ids, which are the same in every life of the trainer. So a
stream that goes on from a checkpoint finds in Redis what became of each: docs/client.md says what a crash costs.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from pipeline import refusals
from pipeline.consumer import Consumer, ids_of
from pipeline.errors import ConfigError, Incomplete
from pipeline.feed import Feed, Tasks
from pipeline.feeding import Feeding, Recent, Shape
from pipeline.groups import EVAL_LANE, KEEPS, WHOLE, GroupPolicy, Keep
from pipeline.results import Group
from pipeline.stream_state import StreamState

if TYPE_CHECKING:
    from pipeline.client import RolloutClient

log = logging.getLogger(__name__)

MOST_REFUSED = 10
"""Batches' worth of groups that may be refused before one batch is full."""

TRY_AGAIN = 1.0
"""Seconds until a line that was full is fed again."""


class Stream:
    """An asynchronous iterator over lists of groups; `RolloutClient.stream` makes it and says what it does.

    Nothing is lost when a wait for a batch is cancelled, or raises: what came is the front of the next batch.
    """

    def __init__(self, client: RolloutClient, consumer: Consumer, feed: Feed, shape: Shape) -> None:
        self.shape = shape
        self._client, self._consumer = client, consumer
        self._feeding = Feeding(client, feed, shape)
        self._stats = refusals.StreamStats()
        self._came: list[Group] = []
        self._dropped: list[str] = []
        self._ready: list[Group] = []
        self._known: list[Group] = []
        self._refused: list[Group] = []
        self._trained: set[str] = set()
        self._sorted: Recent[tuple[str, bool]] = Recent()
        self._reasons: Counter[str] = Counter()
        self._asking = asyncio.Lock()
        self._begun = self._closed = False

    @property
    def name(self) -> str:
        """The front of its groups' ids."""
        return self._feeding.feed.name

    @property
    def in_flight(self) -> int:
        """Groups that are enqueued, and neither yielded nor thrown away."""
        return len(self._feeding.open)

    @property
    def stats(self) -> refusals.StreamStats:
        """Counts since the stream was made."""
        self._stats.again = self._feeding.anew
        return self._stats

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Group]:
        async with self._asking, self._consumer.watching(self.shape.lane):
            self._begun = True
            with self._consumer.streaming(self.shape.lane, self.name):
                batch = [] if self._closed else await self._collect()
        if not batch:
            raise StopAsyncIteration
        return batch

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End it. Nothing is cancelled; what is popped and not acked goes back to the line when the client closes."""
        self._closed = True

    async def pause(self, why: str = "") -> None:
        """Hold the whole run: nothing is fed, and nothing that has not begun begins, until `resume`."""
        self._feeding.paused = True
        await self._client.pause_run(why or f"stream {self.name} was paused", self.shape.lane)

    async def resume(self) -> None:
        """Go on after `pause`. Safe twice."""
        await self._client.resume_run(self.shape.lane)
        self._feeding.paused = False

    # -- the checkpoint ------------------------------------------------------------------------------------------------

    def state_dict(self, untrained: Iterable[Group] = ()) -> dict[str, Any]:
        """What a checkpoint keeps of it: a small map for JSON, true of the weights that are saved beside it.

        Every batch that was yielded counts as trained on by these weights, but for the groups in `untrained`.
        """
        self._forget_acked()
        feeding, without = self._feeding, {group.id for group in untrained}
        spots = [*feeding.open.values(), *feeding.again]
        spots += [spot for id, (spot, _) in feeding.yielded.items() if id in without and spot is not None]
        return StreamState(
            name=self.name, seed=feeding.feed.seed, samples=self.shape.samples, length=feeding.feed.length,
            epochs=feeding.feed.epochs, cursor=feeding.cursor, in_flight=spots,
            trained=self._trained | (feeding.yielded.keys() - without),
            early=feeding.early.keys() - without, read=feeding.feed.taken(feeding.cursor),
        ).to_map()  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, before the first batch is asked for. The stream takes the state's name.

        Raises ConfigError for a state that is not of these tasks, this seed and this number of samples, and for a
        stream that has begun.
        """
        if self._begun:
            raise ConfigError("this stream has begun: make a new one, and give it the state before the first batch")
        found, feeding = StreamState.of(state), self._feeding
        found.check(feeding.feed, self.shape.samples)
        feeding.feed.name = found.name
        feeding.cursor, feeding.again = found.cursor, sorted(found.in_flight)
        feeding.early, self._trained = Recent(found.early), set(found.trained)
        feeding.feed.skip(found.read, {spot.position for spot in feeding.again})

    # -- a batch -------------------------------------------------------------------------------------------------------

    async def _collect(self) -> list[Group]:
        """The next batch; shorter, or empty, when the tasks are over."""
        shape = self.shape
        until = None if shape.timeout is None else time.monotonic() + shape.timeout
        self._reasons.clear()
        self._forget_acked()
        await self._judge()
        while len(self._ready) < shape.batch and (await self._feeding.fill() or await self._more_comes()):
            await self._pop(until)
            if self._reasons.total() >= MOST_REFUSED * shape.batch and len(self._ready) < shape.batch:
                raise self._none_to_keep()
        await self._feeding.fill()  # a training step holds up the event loop: what runs meanwhile is in the line by now
        batch, self._ready = self._ready[: shape.batch], self._ready[shape.batch :]
        for group in batch:
            spot = self._feeding.close(group.id, group.late)
            self._feeding.yielded[group.id] = (spot, frozenset(ids_of(group)))
        self._stats.yielded += len(batch)
        if len(batch) < shape.batch and self._reasons:
            why = refusals.said(self._reasons, shape.keep)
            log.warning("the tasks of stream %s are over: %d groups are its last batch; %s", self.name, len(batch), why)
        return batch

    async def _more_comes(self) -> bool:
        """Whether anything is under way when all is fed. What a dead life had trained on and not acked comes when its
        lease is over, and is waited for at the very end: nobody else would ack it, but for who holds it here."""
        if self._feeding.open.keys() - {group.id for group in self._ready}:
            return True
        if self._ready:
            return False
        self._trained = {id for id in self._trained if await self._client.queue.has_group(id)}
        held = {id.rpartition(".")[0] for id in self._consumer.held}
        return not self._trained <= held

    async def _pop(self, until: float | None) -> None:
        """Wait for at least one group, and judge what came. Raises Incomplete when the time is over."""
        left = None if until is None else max(0.0, until - time.monotonic())
        short = self._feeding.held_up and (left is None or left > TRY_AGAIN)
        wanted, missed = self.shape.batch - len(self._ready), None
        try:
            self._came += await self._consumer.pop_groups(
                wanted, TRY_AGAIN if short else left, self.shape.lane, least=1, dropped=self._dropped
            )
        except Incomplete as error:
            self._came += error.batch
            missed = error
        await self._judge()
        if missed is not None and not short and len(self._ready) < self.shape.batch:
            raise self._not_in_time(missed)

    async def _judge(self) -> None:
        """Sort what came into what is kept, what is thrown away, and what the checkpoint's weights were trained on."""
        while self._dropped:
            self._refuse("a rollout that is too stale")
            self._feeding.close(self._dropped.pop(), late=True)
        while self._came:
            self._sort(self._came[0])
            del self._came[0]
        await self._consumer.ack(self._known)
        self._known = []
        await self._consumer.ack(self._refused, drop=True)
        self._refused = []

    def _sort(self, group: Group) -> None:
        part = (group.id, group.late)
        if part in self._sorted:
            self._known.append(self._not_in_hand(group))
            return
        if group.id in self._trained:
            self._trained.discard(group.id)
            self._known.append(group)
            self._sorted.add(part)
            return
        if group.id in self._feeding.open and (group.late or _is_torn(group)):
            self._feeding.repeat(group.id)  # its other part was acked for weights that are lost
            if not group.late:
                self._sorted.add(part)
                self._refused.append(group)
                return
        behind = not group.late and self._feeding.is_behind(group.id)
        kept = not behind and self.shape.keep(group)
        self._sorted.add(part)
        if kept:
            self._ready.append(group)
        else:
            self._refuse("a task that is trained on already" if behind else refusals.why_refused(group))
            self._feeding.close(group.id, group.late)
            self._refused.append(group)
        self._stats.came(group)

    def _not_in_hand(self, group: Group) -> Group:
        """What this stream was given before, without what is leased anew for whoever has it and will ack it."""
        has = {id for _, ids in self._feeding.yielded.values() for id in ids} | set(ids_of(self._ready))
        log.warning("group %s came a second time, its lease had run out: it is not yielded again", group.id)
        return replace(group, rollouts=tuple(rollout for rollout in group.rollouts if rollout.id not in has))

    def _refuse(self, reason: str) -> None:
        self._reasons[reason] += 1
        self._stats.refuse(reason)

    def _forget_acked(self) -> None:
        """What is acked by now is behind us, also where it came with an Incomplete and was never yielded."""
        held = self._consumer.held
        for group in [group for group in self._ready if held.isdisjoint(ids_of(group))]:
            self._ready.remove(group)
            self._feeding.close(group.id, group.late)
        yielded = self._feeding.yielded
        for id in [id for id, (_, ids) in yielded.items() if held.isdisjoint(ids)]:
            del yielded[id]

    def _none_to_keep(self) -> Incomplete:
        why = refusals.said(self._reasons, self.shape.keep)
        return self._incomplete(f"{len(self._ready)} of {self.shape.batch} groups were worth keeping: {why}", {})

    def _not_in_time(self, missed: Incomplete) -> Incomplete:
        about = f"{len(self._ready)} of {self.shape.batch} groups came within {self.shape.timeout or 0.0:g} s"
        refused = f" ({refusals.said(self._reasons, self.shape.keep)})" if self._reasons else ""
        return self._incomplete(f"{about}{refused}: {str(missed).partition(': ')[2]}", missed.missing)

    def _incomplete(self, message: str, missing: dict[str, str]) -> Incomplete:
        ready = list(self._ready)
        return Incomplete(message, batch=ready, wanted=self.shape.batch, got=len(ready), missing=missing)


def _is_torn(group: Group) -> bool:
    """Some members are acked already: the trainer died in the middle of it."""
    return not group.closed and len(group.rollouts) < max(rollout.samples for rollout in group.rollouts)


def make(
    client: RolloutClient,
    consumer: Consumer,
    tasks: Tasks,
    *,
    samples: int,
    batch: int,
    ahead: int,
    groups: GroupPolicy | None,
    keep: str | Keep | None,
    name: str,
    seed: int | None,
    epochs: int | None,
    lane: str,
    timeout: float | None,
) -> Stream:
    """What `RolloutClient.stream` gives. Raises ConfigError."""
    if batch < 1 or ahead < 0 or samples < 1:
        raise ConfigError(f"batch is {batch}, samples {samples} and ahead {ahead}: at least 1, 1 and 0")
    wanted = client.config.groups.keep if keep is None else keep
    if isinstance(wanted, str) and wanted not in KEEPS:
        raise ConfigError(f"keep is {wanted!r}: it is one of {', '.join(KEEPS)}, or a function of a Group")
    chosen = KEEPS[wanted] if isinstance(wanted, str) else wanted
    policy = groups or (WHOLE if lane == EVAL_LANE else GroupPolicy.of(client.config.groups))
    shape = Shape(samples=samples, batch=batch, ahead=ahead, groups=policy, keep=chosen, lane=lane, timeout=timeout)
    return Stream(client, consumer, Feed(tasks, name or f"stream-{uuid.uuid4().hex[:8]}", seed, epochs), shape)
