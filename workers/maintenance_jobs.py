"""The jobs of the maintenance plane. Each may run twice, or not at all for a period: what it does is found anew.

RQ calls them by name with no arguments, in a child process of the maintenance worker; the settings are that worker's
(`use`). What a job returns (numbers and names) is shown by RQ's tools for a day.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pipeline import server_files
from pipeline.audit import audit as audit_line
from pipeline.config import Config
from pipeline.connection import connect
from pipeline.envelope import WORKING
from pipeline.errors import SandboxError
from pipeline.payload_sweep import payload_keys, sweep as sweep_files
from pipeline.queue import Queue

log = logging.getLogger(__name__)
T = TypeVar("T")

_using: list[Config] = []


def use(config: Config) -> None:
    """The settings of this process and of the children that it forks. `redis.url` must be set."""
    _using[:] = [config]


def _config() -> Config:
    if not _using:
        raise RuntimeError("a maintenance job was called outside of `rollout work maint`: no settings are known")
    return _using[0]


def prefetch() -> dict[str, str]:
    """Make the images of `images.prefetch` ready on this machine; name -> "ready". Raises SandboxError for the rest."""
    from workers.sandbox.images import manage

    found = asyncio.run(manage.prefetch(_config()))
    failed = {name: why for name, why in found.items() if why}
    if failed:
        raise SandboxError(
            "; ".join(f"the image {name} could not be prefetched: {why}" for name, why in failed.items())
        )
    return dict.fromkeys(found, "ready")


def evict() -> dict[str, Any]:
    """Remove the longest unused images of this machine above `images.keep_gb`."""
    from workers.sandbox.images import manage

    done = manage.evict(_config())
    if done.digests:
        log.info("evicted: %s; %.1f GB are free again", ", ".join(done.names), done.freed / manage.GB)
    return {"evicted": done.digests, "freed": done.freed}


def sweep() -> list[str]:
    """Remove what dead sandbox hosts, and dead servers of Redis, left on this machine; what was removed."""
    from workers.sandbox.boxes import orphans
    from workers.sandbox.host import sandbox_root

    removed = [*orphans.sweep(sandbox_root(_config())), *map(str, server_files.sweep_runtime())]
    for what in removed:
        log.info("left behind by a dead host, removed: %s", what)
    return removed


def audit() -> list[str]:
    """The conservation audit; each finding is logged as a warning."""
    findings = _with_queue(audit_line)
    for finding in findings:
        log.warning("audit of line %s: %s", _config().line.name, finding)
    return findings


def expire() -> dict[str, int]:
    """End what nobody will ask for: dead letters over their time; payloads, tasks and files that nothing names."""
    return _with_queue(expire_line)


async def expire_line(queue: Queue) -> dict[str, int]:
    """How many dead letters went off the lists, how many payloads and tasks were given an end (`keep.gone_hours`), how
    many payload files were left over and removed."""
    seconds, _ = await queue.execute("TIME")
    over = (int(seconds) - queue.dead_seconds) * 1000
    letters = [
        int(await queue.execute("ZREMRANGEBYSCORE", queue.key("dead", stage.value), "-inf", over)) for stage in WORKING
    ]
    life, given = int(queue.config.keep.gone_hours * 3600), 0
    async for page in payload_keys(queue):
        given += await _give_an_end(queue, life, page)
    return {"letters": sum(letters), "given an end": given, "files": await sweep_files(queue)}


async def _give_an_end(queue: Queue, life: int, page: list[str]) -> int:
    return int(await queue.outlast(lambda: queue.pipe.script("expire", queue.prefix, life, *page)))


def _with_queue(call: Callable[[Queue], Awaitable[T]]) -> T:
    async def run() -> T:
        async with _queue(_config()) as queue:
            return await call(queue)

    return asyncio.run(run())


@asynccontextmanager
async def _queue(config: Config) -> AsyncIterator[Queue]:
    client = connect(config)
    try:
        queue = Queue(client, config)
        await queue.look_at_schema()  # TooOld: what looks left over to an older version may not be
        yield queue
    finally:
        await client.aclose()
