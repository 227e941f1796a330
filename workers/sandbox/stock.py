"""The live sandboxes of one process: makes them, counts the places they take, and removes them.

The INIT worker's stock is served to other workers (`workers.sandbox.server`); an EVAL worker has one for its fresh
sandboxes, `rollout try` one for its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.errors import SandboxError
from pipeline.leases import Places
from workers.canary import Canary
from workers.sandbox.box import Driver, Spec
from workers.sandbox.live import Live
from workers.sandbox.tools.session import Session

log = logging.getLogger(__name__)

END_SECONDS = 30.0
"""For all that runs in a sandbox to end, tools and all."""


def places_of(config: Config) -> int:
    """How many sandboxes may live at once: sandbox.max_live, else the cores that this process may use."""
    return config.sandbox.max_live or len(os.sched_getaffinity(0))


def reference_text(reference: dict[str, Any] | None) -> str:
    """How the rollout's hash names its sandbox; empty for none."""
    return json.dumps(reference, sort_keys=True) if reference else ""


class Stock:
    """Sandboxes under one root folder, this process's alone. `address`: what a reference says beside the name.

    `canary`: asked after each action of another process before what came of it is told; None where nobody else acts.
    """

    def __init__(self, config: Config, driver: Driver, canary: Canary | None = None) -> None:
        self.config = config
        self.driver = driver
        self.address: dict[str, Any] = {}
        self.max_live = places_of(config)
        self.live: dict[str, Live] = {}
        self._canary = canary
        self._promised: dict[str, str] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._removing: dict[str, asyncio.Task[None]] = {}
        self._left: list[Live] = []
        self._room = asyncio.Condition()
        self._telling: asyncio.Future[None] | None = None

    # -- places ------------------------------------------------------------------------------------------------------

    @property
    def taken(self) -> int:
        return len(self.live) + len(self._promised) + len(self._ending)

    def places(self) -> Places:
        """Free places, and how many of them each lane may take: all but `sandbox.reserve` of the whole."""
        lanes = self.config.line.lanes
        free = max(0, self.max_live - self.taken)
        reserve = int(self.max_live * self.config.sandbox.reserve) if len(lanes) > 1 else 0
        held = Counter(item.lane for item in self.live.values()) + Counter(self._promised.values())
        return Places(free, {lane: max(0, self.max_live - reserve - held[lane]) for lane in lanes})

    def promise(self, token: str, lane: str) -> None:
        """Keep a place for the attempt that holds `token`, until it makes its sandbox or `release` takes it back."""
        self._promised[token] = lane

    def release(self, token: str) -> None:
        if self._promised.pop(token, None) is not None:
            self._freed()

    async def wait_for_place(self, token: str, lane: str) -> None:
        """Keep a place as `promise` does, as soon as there is one."""
        async with self._room:
            await self._room.wait_for(lambda: self.taken < self.max_live)
            self.promise(token, lane)

    async def wait_until_empty(self) -> None:
        async with self._room:
            await self._room.wait_for(lambda: not self.live and not self._ending and not self._removing)

    def _freed(self) -> None:
        self._telling = asyncio.ensure_future(self._tell())

    async def _tell(self) -> None:
        async with self._room:
            self._room.notify_all()

    # -- sandboxes ---------------------------------------------------------------------------------------------------

    async def prepare(self, asked: dict[str, Any], *, id: str, token: str, lane: str) -> Live:
        """Make the sandbox of the INIT attempt that holds `token`, ready for use.

        Raises SandboxError (it did not start) and HandlerError (it can't be had here).
        """
        name = f"{id}-{token}"
        spec = Spec.of(asked)
        await self._removed(name)  # the same attempt asked twice: what its first call left is not gone on with
        try:
            box = await self.driver.create(spec, name)
        except OSError as error:
            raise SandboxError(f"sandbox {name} could not be made: {error}; is the disk full?") from error
        live = Live(box, Session(box, self.config.sandbox), id=id, token=token, lane=lane, canary=self._canary)
        live.reference = {"driver": self.driver.name, "name": name, **self.address}
        live.text = reference_text(live.reference)
        try:
            await live.session.start()
        except BaseException:
            self.live[name] = live
            await self._removed(name)
            raise
        self._promised.pop(token, None)
        self.live[name] = live
        return live

    def get(self, name: str) -> Live | None:
        return self.live.get(name)

    def give_up(self) -> None:
        """What runs in the sandboxes was signalled from outside: from now on each is gone for whoever uses it."""
        for live in self.live.values():
            live.over = True

    async def discard(self, name: str) -> None:
        """End a sandbox; its folder is removed behind the caller's back, its place is free. Safe twice."""
        live = self.live.pop(name, None)
        if live is not None:
            self._ending[name] = asyncio.create_task(self._end(live))
        ending = self._ending.get(name)
        if ending is not None:
            await asyncio.shield(ending)

    async def _end(self, live: Live) -> None:
        name = live.box.name
        try:
            async with asyncio.timeout(END_SECONDS):  # one that hangs must not hold the look at the others
                await live.end()
        except (SandboxError, OSError) as error:
            log.error("sandbox %s does not end well: %s", name, error or f"not within {END_SECONDS:g} s")
        finally:
            self._removing[name] = asyncio.create_task(self._remove(live))
            self._ending.pop(name, None)
            self._freed()

    async def _remove(self, live: Live) -> None:
        try:
            await live.box.discard()
        except (SandboxError, OSError) as error:
            log.error("sandbox %s can't be removed whole: %s; it is tried again", live.box.name, error)
            self._left.append(live)
        finally:
            self._removing.pop(live.box.name, None)
            self._freed()

    def remove_again(self) -> None:
        """Try once more to remove what could not be removed."""
        left, self._left = self._left, []
        for live in left:
            self._removing[live.box.name] = asyncio.create_task(self._remove(live))

    async def _removed(self, name: str) -> None:
        """Wait until nothing of this name is left."""
        await self.discard(name)
        removing = self._removing.get(name)
        if removing is not None:
            await asyncio.shield(removing)

    async def close(self) -> None:
        """Remove all sandboxes."""
        self.remove_again()
        await asyncio.gather(*(self._removed(name) for name in [*self.live, *self._ending, *self._removing]))


def make_stock(config: Config, root: Path, canary: Canary | None = None) -> Stock:
    """A stock with the configured driver. Raises ConfigError, SandboxError for a root that can't be used."""
    from workers.sandbox.boxes import make_driver

    return Stock(config, make_driver(config, root), canary)
