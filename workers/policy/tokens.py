"""The tokenizer of a process's policy: the configuration's, else the one that a server's registration names."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import nullcontext

from pipeline.errors import ConfigError, PolicyError
from workers.policy import families
from workers.policy.backend import Clock
from workers.policy.fleet import Fleet
from workers.policy.rendering import Rendering
from workers.policy.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Tokens:
    """`rendering` is None until it is known. `tokenizer`: folder or a loaded one; "" where a server must tell."""

    def __init__(self, tokenizer: str | Tokenizer, renderer: str, fleet: Fleet) -> None:
        self._renderer, self._fleet = renderer, fleet
        if not tokenizer and renderer != families.AUTO:
            families.check(renderer)  # now, not when the first server has told of its tokenizer
        self.rendering = Rendering(tokenizer, renderer) if tokenizer else None
        self.folder = tokenizer if isinstance(tokenizer, str) else tokenizer.name_or_path
        self._unfit: dict[str, str] = {}
        self._loading = asyncio.Lock()

    def known(self) -> Rendering:
        """Raises PolicyError where it is not known yet."""
        if self.rendering is None:
            raise PolicyError(
                "the policy's tokenizer is not known yet: `await ctx.policy.ready()`, or set policy.tokenizer"
            )
        return self.rendering

    @property
    def asked(self) -> bool:
        """Whether a server has told about itself."""
        return any(server.asked for server in self._fleet.servers.values())

    async def wait(self, clock: Clock | None) -> None:
        """Return when a server was asked and a tokenizer is known; the clock stands still. Raises PolicyError."""
        began, limit = time.monotonic(), self._fleet.patience.wait
        with clock.paused("no policy server has told about itself") if clock is not None else nullcontext():
            while not await self._found():
                left = limit - (time.monotonic() - began)
                if left <= 0:
                    if not self.asked:
                        raise self._fleet.refuse()
                    raise PolicyError(
                        f"no tokenizer is known for {limit:g} s (limits.policy_wait): set policy.tokenizer, or name it "
                        f"in a server's registration; {self._why()}"
                    )
                await self._fleet.turned(left)

    async def _found(self) -> bool:
        async with self._loading:
            for folder in {server.about.tokenizer for server in self._fleet.servers.values()} - self._unfit.keys():
                if self.rendering is None and folder:
                    try:
                        self.rendering = await asyncio.to_thread(Rendering, folder, self._renderer)
                        self.folder = folder
                    except ConfigError as error:
                        self._unfit[folder] = str(error)
                        log.warning("the tokenizer that a server names can't be used: %s", error)
        return self.rendering is not None and self.asked

    def _why(self) -> str:
        return "; ".join(self._unfit.values()) or self._fleet.troubles()
