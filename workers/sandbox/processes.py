"""Ends processes by identity: found by what they carry and descend from, signalled through a handle of their own.

A pid alone proves nothing: between looking and killing it may belong to somebody else.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

MARK = "SANDBOX_ID"
"""Environment variable that every process of a sandbox inherits."""


class Process(NamedTuple):
    """One process: `born` is its start in clock ticks since boot, which together with the pid is its identity."""

    pid: int
    parent: int
    session: int
    born: int


def find(mark: str, root: int = 0, table: dict[int, Process] | None = None) -> list[Process]:
    """Living processes that carry `mark`, descend from the process `root` or are in its session; `root` included.

    `table`: those to look among; all of this machine's unless given.
    """
    table = _table() if table is None else table
    found = {pid for pid, item in table.items() if root and (pid == root or item.session == root)}
    found |= {pid for pid in table if _carries(pid, mark)}
    _add_descendants(found, table)
    found.discard(os.getpid())
    return [table[pid] for pid in found]


def living() -> dict[int, Process]:
    """All living processes of this machine, by pid."""
    return _table()


def look(pid: int) -> Process | None:
    """The process that has this pid now; None when there is none, or a zombie."""
    return _read(pid)


def identity(pid: int) -> str:
    """One line that names exactly this process, whatever has its pid later; empty when it is gone."""
    item = _read(pid)
    return f"{_boot()} {item.pid} {item.born}" if item is not None else ""


def identified(line: str) -> Process | None:
    """The living process that `identity` named; None when it has ended."""
    where, _, born = line.strip().rpartition(" ")
    boot, _, pid = where.rpartition(" ")
    if not pid.isdigit() or boot != _boot():
        return None
    item = _read(int(pid))
    return item if item is not None and str(item.born) == born else None


def _boot() -> str:
    """This boot and this pid namespace: outside of both a pid means nothing."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"


def pid_namespace(pid: int) -> int:
    """The number of the process's pid namespace; 0 when the process is gone or may not be looked at."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return 0


def namespaces(table: dict[int, Process]) -> dict[int, list[int]]:
    """Pid namespace's number -> pids in it, of all processes in `table`."""
    found: dict[int, list[int]] = {}
    for pid in table:
        found.setdefault(pid_namespace(pid), []).append(pid)
    return found


def inside(
    keeper: int, table: dict[int, Process] | None = None, spaces: dict[int, list[int]] | None = None
) -> list[Process]:
    """Living processes of the pid namespace whose first process is `keeper`, and of those below it; not the keeper.

    What runs in a namespace of its own further down descends from one of them, or was handed to the keeper. Whoever
    asks for several at once passes `living()` and `namespaces` of it.
    """
    table = _table() if table is None else table
    space = pid_namespace(keeper)
    if not space or space == pid_namespace(os.getpid()):
        return []
    found = {*(namespaces(table) if spaces is None else spaces).get(space, ()), keeper}
    _add_descendants(found, table)
    return [table[pid] for pid in found if pid != keeper and pid in table]


class Use(NamedTuple):
    """What a process uses: threads, and bytes of memory that are in (shared ones counted whole)."""

    threads: int
    resident: int


def use(pid: int) -> Use:
    """Nothing is used by a process that is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
        return Use(int(fields[17]), int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, IndexError):
        return Use(0, 0)


def proportional(pid: int) -> int | None:
    """Bytes of memory with shared ones divided among those who share them; None where that can't be read."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:")), None)
    except OSError:
        return None


class Written(NamedTuple):
    """Bytes that a process, with those of its children that it waited for, had written to disk, and gave to `write`."""

    disk: int
    handed: int

    def since(self, before: Written) -> Written:
        return Written(self.disk - before.disk, self.handed - before.handed)


def written(pid: int) -> Written:
    """Nothing where that can't be read."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            found = dict(line.split(b": ") for line in file)
        return Written(int(found[b"write_bytes"]), int(found[b"wchar"]))
    except (OSError, KeyError, ValueError):
        return Written(0, 0)


def beside(keeper: int) -> int:
    """Threads in the user namespace of the process `keeper` that are not its own; 0 where that is also ours.

    They count where the kernel counts this user's processes in that namespace.
    """
    space = _user_namespace(keeper)
    if not space or space == _user_namespace(os.getpid()):
        return 0
    return sum(use(pid).threads for pid in _table() if pid != keeper and _user_namespace(pid) == space)


def _user_namespace(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/user").st_ino
    except OSError:
        return 0


def descendants(pid: int) -> list[Process]:
    """Living processes that descend from `pid`, itself left out."""
    table = _table()
    found = {pid}
    _add_descendants(found, table)
    return [table[item] for item in found if item != pid and item in table]


def kill(process: Process) -> None:
    """SIGKILL to exactly this process; nothing happens when it is gone or its pid is another's by now."""
    send(process, signal.SIGKILL)


def send(process: Process, number: signal.Signals) -> None:
    """A signal to exactly this process; nothing happens when it is gone or its pid is another's by now."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        now = _read(process.pid)
        if now is not None and now.born == process.born:
            signal.pidfd_send_signal(handle, number)
    except OSError:
        return
    finally:
        os.close(handle)


def wait(process: Process, seconds: float = 5.0) -> bool:
    """Wait until exactly this process has ended; False when it still runs after `seconds`."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return True
    try:
        now = _read(process.pid)
        if now is None or now.born != process.born:
            return True
        return has_ended(handle, seconds)
    finally:
        os.close(handle)


def has_ended(handle: int, seconds: float = 0.0) -> bool:
    """Whether the process that a pidfd stands for has ended, at the latest after `seconds`."""
    look = select.poll()  # not `select`, which takes no number above 1023
    look.register(handle, select.POLLIN)
    return bool(look.poll(seconds * 1000))


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


def kill_all(
    mark: str,
    root: int = 0,
    *,
    since: Moment | None = None,
    seconds: float = 3.0,
    among: Callable[[], dict[int, Process]] = living,
) -> list[Process]:
    """Kill what `find` finds until nothing new appears. What is left after `seconds` comes back.

    With `since` only what was born after it is killed, and never `root` itself. `among`: which processes to look at.
    """
    until = time.monotonic() + seconds
    while True:
        found = find(mark, root, among())
        left = [item for item in found if since is None or (since.before(item) and item.pid != root)]
        for item in left:
            kill(item)
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.01)


def _add_descendants(found: set[int], table: dict[int, Process]) -> None:
    grown = True
    while grown:
        fresh = {pid for pid, item in table.items() if item.parent in found and pid not in found}
        found |= fresh
        grown = bool(fresh)


def _table() -> dict[int, Process]:
    found = (_read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {item.pid: item for item in found if item is not None}


def _read(pid: int) -> Process | None:
    """The process's line in /proc; None when it is gone or a zombie, which has ended already."""
    try:  # not `open`, which costs as much again: a look at a machine reads thousands
        handle = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fields = os.read(handle, 4096).rpartition(b") ")[2].split()
        finally:
            os.close(handle)
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
