"""The queue's calls to Redis: keys, scripts, patience while it is away; and whether the server fits: schema, memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis.asyncio
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError as RedisConnectionError,
    MasterDownError,
    ReadOnlyError,
    ResponseError,
    TimeoutError as RedisTimeout,
)

from pipeline.config import Config
from pipeline.envelope import SCHEMA
from pipeline.errors import ConfigError, RedisUnavailable
from pipeline.scripts import Pipeliner

T = TypeVar("T")

AWAY = (RedisConnectionError, RedisTimeout, ConnectionError, TimeoutError)
"""What a command raises while Redis is away: nobody knows whether it ran, so it is sent again."""

REFUSING = ("LOADING", "MISCONF", "READONLY", "NOREPLICAS", "MASTERDOWN", "BUSY ", "UNBLOCKED")
"""How the error of a server begins that takes no writes for now: it loads, its disk is full, it is a replica."""


def refuses_for_now(error: ResponseError) -> bool:
    """Whether the same command may work later: the server is there, but takes no writes."""
    kinds = (ReadOnlyError, BusyLoadingError, MasterDownError)  # redis-py cuts the code off these
    return isinstance(error, kinds) or str(error).startswith(REFUSING)


MEMORY_SEEN = 0.2
"""Seconds for which a look at the server's memory holds: a trainer enqueues thousands of tasks in one go."""


class QueueCalls:
    """Calls to one Redis. Each raises RedisUnavailable when Redis stays away for more than `patience` seconds."""

    def __init__(self, client: redis.asyncio.Redis, config: Config, *, patience: float = 0.0) -> None:
        self.redis = client
        self.config = config
        self.prefix = "{" + config.line.name + "}"
        self.patience = patience
        self.closing = float("inf")
        self.pipe = Pipeliner(client)
        self.dead_seconds = int(config.keep.dead_days * 86400)
        self.lease_ms = int(config.lease.seconds * 1000)
        self._memory_seen = float("-inf")
        self._memory_high = False

    def key(self, *parts: str) -> str:
        return ":".join((self.prefix, *parts))

    def close_within(self, seconds: float) -> None:
        """From now on, wait no longer than this for a Redis that is away: the process is to end."""
        self.closing = asyncio.get_running_loop().time() + seconds

    async def outlast(self, call: Callable[[], Awaitable[T]], patience: float | None = None) -> T:
        """Repeat an idempotent call while Redis is away, for `patience` seconds (default: the queue's own)."""
        loop = asyncio.get_running_loop()
        until = loop.time() + (self.patience if patience is None else patience)
        wait = 0.02
        while True:
            try:
                return await call()
            except AWAY as error:
                if loop.time() + wait > min(until, self.closing):
                    raise RedisUnavailable(
                        f"Redis does not answer: {error}. Is it running? `rollout doctor` looks"
                    ) from error
            except ResponseError as error:
                if not refuses_for_now(error):
                    raise
                if loop.time() + wait > min(until, self.closing):
                    raise RedisUnavailable(f"Redis refuses to write: {error}. `rollout doctor` looks") from error
            await asyncio.sleep(wait)
            wait = min(wait * 1.6, 1.0)

    async def verb(self, verb: str, *args: Any, patience: float | None = None) -> Any:
        """The reply of `lua/VERB.lua`, repeated while Redis is away."""
        return await self.outlast(lambda: self.pipe.script(verb, self.prefix, *args), patience)

    async def wait_for_bell(
        self, client: redis.asyncio.Redis, key: str, timeout: float, patience: float | None = None
    ) -> None:
        """Block on a doorbell with a client of its own (one that may block). Only a hint: returning proves nothing."""

        async def wait() -> None:
            await client.execute_command("BLPOP", key, timeout)  # type: ignore[no-untyped-call]

        await self.outlast(wait, patience)

    async def execute(self, *command: Any) -> Any:
        """One plain command, repeated while Redis is away: for reads and idempotent writes."""
        return await self.outlast(lambda: self.pipe.execute(*command))

    async def check_schema(self) -> int:
        """The line's schema number; a fresh line takes this version's. Raises ConfigError when they differ."""
        told = await self.execute("GET", self.key("schema"))
        if told is None:  # asked first: a full server refuses every SET, and must still be popped from
            await self.execute("SET", self.key("schema"), SCHEMA, "NX")
            told = await self.execute("GET", self.key("schema"))
        found = int(told or SCHEMA)
        if found != SCHEMA:
            newer = (
                "upgrade this installation" if found > SCHEMA else "finish the line's work with the older version first"
            )
            raise ConfigError(
                f"line {self.config.line.name!r} has schema {found}, this version speaks {SCHEMA}: {newer}"
            )
        return found

    async def memory(self) -> tuple[int, int]:
        """(used, maxmemory) in bytes; maxmemory 0 means that none is set."""
        info = await self.outlast(lambda: self.redis.info("memory"))
        return int(info["used_memory"]), int(info.get("maxmemory", 0))

    async def memory_high(self) -> bool:
        """Above the memory mark, as of at most MEMORY_SEEN ago? A server that does not tell (fakeredis) never is."""
        clock = asyncio.get_running_loop().time()
        if clock - self._memory_seen < MEMORY_SEEN:
            return self._memory_high
        try:
            used, limit = await self.memory()
        except ResponseError:
            used, limit = 0, 0
        self._memory_seen = clock
        self._memory_high = limit > 0 and used > self.config.memory.high * limit
        return self._memory_high
