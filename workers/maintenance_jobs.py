"""The jobs of the maintenance plane. Each may run twice, or not at all for a period: what it does is found anew.

RQ calls them by name with no arguments, in a child process of the maintenance worker; the settings are that worker's
(`use`). What a job returns (numbers and names) is shown by RQ's tools for a day.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pipeline.audit import audit as audit_line
from pipeline.config import Config
from pipeline.connection import connect
from pipeline.envelope import WORKING
from pipeline.errors import SandboxError
from pipeline.queue import Queue

log = logging.getLogger(__name__)
T = TypeVar("T")

PAGE = 500
"""Keys that one script looks at."""
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
    """Remove what dead sandbox hosts left on this machine; what was removed."""
    from workers.sandbox.boxes import orphans
    from workers.sandbox.host import sandbox_root

    removed = orphans.sweep(sandbox_root(_config()))
    for what in removed:
        log.info("left behind by a dead host, removed: %s", what)
    return list(removed)


def audit() -> list[str]:
    """The conservation audit; each finding is logged as a warning."""
    findings = _with_queue(audit_line)
    for finding in findings:
        log.warning("audit of line %s: %s", _config().line.name, finding)
    return findings


def expire() -> dict[str, int]:
    """End what nobody will ask for: dead letters that are over their time, payloads and tasks that nothing names."""
    return _with_queue(expire_line)


async def expire_line(queue: Queue) -> dict[str, int]:
    """How many dead letters went off the lists, how many payloads and tasks were given an end (`keep.gone_hours`)."""
    seconds, _ = await queue.execute("TIME")
    over = (int(seconds) - queue.dead_seconds) * 1000
    letters = [
        int(await queue.execute("ZREMRANGEBYSCORE", queue.key("dead", stage.value), "-inf", over)) for stage in WORKING
    ]
    life, given = int(queue.config.keep.gone_hours * 3600), 0
    async for page in _unnamed(queue):
        given += await _give_an_end(queue, life, page)
    return {"letters": sum(letters), "given an end": given}


async def _give_an_end(queue: Queue, life: int, page: list[str]) -> int:
    return int(await queue.outlast(lambda: queue.pipe.script("expire", queue.prefix, life, *page)))


async def _unnamed(queue: Queue) -> AsyncIterator[list[str]]:
    """Arguments of the script, for every payload and task; it tells which ones nothing names."""
    for kind in ("p", "t"):
        cursor: Any = b"0"
        while True:
            cursor, keys = await queue.execute("SCAN", cursor, "MATCH", f"{queue.prefix}:{kind}:*", "COUNT", PAGE)
            names = [key.decode("utf-8", "surrogateescape")[len(queue.prefix) + 3 :] for key in keys]
            if names:
                yield [word for name in names for word in _words(kind, name)]
            if int(cursor) == 0:
                break


def _words(kind: str, name: str) -> Iterator[str]:
    id, _, token = name.rpartition(":") if kind == "p" else (name, "", "")
    yield from (kind, id, token)


def _with_queue(call: Callable[[Queue], Awaitable[T]]) -> T:
    async def run() -> T:
        async with _queue(_config()) as queue:
            return await call(queue)

    return asyncio.run(run())


@asynccontextmanager
async def _queue(config: Config) -> AsyncIterator[Queue]:
    client = connect(config)
    try:
        yield Queue(client, config)
    finally:
        await client.aclose()
