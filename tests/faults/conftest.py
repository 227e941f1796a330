"""Fixtures of the faults tests: real servers, from tests/services.py. Marks every test here as `faults`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.services import redis_client, redis_server, redis_service, session_redis

__all__ = ["redis_client", "redis_server", "redis_service", "session_redis"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folder is the marker: `pytest -m faults` finds them all."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.faults)
