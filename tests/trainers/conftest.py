"""Fixtures for tests with real trainers, which run as processes of an environment of their own (`trainers.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.services import redis_client, redis_server, redis_service, session_redis

__all__ = ["redis_client", "redis_server", "redis_service", "session_redis"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real services all; to import a trainer takes ten seconds, so each test has time for that."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.integration)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(360))
