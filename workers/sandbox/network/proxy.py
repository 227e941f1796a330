"""An HTTP proxy in the host process that lets a sandbox reach the hosts that its task allows, and no others.

CONNECT carries TLS untouched; requests with an absolute `http://` URI are read, checked and written anew by h11 (so
nothing that two parsers could read in two ways passes through), each on a connection of its own. Names are resolved
here after the check, and the address that was checked is the one that is connected to. Nothing is looked at inside a
tunnel: a host that serves other names on the same address can serve those too.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass

import h11

from workers.sandbox.network.allowed import PORTS, Allowed, Target, target_of
from workers.sandbox.network.wire import Traffic, Wire

log = logging.getLogger(__name__)
TOLD = 20
"""Refused targets of one sandbox that are logged."""
_ABSOLUTE = re.compile(r"http://(?P<authority>[^/?#]*)(?P<path>/[^#]*)?(?P<query>\?[^#]*)?", re.IGNORECASE)
_HOP_BY_HOP = frozenset(
    b"connection expect keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer upgrade".split()
)
_BROKEN = (OSError, EOFError, h11.ProtocolError)
"""What a peer can do to a connection; a time-out is an OSError too."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds for a request's head, for connecting and without any byte; connections at once; bytes of a head."""

    head: float = 30.0
    connect: float = 15.0
    idle: float = 300.0
    connections: int = 64
    head_bytes: int = 32_768


class Refused(Exception):
    """The request is answered by the proxy itself, with this status and sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Proxy:
    """Serves the connections that `accept` is given, until `close`. `traffic` counts bytes, `denied` requests."""

    def __init__(self, allowed: Allowed, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.traffic = Traffic()
        self.denied = 0
        self._allowed = allowed
        self._open: set[asyncio.Task[None]] = set()
        self._closed = False
        self._told: set[Target] = set()
        # A name server that does not answer holds up this sandbox's threads only.
        self._resolver = ThreadPoolExecutor(max_workers=4, thread_name_prefix="resolve")

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Callback of `asyncio.start_server`."""
        # Accepted just before the listener closed, or far more than the sandbox was told: they cost this process files.
        if self._closed or len(self._open) >= 2 * self.limits.connections:
            writer.transport.abort()
            return
        crowded = len(self._open) >= self.limits.connections
        task = asyncio.create_task(self._serve(reader, writer, crowded), name="sandbox proxy")
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def close(self) -> None:
        """End all connections at once."""
        self._closed = True
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._resolver.shutdown(wait=False, cancel_futures=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, crowded: bool) -> None:
        """One connection of the sandbox: its requests one after the other."""
        client = Wire(reader, writer, h11.SERVER, self.limits.head_bytes)
        async with aclosing(client):
            try:
                if crowded:
                    raise Refused(503, f"{self.limits.connections} connections are open already: close some")
                while await self._exchange(client):
                    pass
            except Refused as refused:
                await _answer(client, refused.status, str(refused))
            except h11.RemoteProtocolError as error:
                await _answer(client, error.error_status_hint, f"this is no proper HTTP request: {error}")
            except TimeoutError:
                if client.left_over():  # a connection that is only kept for later just ends
                    await _answer(client, 408, f"no whole request came in {self.limits.head:g} s")
            except _BROKEN:
                return

    async def _exchange(self, client: Wire) -> bool:
        """One request and its response. False when the connection is over."""
        async with asyncio.timeout(self.limits.head):
            request = await client.event()
        if not isinstance(request, h11.Request):
            return False
        target, path = _read_target(request)
        self._check(target)
        upstream = await self._dial(target)
        async with aclosing(upstream):
            if request.method == b"CONNECT":
                await client.send(h11.Response(status_code=200, headers=[], reason=b"Connection established"))
                await self._carry(upstream, _tunnel(client, upstream))
                return False
            head = h11.Request(method=request.method, target=path, headers=_request_headers(request, target))
            try:
                await self._carry(upstream, _forward(client, upstream, head))
            except _BROKEN as error:
                raise Refused(502, f"{target} broke off: {error or type(error).__name__}") from None
        return client.next_cycle()

    async def _carry(self, upstream: Wire, work: Coroutine[None, None, None]) -> None:
        """Do the work for as long as bytes come from or go to `upstream`. Raises what broke first."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self.limits.idle) as clock:

            def moved() -> None:
                if not clock.expired():
                    clock.reschedule(loop.time() + self.limits.idle)

            upstream.moved = moved
            try:
                await work
            except ExceptionGroup as group:
                raise group.exceptions[0] from None

    def _check(self, target: Target) -> None:
        if not self._allowed.permits(target):
            self.denied += 1
            self._tell(target, target.host if target.port in PORTS and ":" not in target.host else str(target))
            raise Refused(403, f"{target} can't be reached from here; what can: {self._allowed}")

    def _tell(self, target: Target, pattern: str) -> None:
        """For the person who wrote the task: what is said inside is read by the policy, which can't change the task."""
        if target not in self._told and len(self._told) < TOLD:
            self._told.add(target)
            log.info("a sandbox was refused %s; its task allows that by `network: {allow: [%r]}`", target, pattern)

    async def _dial(self, target: Target) -> Wire:
        """Resolve, check what was found, connect to exactly that. Raises Refused."""
        try:
            async with asyncio.timeout(self.limits.connect):
                addresses = await self._resolve(target)
                return await self._connect(target, addresses)
        except TimeoutError:
            raise Refused(504, f"{target} did not answer in {self.limits.connect:g} s") from None

    async def _resolve(self, target: Target) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                self._resolver, lambda: socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
            )
        except (OSError, UnicodeError) as error:
            raise Refused(502, f"{target.host} has no address here: {error}") from None
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        public = [address for address in addresses if self._allowed.reaches(address, target.port)]
        if not public:
            self.denied += 1
            self._tell(target, str(Target(addresses[0], target.port)))
            raise Refused(
                403, f"{target.host} can't be reached from here: its addresses are not public ({', '.join(addresses)})"
            )
        return public

    async def _connect(self, target: Target, addresses: list[str]) -> Wire:
        reason: OSError | None = None
        for address in addresses:
            try:
                reader, writer = await asyncio.open_connection(address, target.port)
            except OSError as error:
                reason = error
                continue
            return Wire(reader, writer, h11.CLIENT, self.limits.head_bytes, self.traffic)
        raise Refused(502, f"{target} can't be reached: {reason}")


