"""How the line's jobs stand: what is wanted, what Slurm has, what has come to the line, and why the rest has not."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import inspect
from pipeline.config_slurm import KINDS
from pipeline.queue import Queue
from pipeline.trouble import troubles
from workers import view_policy
from workers.slurm import tails
from workers.slurm.plan import counts, ending
from workers.slurm.rows import Row, words
from workers.slurm.state import State
from workers.slurm.text import STAGES, setup_lines
from workers.view import seconds

FAILED = frozenset({"FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "LAUNCH_FAILED"})
IDLE = frozenset({"nothing", "unpopped", "elsewhere"})
"""Troubles of a lane that has nothing on its way."""

COLUMNS = ("kind", "wanted", "run", "wait", "near their end", "told to end", "live workers", "busy", "why")
SHOWN = 5
"""Ways in which tasks failed that are shown, and tasks of each, the latest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What the line itself knows. `workers`, `busy`, `slots`, `rollouts` by stage; `trouble`: why nothing is known.

    `jobs`: the Slurm jobs that its workers run in. `stuck`: why nothing moves, as sentences, where that was asked.
    """

    workers: Mapping[str, int] = field(default_factory=dict)
    busy: Mapping[str, int] = field(default_factory=dict)
    slots: Mapping[str, int] = field(default_factory=dict)
    servers: int = 0
    rollouts: Mapping[str, int] = field(default_factory=dict)
    trouble: str = ""
    jobs: frozenset[str] = frozenset()
    stuck: Sequence[str] = ()


_JOB = re.compile(r"-(\d+)(_\d+)?-\d+-[0-9a-f]{4}$")
"""How the names of workers end that run in a Slurm job: JOB[_TASK]-PID-HEX."""


async def live(queue: Queue, *, troubled: bool = False) -> Live:
    """A look at the line; `troubled`: also at why it stands still. Raises RedisUnavailable."""
    workers: Counter[str] = Counter()
    busy: Counter[str] = Counter()
    slots: Counter[str] = Counter()
    jobs: set[str] = set()
    for item in await inspect.workers(queue):
        if not item.get("stopping"):
            workers[item["stage"]] += 1
            slots[item["stage"]] += int(item["slots"])
            jobs |= {found[1]} if (found := _JOB.search(item["worker"])) else set()
        busy[item["stage"]] += int(item["running"])
    policy = await view_policy.look(queue)
    servers = len(policy["backends"]) + sum(len(found) for found in policy["others"].values())
    depth = await inspect.depth(queue)
    inside = {stage: sum(item["ready"].values()) + item["leased"] + item["delayed"] for stage, item in depth.items()}
    stuck = [why for lane in queue.config.line.lanes for why in await _stuck(queue, lane)] if troubled else []
    return Live(
        workers=workers, busy=busy, slots=slots, servers=servers, rollouts=inside, jobs=frozenset(jobs),
        stuck=list(dict.fromkeys(stuck)),
    )  # fmt: skip


async def _stuck(queue: Queue, lane: str) -> list[str]:
    """Why rollouts of a lane that are on their way stand still."""
    found = await troubles(queue, lane)
    return [why for kind, why in found.items() if kind not in IDLE]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind's numbers of tasks, and sentences that say what is the matter."""

    kind: str
    wanted: int
    running: int
    waiting: int
    ending: int
    draining: int
    why: list[str]


def of_kind(state: State, rows: Sequence[Row], kind: str, now: float, *, kept: bool = True) -> Kind:
    """`rows`: all of the line's; `kept`: somebody submits what is missing."""
    own = [row for row in rows if row.kind == kind and not row.over]
    going = [row for row in own if row.id in state.draining]
    stay = [row for row in own if row.id not in state.draining]
    waiting = [row for row in stay if row.waits or row.held]
    return Kind(
        kind=kind, wanted=state.wanted(kind), running=sum(row.runs for row in stay), waiting=len(waiting),
        ending=sum(ending(row, state) for row in stay), draining=len(going),
        why=[*_why(state, waiting, kind, now, kept), *_cancelled(state, rows, kind, now)],
    )  # fmt: skip


def _cancelled(state: State, rows: Sequence[Row], kind: str, now: float) -> list[str]:
    """Tasks that somebody cancelled and that are not replaced yet, as a sentence."""
    lack = missing(state, rows, now).get(kind, 0)
    gone = [row for row in rows if row.kind == kind and row.state == "CANCELLED" and not _told(row, state)]
    latest = sorted(gone, key=lambda row: (row.end or 0.0, row.number))[-lack:] if lack else []
    return [f"{_named([row.id for row in latest])} cancelled (scancel), not replaced yet"] if latest else []


def _named(ids: Sequence[str]) -> str:
    """Some of these tasks, and how many more."""
    return ", ".join(ids[:SHOWN]) + (f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else "")


def _told(row: Row, state: State) -> bool:
    """Whether the line itself ended a task, or it had ended when `up` was said last: nothing is said of it."""
    return row.id in state.draining or row.id in state.before


