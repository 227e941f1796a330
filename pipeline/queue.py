"""The line's queue in Redis: leases with fencing tokens. This module and the Lua beside it alone know the keys.

Every key begins with the line's prefix "{name}", one hash tag. Life: until the last ack of its rollout or group, unless
stated.

    schema          string   message format of the line
    seq             counter  order in which groups were enqueued
    r:ID            hash     one rollout: env group lane order stage state token owner attempts:STAGE losses deaths
                             alone since entered waited worked restart payload sandbox place cancel overdue ttl
                             deadline
                             spent:STAGE; at its end outcome ended result, or kind why at log host exit
    a:ID            list     its attempts, JSON, the last 40
    p:ID:TOKEN      string   payload written by the holder of TOKEN (zstd msgpack); expires until a commit makes it stay
    t:GROUP         string   the task of a group (zstd msgpack); where a letter needs it, it outlives the last ack by
                             keep.dead_days
    g:GROUP         hash     samples asked lane order done left letters begun; wanted life rest, and usable closed part
                             clock spare, where it may close before all have ended
    m:GROUP         set      ids of the group that are not acked
    ready:STAGE:LANE zset    waiting rollouts by order (age of the group, moved by priority); STAGE done: to be popped
    place:LANE      zset     waiting rollouts of INIT that need a sandbox: for a host with a free place
    places          set      handlers whose rollouts need a sandbox, as INIT workers found
    lease:STAGE     zset     leased rollouts by the end of their lease (server ms)
    delayed:STAGE   zset     rollouts that wait for a retry, by due time (ms)
    groups:LANE     zset     complete groups, by order
    closing         zset     groups with a deadline by the time at which they close (ms)
    paused          hash     lane -> why nothing new of it begins at INIT (JSON)
    spare           hash     lane -> members of begun groups beyond the number with which those close
    due             zset     rollouts by the time their deadline or queue_ttl ends (ms)
    own:WORKER      set      ids that a worker or consumer holds; empty = gone
    died:WORKER     string   how many rollouts it held when its leases ran out; 1 h
    credit:STAGE    hash     lane -> credit of the weighted turn
    claim:W:STAGE   hash     last claim of a worker (nonce, what it got); 1 h
    bell:STAGE, bell:done:LANE, bell:place, bell:worker:W   lists   doorbells, 64 rings at most; a worker's 1 h
    dead:STAGE      zset     dead letters by time (ms); keep.dead_days
    letter:ID       hash     copy of a failed rollout for people; keep.dead_days
    gone:ID         string   tombstone of an acked rollout; keep.gone_hours
    workers, beats  hash, zset   what each worker says of itself (JSON), and when it last beat or ticked; 1 h
    counts          hash     enqueued acked live scored failed cancelled dropped committed:STAGE
                             attempt|loss|fatal|back:STAGE
    backends        zset     policy servers by the end of their lease (ms; inf: registered by hand)
    backend:ID      hash     url kind model tokenizer endpoint window version drained owner why
    policy          hash     version ordinal updates path; paused mode target pause_owner pause_until pauses; batch
                             max_staleness lane popped dropped
    versions        zset     weights' versions by the ordinal of their update; the newest 1,000
    loads           hash     RUN worker -> until when this holds (ms), the newest pause that it knows, its share: tokens
                             in flight, calls and rate by backend (JSON)
    started:LANE    set      rollouts of groups that INIT has begun, until their ack or an end without a score
    raise:ID        string   who changes this backend's weights now; expires
    other:NAME:backend:ID, other:NAME:backends, other:NAME:loads, other:NAME:policy   hash, zset   the same four keys
                             for the servers of another policy (section `policies`: a judge); it has no updates
    tick, blind     strings  last tick; until when no lease expires (server ms)

Promise: at-least-once execution, exactly-once commit per (rollout, stage), bounded attempts, refusal instead of
dropping. Every verb may be sent again with the same arguments: its second answer says what the first one did.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import redis.asyncio
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError as RedisConnectionError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError as RedisTimeout,
)

from pipeline.config import Config
from pipeline.envelope import SCHEMA, WORKING
from pipeline.errors import ConfigError, MemoryHigh, QueueFull, RedisUnavailable
from pipeline.leases import (
    NO_PLACES,
    Claim,
    Failure,
    Places,
    Popped,
    Ticked,
    read_beat,
    read_claim,
    read_tick,
    sendable,
    text_of,
)
from pipeline.scripts import Pipeliner, script_call

T = TypeVar("T")

AWAY = (RedisConnectionError, RedisTimeout, ConnectionError, TimeoutError)
"""What a command raises while Redis is away: nobody knows whether it ran, so it is sent again."""

REFUSING = ("LOADING", "MISCONF", "READONLY", "NOREPLICAS", "MASTERDOWN", "BUSY ", "UNBLOCKED")
"""How the error of a server begins that takes no writes for now: it loads, its disk is full, it is a replica."""


def refuses_for_now(error: ResponseError) -> bool:
    """Whether the same command may work later: the server is there, but takes no writes."""
    kinds = (ReadOnlyError, BusyLoadingError, MasterDownError)  # redis-py cuts the code off these
    return isinstance(error, kinds) or str(error).startswith(REFUSING)


MEMORY_SEEN = 0.2
"""Seconds for which a look at the server's memory holds: a trainer enqueues thousands of tasks in one go."""