def _read_target(request: h11.Request) -> tuple[Target, bytes]:
    """Whom the request is for, and the path to ask there (empty for CONNECT). Raises Refused."""
    text = request.target.decode("ascii")
    try:
        if request.method == b"CONNECT":
            return target_of(text), b""
        parts = _ABSOLUTE.fullmatch(text)
        if parts is None:
            raise ValueError("a proxy takes `http://HOST/...` without a fragment, or CONNECT for https")
        names = [name for name, _ in request.headers]
        if b"transfer-encoding" in names and b"content-length" in names:
            raise ValueError("Content-Length and Transfer-Encoding contradict each other")
        target = target_of(parts["authority"], 80)
    except ValueError as error:
        raise Refused(400, f"{request.method.decode('ascii')} {text[:200]}: {error}") from None
    return target, ((parts["path"] or "/") + (parts["query"] or "")).encode("ascii")


def _request_headers(request: h11.Request, target: Target) -> list[tuple[bytes, bytes]]:
    """The request's headers for the next server: Host is the target's, whatever the client wrote."""
    host = str(target).removesuffix(":80").encode("ascii")
    kept = [(name, value) for name, value in _end_to_end(request.headers) if name != b"host"]
    return [(b"host", host), *kept, (b"connection", b"close")]


def _response_headers(response: h11.Response) -> list[tuple[bytes, bytes]]:
    """The response's headers for the client; h11 frames it anew if its length was not given."""
    framed = any(name == b"transfer-encoding" for name, _ in response.headers)
    dropped = {b"transfer-encoding", b"content-length"} if framed else set()
    return [(name, value) for name, value in _end_to_end(response.headers) if name not in dropped]


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Without those that concern one connection only: the known ones, and those that `Connection` names."""
    named = {part.strip().lower() for name, value in headers if name == b"connection" for part in value.split(b",")}
    dropped = _HOP_BY_HOP | (named - {b"content-length", b"transfer-encoding"})
    return [(name, value) for name, value in headers if name not in dropped]


async def _answer(client: Wire, status: int, sentence: str) -> None:
    """The proxy's own answer, and the end of the connection. The sentence is the reason too: curl and pip show that."""
    if client.answered:
        return
    plain = sentence.encode("ascii", "replace")
    body = plain + b"\n"
    headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(body))), ("Connection", "close")]
    try:
        async with asyncio.timeout(5):
            await client.send(h11.Response(status_code=status, headers=headers, reason=re.sub(rb"[^ -~]", b" ", plain)))
            if not client.bodiless:
                await client.send(h11.Data(data=body))
            await client.send(h11.EndOfMessage())
            await client.linger()
    except _BROKEN:
        return  # who is gone needs no answer


async def _tunnel(client: Wire, upstream: Wire) -> None:
    """Bytes in both directions until both ends have closed."""
    await upstream.write(client.left_over())
    async with asyncio.TaskGroup() as group:
        group.create_task(_pump(client, upstream))
        group.create_task(_pump(upstream, client))


async def _pump(source: Wire, sink: Wire) -> None:
    while data := await source.read():
        await sink.write(data)
    await sink.write_eof()


async def _forward(client: Wire, upstream: Wire, head: h11.Request) -> None:
    """The request up and the response down; a server may answer before it has heard all."""
    await upstream.send(head)
    async with asyncio.TaskGroup() as group:
        upload = group.create_task(_upload(client, upstream))
        await _download(client, upstream)
        upload.cancel()


async def _upload(client: Wire, upstream: Wire) -> None:
    while True:
        event = await client.event()
        if isinstance(event, h11.Data):
            await upstream.send(h11.Data(data=event.data))
        else:
            await upstream.send(h11.EndOfMessage())
            return


async def _download(client: Wire, upstream: Wire) -> None:
    while True:
        event = await upstream.event()
        if isinstance(event, h11.Response):
            headers = _response_headers(event)
            await client.send(h11.Response(status_code=event.status_code, headers=headers, reason=event.reason))
        elif isinstance(event, h11.Data):
            await client.send(h11.Data(data=event.data))
        elif isinstance(event, h11.EndOfMessage):
            await client.send(h11.EndOfMessage())
            return
