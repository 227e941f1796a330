"""One policy server as a worker sees it: its calls in flight, whether it lives, and how a call is sent to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import aiohttp

from pipeline.backends import ENDPOINTS, UNLABELLED, Backend, Load
from pipeline.engine import Engine, Probe
from pipeline.engine_calls import EngineError
from pipeline.errors import ConfigError, PolicyError
from workers.policy import reply, request
from workers.policy.balance import Lengths, Mark, Offer, Share
from workers.policy.reply import Repeat
from workers.policy.spoken import Said

CONNECT_SECONDS = 10.0
ABORT_SECONDS = 2.0
FIRST = -(2**62)
"""Priority of a probe: before all calls, where the server goes by priority."""

NEW, UP, ASKED, DOWN = "new", "up", "asked", "down"
"""Nobody has asked it yet; it generates; it is being asked, after a fault; it does not."""


class Clock(Protocol):
    """Counts an attempt's working time; it stands still inside `paused`."""

    def paused(self, reason: str) -> AbstractContextManager[Any]: ...


@dataclass(eq=False)
class Strike:
    """A server failed while it had this call. `died`: whether it was gone then; None until a probe has told."""

    died: bool | None = None


@dataclass(eq=False)
class Call:
    """One action that is asked for, over all servers that it is sent to.

    `prompt`: how many tokens; `most`: tokens that may be sampled at most; `sticky`, `cached`: the server that has the
    first `cached` tokens. `waited`: seconds spent without a server. `version`: in force when it was sent.
    """

    prompt: int
    most: int
    clock: Clock | None = None
    sticky: str = ""
    cached: int = 0
    waited: float = 0.0
    version: int | None = None
    lapses: int = 0
    """How often the registry had lost sight of this process when it was sent (Fleet.lapses)."""
    said: Said | None = None
    """What its prompt was rendered from; None: not known, only servers that take ids can have it."""
    failed: set[str] = field(default_factory=set)
    """Servers that answered it with an error, or with what is no reply: others go first."""
    strikes: list[Strike] = field(default_factory=list)
    errors: int = 0
    last: str = ""
    """What the last server that failed with it said."""
    scope: asyncio.Timeout | None = None
    taken: Repeat | None = None
    """Why the pool took it away from its server, when it did."""
    held: ExitStack = field(default_factory=ExitStack)
    left: float | None = None
    """Seconds that it may still take, while its time stands still."""

    def hold(self, why: str) -> None:
        """Its time stands still from now on, and its attempt's clock."""
        if self.clock is not None:
            self.held.enter_context(self.clock.paused(why))
        if self.scope is not None and self.taken is None:
            self.left = (self.scope.when() or 0.0) - time.monotonic()
            self.scope.reschedule(None)

    def let_go(self) -> None:
        """Its time goes on."""
        self.held.close()
        if self.scope is not None and self.left is not None and self.taken is None:
            self.scope.reschedule(time.monotonic() + self.left)
        self.left = None

    def take_away(self, why: Repeat) -> None:
        """End its HTTP call: it will be repeated elsewhere."""
        if self.scope is not None and self.taken is None:
            self.taken = why
            self.scope.reschedule(0.0)


class Look(NamedTuple):
    """What a server said when it was asked. `progress`: tokens that it has worked on; None where it tells none."""

    probe: Probe | None
    error: EngineError | None
    paused: bool | None
    progress: int | None


