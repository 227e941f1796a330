"""Fixtures for tests against real vLLM: one server for each model and run, and a line in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from tests.services import RedisService, redis_client, redis_server, redis_service, session_redis
from tests.vllm import servers
from tests.vllm.servers import Served

__all__ = ["redis_client", "redis_server", "redis_service", "session_redis"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real services all; the first test of a session waits for its server, so each has time for that."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.integration)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(servers.START_SECONDS + 120))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a small real model, which takes its time as real ones do. A test that changes it changes it back.

    In float32: logprobs can then be compared with those of another implementation.
    """
    server = servers.launch("smollm2", tmp_path_factory.mktemp("smollm2"), dtype="float32")
    try:
        yield servers.ready(server)
    finally:
        server.stop()


@pytest.fixture
def line(redis_service: RedisService) -> Any:
    """Makes the configuration of a line whose policy is at `url`, with `section__name` changes."""

    def configured(url: str, model: str = "smollm2", **changes: Any) -> Config:
        policy = {
            "policy.url": url, "policy.model": servers.MODEL, "policy.tokenizer": str(servers.MODELS / model),
            "policy.renderer": "qwen3", "policy.context": servers.WINDOW, "handlers.path": str(HERE),
            "limits.grace": 1.0, "lease.seconds": 30.0,
        }  # fmt: skip
        named = {name.replace("__", "."): value for name, value in changes.items()}
        return redis_service.config.changed({**policy, **named})

    return configured
