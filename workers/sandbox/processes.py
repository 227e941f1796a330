"""Ends processes by identity: found by what they carry and descend from, signalled through a handle of their own.

A pid alone proves nothing: between looking and killing it may belong to somebody else.
"""

from __future__ import annotations

import os
import signal
import time
from typing import NamedTuple

MARK = "SANDBOX_ID"
"""Environment variable that every process of a sandbox inherits."""


class Process(NamedTuple):
    """One process: `born` is its start in clock ticks since boot, which together with the pid is its identity."""

    pid: int
    parent: int
    session: int
    born: int


def find(mark: str, root: int = 0) -> list[Process]:
    """Living processes that carry `mark`, descend from the process `root` or are in its session; `root` included."""
    table = _table()
    inside = {pid for pid, item in table.items() if root and (pid == root or item.session == root)}
    inside |= {pid for pid in table if _carries(pid, mark)}
    grown = True
    while grown:
        fresh = {pid for pid, item in table.items() if item.parent in inside and pid not in inside}
        inside |= fresh
        grown = bool(fresh)
    inside.discard(os.getpid())
    return [table[pid] for pid in inside]


def kill(process: Process) -> None:
    """SIGKILL to exactly this process; nothing happens when it is gone or its pid is another's by now."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        now = _read(process.pid)
        if now is not None and now.born == process.born:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return
    finally:
        os.close(handle)


class Moment(NamedTuple):
    """A point in time that births are compared with: clock ticks (10 ms) alone would not tell neighbours apart."""

    tick: int
    last_pid: int

    def before(self, process: Process) -> bool:
        return process.born > self.tick or (process.born == self.tick and process.pid > self.last_pid)


def now() -> Moment:
    tick = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
    with open("/proc/loadavg", "rb") as file:
        return Moment(tick, int(file.read().split()[-1]))


def kill_all(mark: str, root: int = 0, *, since: Moment | None = None, seconds: float = 3.0) -> list[Process]:
    """Kill what `find` finds until nothing new appears. What is left after `seconds` comes back.

    With `since` only what was born after it is killed, and never `root` itself.
    """
    until = time.monotonic() + seconds
    while True:
        found = find(mark, root)
        left = [item for item in found if since is None or (since.before(item) and item.pid != root)]
        for item in left:
            kill(item)
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.01)


def _table() -> dict[int, Process]:
    found = (_read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {item.pid: item for item in found if item is not None}


def _read(pid: int) -> Process | None:
    """The process's line in /proc; None when it is gone or a zombie, which has ended already."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return None
    if not fields or fields[0] in (b"Z", b"X"):
        return None
    return Process(pid, int(fields[1]), int(fields[3]), int(fields[19]))


def _carries(pid: int, mark: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{MARK}={mark}".encode() in file.read().split(b"\0")
    except OSError:
        return False
