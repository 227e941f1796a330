"""An agent server as NeMo Gym's callers know it, in front of the line: each `POST /run` is one rollout.

All requests share one client. A caller that hangs up cancels its rollout. What is no sample is an HTTP error, never a
reward: see `pipeline.adapters.gym.status_of`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from pipeline.adapters import gym
from pipeline.adapters.rows import AdapterError
from pipeline.by_id import Waiter
from pipeline.client import RolloutClient
from pipeline.config import DatasetConfig
from pipeline.envelope import check_task
from pipeline.errors import (
    ConfigError,
    Incomplete,
    LineError,
    MemoryHigh,
    QueueFull,
    TaskError,
    UnknownHandler,
)
from pipeline.results import Rollout
from workers.policy.rendering import Rendering

log = logging.getLogger(__name__)

BODY_BYTES = 256 << 20
BACKLOG = 4096

STATUSES: dict[type[LineError], int] = {
    TaskError: 400, UnknownHandler: 400, AdapterError: 422, QueueFull: 429, MemoryHigh: 429, Incomplete: 504,
}  # fmt: skip
"""HTTP status of an error; of any other 503: another try may go well."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """`handler`, `dataset`: how a row that names no handler becomes a task. `lane`: whose finished rollouts nobody
    else pops. `timeout`: seconds for one rollout, `dead_after` for a line without workers. `port` 0 takes a free one.
    """

    host: str = "127.0.0.1"
    port: int = 0
    handler: str | None = None
    dataset: DatasetConfig | None = None
    lane: str = "train"
    timeout: float | None = None
    dead_after: float | None = None


class GymServer:
    """Serves an open client from `start` to `stop`."""

    def __init__(self, client: RolloutClient, options: Options) -> None:
        self._client, self._options = client, options
        self._waiter = Waiter(client, options.lane, dead_after=options.dead_after)
        self._runner: web.AppRunner | None = None
        self._rendering: asyncio.Task[Rendering | None] | None = None
        self._open = 0

    async def start(self) -> str:
        """Listen; returns the URL. Raises ConfigError where the port can't be had."""
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[_said])
        app.add_routes([web.post("/run", self._run), web.get("/health", self._health)])
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._options.host, self._options.port, backlog=BACKLOG)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"the Gym server can't listen on {self._options.host}, port {self._options.port or 'any'}: "
                f"{error.strerror}"
            ) from None
        return f"http://{self._options.host}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Answer what is open with 503 and cancel its rollouts; then listen no more."""
        await self._waiter.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok", "lane": self._options.lane, "open": self._open})

    async def _run(self, request: web.Request) -> web.StreamResponse:
        options = self._options
        row = await _row(request)
        task = gym.task_of(row, handler=options.handler, dataset=options.dataset)
        check_task(task)
        self._open += 1
        try:
            rollout = await self._waiter.play(task, options.timeout)
        finally:
            self._open -= 1
        try:
            return await self._answered(row, rollout)
        finally:
            await self._client.ack(rollout)

    async def _answered(self, row: dict[str, Any], rollout: Rollout) -> web.StreamResponse:
        if rollout.outcome != "scored":
            return _failure(rollout)
        if rollout.stale and self._client.config.policy.stale == "drop":
            why = f"rollout {rollout.id} is {rollout.staleness} updates old, more than max_staleness (policy.stale)"
            return _error(503, "stale", why, rollout.id)
        rendering = await self._reader()
        read = rendering.parse if rendering is not None else None
        model = self._client.config.policy.model
        told = await asyncio.to_thread(gym.answer, row, rollout, model=model, created=int(time.time()), read=read)
        return _json(told)

    async def _reader(self) -> Rendering | None:
        """What makes text of ids: by policy.tokenizer, else by the folder that a registered server names, if it is on
        this disk. Without it the items have ids alone, which is all that a trainer reads."""
        if self._rendering is None:
            self._rendering = asyncio.create_task(self._loaded())
        return await asyncio.shield(self._rendering)

    async def _loaded(self) -> Rendering | None:
        config = self._client.config
        named = [item.tokenizer for item in (await self._client.policy()).backends if item.tokenizer]
        folder = str(config.path_of(config.policy.tokenizer)) if config.policy.tokenizer else next(iter(named), "")
        if not folder or not Path(folder).exists():
            log.warning("answers have ids and no text: no tokenizer's folder is on this disk (policy.tokenizer)")
            return None
        try:
            return await asyncio.to_thread(Rendering, folder, config.policy.renderer)
        except ConfigError as error:
            log.warning("answers have ids and no text: %s", error)
            return None


@web.middleware
async def _said(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
    """An error of the line as JSON with its sentence, under the status that tells a caller what it means."""
    try:
        return await handler(request)
    except LineError as error:
        status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 503)
        return _error(status, error.kind, str(error))


async def _row(request: web.Request) -> dict[str, Any]:
    try:
        row = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise TaskError(f"the request's body is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise TaskError(f"the request's body is a {type(row).__name__}, wanted a map")
    return row


def _failure(rollout: Rollout) -> web.Response:
    failure = rollout.failure
    kind, stage, why = (failure.kind, failure.stage, failure.why) if failure else ("none", "done", "nobody said why")
    sentence = f"rollout {rollout.id} {rollout.outcome} in {stage}: {why}"
    return _error(gym.status_of(rollout), kind, sentence, rollout.id)


def _error(status: int, kind: str, message: str, id: str = "") -> web.Response:
    log.info("answered with %d: %s", status, message)
    return _json({"error": {"message": message, "kind": kind, "rollout": id or None}}, status)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")
