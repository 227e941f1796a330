"""Who works on a line, which schemas each of them reads, and how the line's number is raised.

A worker and a trainer's client say what they read with each beat. Versions that know schema 1 alone say nothing of it,
and their clients nothing at all: those are known by a pop within the last hour that does not say it, or by what they
hold.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pipeline import inspect
from pipeline.queue import Queue

CLIENT = "client"
"""Kind of a process that pops."""

CLAIM_LIFE = 3600.0
"""Seconds for which a line remembers a claim (claim.lua, claim_groups.lua)."""


@cache
def package_version() -> str:
    """Of this installation; "source" where it runs from a folder."""
    try:
        return version("rollout-line")
    except PackageNotFoundError:
        return "source"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A worker, or a trainer's client. `kind`: its stage, or CLIENT. `reads`: its newest schema. `silent`: seconds."""

    name: str
    kind: str
    version: str
    reads: int
    silent: float


async def members(queue: Queue) -> list[Member]:
    """Those that live, workers first; of an older version also clients that may have ended within the hour."""
    alive = [
        Member(
            name=item["worker"], kind=item["stage"], version=item.get("version", ""), reads=int(item.get("reads", 1)),
            silent=item["silent"],
        )
        for item in await inspect.workers(queue)
    ]  # fmt: skip
    clients = {name: about async for name, about in _clients(queue)}
    return alive + [clients[name] for name in sorted(clients)] + await _silent_clients(queue, clients)


async def _clients(queue: Queue) -> AsyncIterator[tuple[str, Member]]:
    front = queue.key("client", "")
    async for key in _scan(queue, front):
        told, left = await queue.execute("GET", key), await queue.execute("PTTL", key)
        if told is not None:
            about: dict[str, Any] = json.loads(told)
            name = key.removeprefix(front)
            silent = max(0.0, about["life"] - int(left) / 1000)
            yield name, Member(name=name, kind=CLIENT, version=about["version"], reads=about["reads"], silent=silent)


async def _silent_clients(queue: Queue, known: dict[str, Member]) -> list[Member]:
    """Clients that do not say what they read: by their last pop, and by what they hold. One that said it is over."""
    silent: dict[str, float] = {}
    over = set(known)
    front = queue.key("claim", "")
    async for key in _scan(queue, front):
        name, _, of = key.removeprefix(front).rpartition(":")
        left = int(await queue.execute("PTTL", key))
        if of in ("done", "groups") and await queue.execute("HEXISTS", key, "reads"):
            over.add(name)
        elif of in ("done", "groups") and left >= 0:
            silent[name] = min(silent.get(name, CLAIM_LIFE), CLAIM_LIFE - left / 1000)
    for id in await queue.execute("ZRANGE", queue.key("lease", "done"), 0, -1):
        owner = await queue.execute("HGET", queue.key("r", id.decode()), "owner")
        silent[owner.decode() if owner else ""] = 0.0
    return [
        Member(name=name, kind=CLIENT, version="", reads=1, silent=silent[name])
        for name in sorted(silent)
        if name and name not in over
    ]


async def _scan(queue: Queue, front: str) -> AsyncIterator[str]:
    """The names of keys that begin with `front`, each at least once."""
    cursor = b"0"
    while True:
        cursor, keys = await queue.execute("SCAN", cursor, "MATCH", f"{front}*", "COUNT", 1000)
        for key in keys:
            yield key.decode()
        if int(cursor) == 0:
            return


async def raise_schema(queue: Queue, number: int) -> int:
    """Raise the line's schema to `number`, never lower it; what it is now. Who reads less claims nothing any more."""
    found = int(await queue.verb("raise", number))
    queue.hear_schema(found)
    return found
