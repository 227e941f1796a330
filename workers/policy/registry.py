"""A worker's side of the registry: its share of the load goes in every second, who there is and which weights are in
force comes back. Servers that miss an update, or come back without it, are brought up to it here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from redis.exceptions import RedisError

from pipeline.backends import SHARE_SECONDS, Backends, Load, View
from pipeline.errors import ConfigError, LineError
from pipeline.weights import bring_up
from workers.policy.backend import UP, Server
from workers.policy.fleet import Fleet

log = logging.getLogger(__name__)

EVERY, EVERY_PAUSED = 1.0, 0.2
"""Seconds between two exchanges; while the policy is paused, calls wait for its end."""

BRING_UP_AGAIN = 5.0
"""Seconds after which a server that could not be brought up is tried again."""

OWNER = "config"
"""Who keeps the lease of the servers that policy.url names: every worker that has this setting."""


class Registry:
    """Keeps the fleet what the registry says. `backends`: on a queue without patience, so that an outage is noticed."""

    def __init__(self, fleet: Fleet, backends: Backends, given: Mapping[str, str]) -> None:
        self._fleet, self._backends, self._given = fleet, backends, given
        self._hurry = asyncio.Event()
        self._away = False
        self._sent = float("inf")
        fleet.unasked_after = float("-inf")

    async def run(self) -> None:
        """For as long as the pool lives."""
        while True:
            again = await self._exchange()
            self._bring_up_all()
            if again:
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_PAUSED if self._fleet.policy.paused else EVERY):
                    await self._hurry.wait()
            self._hurry.clear()

    async def leave(self) -> None:
        """Take this worker's share away."""
        with suppress(LineError, RedisError, TimeoutError):  # Redis is away: the share runs out
            async with asyncio.timeout(1.0):
                await self._backends.leave(self._fleet.worker)

    async def _exchange(self) -> bool:
        """One look; whether the next one should follow at once: a trainer waits until its pause is seen by all.

        A view that is older than a share's life must not be acted upon (this process may have been frozen, and the
        trainer has gone on without it), but while Redis is away nobody can update, and the last one holds.
        """
        fleet, sent = self._fleet, time.monotonic()
        loads = {id: server.load(fleet.lengths) for id, server in fleet.servers.items() if server.calls}
        try:
            view = await self._backends.exchange(fleet.worker, loads, fleet.policy.pauses)
            again = view.policy.pauses != fleet.policy.pauses
            if time.monotonic() - self._sent > SHARE_SECONDS:
                fleet.lapses += 1
            self._sent = sent
            fleet.unasked_after, self._away = sent + SHARE_SECONDS, False
            self._adopt(view)
            await self._keep()
            return again
        except (LineError, RedisError) as error:
            if not self._away:
                log.warning("the policy's registry can't be asked: %s; its last answer holds", error)
            self._away = True
            if fleet.unasked_after > float("-inf"):
                fleet.unasked_after = float("inf")
            return False

    def _adopt(self, view: View) -> None:
        """Act upon a view from now on."""
        fleet = self._fleet
        fleet.turn(view.policy)
        listed = {about.id: about for about in view.backends}
        urls = {about.url for about in view.backends}  # one that policy.url names may be listed under another id
        for id, about in listed.items():
            known = fleet.servers.get(id)
            if known is None or known.about.url != about.url:
                known = fleet.add(about, given=id in self._given)
            known.told(about)
        for server in fleet.servers.values():
            server.registered = server.id in listed
            server.gone = not server.registered and (not server.given or server.about.url in urls)
            server.others = view.loads.get(server.id, Load())
            fleet.judge(server)
        fleet.ring()

    async def _keep(self) -> None:
        """Keep the leases of the servers that policy.url names, as long as they live."""
        life, now = self._fleet.patience.lease, time.monotonic()
        for server in list(self._fleet.servers.values()):
            if (
                not server.given
                or server.gone
                or server.state is not UP
                or (server.registered and now - server.kept < life / 3)
            ):
                continue
            if server.registered and server.about.owner != OWNER:
                continue  # somebody else keeps it, or it was added by hand
            server.kept = now
            if not await self._backends.renew(server.id, OWNER, life):
                about = replace(server.about, owner=OWNER, endpoint=server.endpoint, version=server.label)
                with suppress(ConfigError):  # somebody else has just registered it
                    await self._backends.add(about, life)
                self._hurry.set()

    def note(self, server: Server, **about: Any) -> None:
        """Write into the registry what others should know of a server."""
        if server.registered:
            self._fleet.spawn(self._note(server.id, about))

    async def _note(self, id: str, about: dict[str, Any]) -> None:
        try:
            await self._backends.note(id, **about)
        except (LineError, RedisError) as error:
            log.warning("what was found out of policy server %s can't be noted: %s", id, error)

    async def check_version(self, server: Server) -> None:
        """A server was away: whether it came back with the weights that the registry says it has."""
        if server.label is None and not server.died:
            return
        try:
            view = await self._backends.view()
            about = next((item for item in view.backends if item.id == server.id), None)
            if about is None or view.policy.paused or about.version in (None, server.label):
                return
            has = "unknown weights" if server.label is None else f"version {server.label}"
            log.warning("policy server %s is back with %s, not with version %s", server.id, has, about.version)
            await self._backends.note(server.id, version=server.label)
        except (LineError, RedisError) as error:
            log.warning("whether policy server %s has its weights can't be asked: %s", server.id, error)
        server.about = replace(server.about, version=server.label)

    def _bring_up_all(self) -> None:
        """Give the weights in force to each server that lives without them, where they lie in a folder."""
        policy, now = self._fleet.policy, time.monotonic()
        if policy.version is None or not policy.path or policy.paused:
            return
        for server in self._fleet.servers.values():
            about = server.about
            reached = (server.state is UP or server.paused) and not about.drained and about.kind == "vllm"
            if reached and server.registered and about.version != policy.version and now >= server.bring_up_at:
                server.bring_up_at = float("inf")
                self._fleet.spawn(self._bring_up(server))

    async def _bring_up(self, server: Server) -> None:
        fleet = self._fleet
        try:
            if await bring_up(self._backends, server.id, server.engine):
                fleet.counts["brought up"] += 1
                log.info("policy server %s was given the weights in force", server.id)
                server.next_look = 0.0
                self._hurry.set()
        except (LineError, RedisError) as error:
            log.warning("policy server %s can't be given the weights in force: %s; it is tried again", server.id, error)
        finally:
            server.bring_up_at = time.monotonic() + BRING_UP_AGAIN
