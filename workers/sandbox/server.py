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
from pipeline.errors import EnvelopeError, LineError, SandboxGone
from pipeline.queue import Queue
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

_BACKLOG = 1024


class Server:
    """Answers for one stock. `socket_path`: in a private folder; `listen`: an address of this machine, "" for none."""

    def __init__(self, stock: Stock, queue: Queue, socket_path: Path, listen: str) -> None:
        self._stock, self._queue = stock, queue
        self._path, self._listen = socket_path, listen
        self._most = (stock.config.sandbox.transfer_mb + 1) << 20
        self._runner: web.AppRunner | None = None

    async def start(self) -> dict[str, Any]:
        """Listen; returns the address that a reference carries: `uds`, and with TCP `tcp` and `tls` (fingerprint)."""
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
            site = web.TCPSite(self._runner, self._listen, 0, ssl_context=identity.server_context(), backlog=_BACKLOG)
            await site.start()
            address |= {"tcp": f"{self._listen}:{self._port()}", "tls": identity.fingerprint}
        return address

    def _port(self) -> int:
        assert self._runner is not None
        names = [name for name in self._runner.addresses if isinstance(name, tuple)]
        return int(names[-1][1])

    async def close(self) -> None:
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
            key, turns = await live.open(stage, token, resume=resume)
        except LineError as error:
            return web.Response(body=replies.pack_error(error))
        return web.Response(body=replies.pack_result({"key": key, "turns": turns}))

    async def _checked(self, name: str, id: str, token: str, stage: str, text: str) -> Live:
        """The sandbox, if the rollout's hash says that this attempt is the one that may use it."""
        live = self._stock.get(name)
        if live is None:
            raise SandboxGone(f"sandbox {name} does not exist any more on this host")
        values = await self._queue.execute("HMGET", self._queue.key("r", id), "token", "stage", "sandbox")
        current, at, sandbox = (item.decode("utf-8", "replace") if item else "" for item in values)
        named = sandbox == text == live.text or (stage == "init" and live.token == token)
        if live.id != id or not token or token != current or at != stage or not named:
            raise Fenced(f"sandbox {name} is not for this attempt of {id} any more")
        return live

    async def _act(self, request: web.Request) -> web.Response:
        live = self._stock.get(request.headers.get(NAME_HEADER, ""))
        key = request.headers.get(KEY_HEADER, "")
        if live is None:
            return web.Response(
                body=replies.pack_error(SandboxGone("the sandbox does not exist any more on this host"))
            )
        if not live.may(key):
            return web.Response(body=replies.pack_error(Fenced("another attempt uses this sandbox now")))
        try:
            asked = await _body(request, self._most)
            number, verb, args, turns = int(asked["n"]), str(asked["verb"]), dict(asked["args"]), list(asked["turns"])
        except (KeyError, TypeError, EnvelopeError, ValueError) as error:
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
