"""The far side of a sandbox host: a sandbox in another process or on another machine, with the verbs of a near one.

Every action has a number and is sent again under it when its reply is lost; the host runs it once. Whether a host that
does not answer still lives is asked of Redis.
"""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import aiohttp

from pipeline import wire
from pipeline.errors import LineError, SandboxError, SandboxGone, Stale
from pipeline.interfaces import Cell, Output
from workers.sandbox.replies import KEY_HEADER, NAME_HEADER, VERSION, read_reply
from workers.sandbox.stock import reference_text

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
LARGE = 1 << 20
"""Bytes from which on a body is sent in parts, so that it does not hold the event loop."""

_NOBODY_LISTENS = (errno.ECONNREFUSED, errno.ENOENT)
"""A socket that nobody serves. Others (a full backlog, no file descriptor left here) tell nothing about the host."""

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""Seconds, seconds, count. A command may be silent for long; a way that has silently gone must still be noticed."""

PATIENCE = 30.0
"""Seconds for which a host that lives, as Redis says, and does not answer is tried again."""

Silent = Callable[[str], Awaitable[float | None]]
"""Seconds since a worker was last heard of; None when it is not listed any more."""


def this_machine() -> str:
    """Names this machine among those that share a file system: a socket's path is only good on its own one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


class Hosts:
    """Connections to sandbox hosts, shared by the attempts of one worker process.

    `silent`: asks Redis for a host's last sign of life; None where there is no Redis (a child process). `lease`:
    seconds of silence after which a host counts as dead.
    """

    def __init__(self, lease: float, silent: Silent | None = None) -> None:
        self._lease = lease
        self._silent = silent
        self._here = this_machine()
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    async def open(
        self, reference: dict[str, Any], *, id: str, token: str, stage: str, resume: bool = False
    ) -> RemoteSandbox:
        """Become the only user of a sandbox. Raises SandboxGone, Fenced, SandboxError (the host is out of reach)."""
        asked = {
            "name": reference.get("name", ""), "sandbox": reference_text(reference), "id": id, "token": token,
            "stage": stage, "resume": resume,
        }  # fmt: skip
        link = self._link(reference)
        reply = await self._until_answered(link, "open", wire.pack(asked), {}, "open")
        headers = {KEY_HEADER: str(reply["key"]), NAME_HEADER: str(reference["name"])}
        return RemoteSandbox(self, link, headers, list(reply["turns"]))

    async def until_dead(self, reference: dict[str, Any]) -> NoReturn:
        """Wait for as long as the sandbox's host lives. Raises SandboxGone."""
        link = self._link(reference)
        while True:
            await asyncio.sleep(self._lease / 2)
            if await self._is_dead(link):
                raise SandboxGone(f"sandbox host {link.host} was not heard of for {self._lease:g} s")

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in self._sessions.values()))
        self._sessions.clear()

    def _link(self, reference: dict[str, Any]) -> Link:
        """The nearest way to a sandbox's host: its socket on the same machine, else TLS to the certificate it told."""
        host, path, tcp = str(reference.get("host", "")), str(reference.get("uds", "")), str(reference.get("tcp", ""))
        if path and reference.get("node") == self._here and (os.path.exists(path) or not tcp):
            return Link(host, f"unix:{path}", "http://sandbox", True, None)
        if not tcp:
            raise SandboxGone(
                f"the sandbox is on {reference.get('node', '?')}, whose host listens on no address that other machines "
                "reach: set sandbox.listen for the INIT workers"
            )
        told = str(reference["tls"])
        return Link(host, f"tcp:{tcp}:{told}", f"https://{tcp}", False, aiohttp.Fingerprint(bytes.fromhex(told)))

    def _session(self, link: Link) -> aiohttp.ClientSession:
        session = self._sessions.get(link.name)
        if session is None or session.closed:
            connector: aiohttp.BaseConnector
            if link.near:
                connector = aiohttp.UnixConnector(path=link.name.removeprefix("unix:"), limit=0, keepalive_timeout=60)
            else:
                connector = aiohttp.TCPConnector(
                    limit=0, keepalive_timeout=60, ssl=link.fingerprint or True, socket_factory=_kept_alive
                )
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
            session = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
            self._sessions[link.name] = session
        return session

    async def _until_answered(self, link: Link, path: str, body: bytes, headers: dict[str, str], verb: str) -> Any:
        """Send until there is a reply; a host that is dead is SandboxGone."""
        since = time.monotonic()
        while True:
            try:
                return read_reply(await self._send(link, path, body, headers), verb)
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                since = await self._check(link, error, since)

    async def _send(self, link: Link, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        """One request; while its reply is awaited, the host's life is looked at twice a lease."""
        task = asyncio.create_task(self._post(link, path, body, headers))
        try:
            while not (await asyncio.wait({task}, timeout=self._lease / 2))[0]:
                if await self._is_dead(link):
                    raise SandboxGone(f"sandbox host {link.host} was not heard of for {self._lease:g} s")
            return task.result()
        finally:
            task.cancel()

    async def _post(self, link: Link, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        data: Any = body if len(body) < LARGE else io.BytesIO(body)
        async with self._session(link).post(f"{link.url}/{VERSION}/{path}", data=data, headers=headers) as reply:
            answer = await reply.read()
            if reply.status != 200:
                raise SandboxError(f"sandbox host {link.host} refused: {answer[:300].decode('utf-8', 'replace')}")
            return answer

    async def _check(self, link: Link, error: Exception, since: float) -> float:
        """Wait before the next try; `since` is when the tries began, and comes back as what it is from now on.

        While Redis is away nobody can tell whether the host lives: that time does not count. Raises SandboxGone for a
        host that is dead, SandboxError for one that lives and is out of reach.
        """
        refused = isinstance(error, OSError) and error.errno in _NOBODY_LISTENS
        if isinstance(error, aiohttp.ServerFingerprintMismatch):
            raise SandboxGone(f"another process answers at {link.url}: sandbox host {link.host} is gone") from error
        silent = await self._heard(link)
        if (refused and link.near) or silent > self._lease:
            raise SandboxGone(f"sandbox host {link.host} is gone: {error}") from error
        now = time.monotonic()
        if self._silent is not None and silent == 0.0:
            since = now
        tried = now - since
        if tried > PATIENCE + self._lease:
            raise SandboxError(f"sandbox host {link.host} can't be reached for {tried:.0f} s: {error}") from error
        await asyncio.sleep(min(0.05 + tried / 4, 1.0))
        return since

    async def _is_dead(self, link: Link) -> bool:
        return await self._heard(link) > self._lease

    async def _heard(self, link: Link) -> float:
        """Seconds since the host's last sign of life: infinite for one that is not listed, 0 where nobody can tell."""
        if self._silent is None:
            return 0.0
        silent = await self._silent(link.host)
        return math.inf if silent is None else silent


def _kept_alive(info: Any) -> socket.socket:
    made = socket.socket(*info[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


class Link:
    """One way to a host. `near`: its Unix socket, so that a refusal proves its death."""

    def __init__(self, host: str, name: str, url: str, near: bool, fingerprint: aiohttp.Fingerprint | None) -> None:
        self.host, self.name, self.url, self.near, self.fingerprint = host, name, url, near, fingerprint


class RemoteSandbox:
    """A sandbox behind its host (`pipeline.interfaces.Sandbox`). `turns`: what an earlier attempt left to replay.

    `broken`: why this attempt can't go on in it, once that is certain (it is gone, or another attempt has it).
    """

    def __init__(self, hosts: Hosts, link: Link, headers: dict[str, str], turns: list[bytes]) -> None:
        self._hosts, self._link, self._headers = hosts, link, headers
        self._number = 0
        self._pending: list[bytes] = []
        self.turns = turns
        self.broken: LineError | None = None

    def note_turn(self, turn: bytes) -> None:
        """Have a turn of the policy travel with the next action, into the journal."""
        self._pending.append(turn)

    async def bash(self, command: str, timeout: float | None = None) -> Output:
        output: Output = await self._act("bash", command=command, timeout=timeout)
        return output

    async def ipython(self, code: str, timeout: float | None = None) -> Cell:
        cell: Cell = await self._act("ipython", code=code, timeout=timeout)
        return cell

    async def read(self, path: str, start: int = 0, size: int | None = None) -> bytes:
        return bytes(await self._act("read", path=path, start=start, size=size))

    async def write(self, path: str, data: bytes) -> None:
        await self._act("write", path=path, data=data)

    async def edit(self, path: str, old: str, new: str) -> None:
        await self._act("edit", path=path, old=old, new=new)

    async def upload(self, path: str, tar: bytes) -> None:
        await self._act("upload", path=path, tar=tar)

    async def download(self, path: str) -> bytes:
        return bytes(await self._act("download", path=path))

    async def close(self) -> None:
        """Nothing is left to close: the host keeps the sandbox while the rollout names it."""

    async def _act(self, verb: str, **args: Any) -> Any:
        if self.broken is not None:
            raise self.broken
        self._number += 1
        turns, self._pending = self._pending, []
        body = wire.pack({"n": self._number, "verb": verb, "args": args, "turns": turns})
        try:
            return await self._hosts._until_answered(self._link, "act", body, self._headers, verb)
        except (SandboxGone, Stale) as error:
            self.broken = error
            raise
