"""The worker loop's side of its process's sandbox host: places, doorbell, drain. Only INIT workers have a host."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pipeline.config import Config
from pipeline.leases import NO_PLACES, Claim, Places
from pipeline.queue import Queue
from workers.canary import Canary
from workers.ending import Ending
from workers.stages import Workshop

if TYPE_CHECKING:
    from workers.sandbox.host import Host

log = logging.getLogger(__name__)


class Hosting:
    """`host` is None until `open`, and for ever in RUN and EVAL workers: everything here then does nothing."""

    def __init__(self, config: Config) -> None:
        self.host: Host | None = None
        self._config = config
        self._loop: asyncio.AbstractEventLoop | None = None

    async def open(self, name: str, queue: Queue, shop: Workshop, known: Iterable[str], canary: Canary) -> None:
        """Open the host called `name`, and tell the line which of the `known` handlers need a sandbox.

        `canary`: asked after each action before what came of it is told.

        Raises ConfigError, SandboxError where this machine can make none.
        """
        from workers.sandbox.host import Host

        self._loop = asyncio.get_running_loop()
        host = await Host.open(self._config, name, queue, canary)
        try:
            await host.prove()
        except BaseException:
            await host.close()
            raise
        self.host, shop.host, shop.stock = host, host, host.stock
        for handler in known:
            await queue.note_place(handler, shop.handler(handler).acts)

    def places(self) -> Places:
        """Free places, for the next claim."""
        return self.host.stock.places() if self.host is not None else NO_PLACES

    @property
    def full(self) -> bool:
        return self.host is not None and self.places().free == 0

    @property
    def empty(self) -> bool:
        return self.host is None or self.host.stock.taken == 0

    def begun(self, claim: Claim) -> None:
        """A claim that takes a place has it from now on."""
        if claim.place and self.host is not None:
            self.host.stock.promise(claim.token, claim.place)

    def ended(self, claim: Claim) -> None:
        """The attempt is over: a place that it did not use is free, and what it made and nobody took goes at once."""
        if self.host is not None:
            self.host.stock.release(claim.token)
            self.host.rung.set()

    def ring(self) -> None:
        """The doorbell rang (called in the heartbeat thread): a sandbox may be over."""
        if self.host is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.host.rung.set)

    def about(self) -> dict[str, int]:
        """What the worker says of it with each beat."""
        if self.host is None:
            return {}
        return {"sandboxes": len(self.host.stock.live), "max_live": self.host.stock.max_live}

    def give_up(self) -> None:
        """A signal has reached what runs in the sandboxes: whoever uses one hears that it is gone, which is a loss."""
        if self.host is not None:
            self.host.stock.give_up()

    async def drain(self, ending: Ending) -> None:
        """Serve the sandboxes until none is left, for as long as a worker that is asked to stop has.

        What is left then ends with the worker: those rollouts go back to INIT as a loss, and to another host.
        """
        if self.host is None:
            return
        gone = asyncio.create_task(self.host.stock.wait_until_empty())
        try:
            await ending.wait([gone])
            if self.host.stock.live:
                log.warning("%d sandboxes are still in use, and end with this worker", len(self.host.stock.live))
        finally:
            gone.cancel()
