"""Finds a policy server for each call of a process, waits where there is none, and decides what a fault means.

With Redis the registry says who there is and which weights are in force; without (a trial, a child process) the given
URLs are all there is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import aiohttp

from pipeline.backends import Backend, Backends, backend_id
from pipeline.config import TRAINED
from pipeline.errors import ContextFull, PolicyError
from workers.policy.backend import DOWN, Call, Server, Strike
from workers.policy.balance import choose
from workers.policy.fleet import Fleet, Patience
from workers.policy.health import Health
from workers.policy.registry import Registry
from workers.policy.reply import Repeat

log = logging.getLogger(__name__)

SAY_AFTER, SAY_EVERY = 5.0, 30.0
"""Seconds after which the log says that calls wait, and between two of these lines."""

MOST_DEATHS, MOST_ERRORS = 2, 3
"""So many servers may go down with a call, or answer it with an error and live; then it is not sent again."""


class Pool:
    """One a process. Nothing runs before `start`, which the first call brings about.

    `urls`: servers that are known without a registry. `model`: their name for it where a registration gives none.
    `worker`: under which name its share of the load is published. `choose`: see balance.choose. `policy`: its name.
    """

    def __init__(
        self,
        urls: Sequence[str] = (),
        *,
        model: str = "",
        patience: Patience | None = None,
        backends: Backends | None = None,
        worker: str = "",
        session: aiohttp.ClientSession | None = None,
        choose: Callable[..., str] = choose,
        policy: str = TRAINED,
    ) -> None:
        self.fleet = Fleet(worker, model, patience or Patience(), session, policy)
        self.given = {backend_id(url): url.rstrip("/") for url in urls}
        self._registry = Registry(self.fleet, backends, self.given) if backends is not None else None
        self._health = Health(self.fleet, self._registry)
        self._choose = choose
        self._started = False
        self._said = float("-inf")
        self.waiting = 0

    def start(self) -> None:
        """Begin to look at the servers. Safe twice. Raises PolicyError after `close`."""
        if self.fleet.closed:
            raise PolicyError("this process has closed its policy: it ends")
        if self._started:
            return
        self._started = True
        for id, url in self.given.items():
            self.fleet.add(Backend(id=id, url=url), given=True)
        if self._registry is not None:
            self.fleet.spawn(self._registry.run())
        self.fleet.spawn(self._health.watch())

    async def close(self) -> None:
        """End everything that runs, and take this worker's share away. Safe twice."""
        if self.fleet.closed:
            return
        await self.fleet.close()
        if self._registry is not None and self._started:
            await self._registry.leave()

    async def admit(self, call: Call) -> Server:
        """The server that takes this call, which is counted as in flight there from now on.

        Waits for one where none is usable, and the attempt's clock stands still. Raises PolicyError when that took
        `Patience.wait` seconds (those in which the trainer pauses the policy do not count) or when the call has brought
        servers down, ContextFull when the prompt fits no window.
        """
        self.start()
        server = self._find(call) or await self._wait(call)
        call.version, call.lapses = self.fleet.policy.version, self.fleet.lapses
        server.begin(call, time.monotonic())
        self.fleet.counts["calls"] += 1
        return server

    def done(self, server: Server, call: Call, sampled: int | None) -> None:
        """The call is over, with so many sampled tokens; None when there was no reply."""
        now = time.monotonic()
        server.end(call, now, sampled)
        if sampled is not None:
            server.hear(now)
            server.fulls = 0
            if server.state is DOWN:
                server.next_look = now

    def abort(self, server: Server, request_id: str) -> None:
        """Tell the engine that nobody waits for this request any more."""
        self.fleet.spawn(server.abort(request_id), "abort")

    def failed(self, server: Server, call: Call, fault: Repeat) -> None:
        """A server did not give this call its reply: what that says of the server, and of the call."""
        why = call.last = f"{server.id}: {fault}"
        self.fleet.counts[f"repeats {fault.case}"] += 1
        log.info("a call is repeated (%s): %s", fault.case, why)
        if fault.case == "behind":
            server.about = replace(server.about, version=fault.version)
            self.fleet.judge(server)
            if self._registry is not None:
                self._registry.note(server, version=fault.version)
            return
        if fault.case == "misfit":
            self._health.down(server, str(fault), "misfit")
            return
        if fault.case == "overload":
            server.back_off(time.monotonic())
        elif fault.case == "error":
            call.errors += 1
            call.failed.add(server.id)
        elif fault.case != "refused":
            strike = Strike(died=True if fault.case == "hang" else None)
            call.strikes.append(strike)
            server.strikes.append(strike)
        self._health.suspect(server, str(fault))

    def has_other(self, server: Server, call: Call) -> bool:
        """Whether there is another server, which has not failed with this call."""
        others = [other for other in self.fleet.servers.values() if other is not server and not other.gone]
        return any(other.id not in call.failed for other in others)

    def _find(self, call: Call) -> Server | None:
        """The best usable server; None where there is none now, or a probe must first tell what the last fault was."""
        deaths = sum(1 for strike in call.strikes if strike.died)
        if deaths >= MOST_DEATHS or call.errors >= MOST_ERRORS:
            what = f"{deaths} policy servers went down" if deaths >= MOST_DEATHS else f"there were {call.errors} errors"
            raise PolicyError(f"{what} with this call, which is not sent again; the last was {call.last}")
        if sum(1 for strike in call.strikes if strike.died is not False) >= MOST_DEATHS:
            return None
        usable = self.fleet.usable()
        if call.said is None:
            takes_ids = [server for server in usable if server.endpoint != "chat"]
            if usable and not takes_ids:
                raise PolicyError(
                    "every usable policy server takes messages (kind nemo-rl), and those of this prompt are not known: "
                    "render or bridge it right before the call, with the messages before it"
                )
            usable = takes_ids
        fitting = [server for server in usable if not 0 < server.window <= call.prompt]
        if not fitting:
            if usable:
                widest = max(server.window for server in usable)
                raise ContextFull(f"the prompt has {call.prompt} tokens, the window {widest}: none is left")
            return None
        fitting = [server for server in fitting if server.id not in call.failed] or fitting
        now, lengths = time.monotonic(), self.fleet.lengths
        chosen = self._choose(
            [server.offer(lengths, now) for server in fitting],
            prompt=call.prompt, expected=min(lengths.mean, call.most), sticky=call.sticky, cached=call.cached,
        )  # fmt: skip
        return self.fleet.servers[chosen]

    async def _wait(self, call: Call) -> Server:
        fleet = self.fleet
        began, stood, before = time.monotonic(), fleet.stood, call.waited
        paused = fleet.policy.paused
        why = f"the policy is paused: {paused}" if paused else "no usable policy server"
        fleet.counts["waits"] += 1
        self.waiting += 1
        try:
            with call.clock.paused(why) if call.clock is not None else nullcontext():
                while True:
                    server = self._find(call)
                    if server is not None:
                        return server
                    call.waited = before + time.monotonic() - began - (fleet.stood - stood)
                    if call.waited >= fleet.patience.wait:
                        raise fleet.refuse()
                    self._say_waiting(time.monotonic() - began)
                    await fleet.turned(min(SAY_AFTER, fleet.patience.wait - call.waited))
                    self.start()
        finally:
            self.waiting -= 1
            call.waited = before + time.monotonic() - began - (fleet.stood - stood)

    def _say_waiting(self, waited: float) -> None:
        now = time.monotonic()
        if waited >= SAY_AFTER and now - self._said >= SAY_EVERY:
            self._said = now
            log.warning(
                "%d calls wait for a policy server, %g s at most (limits.policy_wait): %s",
                self.waiting, self.fleet.patience.wait, self.fleet.troubles(),
            )  # fmt: skip

    def about(self) -> dict[str, Any]:
        """What a worker says of its policy with each beat. Callable from another thread."""
        servers = list(self.fleet.servers.values())
        usable = len(self.fleet.usable())
        policy = self.fleet.policy
        return {
            "backends": len(servers), "usable": usable, "calls": sum(len(server.calls) for server in servers),
            "waiting": self.waiting, "version": policy.version, "paused": policy.paused,
            "why": "" if usable or not self._started else self.fleet.troubles(),
        }  # fmt: skip
