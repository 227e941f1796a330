"""The line with sandboxes under a storm of kills, stalls and cancels: each rollout ends once, no command runs twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from pipeline.errors import RedisUnavailable
from tests.boxes import PROGRAMS, marked
from tests.faults.chaos_handlers import STEPS, STORM, spoken, spoken_turns
from tests.faults.test_redis import Killable
from tests.faults.tools import SHORT, Trainer, Workers, eventually, freeze, thaw
from tests.services import RedisService, require
from workers.policy import scripted, tokenizer
from workers.sandbox.boxes import orphans


@pytest.fixture
async def policy(tmp_path: Path) -> AsyncIterator[scripted.Running]:
    options = scripted.Options(
        tokenizer=tokenizer.make(tmp_path), answers={spoken("numbers"): spoken_turns()}, p_correct=1.0, drift=0.0,
        latency=0.02,
    )  # fmt: skip
    server = await scripted.start(options)
    yield server
    await server.stop()


def settings(policy: scripted.Running, tmp_path: Path, root: Path) -> dict[str, Any]:
    return {
        **SHORT, "policy.url": policy.url, "policy.tokenizer": str(tmp_path), "sandbox.root": str(root),
        "sandbox.max_live": 6, "sandbox.sweep": 1.0, "retry.losses": 1000, "retry.attempts": 1000,
        "handlers.load": [f"chaos_handlers:{name}" for name in STORM],
    }  # fmt: skip


class Storm:
    """Does one bad thing after the other to the workers, and to Redis where it is the test's own."""

    def __init__(self, workers: Workers, chance: random.Random, server: Killable | None) -> None:
        self.workers, self.chance, self.server = workers, chance, server
        self.did: list[str] = []

    async def blow(self, times: int) -> None:
        for _ in range(times):  # killed any faster, no worker would come to serve
            await asyncio.sleep(self.chance.uniform(0.2, 2.5))
            what = self.chance.choice(("init", "run", "run", "eval", "stall", "stall", "redis"))
            self.did.append(what)
            await self._do(what)

    async def _do(self, what: str) -> None:
        if what == "redis":
            if self.server is not None:
                self.server.kill()
                await asyncio.sleep(0.2)
                self.server.start()
            return
        stage = "run" if what == "stall" else what
        alive = [process for process in self.workers.living() if self.workers.kinds[process.pid][0] == stage]
        if not alive:
            return  # the supervisor has not come by yet
        victim = self.chance.choice(alive)
        if what != "stall":
            self.workers.kill(victim, again=False)  # the supervisor of `collect` starts another
            return
        freeze(victim.pid)
        try:
            await asyncio.sleep(self.chance.choice((0.5, 3.0)))
        finally:
            thaw(victim.pid)


class Patient(Trainer):
    """Waits while Redis is away, whatever verb that hits."""

    async def turn(self, n: int, seconds: float) -> None:
        with contextlib.suppress(RedisUnavailable):
            await super().turn(n, seconds)


def check(us: Trainer, ids: list[str], doomed: set[str]) -> None:
    """Each ended once, as it may; the numbers stand in their order, none twice."""
    assert us.got.keys() == set(ids)
    for id, rollout in us.got.items():
        allowed = ("scored", "cancelled") if id in doomed else ("scored",)
        assert rollout.outcome in allowed, f"{id}: {rollout.outcome} {rollout.failure} {rollout.attempts}"
        if rollout.outcome == "scored":
            evidence = rollout.evidence
            assert evidence["tally"] == [str(number) for number in range(1, STEPS + 1)], (id, evidence)
            assert evidence["made"] == id
            assert evidence["seen"] in (None, evidence["tally"]) or "No" in evidence["seen"], (id, evidence)


async def nothing_left(root: Path, seconds: float = 20.0) -> None:
    """No process and no folder of any sandbox. What a killed worker left is swept."""
    until = asyncio.get_running_loop().time() + seconds
    while (left := marked(root)) or (folders := [str(path) for path in root.glob("*/*")]):
        for line in root.glob("*"):
            await asyncio.to_thread(orphans.sweep, line)
        assert asyncio.get_running_loop().time() < until, f"left: {left or folders}"
        await asyncio.sleep(0.1)


async def storm(config: Config, folder: Path, root: Path, count: int, seed: int, server: Killable | None) -> None:
    workers, chance = Workers(config, folder), random.Random(seed)
    blowing = Storm(workers, chance, server)
    try:
        async with RolloutClient(config=config) as client:
            us = Patient(client)
            for stage in ("init", "init", "run", "run", "eval"):
                workers.start(stage, 8)
            tasks = [Task(handler=f"chaos_handlers:{STORM[number % len(STORM)]}") for number in range(count)]
            ids = await us.client.enqueue(tasks)
            doomed = set(chance.sample(ids, count // 5))
            async with asyncio.TaskGroup() as group:
                group.create_task(blowing.blow(count // 2))
                group.create_task(cancel_some(us, sorted(doomed), chance))
                group.create_task(us.collect(count, 60.0 + 3 * count, each=workers.revive))
            check(us, ids, doomed)
            await eventually(lambda: not list(root.glob("*/*/*/home")), 20.0, "that each host discards its sandboxes")
            workers.stop()
            await us.check_empty()
        await nothing_left(root)
    except BaseException as error:
        error.add_note(f"seed {seed}, did {blowing.did}\n{workers.logs()[-20000:]}")
        raise
    finally:
        workers.stop()


async def cancel_some(us: Trainer, ids: list[str], chance: random.Random) -> None:
    for id in ids:
        await asyncio.sleep(chance.uniform(0.0, 0.3))
        with contextlib.suppress(RedisUnavailable):
            await us.client.cancel([id])


@pytest.fixture
def server(redis_server: RedisService) -> Iterator[Killable]:
    killable = Killable(redis_server)
    yield killable
    killable.stop()


SLOW = (pytest.mark.slow, pytest.mark.timeout(1200))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("driver", "count"),
    [
        ("local", 12),
        pytest.param("local", 150, marks=SLOW),
        pytest.param("bubblewrap", 100, marks=SLOW),
        pytest.param("apptainer", 100, marks=SLOW),
    ],
)
async def test_a_storm_over_sandboxes(
    server: Killable, policy: scripted.Running, tmp_path: Path, root: Path, driver: str, count: int
) -> None:
    for program in PROGRAMS[driver]:
        require(program)
    config = server.service.config.changed({**settings(policy, tmp_path, root), "sandbox.driver": driver})
    await storm(config, tmp_path, root, count, seed=count, server=server)
