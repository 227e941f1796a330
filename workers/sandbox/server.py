"""Serves a stock of sandboxes to the workers that use them: Unix socket on this machine, TLS to the others.

One interface, msgpack bodies (`workers.sandbox.replies`). A use begins with `open`, which is checked against Redis and
answered with a key; every action shows the key in a header, and it is compared before the body is read.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

from aiohttp import web

from pipeline import wire
from pipeline.errors import ConfigError, EnvelopeError, LineError, RedisUnavailable, SandboxGone
from pipeline.queue import Queue
from workers.address import bracketed
from workers.sandbox import replies
from workers.sandbox.live import Live
from workers.sandbox.replies import KEY_HEADER, NAME_HEADER, VERSION, Fenced
from workers.sandbox.stock import Stock
from workers.sandbox.tls import Identity

log = logging.getLogger(__name__)

OPEN_BYTES = 16_384
"""Of a request that shows no key yet."""

BODY_SECONDS = 60.0
"""In which a request's body must have come."""

STRANGERS = 256
STRANGER_SECONDS = 10.0
"""Connections from other machines that have shown no key yet: how many, and for how long. A flood holds no more."""

_BACKLOG = 1024


class Server:
    """Answers for one stock. `socket_path`: in a private folder; `listen`: an address of this machine, "" for none."""

    def __init__(self, stock: Stock, queue: Queue, socket_path: Path, listen: str) -> None:
        self._stock, self._queue = stock, queue
        self._path, self._listen = socket_path, listen
        self._most = (stock.config.sandbox.transfer_mb + 1) << 20
        self._runner: web.AppRunner | None = None
        self._tcp: asyncio.Server | None = None
        self._strangers: dict[Any, asyncio.TimerHandle] = {}

    async def start(self) -> dict[str, Any]:
        """Listen; returns the address that a reference carries: `uds`, and with TCP `tcp` and `tls` (fingerprint).

        Raises ConfigError where `listen` is no address of this machine.
        """
        app = web.Application(client_max_size=self._most)
        app.router.add_post(f"/{VERSION}/open", self._open)
        app.router.add_post(f"/{VERSION}/act", self._act)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=600.0)
        await self._runner.setup()
        self._path.unlink(missing_ok=True)
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.bind(str(self._path))
        self._path.chmod(0o600)
        await web.SockSite(self._runner, local, backlog=_BACKLOG).start()
        address: dict[str, Any] = {"uds": str(self._path)}
        if self._listen:
            identity = Identity.make()
            try:
                self._tcp = await asyncio.get_running_loop().create_server(
                    self._stranger, self._listen, 0, ssl=identity.server_context(), backlog=_BACKLOG,
                    ssl_handshake_timeout=STRANGER_SECONDS,
                )  # fmt: skip
            except OSError as error:
                raise ConfigError(
                    f"sandbox.listen = {self._listen}: this machine can't listen there: {error}"
                ) from error
            port = self._tcp.sockets[0].getsockname()[1]
            address |= {"tcp": f"{bracketed(self._listen)}:{port}", "tls": identity.fingerprint}
        return address

    def _stranger(self) -> asyncio.Protocol:
        """The protocol of a new connection. The oldest stranger goes where there are too many."""
        assert self._runner is not None and self._runner.server is not None
        handler = self._runner.server()
        while len(self._strangers) >= STRANGERS:
            self._dismiss(next(iter(self._strangers)))
        self._strangers[handler] = asyncio.get_running_loop().call_later(STRANGER_SECONDS, self._dismiss, handler)
        return handler

    def _known(self, request: web.Request) -> None:
        """This connection's other side has shown that it may use a sandbox here."""
        timer = self._strangers.pop(request.protocol, None)
        if timer is not None:
            timer.cancel()

    def _dismiss(self, handler: Any) -> None:
        self._strangers.pop(handler).cancel()
        if handler.transport is not None:  # else it is closed, or in its TLS handshake, which has a limit of its own
            handler.transport.abort()

    async def close(self) -> None:
        if self._tcp is not None:
            self._tcp.close()
        for timer in self._strangers.values():
            timer.cancel()
        self._strangers.clear()
        if self._runner is not None:
            await self._runner.cleanup()
        self._path.unlink(missing_ok=True)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _open(self, request: web.Request) -> web.Response:
        try:
            asked = await _body(request, OPEN_BYTES)
            text, id, token = str(asked["sandbox"]), str(asked["id"]), str(asked["token"])
            name, stage, resume = str(asked["name"]), str(asked["stage"]), bool(asked["resume"])
        except (KeyError, TypeError, EnvelopeError, ValueError) as error:
            return web.Response(status=400, text=f"this is no request to open a sandbox: {error!r}")
        try:
            live = await self._checked(name, id, token, stage, text)
            self._known(request)
            key, turns = await live.open(stage, token, resume=resume)
        except LineError as error:
            return web.Response(body=replies.pack_error(error))
        return web.Response(body=replies.pack_result({"key": key, "turns": turns}))

    async def _checked(self, name: str, id: str, token: str, stage: str, text: str) -> Live:
        """The sandbox, if the rollout's hash says that this attempt is the one that may use it."""
        live = self._stock.get(name)
        if live is None:
            raise SandboxGone(f"sandbox {name} does not exist any more on this host")
        try:
            values = await self._queue.execute("HMGET", self._queue.key("r", id), "token", "stage", "sandbox")
        except RedisUnavailable as error:  # this host ends, with its sandboxes: no attempt of the rollout's has failed
            raise SandboxGone(f"the host of sandbox {name} ends and can't ask whose it is: {error}") from None
        current, at, sandbox = (item.decode("utf-8", "replace") if item else "" for item in values)
        if live.id != id or not token or token != current or at != stage:
            raise Fenced(f"sandbox {name} is not for this attempt of {id} any more")
        if not (sandbox == text == live.text or (stage == "init" and live.token == token)):
            raise SandboxGone(f"sandbox {name} was taken away from {id}")
        return live

    async def _act(self, request: web.Request) -> web.Response:
        live = self._stock.get(request.headers.get(NAME_HEADER, ""))
        key = request.headers.get(KEY_HEADER, "")
        if live is None or live.over:
            return web.Response(
                body=replies.pack_error(SandboxGone("the sandbox does not exist any more on this host"))
            )
        if not live.may(key):
            return web.Response(body=replies.pack_error(Fenced("another attempt uses this sandbox now")))
        self._known(request)
        try:
            asked = await _body(request, self._most)
            number, verb, args = int(asked["n"]), str(asked["verb"]), dict(asked["args"])
            turns = list(asked["turns"])
            if not 0 < number < 1 << 32 or not all(isinstance(turn, bytes) for turn in turns):
                raise ValueError(f"action {number}, or a turn before it, is of another kind")
        except (KeyError, TypeError, EnvelopeError, ValueError, OverflowError) as error:
            return web.Response(status=400, text=f"this is no action on a sandbox: {error!r}")
        return web.Response(body=await live.act(number, verb, args, turns, key))


async def _body(request: web.Request, most: int) -> Any:
    """The request's body, unpacked. Raises ValueError when it is larger than `most` bytes or does not come in time."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.content.iter_any():
                data += part
                if len(data) > most:
                    raise ValueError(f"the body is larger than {most} bytes")
    except TimeoutError:
        raise ValueError(f"the body did not come within {BODY_SECONDS:g} s") from None
    return wire.unpack(bytes(data))
