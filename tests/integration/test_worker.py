"""The worker loop on a real server: burst, stop, cancel, metrics, bad starts, and what it says of itself."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.audit import audit
from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Stage, Task
from pipeline.errors import HandlerError, RedisUnavailable, UnknownHandler
from tests import line
from tests.integration.crew import all_of, configured, serving
from tests.services import RedisService
from workers.loop import Worker
from workers.metrics import Metrics


@pytest.fixture
def config(redis_service: RedisService) -> Config:
    return configured(redis_service)


def task(name: str, log: Path, **data: Any) -> Task:
    return Task(handler=f"fault_handlers:{name}", data={"starts": str(log), **data})


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(f"rollout_{name}", {"stage": metrics.stage, **labels})
    assert found is not None, f"no metric {name}"
    return found


async def until(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


async def test_burst_ends_when_nothing_is_left(config: Config) -> None:
    async with RolloutClient(config=config) as client:
        ids = await client.enqueue([Task(handler="fault_handlers:Flaky", data={"sleep": 0.2})], samples=5)
        for stage in ("init", "run", "eval"):
            await asyncio.wait_for(Worker(config, Stage(stage), 2, burst=True).run(), 30)
        batch = await client.pop(5, timeout=0)
        assert {rollout.id for rollout in batch} == set(ids)
        assert {rollout.outcome for rollout in batch} == {"scored"}, "delayed retries are waited for as well"
        await client.ack(batch)


async def test_burst_on_an_empty_line_ends_at_once(config: Config) -> None:
    await asyncio.wait_for(Worker(config, Stage.RUN, 2, burst=True).run(), 10)


async def test_everything_is_counted(config: Config, tmp_path: Path) -> None:
    async with RolloutClient(config=config) as client, serving(config) as crew:
        await all_of(client, [Task(handler="echo", data={"tokens": 64})], samples=6)
        await all_of(client, [Task(handler="fault_handlers:Flaky")], samples=2)
        await all_of(client, [task("Rewarding", tmp_path / "a", text="run all")])
        await all_of(client, [Task(handler="nowhere:Nobody")])
        (slow,) = await client.enqueue([task("Recorded", tmp_path / "b", sleep=30.0)])
        await until(lambda: running(tmp_path / "b"))
        await client.cancel([slow])
        await client.ack(await client.pop(1, timeout=10))

        names = ("taken_total", "committed_total", "retried_total", "dead_total", "cancelled_total", "stale_total")
        counted = {stage: [value(crew[stage].metrics, name) for name in names] for stage in crew}
        assert counted["init"] == [6 + 4 + 1 + 1 + 1, 6 + 2 + 1 + 1, 2, 1, 0, 0]
        assert counted["run"] == [6 + 4 + 3 + 1, 6 + 2, 2 + 2, 1, 1, 0]
        assert counted["eval"] == [6 + 4, 6 + 2, 2, 0, 0, 0]
        for worker in crew.values():
            assert value(worker.metrics, "waiting_seconds_count") == value(worker.metrics, "taken_total")
            assert value(worker.metrics, "working_seconds_count") == value(worker.metrics, "taken_total")
            assert value(worker.metrics, "running") == 0
            assert value(worker.metrics, "loop_lag_seconds_count") > 0


async def running(log: Path) -> bool:
    return log.exists()


async def test_length_and_age_of_the_queue_are_shown(config: Config) -> None:
    port_is_not_opened_here = config.changed({"workers.metrics_port": 1})
    async with RolloutClient(config=config) as client, serving(port_is_not_opened_here, "run", slots=1) as crew:
        for number in range(3):
            await line.put(client.queue, f"g{number}", lane="eval")
            await line.pass_on(client.queue, await line.one(client.queue), "init")
        metrics = crew["run"].metrics

        async def shown() -> bool:
            found = metrics.registry.get_sample_value("rollout_queue_length", {"stage": "run", "lane": "eval"})
            return found is not None

        await until(shown)


async def test_a_cancel_frees_the_slot_within_a_second(config: Config, tmp_path: Path) -> None:
    """The beat is far away: the doorbell does it."""
    slow_beat = config.changed({"lease.seconds": 60.0, "lease.beat": 30.0})
    async with RolloutClient(config=config) as client, serving(slow_beat, slots=1):
        (slow,) = await client.enqueue([task("Recorded", tmp_path / "a", sleep=60.0)])
        await until(lambda: running(tmp_path / "a"))
        asked = time.monotonic()
        assert await client.cancel([slow]) == {slow: "ASKED"}
        (rollout,) = await client.pop(1, timeout=10)
        assert time.monotonic() - asked < 1.0
        assert (rollout.outcome, rollout.reward) == ("cancelled", None)
        (next_one,) = await all_of(client, [task("Recorded", tmp_path / "b")], timeout=10)
        assert next_one.outcome == "scored"
        await client.ack([rollout])
        assert await audit(client.queue) == []


async def test_a_stopping_worker_takes_nothing_and_gives_back(config: Config, tmp_path: Path) -> None:
    """`limits.grace` is 1 s here: the short one is finished, the long one goes to the next worker as a loss."""
    async with RolloutClient(config=config) as client, serving(config, "init", "eval"):
        (short,) = await client.enqueue([task("Recorded", tmp_path / "a", sleep=0.7)])
        (long,) = await client.enqueue([task("Recorded", tmp_path / "b", sleep=3.0)])
        async with serving(config, "run"):
            await until(lambda: running(tmp_path / "b"))
        assert await line.state(client.queue, long) == ("run", "ready")
        assert (await line.field(client.queue, long, "losses"), await line.field(client.queue, short, "losses")) == (
            "1",
            "0",
        )
        assert await client.queue.execute("ZCARD", client.queue.key("lease", "run")) == 0
        async with serving(config, "run"):
            batch = await client.pop(2, timeout=20)
        assert {rollout.outcome for rollout in batch} == {"scored"}
        await client.ack(batch)


async def test_a_stopped_worker_is_off_the_list(config: Config) -> None:
    async with RolloutClient(config=config) as client:
        async with serving(config, "run"):

            async def listed() -> bool:
                return len((await client.status())["workers"]) == 1

            await until(listed)
        assert (await client.status())["workers"] == []


async def test_the_memory_mark_stops_init_alone(config: Config) -> None:
    async with RolloutClient(config=config) as client:
        before = await client.enqueue([Task(handler="echo")], samples=2)
        await line.pass_on(client.queue, await line.one(client.queue), "init")
        used, limit = await client.queue.memory()
        await client.queue.execute("CONFIG", "SET", "maxmemory", int(used * 1.25))
        try:
            async with serving(config, "run", "eval"):
                (done,) = await client.pop(1, timeout=20)
            async with serving(config, "init") as crew:

                async def noticed() -> bool:
                    return hasattr(crew["init"], "upkeep") and crew["init"].upkeep.memory_high

                await until(noticed)
                waiting = await line.state(client.queue, next(id for id in before if id != done.id))
                await client.queue.execute("CONFIG", "SET", "maxmemory", limit)
                if waiting == ("init", "ready"):  # unless it was claimed before the worker looked

                    async def passed() -> bool:
                        return await line.count(client.queue, "committed:init") == 2

                    await until(passed)
        finally:
            await client.queue.execute("CONFIG", "SET", "maxmemory", limit)
        await client.ack([done])


async def test_a_handler_that_does_not_import_fails_the_worker(config: Config, tmp_path: Path) -> None:
    (tmp_path / "broken_handler.py").write_text("import nothing_of_this_name\n")
    broken = config.changed({"handlers.path": str(tmp_path), "handlers.load": ["broken_handler:Mine"]})
    with pytest.raises(HandlerError, match="needs nothing_of_this_name, which is not installed"):
        await Worker(broken, Stage.RUN, 1).run()
    with pytest.raises(UnknownHandler, match=f"looked for in {tmp_path}"):
        await Worker(broken.changed({"handlers.load": ["not_there:Mine"]}), Stage.RUN, 1).run()


async def test_an_unreachable_server_is_told_at_the_start(config: Config, tmp_path: Path) -> None:
    nowhere = config.changed({"redis.url": f"unix://{tmp_path}/nothing.sock"})
    with pytest.raises(RedisUnavailable, match="nothing.sock"):
        await asyncio.wait_for(Worker(nowhere, Stage.RUN, 1).run(), config.redis.connect_timeout + 1)


async def test_a_rollout_that_runs_alone_does_so_in_a_child(config: Config, tmp_path: Path) -> None:
    log = tmp_path / "starts"
    async with RolloutClient(config=config) as client, serving(config):
        ids = await client.enqueue([Task(handler="echo", data={"tokens": 64})], samples=1)
        await client.queue.execute("HSET", client.queue.key("r", ids[0]), "alone", "1")
        (pill,) = await client.enqueue([task("Poison", log)])
        await client.queue.execute("HSET", client.queue.key("r", pill), "alone", "1")
        batch = await client.pop(2, timeout=60)
        by_id = {rollout.id: rollout for rollout in batch}
        assert by_id[ids[0]].outcome == "scored"
        failure = by_id[pill].failure
        assert failure is not None
        assert (failure.kind, failure.exit_code) == ("worker", "-9"), "and this process lives"
        assert len(log.read_text().splitlines()) == 3
        await client.ack(batch)
