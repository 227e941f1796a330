"""How a worker ends: asked to stop, it finishes what it has, within a grace; if its whole job is signalled, at once."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterable

from workers import scheduler
from workers.canary import Canary

log = logging.getLogger(__name__)

HOLD, HOLD_ENDING = 0.05, 0.1
"""Seconds for which the end of a child is not believed yet: where signals go to all of a job, and once one has come."""

AGAIN = 1.0
"""Seconds within which two signals are one: some that stop a job signal both a group and its leader."""

LOOK = 0.1
"""Seconds between two looks at whether a worker that ends by itself has been asked to stop meanwhile."""


class Ending:
    """`stopping`: nothing more is claimed. `at_once`: what is in work is given back, whatever grace is left.

    `grace`: limits.grace (s). `on_stop`: called once, when it is asked to. `on_distrust`: called once, when nothing
    that this process's children did is believed any more; `distrust` then says why.
    """

    def __init__(self, grace: float, on_stop: Callable[[], None], on_distrust: Callable[[], None]) -> None:
        self.stopping = asyncio.Event()
        self.at_once = asyncio.Event()
        self.why = ""
        self.distrust = ""
        self.canary = Canary(self._whole_job_signalled)
        self.grace = grace
        self._on_stop, self._on_distrust = on_stop, on_distrust
        self._since = 0.0

    def stop(self, why: str = "") -> None:
        """Claim nothing more; finish or give back within the grace. `why`: a few words for the log and the line."""
        if not self.stopping.is_set():
            self.why = why
            self._since = time.monotonic()
            self.canary.hold = max(self.canary.hold, HOLD_ENDING)
            self._on_stop()
            self.stopping.set()

    def on_signal(self, number: int) -> None:
        """Stop as asked to; asked a second time, give back at once."""
        name = signal.Signals(number).name
        again = self.stopping.is_set() and time.monotonic() - self._since > AGAIN
        job = scheduler.job()
        self.stop(f"{name}, Slurm job {job}" if job else name)
        if again and not self.at_once.is_set():
            log.warning("%s once more: what is in work is given back now", name)
            self.at_once.set()

    def _whole_job_signalled(self, why: str) -> None:
        log.warning("%s: what they did since can't be told from what it did to them, and counts nothing", why)
        self.distrust = why
        self.stop(why)
        self.at_once.set()
        self._on_distrust()

    async def ask_scheduler(self) -> None:
        """Slurm kills a job KillWait after SIGTERM, whatever limits.grace says: what is in work goes back before."""
        self.canary.hold = max(self.canary.hold, HOLD)  # until it is known
        found = await scheduler.ask()
        wanted, self.grace = self.grace, found.grace(self.grace)
        if self.grace < wanted:
            log.info(
                "Slurm kills a job %g s after SIGTERM (KillWait): told to stop, this worker gives back after %g s "
                "instead of limits.grace = %g s",
                found.kill_wait, self.grace, wanted,
            )  # fmt: skip
        self.canary.by_pid = found.by_pid
        if not found.signals_all and not self.stopping.is_set():
            self.canary.hold = 0.0

    def left(self) -> float:
        """Seconds until what is in work is given back; infinite for a worker that nobody asked to stop."""
        if self.at_once.is_set():
            return 0.0
        return max(0.0, self._since + self.grace - time.monotonic()) if self.stopping.is_set() else float("inf")

    async def wait(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        """Wait until these are done, or nothing is left of the grace."""
        at_once = asyncio.create_task(self.at_once.wait())
        try:
            while (running := {task for task in tasks if not task.done()}) and self.left() > 0:
                timeout = self.left() if self.stopping.is_set() else LOOK
                await asyncio.wait({*running, at_once}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            at_once.cancel()
