"""What descends from some processes, by the kernel's own lists of children, at the cost of these alone."""

from __future__ import annotations

import os

from workers.sandbox import processes
from workers.sandbox.processes import Process


def below(*roots: int) -> dict[int, Process]:
    """Living processes that descend from these, which are included, by pid.

    While processes end, a list of children may leave one out: whoever must miss none asks `processes.living` too. A
    kernel that was built without these lists has all processes of the machine looked at.
    """
    if not os.path.exists("/proc/thread-self/children"):
        return processes.living()
    seen: dict[int, Process | None] = {}
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in seen:
            seen[pid] = processes.look(pid)
            waiting += _children(pid)  # also of one whose first thread has ended: others may run on
    return {pid: item for pid, item in seen.items() if item is not None}


def near() -> dict[int, Process]:
    """What this process may have started, by pid: all below it, and what an ancestor got whose own parent ended.

    Looked at twice, since one look may leave somebody out while others end.
    """
    return _near() | _near()


def _near() -> dict[int, Process]:
    handed: list[int] = []
    ancestor = os.getppid()
    while ancestor > 0:
        handed += _children(ancestor)
        found = processes.look(ancestor)
        ancestor = found.parent if found is not None else 0
    table = below(os.getpid())
    others = {pid: processes.look(pid) for pid in handed if pid not in table}
    return table | {pid: item for pid, item in others.items() if item is not None}


def _children(pid: int) -> list[int]:
    """The children of all threads of a process; none when it is gone."""
    found: list[int] = []
    for thread in _threads(pid):
        try:
            handle = os.open(f"/proc/{pid}/task/{thread}/children", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # it has ended, and handed its children to another thread or process
        with open(handle, "rb") as file:
            found += map(int, file.read().split())
    return found


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
