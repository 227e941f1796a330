"""`rollout work maint`: the worker of the maintenance plane."""

from __future__ import annotations

import signal

from pipeline.config import Config
from pipeline.connection import check_sync, connect_sync
from workers.cli.base import INTERRUPTED


def serve(config: Config, burst: bool) -> int:
    """Do maintenance until told to stop; the exit code. `config` has a Redis in it. Raises RedisUnavailable."""
    with connect_sync(config) as client:
        check_sync(client, config.redis.url)
    from workers import maintenance  # RQ is heavy, and no other command needs it

    return INTERRUPTED if maintenance.serve(config, burst=burst) == signal.SIGINT else 0
