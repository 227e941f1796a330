"""Reading the line, changing nothing: depths, pages, where a rollout is and why it waits, workers, counts."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeline.backends import Backends
from pipeline.envelope import WORKING, Envelope, decode
from pipeline.errors import EnvelopeError
from pipeline.queue import Queue

STATES = ("ready", "place", "leased", "delayed", "dead")
"""`place`: waits at INIT for a host with room for its sandbox."""
STAGES = (*(stage.value for stage in WORKING), "done")


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """One stage of one lane. `age`: seconds that the rollout next in turn has waited. `place`: of those that are ready,
    how many wait for a place of a sandbox host."""

    stage: str
    lane: str
    ready: int
    age: float
    place: int = 0


BEGUN = -2_000_000_000_000_000
"""At INIT, what stands before this waits for no weights: its group has begun (`begun_in` in prelude.lua)."""


class Admission(NamedTuple):
    """The trainer's bound on new rollouts of its lane: `begun` and not acked, of at most `bound`; `inside`: those of
    them that wait at INIT, and may begin. `owner`: the client that started the run."""

    lane: str
    begun: int
    bound: int
    inside: int
    owner: str = ""

    def __str__(self) -> str:
        return (
            f"{self.begun} of {self.bound} rollouts are begun and not acked, and more may not be before the next "
            f"update in the run that {self.owner or 'a client'} started (`rollout run end` lifts its bound)"
        )

    def held_up(self, lane: str, waiting: int) -> int:
        """How many of those that wait in a lane at INIT wait for the next update of the weights."""
        return max(0, waiting - self.inside - max(0, self.bound - self.begun)) if lane == self.lane else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where a rollout is. `why` is a sentence; `fields` is the rollout's hash as text."""

    id: str
    stage: str
    state: str
    why: str
    fields: dict[str, str] = field(default_factory=dict)


async def now(queue: Queue) -> float:
    """The server's time (Unix seconds): leases and waits are measured by it."""
    seconds, micros = await queue.execute("TIME")
    return int(seconds) + int(micros) / 1e6


async def stage_depth(queue: Queue, stage: str, lane: str) -> Depth:
    ready, age = await _waiting(queue, queue.key("ready", stage, lane))
    if stage != WORKING[0].value:
        return Depth(stage=stage, lane=lane, ready=ready, age=age)
    place, longer = await _waiting(queue, queue.key("place", lane))
    return Depth(stage=stage, lane=lane, ready=ready + place, place=place, age=max(age, longer))


async def _waiting(queue: Queue, key: str) -> tuple[int, float]:
    """How many wait in a set, and for how long the next in turn has (seconds)."""
    count, first = await asyncio.gather(queue.execute("ZCARD", key), queue.execute("ZRANGE", key, 0, 0))
    since = await queue.execute("HGET", queue.key("r", first[0].decode()), "since") if first else None
    return int(count), max(0.0, await now(queue) - int(since) / 1000) if since else 0.0


async def depth(queue: Queue) -> dict[str, dict[str, Any]]:
    """Per stage: ready (by lane), leased, delayed, dead, and the age of the next in turn (seconds).

    `paused` says of each lane that is paused why. Of the ready ones, by lane, `place` counts those that wait for a
    place of a sandbox host, `weights` those that the trainer's bound keeps at INIT until its next update.
    """
    lanes, bound, halted = list(queue.config.line.lanes), await admission(queue), await pauses(queue)
    out: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        by_lane = await asyncio.gather(*(stage_depth(queue, stage, lane) for lane in lanes))
        leased, delayed, dead = await asyncio.gather(
            *(queue.execute("ZCARD", queue.key(state, stage)) for state in ("lease", "delayed", "dead"))
        )
        out[stage] = {
            "ready": {item.lane: item.ready for item in by_lane}, "age": max(item.age for item in by_lane),
            "leased": int(leased), "delayed": int(delayed), "dead": int(dead),
            "place": {item.lane: item.place for item in by_lane},
            "weights": {
                item.lane: bound.held_up(item.lane, item.ready) if bound and stage == WORKING[0].value else 0
                for item in by_lane
            },
            "paused": halted if stage == WORKING[0].value else {},
        }  # fmt: skip
    return out


