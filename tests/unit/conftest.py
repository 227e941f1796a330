"""Fixtures of the unit tests: a line on fakeredis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import fakeredis
import pytest
from hypothesis import HealthCheck, settings

from pipeline.config import Config
from pipeline.queue import Queue

# A slow machine is no finding: property tests have no deadline of their own.
settings.register_profile("line", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("line")


@pytest.fixture
async def queue() -> AsyncIterator[Queue]:
    """The verbs on a server inside this process; tests/integration/test_queue_real.py runs the tests on a real one."""
    async with fakeredis.FakeAsyncRedis(server=fakeredis.FakeServer(), protocol=2) as client:
        yield Queue(client, Config())
