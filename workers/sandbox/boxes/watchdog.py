"""Holds boxes to their limits where the kernel does not: looks twice a second, kills what uses most, and says so.

One task looks at the processes of all boxes. Each box has one more for its disk (`disk.Disk`): a million files take
long to count, and must not blind the watch over the others. It looks where a cgroup holds the limits too (the agent may
own that as root of this machine), and reports what the kernel killed there.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass

from workers.sandbox import processes
from workers.sandbox.boxes import disk
from workers.sandbox.boxes.limits import megabytes
from workers.sandbox.boxes.subtrees import Usage, largest, without_main
from workers.sandbox.boxes.watched import Watched
from workers.sandbox.descent import below
from workers.sandbox.processes import Process

log = logging.getLogger(__name__)

PERIOD = 0.5
WHOLE = 10
"""At each so many looks all processes of the machine are looked at; else those of this process and of its boxes, since
machines are large and shared, and a box's processes descend from these."""
PATIENCE = 3
"""Looks in a row that find a box over its limit before all of it but its oldest process is killed; twice: all."""

NOTES = 20
"""Notes that wait for the policy at the most."""

BOMB = 2
"""Times the allowed processes from which on they are not killed one by one, which a fork bomb would outrun: the kernel
ends them all at once, together with the first process of their namespace, and lets no further one start."""


@dataclass(slots=True)
class _State:
    """What is remembered of a box between two looks."""

    over: int = 0
    kills: int = 0
    refusals: int = 0


class Watchdog:
    """One task for all boxes of a driver; it runs as long as there are any."""

    def __init__(self, period: float = PERIOD, disk_period: float = disk.PERIOD) -> None:
        self._period, self._disk_period = period, disk_period
        self._boxes: dict[int, tuple[Watched, _State]] = {}
        self._task: asyncio.Task[None] | None = None
        self._disks: dict[int, asyncio.Task[None]] = {}
        self._looks = 0

    def watch(self, box: Watched) -> None:
        """Hold this box to its limits from now on. Called inside the event loop."""
        loop = asyncio.get_running_loop()
        self._boxes[id(box)] = box, _State()
        self._disks[id(box)] = loop.create_task(
            disk.Disk(box, _tell, self._disk_period).watch(), name=f"disk of sandbox {box.name}"
        )
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run(), name="sandbox watchdog")

    def forget(self, box: Watched) -> None:
        """Look at this box no more."""
        self._boxes.pop(id(box), None)
        disk = self._disks.pop(id(box), None)
        if disk is not None:
            disk.cancel()
        if not self._boxes and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while self._boxes:
            await asyncio.sleep(self._period)
            boxes = list(self._boxes.values())
            try:
                for box, note in await asyncio.to_thread(self._look, boxes):
                    _tell(box, note)
            except Exception:
                log.exception("the sandboxes' watchdog could not look; it goes on")

    def _look(self, boxes: list[tuple[Watched, _State]]) -> list[tuple[Watched, str]]:
        """One look at all boxes, in a thread; (box, note) of each that did something wrong."""
        pids = [box.pid for box, _ in boxes if box.pid is not None]
        self._looks += 1
        table = below(os.getpid(), *pids) if self._looks % WHOLE else processes.living()
        spaces = processes.namespaces(table)
        found = []
        for box, state in boxes:
            notes = [_killed_by_kernel(box, state)]
            if not box.alive():  # a fresh start is to be judged by what it does itself
                state.over = 0
                state.refusals = box.group.refusals() if box.group is not None else 0
            else:
                keeper = table.get(box.pid) if box.pid is not None else None
                inside = processes.inside(keeper.pid, table, spaces) if keeper is not None else box.processes()
                notes.append(_hold(box, state, Usage.of(inside), keeper))
            found += [(box, note) for note in notes if note]
        return found


def _tell(box: Watched, note: str) -> None:
    """Have the policy told, once; who provokes notes without end is told no more than some."""
    if note not in box.notes and len(box.notes) < NOTES:
        log.warning("sandbox %s: %s", box.name, note)
        box.notes.append(note)


def _killed_by_kernel(box: Watched, state: _State) -> str:
    """What the cgroup has killed for memory since the last look."""
    before, state.kills = state.kills, box.group.kills() if box.group is not None else 0
    if state.kills <= before:
        return ""
    limit = megabytes(box.limits.memory)
    return f"the memory limit of {limit} MB was reached: {state.kills - before} processes were killed"


def _hold(box: Watched, state: _State, usage: Usage, keeper: Process | None) -> str:
    """Kill what is too much; the sentence about it, or nothing."""
    limits = box.limits
    memory = usage.memory(limits.memory)
    before, state.refusals = state.refusals, box.group.refusals() if box.group is not None else 0
    many = usage.threads + 1 >= limits.processes or state.refusals > before  # with the keeper
    if memory <= limits.memory and not many:
        state.over = 0
        return ""
    state.over += 1
    what = (
        f"the limit of {limits.processes} processes and threads was reached"
        if many
        else f"the sandbox used {megabytes(memory)} MB of memory where {megabytes(limits.memory)} MB are allowed"
    )
    if state.over > 2 * PATIENCE or usage.threads > BOMB * limits.processes:
        state.over = 0
        if keeper is not None:
            processes.kill(keeper)
        else:
            processes.kill_all(str(box.folder))
        return f"{what}, and more came than could be killed: everything in the sandbox was ended"
    if state.over > PATIENCE or usage.threads > limits.processes:
        _kill(without_main(usage.processes) or usage.processes)
        return f"{what}: commands were killed"
    if many:
        return what
    _kill(largest(usage))
    return f"{what}: what used most was killed"


def _kill(found: Iterable[Process]) -> None:
    """Not stopped before: the nsenter that waits for a stopped process stops too, for ever."""
    for item in found:
        processes.kill(item)
