"""What Slurm does to the processes of a job that is to end: how long after SIGTERM it kills, and whom it signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import subprocess
from typing import NamedTuple

log = logging.getLogger(__name__)

ASK_SECONDS = 10.0

KILL_WAIT = 30.0
"""Slurm's own default (s)."""

GIVE_BACK = 10.0
"""Seconds of KillWait that are left after the grace: for a worker to give back what is in work and to remove its
sandboxes, for vLLM to end. Never more than half of it."""


class Scheduler(NamedTuple):
    """Slurm's KillWait (s): between SIGTERM and SIGKILL, at a time limit, scancel or preemption. `proctrack`: its
    ProctrackType, which decides whether that SIGTERM goes to all processes of a job, and in which order."""

    kill_wait: float = KILL_WAIT
    proctrack: str = ""

    @property
    def signals_all(self) -> bool:
        """Whether SIGTERM goes to all of the job, and not to its first process alone."""
        return self.proctrack != "cgroup"

    @property
    def by_pid(self) -> bool:
        """Whether the deepest process below the child with the lowest pid gets it first."""
        return self.proctrack == "linuxproc"

    def grace(self, wanted: float) -> float:
        """Of `wanted` seconds (limits.grace), those that a job has here."""
        return min(wanted, self.kill_wait - min(GIVE_BACK, self.kill_wait / 2))


def job() -> str:
    """The Slurm job that this process runs in, as Slurm writes it (`12`, `12_3`); empty outside of one."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


async def ask() -> Scheduler:
    """What `scontrol show config` says; the cautious answer where it says nothing."""
    program = shutil.which("scontrol")
    if program is None:
        return Scheduler()
    try:
        process = await asyncio.create_subprocess_exec(
            program, "show", "config", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError as error:
        log.info("scontrol can't be started (%s): KillWait is taken to be %g s", error, KILL_WAIT)
        return Scheduler()
    try:
        said, _ = await asyncio.wait_for(process.communicate(), ASK_SECONDS)
    except TimeoutError:
        log.info("scontrol does not answer: KillWait is taken to be %g s", KILL_WAIT)
        return Scheduler()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return read(said.decode("utf-8", "replace"))


def read(said: str) -> Scheduler:
    """What the output of `scontrol show config` means."""
    found = dict(re.findall(r"^(\w+)\s*= (\S+)", said, re.MULTILINE))
    wait = found.get("KillWait", "")
    proctrack = found.get("ProctrackType", "").removeprefix("proctrack/")
    return Scheduler(float(wait) if wait.isdigit() else KILL_WAIT, proctrack)
