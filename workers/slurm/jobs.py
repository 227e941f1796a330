"""The jobs of one line: a look at them, and one step towards the numbers that are wanted. One submitter at a time.

What is there is asked of Slurm each time, by the jobs' own name; nothing but the wanted numbers is kept in the folder.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.config_slurm import KINDS
from pipeline.errors import ConfigError
from pipeline.folder_lock import FolderLock
from workers.slurm import calls, state as states
from workers.slurm.plan import Plan, plan, strike
from workers.slurm.rows import Row
from workers.slurm.state import State

LOCK = "submit.lock"
LOCK_WAIT = 120.0
"""Seconds for which somebody else's step is waited for: one that hangs loses the lock much sooner."""


@dataclass(kw_only=True)
class Step:
    """What one step found and did. `submitted`: the number of tasks and their jobs, by kind; `refused`: sentences."""

    rows: list[Row]
    state: State
    plan: Plan
    submitted: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def said(self) -> list[str]:
        """What was done, as sentences."""
        kinds = {row.id: row.kind for row in self.rows}

        def named(ids: list[str]) -> str:
            return ", ".join(f"{kinds[id]} {id}" for id in ids)

        lines = [
            f"{kind}: {count} {'task' if count == 1 else 'tasks'} submitted (job {', '.join(jobs)})"
            for kind, (count, jobs) in self.submitted.items()
        ]
        lines += [f"{named(self.plan.cancel)}: cancelled"] if self.plan.cancel else []
        lines += [f"{named(self.plan.drain)}: told to end"] if self.plan.drain else []
        lines += [f"{named(self.plan.kill)}: did not end in time, cancelled"] if self.plan.kill else []
        return [*lines, *calls.together(self.refused)]


class Jobs:
    """The jobs of the line in `folder`; `lease`: seconds of silence after which a dead submitter's lock is taken."""

    def __init__(self, folder: Path, lease: float) -> None:
        self.folder = folder
        self._lease = lease

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def state(self) -> State:
        """Raises ConfigError where nothing was ever submitted from this folder, or it is away."""
        known = states.read(self.folder)
        if known is None and not self.folder.is_dir():
            raise ConfigError(
                f"the line's folder {self.folder} is not there: is its file system mounted here? `rollout slurm up` "
                "makes a new one"
            )
        if known is None:
            raise ConfigError(f"no jobs are wanted in {self.folder}: `rollout slurm up` submits them")
        return known

    def look(self) -> tuple[State, list[Row]]:
        """What is wanted and what is there. Raises ConfigError, SlurmError, SlurmAway."""
        known = self.state()
        return known, calls.rows(known.tag)

    def change(self, change: Callable[[State | None], State]) -> State:
        """Write the state anew, under the lock; returns it. Raises ConfigError."""
        with self._locked():
            changed = change(states.read(self.folder))
            states.write(self.folder, changed)
        return changed

    def step(self) -> Step:
        """Submit what is missing, end what is too many. Raises ConfigError, SlurmError, SlurmAway.

        What sbatch refuses is in the step's `refused`, and is tried again ever more slowly.
        """
        with self._locked() as lock:
            before, rows = self.look()
            made, after = plan(before, rows, time.time())
            step = Step(rows=rows, state=after, plan=made)
            self._end(made, before, after)
            self._submit(step, lock)
            if step.state != before:
                states.write(self.folder, step.state)
        return step

    def _end(self, made: Plan, before: State, after: State) -> None:
        """Written first, so that no task is told twice: a second SIGTERM means "at once"."""
        if after.draining != before.draining:
            states.write(self.folder, after)
        try:
            calls.cancel([*made.cancel, *made.kill])
            calls.drain(made.drain)
        except calls.SlurmError:
            states.write(self.folder, before)  # it was perhaps not told at all
            raise

    def _submit(self, step: Step, lock: FolderLock) -> None:
        for kind in sorted(step.plan.submit, key=KINDS.index):
            if not lock.held:
                raise calls.SlurmError(f"the lock of {self.folder} was lost in the middle of a step: {lock.why_lost}")
            count = step.plan.submit[kind]
            try:
                text, environment = step.state.kinds[kind].text, step.state.environment
                jobs = calls.submit(kind, text, count, environment, self.folder)
                step.submitted[kind] = count, jobs
                step.state = replace(step.state, young={**step.state.young, **dict.fromkeys(jobs, kind)})
            except calls.SlurmAway:
                raise
            except calls.SlurmError as error:
                step.refused[kind] = str(error)
                struck = strike(step.state.struck.get(kind), time.time(), str(error))
                step.state = replace(step.state, struck={**step.state.struck, kind: struck})

    @contextmanager
    def _locked(self) -> Iterator[FolderLock]:
        """Raises SlurmError (another one holds the lock for too long), ConfigError (the folder can't be used)."""
        about = {"job": os.environ.get("SLURM_JOB_ID", ""), "host": socket.gethostname(), "pid": os.getpid()}
        path = self.folder / LOCK
        holders: list[str] = []
        try:
            with FolderLock(path, {**about, "started": time.time()}, self._lease) as lock:
                if not lock.take(wait=LOCK_WAIT, told=lambda holder: holders.append(str(holder))):
                    raise calls.SlurmError(f"{path} has been held for {LOCK_WAIT:g} s by {holders[-1]}: is it alive?")
                yield lock
        except OSError as error:
            raise ConfigError(f"the line's folder {self.folder} can't be used: {error.strerror} ({path})") from None
