"""Fixtures of the faults tests: real servers, from tests/services.py. Marks every test here as `faults`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.tools import SHORT, Workers
from tests.services import RedisService, redis_client, redis_server, redis_service, session_redis

__all__ = ["redis_client", "redis_server", "redis_service", "session_redis"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folder is the marker: `pytest -m faults` finds them all."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.faults)


@pytest.fixture
def workers(redis_service: RedisService, tmp_path: Path) -> Iterator[Workers]:
    """Worker processes on the shared server, with short leases."""
    processes = Workers(redis_service.config.changed(SHORT), tmp_path)
    yield processes
    processes.stop()


@pytest.fixture
def own_workers(redis_server: RedisService, tmp_path: Path) -> Iterator[Workers]:
    """The same on a server of the test's own."""
    processes = Workers(redis_server.config.changed(SHORT), tmp_path)
    yield processes
    processes.stop()


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder for sandboxes, on a short path."""
    with tempfile.TemporaryDirectory(prefix="rs-") as folder:
        yield Path(folder)
