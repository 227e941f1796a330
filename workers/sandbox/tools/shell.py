"""One persistent bash over a PTY: right exit codes, nothing that hangs it for good, output that can't grow without end.

A command is written to a file and sourced, so quotes that don't close are bash's error and long lines are not cut. Its
standard input is empty, and there is no controlling terminal: what asks for a password fails at once instead of
swallowing what bash should read. Its end is a mark with a fresh random number, which nothing that runs can know before.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import shlex
import signal
import termios
import time
from typing import Any

import pexpect

from pipeline.errors import SandboxError
from pipeline.interfaces import Output
from workers.sandbox import processes
from workers.sandbox.processes import Process
from workers.sandbox.tools.calls import Calls
from workers.sandbox.tools.inside import Inside, reaped, unhurried
from workers.sandbox.tools.plain import HALF, with_notes
from workers.sandbox.tools.terminal import Terminal

TOOL = "bash"
STOP_SECONDS = 0.5
"""How long a shell whose command was interrupted has to answer again, and how long one that was killed may take."""
MARKS = 5
"""How often it is asked in that time."""

INTERRUPT_SECONDS = 0.1
"""How long an interrupted command has to end by itself before it is killed."""

_BASH = ("bash", "--norc", "--noprofile", "--noediting", "-i")
# Bash's own errors (prompts, traces of our lines) go nowhere; commands get the terminal for writing only, by a second
# opening of it, so that no pager can read from it what is meant for bash.
_SETTINGS = "exec 2>/dev/null; exec >/proc/self/fd/0; PS1= PS2= PROMPT_COMMAND=; set +m +H; unset HISTFILE"
_ENDED = "the shell ended; a new one was started: folder and variables are reset"
_STUCK = "the shell did not come back; a new one was started: folder and variables are reset"
_NEW = "a new shell was started: folder and variables are reset"


class Shell:
    """A bash in the box; calls wait for each other.

    `start_timeout`: seconds that a new bash has to answer; `half`: bytes kept of an output's head, and of its tail.
    """

    def __init__(self, inside: Inside, start_timeout: float, half: int = HALF) -> None:
        self._inside = inside
        self._start_timeout = start_timeout
        self._half = half
        self._child: Any = None
        self._reader: Terminal | None = None
        self._bash: Process | None = None
        self._broken = False
        self._calls = Calls(self._hurry)

    async def start(self) -> None:
        """Start bash if none runs. Raises SandboxError when it does not answer."""
        await self._calls.run(lambda given_up: self._ready())

    async def run(self, command: str, timeout: float) -> Output:
        """Run one command. Raises SandboxError when no shell can be had any more.

        A cancelled call ends its command as a time-out does, behind the caller's back; the next call waits for that.
        """
        return await self._calls.run(lambda given_up: self._call(command, timeout, given_up))

    async def close(self) -> None:
        """End the shell and the command that runs in it; background processes stay. Safe twice, usable again."""
        await unhurried(self._calls.after(self._close()))

    async def _close(self) -> None:
        await self._end()
        self._broken = False

    def _hurry(self) -> None:
        if self._reader is not None:
            self._reader.give_up()

    async def _call(self, command: str, timeout: float, given_up: asyncio.Event) -> Output:
        notes = await self._ready()
        if given_up.is_set():
            return Output("", None)
        self._broken = True  # until it has answered: a call that ends early leaves a shell that nobody may trust
        output = await self._run(command, timeout)
        before = "".join(f"[{note}]\n" for note in notes)
        return output._replace(text=before + output.text)

    async def _ready(self) -> list[str]:
        """See to it that a shell waits for a command; notes for the policy."""
        if self._child is None:
            await self._start()
            return []
        if self._broken or self._reader is None or self._reader.ended or not self._inside.box.alive():
            await self._restart()
            return [_NEW]
        return []

    async def _start(self) -> None:
        try:
            await self._start_once()
        except SandboxError:
            await self._end()
            if self._inside.box.alive():
                raise
            await self._start_once()  # the box died in between
        except BaseException:
            await unhurried(self._end())
            raise

    async def _start_once(self) -> None:
        await self._inside.revive()
        home = self._inside.box.workdir
        try:
            self._child = await unhurried(asyncio.to_thread(self._spawn, self._inside.started_in(home, _BASH)))
        except (pexpect.ExceptionPexpect, OSError) as error:
            raise SandboxError(f"bash does not start in the sandbox: {error}") from error
        self._reader = Terminal(self._child.child_fd, self._child.pid, self._half)
        if await self._until_marked(_SETTINGS, self._start_timeout) is None:
            said = self._reader.take()[-500:]
            late = f"does not answer within {self._start_timeout:g} s (sandbox.start_timeout): {said}"
            why = f"ended: {said}" if self._reader.ended else late
            raise SandboxError(f"bash in the sandbox {self._inside.box.name} {why}")
        self._reader.take()
        self._bash = self._inside.leader(self._child.pid)
        self._broken = False

    def _spawn(self, argv: list[str]) -> Any:
        child = pexpect.spawn(
            argv[0],
            argv[1:],
            cwd="/",
            env=self._inside.environment(TOOL),
            echo=False,
            dimensions=(24, 200),
            timeout=None,
            preexec_fn=_set_terminal,
        )
        child.delaybeforesend = None
        child.ptyproc.delayafterclose = child.ptyproc.delayafterterminate = 0.001
        os.set_blocking(child.child_fd, False)
        return child

    async def _run(self, command: str, timeout: float) -> Output:
        assert self._reader is not None
        name = f"c{secrets.token_hex(8)}"
        inside = self._inside.hand_over(name, command.encode("utf-8", "replace").replace(b"\0", b"") + b"\n")
        since = processes.now()
        try:
            code = await self._until_marked(f". {shlex.quote(inside)} </dev/null 2>&1", timeout)
            if code is not None:
                self._broken = False
                return Output(self._text(inside), code)
            if self._reader.ended:
                return await self._after_exit(inside)
            return await self._stop(inside, since)
        finally:
            self._inside.take_back(name)

    async def _after_exit(self, inside: str) -> Output:
        """The command ended the shell itself (exit, exec, a failure under set -e), or the box died: its code counts."""
        text = self._text(inside)
        code = await asyncio.to_thread(self._wait)
        await self._restart()
        return Output(with_notes(text, [_ENDED]), code)

    async def _stop(self, inside: str, since: processes.Moment) -> Output:
        """End what the command started, and only that; replace the shell when it does not come back by itself."""
        assert self._reader is not None
        for _ in range(3):
            if self._bash is not None:
                await asyncio.to_thread(self._interrupt, self._bash, since)
            for _ in range(MARKS):  # bash drops what it has read already when the interrupt reaches it
                if await self._until_marked("", STOP_SECONDS / MARKS) is not None:
                    await self._inside.kill_since(since, self._bash, TOOL)
                    self._broken = False
                    return Output(self._text(inside).rstrip("\n"), None, timed_out=True)
        text = self._text(inside)
        await self._end()
        await self._inside.kill_since(since, None, TOOL)
        await self._start()
        return Output(with_notes(text, [_STUCK]), None, timed_out=True)

    def _interrupt(self, bash: Process, since: processes.Moment) -> None:
        """As ^C does: bash and its children are interrupted, so that a loop ends; then what is left is killed."""
        below = [item for item in self._inside.victims(since, bash, TOOL) if item.parent == bash.pid]
        for item in [bash, *below]:
            processes.send(item, signal.SIGINT)
        until = time.monotonic() + INTERRUPT_SECONDS
        while any(processes.look(item.pid) == item for item in below) and time.monotonic() < until:
            time.sleep(0.005)  # a loop in bash ends only when its child was seen to die of the interrupt
        for item in self._inside.victims(since, bash, TOOL):
            processes.kill(item)

    async def _until_marked(self, line: str, timeout: float) -> int | None:
        """Run `line`, and wait for its mark: its exit code, None when time is over or bash ended.

        The number is sent in two halves, so that no trace (set -x) and no echo can show the whole mark.
        """
        assert self._reader is not None
        one, two = secrets.token_hex(8), secrets.token_hex(8)
        self._reader.expect(f"{one}{two}")
        mark = f" {{ builtin printf '\\001%s%s:%d\\002' {one} {two} $?; PS1= PROMPT_COMMAND=; }} >&0\n"
        with contextlib.suppress(OSError):  # bash has ended: the reader sees it
            os.write(self._child.child_fd, f" {line}\n{mark}".encode())
        return await self._reader.wait(timeout)

    def _text(self, inside: str) -> str:
        assert self._reader is not None
        return self._reader.take().replace(f"bash: {inside}: ", "bash: ").replace(inside, "bash")

    def _wait(self) -> int:
        """Exit code of a bash that has ended."""
        child = self._child
        self._close_child(child)
        if child.exitstatus is not None:
            return int(child.exitstatus)
        return 128 + int(child.signalstatus or signal.SIGKILL)

    async def _restart(self) -> None:
        await self._end()
        await self._start()

    async def _end(self) -> None:
        """End bash whatever it does, and close what belongs to it."""
        if self._reader is not None:
            self._reader.stop()
        child, self._child, self._reader, bash, self._bash = self._child, None, None, self._bash, None
        if child is None:
            return
        if bash is None:
            await self._inside.end(child.pid)
        else:
            processes.kill(bash)
            await asyncio.to_thread(reaped, child.pid)
        await asyncio.to_thread(self._close_child, child)

    def _close_child(self, child: Any) -> None:
        with contextlib.suppress(pexpect.ExceptionPexpect, OSError):
            child.close(force=True)


def _set_terminal() -> None:
    """In the child, before anything runs: newlines come as they were written, and no terminal controls the session.

    Bash restores the terminal that it found at its start, so it is set before.
    """
    mode = termios.tcgetattr(0)
    mode[0] &= ~(termios.IXON | termios.IXOFF | termios.ICRNL)
    mode[1] &= ~termios.OPOST
    mode[3] &= ~(termios.ECHO | termios.ECHONL | termios.ISIG)
    termios.tcsetattr(0, termios.TCSANOW, mode)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the leader of a session that gives its terminal up is sent one
    fcntl.ioctl(0, termios.TIOCNOTTY)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