class Server:
    """One backend. `about` is what the registry says of it; `given`: the configuration names it."""

    def __init__(self, about: Backend, session: aiohttp.ClientSession, probe_timeout: float, given: bool) -> None:
        self.about = about
        self.given = given
        self.gone = False
        self.session = session
        self.engine = Engine(about.url, session, timeout=probe_timeout)
        self.state = NEW
        self.why = "nobody has asked it yet"
        self.endpoint = ENDPOINTS.get(about.kind, about.endpoint)
        self.labels = about.endpoint not in UNLABELLED
        """Whether the versions that it labels its tokens with can be relied on (it has a control side)."""
        self.control = False
        """Whether it has a control side, and so a label that says which weights it has."""
        self.spans = False
        """Whether it has labelled tokens: then nobody needs to ask for the version before a call."""
        self.takes_priority = True
        self.asked = False
        self.barred = ""
        self.paused = False
        self.held = ""
        self.calls: dict[Call, Mark] = {}
        self.share = Share()
        self.others = Load()
        self.strikes: list[Strike] = []
        # asking it: probes that went unanswered in a row, and what its counters said at the last one
        self.looking = False
        self.next_look = 0.0
        self.misses = 0
        self.progress: int | None = None
        # while it is down: since when, how often it was asked, and whether its process was gone
        self.down_at = 0.0
        self.failures = 0
        self.hangs = self.died = False
        self.fulls, self.full_until = 0, 0.0
        # the registry: whether it is in it, the weights' version by its own label, when its lease was renewed
        self.registered = False
        self.label: int | None = None
        self.kept = float("-inf")
        self.bring_up_at = 0.0

    @property
    def id(self) -> str:
        return self.about.id

    @property
    def window(self) -> int:
        """Tokens of prompt and completion; 0 unknown."""
        return self.about.window

    def offer(self, lengths: Lengths, now: float) -> Offer:
        """What it has to do, and how fast it is, own calls and those of other workers together."""
        share, others, mean = self.share, self.others, lengths.mean
        own = share.rate if share.calls or not others.rate else 0.0
        return Offer(
            self.id, share.tokens(mean) + others.tokens, (own + others.rate) * share.spare,
            share.ceiling(mean, now) + others.rate,
            share.pace, share.doubt(now),
        )  # fmt: skip

    def load(self, lengths: Lengths) -> Load:
        """This worker's share, for the others."""
        share = self.share
        return Load(share.tokens(lengths.mean), share.calls, share.rate if share.calls else 0.0)

    def begin(self, call: Call, now: float) -> None:
        fresh = call.prompt - call.cached if call.sticky == self.id else call.prompt
        self.calls[call] = self.share.begin(max(fresh, 0), call.most, now)
        if self.held:
            call.hold(self.held)

    def end(self, call: Call, now: float, sampled: int | None) -> None:
        """The call is over; `sampled` as in Share.end."""
        self.share.end(self.calls.pop(call), now, sampled)
        call.let_go()

    def hold(self, why: str) -> None:
        """Clocks of the calls here stand still as long as there is a `why`."""
        if bool(why) != bool(self.held):
            for call in self.calls:
                if why:
                    call.hold(why)
                else:
                    call.let_go()
        self.held = why

    def hear(self, now: float) -> None:
        """A sign of life."""
        self.share.heard = now
        self.misses = 0
        self.progress = None

    def told(self, about: Backend) -> None:
        """What the registry says of it now; what the server itself has said fills the gaps."""
        known = self.about
        self.about = replace(about, window=about.window or known.window, tokenizer=about.tokenizer or known.tokenizer)
        self.gone = False
        if about.endpoint in UNLABELLED:
            self.endpoint, self.labels = about.endpoint, False

    def settle(self, died: bool) -> None:
        """A probe has told whether it was gone when calls were lost here."""
        for strike in self.strikes:
            strike.died = died or bool(strike.died)
        self.strikes.clear()

    def back_off(self, now: float) -> None:
        """It is full: nothing goes there for a while, longer each time."""
        self.fulls += 1
        self.full_until = now + min(5.0, 0.1 * 2.0 ** min(self.fulls, 10))

    async def look(self, model: str) -> Look:
        """Ask for one token, and beside it whether it is paused and whether it works. One time limit for all."""
        endpoint = ENDPOINTS.get(self.about.kind, self.endpoint)
        probe, paused, progress = await asyncio.gather(
            self._probe(model, endpoint), self.engine.is_paused(), self.engine.generated(), return_exceptions=True
        )
        for found in (probe, paused, progress):
            if isinstance(found, BaseException) and not isinstance(found, EngineError):
                raise found
        if isinstance(paused, EngineError) and paused.fault == "misfit":
            self.labels = self.control = False
        elif isinstance(paused, bool):
            self.labels, self.control = self.about.endpoint not in UNLABELLED, True
        return Look(
            probe if isinstance(probe, Probe) else None,
            probe if isinstance(probe, EngineError) else None,
            paused if isinstance(paused, bool) else None,
            progress if isinstance(progress, int) else None,
        )

    async def _probe(self, model: str, endpoint: str) -> Probe:
        try:
            return await self.engine.probe(model, endpoint, priority=FIRST if self.takes_priority else None)
        except EngineError as error:
            if not self.takes_priority or "priority" not in str(error).lower():
                raise
            self.takes_priority = False
            return await self.engine.probe(model, endpoint)

    async def ask(
        self, call: Call, request_id: str, model: str, ids: Sequence[int], params: dict[str, Any],
        priority: int | None, session_id: str, limit: float,
    ) -> bytes:  # fmt: skip
        """The body of the reply. Raises Repeat, ContextFull, TaskError, PolicyError; a cancel closes the socket."""
        sent = priority if self.takes_priority else None
        asked = request.body(self.endpoint, request_id, model, ids, params, sent, call.said)
        status, body = await self._post(call, request_id, asked, session_id, limit)
        if status == 400 and sent is not None and b"priority" in body:
            self.takes_priority = False
            return await self.ask(call, request_id, model, ids, params, None, session_id, limit)
        if status != 200:
            raise reply.failure(status, body)
        return body

    async def _post(self, call: Call, request_id: str, body: Any, session_id: str, limit: float) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id, "X-Session-ID": session_id}
        url = self.engine.url + request.PATHS[self.endpoint]
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        try:
            async with asyncio.timeout(limit) as call.scope:
                async with self.session.post(
                    url, data=body, headers=headers, timeout=limits, allow_redirects=False
                ) as answer:
                    return answer.status, await answer.read()
        except aiohttp.InvalidURL as error:
            raise ConfigError(f"{self.about.url!r} is no URL of a policy server: {error}") from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Repeat("refused", str(error) or f"no connection within {CONNECT_SECONDS:g} s") from error
        except TimeoutError as error:
            if call.taken is not None:
                raise call.taken from None
            raise PolicyError(
                f"request {request_id}: no reply from {self.id} within {limit:g} s (policy.request_timeout)"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Repeat("lost", f"{type(error).__name__}: {error}") from error
        finally:
            call.scope = call.taken = None

    async def abort(self, request_id: str) -> None:
        """Tell the engine too: best effort, since the closed socket already ends the request."""
        path = "/inference/v1/abort_requests" if self.endpoint == "generate" else "/abort_requests"
        asked = {"request_ids": [request.engine_id(self.endpoint, request_id)]}
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            limits = aiohttp.ClientTimeout(total=ABORT_SECONDS)
            async with self.session.post(self.engine.url + path, json=asked, timeout=limits) as answer:
                await answer.read()
