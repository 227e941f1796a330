"""Workers inside the test's own process, for tests of the client and of the loop; and a place for their handlers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Stage, Task
from pipeline.results import Rollout
from tests.services import RedisService
from workers.loop import Worker

HANDLERS = Path(__file__).parents[1] / "faults"
"""Where fault_handlers.py lies."""


def configured(service: RedisService, **changes: Any) -> Config:
    """The service's configuration with `section__name` changes, and the test handlers in reach."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return service.config.changed({"handlers.path": str(HANDLERS), "limits.grace": 1.0, **named})


@contextlib.asynccontextmanager
async def serving(config: Config, *stages: str, slots: int = 8) -> AsyncIterator[dict[str, Worker]]:
    """One worker for each of these stages (all of them by default); they drain and end with the block."""
    config = config.changed({"limits.loop_dead": 3600.0})  # these workers share the tests' own process: it must not end
    crew = {stage: Worker(config, Stage(stage), slots) for stage in stages or ("init", "run", "eval")}
    tasks = [asyncio.create_task(worker.run()) for worker in crew.values()]
    try:
        yield crew
    finally:
        for worker in crew.values():
            worker.stop()
        await asyncio.gather(*tasks)


async def all_of(client: RolloutClient, tasks: list[Task], samples: int = 1, timeout: float = 30.0) -> list[Rollout]:
    """Enqueue, pop all, ack; in the order of the ids."""
    ids = await client.enqueue(tasks, samples=samples)
    batch = await client.pop(len(ids), timeout=timeout)
    await client.ack(batch)
    return sorted(batch, key=lambda rollout: ids.index(rollout.id))