def _why(state: State, waiting: Sequence[Row], kind: str, now: float, kept: bool) -> list[str]:
    found = [
        f"{count} {'waits' if count == 1 else 'wait'}: {reason}"
        for reason, count in Counter(words(row) for row in waiting).items()
    ]
    strike = state.struck.get(kind)
    if strike:
        again = (
            f"tried again in {max(0.0, strike.until - now):.0f} s"
            if kept
            else "nobody tries again but `rollout slurm up` or `keep`"
        )
        found.append(f"{strike.why}; {again}" if state.wanted(kind) else strike.why)
    return found


def missing(state: State, rows: Sequence[Row], now: float) -> dict[str, int]:
    """Tasks that are neither there nor on their way, by kind. One near its end is still there."""
    there = Counter(
        row.kind for row in rows if counts(row, state, now) or (ending(row, state) and row.id not in state.draining)
    )
    return {kind: lack for kind in state.kinds if (lack := state.wanted(kind) - there[kind]) > 0}


def failed(state: State, rows: Sequence[Row], logs: Path) -> list[dict[str, Any]]:
    """Tasks that ended badly since the last `up`, as long as Slurm remembers them; with their last words."""
    return [
        {
            "id": row.id, "kind": row.kind, "state": row.state, "seconds": row.used, "node": row.node, "end": row.end,
            "log": str(tails.path_of(row, logs)), "last": _last_words(row, state, logs),
        }
        for row in sorted(rows, key=lambda row: row.number, reverse=True)
        if row.state in FAILED and not _told(row, state)
    ]  # fmt: skip


def _last_words(row: Row, state: State, logs: Path) -> str:
    """The log's last line; with whose it is, where the shell names a line of the script that the settings gave."""
    last = tails.last_words(tails.path_of(row, logs))
    found = re.search(r"slurm_script: line (\d+):", last)
    script = state.kinds[row.kind].text if row.kind in state.kinds else ""
    return f"{last} (a line of slurm.setup)" if found and int(found[1]) in setup_lines(script) else last


def alike(failed: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Tasks of `failed`, by state and last words but for what differs by task (words with a digit: a time, an id, a
    path of Slurm's); those that wrote nothing by kind.
    """
    same: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for item in failed:
        words = re.sub(r"\S*\d\S*", "#", item["last"])
        same.setdefault((item["state"], words or item["kind"]), []).append(item)
    return same


def failure(items: Sequence[Mapping[str, Any]]) -> str:
    """Tasks that ended alike, the latest first, as a sentence."""
    first = items[0]
    names = ", ".join(f"{item['kind']} {item['id']}" for item in reversed(items[:SHOWN]))
    names += f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    clock = f"{time.strftime('%H:%M:%S', time.localtime(first['end']))} " if first["end"] else ""
    last = f": {first['last']}" if first["last"] else ", and wrote nothing"
    about = f" after {seconds(first['seconds'])}" + (f" on {first['node']}" if first["node"] else "")
    return f"{clock}{names} ended as {first['state']}{about if len(items) == 1 else ''}{last}"


def kept(rows: Sequence[Row], state: State) -> bool:
    """Whether a maintenance task runs that replaces what ends."""
    return any(row.kind == "maint" and row.runs for row in rows) or not any(map(state.wanted, state.kinds))


def report(state: State, rows: Sequence[Row], found: Live, logs: Path) -> dict[str, Any]:
    """All of it, for machines."""
    now, alive = time.time(), kept(rows, state)
    kinds = {}
    for kind in KINDS:
        item = of_kind(state, rows, kind, now, kept=alive)
        numbers = {name: getattr(item, name) for name in ("wanted", "running", "waiting", "ending", "draining", "why")}
        if kind in STAGES and not found.trouble:
            numbers |= {name: getattr(found, name).get(kind, 0) for name in ("workers", "slots", "busy")}
        elif kind == "vllm" and not found.trouble:
            numbers["workers"] = found.servers
        kinds[kind] = numbers
    tasks = [{name: getattr(row, name) for name in row.__slots__} for row in rows if not row.over]
    return {
        "line": state.line, "folder": state.folder, "kinds": kinds, "kept": alive, "redis": found.trouble,
        "rollouts": dict(found.rollouts), "tasks": tasks, "failed": failed(state, rows, logs),
    }  # fmt: skip


def table(told: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """The report's kinds as rows of COLUMNS; kinds of which there is nothing and none is wanted are left out."""
    rows = []
    for kind, item in told["kinds"].items():
        numbers = [item[name] for name in ("wanted", "running", "waiting", "ending", "draining")]
        if any(numbers):
            busy = f"{item['busy']}/{item['slots']}" if "slots" in item else ""
            rows.append((kind, *numbers, item.get("workers", ""), busy, "\n".join(item["why"])))
    return rows


def sentences(told: Mapping[str, Any]) -> list[str]:
    """What the table does not hold."""
    up = any(item["wanted"] for item in told["kinds"].values())
    lines = [told["redis"]] if told["redis"] and up else []
    if not told["kept"]:
        lines.append(
            "nothing replaces what ends: no maint task runs (slurm.maint.jobs; or `rollout slurm keep` on a login node)"
        )
    ways = list(alike(told["failed"]).values())
    lines += map(failure, ways[:SHOWN])
    more = sum(map(len, ways[SHOWN:]))
    return [*lines, f"and {more} more that failed"] if more else lines
