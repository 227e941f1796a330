"""Dead letters: the copies of failed rollouts that are kept for people; and how one becomes a new rollout."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import dataclass
from typing import Any

from pipeline.envelope import WORKING, Envelope, decode, encode, rollout_id
from pipeline.errors import EnvelopeError, TaskError
from pipeline.inspect import fields_of
from pipeline.queue import Queue

PAGE = 500
"""Letters that are read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """One dead letter. `died`: Unix time. `requeued`: the rollout that was made of it, or empty."""

    id: str
    group: str
    lane: str
    stage: str
    kind: str
    why: str
    died: float
    requeued: str


async def letters(queue: Queue, stage: str = "", start: int = 0, count: int = 50) -> list[Letter]:
    """Dead letters of a stage (or of all), newest first."""
    found: list[tuple[float, str, str]] = []
    for name in [stage] if stage else [item.value for item in WORKING]:
        rows = await queue.execute("ZREVRANGE", queue.key("dead", name), 0, start + count - 1, "WITHSCORES")
        flat = [part for row in rows for part in row] if rows and isinstance(rows[0], list | tuple) else rows
        found += [(float(score), id.decode(), name) for id, score in zip(flat[::2], flat[1::2], strict=True)]
    found.sort(reverse=True)
    out: list[Letter] = []
    for at in range(start, min(start + count, len(found)), PAGE):
        page = found[at : min(at + PAGE, start + count)]
        read = await asyncio.gather(*(_letter(queue, id, name, died) for died, id, name in page))
        out += [letter for letter in read if letter is not None]
    return out


async def _letter(queue: Queue, id: str, stage: str, died: float) -> Letter | None:
    names = ("group", "lane", "kind", "why", "requeued")
    row = await queue.execute("HMGET", queue.key("letter", id), *names)
    values = {name: item.decode("utf-8", "replace") if item else "" for name, item in zip(names, row, strict=True)}
    return Letter(id=id, stage=stage, died=died / 1000, **values) if values["group"] else None


def history(letter: dict[str, bytes]) -> list[dict[str, Any]]:
    """The attempts that a letter's hash holds, oldest first."""
    return list(json.loads(letter.get("history", b"[]")))


async def requeue(queue: Queue, id: str, *, again: bool = False) -> str:
    """Make a new rollout of a dead letter: the same task, a group of one, `retry_of` the old id. Returns the new id.

    Safe to repeat: the letter takes the new id before the line does, and is marked when the line has it. Raises
    TaskError: no such letter, one that was requeued already (unless `again`), or a task that is not kept any more.
    Raises QueueFull or MemoryHigh: nothing was written then.
    """
    letter = await fields_of(queue, id, "letter")
    if not letter:
        raise TaskError(
            f"there is no dead letter {id}: `rollout dead` lists them (kept {queue.config.keep.dead_days:g} days)"
        )
    if "requeued_in" in letter and not again:
        raise TaskError(f"{id} was requeued already, as {letter['requeued'].decode()}: say --again for one more")
    group = letter["group"].decode()
    try:
        task = await queue.read_task(group)
    except EnvelopeError as error:
        raise TaskError(f"the task of group {group} can't be read ({error}): enqueue it anew") from None
    if task is None:
        raise TaskError(f"the task of group {group} is not kept any more: enqueue it anew")
    try:
        old = decode(Envelope, letter.get("env", b""))
    except EnvelopeError as error:
        raise TaskError(
            f"{id} can't be requeued, its envelope does not decode ({error}): enqueue its task anew"
        ) from None
    return await _enqueue(queue, id, group, task, old, again)


async def _enqueue(queue: Queue, id: str, group: str, task: bytes, old: Envelope, again: bool) -> str:
    key, fresh = queue.key("letter", id), f"{group}-retry-{os.urandom(3).hex()}"
    if again:
        await queue.execute("HSET", key, "requeued", rollout_id(fresh, 0))
    else:
        await queue.execute("HSETNX", key, "requeued", rollout_id(fresh, 0))
    new: str = (await queue.execute("HGET", key, "requeued")).decode()
    fresh = new.rpartition(".")[0]
    envelope = Envelope(
        id=new, group=fresh, handler=old.handler, lane=old.lane, priority=old.priority, policy=old.policy,
        enqueued=time.time(), retry_of=id, extra=old.extra,
    )  # fmt: skip
    await queue.enqueue(
        fresh, task, [(new, encode(envelope, queue.schema))], lane=old.lane, priority=old.priority, samples=1,
        handler=old.handler,
    )  # fmt: skip
    await queue.execute("HSET", key, "requeued_in", "1")
    return new
