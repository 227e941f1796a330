"""Fixtures of the unit tests: a line on fakeredis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import fakeredis
import pytest

from pipeline.config import Config
from pipeline.queue import Queue


@pytest.fixture
async def queue() -> AsyncIterator[Queue]:
    """The verbs on a server inside this process; tests/integration/test_queue_real.py runs the tests on a real one."""
    async with fakeredis.FakeAsyncRedis(server=fakeredis.FakeServer(), protocol=2) as client:
        yield Queue(client, Config())
