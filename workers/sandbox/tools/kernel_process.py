"""One IPython kernel's process inside the box: started, connected to over Unix sockets, ended with what is its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import posixpath
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.errors import SandboxError
from workers.sandbox import processes
from workers.sandbox.processes import Process
from workers.sandbox.programs import reap
from workers.sandbox.tools.cells import Channels
from workers.sandbox.tools.inside import REAP_SECONDS, Inside

TOOL = "ipython"

_FIRST_CELL = Path(__file__).with_name("kernel_start.py")
# No history file in the home; no pause before each reply, whose order with the output does not matter to us.
_OPTIONS = ("--HistoryManager.enabled=False", "--Kernel._execute_sleep=0")
_LOOK_SECONDS = 0.01
_LAST_WORDS_SECONDS = 1.0
_SAID_BYTES = 2000
_SOCKETS = 5
_CONNECTED = (1, 2)
"""Numbers of those that this process connects to: shell and iopub."""


class Running:
    """A kernel run by `python` (as called inside). `leader` is its process, `ended` is done when that is gone."""

    ended: asyncio.Task[int]

    def __init__(self, inside: Inside, python: str, start_timeout: float) -> None:
        self._inside = inside
        self._python = python
        self._start_timeout = start_timeout
        self._name, self._key = f"k{secrets.token_hex(4)}", secrets.token_hex(32)
        self._process: asyncio.subprocess.Process | None = None
        self._said: asyncio.Task[bytes] | None = None
        self._connected: Channels | None = None
        self.leader: Process | None = None

    async def start(self) -> None:
        """Start it and wait until it answers. Raises SandboxError; `end` must be called then too."""
        await self._launch()
        await self._ready(time.monotonic() + self._start_timeout)

    @property
    def over(self) -> bool:
        """Whether the kernel has ended."""
        return self.ended.done()

    @property
    def channels(self) -> Channels:
        """The connection to the kernel that has started."""
        assert self._connected is not None
        return self._connected

    async def _launch(self) -> None:
        box = self._inside.box
        info = self._info(f"{box.sockets_inside}/{self._name}")
        file = self._inside.hand_over(f"{self._name}.json", json.dumps(info).encode())
        argv = [self._python, "-m", "ipykernel_launcher", "-f", file, *_OPTIONS]
        environment = self._inside.environment(
            TOOL,
            IPYTHONDIR=posixpath.join(box.environment().get("TMPDIR", "/tmp"), ".ipython"),
            PYDEVD_DISABLE_FILE_VALIDATION="1",
        )
        self._process = await asyncio.create_subprocess_exec(
            *self._inside.started_in(box.workdir, argv),
            env=environment,
            cwd="/",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            process_group=0,  # not for Ctrl-C in the worker's terminal
        )
        self.ended = asyncio.ensure_future(self._process.wait())
        self._said = asyncio.ensure_future(_listen(self._process))

    def _info(self, ip: str) -> dict[str, Any]:
        """A connection file: with ipc the ports are what the sockets' names end in, so nothing can collide."""
        ports = {f"{name}_port": at + 1 for at, name in enumerate(("shell", "iopub", "stdin", "control", "hb"))}
        return {"transport": "ipc", "ip": ip, "key": self._key, "signature_scheme": "hmac-sha256", **ports}

    async def _ready(self, until: float) -> None:
        """Wait until the kernel answers and its output comes. Raises SandboxError."""
        sockets = self._inside.box.sockets
        await self._check(until, lambda: all((sockets / f"{self._name}-{at}").exists() for at in _CONNECTED))
        assert self._process is not None
        self.leader = self._inside.leader(self._process.pid)
        first = f"exec({_FIRST_CELL.read_text('utf-8')!r}, {{}})"
        listening = asyncio.ensure_future(self.connect().listen(first))
        try:
            await self._check(until, listening.done)
            listening.result()
        except ValueError as error:
            raise SandboxError(str(error)) from error
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    def connect(self) -> Channels:
        """New channels to the running kernel. Raises SandboxError when a socket is none."""
        if self._connected is None:
            for at in _CONNECTED:
                self._inside.take_socket(f"{self._name}-{at}")
        else:
            self._connected.close()
        self._connected = Channels(self._info(str(self._inside.taken / self._name)))
        return self._connected

    async def _check(self, until: float, done: Callable[[], bool]) -> None:
        """Wait until `done()`. Raises SandboxError when the kernel ends before, or time is over."""
        assert self._said is not None
        while not done():
            if self.ended.done():
                await asyncio.wait([self._said], timeout=_LAST_WORDS_SECONDS)
                said = (self._said.result() if self._said.done() else b"").decode("utf-8", "replace").strip()[-500:]
                raise SandboxError(f"the IPython kernel ended at its start: {said or 'it said nothing'}")
            if time.monotonic() > until:
                late = f"within {self._start_timeout:g} s (sandbox.start_timeout)"
                raise SandboxError(f"the IPython kernel was not ready {late}")
            await asyncio.sleep(_LOOK_SECONDS)

    async def end(self, since: processes.Moment | None = None) -> None:
        """End the kernel, with what it started `since` then; close its connection, remove its files. Safe twice."""
        if self._connected is not None:
            self._connected.close()
        process, self._process = self._process, None
        if process is not None:
            if self.leader is not None:
                processes.kill(self.leader)
            elif process.returncode is None:
                await self._inside.end(process.pid)
            if since is not None:
                await self._inside.kill_since(since, None, TOOL)
            await self._reap(process)
        ends = [f"{self._name}-{at}" for at in range(1, _SOCKETS + 1)]
        self._inside.take_back(f"{self._name}.json", *ends)

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        await asyncio.wait([self.ended], timeout=REAP_SECONDS)  # the helper program reaps the kernel: see `reaped`
        if self._said is not None:
            self._said.cancel()
            await asyncio.gather(self._said, return_exceptions=True)
        await reap(process)
        await self.ended


async def _listen(process: asyncio.subprocess.Process) -> bytes:
    """The last that a process writes to its standard error."""
    assert process.stderr is not None
    said = b""
    with contextlib.suppress(ConnectionError):
        while data := await process.stderr.read(4096):
            said = (said + data)[-_SAID_BYTES:]
    return said
