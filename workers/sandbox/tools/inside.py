"""What the tools of one box share: bringing a dead box back, finding and ending what one tool started, and notes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from pipeline.errors import SandboxError
from workers.sandbox import processes
from workers.sandbox.box import Box
from workers.sandbox.processes import Moment, Process

TOOL = "ROLLOUT_TOOL"
"""Variable that says which tool started a process: one that lost its parent is still told apart by it."""

KILL_SECONDS = 1.0
SCAN_SECONDS = 0.01
REAP_SECONDS = 0.5

_RESTARTED = "the sandbox had died and was started again: files are kept, processes and variables are gone"
_AT_HOME = 'cd -- "$0" 2>/dev/null; exec "$@"'
# Where no helper program stands between: bash as the leader of its session would take the terminal for its own.
_AT_HOME_BELOW = 'exec 3>&2 2>/dev/null; cd -- "$0"; (exec "$@" 2>&3 3>&-); exit "$?"'

T = TypeVar("T")


class Inside:
    """One box as its tools see it."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.taken = box.folder / "own"
        self._mending = asyncio.Lock()

    def started_in(self, folder: str, argv: Sequence[str]) -> list[str]:
        """The command line of this machine that runs `argv` inside, in `folder`, as a child of what it starts here."""
        return self.box.command(["sh", "-c", _AT_HOME_BELOW if self.box.pid is None else _AT_HOME, folder, *argv])

    def environment(self, tool: str, **more: str) -> dict[str, str]:
        """The whole environment of what `tool` starts."""
        return {**self.box.environment(), **more, TOOL: tool}

    def hand_over(self, name: str, data: bytes) -> str:
        """Make a file in the folder that both sides see; its path as seen inside. Raises SandboxError.

        What runs inside may put anything there, so the file must be new and is never followed through a link.
        """
        path = self.box.sockets / name
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(data)
        except OSError as error:
            raise SandboxError(f"the sandbox takes no file through {path.parent}: {error}") from error
        return f"{self.box.sockets_inside}/{name}"

    def take_back(self, *names: str) -> None:
        """Remove what was handed over or taken, where it is still there."""
        for path in (folder / name for name in names for folder in (self.box.sockets, self.taken)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def take_socket(self, name: str) -> None:
        """Give a socket in the folder that both sides see a second name, in a folder that is ours alone.

        To connect there is safe, now and later: what runs inside could put a link to a socket of this machine's in the
        place of the first name at any time. Raises SandboxError for what is no socket.
        """
        path = self.taken / name
        try:
            self.taken.mkdir(mode=0o700, exist_ok=True)
            os.link(self.box.sockets / name, path, follow_symlinks=False)
            if stat.S_ISSOCK(path.lstat().st_mode):
                return
        except OSError as error:
            raise SandboxError(f"the sandbox's socket {name} can't be taken: {error}") from error
        raise SandboxError(f"the sandbox put something else in the place of its socket {name}")

    async def revive(self) -> None:
        """Start the box again if it has died; the policy will be told. Raises SandboxError."""
        async with self._mending:
            if self.box.alive():
                return
            before = len(self.box.notes)
            await self.box.restart()
            if len(self.box.notes) == before:
                self.box.notes.append(_RESTARTED)

    def take_notes(self) -> list[str]:
        """What the policy has not been told yet."""
        notes = self.box.notes[:]
        self.box.notes.clear()
        return notes

    def leader(self, pid: int) -> Process | None:
        """The process inside that a `started_in` command with this machine's `pid` has as its child."""
        try:
            with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
                children = [int(word) for word in file.read().split()]
        except OSError:  # a kernel without this file, or the command has ended
            children = [item.pid for item in self.box.processes() if item.parent == pid]
        return processes.look(children[0]) if children else None

    async def end(self, pid: int) -> None:
        """Kill the command `pid` (an unreaped child of this process) with all that it started and still descends."""
        await asyncio.to_thread(_end, pid)

    async def kill_since(self, since: Moment, leader: Process | None, tool: str, seconds: float = KILL_SECONDS) -> None:
        """Kill what `tool` started after `since`, again until nothing new appears or `seconds` are over."""
        await asyncio.to_thread(self._kill_since, since, leader, tool, seconds)

    def _kill_since(self, since: Moment, leader: Process | None, tool: str, seconds: float) -> None:
        until = time.monotonic() + seconds
        while found := self.victims(since, leader, tool):
            for item in found:
                processes.kill(item)
            if time.monotonic() > until:
                return
            time.sleep(SCAN_SECONDS)

    def victims(self, since: Moment, leader: Process | None, tool: str) -> list[Process]:
        """Processes of `tool` that were born after `since`: those below its `leader`, and those that lost their parent.

        The leader itself, what an older process started (a server that was there before), and what carries another
        tool's mark are left out.
        """
        table = {item.pid: item for item in self.box.processes()}

        def belongs(item: Process) -> bool:
            while leader is None or item != leader:
                if not since.before(item):
                    return False
                above = table.get(item.parent)
                if above is None:
                    return _tool_of(item.pid) in ("", tool)
                item = above
            return True

        return [item for item in table.values() if item != leader and belongs(item)]


async def unhurried(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; when the caller is cancelled, `work` still ends first. For ending things whole."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # the caller hears of its cancel, not of this
        raise


def _end(pid: int) -> None:
    for item in processes.descendants(pid):
        processes.kill(item)
    reaped(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def reaped(pid: int) -> None:
    """Wait until the helper program `pid`, whose child was killed, has ended by itself, which takes a moment.

    If it were killed first, its child would stay a zombie of this machine's init, which may be slow to reap it, and
    until then the sandbox's cgroup could not be removed.
    """
    until = time.monotonic() + REAP_SECONDS
    while processes.look(pid) is not None and time.monotonic() < until:
        time.sleep(0.001)


def _tool_of(pid: int) -> str:
    """The tool whose mark a process carries; empty when it carries none or is gone."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = file.read().split(b"\0")
    except OSError:
        return ""
    start = f"{TOOL}=".encode()
    return next((os.fsdecode(pair[len(start) :]) for pair in pairs if pair.startswith(start)), "")
