"""Waiting for rollouts by id, on a real server with real workers: each caller gets its own, and nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from pipeline.audit import audit
from pipeline.by_id import Waiter
from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from pipeline.errors import Incomplete, RedisUnavailable, ServiceError, TaskError
from pipeline.results import Rollout
from tests import line
from tests.integration.crew import configured, serving
from tests.policies import until
from tests.services import RedisService


@pytest.fixture
def config(redis_service: RedisService) -> Config:
    return configured(redis_service, line__lanes={"train": 4, "eval": 1, "asked": 2})


def echo(text: str = "", sleep: float = 0.0) -> Task:
    return Task(handler="echo", data={"text": text, "sleep": sleep})


async def test_each_caller_gets_its_own_also_across_processes(config: Config) -> None:
    """Two clients wait in one lane, each for its own 20, in an order other than that of the ends."""
    async with (
        RolloutClient(config=config) as one,
        RolloutClient(config=config) as two,
        serving(config),
        Waiter(one, "asked") as first,
        Waiter(two, "asked") as second,
    ):

        async def play(waiter: Waiter, text: str) -> str:
            rollout = await waiter.play(echo(text, sleep=0.1 if text.endswith("0") else 0.0), timeout=20)
            await waiter.client.ack(rollout)
            return str(rollout.state["answer"])

        wanted = [f"{name}-{at}" for at in range(20) for name in ("a", "b")]
        got = await asyncio.gather(*(play(first if text[0] == "a" else second, text) for text in wanted))

        assert got == wanted
        assert await audit(one.queue) == []
        assert await line.leftovers(one.queue) == []


async def test_other_rollouts_of_the_lane_stay_for_the_trainer(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config), Waiter(client) as waiter:
        others = await client.enqueue([echo("trainer's")], samples=2)
        rollout = await waiter.play(echo("mine"), timeout=20)

        assert rollout.state["answer"] == "mine"
        batch = await client.pop(2, timeout=20)
        assert sorted(item.id for item in batch) == others
        await client.ack([*batch, rollout])
        assert await line.leftovers(client.queue) == []


async def test_a_wait_that_is_over_says_why_and_leaves_nothing(config: Config) -> None:
    async with RolloutClient(config=config) as client, Waiter(client, "asked") as waiter:
        with pytest.raises(Incomplete, match=r"did not end within 0 s: waits 0 s in init: no live worker") as caught:
            await waiter.play(echo(), timeout=0.2)
        assert len(caught.value.missing) == 1
        await until(lambda: line_is_empty(client))


async def test_a_dead_line_ends_the_wait_with_a_sentence(config: Config) -> None:
    """No worker at INIT: every caller is told, long before its own time is over."""
    async with RolloutClient(config=config) as client, Waiter(client, "asked", dead_after=0.5) as waiter:
        waits = [waiter.play(echo(), timeout=300) for _ in range(3)]
        for error in await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 15):
            assert isinstance(error, Incomplete)
            assert "no live worker serves it (start one: rollout work init)" in str(error)
        await until(lambda: line_is_empty(client))


async def test_closing_ends_the_waits_and_leaves_no_record(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        waiter = Waiter(client, "asked")
        waits = [asyncio.create_task(waiter.play(echo(sleep=60.0))) for _ in range(3)]
        await until(lambda: line_runs(client))
        await waiter.close()
        for error in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(error, ServiceError)
        assert await line_is_empty(client)
        assert await line.leftovers(client.queue) == []


async def test_a_caller_that_leaves_cancels_its_rollout(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config), Waiter(client, "asked") as waiter:
        asking = asyncio.create_task(waiter.play(echo(sleep=60.0)))
        await until(lambda: line_runs(client))
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await until(lambda: line_is_empty(client))


async def test_an_id_that_nobody_enqueued_is_said_and_so_is_a_second_caller(config: Config) -> None:
    async with RolloutClient(config=config) as client, Waiter(client, "asked") as waiter:
        with pytest.raises(TaskError, match="has no rollout nobody.0"):
            await waiter.rollout("nobody.0")
        (id,) = await client.enqueue([echo()], lane="asked")
        first = asyncio.create_task(waiter.rollout(id))
        await asyncio.sleep(0)
        with pytest.raises(TaskError, match="waited for already"):
            await waiter.rollout(id)
        await waiter.close()
        with pytest.raises(ServiceError, match="closed"):
            await first


async def test_what_was_not_acked_is_there_for_the_next(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        async with Waiter(client, "asked") as waiter:
            (id,) = await client.enqueue([echo("kept")], lane="asked")
            await waiter.rollout(id, timeout=20)  # leased here, not acked
        await client.close()
        async with RolloutClient(config=config) as again, Waiter(again, "asked") as next_one:
            assert (await next_one.rollout(id, timeout=20)).state["answer"] == "kept"


async def test_what_goes_from_the_line_while_it_is_waited_for_is_said(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another consumer acks one; the server loses one that this client did not enqueue. Neither wait hangs."""
    monkeypatch.setattr("pipeline.by_id.KNOWN_EVERY", 0.1)
    async with RolloutClient(config=config) as client, RolloutClient(config=config) as other:
        (taken, lost) = await other.enqueue([echo()], samples=2, lane="asked")
        await client.cancel([taken])
        popped = await other.queue.pop("asked", 1, other.name, 60.0)
        async with Waiter(client, "asked") as waiter:
            taking = await looked_for(waiter, taken)
            assert await other.queue.take(popped) == ["OK"]
            with pytest.raises(ServiceError, match="another consumer of lane 'asked' acked it"):
                await asyncio.wait_for(taking, 20)
        async with Waiter(client, "asked") as waiter:
            losing = await looked_for(waiter, lost)
            await client.queue.execute("FLUSHALL")
            with pytest.raises(ServiceError, match="no record of it"):
                await asyncio.wait_for(losing, 20)


async def test_what_was_given_up_while_redis_was_away_is_cancelled_when_it_is_back(redis_server: RedisService) -> None:
    away = {"redis.socket_timeout": 0.3, "redis.connect_timeout": 0.3, "limits.outage": 0.3}
    async with RolloutClient(config=redis_server.config.changed(away)) as client, Waiter(client) as waiter:
        asking = asyncio.create_task(waiter.play(echo()))
        await until(lambda: line_holds(client, 1))
        os.kill(redis_server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(RedisUnavailable):
                await asyncio.wait_for(asking, 20)
        finally:
            os.kill(redis_server.pid, signal.SIGCONT)
        await until(lambda: line_holds(client, 0))


async def line_holds(client: RolloutClient, count: int) -> bool:
    try:
        return await line.count(client.queue, "live") == count
    except RedisUnavailable:
        return False


async def looked_for(waiter: Waiter, id: str) -> asyncio.Task[Rollout]:
    """A fresh waiter's first wait, once it has begun to look."""
    waiting = asyncio.create_task(waiter.rollout(id))

    async def looks() -> bool:
        return waiter._looking is not None

    await until(looks)
    return waiting


async def line_is_empty(client: RolloutClient) -> bool:
    return await line.count(client.queue, "live") == 0


async def line_runs(client: RolloutClient) -> bool:
    return bool(await client.queue.execute("ZCARD", client.queue.key("lease", "run")))
