"""The policy servers that a process knows, and what they have in common: the policy's state, and who waits for it.

`trouble` is the one place that says whether a server takes a call.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from pipeline.backends import Backend, PolicyState, state_of
from pipeline.config import TRAINED
from pipeline.errors import PolicyError
from workers.policy.backend import ABORT_SECONDS, DOWN, UP, Server
from workers.policy.balance import Lengths

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Calls that go on in one turn of the event loop: each encodes its prompt, and a thousand at once would hold it."""

NAMED = 8
"""Servers that an error's sentence names."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds: `wait` for a usable server, `request` for one call; the rest as in the policy section of the config."""

    wait: float = 900.0
    request: float = 3600.0
    probe_every: float = 10.0
    probe_timeout: float = 10.0
    lease: float = 30.0


class Fleet:
    """`servers` by id, `policy` as the registry says (without one: nothing is gated). `counts`: for the metrics.

    `unasked_after`: from then on the registry has not been asked lately, and nothing may be sent. `lapses`: how often
    this process was silent for so long that a trainer did not wait for its calls.
    """

    def __init__(
        self,
        worker: str,
        model: str,
        patience: Patience,
        session: aiohttp.ClientSession | None,
        name: str = TRAINED,
    ) -> None:
        self.worker, self.model, self.patience, self.name = worker, model, patience, name
        self.policy = PolicyState()
        self.servers: dict[str, Server] = {}
        self.lengths = Lengths()
        self.counts: Counter[str] = Counter()
        self.closed = False
        self.unasked_after = float("inf")
        self.lapses = 0
        self._paused_for = 0.0
        self._paused_at: float | None = None
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._session, self._owned = session, session is None

    # -- what runs beside the calls ----------------------------------------------------------------------------------

    @property
    def session(self) -> aiohttp.ClientSession:
        """The process's session, made in the running loop; proxies of the environment are ignored."""
        if self._session is None:
            # uvicorn closes a connection after 5 s without a request: ours must not be used at that very moment
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        return self._session

    def spawn(self, work: Coroutine[Any, Any, Any], name: str = "") -> None:
        """Run beside the calls; it ends with the fleet."""
        if self.closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a fault of the policy's pool itself", exc_info=task.exception())

    async def close(self) -> None:
        """End everything that runs; aborts that are on their way are waited for."""
        self.closed = True
        aborts = [task for task in self._tasks if task.get_name() == "abort"]
        if aborts:
            await asyncio.wait(aborts, timeout=ABORT_SECONDS)
        rest = list(self._tasks)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        if self._session is not None and self._owned:
            await self._session.close()

    # -- servers -----------------------------------------------------------------------------------------------------

    def add(self, about: Backend, given: bool) -> Server:
        """A server that nobody has asked yet. Each worker has its own order, so that not all begin with the same."""
        server = Server(about, self.session, self.patience.probe_timeout, given)
        self.servers[about.id] = server
        order = sorted(self.servers.values(), key=lambda item: zlib.crc32(f"{self.worker} {item.id}".encode()))
        self.servers = {item.id: item for item in order}
        return server

    def trouble(self, server: Server, now: float) -> str:
        """Why this server takes no call now; "" when it does."""
        if now > self.unasked_after:
            return "the registry has not been asked lately"
        if server.gone:
            return "it is not registered any more"
        if server.state is not UP:
            return server.why
        if server.barred:
            return server.barred
        if server.paused:
            return "somebody has paused it"
        return "it is full" if server.full_until > now else ""

    @property
    def chats(self) -> bool:
        """Whether a server is known that takes messages instead of ids."""
        return any(server.endpoint == "chat" for server in self.servers.values())

    def usable(self, but: Server | None = None) -> list[Server]:
        """The servers that take calls now."""
        now = time.monotonic()
        return [item for item in list(self.servers.values()) if item is not but and not self.trouble(item, now)]

    def troubles(self) -> str:
        """Why there is no server for a call, for people."""
        now = time.monotonic()
        found = [f"{server.id}: {self.trouble(server, now) or 'usable'}" for server in list(self.servers.values())]
        if not found:
            trained = self.name == TRAINED
            option, section = ("", "policy") if trained else (f" --policy {self.name}", f"policies.{self.name}")
            return (
                f"none is registered: `rollout serve{option}` starts one, `rollout policy add{option}` adds one, "
                f"{section}.url names one"
            )
        return "; ".join(found[:NAMED]) + (f"; and {len(found) - NAMED} more" if len(found) > NAMED else "")

    def judge(self, server: Server) -> None:
        """Work out anew what the registry's word on a server means: whether it is barred, whose clocks stand still."""
        state, why = state_of(replace(server.about, why=""), self.policy)
        server.barred = "" if state == "ready" else f"{state}: {why}"
        if self.policy.paused:
            server.hold(f"the policy is paused: {self.policy.paused}")
        elif server.paused or (server.state is DOWN and server.calls):
            server.hold(f"{server.id}: {server.why}")
        else:
            server.hold("")

    # -- waiting -----------------------------------------------------------------------------------------------------

    def ring(self) -> None:
        """Something has changed: wake every call that waits, a few in each turn of the event loop."""
        waiters, self._waiters = list(self._waiters), {}
        if waiters:
            self.spawn(_wake(waiters))

    async def turned(self, limit: float) -> None:
        """Return when something has changed, or may have: a full server is tried again by the clock."""
        now = time.monotonic()
        moments = [item.full_until for item in self.servers.values() if item.full_until > now]
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min([limit, *(moment - now for moment in moments)])) + 0.001):
                    await waiter
        finally:
            self._waiters.pop(waiter, None)

    async def in_touch(self) -> None:
        """Return when what the registry says is no older than may be acted upon: this process may have been frozen."""
        while time.monotonic() > self.unasked_after:
            await self.turned(1.0)

    # -- the policy's pause ------------------------------------------------------------------------------------------

    @property
    def stood(self) -> float:
        """Seconds for which the policy has been paused, in all."""
        return self._paused_for + (time.monotonic() - self._paused_at if self._paused_at is not None else 0.0)

    def turn(self, policy: PolicyState) -> None:
        """Take the policy's state over. What its pause holds up is no silence, and no slowness, of a server's."""
        now = time.monotonic()
        self.policy = policy
        if policy.paused and self._paused_at is None:
            self._paused_at = now
        elif not policy.paused and self._paused_at is not None:
            pause, self._paused_at = now - self._paused_at, None
            self._paused_for += pause
            for server in self.servers.values():
                server.hear(now)
                server.share.pause(pause, now)

    def refuse(self) -> PolicyError:
        return PolicyError(
            f"no usable {'policy server' if self.name == TRAINED else f'server of policy {self.name!r}'} for "
            f"{self.patience.wait:g} s (limits.policy_wait): {self.troubles()}"
        )


async def _wake(waiters: Sequence[asyncio.Future[None]]) -> None:
    for number, waiter in enumerate(waiters, 1):
        if not waiter.done():
            waiter.set_result(None)
        if number % AT_ONCE == 0:
            await asyncio.sleep(0)
