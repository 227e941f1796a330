"""What squeue says of the line's jobs, parsed: one row a task. Pure functions."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.config_slurm import KINDS

FORMAT = "%i|%T|%L|%M|%r|%N|%e|%j"
"""squeue's -o: id, state, time left, time used, reason, nodes, end, name. The name is last: it alone may hold a `|`."""

WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED"})
RUNNING = frozenset({"RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"})
"""Has a node. A suspended task is one that Slurm lets go on later."""

HELD = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
"""Slurm will not start it again by itself."""

HELD_REASONS = ("JobHoldMaxRequeue", "launch failed requeued held")
"""Reasons of a pending task that Slurm has put on hold after it failed to start it. One that a person holds is not."""

COMPLETING = "COMPLETING"
"""Ends, or (for a moment) is being requeued: Slurm does not say which."""

_TIME = re.compile(r"^(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)$")
_NAME = re.compile(rf"^(?P<line>.+)-(?P<kind>{'|'.join(KINDS)})-(?P<tag>[0-9a-f]{{8}})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One task. `id` is "12_3", or "12" of a job that is no array.

    `left`: seconds to its limit, None without one. `used`: seconds since its (last) start. `end`: when it ended or has
    to, in Unix seconds, None where that is not known.
    """

    id: str
    kind: str
    state: str
    left: float | None
    used: float
    reason: str
    node: str
    name: str
    end: float | None = None

    @property
    def waits(self) -> bool:
        """It waits for a node, and will get one by itself or when a person lets it go."""
        return self.state in WAITING and not self.held

    @property
    def runs(self) -> bool:
        """It has a node."""
        return self.state in RUNNING

    @property
    def held(self) -> bool:
        """Slurm could not start it, and will not try again by itself."""
        return self.state in HELD or (self.state in WAITING and self.reason.startswith(HELD_REASONS))

    @property
    def over(self) -> bool:
        """It has ended for good; Slurm still remembers it for some minutes."""
        return not (self.state in WAITING or self.runs or self.held or self.state == COMPLETING)

    @property
    def job(self) -> str:
        """The job that it is a task of."""
        return self.id.partition("_")[0]

    @property
    def number(self) -> tuple[int, int]:
        """In the order of submission."""
        job, _, task = self.id.partition("_")
        return int(job or 0), int(task or 0)


def seconds(text: str) -> float | None:
    """Seconds of a time as squeue writes it ([days-][hours:]minutes:seconds); None for UNLIMITED and NOT_SET.

    INVALID is what squeue says of a task that is past its limit: 0.
    """
    if text in ("UNLIMITED", "NOT_SET", "N/A", ""):
        return None
    found = _TIME.match(text)
    if found is None:
        return 0.0
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


def moment(text: str) -> float | None:
    """Unix seconds of a local time as squeue writes it (2026-11-30T19:32:27); None for N/A."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def parse(lines: Iterable[str], tag: str) -> list[Row]:
    """The rows of the line with this tag, of squeue's lines in FORMAT; jobs of other names are left out."""
    rows = []
    for line in lines:
        parts = line.strip().split("|", 7)
        name = _NAME.match(parts[7]) if len(parts) == 8 else None
        if name is None or name["tag"] != tag or not re.fullmatch(r"\d+(_\d+)?", parts[0]):
            continue
        id, state, left, used, reason, node, end, whole = parts
        rows.append(
            Row(
                id=id, kind=name["kind"], state=state, left=seconds(left), used=seconds(used) or 0.0,
                reason=reason.strip("()"), node=node, name=whole, end=moment(end),
            )
        )  # fmt: skip
    return sorted(rows, key=lambda row: (KINDS.index(row.kind), row.number))


REASONS = {
    "None": "Slurm has not looked at it yet",
    "Priority": "others come first",
    "Resources": "no node has enough free",
    "Dependency": "it waits for another job",
    "BeginTime": "it starts later: it was requeued a moment ago, or has a --begin",
    "Licenses": "no licence is free",
    "JobHeldUser": "held by its user: scontrol release lets it go",
    "JobHeldAdmin": "held by an administrator",
    "JobHoldMaxRequeue": "Slurm gave up starting it: scontrol release tries again",
    "PartitionTimeLimit": "its time is longer than the partition allows: slurm.KIND.time",
    "PartitionNodeLimit": "the partition has no such nodes: slurm.KIND.cpus, memory_mb, gpus",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "BadConstraints": "no node can ever give what it asks for: slurm.KIND.cpus, memory_mb, gpus, options",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "NodeDown": "a node that it needs is down",
    "InvalidAccount": "the account is wrong: slurm.account",
    "InvalidQOS": "the QOS is wrong: slurm.options",
    "Reservation": "it waits for its reservation",
    "launch failed requeued held": "Slurm could not start it, and holds it: scontrol release tries again",
}
"""Slurm's reasons, in words."""

LIMITS = ("Assoc", "QOS", "MaxJobs", "MaxCpu", "MaxMem", "MaxGRES")
"""How the reasons that speak of a limit of the account or QOS begin."""


def words(row: Row) -> str:
    """Why a task waits: Slurm's reason, and what it means."""
    reason = row.reason
    meaning = next((said for name, said in REASONS.items() if reason.startswith(name)), "")
    if not meaning and reason.startswith(LIMITS):
        meaning = "a limit of the account or QOS is reached"
    return f"{reason}: {meaning.replace('KIND', row.kind)}" if meaning else reason
