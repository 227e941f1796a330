"""Real services for tests: found or said to be missing, started, configured. Fixtures for integration and faults.

A service that is missing is a skip that names the mend on a laptop, and a failure where CI=true.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis
import redis.asyncio

from pipeline import server
from pipeline.config import Config
from pipeline.connection import connect, connect_sync

# Seconds short enough for tests; the proportions are those of the defaults.
QUICK: dict[str, Any] = {"lease.seconds": 3.0, "lease.beat": 0.5, "lease.tick": 0.2, "retry.backoff": 0.05}
MEND = {
    "redis-server": "say `make system`, or install redis-server >= 7",
    "bwrap": "say `make system`, or install bubblewrap",
    "apptainer": "say `make system`, or install Apptainer >= 1.2",
    "nsenter": "install util-linux",
    "chromium-headless-shell": "say `make system`, or install Debian's chromium-headless-shell",
    "busybox": "say `make system`, or install busybox-static",
    **dict.fromkeys(
        ("sbatch", "slurmctld", "slurmd", "munged"),
        "say `make system`, or install slurmctld, slurmd, slurm-client and munge",
    ),
}


def require(program: str) -> str:
    """The program's path; without it the test is skipped, or fails where CI=true."""
    path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")  # not on every user's PATH
    if path is None:
        sentence = f"{program} is not on PATH: {MEND.get(program, 'install it')}"
        if os.environ.get("CI") == "true":
            pytest.fail(sentence, pytrace=False)
        pytest.skip(sentence)
    return path


@dataclass(frozen=True)
class RedisService:
    """A real server and a configuration that points to it. Time limits are short (QUICK)."""

    server: server.Server
    config: Config

    @property
    def url(self) -> str:
        """unix:///...; the password is in `password_file`."""
        return self.server.url

    @property
    def password_file(self) -> str:
        """Path of the file whose first line is the password."""
        return self.server.password_file

    @property
    def pid(self) -> int:
        """The server's process."""
        return self.server.pid

    def client(self, *, blocking: bool = False) -> redis.asyncio.Redis:
        """A new asyncio client; the test closes it (`async with`)."""
        return connect(self.config, blocking=blocking)

    def client_sync(self) -> redis.Redis:
        """A new plain client; the test closes it (`with`)."""
        return connect_sync(self.config)


def _service(started: server.Server) -> RedisService:
    return RedisService(started, started.configured(Config()).changed(QUICK))


@pytest.fixture
def redis_server() -> Iterator[RedisService]:
    """A server of this test's own: it may be killed, frozen, filled."""
    require("redis-server")
    with server.start() as started:
        yield _service(started)


@pytest.fixture(scope="session")
def session_redis() -> Iterator[RedisService]:
    """One server for the whole run; use `redis_service`, which empties it."""
    require("redis-server")
    with server.start() as started:
        yield _service(started)


@pytest.fixture
def redis_service(session_redis: RedisService) -> RedisService:
    """The run's one server, emptied: the quick choice for a test that leaves the server itself alone."""
    with session_redis.client_sync() as client:
        client.flushall()
    return session_redis


@pytest.fixture
async def redis_client(redis_service: RedisService) -> Any:
    """An asyncio client of the emptied shared server, closed after the test."""
    async with redis_service.client() as client:
        yield client
