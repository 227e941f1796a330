"""One persistent bash over a PTY: right exit codes, nothing that hangs it for good, output that can't grow without end.

A command is written to a file and sourced, so quotes that don't close are bash's error and long lines are not cut. Its
standard input is empty. Its end is a mark with a fresh random number, which nothing that runs can know before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from pathlib import Path
from typing import Any

import pexpect

from pipeline.errors import SandboxError
from pipeline.interfaces import Output
from workers.sandbox import processes
from workers.sandbox.terminal import Terminal

START_SECONDS = 20.0
STOP_SECONDS = 0.5
"""How long a shell whose command was killed has to answer again before it is replaced."""

_START = "stty -opost -echo; exec /bin/bash --norc --noprofile --noediting"
"""Newlines come as they were written. Bash restores the terminal that it found at its start, so it is set before."""


class Shell:
    """`home`: where it starts; `private`: folder for command files; `mark`: what names its processes."""

    def __init__(self, home: Path, private: Path, environment: dict[str, str], mark: str) -> None:
        self._home, self._private, self._mark = home, private, mark
        self._environment = {**environment, processes.MARK: mark}
        self._child: Any = None
        self._reader: Terminal | None = None
        self._lock = asyncio.Lock()
        self._broken = False

    async def start(self) -> None:
        """Start bash. Raises SandboxError when it does not answer."""
        try:
            self._child = await asyncio.to_thread(self._spawn)
        except (pexpect.ExceptionPexpect, OSError) as error:
            raise SandboxError(f"bash does not start in {self._home}: {error}") from error
        self._reader = Terminal(self._child.child_fd, self._child.pid)
        self._broken = False
        self._send("PS1= PS2= PROMPT_COMMAND=; set +m +H; unset HISTFILE")
        if await self._until_marked(START_SECONDS) is None:
            raise SandboxError(f"bash in {self._home} does not answer within {START_SECONDS} s")
        self._reader.take()

    def _spawn(self) -> Any:
        child = pexpect.spawn(
            "/bin/sh",
            ["-c", _START],
            cwd=str(self._home),
            env=self._environment,
            echo=False,
            dimensions=(24, 200),
            timeout=None,
        )
        child.delaybeforesend = None
        child.ptyproc.delayafterclose = child.ptyproc.delayafterterminate = 0.01
        os.set_blocking(child.child_fd, False)
        return child

    async def run(self, command: str, timeout: float) -> Output:
        """Run one command. Raises SandboxError when no shell can be had any more."""
        async with self._lock:
            note = ""
            if self._broken or self._child is None:
                await self._restart()
                note = "[a new shell was started: folder and variables are reset]\n"
            self._broken = True  # until it has answered: a cancelled call leaves a shell that nobody may trust
            output = await self._run(command, timeout)
            return output._replace(text=note + output.text)

    async def _run(self, command: str, timeout: float) -> Output:
        assert self._reader is not None
        file = self._private / f"command-{secrets.token_hex(4)}"
        file.write_bytes(command.encode("utf-8", "replace") + b"\n")
        since = processes.now()
        try:
            self._send(f" . {_quoted(file)} </dev/null")
            code = await self._until_marked(timeout)
            if code is not None:
                self._broken = False
                return Output(self._text(file), code)
            if self._reader.ended:
                return await self._after_exit(file)
            return await self._stop(file, since)
        finally:
            file.unlink(missing_ok=True)

    async def _after_exit(self, file: Path) -> Output:
        """The command ended the shell itself (exit, exec, a failure under set -e): its code counts."""
        text = self._text(file)
        code = await asyncio.to_thread(self._wait)
        await self._restart()
        return Output(f"{text}\n[the shell ended; a new one was started: folder and variables are reset]", code)

    async def _stop(self, file: Path, since: processes.Moment) -> Output:
        """Kill what the command started, and only that; replace the shell when it does not come back by itself."""
        assert self._reader is not None
        for _ in range(3):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGINT)  # our own unreaped child: the pid is still its own
            await asyncio.to_thread(processes.kill_all, self._mark, self._child.pid, since=since, seconds=STOP_SECONDS)
            if await self._until_marked(STOP_SECONDS) is not None:
                self._broken = False
                return Output(self._text(file).rstrip("\n"), None, timed_out=True)
        text = self._text(file)
        await self._restart()
        note = "[the shell did not come back; a new one was started: folder and variables are reset]"
        return Output(f"{text}\n{note}", None, timed_out=True)

    def _send(self, line: str) -> None:
        try:
            os.write(self._child.child_fd, line.encode() + b"\n")
        except OSError as error:
            raise SandboxError(f"the shell in {self._home} is gone: {error}") from error

    async def _until_marked(self, timeout: float) -> int | None:
        """Ask for a mark and wait for it: the exit code of what ran before it, None when time is over or bash ended.

        The number is sent in two halves, so that no trace (set -x) and no echo can show the whole mark.
        """
        assert self._reader is not None
        one, two = secrets.token_hex(8), secrets.token_hex(8)
        self._reader.expect(f"{one}{two}")
        with contextlib.suppress(SandboxError):  # bash has ended: the reader sees it
            self._send(f" {{ builtin printf '\\001%s%s:%d\\002' {one} {two} $?; }} 2>/dev/null >/dev/tty")
        return await self._reader.wait(timeout)

    def _text(self, file: Path) -> str:
        assert self._reader is not None
        return self._reader.take().replace(f"bash: {file}: ", "bash: ").replace(str(file), "bash")

    def _wait(self) -> int:
        """Exit code of a bash that has closed its terminal; killed when it lives on without one."""
        child = self._child
        self._end()
        if child.exitstatus is not None:
            return int(child.exitstatus)
        return 128 + int(child.signalstatus or signal.SIGKILL)

    def _end(self) -> None:
        child = self._child
        with contextlib.suppress(pexpect.ExceptionPexpect, OSError):
            if child.isalive():
                os.kill(child.pid, signal.SIGKILL)
                child.wait()
        with contextlib.suppress(pexpect.ExceptionPexpect, OSError):
            child.close(force=True)

    async def _restart(self) -> None:
        if self._reader is not None:
            self._reader.stop()
        if self._child is not None:
            await asyncio.to_thread(self._end)
            self._child = None
        await self.start()

    async def close(self) -> None:
        """End the shell and every process that it started, whatever session they are in. Safe twice."""
        if self._child is None:
            return
        child, self._child = self._child, None
        if self._reader is not None:
            self._reader.stop()
        left = await asyncio.to_thread(processes.kill_all, self._mark, child.pid)
        self._child = child
        await asyncio.to_thread(self._end)
        self._child = None
        if left:
            raise SandboxError(f"{len(left)} processes of the sandbox in {self._home} can't be killed: {left[:3]}")


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "'\\''") + "'"
