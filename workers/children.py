"""Calls into child processes: plain `def` methods, and rollouts that must run alone. A cancel kills the call whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import handlers
from pipeline import wire
from pipeline.config import Config
from pipeline.envelope import Payload, from_map
from pipeline.errors import (
    EnvelopeError,
    EvaluationTimeout,
    GraderError,
    HandlerError,
    SandboxGone,
    Stale,
    WorkerLost,
    by_kind,
)
from pipeline.interfaces import Reward
from pipeline.log import AttemptLog
from workers.child_call import done_from_map, frame, job_to_map, reward_from_map
from workers.handler_call import artifacts_of
from workers.job import Done, Job

LAST_BYTES = 5.0
"""Seconds that a call's reply may still be on its way after the call has ended."""


class ChildDied(WorkerLost):
    """The child process died before it answered. It ran one rollout alone, so this counts as an attempt."""

    def __init__(self, message: str, exit_code: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Children:
    """One child server of a worker, started with the first call and again when it is gone."""

    def __init__(
        self,
        config: Config,
        handlers_path: str | None,
        preload: tuple[str, ...] = (),
        alone: Callable[[], Config] | None = None,
        worker: str = "",
    ) -> None:
        """`alone`: tells the settings of a rollout that runs alone, at the moment when it begins; `worker`: begins its
        name in the registry of policy servers, "" where there is none."""
        self._config = config
        self._alone = alone or (lambda: config)
        self._worker = worker
        self._path = handlers_path
        self._preload = preload
        self._needs: dict[str, frozenset[str]] = {}
        """Handler -> modules that its calls need."""
        self._imported: set[str] = set()
        """What the child server has imported: each module with the first call that needs it."""
        self._control: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._ends: dict[int, asyncio.Future[int]] = {}
        self._doomed: set[int] = set()
        """Calls that the server is still to be told to kill."""
        self._starting = asyncio.Lock()

    async def method(self, job: Job, name: str, log: AttemptLog) -> tuple[Payload, Reward | None]:
        """Run one plain method of the job's handler. Raises what it raised, by kind; ChildDied when it died."""
        request = {
            "job": job_to_map(job),
            "method": name,
            "path": self._path,
            "max_turns": self._config.policy.max_turns,
            "artifacts": str(artifacts_of(self._config, job.id) or ""),
        }
        reply = await self._call(request, job.task.handler, log)
        return from_map(Payload, reply["payload"]), reward_from_map(reply["reward"])

    async def function(
        self, job: Job, log: AttemptLog, function: Callable[..., Any], args: tuple[Any, ...], timeout: float | None
    ) -> Any:
        """Call a module-level function for one stage of the job. Raises TimeoutError (it was killed), else as `method`.

        `timeout` (s) begins when the child does: what it waited for its turn says nothing about what it computes.
        Raises TypeError for a function that a child can't find by its name, or for arguments that can't travel.
        """
        request = {
            "job": {"id": job.id, "stage": job.stage.value},
            "handler": job.task.handler,
            "path": self._path,
            "function": handlers.name_of(function),
            "args": list(args),
        }
        return (await self._call(request, job.task.handler, log, timeout))["result"]

    async def stage(self, job: Job, limit: float, log: AttemptLog) -> Done:
        """Run a whole stage alone in a child. Raises ChildDied when it died: that is this rollout's own doing."""
        request = {
            "job": job_to_map(job),
            "path": self._path,
            "config": self._alone().model_dump(),
            "source": str(self._config.source or ""),
            "limit": limit,
            "worker": self._worker,
        }
        return done_from_map(await self._call(request, job.task.handler, log))

    async def _call(
        self, request: dict[str, Any], handler: str, log: AttemptLog, timeout: float | None = None
    ) -> dict[str, Any]:
        try:
            asked = frame(request)
        except EnvelopeError as error:
            raise TypeError(f"a child process can't be sent this: {error}") from None
        control = await self._running()
        await self._import(control, handler)
        ours, theirs = socket.socketpair()
        log_read, log_write = os.pipe()
        said = os.fdopen(log_read, "rb", 0)
        try:
            await _send(control, b"S", [theirs.fileno(), log_write])
        finally:
            theirs.close()
            os.close(log_write)
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        drain = asyncio.create_task(_drain(said, log))
        pid = 0
        try:
            pid = struct.unpack("i", await reader.readexactly(4))[0]
            ended = self._ends[pid] = asyncio.get_running_loop().create_future()
            writer.write(asked)
            try:
                async with asyncio.timeout(timeout):
                    reply = await _reply(reader, ended)
            except (asyncio.IncompleteReadError, ConnectionError):
                raise await _end_of(ended, request["job"]["stage"]) from None
            await asyncio.wait({drain}, timeout=0.2)
        except asyncio.IncompleteReadError as error:
            raise WorkerLost("the child server ended before the call began; this attempt is tried again") from error
        finally:
            writer.close()
            drain.cancel()
            self._kill(pid)
        log.keep(str(reply.get("log", "")))
        if "error" in reply:
            if reply.get("gone"):
                raise SandboxGone(str(reply["error"]))
            if reply["kind"] == Stale.kind:
                raise Stale(str(reply["error"]))
            if "late" in reply:
                raise EvaluationTimeout(str(reply["error"]), reply["late"])
            error_of = by_kind(str(reply["kind"]), str(reply["error"]))
            raise error_of or HandlerError(str(reply["error"]))
        return dict(reply)

    async def _import(self, control: socket.socket, handler: str) -> None:
        """Have the server import what the handler's calls need, so that each fork has it; a worker of few families
        stays small."""
        if handler not in self._needs:
            self._needs[handler] = frozenset(handlers.load(handler, self._path).preload)
        new = self._needs[handler] - self._imported
        if new:
            await _send(control, b"P" + " ".join(sorted(new)).encode(), [])
            self._imported |= new

    def _kill(self, pid: int) -> None:
        """Ask the server to kill a call that has not ended; it alone knows that the pid is still that call's."""
        ended = self._ends.pop(pid, None)
        if pid and (ended is None or not ended.done()):
            self._doomed.add(pid)
            self._send_kills()

    def _send_kills(self) -> None:
        """The control socket holds some hundred messages, and the server may be at an import: what does not go now
        goes later, for a call that spins ends in no other way."""
        while self._doomed and self._control is not None:
            pid = next(iter(self._doomed))
            try:
                self._control.send(b"K%d" % pid)
            except BlockingIOError:
                asyncio.get_running_loop().call_later(0.01, self._send_kills)
                return
            except OSError:  # the server is gone, and its calls with it
                self._doomed.clear()
                return
            self._doomed.discard(pid)

    async def warm(self) -> None:
        """Start the child server before the first call needs it: its imports take a second or two."""
        await self._running()

    async def _running(self) -> socket.socket:
        async with self._starting:
            if self._control is not None and self._server is not None and self._server.poll() is None:
                return self._control
            self.close()
            self._imported = set(self._preload)
            self._doomed.clear()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = [sys.executable, "-P", "-m", "workers.child_server", str(theirs.fileno()), *self._preload]
            self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=_clean())
            theirs.close()
            ours.setblocking(False)
            self._control = ours
            asyncio.get_running_loop().add_reader(ours, self._heard, ours)
            return ours

    def _heard(self, control: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            message = control.recv(64)
            if not message:
                asyncio.get_running_loop().remove_reader(control)
                return
            pid, status = struct.unpack("ii", message)
            self._doomed.discard(pid)
            ended = self._ends.get(pid)
            if ended is not None and not ended.done():
                ended.set_result(status)

    def kill_all(self) -> None:
        """End the child server and its calls at once. Callable from another thread, or where the loop is stuck."""
        control = self._control
        if control is not None:
            with contextlib.suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)  # it kills its calls whole, and ends

    def close(self) -> None:
        """End the child server; running calls are killed."""
        if self._control is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        if self._server is not None:
            try:
                self._server.wait(timeout=2)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None


