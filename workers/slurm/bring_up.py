"""`rollout slurm up` and `down` as they go on: step by step, until each kind is there, or none is.

Neither needs the keeper: they take the same steps, and it takes its turns with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from pipeline.config_slurm import KINDS
from pipeline.errors import LineError
from workers.slurm import status, tails
from workers.slurm.calls import SlurmAway
from workers.slurm.jobs import Jobs, Step
from workers.slurm.rows import Row
from workers.slurm.state import State
from workers.slurm.status import Live
from workers.slurm.text import STAGES

LOOKS = (0.5, 1.0, 2.0, 5.0)
"""Seconds between the first looks; the last one between all further ones."""

HOPELESS = 3
"""A kind whose tasks ended at once so often is given up by `up`; the keeper goes on, ever more slowly."""

SETTLED = 5.0
"""Seconds that a maint task has to run until it counts: it says nothing of itself in the line."""

WAITS = 30.0
"""Seconds for which `up` waits for nodes for tasks of a kind of which older ones work."""

LOG_LINES = 8


class NotUp(LineError):
    """Not every stage has a live worker."""

    kind = "slurm"


@dataclass(kw_only=True)
class Wait:
    """Waiting for the jobs of a line. `say`: told each sentence once; `look`: at the line itself; times in seconds.

    `old`: tasks that had ended before; nothing is said of them. `known`: jobs that were there before; of a kind that
    has others, one of these must come to the line.
    """

    jobs: Jobs
    changes: int
    timeout: float
    look: Callable[[], Live]
    say: Callable[[str], None]
    old: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    _began: float = field(default_factory=time.monotonic)
    _looks: int = 0
    _said: set[str] = field(default_factory=set)
    _failures: set[tuple[str, str]] = field(default_factory=set)
    _away: str = ""

    def until_up(self) -> tuple[Step, Live]:
        """Step until each kind is there. Raises NotUp with what is missing and why, after `timeout` or earlier."""
        while True:
            step, found = self.step(), self.look()
            lacks = {kind: why for kind in KINDS if (why := self.lack(kind, step, found))} if step else {}
            if step and not lacks:
                return step, found
            self._tell_failures(step)
            hopeless = [kind for kind in lacks if _hopeless(kind, step)]
            if hopeless or self.late():
                said = _listed(lacks[kind] for kind in hopeless or lacks) or f"\n  {self._away}"
                after = "" if hopeless else f" after {self.timeout:g} s"
                raise NotUp(f"the line is not up{after}:{said}\nWhat was submitted stays; `rollout slurm status` looks")
            self.pause()

    def lack(self, kind: str, step: Step, found: Live) -> str:
        """Why a kind is not there yet, or, beside older tasks, none of those that were submitted; else ""."""
        why = lack(kind, step, found, self.jobs)
        new = [row for row in step.rows if row.kind == kind and row.job not in self.known]
        own = [row for row in new if not row.over and row.id not in step.state.draining]
        if why or kind not in (*STAGES, "maint") or not step.state.wanted(kind) or not (new or kind in step.submitted):
            return why
        if any(row.runs and (row.used >= SETTLED if kind == "maint" else row.job in found.jobs) for row in own):
            return ""
        waits = bool(own) and all(row.waits for row in own)
        if waits and time.monotonic() - self._began > WAITS:
            self._once(f"{kind}: older tasks work; {_reason(kind, step, [], found, self.jobs)}")
            return ""
        running = [row for row in own if row.runs]
        others = [row for row in step.rows if row.kind != kind]
        why = _reason(kind, replace(step, rows=[*others, *new]), running, found, self.jobs)
        return f"{kind}: older tasks work, none of those just submitted: {why}"

    def until_gone(self, kinds: set[str]) -> None:
        """Step until no task of these kinds is there. Raises NotUp with those that are left, after `timeout`."""
        while True:
            step = self.step()
            left = [row for row in step.rows if row.kind in kinds and not row.over] if step else []
            if step and not left:
                return
            if self.late():
                ids = ", ".join(f"{row.kind} {row.id} ({row.state})" for row in left) or self._away
                raise NotUp(f"after {self.timeout:g} s not all jobs have ended: {ids}. `rollout slurm down` goes on")
            self.pause()

    def step(self) -> Step | None:
        """One step, told; None while Slurm's controller is away. Raises NotUp where somebody changed what is wanted."""
        try:
            step = self.jobs.step()
        except SlurmAway as error:
            self._away = str(error)
            self._once(f"{error}; waiting for it")
            return None
        for sentence in step.said():
            self._once(sentence)
        step.rows = [row for row in step.rows if row.id not in self.old]
        if step.state.changes != self.changes:
            raise NotUp(
                "somebody else changed what is wanted meanwhile (`rollout slurm up`, `scale` or `down`): this one ends"
            )
        return step

    def late(self) -> bool:
        return time.monotonic() - self._began > self.timeout

    def pause(self) -> None:
        time.sleep(LOOKS[min(self._looks, len(LOOKS) - 1)])
        self._looks += 1

    def _once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self.say(sentence)

    def _tell_failures(self, step: Step | None) -> None:
        """Once for all tasks that ended with the same words."""
        failed = status.failed(step.state, step.rows, self.jobs.logs) if step else []
        for key, items in status.alike(failed).items():
            if key not in self._failures:
                self._failures.add(key)
                self.say(status.failure(items))


