"""The canary: a child that does nothing and dies of a signal to the whole job, which tells the worker of it.

Slurm with proctrack/linuxproc or pgid, `scancel --full`, and systemd by default, send SIGTERM to every process of a job
or unit: also to what runs in a sandbox, and to what a handler started. How such a process ended says nothing about the
rollout. A worker can't be told in time by its own SIGTERM, which comes last; but its canary is its first child, and
linuxproc begins with the deepest process of the first child. So whoever asks `settled` after a child's end knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import logging
import signal
import subprocess
from collections.abc import Callable

from pipeline.errors import SandboxError

log = logging.getLogger(__name__)

_OUTER = 'trap "" INT; sh -c "echo \\$\\$; read -r _"; exit $?'
"""Two shells: the inner one prints its pid, and both end when the worker closes its line or ends. Ctrl-C in a terminal,
which reaches all of the foreground too, is not meant: there what is in work may end."""

START_SECONDS = 20.0
END_SECONDS = 5.0

_DEADLY = 1 << (signal.SIGTERM - 1) | 1 << (signal.SIGKILL - 1)
"""In a mask of pending signals: SIGTERM, and what the kernel makes of one that nobody handles."""


class Canary:
    """`told(why)` is called once, in the event loop, when a signal has reached the whole job.

    `hold` (s): for which `settled` waits, where it is not known that the signals begin with the canary; `by_pid`: they
    do so where it has the lowest pid of all children (after an overflow of the pids it may not).
    """

    def __init__(self, told: Callable[[str], None]) -> None:
        self.hold = 0.0
        self.by_pid = False
        self._told = told
        self._shell: subprocess.Popen[bytes] | None = None
        self._inner = 0
        self._ended = asyncio.Event()

    async def start(self) -> None:
        """Start it, before any other child. Raises SandboxError where this machine can't."""
        try:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _OUTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", env={}
            )
            assert self._shell.stdout is not None
            self._inner = int(await asyncio.wait_for(asyncio.to_thread(self._shell.stdout.readline), START_SECONDS))
        except (OSError, ValueError, TimeoutError) as error:
            self.close()
            raise SandboxError(f"/bin/sh can't be started as a child of this worker: {error}") from error
        asyncio.get_running_loop().add_reader(self._shell.stdout, self._end)

    async def settled(self) -> None:
        """Return once it is certain whether what a child just did was the doing of a signal to the whole job.

        If it was, `told` has been called by then.
        """
        if self._shell is None or self._ended.is_set():
            return
        if self.hold and not self._is_hit() and not (self.by_pid and self._is_first()):
            await asyncio.sleep(self.hold)
        if self._is_hit():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), END_SECONDS)

    def _is_hit(self) -> bool:
        """Whether a signal has been sent to it; it need not have had a processor to die on."""
        return self._shell is not None and any(_dies(pid) for pid in (self._inner, self._shell.pid))

    def _is_first(self) -> bool:
        return self._shell is not None and self._shell.pid == min(_children(), default=0)

    def _end(self) -> None:
        """Both shells have ended: what they wrote to is closed."""
        shell, self._shell = self._shell, None
        if shell is None or shell.stdout is None or shell.stdin is None:
            return
        asyncio.get_running_loop().remove_reader(shell.stdout)
        for pipe in (shell.stdin, shell.stdout):
            pipe.close()
        code = shell.wait()  # the end of its output is its own end
        number = -code if code < 0 else code - 128
        try:
            self._told(f"{signal.Signals(number).name} reached all processes of its job")
        except ValueError:
            log.warning("the canary ended with %d by itself: signals to the whole job are not seen any more", code)
        self._ended.set()

    def close(self) -> None:
        """End it. Safe twice."""
        shell, self._shell = self._shell, None
        if shell is None or shell.stdin is None or shell.stdout is None:
            return
        with contextlib.suppress(RuntimeError, ValueError):
            asyncio.get_running_loop().remove_reader(shell.stdout)
        shell.stdin.close()
        shell.stdout.close()
        try:
            shell.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            shell.kill()
            shell.wait()


def _children() -> set[int]:
    """Living children of this process, whichever thread started them."""
    pids: set[int] = set()
    for path in glob.glob("/proc/self/task/*/children"):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            pids.update(map(int, file.read().split()))
    return pids


def _dies(pid: int) -> bool:
    """Whether the process has ended, or has a deadly signal to answer."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = dict(line.split(b":\t", 1) for line in file if line.startswith((b"State", b"SigPnd", b"ShdPnd")))
    except OSError:
        return True
    pending = int(lines[b"SigPnd"], 16) | int(lines[b"ShdPnd"], 16)
    return lines[b"State"][:1] in b"ZX" or bool(pending & _DEADLY)
