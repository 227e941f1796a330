"""One policy server's weights: it is paused, gets others, is told their version, and goes on. One process at a time.

The registry has no version for it meanwhile, so that it gets no call if that process dies; whoever comes next begins
with the pause again. Weights that nobody knows (a load that broke off) must sample no token: what runs is ended.
A process that was frozen, and comes to when its turn is over, touches a server no more: others may have changed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal

from pipeline.backends import UNLABELLED, Backend, Backends, Load, View
from pipeline.engine import Engine
from pipeline.engine_calls import EngineError
from pipeline.errors import RedisUnavailable

Mode = Literal["keep", "wait", "abort"]
"""What running calls do: `keep` freezes them, and they go on with the new weights; `wait` lets them end first; `abort`
ends them, and they go on from their partial tokens. A server without control side can only be waited for."""

CONTROL_SECONDS = 30.0
"""For one control call (pause, relabel, ...): an engine in the middle of a large step answers late."""
LOOK_SECONDS = 0.05


class Change:
    """One server on its way to other weights.

    `state`: "held" has the weights that it had, "moving" has weights that nobody knows, "done" has the new ones. `why`
    it did not get there, "" while all is well. `mine`: whether this process may still change it, asked at each step.
    """

    def __init__(
        self, backends: Backends, backend: Backend, engine: Engine, mine: Callable[[], Awaitable[bool]]
    ) -> None:
        self.backend = backend
        self._mine = mine
        self.state: Literal["held", "moving", "done"] = "held"
        self.why = ""
        self.control = backend.kind == "vllm"
        self._backends, self._engine = backends, engine
        self._policy = backends.config.policy

    async def freeze(self, mode: Mode, *, external: bool, hide: bool = True, number: int | None = None) -> None:
        """No token is sampled from here on. One without control side samples until its calls are over (`quiet`).

        `hide`: its version is struck off first, so that it gets no call if this process dies now. `number`: of the
        pause; calls of a server that does not label its tokens end before it, whatever the mode.
        """
        if hide:
            await self._note(version=None)
        if number is not None and self.backend.endpoint in UNLABELLED:
            await self.quiet(number)
        try:
            if not self.control:
                raise EngineError("misfit", f"a server of kind {self.backend.kind} can't be told to load weights")
            await self._engine.pause(mode, timeout=self._policy.request_timeout if mode == "wait" else None)
            if not await self._engine.is_paused():
                raise EngineError("refused", f"{self._engine.url} was told to pause and says that it is not paused")
        except EngineError as error:
            if not external or error.fault != "misfit":
                raise
            self.control = False
            if self.backend.endpoint not in UNLABELLED:
                await self._note(endpoint="completions")  # its labels never change: those of its replies mean nothing

    async def quiet(self, number: int) -> None:
        """Wait until no worker has a call on it, and all know of this pause."""
        async with asyncio.timeout(self._policy.request_timeout):
            view = await self._backends.view()
            while unaware(view, number) or view.loads.get(self.backend.id, Load()).calls:
                await asyncio.sleep(LOOK_SECONDS)
                view = await self._backends.view()

    async def take(self, version: int, path: str, *, probe: bool = False) -> None:
        """It gets these weights (without a path it has them) and goes on. `probe`: a token must show that it does."""
        if path:
            await self._in_turn()
            self.state = "moving"
            await self._engine.load(path, timeout=self._policy.update_timeout)
        if self.control:
            await self._in_turn()
            await self._engine.relabel(version)
            if (said := await self._engine.version()) != version:
                raise EngineError("refused", f"{self._engine.url} was told version {version} and says {said}")
            await self._engine.reset_cache()
            await self._in_turn()
            await self._engine.resume()
        if probe:
            found = await self._engine.probe(self.backend.model, self.backend.endpoint)
            if found.version not in (None, version):
                raise EngineError("refused", f"it was told version {version} and samples with {found.version}")
        await self._in_turn()
        await self._note(version=version, why="")
        self.state = "done"

    async def _in_turn(self) -> None:
        if not await self._mine():
            raise EngineError("refused", "this process was silent for too long: another one may change its weights now")

    async def let_go(self) -> None:
        """It goes on with the weights that it had. Where nobody knows those, what it runs ends, and it stays hidden."""
        if self.state == "done" or not await self._mine():
            return
        await self._backends.note(self.backend.id, version=self.backend.version if self.state == "held" else None)
        if self.control:
            with contextlib.suppress(EngineError):
                if self.state == "moving":
                    await self._engine.pause("abort")
                await self._engine.resume()

    async def fail(self, error: Exception) -> None:
        """It did not get there."""
        self.why = str(error) or "it took too long"
        await self.let_go()

    async def _note(self, **about: object) -> None:
        if not await self._backends.note(self.backend.id, **about):
            raise EngineError("dead", "it was struck off the registry meanwhile")


async def bring_up(backends: Backends, id: str, engine: Engine) -> bool:
    """Load the weights in force onto a server that has others. True: it has them, and generated a token with them.

    False: nothing was done, ask again later: the policy is paused or unmanaged, no folder is known, another process is
    at it, or it is not registered. Raises EngineError when it does not take them; its `why` says so then.
    """
    async with alone(backends, id, 0.0) as lock:
        view = await backends.view()
        policy = view.policy
        backend = next((item for item in view.backends if item.id == id), None)
        if lock is None or backend is None or policy.version is None or policy.paused:
            return False
        if backend.version == policy.version:
            return True
        if not policy.path or backend.kind != "vllm":
            return False
        change = Change(backends, backend, engine, lock.held)
        try:
            await change.freeze("keep", external=False)
            await change.take(policy.version, policy.path, probe=True)
        except EngineError as error:
            await change.fail(error)
            if await lock.held():
                await backends.note(id, why=f"it did not take weights {policy.version}: {error}")
            raise
        return True


class Lock:
    """The right to change one server's weights: a lease, renewed for as long as this process lives."""

    def __init__(self, backends: Backends, id: str) -> None:
        self._backends, self._id = backends, id
        self._who, self._life = uuid.uuid4().hex, backends.config.policy.backend_lease

    async def take(self) -> bool:
        return await self._backends.raising(self._id, self._who, self._life)

    async def held(self) -> bool:
        """Renew it; False once it has run out, for then another one may have had it."""
        return await self._backends.still_raising(self._id, self._who, self._life)

    async def keep(self) -> None:
        """Renew it until it has run out; a Redis that is away is asked again."""
        held = True
        while held:
            await asyncio.sleep(self._life / 3)
            with contextlib.suppress(RedisUnavailable):
                held = await self.held()

    async def free(self) -> None:
        await self._backends.raised(self._id, self._who)


@contextlib.asynccontextmanager
async def alone(backends: Backends, id: str, wait: float) -> AsyncIterator[Lock | None]:
    """Be the only one who changes this server's weights; None when another process was at it for `wait` seconds."""
    lock, until = Lock(backends, id), time.monotonic() + wait
    while not await lock.take():
        if time.monotonic() > until:
            yield None
            return
        await asyncio.sleep(LOOK_SECONDS)
    renewal = asyncio.create_task(lock.keep())
    try:
        yield lock
    finally:
        renewal.cancel()
        await lock.free()


def unaware(view: View, number: int) -> list[str]:
    """Living RUN workers that do not know of pause `number` yet."""
    return [name for name, seen in view.seen.items() if seen < number]