def lack(kind: str, step: Step, found: Live, jobs: Jobs) -> str:
    """Why a kind is not there yet, as a sentence; "" when it is, or when none is wanted."""
    if not step.state.wanted(kind):
        return ""
    if kind in step.refused:
        return f"{kind}: sbatch refused it"
    own = [row for row in step.rows if row.kind == kind and not row.over and row.id not in step.state.draining]
    running = [row for row in own if row.runs]
    if kind == "maint":
        there = any(row.used >= SETTLED for row in running)
    elif kind == "redis":
        there = not found.trouble and bool(running)
    else:
        there = bool(found.workers.get(kind) if kind in STAGES else found.servers)
    return "" if there else f"{kind}: {_reason(kind, step, running, found, jobs)}"


def _reason(kind: str, step: Step, running: list[Row], found: Live, jobs: Jobs) -> str:
    told = status.of_kind(step.state, step.rows, kind, time.time(), kept=status.kept(step.rows, step.state))
    if running:
        if found.trouble and kind != "redis":
            return f"{len(running)} run, and wait for Redis" + (
                "" if step.state.wanted("redis") else f": {found.trouble}"
            )
        path = tails.path_of(running[-1], jobs.logs)
        if not path.exists():
            return f"task {running[-1].id} runs, but {path} is not there: does {running[-1].node} see that folder?"
        end = "\n  ".join(tails.tail(path, LOG_LINES))
        return f"task {running[-1].id} runs, but is not in the line yet; the end of {path}:\n  {end}"
    over = [row for row in step.rows if row.kind == kind and row.state in status.FAILED]
    end = "\n  ".join(tails.tail(tails.path_of(over[-1], jobs.logs), LOG_LINES)) if over else ""
    return "; ".join([*told.why, *([f"the end of {over[-1].id}'s log:\n  {end}"] if end else [])]) or (
        "submitted a moment ago" if kind in step.submitted else "not submitted yet"
    )


def _listed(lacks: Iterable[str]) -> str:
    """One a line; what ends several logs is shown once."""
    lines, shown = "", set[str]()
    for head, _, end in (lack.partition("\n") for lack in lacks):
        lines += f"\n  {head}" + (" as above" if end in shown else f"\n  {end}".replace("\n", "\n  ") if end else "")
        shown |= {end} if end else set()
    return lines


def _hopeless(kind: str, step: Step | None) -> bool:
    strike = step.state.struck.get(kind) if step else None
    return bool(step and kind in step.refused) or bool(strike and strike.count >= HOPELESS)


def emptied(state: State) -> dict[str, int]:
    """Sizes for the first half of `down`: Redis goes last, since the others give back what they hold."""
    return {kind: 0 for kind in state.kinds if kind != "redis"}