async def pauses(queue: Queue) -> dict[str, str]:
    """Lanes of which nothing new begins at INIT (`pause_run`), each with a sentence."""
    flat = await queue.execute("HGETALL", queue.key("paused"))
    pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
    found = {lane.decode(): json.loads(about) for lane, about in pairs}
    clock = time.time()
    return {
        lane: f"the run of lane {lane} is paused for {max(0.0, clock - about['since']):.0f} s ({about['why']}): "
        f"`rollout run resume --lane {lane}` lets it go on"
        for lane, about in found.items()
    }


async def counts(queue: Queue) -> dict[str, int]:
    """The line's counters since it began: enqueued, acked, live, scored, failed, cancelled, committed:STAGE ..."""
    flat = await queue.execute("HGETALL", queue.key("counts"))
    pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
    return {key.decode(): int(value) for key, value in pairs}


async def admission(queue: Queue) -> Admission | None:
    """None where no run bounds new rollouts."""
    policy = (await Backends(queue).view()).policy
    if policy.bound is None:
        return None
    sets = (queue.key("ready", WORKING[0].value, policy.lane), queue.key("place", policy.lane))
    inside = [int(await queue.execute("ZCOUNT", name, "-inf", BEGUN)) for name in sets]
    return Admission(policy.lane, await begun(queue, policy.lane), policy.bound, sum(inside), policy.run_owner)


async def begun(queue: Queue, lane: str) -> int:
    """Rollouts of a lane that INIT has begun and that are not acked, without those that their groups will not need."""
    count, spare = await asyncio.gather(
        queue.execute("SCARD", queue.key("started", lane)), queue.execute("HGET", queue.key("spare"), lane)
    )
    return int(count) - int(spare or 0)


def _set_of(queue: Queue, stage: str, state: str, lane: str) -> str:
    if state == "ready":
        return queue.key("ready", stage, lane)
    if state == "place":
        return queue.key("place", lane)
    return queue.key({"leased": "lease", "delayed": "delayed", "dead": "dead"}[state], stage)


async def page(
    queue: Queue, stage: str, state: str, lane: str = "train", start: int = 0, count: int = 50
) -> list[dict[str, Any]]:
    """`count` rollouts of a set by range: two round trips, whatever the set's length."""
    ids = await queue.execute("ZRANGE", _set_of(queue, stage, state, lane), start, start + count - 1)
    kind = "letter" if state == "dead" else "r"
    names = ("group", "lane", "state", "owner", "since", "losses", f"attempts:{stage}", "kind", "why", "outcome")
    rows = await asyncio.gather(*(queue.execute("HMGET", queue.key(kind, id.decode()), *names) for id in ids))
    clock = await now(queue) if ids else 0.0
    out = []
    for id, row in zip(ids, rows, strict=True):
        values = dict(zip(names, (item.decode("utf-8", "replace") if item else "" for item in row), strict=True))
        since = int(values.pop("since") or 0) / 1000
        attempts = values.pop(f"attempts:{stage}")
        out.append(
            {
                "id": id.decode(),
                **values,
                "attempts": attempts,
                "seconds": round(max(0.0, clock - since), 1) if since else None,
            }
        )
    return out


async def fields_of(queue: Queue, id: str, kind: str = "r") -> dict[str, bytes]:
    """The hash of a rollout ("r") or of a dead letter ("letter"); empty when there is none."""
    flat = await queue.execute("HGETALL", queue.key(kind, id))
    pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
    return {key.decode(): value for key, value in pairs}


async def attempts_of(queue: Queue, id: str) -> list[dict[str, Any]]:
    """Every attempt so far, oldest first: stage, worker, host, outcome, seconds, error, log tail."""
    return [json.loads(item) for item in await queue.execute("LRANGE", queue.key("a", id), 0, -1)]


def envelope_of(fields: dict[str, bytes]) -> Envelope | None:
    try:
        return decode(Envelope, fields["env"])
    except (KeyError, EnvelopeError):
        return None


