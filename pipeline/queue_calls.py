"""The queue's calls to Redis: keys, scripts, patience while it is away; and whether the server fits: schema, memory."""

from __future__ import annotations

import asyncio
import itertools
import uuid
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
from pipeline.envelope import OLDEST_SCHEMA, READS, SCHEMA
from pipeline.errors import ConfigError, RedisUnavailable, TooOld
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


RAISED = "RAISED "
"""How a script's refusal begins to give out what this version may not read (`above` in prelude.lua)."""


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
        self.reads = self.line_schema = SCHEMA
        self._memory_seen = float("-inf")
        self._memory_high = False
        self._sender, self._requests = uuid.uuid4().hex, itertools.count(1)

    def nonce(self) -> str:
        """Of a request to lease something: its repetition gets the same leases, and none once a later one has run."""
        return f"{self._sender}.{next(self._requests)}"

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
                if str(error).startswith(RAISED):
                    self.hear_schema(int(str(error).removeprefix(RAISED)))
                    raise TooOld(self.too_old()) from None
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

    # -- the line's schema -------------------------------------------------------------------------------------------

    @property
    def schema(self) -> int:
        """The number that messages to this line carry: the line's own, as last heard, or the newest of this version."""
        return min(self.line_schema, self.reads)

    @property
    def outdated(self) -> bool:
        """Whether the line, as last heard, has messages that this version does not read."""
        return self.line_schema > self.reads

    def hear_schema(self, number: int) -> None:
        """What a reply says of the line's schema; 0: the line has none. Safe in any thread."""
        self.line_schema = number or self.line_schema

    def too_old(self) -> str:
        """The sentence of a process that must be upgraded."""
        return (
            f"line {self.config.line.name!r} has schema {self.line_schema}, this version reads {READS}: upgrade this "
            "installation of rollout-line; until then it takes nothing from the line"
        )

    def check_current(self) -> None:
        """Raises TooOld when the line, as last heard, is above what this version reads."""
        if self.outdated:
            raise TooOld(self.too_old())

    async def look_at_schema(self) -> int | None:
        """The line's schema number, None of a fresh line. Raises TooOld, or ConfigError when it is below what is read.

        Before it, this process takes the line for one of its own number.
        """
        told = await self.execute("GET", self.key("schema"))
        if told is None:
            return None
        self.line_schema = int(told)
        self.check_current()
        if self.line_schema < OLDEST_SCHEMA:
            raise ConfigError(
                f"line {self.config.line.name!r} has schema {self.line_schema}, this version reads {READS}: finish the "
                "line's work with an older version, then raise it with one that reads both"
            )
        return self.line_schema

    async def check_schema(self) -> int:
        """The line's schema number; a fresh line takes this version's. Raises as `look_at_schema` does."""
        found = await self.look_at_schema()
        if found is None:  # asked first: a full server refuses every SET, and must still be popped from
            await self.execute("SET", self.key("schema"), SCHEMA, "NX")
            found = await self.look_at_schema()
        return found or self.schema

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
