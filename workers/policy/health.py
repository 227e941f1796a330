"""Which policy servers live: each is asked for one token before it gets a call, and when it is silent with calls.

A server hangs when two of these probes in a row go unanswered, no reply came and its own counters stand still: then its
calls are repeated elsewhere, long and short alike. A slow server is none that hangs: its calls are left alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from pipeline.backends import UNLABELLED
from pipeline.engine_calls import EngineError
from pipeline.errors import ConfigError
from workers.policy.backend import ASKED, DOWN, UP, Look, Server
from workers.policy.fleet import Fleet
from workers.policy.registry import Registry
from workers.policy.reply import Repeat

log = logging.getLogger(__name__)

MISSES = 2
AGAIN, AGAIN_LATER = 0.1, 0.5
"""Seconds before a server that failed is asked again: at first, and then, doubled each time up to probe_every."""

PAUSED_AGAIN = 1.0


class Health:
    """Asks the fleet's servers, and moves calls away from those that don't answer. `registry`: where others read it."""

    def __init__(self, fleet: Fleet, registry: Registry | None) -> None:
        self._fleet, self._registry = fleet, registry

    async def watch(self) -> None:
        """For as long as the pool lives."""
        patience = self._fleet.patience
        every = min(0.5, patience.probe_every / 4, patience.probe_timeout / 4)
        while True:
            now = time.monotonic()
            for server in list(self._fleet.servers.values()):
                if server.gone and not server.given and not server.calls:
                    del self._fleet.servers[server.id]
                    continue
                if not server.looking and self._is_due(server, now):
                    self._begin(server)
                if server.state is DOWN and server.hangs and server.calls:
                    self._move(server, now)
            await asyncio.sleep(every)

    def suspect(self, server: Server, why: str) -> None:
        """Nothing more goes there until it has answered; it is asked at once."""
        if server.state is UP:
            server.state, server.why = ASKED, why
            if not server.looking:
                self._begin(server)

    def _is_due(self, server: Server, now: float) -> bool:
        if server.state is not UP or server.paused:
            return now >= server.next_look
        if not server.calls or self._fleet.policy.paused:
            return False
        return server.misses > 0 or now - server.share.heard >= self._fleet.patience.probe_every

    def _begin(self, server: Server) -> None:
        server.looking = True
        self._fleet.spawn(self._look(server))

    async def _look(self, server: Server) -> None:
        try:
            look = await server.look(server.about.model or self._fleet.model)
            if look.probe is not None:
                await self._learn(server, look)
            self._judge(server, look, time.monotonic())
        except (EngineError, ConfigError) as error:
            self.down(server, str(error), getattr(error, "fault", "misfit"))
        finally:
            server.looking = False

    async def _learn(self, server: Server, look: Look) -> None:
        """What an answer tells beside life: the path, the window, whether its weights are those we think they are."""
        assert look.probe is not None
        server.endpoint = server.about.endpoint if server.about.endpoint in UNLABELLED else look.probe.endpoint
        server.label = look.probe.version if server.control else None
        if self._registry is not None and server.endpoint in UNLABELLED and not server.about.endpoint:
            self._registry.note(server, endpoint=server.endpoint)  # whoever changes its weights must wait for its calls
        if not server.asked:
            said = await server.engine.about(server.about.model or self._fleet.model)
            about = server.about
            server.about = replace(about, window=about.window or said.window, tokenizer=about.tokenizer or said.root)
            server.asked = True
        if self._registry is not None and server.state is not UP and self._fleet.policy.version is not None:
            await self._registry.check_version(server)

    def _judge(self, server: Server, look: Look, now: float) -> None:
        """What an answer, or none, makes of a server."""
        error = look.error
        server.paused = bool(look.paused) and error is not None
        server.next_look = now + min(PAUSED_AGAIN, self._fleet.patience.probe_every)
        if error is None:
            self._up(server, now)
        elif server.paused:
            server.why = "somebody has paused it"
            self._fleet.judge(server)
        elif error.fault == "overload":
            server.back_off(now)
            self._up(server, now)
        elif error.fault == "hang" and server.state is UP:
            self._miss(server, str(error), look.progress, now)
        else:
            hangs = server.hangs and error.fault == "hang"
            self.down(server, f"it hangs: {error}" if hangs else str(error), error.fault)

    def _miss(self, server: Server, why: str, progress: int | None, now: float) -> None:
        """A probe went unanswered: it hangs when that happens twice, and nothing else moves."""
        moved = progress is not None and server.progress is not None and progress != server.progress
        server.progress = progress
        if moved:
            server.hear(now)
            server.progress = progress
            return
        server.misses += 1
        if server.misses >= MISSES:
            self.down(server, f"it hangs: {why}", "hang")

    def _up(self, server: Server, now: float) -> None:
        server.hear(now)
        back = server.state is DOWN
        server.settle(died=False)
        server.state, server.why, server.failures = UP, "", 0
        server.hangs = server.died = False
        self._fleet.judge(server)
        self._fleet.ring()
        if back:
            log.warning("policy server %s is back", server.id)
        if self._registry is not None and server.about.why and not server.barred:
            self._registry.note(server, why="")

    def down(self, server: Server, why: str, fault: str) -> None:
        """It gets no calls until it answers again."""
        now = time.monotonic()
        if server.state is not DOWN:
            log.warning("policy server %s gets no calls: %s", server.id, why)
            self._fleet.counts[f"ejections {fault}"] += 1
            server.down_at = now
            if self._registry is not None:
                self._registry.note(server, why=why)
        server.state, server.why = DOWN, why
        server.hangs = server.hangs or fault == "hang"
        server.died = server.died or fault == "dead"
        later = AGAIN_LATER * 2.0 ** min(server.failures, 10) if server.failures else AGAIN
        server.next_look = now + min(self._fleet.patience.probe_every, later)
        server.failures += 1
        server.settle(died=fault in ("dead", "hang"))
        if server.calls and (fault == "hang" or (fault == "dead" and server.failures > 1)):
            self._move(server, now)
        self._fleet.judge(server)
        self._fleet.ring()

    def _move(self, server: Server, now: float) -> None:
        """Take its calls away; those of one that hangs, only where another can take them, or when the wait is over."""
        over = now - server.down_at >= self._fleet.patience.wait
        if server.died or over or self._fleet.usable(but=server):
            for call in list(server.calls):
                call.waited += self._fleet.patience.wait if over else 0.0
                call.take_away(Repeat("hang", server.why))