async def workers(queue: Queue, silent_after: float | None = None) -> list[dict[str, Any]]:
    """What each worker said with its last beat, with `silent` seconds since then; by default only the living ones."""
    limit = queue.config.lease.seconds if silent_after is None else silent_after
    beats = await queue.execute("ZRANGE", queue.key("beats"), 0, -1, "WITHSCORES")
    flat = [item for pair in beats for item in pair] if beats and isinstance(beats[0], list | tuple) else beats
    clock = await now(queue)
    out = []
    for name, score in zip(flat[::2], flat[1::2], strict=True):
        silent = max(0.0, clock - float(score) / 1000)
        if silent > limit:
            continue
        about = await queue.execute("HGET", queue.key("workers"), name)
        if about:
            out.append({"worker": name.decode(), "silent": round(silent, 1), **json.loads(about)})
    return out


async def where(queue: Queue, ids: list[str]) -> dict[str, Where]:
    """Where each rollout is, with a sentence that says why it waits. Unknown ids are left out."""
    names = ("stage", "state", "owner", "since", "lane", "why", "kind", "outcome", "place", "group")
    rows = await asyncio.gather(*(queue.execute("HMGET", queue.key("r", id), *names) for id in ids))
    if not any(row[0] for row in rows):
        return {}
    alive, clock, bound, halted = await workers(queue), await now(queue), await admission(queue), await pauses(queue)
    out: dict[str, Where] = {}
    for id, row in zip(ids, rows, strict=True):
        if not row[0]:
            continue
        values = {name: item.decode("utf-8", "replace") if item else "" for name, item in zip(names, row, strict=True)}
        age = max(0.0, clock - int(values["since"] or 0) / 1000)
        may = (bound or halted) and await queue.execute("HEXISTS", queue.key("g", values["group"]), "begun")
        why = _why(values, age, alive, None if may else bound, "" if may else halted.get(values["lane"], ""))
        out[id] = Where(id=id, stage=values["stage"], state=values["state"], why=why, fields=values)
    return out


def _why(values: dict[str, str], age: float, alive: list[dict[str, Any]], bound: Admission | None, halted: str) -> str:
    stage, state = values["stage"], values["state"]
    serving = [worker for worker in alive if worker["stage"] == stage]
    if stage == "done":
        ended = values["outcome"] + (f" ({values['kind']}: {values['why']})" if values["kind"] else "")
        return f"{ended}; " + (
            f"popped by {values['owner']}" if state == "leased" else f"waits to be popped for {age:.0f} s"
        )
    if state == "leased":
        holder = next((worker for worker in alive if worker["worker"] == values["owner"]), None)
        paused = f"; working time stands still: {holder['paused']}" if holder and holder.get("paused") else ""
        silent = "" if holder else "; that worker is silent, its lease is about to run out"
        return f"in work in {stage} for {age:.0f} s by {values['owner']}{paused}{silent}"
    if state == "delayed":
        return f"waits {age:.0f} s in {stage} for its next try"
    if halted and stage == "init":
        return f"waits {age:.0f} s in init: {halted}"
    if not serving:
        return f"waits {age:.0f} s in {stage}: no live worker serves it (start one: rollout work {stage})"
    if all(worker.get("stopping") for worker in serving):
        return f"waits {age:.0f} s in {stage}: its workers are stopping"
    if stage == "init" and all(worker.get("memory_high") for worker in serving):
        return f"waits {age:.0f} s in init: Redis is above the memory mark"
    if stage == "init" and bound and bound.lane == values["lane"] and bound.begun >= bound.bound:
        return f"waits {age:.0f} s in init for weights: {bound}"
    if stage == "init" and values["place"]:
        live, most = (sum(int(worker.get(name, 0)) for worker in serving) for name in ("sandboxes", "max_live"))
        return f"waits {age:.0f} s in init for a place: {live} of {most} sandboxes are live (sandbox.max_live)"
    busy = sum(int(worker["running"]) for worker in serving)
    slots = sum(int(worker["slots"]) for worker in serving)
    return f"waits {age:.0f} s in {stage}: {busy} of {slots} slots are busy in {len(serving)} worker(s)"
