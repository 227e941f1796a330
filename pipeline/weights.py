"""New weights for the policy's servers while rollouts run: the trainer's side.

    weights = Weights(backends, owner)
    await weights.update(7, path="/checkpoints/7")    # form "load": each server reads the folder
    await weights.update(8, move=broadcast)           # form "external": the trainer's own code moves them
    servers = await weights.pause()                   # the same by hand
    ...
    await weights.resume(9)

For each server: its version is struck off the registry, it is paused, its weights change, it is told the new version,
forgets its cache, goes on, and is noted with it. Who dies in between leaves a server without a version, which gets no
calls until it is brought up. The new version is in force once every RUN worker knows of the pause: from then on none
sends to a server that has older weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import get_args

from pipeline.backends import Backend, Backends
from pipeline.engine import MOST_VERSION
from pipeline.errors import ConfigError, PolicyError
from pipeline.held_pause import HeldPause, Update
from pipeline.weight_change import LOOK_SECONDS, Mode, bring_up

__all__ = ["Mode", "Move", "Update", "Weights", "bring_up"]

log = logging.getLogger(__name__)

Move = Callable[[tuple[Backend, ...]], object]
"""Moves the weights to these servers, which are paused. A coroutine function; a plain one holds up the event loop."""

LEFT = (
    "Servers whose weights may have moved get no calls before the next update; or `rollout policy pause`, then "
    "`rollout policy resume --version N`, says what they have"
)


class Weights:
    """The verbs of a trainer, and of a person at the command line. One pause at a time.

    `owner` names who pauses. `life`: seconds after which a pause ends unless it is renewed (`policy_keep.lua`); 0: it
    holds until it is resumed. `told(True)` is called when a pause begins, `told(False)` when it is over.
    """

    def __init__(
        self, backends: Backends, owner: str, *, life: float = 0.0, told: Callable[[bool], None] = lambda _: None
    ) -> None:
        self._backends, self._owner, self._life, self._told = backends, owner, life, told
        self._pause: HeldPause | None = None

    async def update(
        self, version: int, *, path: str | os.PathLike[str] = "", move: Move | None = None, mode: Mode = "keep"
    ) -> Update:
        """All usable servers get these weights: from a folder that they can read (`path`), or by `move`.

        The first update of a line on which no run was started starts one, without a bound. Raises PolicyError when no
        usable server took them (the old ones stay in force), when another process has paused the policy, and when
        the version does not rise; what `move` raises is raised here.
        """
        _check(version, mode)
        if bool(path) == (move is not None):
            raise ConfigError("an update needs either a path from which the servers load, or a move: give one of them")
        folder = _folder(path)
        if (await self._backends.view()).policy.version is None:
            return await self.start(version, path=path, move=move, mode=mode)
        async with self._pausing(
            f"weights {version} are on their way", mode, move is not None, target=version
        ) as pause:
            return await self._change(pause, version, folder, move)

    async def start(
        self,
        version: int,
        *,
        path: str | os.PathLike[str] = "",
        move: Move | None = None,
        mode: Mode = "keep",
        batch: int = 0,
        max_staleness: int = -1,
        lane: str = "",
    ) -> Update:
        """A run begins or goes on, at whatever version. Without path and move the servers have these weights already.

        Servers that come later are brought up, where a path is known. Raises ConfigError for what can't be meant, and
        PolicyError as `update` does; the run has begun then all the same.
        """
        _check(version, mode)
        if batch < 0 or max_staleness < -1:
            raise ConfigError(f"batch is {batch} and max_staleness {max_staleness}: they are at least 0 and -1")
        if path and move is not None:
            raise ConfigError("a run starts from a path or by a move, not by both")
        folder = _folder(path)
        before = (await self._backends.view()).policy.version
        if before is not None and version < before:
            log.warning(
                "the run goes on at weights %d, below %d: what is in the line may have been sampled by weights whose "
                "numbers are given a second time; cancel it, or go on above %d", version, before, before,
            )  # fmt: skip

        async def start() -> None:
            moves = bool(path or move)
            await self._backends.start(
                version, folder, batch=batch, max_staleness=max_staleness, lane=lane, moves=moves, owner=self._owner
            )

        async with self._pausing(f"a run starts at weights {version}", mode, not path, start=start) as pause:
            return await self._change(pause, version, folder, move)

    async def pause(self, mode: Mode = "keep", *, moving: bool = True) -> tuple[Backend, ...]:
        """No call goes out and no token is sampled until `resume`; returns the servers for which that holds.

        `moving`: their weights may move from now on, so that they have no version until `resume` says one.
        """
        _check(0, mode)
        why = "the trainer changes the weights" if moving else f"{self._owner} has paused it"
        try:
            pause = await self._freeze(why, mode, external=True, hide=moving or self._life > 0)
        except BaseException:
            await self._leave()
            raise
        for change in pause.sound:
            change.state = "moving" if moving else "held"
        return tuple(change.backend for change in pause.sound)

    async def resume(self, version: int | None = None) -> Update:
        """Go on: with weights `version` on all servers that were paused; None: nothing has moved."""
        if self._pause is None:
            raise PolicyError("the policy is not paused by this process: call `pause` first")
        pause = self._pause
        if version is not None:
            _check(version, "keep")
            await self._rises(version)
            try:
                return await self._finish(pause, version, "")
            finally:
                await self._leave()
        for change in pause.sound:
            if change.backend.version is not None:
                change.state = "held"
        await self._leave()
        return pause.report((await self._backends.view()).policy.version)

    async def adopt(self) -> None:
        """Take over the pause in force, whoever's it is, for `resume` to end. Raises PolicyError without one."""
        view = await self._backends.view()
        if not view.policy.paused:
            raise PolicyError("the policy is not paused")
        self._pause = HeldPause(self._backends, view.policy.pauses, view.policy.pause_owner)
        for backend in view.backends:
            change = await self._pause.add(backend)
            unknown = view.policy.version is not None and backend.version is None
            change.state = "moving" if unknown else "held"

    async def part(self) -> None:
        """Leave the pause in force, for another process to `adopt`."""
        pause, self._pause = self._pause, None
        if pause is not None:
            self._told(False)
            await pause.close()

    async def close(self) -> None:
        """Leave no pause behind. Servers whose weights may have moved stay unusable until the next update."""
        if self._pause is not None:
            log.warning("%s leaves while it pauses the policy, which goes on now. %s", self._owner, LEFT)
            await self._leave()

    # -- steps -------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _pausing(
        self,
        why: str,
        mode: Mode,
        external: bool,
        *,
        target: int | None = None,
        start: Callable[[], Awaitable[None]] | None = None,
    ) -> AsyncIterator[HeldPause]:
        if self._pause is not None:
            raise PolicyError("the policy is paused by this process: call `resume` first")
        try:
            yield await self._freeze(why, mode, external=external, hide=True, target=target, start=start)
        finally:
            await self._leave()

    async def _freeze(
        self,
        why: str,
        mode: Mode,
        *,
        external: bool,
        hide: bool,
        target: int | None = None,
        start: Callable[[], Awaitable[None]] | None = None,
    ) -> HeldPause:
        """Pause the line and every server that answers."""
        if start is not None:
            await self._free()
        number = await self._backends.pause(self._owner, self._life, why, mode, target)
        self._pause = pause = HeldPause(self._backends, number, self._owner)
        self._told(True)
        if start is not None:
            await start()
            pause.starts = True
        await pause.freeze(mode, external=external, hide=hide)
        return pause

    async def _free(self) -> None:
        """A trainer that died may have left a pause, which ends by itself. One without a lease is a person's."""
        said = False
        while (policy := (await self._backends.view()).policy).pause_until and policy.pause_owner != self._owner:
            if not said:
                log.warning(
                    "%s still pauses the policy (%s): waiting until that lease runs out, lease.done_seconds at most",
                    policy.pause_owner,
                    policy.paused,
                )
            said = True
            await asyncio.sleep(LOOK_SECONDS)

    async def _change(self, pause: HeldPause, version: int, path: str, move: Move | None) -> Update:
        if move is not None:
            for change in pause.sound:
                change.state = "moving"
            moved = move(tuple(change.backend for change in pause.sound))
            if inspect.isawaitable(moved):
                await moved
        return await self._finish(pause, version, path)

    async def _finish(self, pause: HeldPause, version: int, path: str) -> Update:
        """Every paused server goes on with these weights; then they are in force."""
        await pause.each(lambda change: change.take(version, path))
        await pause.known()
        update = pause.report(version)
        if all(change.backend.drained for change in pause.sound) and (pause.changes or not pause.starts):
            reasons = "; ".join(f"{id}: {why}" for id, why in update.ejected.items()) or "none is registered"
            force = "the run has begun, and waits for a server" if pause.starts else "the old ones stay in force"
            raise PolicyError(f"no policy server took weights {version} ({reasons}); {force}")
        end = self._backends.lift(pause.owner) if pause.starts else self._backends.commit(pause.owner, version, path)
        if not await end:
            raise PolicyError(
                f"the pause for weights {version} was over before all servers had them (it was not renewed for "
                f"{self._life:g} s, or somebody ended it): the old ones stay in force"
            )
        log.info("weights %d are in force on %d servers (%.2f s)", version, len(update.updated), update.seconds)
        for id, why in update.ejected.items():
            log.warning("policy server %s was left behind: %s", id, why)
            await self._backends.note(id, why=f"it did not take weights {version}: {why}")
        return update

    async def _rises(self, version: int) -> None:
        """Before anything is touched: what can't be in force after all."""
        policy = (await self._backends.view()).policy
        if policy.version is not None and version <= policy.version:
            raise PolicyError(
                f"weights {version} can't follow weights {policy.version}, which are in force: versions only rise. The "
                "policy is still paused"
            )

    async def _leave(self) -> None:
        """End the pause, if it is still there."""
        pause, self._pause = self._pause, None
        if pause is None:
            return
        try:
            await pause.let_go()
        finally:
            self._told(False)
            await pause.close()


def _check(version: int, mode: str) -> None:
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= MOST_VERSION:
        raise ConfigError(f"{version!r:.80} is no version of weights: give an integer from 0 to 2**53 that rises")
    if mode not in get_args(Mode):
        raise ConfigError(f"mode {mode!r} is unknown (known: {', '.join(get_args(Mode))})")


def _folder(path: str | os.PathLike[str]) -> str:
    """The folder, absolute: servers have another current folder. "" where none is given.

    vLLM does not survive a load of weights that are not there, so that is found out before anything is paused.
    """
    if not os.fspath(path):
        return ""
    folder = os.path.abspath(path)
    if not (os.path.isdir(folder) and os.listdir(folder)):
        raise ConfigError(f"no weights lie in {folder}: give a folder that this process and the servers see there")
    return folder
