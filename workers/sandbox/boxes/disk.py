"""Holds a box to its disk limit: looks at what lies in its folder, and kills what goes on writing beyond the limit.

What only runs while the disk is full is spared: a process is killed when it has written since the last look.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable

from workers.sandbox import processes, programs
from workers.sandbox.boxes.limits import megabytes
from workers.sandbox.boxes.subtrees import main_of
from workers.sandbox.boxes.watched import Watched
from workers.sandbox.processes import Process, Written

log = logging.getLogger(__name__)

PERIOD = 5.0
"""Seconds between two looks at a box that uses less than half of what it may; the others are looked at five times as
often."""
SHARE = 20
"""A look that takes a second is repeated after this many seconds at the soonest."""
DU_SECONDS = 120.0

MOMENT = 0.2
"""Seconds that show who writes, where the last look did not note what each had written."""
GROWN = 64 * 1024
"""Bytes from which on a process counts as one that writes: removing files dirties a few pages, and is no writing."""
PATIENCE = 2
"""Looks in a row that find somebody writing before the oldest process, the shell, is killed too: a loop in it starts
short-lived writers for ever."""


class Disk:
    """One box's disk. `tell`: called with each sentence for the policy."""

    def __init__(self, box: Watched, tell: Callable[[Watched, str], None], period: float = PERIOD) -> None:
        self._box, self._tell, self._period = box, tell, period
        self._used = 0
        self._over = False
        self._times = 0
        self._written: dict[Process, Written] = {}

    async def watch(self) -> None:
        """Look again and again, until this is cancelled."""
        period = self._period
        while True:
            await asyncio.sleep(period)
            started = time.monotonic()
            took = 0.0
            try:
                used = await disk_use(self._box)
                took = time.monotonic() - started
                if used is not None:
                    await self._judge(used)
            except Exception:
                log.exception("the disk of sandbox %s could not be looked at; the watchdog goes on", self._box.name)
            usual = self._period if self._used < self._box.limits.disk / 2 else self._period / 5
            period = max(usual, SHARE * took)

    async def _judge(self, used: int) -> None:
        """Kill what has written since the last look where `used` bytes are too many, and say so."""
        before, self._used = self._used, used
        most = self._box.limits.disk
        if used <= most:
            self._over, self._times = False, 0
            self._written = await asyncio.to_thread(_written, self._box) if used > most / 2 else {}
            return
        grown = await self._growers()
        crossed, self._over = not self._over, True
        if used <= before and not crossed:  # whoever writes now takes no more room, or removes files
            self._times = 0
            return
        self._times = self._times + 1 if grown else 0
        killed = await asyncio.to_thread(self._kill, grown)
        if crossed or killed:
            self._tell(self._box, _sentence(used, most, crossed, killed))

    async def _growers(self) -> list[Process]:
        """Processes that have written since the last look."""
        if not self._written:
            self._written = await asyncio.to_thread(_written, self._box)
            await asyncio.sleep(MOMENT)
        before, self._written = self._written, await asyncio.to_thread(_written, self._box)
        nothing = Written(0, 0)
        grown = {item: now.since(before.get(item, nothing)) for item, now in self._written.items()}
        # Some file systems (in memory, FUSE) count nothing as written to disk: there it is what was handed to `write`.
        return [item for item, by in grown.items() if by.disk >= GROWN] or [
            item for item, by in grown.items() if by.handed >= GROWN
        ]

    def _kill(self, grown: list[Process]) -> int:
        """Kill them, the box's oldest process only in the end; how many were killed."""
        main = main_of(self._written)
        doomed = [item for item in grown if item != main or self._times > PATIENCE]
        for item in doomed:
            processes.kill(item)
        return len(doomed)


def _written(box: Watched) -> dict[Process, Written]:
    return {item: processes.written(item.pid) for item in box.processes()}


def _sentence(used: int, most: int, crossed: bool, killed: int) -> str:
    if not crossed:  # the same words each time: what waits to be read is not said twice
        return (
            f"the disk is still over its limit of {megabytes(most)} MB: what went on writing was killed; delete files"
        )
    done = "what was writing was killed" if killed else "nothing was killed, but what goes on writing will be"
    return (
        f"the disk limit is reached: {megabytes(used)} MB are written where {megabytes(most)} MB are allowed; {done}: "
        "delete files"
    )


async def disk_use(box: Watched) -> int | None:
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
