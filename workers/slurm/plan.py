"""What to submit and what to end: a pure function of what is wanted, what squeue says, and the time.

A running task counts until it is `overlap` seconds from its limit; then it goes on, and another one is submitted in its
place. A task that waits counts, a requeued one too. A kind whose tasks end at once is tried again ever more slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from workers.slurm.rows import COMPLETING, Row, words
from workers.slurm.state import State, Strike

QUICK = 60.0
"""Seconds: a task that ends by itself before it has run for so long has not worked."""

QUICK_STATES = frozenset({"COMPLETED", "FAILED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"})
"""Ends that are a task's own doing; what Slurm or a person ended (TIMEOUT, NODE_FAIL, PREEMPTED, CANCELLED) is not."""

FIRST_WAIT, LONGEST_WAIT = 30.0, 900.0
"""Seconds after the first quick end, doubled with each further one, and at most."""

YOUNG = 15.0
"""Seconds from a task's start in which it is cancelled instead of told: the signal might come before its program."""

COMPLETING_COUNTS = 60.0
"""Seconds for which a task that ends still counts: it may be on its way back into the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`submit`: tasks by kind. Ids of tasks: to `cancel` (they wait, or have just begun), `drain` (SIGTERM), `kill`."""

    submit: dict[str, int] = field(default_factory=dict)
    cancel: list[str] = field(default_factory=list)
    drain: list[str] = field(default_factory=list)
    kill: list[str] = field(default_factory=list)


def plan(state: State, rows: Sequence[Row], now: float) -> tuple[Plan, State]:
    """What to do, and the state once it is done. `rows`: all tasks of the line; `now`: Unix seconds."""
    state = _remembered(state, rows, now)
    made = Plan()
    for kind in state.kinds:
        state = _judged(state, [row for row in rows if row.kind == kind], kind, now)
        _one_kind(made, state, [row for row in rows if row.kind == kind], kind, now)
    going = dict.fromkeys((*made.drain, *made.cancel), now)
    gone = {row.job for row in rows if row.id in going}
    young = {job: kind for job, kind in state.young.items() if job not in gone}
    return made, replace(state, draining={**state.draining, **going}, young=young)


def counts(row: Row, state: State, now: float) -> bool:
    """Whether a task is one of those that are wanted, and will be for a while."""
    if row.id in state.draining:
        return False
    if row.state == COMPLETING:
        return now - state.completing.get(row.id, now) < COMPLETING_COUNTS
    return row.waits or (row.runs and not ending(row, state))


def ending(row: Row, state: State) -> bool:
    """Whether a running task is so near its limit that another one takes its place."""
    return row.runs and row.left is not None and row.left <= state.overlap


def _remembered(state: State, rows: Sequence[Row], now: float) -> State:
    """Without what is told of tasks that Slurm has forgotten."""
    there = {row.id for row in rows}
    return replace(
        state,
        draining={id: since for id, since in state.draining.items() if id in there},
        completing={row.id: state.completing.get(row.id, now) for row in rows if row.state == COMPLETING},
        seen=[id for id in state.seen if id in there],
        before=[id for id in state.before if id in there],
    )


def _judged(state: State, rows: Sequence[Row], kind: str, now: float) -> State:
    """With the kind struck once for each try whose tasks end quickly; one task that works ends that."""
    struck = dict(state.struck)
    last = struck.get(kind)
    if last and any(row.runs and row.used >= QUICK and now - row.used > last.at for row in rows):
        last = None
        del struck[kind]
    quick = [
        row
        for row in rows
        if (row.held or (row.state in QUICK_STATES and row.used < QUICK))
        and row.id not in state.seen
        and row.id not in state.draining
    ]
    known = {row.job for row in rows}
    worked = {row.job for row in rows if row.over or row.used >= QUICK}
    forgotten = [job for job, its in state.young.items() if its == kind and job not in known]
    # Until then nothing of the kind is submitted: what ends meanwhile is of the same try, however many tasks it had.
    same_try = last is not None and now < last.until
    if (quick or forgotten) and state.wanted(kind) and not same_try:
        ended = _ended(quick[-1]) if quick else f"{forgotten[-1]}, which Slurm has forgotten already"
        struck[kind] = strike(last, now, f"its tasks end as soon as they start (the last one: {ended})")
    young = {job: its for job, its in state.young.items() if job not in forgotten and job not in worked}
    return replace(state, struck=struck, young=young, seen=[*state.seen, *(row.id for row in quick)])


def strike(last: Strike | None, now: float, why: str) -> Strike:
    """One more, with a wait of twice the last one's."""
    count = last.count + 1 if last else 1
    return Strike(count=count, at=now, until=now + min(FIRST_WAIT * 2 ** (count - 1), LONGEST_WAIT), why=why)


def _ended(row: Row) -> str:
    return f"{row.id}, {row.state}" + (f", {words(row)}" if row.reason not in ("None", "NonZeroExitCode") else "")


def _one_kind(made: Plan, state: State, rows: Sequence[Row], kind: str, now: float) -> None:
    wanted = state.wanted(kind)
    for row in rows:
        if row.id in state.draining and row.waits:  # requeued after it was told to go
            made.cancel.append(row.id)
        elif row.id in state.draining and row.runs and now - state.draining[row.id] > state.patience:
            made.kill.append(row.id)
    counted = [row for row in rows if counts(row, state, now)]
    missing = wanted - len(counted)
    if missing > 0 and now >= (state.struck[kind].until if kind in state.struck else 0.0):
        made.submit[kind] = missing
    if wanted == 0:
        counted = [row for row in rows if not row.over and row.id not in state.draining]  # those near their end too
    _shrink(made, [row for row in counted if row.state != COMPLETING], wanted)


def _shrink(made: Plan, rows: Sequence[Row], wanted: int) -> None:
    """Those that wait go first, the newest of them before others; then those that would end soonest."""
    waiting = sorted((row for row in rows if not row.runs), key=lambda row: row.number, reverse=True)
    running = sorted((row for row in rows if row.runs), key=lambda row: (row.left is None, row.left or 0.0, row.number))
    for row in [*waiting, *running][: max(0, len(rows) - wanted)]:
        (made.drain if row.runs and row.used >= YOUNG else made.cancel).append(row.id)
