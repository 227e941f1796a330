"""Which weights sampled which token: by the server's labels, or by asking it before and after the call."""

from __future__ import annotations

from pipeline.engine import UNTOLD, version_number
from pipeline.engine_calls import EngineError
from workers.policy.backend import Call, Server
from workers.policy.fleet import Fleet
from workers.policy.reply import Repeat, Reply


class Versions:
    """The checks of one call's versions, against the weights in force as the fleet knows them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def at_dispatch(self, call: Call, server: Server) -> int:
        """The weights' version before the call goes out: it counts where the reply does not label its tokens."""
        if server.spans or (call.version is not None and not server.control):
            return call.version or 0
        return await self._asked(call, server)

    async def spans(self, call: Call, server: Server, answer: Reply, dispatched: int) -> list[tuple[int, int, int]]:
        """Which weights sampled which token: the server's labels where they mean a thing, else the version at dispatch.

        Raises Repeat for tokens of weights older than those in force when the call was sent, and for those of which
        nobody can say whether the weights changed under them.
        """
        spans = answer.versions
        if spans is not None and (server.labels or call.version is None):
            server.spans = True
            if spans:
                self._check(call, min(span[0] for span in spans), answer.untold)
            return spans
        if call.version is not None:
            if server.control and await self._asked(call, server) != dispatched:
                raise Repeat("refused", f"its weights changed under this call, from version {dispatched}")
            await self._fleet.in_touch()
            if call.lapses != self._fleet.lapses:
                raise Repeat("refused", "this process was silent for so long that its weights may have changed")
        return [(dispatched, 0, len(answer.ids))] if answer.ids else []

    async def _asked(self, call: Call, server: Server) -> int:
        """Its version by its own word. Raises Repeat where that is not the one in force."""
        try:
            label = await server.engine.label()
        except EngineError as error:
            raise Repeat("overload" if error.fault == "overload" else "refused", str(error)) from None
        version = 0 if label is None else version_number(label)
        if call.version is not None and label is not None:
            self._check(call, version, label == UNTOLD)
        return version

    def _check(self, call: Call, oldest: int, untold: bool) -> None:
        """A server missed an update, or is a fresh one: what it samples is not of the weights in force.

        One to which nobody has told a version has what it started with, whatever number that is taken for; only where
        the trainer names no folder may that be the run's first weights.
        """
        if call.version is not None and (oldest < call.version or (untold and self._fleet.policy.path)):
            has = "those that it started with" if untold else f"version {oldest}"
            raise Repeat(
                "behind",
                f"its weights are {has}, version {call.version} was in force when it was asked",
                None if untold else oldest,
            )
