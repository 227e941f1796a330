"""Network for a task that names the hosts it needs: a proxy of this process that listens inside the sandbox.

A short-lived helper joins the sandbox's network namespace, binds a port on its 127.0.0.1 and hands the listening socket
to this process. So the sandbox keeps having no network at all, and its image needs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import SandboxError
from workers.sandbox import processes, programs
from workers.sandbox.network.allowed import Allowed
from workers.sandbox.network.proxy import Limits, Proxy

HELPER = Path(__file__).with_name("gate_helper.py")
HELPER_SECONDS = 10.0
FD = struct.Struct("@i")
# Another name for the same machine must not be sent to the proxy, which refuses it.
NO_PROXY = "localhost,127.0.0.1,::1"


class Gate:
    """An open gate. It closes by itself when the sandbox's keeper ends."""

    def __init__(self, pidfd: int, port: int, proxy: Proxy, server: asyncio.Server) -> None:
        self.port = port
        self.proxy = proxy
        self._pidfd = pidfd
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._closing: asyncio.Task[None] | None = None
        self._loop.add_reader(pidfd, self._begin_close)

    def environment(self) -> dict[str, str]:
        """What programs inside are told. No ALL_PROXY: these two schemes are all that the gate carries."""
        url = f"http://127.0.0.1:{self.port}"
        lower = {"http_proxy": url, "https_proxy": url, "no_proxy": NO_PROXY}
        return {**lower, **{name.upper(): value for name, value in lower.items()}}

    async def close(self) -> None:
        """End the listener and all connections at once. Safe twice."""
        await asyncio.shield(self._begin_close())

    def _begin_close(self) -> asyncio.Task[None]:
        if self._closing is None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._server.close()
            self._closing = self._loop.create_task(self.proxy.close(), name="close sandbox gate")
        return self._closing


async def open_gate(pid: int, hosts: Sequence[str], limits: Limits | None = None) -> Gate:
    """Let the sandbox whose keeper is `pid` reach `hosts` (see allowed.py) over HTTP and HTTPS, through a proxy.

    Raises HandlerError for a host that can't be read, SandboxError where the listener can't be made.
    """
    allowed = Allowed(hosts)
    with contextlib.ExitStack() as undo:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise SandboxError(f"no gate for the sandbox: its keeper {pid} is gone ({error.strerror})") from None
        undo.callback(os.close, pidfd)
        listener = undo.enter_context(await _listen_inside(pid))
        # The helper looked the sandbox up by its pid: that this process still lives proves that it was the one.
        if processes.has_ended(pidfd):
            raise SandboxError(f"no gate for the sandbox: its keeper {pid} ended meanwhile")
        proxy = Proxy(allowed, limits)
        port = listener.getsockname()[1]
        server = await asyncio.start_server(proxy.accept, sock=listener)
        undo.pop_all()
    return Gate(pidfd, port, proxy, server)


async def _listen_inside(pid: int) -> socket.socket:
    """A socket that listens on 127.0.0.1 inside the network namespace of `pid`. Raises SandboxError."""
    if _namespace(pid, "net") == _namespace(os.getpid(), "net"):
        raise SandboxError(f"no gate for the sandbox: its keeper {pid} has no network namespace of its own")
    # Joining the user namespace that one is in already is an error.
    users = ["-U", "--preserve-credentials"] if _namespace(pid, "user") != _namespace(os.getpid(), "user") else []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        python = [sys.executable, "-I", "-S", str(HELPER), str(theirs.fileno())]
        await _run_helper(["nsenter", "-t", str(pid), *users, "-n", "--", *python], theirs.fileno())
        ours.setblocking(False)
        # Not recv_fds, which drops the flag in Python 3.11: all that is started here would inherit the listener.
        _, parts, _, _ = ours.recvmsg(1, socket.CMSG_LEN(FD.size), socket.MSG_CMSG_CLOEXEC)
    return socket.socket(fileno=FD.unpack(parts[0][2])[0])


async def _run_helper(command: list[str], keep: int) -> None:
    """Run the helper to its end; it inherits `keep` and nothing else."""
    env = {"PATH": os.environ.get("PATH", os.defpath)}
    try:
        code, said = await programs.run(command, seconds=HELPER_SECONDS, env=env, keep=[keep])
    except TimeoutError:
        raise SandboxError(f"no gate for the sandbox: its helper took longer than {HELPER_SECONDS:g} s") from None
    except OSError as error:
        raise SandboxError(f"no gate for the sandbox: {command[0]} (util-linux) can't be started: {error}") from None
    if code:
        raise SandboxError(f"no gate for the sandbox: its helper ended with {code}: {said.rpartition(chr(10))[2]}")


def _namespace(pid: int, kind: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError as error:
        raise SandboxError(f"no gate for the sandbox: its keeper {pid} can't be looked at: {error.strerror}") from None