class Queue:
    """The verbs, on one Redis. Each raises RedisUnavailable when Redis stays away for more than `patience` seconds."""

    def __init__(self, client: redis.asyncio.Redis, config: Config, *, patience: float = 0.0) -> None:
        self.redis = client
        self.config = config
        self.prefix = "{" + config.line.name + "}"
        self.patience = patience
        self.closing = float("inf")
        self.pipe = Pipeliner(client)
        self.dead_seconds = int(config.keep.dead_days * 86400)
        self.lease_ms = int(config.lease.seconds * 1000)
        self._memory_seen = float("-inf")
        self._memory_high = False

    def key(self, *parts: str) -> str:
        return ":".join((self.prefix, *parts))

    def close_within(self, seconds: float) -> None:
        """From now on, wait no longer than this for a Redis that is away: the process is to end."""
        self.closing = asyncio.get_running_loop().time() + seconds

    async def outlast(self, call: Callable[[], Awaitable[T]], patience: float | None = None) -> T:
        """Repeat an idempotent call while Redis is away, for `patience` seconds (default: the queue's own)."""
        loop = asyncio.get_running_loop()
        until = loop.time() + (self.patience if patience is None else patience)
        wait = 0.02
        while True:
            try:
                return await call()
            except AWAY as error:
                if loop.time() + wait > min(until, self.closing):
                    raise RedisUnavailable(
                        f"Redis does not answer: {error}. Is it running? `rollout doctor` looks"
                    ) from error
            except ResponseError as error:
                if not refuses_for_now(error):
                    raise
                if loop.time() + wait > min(until, self.closing):
                    raise RedisUnavailable(f"Redis refuses to write: {error}. `rollout doctor` looks") from error
            await asyncio.sleep(wait)
            wait = min(wait * 1.6, 1.0)

    async def verb(self, verb: str, *args: Any, patience: float | None = None) -> Any:
        """The reply of `lua/VERB.lua`, repeated while Redis is away."""
        return await self.outlast(lambda: self.pipe.script(verb, self.prefix, *args), patience)

    async def wait_for_bell(
        self, client: redis.asyncio.Redis, key: str, timeout: float, patience: float | None = None
    ) -> None:
        """Block on a doorbell with a client of its own (one that may block). Only a hint: returning proves nothing."""

        async def wait() -> None:
            await client.execute_command("BLPOP", key, timeout)  # type: ignore[no-untyped-call]

        await self.outlast(wait, patience)

    async def execute(self, *command: Any) -> Any:
        """One plain command, repeated while Redis is away: for reads and idempotent writes."""
        return await self.outlast(lambda: self.pipe.execute(*command))

    # -- the trainer's side ------------------------------------------------------------------------------------------

    async def check_schema(self) -> int:
        """The line's schema number; a fresh line takes this version's. Raises ConfigError when they differ."""
        told = await self.execute("GET", self.key("schema"))
        if told is None:  # asked first: a full server refuses every SET, and must still be popped from
            await self.execute("SET", self.key("schema"), SCHEMA, "NX")
            told = await self.execute("GET", self.key("schema"))
        found = int(told or SCHEMA)
        if found != SCHEMA:
            newer = (
                "upgrade this installation" if found > SCHEMA else "finish the line's work with the older version first"
            )
            raise ConfigError(
                f"line {self.config.line.name!r} has schema {found}, this version speaks {SCHEMA}: {newer}"
            )
        return found

    async def memory(self) -> tuple[int, int]:
        """(used, maxmemory) in bytes; maxmemory 0 means that none is set."""
        info = await self.outlast(lambda: self.redis.info("memory"))
        return int(info["used_memory"]), int(info.get("maxmemory", 0))

    async def memory_high(self) -> bool:
        """Above the memory mark, as of at most MEMORY_SEEN ago? A server that does not tell (fakeredis) never is."""
        clock = asyncio.get_running_loop().time()
        if clock - self._memory_seen < MEMORY_SEEN:
            return self._memory_high
        try:
            used, limit = await self.memory()
        except ResponseError:
            used, limit = 0, 0
        self._memory_seen = clock
        self._memory_high = limit > 0 and used > self.config.memory.high * limit
        return self._memory_high

    async def enqueue(
        self,
        group: str,
        task: bytes,
        envelopes: Sequence[tuple[str, bytes]],
        *,
        lane: str = "train",
        priority: int = 0,
        samples: int | None = None,
        queue_ttl: float = 0.0,
        deadline: float | None = None,
        handler: str = "",
        asked: int | None = None,
        wanted: int = 0,
        life: float = 0.0,
        rest: str = "cancel",
        closed: str = "",
    ) -> int:
        """Write a task's samples, all or none; returns how many were new. `handler`: its name in the task.

        Of its `samples`, `asked` were asked for; the group closes with `wanted` scored ones, or `life` seconds after
        its first member's start (0: it does not). `rest`: "later" lets the others go on then. `closed`: of a group that
        the server has lost and whose first part was popped, why it had closed: these are its rest.
        Raises QueueFull or MemoryHigh: nothing was written then. `deadline` is Unix time, `queue_ttl` seconds.
        """
        flat = [item for pair in envelopes for item in pair]
        args = (
            group, task, priority, lane, self.config.line.max_length, WORKING[0].value,
            int(queue_ttl * 1000) if queue_ttl else "", int(deadline * 1000) if deadline else "",
            samples if samples is not None else len(envelopes), handler, wanted or "",
            asked or samples or len(envelopes), int(life * 1000) if life else "", rest if rest == "later" else "",
            closed, *flat,
        )  # fmt: skip
        try:
            status, count = await self.verb("enqueue", *args)
        except OutOfMemoryError as error:
            raise MemoryHigh(
                f"Redis is full ({error}); task {group} was not enqueued. Pop what is done, or wait"
            ) from error
        if status == b"FULL":
            raise QueueFull(
                f"the line holds {int(count)} rollouts, at most line.max_length = {self.config.line.max_length}: "
                f"task {group} with {len(envelopes)} samples was not enqueued. Pop what is done, or wait"
            )
        return int(count)

    async def pop(
        self, lane: str, n: int, consumer: str, lease: float, nonce: str | None = None, patience: float | None = None
    ) -> list[Popped]:
        """Lease up to n finished rollouts of a lane for `lease` seconds."""
        args = ("done", n, int(lease * 1000), consumer, nonce or uuid.uuid4().hex, 0, 0, lane, 1, 0)
        rows = await self.verb("claim", *args, patience=patience)
        return [Popped(text_of(row[0]), text_of(row[1])) for row in rows]

    async def pop_groups(
        self, lane: str, n: int, consumer: str, lease: float, nonce: str | None = None, patience: float | None = None
    ) -> list[tuple[str, list[Popped]]]:
        """Lease up to n complete groups of a lane: (group, its members that are not acked)."""
        args = (lane, n, int(lease * 1000), consumer, nonce or uuid.uuid4().hex)
        groups: dict[str, list[Popped]] = {}
        for group, id, token in await self.verb("claim_groups", *args, patience=patience):
            groups.setdefault(text_of(group), []).append(Popped(text_of(id), text_of(token)))
        return list(groups.items())

    async def pop_ids(self, ids: Sequence[str], consumer: str, lease: float, nonce: str | None = None) -> list[Popped]:
        """Lease those of `ids` that have ended and that nobody has popped."""
        nonce, popped = nonce or uuid.uuid4().hex, []
        for at in range(0, len(ids), 500):
            rows = await self.verb("claim_ids", int(lease * 1000), consumer, nonce, *ids[at : at + 500])
            popped += [Popped(text_of(row[0]), text_of(row[1])) for row in rows]
        return popped

    async def take(self, popped: Iterable[Popped], *, drop: bool = False) -> list[str]:
        """Acknowledge: OK, AGAIN (it was already) or STALE (another consumer has it) for each.

        `drop`: they are too stale to train on, and count as dropped instead of popped.
        """
        flat = [item for pair in popped for item in pair]
        if not flat:
            return []
        life = int(self.config.keep.gone_hours * 3600)
        return [text_of(reply) for reply in await self.verb("take", life, "drop" if drop else "ack", *flat)]

    async def acked(self, ids: Sequence[str]) -> list[str]:
        """Those of `ids` that were acked, as far as their tombstones tell (keep.gone_hours)."""
        found = await asyncio.gather(*(self.execute("EXISTS", self.key("gone", id)) for id in ids))
        return [id for id, there in zip(ids, found, strict=True) if there]

    async def has_group(self, group: str) -> bool:
        """Whether a member of this group is in the line, not acked."""
        return bool(await self.execute("EXISTS", self.key("g", group)))

    async def hand_back(self, popped: Iterable[Popped]) -> int:
        """Give popped rollouts back at once; returns how many went back."""
        flat = [item for pair in popped for item in pair]
        return int(await self.verb("hand_back", *flat)) if flat else 0

    async def pause_lane(self, lane: str, why: str) -> None:
        """No group of this lane that has not begun begins at INIT, until `resume_lane`."""
        await self.verb("lane_pause", lane, json.dumps({"why": sendable(why), "since": time.time()}))

    async def resume_lane(self, lane: str) -> None:
        await self.verb("lane_resume", lane)

    async def cancel(self, ids: Sequence[str], why: str = "cancelled by the caller") -> list[str]:
        """REMOVED (it waited), ASKED (its worker was told), DONE (too late) or NONE (unknown) for each id."""
        replies: list[str] = []
        for at in range(0, len(ids), 500):
            page = await self.verb("cancel", sendable(why), self.dead_seconds, *ids[at : at + 500])
            replies.extend(text_of(reply) for reply in page)
        return replies

    # -- the worker's side -------------------------------------------------------------------------------------------

    async def claim(
        self, stage: str, n: int, worker: str, nonce: str | None = None, places: Places = NO_PLACES
    ) -> list[Claim]:
        """Lease up to n rollouts of a stage; lanes by weight, the oldest group first.

        At INIT, at most `places` of them are of handlers that need a sandbox.
        """
        args = self._claim_arguments(stage, n, worker, nonce or uuid.uuid4().hex, places)
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
        return (stage, n, self.lease_ms, worker, nonce, inline, max(0, places.free), *lanes)

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

    async def write_payload(self, id: str, token: str, data: bytes, life: float) -> None:
        """Write a payload under its token; it expires after `life` seconds unless a commit makes it stay.

        A refusal for memory is repeated for ever: a finished rollout is never thrown away for memory.
        """
        while True:
            try:
                await self.execute("SET", self.key("p", id, token), data, "EX", max(1, int(life)))
                return
            except OutOfMemoryError:
                await asyncio.sleep(0.5)

    async def read_payload(self, id: str, token: str) -> bytes | None:
        data = await self.execute("GET", self.key("p", id, token))
        return bytes(data) if data is not None else None

    async def read_task(self, group: str) -> bytes | None:
        data = await self.execute("GET", self.key("t", group))
        return bytes(data) if data is not None else None

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
        self, worker: str, about: dict[str, Any] | None, held: Iterable[tuple[str, str, str]]
    ) -> tuple[Any, ...]:
        """Arguments of the beat script, for the heartbeat thread's own connection. `held`: (stage, id, token)."""
        life = int(self.config.limits.outage + max(self.config.limits.run, 60))
        flat = [item for triple in held for item in triple]
        return (worker, self.lease_ms, life, json.dumps(about) if about else "", *flat)

    def tick_arguments(self, worker: str = "") -> tuple[Any, ...]:
        retry = self.config.retry
        return (self.lease_ms, 500, retry.attempts, retry.losses, self.dead_seconds, worker)

    async def beat(
        self, worker: str, about: dict[str, Any] | None, held: Sequence[tuple[str, str, str]]
    ) -> list[str | int]:
        """Renew leases: 1 held, 0 lost, or the reason of a cancel, for each (stage, id, token)."""
        return read_beat(await self.verb("beat", *self.beat_arguments(worker, about, held)))

    async def tick(self) -> Ticked:
        """Upkeep: expire leases, promote delayed rollouts, end what is over its time."""
        return read_tick(await self.verb("tick", *self.tick_arguments()))
