"""Evaluations beside the training, on a real line: all outcomes counted, and nobody else's rollouts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from pipeline.errors import Incomplete
from tests import line
from tests.integration.crew import configured, serving
from tests.services import RedisService


@pytest.fixture
def config(redis_service: RedisService) -> Config:
    return configured(redis_service)


def valued(*rewards: float, **about: Any) -> Task:
    return Task(handler="stream_handlers:Valued", data={"rewards": list(rewards), "tokens": 16}, **about)


async def test_a_report_counts_failures_apart(redis_service: RedisService) -> None:
    config = configured(redis_service, groups__extra=2, groups__usable=1)  # neither touches an evaluation
    async with RolloutClient(config=config) as client, serving(config):
        report = await client.evaluate(
            [valued(1.0, 0.5, -1.0), Task(handler="echo", id="row-1")], samples=3, timeout=60
        )

        assert (report.scored, report.failed, report.cancelled, report.truncated) == (5, 1, 0, 0)
        assert report.mean == pytest.approx(4.5 / 5)
        assert report.mean_with_failures == pytest.approx(4.5 / 6)
        assert [len(group.rollouts) for group in report.groups] == [3, 3]
        assert {handler: part.mean for handler, part in report.by_handler.items()} == {
            "echo": 1.0, "stream_handlers:Valued": 0.75,
        }  # fmt: skip
        assert str(report) == (
            "mean 0.9000 of 5 scored, 0.7500 with failures as 0 (1 failed, 0 cancelled, 0 truncated; 6 rollouts, "
            "2 groups): echo 1.0000, stream_handlers:Valued 0.7500"
        )
        assert await line.leftovers(client.queue) == []


async def test_two_at_once_and_a_dead_one_s_leftovers_do_not_mix(config: Config) -> None:
    async with RolloutClient(config=config) as dead:
        (left,) = await dead.enqueue([Task(handler="echo", id="left-by-a-dead-evaluation")], lane="eval")
    async with RolloutClient(config=config) as one, RolloutClient(config=config) as other, serving(config):
        tasks = [[valued(reward, id=f"row-{n}") for n in range(4)] for reward in (0.25, 0.75)]
        low, high, again = await asyncio.gather(
            one.evaluate(tasks[0], samples=2, timeout=60), other.evaluate(tasks[1], samples=2, timeout=60),
            one.evaluate(tasks[1], timeout=60),
        )  # fmt: skip
        assert [(report.scored, report.mean) for report in (low, high, again)] == [(8, 0.25), (8, 0.75), (4, 0.75)]
        (found,) = await one.pop(1, timeout=5, lane="eval")
        assert found.id == left
        await one.ack(found)
        assert await line.leftovers(one.queue) == []


async def test_what_does_not_come_in_time_is_cancelled_and_told(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        tasks = [Task(handler="echo", id="quick"), Task(handler="echo", id="slow", data={"sleep": 30.0})]
        with pytest.raises(
            Incomplete,
            match=r"1 of 2 rollouts of the evaluation came: its 2 s are over; 1 outstanding: 1 in work in run",
        ) as caught:
            await client.evaluate(tasks, timeout=2.0)
        (slow,) = caught.value.missing
        assert slow.startswith("slow-eval-")
        assert [group.mean for group in caught.value.batch] == [1.0]
        assert await line.leftovers(client.queue) == [], "the record of the cancelled one is gone too"


@pytest.mark.ci
async def test_what_another_consumer_took_away_is_not_waited_for(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with RolloutClient(config=config) as client, serving(config):

        async def blind(*_: Any) -> list[Any]:
            return []

        monkeypatch.setattr(client.queue, "pop_ids", blind)  # else one cannot tell who is first
        asking = asyncio.create_task(client.evaluate([Task(handler="echo")], samples=4))
        taken: list[Any] = []
        while len(taken) < 4:
            taken += await client.queue.pop("eval", 4, "thief", 60.0)
            await asyncio.sleep(0.01)
        await client.queue.take(taken)
        monkeypatch.undo()
        with pytest.raises(Incomplete, match=r"were popped and acked by another consumer of lane 'eval'"):
            await asyncio.wait_for(asking, 30)
