"""How the audit reads: whole sets page by page, and keys that belong together in one step of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from pipeline.queue import Queue

PAGE = 200
"""So many rollouts or looks go to the server at once."""


async def read_pages(queue: Queue, command: str, key: str) -> AsyncIterator[list[str]]:
    """The members of a set (SSCAN), or members and scores in turn (ZSCAN). Raises RedisUnavailable."""
    cursor: Any = b"0"
    while True:
        cursor, items = await queue.execute(command, key, cursor, "COUNT", 1000)
        flat = [part for item in items for part in (item if isinstance(item, list | tuple) else (item,))]
        yield [lossy_text(item) for item in flat]
        if int(cursor) == 0:
            return


async def read_together(queue: Queue, looks: Sequence[tuple[tuple[Any, ...], ...]]) -> list[list[Any]]:
    """The replies of each tuple of commands, each tuple read in one step of the server. Raises RedisUnavailable."""
    replies: list[list[Any]] = []
    for page in portions(looks):

        async def read(page: Sequence[tuple[tuple[Any, ...], ...]] = page) -> list[Any]:
            pipe = queue.redis.pipeline(transaction=True)
            for look in page:
                for command in look:
                    pipe.execute_command(*command)
            return list(await pipe.execute())

        flat = await queue.outlast(read)
        for look in page:
            replies.append([_reply(item) for item in flat[: len(look)]])
            del flat[: len(look)]
    return replies


def _reply(value: Any) -> Any:
    """Booleans, which some clients make of 0 and 1, as the numbers that they are."""
    return int(value) if isinstance(value, bool) else value


def portions(items: Any) -> Iterable[Any]:
    """The items of a sequence, PAGE at a time."""
    return (items[at : at + PAGE] for at in range(0, len(items), PAGE))


def lossy_text(value: Any) -> str:
    """Text for people; bytes that are no UTF-8 are no reason to stop an audit."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
