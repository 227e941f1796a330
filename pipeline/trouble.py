"""What keeps a lane from going on: each trouble by its kind, with a sentence that says what to do.

Slow is no trouble: a rollout in the hands of a live worker may take as long as it likes.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from pipeline.backends import Backends, PolicyState
from pipeline.envelope import WORKING
from pipeline.inspect import Admission, admission, now, pauses
from pipeline.leases import text_of
from pipeline.queue import Queue

INIT, RUN = WORKING[0].value, WORKING[1].value

PAGE, PAGES = 200, 50
"""Rollouts in work that are looked at in one go, and how often, to tell whether one of them is of this lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One look at a lane.

    `waiting`, `working`: by stage, how many of the lane wait, and whether any is in work or waits for its next try.
    `workers`: what each said last, with `silent` (seconds). `memory`: used and most bytes. `finished`: how many wait to
    be popped. `elsewhere`: consumers that hold finished ones, for `lease` seconds of silence.
    """

    lane: str
    waiting: dict[str, int]
    working: dict[str, bool]
    workers: list[dict[str, Any]]
    policy: PolicyState
    bound: Admission | None
    paused: str
    memory: tuple[int, int]
    lease: float
    finished: int = 0
    elsewhere: tuple[str, ...] = ()

    @property
    def stages(self) -> list[str]:
        """Stages that have something of this lane to do."""
        return [stage for stage in self.waiting if self.waiting[stage] or self.working[stage]]

    @property
    def at_work(self) -> bool:
        """Something is beyond its wait at INIT."""
        return any(self.working.values()) or any(self.waiting[stage] for stage in self.waiting if stage != INIT)


async def troubles(queue: Queue, lane: str, consumer: str = "") -> dict[str, str]:
    """What is wrong now, by kind, the gravest first; empty where the lane can go on. `consumer`: who asks."""
    scene = await look(queue, lane, consumer)
    late = 4 * queue.config.lease.tick + 1  # a live worker ticks, and says so with every tick
    found: dict[str, str] = {}
    if scene.paused:
        found["paused"] = scene.paused
    if not scene.stages:  # why nothing is enqueued says more than that nothing was
        return found | _of_memory(scene, queue.config.memory.high) or _of_idleness(scene)
    for stage in scene.stages:
        said = _of_workers(scene, stage, late)
        if said:
            found[f"workers:{stage}"] = said
    if RUN in scene.stages and f"workers:{RUN}" not in found:
        found |= _of_policy(scene, late)
    if scene.waiting[INIT]:
        found |= _of_memory(scene, queue.config.memory.high) | _of_bound(scene)
    return found


def _of_idleness(scene: Scene) -> dict[str, str]:
    """Nothing is on its way in the lane."""
    if scene.elsewhere:
        return {
            "elsewhere": "nothing is on its way, and finished rollouts are in the hands of "
            f"{', '.join(scene.elsewhere)}: they come when that one gives them back, or has died and is silent for "
            f"{scene.lease:g} s (lease.done_seconds)"
        }
    if scene.finished:
        return {
            "unpopped": f"nothing is on its way, and {scene.finished} finished rollouts lie there that this wait does "
            "not take: the rest of a group whose first part is not acked yet, or another caller's"
        }
    return {"nothing": "nothing is in flight: what is waited for was never enqueued, or is popped already"}


def _of_workers(scene: Scene, stage: str, late: float) -> str:
    serving = [worker for worker in scene.workers if worker["stage"] == stage]
    living = [worker for worker in serving if worker["silent"] <= late]
    count = scene.waiting[stage]
    what = f"{count} rollouts wait in {stage}" if count else f"rollouts are left in {stage}"
    if not living and serving:
        least = min(worker["silent"] for worker in serving)
        return (
            f"{what}, and no live worker serves it: the last one was heard of {least:.0f} s ago "
            f"(start one: rollout work {stage})"
        )
    if not living:
        return f"{what}, and no live worker serves it (start one: rollout work {stage})"
    if count and all(worker.get("stopping") for worker in living):
        return f"{what}, and all its workers are stopping (start one: rollout work {stage})"
    if count and all(worker.get("blind") or worker.get("stopping") for worker in living):
        return f"{what}, and none of its workers can read the line's payload files (payload.dir): their logs say why"
    return ""


def _of_policy(scene: Scene, late: float) -> dict[str, str]:
    if scene.policy.paused:
        return {"policy": f"the policy is paused, no call goes out: {scene.policy.paused}"}
    living = [worker for worker in scene.workers if worker["stage"] == RUN and worker["silent"] <= late]
    stuck = [worker for worker in living if worker["running"] and worker.get("paused")]
    told = [worker.get("policy") or {} for worker in stuck]
    if not stuck or len(stuck) < sum(1 for worker in living if worker["running"]) or any(p.get("usable") for p in told):
        return {}
    why = next((p["why"] for p in told if p.get("why")), "none is registered")
    return {
        "servers": f"rollouts in run wait for the policy, and no server of it is usable: {why} "
        "(`rollout policy ls` shows them)"
    }


def _of_memory(scene: Scene, high: float) -> dict[str, str]:
    used, most = scene.memory
    if most == 0 or used <= high * most:
        return {}
    return {
        "memory": f"Redis holds {used / most:.0%} of its maxmemory, above memory.high = {high:g}: INIT begins nothing "
        "and nothing is enqueued. Pop and ack what is done, or give it more memory"
    }


def _of_bound(scene: Scene) -> dict[str, str]:
    bound, waiting = scene.bound, scene.waiting[INIT]
    if bound is None or scene.at_work or bound.held_up(scene.lane, waiting) < waiting:
        return {}
    return {
        "bound": f"{waiting} rollouts wait in init for new weights, and nothing else is on its way: {bound}. Ack what "
        "was popped and update the weights; if this is the first step, `batch` of start_run is smaller than what is "
        "popped before an update; if that trainer is gone, end its run"
    }


async def look(queue: Queue, lane: str, consumer: str = "") -> Scene:
    """Ask Redis; the answers are some milliseconds apart."""
    stages = [stage.value for stage in WORKING]
    waiting, working = await asyncio.gather(
        asyncio.gather(*(_waiting(queue, stage, lane) for stage in stages)),
        asyncio.gather(*(_has_working(queue, stage, lane) for stage in stages)),
    )
    alive, view, bound, halted = await asyncio.gather(
        _workers(queue), Backends(queue).view(), admission(queue), pauses(queue)
    )
    return Scene(
        lane=lane, waiting=dict(zip(stages, waiting, strict=True)), working=dict(zip(stages, working, strict=True)),
        workers=alive, policy=view.policy, bound=bound, paused=halted.get(lane, ""), memory=await queue.memory(),
        lease=queue.config.lease.done_seconds, finished=await _waiting(queue, "done", lane),
        elsewhere=() if any(waiting) or any(working) else await _holders(queue, lane, consumer),
    )  # fmt: skip


async def _waiting(queue: Queue, stage: str, lane: str) -> int:
    sets = [queue.key("ready", stage, lane)] + ([queue.key("place", lane)] if stage == INIT else [])
    return sum(int(count) for count in await asyncio.gather(*(queue.execute("ZCARD", name) for name in sets)))


async def _has_working(queue: Queue, stage: str, lane: str) -> bool:
    """Whether a rollout of the lane is leased in a stage, or waits there for its next try."""
    for kind in ("lease", "delayed"):
        for page in range(PAGES):
            rows = await _rows(queue, queue.key(kind, stage), page)
            if lane in {row[0] for row in rows}:
                return True
            if len(rows) < PAGE:
                break
        else:
            return True  # too many of other lanes to be sure: what may be at work is no trouble
    return False


async def _holders(queue: Queue, lane: str, consumer: str) -> tuple[str, ...]:
    """Consumers, but for the one that asks, that hold finished rollouts of the lane."""
    rows = await _rows(queue, queue.key("lease", "done"))
    return tuple(sorted({owner for of, owner in rows if of == lane and owner != consumer}))


async def _rows(queue: Queue, name: str, page: int = 0) -> list[tuple[str, str]]:
    """(lane, owner) of a page of the rollouts in a set."""
    ids = await queue.execute("ZRANGE", name, page * PAGE, (page + 1) * PAGE - 1)
    rows = await asyncio.gather(*(queue.execute("HMGET", queue.key("r", text_of(id)), "lane", "owner") for id in ids))
    return [(text_of(lane or b""), text_of(owner or b"")) for lane, owner in rows]


async def _workers(queue: Queue) -> list[dict[str, Any]]:
    """All that were heard of within the hour, also those that are silent by now."""
    beats, about, clock = await asyncio.gather(
        queue.execute("ZRANGE", queue.key("beats"), 0, -1, "WITHSCORES"),
        queue.execute("HGETALL", queue.key("workers")),
        now(queue),
    )
    flat = [item for pair in beats for item in pair] if beats and isinstance(beats[0], list | tuple) else beats
    told = about if isinstance(about, dict) else dict(zip(about[::2], about[1::2], strict=True))
    return [
        {**json.loads(told[name]), "silent": max(0.0, clock - float(score) / 1000)}
        for name, score in zip(flat[::2], flat[1::2], strict=True)
        if name in told
    ]
