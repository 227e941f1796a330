"""Short ways to say what a test does to a line: enqueue made-up rollouts, let a lease run out, see what is left."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

from pipeline.envelope import Envelope, Stage, Task, encode, encode_compressed, rollout_id
from pipeline.leases import Claim, Failure, Popped
from pipeline.queue import Queue

# What may stay when a line is empty: each has a bound of its own (`pipeline/queue.py` says which).
BOUNDED = (
    "schema", "seq", "counts", "places", "tick", "blind", "workers", "beats", "credit:*", "turn:*", "client:*",
    "claim:*", "bell:*", "dead:*", "letter:*", "gone:*", "died:*", "backends", "backend:*", "policy", "versions",
    "loads", "raise:*", "other:*", "spare", "paused", "files", "trash",
)  # fmt: skip
EXPIRING = ("letter:*", "gone:*", "died:*", "claim:*", "bell:worker:*", "raise:*", "client:*")


def task(**about: Any) -> Task:
    """An echo task."""
    return Task(**{"handler": "echo", **about})


async def put(
    queue: Queue, group: str = "g", samples: int = 1, *, only: Iterable[int] | None = None, **about: Any
) -> list[str]:
    """Enqueue `samples` echo rollouts, or `only` these of them; returns their ids."""
    members = list(range(samples) if only is None else only)
    ids = [rollout_id(group, sample) for sample in members]
    envelopes = [
        (id, encode(Envelope(id=id, group=group, handler="echo", sample=sample, samples=samples), queue.schema))
        for sample, id in zip(members, ids, strict=True)
    ]
    await queue.enqueue(group, encode_compressed(task(), queue.schema), envelopes, **{"samples": samples, **about})
    return ids


async def one(queue: Queue, stage: str = "init", worker: str = "w") -> Claim:
    """Claim exactly one rollout."""
    (claim,) = await queue.claim(stage, 1, worker)
    return claim


async def pass_on(queue: Queue, claim: Claim, stage: str, **about: Any) -> str:
    """Commit a claim of `stage` to the next one."""
    after = {"init": "run", "run": "eval", "eval": "done"}[stage]
    return await queue.commit(stage, claim.id, claim.token, after, claim.envelope, **about)


async def give_up(queue: Queue, claim: Claim, stage: str, mode: str, **about: Any) -> str:
    """Fail a claim; returns READY, DELAYED, FAILED, CANCELLED, AGAIN or STALE."""
    failure = Failure(**{"mode": mode, "kind": "sandbox", "why": "it broke", **about})
    return (await queue.fail(stage, claim.id, claim.token, failure))[0]


async def through(queue: Queue, count: int = 1, worker: str = "w", **about: Any) -> None:
    """Take `count` rollouts through all stages."""
    for stage in (Stage.INIT, Stage.RUN, Stage.EVAL):
        for claim in await queue.claim(stage.value, count, worker):
            assert await pass_on(queue, claim, stage.value, **about) == "OK"


async def silence(queue: Queue, stage: str, *ids: str) -> None:
    """Let these leases run out, as those of a worker that is not heard of any more."""
    for id in ids:
        await queue.execute("ZADD", queue.key("lease", stage), "XX", 1, id)


async def state(queue: Queue, id: str) -> tuple[str, str]:
    """(stage, state) of a rollout; ("", "") when the line does not know it."""
    values = await queue.execute("HMGET", queue.key("r", id), "stage", "state")
    return tuple(value.decode() if value else "" for value in values)  # type: ignore[return-value]


async def field(queue: Queue, id: str, name: str) -> str:
    """One field of a rollout's hash; empty when it is not there."""
    return ((await queue.execute("HGET", queue.key("r", id), name)) or b"").decode()


async def count(queue: Queue, name: str) -> int:
    """One of the line's counters."""
    return int(await queue.execute("HGET", queue.key("counts"), name) or 0)


async def pop_and_take(queue: Queue, n: int = 1, lane: str = "train") -> list[Popped]:
    """Pop n rollouts and acknowledge them."""
    popped = await queue.pop(lane, n, "trainer", 60.0)
    assert await queue.take(popped) == ["OK"] * len(popped)
    return popped


async def leftovers(queue: Queue) -> list[str]:
    """Keys that an empty line must not hold. Payload that expires by itself is none, nor is a letter's task."""
    bad = []
    for raw in await queue.execute("KEYS", f"{queue.prefix}:*"):
        name = raw.decode().removeprefix(f"{queue.prefix}:")
        life = int(await queue.execute("TTL", raw))
        if life == -2:  # it went while we looked
            continue
        lasting = life < 0
        known = any(fnmatch.fnmatchcase(name, pattern) for pattern in BOUNDED)
        forever = lasting and any(fnmatch.fnmatchcase(name, pattern) for pattern in EXPIRING)
        expires = name.startswith(("p:", "t:")) and not lasting
        if forever or not (known or expires):
            bad.append(name)
    return sorted(bad)
