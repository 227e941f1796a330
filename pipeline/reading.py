"""Reads the records of popped rollouts: what is small in one go, then the payloads page by page.

A batch of long trajectories is tens of megabytes. A few pages are on their way at a time: while one comes from Redis,
another is decompressed in a thread, for zstd lets go of the interpreter's lock. What needs the lock stays in the loop:
two threads that fight for it took longer than one. So the compressed bytes of a batch are never all in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeline import wire
from pipeline.errors import EnvelopeError
from pipeline.inspect import attempts_of, fields_of
from pipeline.leases import Popped
from pipeline.queue import Queue
from pipeline.results import Rollout, read

PAGE = 8
"""Payloads that are asked for and decoded together."""
PAGES = 2
"""Pages in flight at most: one that comes, and one that is decompressed."""
SMALL = 64 * 1024
"""A page of fewer bytes (compressed) is decompressed in the loop: a thread would cost more than it gives."""

Raw = bytes | EnvelopeError | None
"""A payload's bytes, why its file gives none, or nothing: there is none."""


class Head(NamedTuple):
    """All of a record but its payload: the rollout's hash, and its attempts."""

    lease: Popped
    fields: dict[str, bytes]
    attempts: list[dict[str, Any]]


async def read_all(queue: Queue, leases: Sequence[Popped]) -> list[Rollout]:
    """The records of leased rollouts, in their order. Bytes that do not decode make a `failed` one (`results.read`)."""
    heads = await asyncio.gather(*(_head(queue, lease) for lease in leases))
    free = asyncio.Semaphore(PAGES)
    pages = (heads[at : at + PAGE] for at in range(0, len(heads), PAGE))
    return [rollout for page in await asyncio.gather(*(_page(queue, page, free) for page in pages)) for rollout in page]


async def _head(queue: Queue, lease: Popped) -> Head:
    return Head(lease, *await asyncio.gather(fields_of(queue, lease.id), attempts_of(queue, lease.id)))


async def _page(queue: Queue, heads: Sequence[Head], free: asyncio.Semaphore) -> list[Rollout]:
    async with free:
        payloads = await asyncio.gather(*(_payload(queue, head) for head in heads))
        large = sum(len(payload) for payload in payloads if isinstance(payload, bytes)) >= SMALL
        inflated = await asyncio.to_thread(_inflate, payloads) if large else _inflate(payloads)
        inflated.reverse()
        return [_record(head, *inflated.pop()) for head in heads]  # each one's bytes are free once it is read


async def _payload(queue: Queue, head: Head) -> Raw:
    """Raises PayloadFilesAway: this machine can't read it, and another one may."""
    token = head.fields.get("payload", b"").decode()
    try:
        return await queue.read_payload(head.lease.id, token) if token else None
    except EnvelopeError as error:
        return error


def _inflate(payloads: list[Raw]) -> list[tuple[Raw, bool]]:
    """Each one's plain bytes, out of `payloads`; what does not decompress stays as it is: `results.read` says why."""
    payloads.reverse()
    return [_inflated(payloads.pop()) for _ in range(len(payloads))]


def _inflated(payload: Raw) -> tuple[Raw, bool]:
    try:
        return (wire.inflate(payload), True) if payload and isinstance(payload, bytes) else (payload, False)
    except EnvelopeError:
        return payload, False


def _record(head: Head, payload: Raw, inflated: bool) -> Rollout:
    return read(head.lease, head.fields, head.attempts, payload, inflated=inflated)
