"""A policy server that this process keeps in the line's registry: looked at, added, its lease renewed, struck off.

The lease is renewed by a thread with a loop and a connection of its own, so that neither a trainer that trains nor a
model that loads lets it run out.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from pipeline.backends import ENDPOINTS, KINDS, Backend, Backends, backend_id
from pipeline.config import TRAINED, Config
from pipeline.connection import connect
from pipeline.engine import Engine
from pipeline.engine_calls import EngineError
from pipeline.errors import ConfigError, LineError
from pipeline.loopback import unreachable
from pipeline.queue import Queue

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""For the thread to strike its server off; a Redis that is away does it by the lease's end."""


async def looked_at(
    engine: Engine,
    *,
    id: str = "",
    kind: str = "vllm",
    model: str = "",
    tokenizer: str = "",
    version: int | None = None,
) -> Backend:
    """What this server is, by asking it: its model, window, version, and that it generates a token.

    `version`: which weights it has, where the caller knows better; the server is told. One that is paused generates
    nothing and is not asked to. Raises EngineError, and ConfigError for a URL or a kind that is none.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind {kind!r} of a policy server is unknown (known: {', '.join(KINDS)})")
    named = backend_id(engine.url)
    about = await engine.about(model)
    paused = about.dev_mode and await engine.is_paused()
    endpoint = ENDPOINTS.get(kind, "")
    if not paused:
        endpoint = (await engine.probe(about.model, endpoint)).endpoint
    if version is not None and about.dev_mode and version != about.version:
        await engine.relabel(version)
    if kind == "vllm" and not about.dev_mode:
        log.warning("%s has no control side: the line can't update its weights (VLLM_SERVER_DEV_MODE=1)", engine.url)
    return Backend(
        id=id or named,
        url=engine.url,
        kind=kind,
        model=about.model,
        tokenizer=tokenizer or _tokenizer_in(about.root),
        endpoint=endpoint,
        window=about.window,
        version=about.version if version is None else version,
    )


def _tokenizer_in(folder: str) -> str:
    """The folder that a server's model came from, where it is one on this machine and holds a tokenizer."""
    return folder if Path(folder).is_absolute() and Path(folder, "tokenizer.json").is_file() else ""


class Registration:
    """One server in the registry, until `close`. `config` must name a Redis; `owner` is who keeps the lease.

    `alive`: asked before each renewal; once it says False the server is struck off. `policy`: whose server it is.
    """

    def __init__(
        self,
        config: Config,
        backend: Backend,
        owner: str,
        *,
        alive: Callable[[], bool] = lambda: True,
        policy: str = TRAINED,
    ) -> None:
        self.backend = dataclasses.replace(backend, owner=owner)
        self._config, self._alive, self._policy = config, alive, policy
        self._life = config.policy.backend_lease
        self._added: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"registration-{backend.id}", daemon=True)

    @property
    def id(self) -> str:
        return self.backend.id

    async def open(self) -> Self:
        """Add it, with a warning where workers of other machines can't reach it. Raises ConfigError where its id is
        somebody else's, RedisUnavailable."""
        if why := unreachable(self.backend.url, self._config.redis.url):
            log.warning("%s", why)
        self._thread.start()
        try:
            await asyncio.shield(asyncio.wrap_future(self._added))
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Strike it off and end the thread. Safe twice."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the thread has ended, and its loop is closed
                self._loop.call_soon_threadsafe(self._ending.set)
            await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._keep())
        except BaseException as error:
            if not self._added.done():
                self._added.set_exception(error)
                return
            log.exception("backend %s is not kept registered any more: its lease runs out", self.id)

    async def _keep(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with connect(self._config, name=f"registration-{self.id}") as client:
            backends = Backends(Queue(client, self._config, patience=self._life), self._policy)
            if not await backends.renew(self.id, self.backend.owner, self._life):
                await backends.add(self.backend, self._life)
            self._added.set_result(None)
            while self._alive() and not await self._ends_within(self._life / 3):
                try:
                    await self._renew(backends)
                except LineError as error:
                    log.warning("backend %s can't be kept registered now: %s; it is tried again", self.id, error)
            with contextlib.suppress(LineError):  # Redis is away: the lease runs out
                await backends.remove(self.id, self.backend.owner)

    async def _renew(self, backends: Backends) -> None:
        if self._alive() and not await backends.renew(self.id, self.backend.owner, self._life):
            log.warning("backend %s was not registered any more (its lease ran out, or Redis is a new one)", self.id)
            version = await self._version()
            await backends.add(dataclasses.replace(self.backend, version=version), self._life)

    async def _version(self) -> int | None:
        """What it has by now: nobody told Redis while it was not registered."""
        async with Engine(self.backend.url, timeout=self._config.policy.probe_timeout) as engine:
            try:
                return await engine.version()
            except EngineError as error:
                log.warning("backend %s: %s", self.id, error)
                return None

    async def _ends_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)
        return self._ending.is_set()


async def register(
    config: Config,
    url: str,
    owner: str,
    *,
    id: str = "",
    kind: str = "vllm",
    model: str = "",
    tokenizer: str = "",
    version: int | None = None,
    alive: Callable[[], bool] = lambda: True,
    policy: str = TRAINED,
) -> Registration:
    """Look at the server, add it, and keep it until `close`. Raises EngineError, ConfigError, RedisUnavailable."""
    async with Engine(url, timeout=config.policy.probe_timeout) as engine:
        backend = await looked_at(engine, id=id, kind=kind, model=model, tokenizer=tokenizer, version=version)
    return await Registration(config, backend, owner, alive=alive, policy=policy).open()
