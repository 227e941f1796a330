"""Where a stream's tasks come from: each by its epoch and position, the same ones in every life of a trainer."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipeline.envelope import Task
from pipeline.errors import ConfigError

Tasks = Sequence[Task] | Iterable[Task]

LONGEST_NAME, LONGEST_ID = 100, 60
"""Characters of a stream's name, and of a task's own id, in a group's id, which has room for 200."""

_AFTER_NAME = re.compile(r"-(\d+)-(\d+)(?:-.*?)?(?:~(\d+))?", re.DOTALL)


class Spot(NamedTuple):
    """A task's place: `position` counts within the epoch, in the order in which the tasks are taken, from 0.

    `tries`: how often it ran before under another id, because that one's result was acked for weights that are lost.
    """

    epoch: int
    position: int
    tries: int = 0

    @property
    def next(self) -> Spot:
        """The spot that comes after it in the same epoch."""
        return Spot(self.epoch, self.position + 1)

    def again(self) -> Spot:
        return self._replace(tries=self.tries + 1)


class Feed:
    """Tasks by spot. `length` is None for an iterator, which is read once, in its own order.

    With `seed` each epoch of a sequence has an order of its own, drawn from both. Raises ConfigError for what can't be
    meant.
    """

    def __init__(self, tasks: Tasks, name: str, seed: int | None, epochs: int | None) -> None:
        self.name, self.seed = name, seed
        self._rows: Sequence[Task] | None = tasks if _has_random_access(tasks) else None  # type: ignore[assignment]
        self._iterator: Iterator[Task] = iter(()) if self._rows is not None else iter(tasks)
        self._read = 0
        self._broken: BaseException | None = None
        self._kept: dict[int, Task] = {}
        self._orders: dict[int, list[int]] = {}
        if self._rows is None and (seed is not None or epochs not in (None, 1)):
            raise ConfigError(
                f"seed is {seed} and epochs {epochs}, but the tasks are an iterator, which is read once and in its own "
                "order: give a list, or shuffle where they are read (`read_tasks(..., shuffle=seed)`)"
            )
        if len(name) > LONGEST_NAME or not name.isprintable():
            raise ConfigError(f"name is {name!r:.120}: it has at most {LONGEST_NAME} printable characters")
        if epochs is not None and epochs < 1:
            raise ConfigError(f"epochs is {epochs}: it is at least 1, or None for no end")
        if self._rows is not None and len(self._rows) == 0:
            raise ConfigError("the tasks are an empty sequence: a stream has at least one")
        self.epochs = epochs if self._rows is not None else 1

    @property
    def length(self) -> int | None:
        """Tasks of one epoch; None for an iterator."""
        return len(self._rows) if self._rows is not None else None

    def taken(self, cursor: Spot | None) -> int:
        """How many tasks an iterator has given when this one is next; 0 for a sequence, which need not be read over."""
        if self._rows is not None:
            return 0
        return self._read if cursor is None else cursor.position

    def settle(self, spot: Spot) -> Spot | None:
        """The same spot, or the first of the next epoch where this one is over; None where all epochs are."""
        if self._rows is None:
            return spot if self._has(spot.position) else None
        if spot.position >= len(self._rows):
            spot = Spot(spot.epoch + 1, 0)
        return spot if self.epochs is None or spot.epoch < self.epochs else None

    def task(self, spot: Spot) -> Task:
        """The task of a spot that `settle` gave, with the id of its group: its own, which other tasks and other streams
        may have too, stands at the end. An iterator's stays known until `done`."""
        if self._rows is None:
            self._has(spot.position)
            task = self._kept[spot.position]
        else:
            task = self._rows[self._order(spot.epoch)[spot.position]]
        base = f"{self.name}-{spot.epoch}-{spot.position}" + (f"-{task.id[:LONGEST_ID]}" if task.id else "")
        return replace(task, id=f"{base}~{spot.tries}" if spot.tries else base)

    def spot_of(self, id: str) -> Spot | None:
        """The spot of a group's id, the other way round than `task`; None for a group that no life of this fed."""
        found = _AFTER_NAME.fullmatch(id.removeprefix(self.name)) if id.startswith(self.name) else None
        return Spot(int(found[1]), int(found[2]), int(found[3] or 0)) if found else None

    def done(self, spot: Spot) -> None:
        """Nobody will ask for it again."""
        self._kept.pop(spot.position, None)

    def skip(self, count: int, keep: Iterable[int]) -> None:
        """Read over an iterator's first `count` tasks, but keep those at these positions. Raises ConfigError."""
        if self._rows is not None:
            return
        kept = set(keep)
        for position in range(count):
            if not self._has(position):
                raise ConfigError(
                    f"the state is of position {count}, and this iterator has {position} tasks: give the same tasks"
                )
            if position not in kept:
                del self._kept[position]

    def _has(self, position: int) -> bool:
        """Read on until the task at this position is known; False where there are not so many.

        What the iterator raises passes through; from then on ConfigError, for one that broke looks like one that ended.
        """
        while self._read <= position:
            if self._broken is not None:
                broken = f"{type(self._broken).__name__}: {self._broken}"
                raise ConfigError(
                    f"the tasks' iterator broke after {self._read} tasks ({broken}): mend it, and go on with a new "
                    "stream and this one's state"
                ) from self._broken
            try:
                self._kept[self._read] = next(self._iterator)
            except StopIteration:
                return False
            except BaseException as error:
                self._broken = error
                raise
            self._read += 1
        return True

    def _order(self, epoch: int) -> list[int]:
        """Row numbers of an epoch. The two newest are kept: what is in flight may be of the one before."""
        if epoch not in self._orders:
            order = list(range(len(self._rows or ())))
            if self.seed is not None:
                random.Random(f"{self.seed}-{epoch}").shuffle(order)
            self._orders[epoch] = order
            for old in sorted(self._orders)[:-2]:
                del self._orders[old]
        return self._orders[epoch]


def _has_random_access(tasks: Tasks) -> bool:
    """A Sequence, or what behaves like one: datasets of other libraries have no base class of ours."""
    return isinstance(tasks, Sequence) or (hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__"))
