"""One persistent IPython kernel inside the box, spoken to over Unix sockets in the folder that both sides see.

A cell that is too slow is interrupted, and what it started is killed; a kernel that does not come back is killed too,
and a new one starts with the next cell. The policy is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import signal
import sys
from typing import Any

from pipeline.errors import SandboxError
from pipeline.interfaces import Cell
from workers.sandbox import processes
from workers.sandbox.tools.calls import Calls
from workers.sandbox.tools.cells import Gathered
from workers.sandbox.tools.files import Files
from workers.sandbox.tools.inside import Inside, unhurried
from workers.sandbox.tools.kernel_process import TOOL, Running
from workers.sandbox.tools.plain import HALF, with_notes
from workers.sandbox.tools.run import run

STOP_SECONDS = 1.0
"""How long an interrupted cell has to end, three times over, before its kernel is killed."""

FIND_SECONDS = 20.0
_LISTEN_SECONDS = 5.0

_FIND = """
trouble=
ask='
import sys
try:
    from importlib.util import find_spec
except ImportError:
    sys.exit(3)
sys.exit(0 if find_spec("ipykernel_launcher") else 3)
'
for python in "$@"; do
    said=$("$python" -c "$ask" 2>&1)
    code=$?
    case $code in
        0) echo "$python"; exit 0 ;;
        3 | 126 | 127) ;;  # it has none; there is no such Python
        *) trouble="$python ended with $code${said:+: $said}" ;;
    esac
