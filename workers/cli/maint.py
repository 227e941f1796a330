"""`rollout work maint`: the worker of the maintenance plane."""

from __future__ import annotations

import logging
import os
import signal
import time

from pipeline.arrival import arrived_sync
from pipeline.config import Config
from pipeline.connection import connect_sync
from pipeline.errors import RedisUnavailable
from workers.cli.base import INTERRUPTED, located

log = logging.getLogger(__name__)

AGAIN = 5.0
"""Seconds until a Redis that was given up is asked again."""


def keep_and_serve(config: Config, burst: bool) -> int:
    """`serve`, and beside it, in a job of `rollout slurm up`, the keeper of the line's jobs; the exit code.

    The keeper does without Redis, and nobody else replaces what ends: while it works, a Redis that is away for longer
    than limits.outage is waited for anew. Raises RedisUnavailable elsewhere.
    """
    from workers.slurm.keeper import KeeperThread

    with KeeperThread.of_job(config, os.environ) as keeper:
        while True:
            try:
                return serve(located(config, wait=True), burst)
            except RedisUnavailable as error:
                if burst or not keeper.works:
                    raise
                log.error("%s", error)
                time.sleep(AGAIN)


def serve(config: Config, burst: bool) -> int:
    """Do maintenance until told to stop; the exit code. `config` has a Redis in it. Raises RedisUnavailable."""
    with connect_sync(config) as client:
        arrived_sync(client, config)
    from workers import maintenance  # RQ is heavy, and no other command needs it

    return INTERRUPTED if maintenance.serve(config, burst=burst) == signal.SIGINT else 0
