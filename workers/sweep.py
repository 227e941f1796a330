"""Discards sandboxes that no rollout names: what a killed worker, a cancel or a lost attempt left behind."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from pipeline.queue import Queue
from workers.stages import Driver, sandbox_text

log = logging.getLogger(__name__)


async def sweep_for_ever(queue: Queue, driver: Driver, every: float) -> None:
    """Sweep each `every` seconds. What is discarded was unnamed in two looks: a commit may be just about to name it."""
    suspects: set[str] = set()
    while True:
        await asyncio.sleep(every)
        try:
            suspects = await sweep(queue, driver, suspects)
        except Exception as error:  # a sweep that ended would leave every sandbox that is lost from now on
            log.warning("the sweep of sandboxes failed and is tried again in %g s: %s", every, error)


async def sweep(queue: Queue, driver: Driver, suspects: set[str]) -> set[str]:
    """Discard what is unnamed now and was among `suspects`; returns the other unnamed ones."""
    unnamed = [reference for reference in await driver.owned() if not await _named(queue, reference)]
    for reference in unnamed:
        if sandbox_text(reference) in suspects:
            log.info("sandbox %s belongs to no rollout and is discarded", reference.get("name"))
            await driver.discard(reference)
    return {sandbox_text(reference) for reference in unnamed} - suspects


async def _named(queue: Queue, reference: dict[str, Any]) -> bool:
    """A rollout's hash names exactly this sandbox, or the attempt that prepares it still holds its lease.

    The name is "ID-TOKEN", and a token is "NONCE-NUMBER" (see `workers.stages` and `Queue.claim`).
    """
    id, nonce, number = [*str(reference.get("name", "")).rsplit("-", 2), "", ""][:3]
    named, token = await queue.execute("HMGET", queue.key("r", id), "sandbox", "token")
    return bool(named == sandbox_text(reference).encode() or token == f"{nonce}-{number}".encode())
