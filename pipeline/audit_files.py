"""The audit of payload files: each that a key names is there, whole; none is left over."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.audit_reads import portions
from pipeline.payload_sweep import Named, left_over, named_files
from pipeline.payload_verbs import Home
from pipeline.queue import Queue

SWEPT = 2 * 3600.0
"""Seconds in which the maintenance has removed what is left over: it looks every hour."""


async def audit_files(queue: Queue) -> list[str]:
    """Findings, each a sentence. A key is read again before it counts: its file may have gone together with it."""
    named = list(dict.fromkeys([item async for item in named_files(queue)]))  # a scan may give a key twice
    home = await queue.home()
    if home is None:
        return [f"{len(named)} keys name payload files, but the key `files` is not there"] if named else []
    if not queue.files.on or not await queue.files.run(queue.files.has_home, home.name):
        place = queue.files.root if queue.files.on else "not set"
        return [
            f"the payload files can't be looked at here: they lie in {home.folder}/{home.name} on {home.host}, and "
            f"payload.dir is {place}"
        ]
    return [*await _missing(queue, named), *await _left(queue, home)]


async def _missing(queue: Queue, named: Sequence[Named]) -> list[str]:
    found = []
    for page in portions(named):
        sizes = await queue.files.run(_sizes, queue, page)
        for (key, reference), size in zip(page, sizes, strict=True):
            if reference is None:
                found.append(f"key {key} holds a damaged reference to a payload file")
            elif size != reference.size and await queue.execute("GET", queue.key(key)) == reference.pack():
                what = "which is not there" if size is None else f"which has {size} bytes instead of {reference.size}"
                found.append(f"key {key} names the payload file {reference.path}, {what}")
    return found


def _sizes(queue: Queue, page: Sequence[Named]) -> list[int | None]:
    return [queue.files.size(item.reference.path) if item.reference else None for item in page]


async def _left(queue: Queue, home: Home) -> list[str]:
    return [
        f"the payload file {path} ({size} bytes, {age / 3600:.1f} h old) is named by no key: `rollout work maint` "
        "removes it"
        for path, size, age in await left_over(queue, home, SWEPT)
    ]