done
echo "$trouble" >&2
test -z "$trouble"
"""

_MISSING = (
    "this sandbox has no IPython: no python3 or python in it can import ipykernel; an image built by "
    "`rollout image build python` has one"
)
_TROUBLE = "whether this sandbox has IPython could not be found out (a limit of the sandbox?)"
_NEW = "a new kernel was started: variables and imports are gone"
_DIED = "the kernel died; a new one starts with the next cell: variables and imports are gone"
_CUT = "a part of the output was too large and is lost"
_LEFT = "the cell ended the kernel; a new one starts with the next cell: variables and imports are gone"
_STUCK = (
    "the kernel did not come back and was killed; a new one starts with the next cell: variables and imports are gone"
)


class Kernel:
    """An IPython kernel in the box, started with the first cell.

    `start_timeout`: seconds that it has to be ready; `half`: bytes kept of an output's head, and of its tail.
    """

    def __init__(self, inside: Inside, files: Files, start_timeout: float, half: int = HALF) -> None:
        self._inside = inside
        self._half = half
        self._files = files
        self._start_timeout = start_timeout
        self._calls = Calls(self._hurry)
        self._cut: asyncio.Future[None] | None = None
        self._python: str | None = None
        self._running: Running | None = None
        self._lost = False
        self._cells = 0

    async def run(self, code: str, timeout: float) -> Cell:
        """Run one cell. Raises SandboxError when no kernel can be had though the image has one."""
        return await self._calls.run(lambda given_up: self._call(code, timeout, given_up))

    async def close(self) -> None:
        """End the kernel and the cell that runs in it; what it started in the background stays. Safe twice."""
        await unhurried(self._calls.after(self._close()))

    async def _close(self) -> None:
        await self._end()
        self._lost = False

    def _hurry(self) -> None:
        if self._cut is not None and not self._cut.done():
            self._cut.set_result(None)

    async def _call(self, code: str, timeout: float, given_up: asyncio.Event) -> Cell:
        if self._running is not None and self._running.over:
            self._lost = True
            await self._end()
        if self._running is None and not await self._start():
            return Cell(f"[{_MISSING}]", error="NoKernel")
        if given_up.is_set():
            return Cell("")
        note = f"[{_NEW}]\n" if self._lost else ""
        self._lost = True  # until the cell has ended: a call that ends early leaves a kernel that nobody may trust
        assert self._running is not None
        cell = await self._cell(self._running, code, timeout)
        return cell._replace(text=note + cell.text)

    async def _cell(self, running: Running, code: str, timeout: float) -> Cell:
        """Run the cell; the kernel lives on when that ends well, and has been ended when it does not."""
        self._cells += 1
        gathered = Gathered(self._pictures_folder(), f"cell{self._cells}", self._half)
        since = processes.now()
        cell = asyncio.ensure_future(running.channels.run(code, gathered))
        try:
            late = not await self._wait(running, cell, timeout)
            if late and not running.over and not await self._interrupt(running, cell, since):
                await self._end(since)
                return Cell(with_notes(gathered.take(), [_STUCK]), "TimeoutError", timed_out=True)
            if not cell.done():
                await self._end()
                return Cell(with_notes(gathered.take(), [_DIED]), "DeadKernelError")
            notes = await self._after(running, gathered, whole=cell.result())
            self._lost = False
            name = "TimeoutError" if late else gathered.error
            return Cell(with_notes(gathered.take(), notes), name, tuple(gathered.pictures), timed_out=late)
        except ValueError as error:
            await self._end()
            return Cell(with_notes(gathered.take(), [f"{error}; {_DIED}"]), "DeadKernelError")
        finally:
            cell.cancel()
            await asyncio.gather(cell, return_exceptions=True)

    async def _after(self, running: Running, gathered: Gathered, *, whole: bool) -> list[str]:
        """What is to be done when a cell has ended by itself; notes about it. Raises ValueError as `Channels.run`."""
        notes = await self._save(gathered)
        if not whole:  # too large a message has cost the connection for good
            notes.append(_CUT)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LISTEN_SECONDS):
                    await running.connect().listen("")
        if gathered.leaves:
            await self._end()
            notes.append(_LEFT)
        return notes

    async def _wait(self, running: Running, cell: asyncio.Future[bool], timeout: float) -> bool:
        """Wait until the cell or the kernel has ended, or nobody waits any more; False when time was over first."""
        cut = self._cut = asyncio.get_running_loop().create_future()
        waited: list[asyncio.Future[Any]] = [cell, running.ended, cut]
        await asyncio.wait(waited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        self._cut = None
        return cell.done() or running.over

    async def _interrupt(self, running: Running, cell: asyncio.Future[bool], since: processes.Moment) -> bool:
        """Interrupt the cell and kill what it started; whether the kernel has come back."""
        for _ in range(3):
            if running.leader is not None:
                processes.send(running.leader, signal.SIGINT)
            await self._inside.kill_since(since, running.leader, TOOL, STOP_SECONDS)
            if await self._wait(running, cell, STOP_SECONDS):
                await self._inside.kill_since(since, running.leader, TOOL)
                return True
        return False

    async def _save(self, gathered: Gathered) -> list[str]:
        """Write the pictures where the text says they are; notes about those that can't be."""
        notes = []
        for path, data in list(gathered.pictures.items()):
            try:
                await self._files.write(path, data)
            except (OSError, ValueError) as error:
                del gathered.pictures[path]
                notes.append(f"the picture {path} could not be saved: {error}")
        return notes

    def _pictures_folder(self) -> str:
        return posixpath.join(self._inside.box.environment().get("TMPDIR", "/tmp"), "pictures")

    async def _start(self) -> bool:
        """Start a kernel; False where the image has none. Raises SandboxError when it does not get ready."""
        await self._inside.revive()
        if self._python is None and not await self._find():
            return False
        running = Running(self._inside, str(self._python), self._start_timeout)
        try:
            await running.start()
        except BaseException:
            await unhurried(running.end())
            raise
        self._running = running
        return True

    async def _find(self) -> bool:
        """Look for a Python inside that has ipykernel: its own first, then this process's where that is seen inside.

        False when there is none. Raises SandboxError when one could not be asked (a signal ended it, no room to fork).
        """
        names = ("python3", sys.executable, "python")
        ran = await run(self._inside, _FIND, *names, most=1000, seconds=FIND_SECONDS)
        self._python = ran.output.decode("utf-8", "replace").strip() or None
        if ran.code:
            raise SandboxError(f"{_TROUBLE}: {' '.join(ran.errors.split())[-500:] or f'sh ended with {ran.code}'}")
        return self._python is not None

    async def _end(self, since: processes.Moment | None = None) -> None:
        """End the kernel, if there is one, and what it started `since` then."""
        running, self._running = self._running, None
        if running is not None:
            await running.end(since)
