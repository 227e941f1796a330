"""The trainer's side of a run: its weights, the policy servers that it registers, its pauses and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from pipeline.backends import Backend, Backends, View
from pipeline.errors import RedisUnavailable, TaskError
from pipeline.queue import Queue
from pipeline.registration import Registration, register
from pipeline.weights import Mode, Move, Update, Weights

CLOSE_SECONDS = 30.0
"""For a client that leaves in a pause to let the servers go on."""


class RunClient:
    """The half of RolloutClient that speaks of the run and its policy; the other half plays the tasks.

    `told(True)` is called when a pause of the policy begins that this client must keep alive, `told(False)` when it is
    over.
    """

    def __init__(self, queue: Queue, name: str, told: Callable[[bool], None]) -> None:
        self.queue = queue
        self.config = queue.config
        self.name = name
        self.backends = Backends(queue)
        self._weights = Weights(self.backends, name, life=self.config.lease.done_seconds, told=told)
        self._registered: list[Registration] = []

    async def close(self) -> None:
        """End the pause and the run that this client started, strike off the servers that it registered."""
        with contextlib.suppress(RedisUnavailable, TimeoutError):  # what can't be ended now ends with its lease
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._weights.close()
                await self.backends.end_run(self.name)
        for registration in self._registered:
            await registration.close()
        self._registered.clear()

    def _check_lane(self, lane: str) -> None:
        if lane not in self.config.line.lanes:
            raise TaskError(
                f"lane {lane!r} is unknown (known: {', '.join(self.config.line.lanes)}); line.lanes names them"
            )

    # -- weights ------------------------------------------------------------------------------------------------------

    async def start_run(
        self,
        version: int,
        *,
        path: str | os.PathLike[str] = "",
        move: Move | None = None,
        mode: Mode = "keep",
        batch: int = 0,
        max_staleness: int | None = None,
        lane: str = "train",
    ) -> Update:
        """A run of training begins, or goes on after a stop, at weights `version`; it may be lower than before.

        `path` or `move`: how the servers get them (as for `update_weights`); neither: they have them. `batch`: scored
        rollouts of `lane` that one update trains on; at most (max_staleness + updates + 1) * batch are begun or popped
        then (0: no bound). `max_staleness`: in updates, -1 any; default policy.max_staleness. Raises PolicyError when
        no registered server took the weights.
        """
        self._check_lane(lane)
        limit = self.config.policy.max_staleness if max_staleness is None else max_staleness
        return await self._weights.start(
            version, path=path, move=move, mode=mode, batch=batch, max_staleness=limit, lane=lane
        )

    async def update_weights(
        self, version: int, *, path: str | os.PathLike[str] = "", move: Move | None = None, mode: Mode = "keep"
    ) -> Update:
        """All policy servers get new weights while rollouts run; `version` rises.

        `path`: a folder that the servers load; or `move`: a coroutine function that moves them, given the servers
        (paused). `mode`: running calls are kept and go on with the new weights ("keep"), end first ("wait"), or are
        broken off and go on from their partial tokens ("abort"). Names the servers that were left behind. Raises
        PolicyError when none took them (the old ones stay in force), and what `move` raises.
        """
        return await self._weights.update(version, path=path, move=move, mode=mode)

    async def pause(self, mode: Mode = "keep") -> tuple[Backend, ...]:
        """No call goes out and no token is sampled until `resume`: for a trainer that moves the weights itself.

        Returns the servers for which that holds. It holds as long as this client lives and `resume` was not called.
        """
        return await self._weights.pause(mode)

    async def resume(self, version: int | None = None) -> Update:
        """Go on after `pause`, with weights `version` on all servers that it named; None: the weights did not move."""
        return await self._weights.resume(version)

    # -- servers ------------------------------------------------------------------------------------------------------

    async def register_backend(
        self,
        url: str,
        kind: str = "vllm",
        *,
        id: str = "",
        model: str = "",
        tokenizer: str = "",
        version: int | None = None,
    ) -> str:
        """Offer a policy server to the line for as long as this client lives; returns its id.

        It must generate a token first. `version`: of its weights, where its own label does not say it. Raises
        PolicyError (it does not answer, or lacks what is needed) and ConfigError (a wrong URL or kind, a taken id).
        """
        registration = await register(
            self.config, url, self.name, id=id, kind=kind, model=model, tokenizer=tokenizer, version=version
        )
        self._registered.append(registration)
        return registration.id

    async def policy(self) -> View:
        """The policy as the line knows it: weights in force, pause, bound; its servers and what runs on them."""
        return await self.backends.view()

    # -- the run ------------------------------------------------------------------------------------------------------

    async def pause_run(self, why: str = "", lane: str = "train") -> None:
        """Nothing new of a lane begins at INIT; groups that have begun go on to their end. It holds until `resume_run`,
        also when this client leaves. To stop the policy too, at once: `pause`."""
        self._check_lane(lane)
        await self.queue.pause_lane(lane, why or f"{self.name} asked for it")

    async def resume_run(self, lane: str = "train") -> None:
        """Go on after `pause_run`. Safe twice."""
        self._check_lane(lane)
        await self.queue.resume_lane(lane)

    async def end_run(self) -> bool:
        """The run that anybody started is over: it bounds no new rollouts any more. False when there was none.

        `close` does it for the client that started it; a trainer that died leaves its bound, for the one that goes on.
        """
        return await self.backends.end_run()
