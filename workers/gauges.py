"""What a worker looks at beside its work, for its metrics: how late its event loop turns, how much waits in a lane."""

from __future__ import annotations

import asyncio
import logging
import time

from redis.exceptions import RedisError

from pipeline.errors import RedisUnavailable
from pipeline.inspect import stage_depth
from pipeline.queue import Queue
from workers.metrics import Metrics
from workers.upkeep import Upkeep

log = logging.getLogger(__name__)

PULSE = 0.1
"""Seconds between two looks at how late the event loop turns."""
LOOK = 1.0
"""Seconds between two looks at the lanes."""


async def watch_loop(upkeep: Upkeep, metrics: Metrics) -> None:
    """Until cancelled. The heartbeat thread hears that the loop turns, too."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(PULSE)
        upkeep.pulse = time.monotonic()
        metrics.lag.observe(max(0.0, upkeep.pulse - before - PULSE))


async def watch_lanes(queue: Queue, stage: str, metrics: Metrics) -> None:
    """Until cancelled."""
    while True:
        for lane in queue.config.line.lanes:
            try:
                depth = await stage_depth(queue, stage, lane)
            except (RedisUnavailable, RedisError) as error:
                log.warning("the queue's length can't be told now: %s", error)
                continue
            metrics.length.labels(stage, lane).set(depth.ready)
            metrics.age.labels(stage, lane).set(depth.age)
        await asyncio.sleep(LOOK)
