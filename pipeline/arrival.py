"""Waiting for a Redis that may move and is not there yet: jobs start in any order, and it may be on its way.

A Redis with one address is asked once: a wrong address is told at once, within redis.connect_timeout.
"""

from __future__ import annotations

import asyncio
import logging
import time

import redis
import redis.asyncio

from pipeline.address_file import file_of
from pipeline.config import Config
from pipeline.connection import ServerFacts, check, check_sync
from pipeline.errors import RedisUnavailable

log = logging.getLogger(__name__)

LOOK = 0.5
"""Seconds between two looks."""
SAY_AGAIN = 60.0
"""Seconds until it is said again what is waited for."""


class _Patience:
    """How long it has been waited, and whether that is too long."""

    def __init__(self, config: Config) -> None:
        self._limit = config.limits.outage if file_of(config) is not None else 0.0
        self._began = time.monotonic()
        self._said = float("-inf")

    def bear(self, error: RedisUnavailable) -> None:
        """Say what is waited for. Raises the error itself where nothing is, RedisUnavailable after limits.outage."""
        now = time.monotonic()
        if not self._limit:
            raise error
        if now - self._began >= self._limit:
            raise RedisUnavailable(f"no Redis came within limits.outage = {self._limit:g} s: {error}") from None
        if now - self._said >= SAY_AGAIN:
            self._said = now
            log.warning("waiting for Redis: %s", error)

    def end(self) -> None:
        if self._said > float("-inf"):
            log.warning("Redis is there, after %.1f s", time.monotonic() - self._began)


async def arrived(client: redis.asyncio.Redis, config: Config) -> ServerFacts:
    """What the server says of itself, as soon as there is one. Raises RedisUnavailable (see the head)."""
    patience = _Patience(config)
    while True:
        try:
            facts = await check(client)
        except RedisUnavailable as error:
            patience.bear(error)
            await asyncio.sleep(LOOK)
        else:
            patience.end()
            return facts


def arrived_sync(client: redis.Redis, config: Config) -> ServerFacts:
    """`arrived` for plain code; a signal's exception ends it."""
    patience = _Patience(config)
    while True:
        try:
            facts = check_sync(client)
        except RedisUnavailable as error:
            patience.bear(error)
            time.sleep(LOOK)
        else:
            patience.end()
            return facts
