"""A pause of the policy that this process holds: every server that answers is frozen, and none of them is forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from pipeline.backends import SHARE_SECONDS, Backend, Backends
from pipeline.engine import Engine
from pipeline.engine_calls import EngineError
from pipeline.errors import ConfigError
from pipeline.weight_change import CONTROL_SECONDS, LOOK_SECONDS, Change, Mode, alone, unaware

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What an update did: the servers that have the weights now, and why each other one has not.

    `version`: of the weights in force; None where no trainer has named one. `seconds`: how long the policy was paused.
    """

    version: int | None
    updated: tuple[str, ...]
    ejected: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


class HeldPause:
    """The registry's pause `number`, in `owner`'s name. `starts`: a run begins with it. `changes`: its servers."""

    def __init__(self, backends: Backends, number: int, owner: str) -> None:
        self.number, self.owner = number, owner
        self.starts = False
        self.changes: list[Change] = []
        self._backends = backends
        self._began = time.monotonic()
        self._stack = contextlib.AsyncExitStack()

    @property
    def sound(self) -> list[Change]:
        """Servers that are still with us."""
        return [change for change in self.changes if not change.why]

    async def add(self, backend: Backend) -> Change:
        """Take a server in, as it is."""
        engine = await self._stack.enter_async_context(Engine(backend.url, timeout=CONTROL_SECONDS))
        change = Change(self._backends, backend, engine, self.in_force)
        self.changes.append(change)
        return change

    async def in_force(self) -> bool:
        """Whether it holds still: nobody else changes a server's weights then. Once over, it never comes back."""
        policy = (await self._backends.view()).policy
        return policy.pauses == self.number and policy.pause_owner == self.owner

    async def freeze(self, mode: Mode, *, external: bool, hide: bool) -> None:
        """Pause every registered server; those that do not answer fall out."""
        for backend in (await self._backends.view()).backends:
            await self.add(backend)
        limit = self._backends.config.policy.update_timeout

        async def freeze(change: Change) -> None:
            if await self._stack.enter_async_context(alone(self._backends, change.backend.id, limit)) is None:
                raise EngineError("refused", f"another process was changing its weights for {limit:g} s")
            await change.freeze(mode, external=external, hide=hide, number=self.number)
            if not change.control:
                await change.quiet(self.number)

        await self.each(freeze)

    async def each(self, step: Callable[[Change], Awaitable[None]]) -> None:
        """A step for every server that is still with us; one that can't follow falls out, the others go on."""

        async def one(change: Change) -> None:
            try:
                await step(change)
            except (EngineError, ConfigError, TimeoutError) as error:
                await self._all_know(change)
                await change.fail(error)

        await asyncio.gather(*(one(change) for change in self.sound))

    async def known(self) -> None:
        """Wait until every RUN worker knows of it. One that is silent for SHARE_SECONDS asks before it sends."""
        until = time.monotonic() + 2 * SHARE_SECONDS
        while names := unaware(await self._backends.view(), self.number):
            if time.monotonic() > until:
                log.warning("workers that don't say whether they know of the pause: %s", ", ".join(names))
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def _all_know(self, *changes: Change) -> None:
        """Wait as `known` where what a server runs is about to be ended: its weights are nobody's.

        A worker that does not know of the pause would ask the same server for the rest at once, and an engine whose
        load has failed does not survive a token.
        """
        if any(change.state == "moving" for change in changes):
            await self.known()

    async def let_go(self) -> None:
        """Every server goes on with the weights that it had, if it has no new ones; then the line does."""
        await self._all_know(*self.sound)
        await asyncio.gather(*(change.let_go() for change in self.sound))
        await self._backends.lift(self.owner)

    async def close(self) -> None:
        """Close the connections; others may change the servers."""
        await self._stack.aclose()

    def report(self, version: int | None) -> Update:
        return Update(
            version=version,
            updated=tuple(change.backend.id for change in self.sound),
            ejected={change.backend.id: change.why for change in self.changes if change.why},
            seconds=time.monotonic() - self._began,
        )
