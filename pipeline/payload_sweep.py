"""Payload files that no key names: found by the audit, removed by the maintenance.

They are what a crash left between a file and its key, or between a key's end and its file's, and what expired by
itself: payloads of attempts that never committed, tasks that a dead letter needed. A file is left over when it is so
old that its key must have come, and no key names it. All old files are listed first, and the keys read then: a key that
is to name an old file has done so before, since each file has a name of its own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

from pipeline.errors import EnvelopeError
from pipeline.payload_files import Reference, reference_in
from pipeline.payload_verbs import OLD, Home
from pipeline.queue import Queue

log = logging.getLogger(__name__)

PAGE = 500
"""Keys that one script looks at."""


class Named(NamedTuple):
    """A key that names a file: "p:ID:TOKEN" or "t:GROUP", without the line's prefix. `reference` None: damaged."""

    key: str
    reference: Reference | None


async def payload_keys(queue: Queue) -> AsyncIterator[list[str]]:
    """All payloads and tasks as the scripts take them, page by page: kind, id or group, token or "" of each."""
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


async def in_trash(queue: Queue) -> set[str]:
    """Paths of the files that a worker removes in some seconds."""
    found = set()
    for data in await queue.execute("ZRANGE", queue.key("trash"), 0, -1):
        with contextlib.suppress(EnvelopeError):
            found |= {reference.path for reference in [reference_in(bytes(data))] if reference}
    return found


async def named_files(queue: Queue) -> AsyncIterator[Named]:
    """Every key that names a file."""
    async for page in payload_keys(queue):
        flat = await queue.verb("files", *page)
        for number, data in zip(flat[::2], flat[1::2], strict=True):
            kind, id, token = page[3 * int(number) : 3 * int(number) + 3]
            try:
                reference = reference_in(bytes(data))
            except EnvelopeError:
                reference = None
            yield Named(f"{kind}:{id}:{token}" if kind == "p" else f"t:{id}", reference)


async def left_over(queue: Queue, home: Home, more: float = 0.0) -> list[tuple[str, int, float]]:
    """(path, bytes, age in s) of the line's files that no key names, `more` seconds older than they need to be.

    Empty when the server started anew meanwhile: a scan over that misses keys. Raises OSError.
    """
    server = await _run_of(queue)
    age = OLD + queue.config.limits.outage + more
    old = {item[0]: item for item in await queue.files.run(lambda: list(queue.files.older(home.name, age)))}
    async for named in named_files(queue):
        if named.reference is not None:
            old.pop(named.reference.path, None)
    for path in await in_trash(queue):
        old.pop(path, None)
    return list(old.values()) if await _run_of(queue) == server else []


async def _run_of(queue: Queue) -> str:
    """Which start of which server answers."""
    about = await queue.outlast(lambda: queue.redis.info("server"))
    return str(about.get("run_id", ""))


async def sweep(queue: Queue) -> int:
    """Remove the line's files whose keys went, and those that are left over; how many. 0 without payload.dir."""
    home = await queue.home() if queue.files.on else None
    if home is None:
        return 0
    try:
        paths = [path for path, _, _ in await left_over(queue, home)]
    except OSError as error:
        log.warning(
            "the payload files of line %s can't be swept (%s, folder %s in payload.dir %s): is that mounted here?",
            queue.config.line.name, error.strerror or error, home.name, queue.files.root,
        )  # fmt: skip
        return 0
    return await queue.remove_due() + await queue.files.run(queue.files.remove, paths)
