"""Connections to a Redis that may move: each new one reads the address file again, an idle one looks whether it holds.

A server that ends takes its connections with it, so clients connect anew and find the next one. One that hangs does
not: a client that waits for its reply runs into redis.socket_timeout and connects anew. What is left is a connection on
which nothing was asked while the server hung and another one took its place: before such a one is used again, the file
is read, so that no write goes to a server that nobody reads any more.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import redis.asyncio
import redis.connection
from redis.exceptions import ConnectionError as RedisConnectionError, TimeoutError as RedisTimeout

from pipeline import address_file
from pipeline.address_file import Address
from pipeline.errors import RedisUnavailable

IDLE_SECONDS = 3.0
"""After so long without a reply a connection's address is looked up again, before a command is sent on it. Shorter
than any time after which another server may take over (slurm.lock)."""


class NotPublished(RedisConnectionError):
    """There is no address to connect to. A ConnectionError: to whoever waits for Redis, no file is as no server."""


def _present(path: Path) -> Address:
    """The address now. Raises NotPublished, a sentence."""
    try:
        return address_file.read(path)
    except RedisUnavailable as error:
        raise NotPublished(str(error)) from None


class MovingConnection(redis.connection.Connection):
    """A plain connection to wherever the address file `address_file` says."""

    def __init__(self, *, address_file: Path, **options: Any) -> None:
        self._address_file = address_file
        self._epoch = 0
        super().__init__(**{**options, "health_check_interval": IDLE_SECONDS})  # type: ignore[no-untyped-call]

    def _connect(self) -> Any:
        found = _present(self._address_file)
        self.host, self.port, self.db = found.host, found.port, found.database
        self.password, self._epoch = found.password, found.epoch
        return super()._connect()  # type: ignore[no-untyped-call]

    def check_health(self) -> None:
        """Called by redis-py before a command goes out. Not its PING: the server that hung would answer it."""
        if time.monotonic() > self.next_health_check and _present(self._address_file).epoch != self._epoch:
            self.disconnect()  # type: ignore[no-untyped-call]
            self.connect()  # type: ignore[no-untyped-call]


class AsyncMovingConnection(redis.asyncio.Connection):
    """The same for asyncio; the file is read beside the event loop, since a file system may hang."""

    def __init__(self, *, address_file: Path, **options: Any) -> None:
        self._address_file = address_file
        self._epoch = 0
        super().__init__(**{**options, "health_check_interval": IDLE_SECONDS})

    async def _read(self) -> Address:
        try:
            async with asyncio.timeout(self.socket_connect_timeout):
                return await asyncio.to_thread(_present, self._address_file)
        except TimeoutError:
            raise RedisTimeout(
                f"the address of Redis in {self._address_file} can't be read: its folder hangs"
            ) from None

    async def _connect(self) -> None:
        found = await self._read()
        self.host, self.port, self.db = found.host, found.port, found.database
        self.password, self._epoch = found.password, found.epoch
        await super()._connect()  # type: ignore[no-untyped-call]

    async def check_health(self) -> None:
        """As in MovingConnection."""
        if asyncio.get_running_loop().time() > self.next_health_check and (await self._read()).epoch != self._epoch:
            await self.disconnect()
            await self.connect()  # type: ignore[no-untyped-call]
