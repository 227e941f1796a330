"""An evaluation beside the training: its own rollouts by their ids, whole groups, and what they come to."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from pipeline.envelope import Task, rollout_id
from pipeline.errors import Incomplete, LineError
from pipeline.groups import WHOLE
from pipeline.missing import summed_up, why_missing
from pipeline.results import Group, Rollout

if TYPE_CHECKING:
    from pipeline.client import RolloutClient

REST_PER_ID = 20e-6
"""Seconds between two looks for each id that is looked for: Redis is busy with looks for a tenth of that."""

ASK_EVERY = 5.0
"""Seconds between two looks for rollouts that somebody else took away."""

LONGEST = 160
"""Characters of a task's own id that begin the ids of its rollouts here; two tasks may have the same."""

LEAVE_SECONDS = 5.0
"""For the rollouts of an evaluation that was broken off to end, so that their records do not stay in the lane."""


@dataclass(frozen=True, slots=True)
class Report:
    """What an evaluation came to. Counts and means are over rollouts, not over groups."""

    groups: tuple[Group, ...]

    @classmethod
    def of(cls, groups: Iterable[Group]) -> Self:
        return cls(tuple(groups))

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """All of them, whatever their outcome."""
        return tuple(rollout for group in self.groups for rollout in group.rollouts)

    @property
    def scored(self) -> int:
        return self._count("scored")

    @property
    def failed(self) -> int:
        return self._count("failed")

    @property
    def cancelled(self) -> int:
        return self._count("cancelled")

    @property
    def truncated(self) -> int:
        """Those that reached a limit of their window, turns or length; they are scored."""
        return sum(1 for rollout in self.rollouts if rollout.truncated)

    @property
    def mean(self) -> float | None:
        """Mean reward of the scored ones alone; None where there is none."""
        rewards = self._rewards
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def mean_with_failures(self) -> float | None:
        """Mean in which each failed and each cancelled one counts as 0: no reward, but a lower bound."""
        return sum(self._rewards) / len(self.rollouts) if self.rollouts else None

    @property
    def by_handler(self) -> dict[str, Report]:
        """The same for each task family."""
        found: dict[str, list[Group]] = {}
        for group in self.groups:
            handler = next((rollout.handler for rollout in group.rollouts if rollout.handler), "unknown")
            found.setdefault(handler, []).append(group)
        return {handler: Report.of(groups) for handler, groups in sorted(found.items())}

    @property
    def _rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts if rollout.reward is not None]

    def _count(self, outcome: str) -> int:
        return sum(1 for rollout in self.rollouts if rollout.outcome == outcome)

    def __str__(self) -> str:
        """One line for a log."""
        families = self.by_handler
        each = ", ".join(f"{handler} {_said(report.mean)}" for handler, report in families.items())
        return (
            f"mean {_said(self.mean)} of {self.scored} scored, {_said(self.mean_with_failures)} with failures as 0 "
            f"({self.failed} failed, {self.cancelled} cancelled, {self.truncated} truncated; "
            f"{len(self.rollouts)} rollouts, {len(self.groups)} groups){': ' + each if len(families) > 1 else ''}"
        )


def _said(mean: float | None) -> str:
    return "none" if mean is None else f"{mean:.4f}"


class Evaluation:
    """One evaluation.

    Its groups have ids that no other has, and it collects by id: what others, living or dead, have in the lane stays.
    """

    def __init__(self, client: RolloutClient, lane: str) -> None:
        self._client, self._lane = client, lane
        self._mark = f"eval-{uuid.uuid4().hex[:8]}"
        self._groups: dict[str, list[str]] = {}
        self._missing: set[str] = set()
        self._came: dict[str, Rollout] = {}
        self._asked = time.monotonic()

    async def run(self, tasks: Iterable[Task], samples: int, timeout: float | None) -> Report:
        """What `RolloutClient.evaluate` promises."""
        try:
            async with asyncio.timeout(timeout) as limit:
                await self._enqueue(tasks, samples)
                await self._collect()
        except TimeoutError:
            if not limit.expired():
                raise
            incomplete = await self._incomplete(timeout or 0.0)
            await self._break_off("the evaluation's time is over")
            raise incomplete from None
        except BaseException:
            await self._break_off("the evaluation was broken off")
            raise
        return Report.of(self._whole())

    async def _enqueue(self, tasks: Iterable[Task], samples: int) -> None:
        named = [
            replace(task, id=f"{task.id[:LONGEST]}-{self._mark}-{number}" if task.id else f"{self._mark}-{number}")
            for number, task in enumerate(tasks)
        ]
        self._groups = {
            task.id or "": [rollout_id(task.id or "", sample) for sample in range(samples)] for task in named
        }
        self._missing = {id for ids in self._groups.values() for id in ids}
        await self._client.enqueue(named, samples=samples, lane=self._lane, groups=WHOLE)

    async def _collect(self) -> None:
        """Until all are here. Each is acked as it comes."""
        if not self._missing:
            return
        async with contextlib.aclosing(self._client.named(lambda: list(self._missing), self._lane)) as turns:
            async for batch in turns:
                for rollout in batch:
                    self._came[rollout.id] = rollout
                    self._missing.discard(rollout.id)
                await self._client.ack(batch)
                if not self._missing:
                    return
                await self._ask_for_lost()
                await asyncio.sleep(len(self._missing) * REST_PER_ID)

    async def _ask_for_lost(self) -> None:
        """Raise Incomplete when another consumer took some of them away: they would be waited for in vain."""
        if time.monotonic() - self._asked < ASK_EVERY:
            return
        self._asked = time.monotonic()
        lost = await self._client.queue.acked(sorted(self._missing))
        if lost:
            raise self._short(
                f"{len(lost)} were popped and acked by another consumer of lane {self._lane!r}, {lost[0]} is one: let "
                "evaluations have a lane in which nobody pops",
                dict.fromkeys(lost, "another consumer popped and acked it"),
            )

    def _whole(self) -> list[Group]:
        """The groups of which something came, members by number."""
        found = {id: tuple(self._came[name] for name in ids if name in self._came) for id, ids in self._groups.items()}
        return [Group(id, rollouts, wanted=len(self._groups[id])) for id, rollouts in found.items() if rollouts]

    async def _incomplete(self, timeout: float) -> Incomplete:
        missing = await why_missing(self._client.queue, self._lane, sorted(self._missing))
        return self._short(f"its {timeout:g} s are over; {summed_up(missing, self._lane)}", missing)

    def _short(self, why: str, missing: dict[str, str]) -> Incomplete:
        got, wanted = len(self._came), len(self._missing) + len(self._came)
        said = f"{got} of {wanted} rollouts of the evaluation came: {why}"
        return Incomplete(said, batch=self._whole(), wanted=wanted, got=got, missing=missing)

    async def _break_off(self, why: str) -> None:
        """Nobody waits for the rest: it is cancelled, and its records are acked if they come soon."""
        with contextlib.suppress(LineError, TimeoutError):  # Redis is away, or they take long to end: so they stay
            async with asyncio.timeout(LEAVE_SECONDS):
                told = await self._client.cancel(self._missing, why)
                self._missing = {id for id, reply in told.items() if reply != "NONE"}
                await self._collect()
