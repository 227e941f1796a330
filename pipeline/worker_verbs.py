"""The worker's verbs of the queue: claim, commit or fail, payloads, sandboxes, the beat and the tick."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import redis.asyncio

from pipeline.errors import RedisUnavailable
from pipeline.leases import (
    NO_PLACES,
    Claim,
    Failure,
    Places,
    Ticked,
    read_beat,
    read_claim,
    read_tick,
    sendable,
    text_of,
)
from pipeline.payload_verbs import PayloadVerbs
from pipeline.queue_calls import AWAY
from pipeline.scripts import script_call


class WorkerVerbs(PayloadVerbs):
    """Rollouts are leased stage by stage, each lease with its token. Raises as QueueCalls does."""

    async def claim(
        self, stage: str, n: int, worker: str, nonce: str | None = None, places: Places = NO_PLACES
    ) -> list[Claim]:
        """Lease up to n rollouts of a stage; lanes by weight, the oldest group first.

        At INIT, at most `places` of them are of handlers that need a sandbox.
        """
        args = self._claim_arguments(stage, n, worker, nonce or self.nonce(), places)
        return [read_claim(row) for row in await self.verb("claim", *args)]

    async def claim_at_bell(
        self,
        client: redis.asyncio.Redis,
        seconds: float,
        stage: str,
        n: int,
        worker: str,
        nonce: str,
        places: Places = NO_PLACES,
    ) -> list[Claim] | None:
        """Wait at the stage's doorbell (with free places, at theirs too) and claim, in one trip; `client` may block.

        None when the reply was lost or is an error: `claim` with the same nonce then tells what happened.
        """
        pipe = client.pipeline(transaction=False)
        bells = [self.key("bell", stage)] + ([self.key("bell", "place")] if places.free > 0 else [])
        pipe.execute_command("BLPOP", *bells, seconds)
        pipe.execute_command(*script_call("claim", self.prefix, self._claim_arguments(stage, n, worker, nonce, places)))
        try:
            _, reply = await pipe.execute(raise_on_error=False)
        except AWAY:
            return None
        return None if isinstance(reply, Exception) else [read_claim(row) for row in reply]

    def _claim_arguments(self, stage: str, n: int, worker: str, nonce: str, places: Places) -> tuple[Any, ...]:
        lanes = [
            item
            for lane, weight in self.config.line.lanes.items()
            for item in (lane, weight, max(0, places.by_lane.get(lane, places.free)))
        ]
        inline = self.config.payload.inline_bytes
        return (stage, n, self.lease_ms, worker, nonce, inline, max(0, places.free), self.reads, *lanes)

    async def leave_sandbox(self, ids: Sequence[str]) -> list[bool]:
        """Take these rollouts' sandboxes away; whether each had one. Who works in it finds it gone: a loss."""
        return [bool(int(item)) for item in await self.verb("leave", *ids)]

    async def silent(self, worker: str) -> float | None:
        """Seconds since a worker's last beat; None when it is not listed.

        0 while that tells nothing: Redis is away, or so lately back (`tick.lua`) that nobody could beat.
        """
        asked = (("ZSCORE", self.key("beats"), worker), ("TIME",), ("MGET", self.key("tick"), self.key("blind")))
        try:
            score, (seconds, micros), (tick, blind) = await asyncio.gather(
                *(self.outlast(partial(self.pipe.execute, *command), 0.0) for command in asked)
            )
        except RedisUnavailable:
            return 0.0
        if score is None:
            return None
        now = int(seconds) * 1000 + int(micros) / 1000
        if (tick and now - float(tick) > self.lease_ms / 2) or float(blind or 0) > now:
            return 0.0
        return max(0.0, (now - float(score)) / 1000)

    async def note_place(self, handler: str, needed: bool) -> None:
        """Remember that this handler's rollouts need a sandbox: what is enqueued from now on waits for a place."""
        await self.execute("SADD" if needed else "SREM", self.key("places"), handler)

    async def hosted(self, sandboxes: Sequence[tuple[str, str, str]]) -> list[bool]:
        """For each (id, the sandbox's text, token of INIT's attempt): whether that sandbox is still wanted."""
        if not sandboxes:
            return []
        return [bool(int(item)) for item in await self.verb("hosted", *(part for item in sandboxes for part in item))]

    async def commit(
        self,
        stage: str,
        id: str,
        token: str,
        next_stage: str,
        envelope: bytes,
        *,
        payload: bytes | None = None,
        written: bool = False,
        restart: str = "",
        sandbox: str = "-",
        record: str = "",
        worked: float = 0.0,
        result: bytes = b"",
    ) -> str:
        """Finish a stage and enter the next, atomically: OK, AGAIN, STALE, NOPAYLOAD or CANCELLED.

        `payload` comes along when it is small; `written` says that `write_payload` put it under this token; neither
        keeps the one that is there. `worked` in seconds. `sandbox`: its reference's text, "" for none, "-" unchanged.
        """
        args = (
            stage, id, token, next_stage, envelope, token if written or payload is not None else "", payload or b"",
            restart, record, int(worked * 1000), result, self.dead_seconds, sandbox,
        )  # fmt: skip
        return text_of(await self.verb("commit", *args))

    async def fail(
        self, stage: str, id: str, token: str, failure: Failure, *, record: str = "", worked: float = 0.0
    ) -> tuple[str, int, int]:
        """End an attempt without a result: (READY, DELAYED, FAILED, CANCELLED, AGAIN or STALE, attempts, losses)."""
        args = (
            stage, id, token, failure.mode, int(failure.delay * 1000), failure.to, self.config.retry.attempts,
            self.config.retry.losses, failure.kind, sendable(failure.why), record, int(worked * 1000),
            self.dead_seconds, sendable(failure.log[-4096:]), failure.host, failure.exit_code,
        )  # fmt: skip
        status, attempts, losses = await self.verb("fail", *args)
        return text_of(status), int(attempts), int(losses)

    def beat_arguments(
        self, worker: str, about: dict[str, Any] | None, held: Iterable[tuple[str, str, str]], client_life: int = 0
    ) -> tuple[Any, ...]:
        """Arguments of the beat script, for the heartbeat thread's own connection. `held`: (stage, id, token).

        `client_life`: seconds for which a trainer's client counts as alive from now on; 0 for a worker.
        """
        life = int(self.config.limits.outage + max(self.config.limits.run, 60))
        flat = [item for triple in held for item in triple]
        return (worker, self.lease_ms, life, json.dumps(about) if about else "", client_life, *flat)

    def tick_arguments(self, worker: str = "") -> tuple[Any, ...]:
        retry = self.config.retry
        return (self.lease_ms, 500, retry.attempts, retry.losses, self.dead_seconds, worker, self.line_schema)

    async def beat(
        self, worker: str, about: dict[str, Any] | None, held: Sequence[tuple[str, str, str]]
    ) -> list[str | int]:
        """Renew leases: 1 held, 0 lost, or the reason of a cancel, for each (stage, id, token)."""
        beaten = read_beat(await self.verb("beat", *self.beat_arguments(worker, about, held)))
        self.hear_schema(beaten.schema)
        return beaten.held

    async def tick(self) -> Ticked:
        """Upkeep: expire leases, promote delayed rollouts, end what is over its time."""
        ticked = read_tick(await self.verb("tick", *self.tick_arguments()))
        self.hear_schema(ticked.schema)
        return ticked
