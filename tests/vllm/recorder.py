"""A proxy before a real server that writes down each generate: what was asked, and what was answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from aiohttp import web

log = logging.getLogger(__name__)

GENERATE = ("/inference/v1/generate", "/v1/completions")
_HOP = ("host", "content-length", "transfer-encoding", "connection")
"""Headers that belong to one connection."""


@dataclass
class Exchange:
    """One generate, which came in at `began` (Unix time).

    `answer` is None until the reply is there; `cut`: a connection was closed before that, the caller's or ours.
    """

    id: str
    path: str
    asked: dict[str, Any]
    began: float
    status: int = 0
    answer: dict[str, Any] | None = None
    cut: bool = False

    @property
    def prompt(self) -> list[int]:
        return list(self.asked["token_ids"] if "token_ids" in self.asked else self.asked["prompt"])

    @property
    def choice(self) -> dict[str, Any]:
        """The reply's one choice."""
        assert self.answer is not None, f"{self.id} was not answered"
        choice: dict[str, Any] = self.answer["choices"][0]
        return choice

    @property
    def ids(self) -> list[int]:
        return list(self.choice["token_ids"])

    @property
    def logprobs(self) -> list[float]:
        said = self.choice["logprobs"]
        if "token_logprobs" in said:  # /v1/completions
            return list(said["token_logprobs"])
        return [entry["logprob"] for entry in said["content"]]

    @property
    def versions(self) -> list[tuple[int, int, int]] | None:
        """(version, start, end) over `ids`; "default" is 0. None where the server does not say."""
        runs = self.choice.get("weight_versions")
        return runs and [(int(run["version"].replace("default", "0")), run["start"], run["end"]) for run in runs]


@dataclass
class Recorder:
    """A running proxy at `url`; `exchanges` in the order in which they came in."""

    url: str
    exchanges: list[Exchange] = field(default_factory=list)
    away: bool = False
    _open: set[asyncio.Task[Any]] = field(default_factory=set)

    def go_away(self) -> None:
        """As a network that fails: what is open is cut, what comes is refused, until `come_back`."""
        self.away = True
        for task in self._open:
            task.cancel()

    def come_back(self) -> None:
        self.away = False

    @property
    def calls(self) -> list[Exchange]:
        """Those that are no probes: a call carries an id of its rollout's."""
        return [exchange for exchange in self.exchanges if exchange.id]

    def of(self, rollout: str) -> list[Exchange]:
        """The exchanges of one rollout, in order: its request ids begin with its own id."""
        return [exchange for exchange in self.exchanges if exchange.id.startswith(f"{rollout}-")]


class _Proxy:
    def __init__(self, upstream: str, session: aiohttp.ClientSession) -> None:
        self._upstream, self._session = upstream, session
        self.recorder = Recorder("")

    async def serve(self, request: web.Request) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self.recorder._open.add(task)
        try:
            if not self.recorder.away:
                return await self._forward(request)
        except aiohttp.ClientError as error:  # the server is not there: neither are we
            log.debug("%s: %r", request.path, error)
        except asyncio.CancelledError:
            if not self.recorder.away:
                raise
        finally:
            self.recorder._open.discard(task)
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=502)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        exchange = None
        if request.method == "POST" and request.path in GENERATE:
            asked = orjson.loads(body)
            id = request.headers.get("X-Request-Id", str(asked.get("request_id", "")))
            exchange = Exchange(id, request.path, asked, time.time())
            self.recorder.exchanges.append(exchange)
        url = self._upstream + request.path_qs
        try:
            async with self._session.request(request.method, url, data=body, headers=headers) as reply:
                content = await reply.read()
        except (asyncio.CancelledError, aiohttp.ClientError):
            if exchange is not None:
                exchange.cut = True
            raise
        if exchange is not None:
            exchange.status = reply.status
            if reply.content_type == "application/json":
                exchange.answer = orjson.loads(content)
        kept = {name: value for name, value in reply.headers.items() if name.lower() not in _HOP}
        return web.Response(status=reply.status, body=content, headers=kept)


@contextlib.asynccontextmanager
async def recording(upstream: str) -> AsyncIterator[Recorder]:
    """Serve before `upstream` in the running loop. A caller that hangs up hangs up on the server too."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
        proxy = _Proxy(upstream, session)
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", proxy.serve)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        proxy.recorder.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield proxy.recorder
        finally:
            await runner.cleanup()
