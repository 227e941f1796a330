"""Sandboxes as the line uses them: served by the INIT worker, fenced, journaled, gone when their rollout is over."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.audit import audit
from pipeline.client import RolloutClient
from pipeline.envelope import Stage, Task
from pipeline.errors import ConfigError, Incomplete
from tests.integration.crew import all_of, configured, serving
from tests.services import RedisService
from workers.loop import Worker


def task(handler: str, **data: Any) -> Task:
    return Task(handler=f"sandbox_handlers:{handler}", data=data)


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path: sockets lie under it."""
    with tempfile.TemporaryDirectory(prefix="rs-") as folder:
        yield Path(folder) / "s"


@pytest.fixture
async def line(redis_service: RedisService, root: Path) -> AsyncIterator[Any]:
    config = configured(redis_service, sandbox__root=str(root), sandbox__max_live=2)
    async with RolloutClient(config=config) as client:
        yield client, config


async def test_a_rollout_acts_in_its_sandbox_and_leaves_nothing(line: Any, root: Path) -> None:
    client, config = line
    async with serving(config) as crew:
        (rollout,) = await all_of(client, [task("Shell", commands=["echo hi > f; cat f", "echo $((6*7))"])])
        assert rollout.outcome == "scored", rollout
        assert rollout.evidence["said"] == ["hi", "42"]
        stock = crew["init"].hosting.host.stock
        async with asyncio.timeout(5):
            await stock.wait_until_empty()
    assert not list(root.glob("*"))


@pytest.mark.parametrize(
    ("handler", "seen"),
    [("Shell", None), ("ShellSame", "one\ntwo"), ("ShellFresh", "cat: f: No such file or directory")],
)
async def test_eval_sees_what_it_asked_for(line: Any, handler: str, seen: str | None) -> None:
    client, config = line
    async with serving(config) as crew:
        (rollout,) = await all_of(client, [task(handler, commands=["echo one > f", "echo two >> f", "cat f"])])
        assert rollout.outcome == "scored", rollout
        assert rollout.evidence == {"said": ["", "", "one\ntwo"], "seen": seen}
        async with asyncio.timeout(5):
            await crew["init"].hosting.host.stock.wait_until_empty()
            if handler == "ShellFresh":
                await crew["eval"].shop.stock.wait_until_empty()


async def test_what_needs_a_sandbox_waits_for_a_place_and_the_rest_goes_by(line: Any) -> None:
    client, config = line
    async with serving(config):
        held = await client.enqueue([task("Shell", commands=["sleep 60"])] * 3)
        async with asyncio.timeout(20):
            while (await client.status())["stages"]["init"]["place"]["train"] != 1:
                await asyncio.sleep(0.05)
        passed = await client.enqueue([Task(handler="echo", data={"text": "by"})] * 5)
        batch = await client.pop(5, timeout=20)
        assert {rollout.id for rollout in batch} == set(passed)
        await client.ack(batch)
        with pytest.raises(Incomplete, match="for a place: . of 2 sandboxes are live"):
            await client.pop(1, timeout=0.1)
        await client.cancel(held)
        batch = await client.pop(3, timeout=20)
        await client.ack(batch)
        assert {rollout.outcome for rollout in batch} == {"cancelled"}
    assert await audit(client.queue) == []


async def test_every_kind_of_rollout_ends_though_places_are_few_and_half_are_cancelled(line: Any, root: Path) -> None:
    client, config = line
    chance = random.Random(7)
    count = 10
    async with serving(config, "init", "run", slots=8), serving(config, "eval", slots=1):
        tasks = [
            task(handler, commands=[f"sleep 0.0{chance.randrange(9)}; echo {number}"])
            for handler in ("Shell", "ShellSame", "ShellFresh")
            for number in range(count)
        ]
        ids = await client.enqueue(tasks)
        doomed = chance.sample(ids, len(ids) // 2)
        canceller = asyncio.create_task(_cancel_slowly(client, doomed))
        batch = await client.pop(len(ids), timeout=100)
        await canceller
        assert {rollout.id for rollout in batch} == set(ids)
        assert all(rollout.outcome == "scored" for rollout in batch if rollout.id not in doomed), batch
        await client.ack(batch)
        async with asyncio.timeout(5):
            while [path for path in root.glob("*/*/*") if (path / "home").is_dir()]:
                await asyncio.sleep(0.05)
    assert await audit(client.queue) == []


async def _cancel_slowly(client: RolloutClient, ids: list[str]) -> None:
    for id in ids:
        await client.cancel([id])
        await asyncio.sleep(0.05)


async def test_a_lane_leaves_a_reserve_to_the_others(redis_service: RedisService, root: Path) -> None:
    config = configured(redis_service, sandbox__root=str(root), sandbox__max_live=4, sandbox__reserve=0.25)
    async with RolloutClient(config=config) as client, serving(config, "init", "run"):
        await client.enqueue([task("Shell", commands=["sleep 60"])] * 6)
        await client.enqueue([task("Shell", commands=["sleep 60"])] * 3, lane="eval")
        async with asyncio.timeout(20):
            while (await client.status())["stages"]["run"]["leased"] < 4:
                await asyncio.sleep(0.05)
        waiting = (await client.status())["stages"]["init"]["place"]
        assert waiting == {"train": 3, "eval": 2}


async def test_a_worker_that_can_make_no_sandbox_does_not_start_and_claims_nothing(line: Any, root: Path) -> None:
    client, config = line
    (id,) = await client.enqueue([task("Shell", commands=["true"])])
    broken = config.changed({"sandbox.driver": "apptainer", "sandbox.image": str(root / "nowhere.sif")})
    with pytest.raises(ConfigError, match=r"can't make sandboxes \(sandbox.driver is 'apptainer'\).*nowhere.sif"):
        await Worker(broken, Stage.INIT, 2).run()
    assert (await client.status())["stages"]["init"]["ready"]["train"] == 1
    assert not list(root.glob("*/*"))
    await client.cancel([id])


async def test_a_root_on_a_long_path_is_gone_to_by_a_short_way(redis_service: RedisService, root: Path) -> None:
    long = root / ("x" * 120)
    config = configured(redis_service, sandbox__root=str(long), sandbox__max_live=2)
    async with RolloutClient(config=config) as client, serving(config) as crew:
        (rollout,) = await all_of(client, [task("Shell", commands=["echo hi"])])
        assert rollout.outcome == "scored" and rollout.evidence["said"] == ["hi"], rollout
        short = crew["init"].hosting.host._short.name
        assert list(long.glob("*/*/owner"))
    assert not long.exists() and not Path(short).exists()