def _clean() -> dict[str, str]:
    """The child's environment: nothing of ours that could hold a password.

    One hash seed for all: a task generator that draws from a set must make the same item from a seed in every process.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ROLLOUT_", "REDIS"))}
    return {**kept, "PYTHONHASHSEED": "0"}


async def _send(control: socket.socket, message: bytes, fds: list[int]) -> None:
    """Ask for a fork or an import. The server does one at a time: of hundreds of calls at once, the last ones wait."""
    while True:
        try:
            socket.send_fds(control, [message], fds)
            return
        except BlockingIOError:
            await asyncio.sleep(0.01)
        except OSError as error:
            raise WorkerLost(f"the child server is gone ({error}); this attempt is tried again") from error


async def _reply(reader: asyncio.StreamReader, ended: asyncio.Future[int]) -> Any:
    """The call's reply. Raises IncompleteReadError when it died, even where a process that it left holds the socket."""

    async def read() -> Any:
        (size,) = struct.unpack("<Q", await reader.readexactly(8))
        return wire.unpack(await reader.readexactly(size))

    task = asyncio.create_task(read())
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait({task}, timeout=LAST_BYTES)
        if not task.done():
            raise asyncio.IncompleteReadError(b"", None)
        return task.result()
    finally:
        task.cancel()


async def _end_of(ended: asyncio.Future[int], stage: str) -> Exception:
    """Why a call ended without a reply. The child server says so, unless it is gone itself."""
    try:
        return _died(await asyncio.wait_for(ended, 10.0), stage)
    except TimeoutError:
        return WorkerLost("the child server is gone, and the call with it; this attempt is tried again")


def _died(status: int, stage: str) -> Exception:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        how = f"was killed by {signal.Signals(number).name}" + (" (out of memory?)" if number == signal.SIGKILL else "")
        code = str(-number)
    else:
        code = str(os.WEXITSTATUS(status))
        how = f"ended with {code} before it answered"
    if stage == "eval":
        error: Exception = GraderError(f"the grader's process {how}")
        error.exit_code = code  # type: ignore[attr-defined]
        return error
    return ChildDied(f"the process that ran this rollout alone {how}", code)


async def _drain(said: Any, log: AttemptLog) -> None:
    """Read a child's output to its end; the last of it is kept."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), said)
    try:
        while data := await reader.read(65536):
            log.keep(data.decode("utf-8", "replace"))
    finally:
        transport.close()
