"""The keeper: first process of a sandbox's pid namespace. As long as it lives the sandbox does, and not longer.

It is a bash that waits for the end of a socket held by this process: when this process dies, however, the kernel ends
everything inside. From inside it can't be signalled, and a socket (unlike a pipe) can't be opened through /proc.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from pipeline.errors import SandboxError
from workers.sandbox import processes

COMMAND = ("/bin/bash", "--norc", "--noprofile", "-c", "echo ready; while read -r _; do :; done")
"""What runs as the first process inside; bash reaps orphans."""

STOP_SECONDS = 60.0
"""The kernel takes apart what a fork bomb left within seconds, not milliseconds."""
LAST_LINES = 5


class Handle:
    """A process of this machine that is watched and ended by a descriptor: its pid may be another's by then."""

    def __init__(self, pid: int) -> None:
        """Raises OSError when it is gone."""
        self._fd = os.pidfd_open(pid)

    def alive(self) -> bool:
        return self._fd >= 0 and not processes.has_ended(self._fd)

    async def kill(self, seconds: float) -> bool:
        """SIGKILL, and wait; False when it still runs after `seconds`. Whatever comes of it, it is watched no more."""
        if self._fd < 0:
            return True
        fd, self._fd = self._fd, -1
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            return await _ended(fd, seconds)
        finally:
            os.close(fd)


class Keeper:
    """A started keeper. `pid` is its pid on this machine, where one is seen; `launcher` what was started here."""

    def __init__(self, launcher: subprocess.Popen[bytes], line: socket.socket, pid: int) -> None:
        self.launcher = launcher
        self.pid = pid
        self._line = line
        self._handle = Handle(pid)

    @classmethod
    async def start(cls, argv: Sequence[str], env: Mapping[str, str], said: Path, seconds: float) -> Keeper:
        """Run `argv`, which ends in COMMAND, and wait until it is ready.

        `said`: the file for what the program complains of. It lies in the box's folder, for the agent may write to it
        through /proc/1/fd, and its size must count. Must be called in the main thread: the kernel's "die with the
        parent" means the thread that forked. Raises SandboxError with the last lines that the program wrote.
        """
        ours, theirs = socket.socketpair()
        with _emptied(said) as errors, theirs:
            try:
                launcher = subprocess.Popen(
                    argv, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=errors, env=env, cwd="/",
                    process_group=0,  # Ctrl-C in the worker's terminal is not for what rollouts are in
                )  # fmt: skip
            except OSError as error:
                ours.close()
                raise SandboxError(f"{argv[0]} can't be started: {error}") from error
            theirs.close()
            try:
                await _ready(ours, seconds)
                return cls(launcher, ours, _first_inside(launcher.pid))
            except BaseException as error:
                ours.close()
                await asyncio.shield(asyncio.to_thread(_kill, launcher))
                if isinstance(error, (OSError, TimeoutError)):
                    raise SandboxError(_why(error, errors, seconds)) from error
                raise

    def alive(self) -> bool:
        """Whether the keeper still runs; a dead one's remains are taken away."""
        if self._handle.alive():
            return True
        self.launcher.poll()
        return False

    async def environment(self) -> bytes:
        """Its variables as the kernel writes them down. Raises SandboxError."""
        try:
            return Path(f"/proc/{self.pid}/environ").read_bytes()
        except OSError as error:
            raise SandboxError(f"the sandbox ended as soon as it had started: {error}") from error

    async def stop(self) -> None:
        """End it, and with it everything inside; returns when the kernel has. Safe twice. Raises SandboxError."""
        self._line.close()
        # not left to bash's seeing the end of the socket: something inside may trace it
        if not await self._handle.kill(STOP_SECONDS):
            raise SandboxError(f"the sandbox's first process {self.pid} did not end within {STOP_SECONDS:.0f} s")
        if self.launcher.returncode is None:
            await asyncio.to_thread(_end, self.launcher)


def _emptied(path: Path) -> IO[bytes]:
    return open(path, "w+b")


async def _ready(line: socket.socket, seconds: float) -> None:
    """Wait for the word. Raises TimeoutError, and OSError when the program ended without it."""
    line.setblocking(False)
    loop = asyncio.get_running_loop()
    heard = b""
    async with asyncio.timeout(seconds):
        while b"ready\n" not in heard:
            try:
                data = await loop.sock_recv(line, 4096)
            except ConnectionResetError:
                data = b""
            if not data:
                raise OSError("it ended before it was ready")
            heard += data


async def _ended(handle: int, seconds: float) -> bool:
    """Wait for the end of the process that the handle stands for; False when it still runs after `seconds`."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    loop.add_reader(handle, done.set)
    try:
        async with asyncio.timeout(seconds):
            await done.wait()
        return True
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(handle)


def _first_inside(launcher: int) -> int:
    """The child that is number 1 in a pid namespace of its own. Raises OSError."""
    with open(f"/proc/{launcher}/task/{launcher}/children") as file:
        children = [int(word) for word in file.read().split()]
    for pid in children:
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/status") as file:
            numbers = next((line.split()[1:] for line in file if line.startswith("NSpid:")), [])
            if len(numbers) > 1 and numbers[-1] == "1":
                return pid
    raise OSError(f"process {launcher} has no child that is the first of a pid namespace")


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Let the launcher end, which it does by itself when the keeper has; and reap it."""
    try:
        launcher.wait(1.0)
    except subprocess.TimeoutExpired:
        _kill(launcher)


def _kill(launcher: subprocess.Popen[bytes]) -> None:
    """End a launcher with all that it started. Not the launcher first: it unmounts when its children have ended."""
    for item in processes.descendants(launcher.pid):
        processes.kill(item)
    try:
        launcher.wait(1.0)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def _why(error: BaseException, errors: IO[bytes], seconds: float) -> str:
    what = f"it was not ready within {seconds:g} s" if isinstance(error, TimeoutError) else str(error)
    return f"the sandbox did not start: {what}{last_lines(errors)}"


def last_lines(errors: IO[bytes]) -> str:
    """The end of what a program wrote to the file `errors`, as the tail of a sentence."""
    errors.seek(0)
    lines = [line.strip() for line in errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return f" ({' | '.join(lines[-LAST_LINES:])[-600:]})" if lines else ""
