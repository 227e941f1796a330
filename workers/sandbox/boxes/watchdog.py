"""Holds boxes to their limits where the kernel does not: looks twice a second, kills what uses most, and says so.

One task looks at the processes of all boxes. Each box has one more for its disk: a million files take long to count,
and must not blind the watch over the others. It looks where a cgroup holds the limits too (the agent may own that as
root of this machine), and reports what the kernel killed there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workers.sandbox import processes, programs
from workers.sandbox.boxes.limits import MB, Cgroup, Limits
from workers.sandbox.boxes.subtrees import Usage, largest, without_main
from workers.sandbox.processes import Process

log = logging.getLogger(__name__)

PERIOD = 0.5
DISK_PERIOD = 5.0
DISK_SHARE = 20
"""A look at the disk that takes a second is repeated after this many seconds at the soonest."""
DU_SECONDS = 120.0

PATIENCE = 3
"""Looks in a row that find a box over its limit before all of it but its oldest process is killed; twice: all."""


NOTES = 20
"""Notes that wait for the policy at the most."""

BOMB = 2
"""Times the allowed processes from which on they are not killed one by one, which a fork bomb would outrun: the kernel
ends them all at once, together with the first process of their namespace, and lets no further one start."""


class Watched(Protocol):
    """What the watchdog needs of a box."""

    name: str
    folder: Path
    notes: list[str]
    limits: Limits
    group: Cgroup | None
    pid: int | None

    def processes(self) -> list[Process]: ...

    def alive(self) -> bool: ...


@dataclass(slots=True)
class _State:
    """What is remembered of a box between two looks."""

    over: int = 0
    kills: int = 0
    refusals: int = 0


class Watchdog:
    """One task for all boxes of a driver; it runs as long as there are any."""

    def __init__(self, period: float = PERIOD, disk_period: float = DISK_PERIOD) -> None:
        self._period, self._disk_period = period, disk_period
        self._boxes: dict[int, tuple[Watched, _State]] = {}
        self._task: asyncio.Task[None] | None = None
        self._disks: dict[int, asyncio.Task[None]] = {}

    def watch(self, box: Watched) -> None:
        """Hold this box to its limits from now on. Called inside the event loop."""
        loop = asyncio.get_running_loop()
        self._boxes[id(box)] = box, _State()
        self._disks[id(box)] = loop.create_task(self._watch_disk(box), name=f"disk of sandbox {box.name}")
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

    async def _watch_disk(self, box: Watched) -> None:
        period, before, full = self._disk_period, 0, 0
        while True:
            await asyncio.sleep(period)
            started = time.monotonic()
            try:
                used = await _disk_use(box)
                if used is None:
                    continue
                if used <= box.limits.disk:
                    full = 0
                elif used > before:
                    full += 1
                    await asyncio.to_thread(_kill_writers, box, full)
                    _tell(box, _full(used, box.limits.disk))
                before = used
            except Exception:
                log.exception("the disk of sandbox %s could not be looked at; the watchdog goes on", box.name)
            finally:
                usual = self._disk_period if before < box.limits.disk / 2 else self._disk_period / 5
                period = max(usual, DISK_SHARE * (time.monotonic() - started))

    def _look(self, boxes: list[tuple[Watched, _State]]) -> list[tuple[Watched, str]]:
        """One look at all boxes, in a thread; (box, note) of each that did something wrong."""
        table = processes.living()
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


def _full(used: int, most: int) -> str:
    return (
        f"the disk limit is reached: {_mb(used)} MB are written where {_mb(most)} MB are allowed; "
        "what wrote was killed: delete files"
    )


def _kill_writers(box: Watched, times: int) -> None:
    _kill(_writers(box.processes(), times))


def _writers(found: list[Process], times: int) -> list[Process]:
    """Whom to kill when files have grown beyond the limit: the first time one, then all but the oldest, then all."""
    others = without_main(found)
    if times == 1 and others:
        return [max(others, key=lambda item: processes.written(item.pid))]
    return others if times <= 2 and others else found


def _killed_by_kernel(box: Watched, state: _State) -> str:
    """What the cgroup has killed for memory since the last look."""
    before, state.kills = state.kills, box.group.kills() if box.group is not None else 0
    if state.kills <= before:
        return ""
    return f"the memory limit of {_mb(box.limits.memory)} MB was reached: {state.kills - before} processes were killed"


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
        else f"the sandbox used {_mb(memory)} MB of memory where {_mb(limits.memory)} MB are allowed"
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


async def _disk_use(box: Watched) -> int | None:
    """Bytes on disk in the box's folder, also in folders that only the root inside may enter.

    None where that can't be told now: the box is just being restarted or removed, or it takes too long.
    """
    argv = [shutil.which("du") or "du", "--summarize", "--one-file-system", "--block-size=1", str(box.folder)]
    nsenter = shutil.which("nsenter")
    if box.pid is not None and nsenter is not None and os.geteuid() != 0:
        argv = [nsenter, "-t", str(box.pid), "-U", "--preserve-credentials", "--", *argv]
    try:
        _, said = await programs.run(argv, seconds=DU_SECONDS, errors=False)
        return int(said.split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _mb(size: int) -> int:
    return -(-size // MB)
