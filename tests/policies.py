"""Scripted policy servers, and a client of them, with times that are short enough for tests."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

from pipeline.backends import Backend, Backends
from pipeline.queue import Queue
from workers.policy import scripted
from workers.policy.client import VllmPolicy
from workers.policy.fleet import Patience
from workers.policy.pool import Pool
from workers.policy.scripted import Options, Running
from workers.policy.tokenizer import Tokenizer

QUICK = Patience(wait=20.0, request=60.0, probe_every=0.3, probe_timeout=1.0, lease=3.0)
QUICK_CONFIG: dict[str, Any] = {
    "policy__probe_every": 0.3, "policy__probe_timeout": 1.0, "policy__backend_lease": 3.0,
}  # fmt: skip
PROMPT = list(range(10, 60))


@contextlib.asynccontextmanager
async def servers(tokens: Tokenizer, *each: dict[str, Any], **all_: Any) -> AsyncIterator[list[Running]]:
    """One server for each of `each`, which holds its own options beside those of all."""
    running = [await scripted.start(Options(**{"tokenizer": tokens, **all_, **own})) for own in each]
    try:
        yield running
    finally:
        for server in running:
            await server.stop()


@contextlib.asynccontextmanager
async def client(
    tokens: Tokenizer,
    *running: Running,
    patience: Patience = QUICK,
    queue: Queue | None = None,
    worker: str = "w",
    **about: Any,
) -> AsyncIterator[VllmPolicy]:
    """A client of these servers; with `queue`, of those that the registry has too."""
    backends = Backends(queue) if queue is not None else None
    pool = Pool([server.url for server in running], model="policy", patience=patience, backends=backends, worker=worker)
    policy = VllmPolicy(pool, "policy", tokens, **about)
    try:
        yield policy
    finally:
        await policy.close()


async def register(queue: Queue, id: str, server: Running, **about: Any) -> None:
    """Add it to the registry, by hand."""
    await Backends(queue).add(Backend(**{"id": id, "url": server.url, "model": "policy", **about}))


async def until(true: Callable[[], object], seconds: float = 15.0) -> None:
    """Wait for something to become true: a plain function's answer, or a coroutine function's."""
    async with asyncio.timeout(seconds):
        while not (await found if inspect.isawaitable(found := true()) else found):
            await asyncio.sleep(0.01)


def known(policy: VllmPolicy, *states: str) -> bool:
    """Whether these are the states of its servers, in any order."""
    return sorted(server.state for server in policy.pool.fleet.servers.values()) == sorted(states)


def calls_of(server: Running) -> int:
    """How many calls with PROMPT it has ended; probes, of one token each, do not show."""
    return int(server.engine.counts["prompt"]) // len(PROMPT)
