"""Samples that are asked for one by one and play as groups: real workers, a real Redis, two trainers' processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.adapters.sessions import LEFT_SECONDS, Session, Sessions
from pipeline.audit import audit
from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from pipeline.errors import Incomplete, TaskError
from tests import line
from tests.integration.crew import configured, serving
from tests.policies import until
from tests.services import RedisService


@pytest.fixture
def config(redis_service: RedisService) -> Config:
    return configured(redis_service, groups__extra=2, groups__usable=1, retry__attempts=1)


@pytest.fixture
async def client(config: Config) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(config=config) as client:
        yield client


def rewarding(folder: Path, text: str = "run") -> Task:
    """Rewards 1, 0, 1, and the fourth fails."""
    return Task(handler="fault_handlers:Rewarding", data={"text": text, "starts": str(folder / "starts"), "tokens": 64})


async def played(sessions: Sessions, task: Task, *prompts: str) -> list[Session]:
    return list(await asyncio.gather(*(sessions.play(prompt, task) for prompt in prompts)))


async def test_samples_of_a_prompt_are_one_group_and_hear_of_one_another(
    client: RolloutClient, config: Config, tmp_path: Path
) -> None:
    """Also where another process asks for the same prompt; the settings' early close does not touch them."""
    async with RolloutClient(config=config) as other, serving(config):
        mine, theirs = Sessions(client, timeout=30), Sessions(other, timeout=30)
        task = rewarding(tmp_path)
        ended, more = await asyncio.gather(played(mine, task, *["a"] * 4, *["b"] * 4), played(theirs, task, *["a"] * 4))
        groups: dict[str, list[Any]] = {}
        for session in [*ended, *more]:
            groups.setdefault(session.rollout.group, []).append(session.rollout)
        assert sorted(group[0] for group in groups) == ["a", "a", "b"]
        for rollouts in groups.values():
            assert [item.sample for item in rollouts] == [0, 1, 2, 3] and rollouts[0].samples == 4
            assert [item.reward for item in rollouts] == [1.0, 0.0, 1.0, None]
        assert sorted(item.reward for item in await ended[3].scored()) == [0.0, 1.0, 1.0]
        deadline = int(await line.field(client.queue, ended[0].rollout.id, "deadline")) / 1000
        assert 30 < deadline - time.time() < 30 + LEFT_SECONDS, "those of a trainer that dies end by themselves"
        for sessions, some in ((mine, ended), (theirs, more)):
            for session in some:
                await sessions.done(session.rollout)
            await sessions.close()
        assert await audit(client.queue) == []
        assert await line.leftovers(client.queue) == []


async def test_what_takes_too_long_or_loses_its_caller_is_cancelled(client: RolloutClient, config: Config) -> None:
    slow = Task(handler="echo", data={"sleep": 600.0})
    sessions = Sessions(client, timeout=1.0)
    async with serving(config):
        with pytest.raises(Incomplete, match=r"rollout late-\w+\.0 did not end within \d+ s: .+"):
            await sessions.play("late", slow)
        patient = Sessions(client)
        gone = [asyncio.create_task(patient.play("gone", slow)) for _ in range(2)]

        async def both_run() -> bool:
            return bool((await client.status())["stages"]["run"]["leased"] == 2)

        await until(both_run)
        gone[0].cancel()
        quick = await patient.play("next", Task(handler="echo"))
        await patient.done(quick.rollout)
        gone[1].cancel()
        assert [type(item) for item in await asyncio.gather(*gone, return_exceptions=True)] == [
            asyncio.CancelledError
        ] * 2
        await sessions.close()
        await patient.close()
        assert await line.leftovers(client.queue) == []


async def test_a_task_that_is_refused_is_refused_to_every_caller(client: RolloutClient) -> None:
    sessions = Sessions(client, timeout=5)
    wrong = Task(handler="", data={})
    found = await asyncio.gather(*(sessions.play("p", wrong) for _ in range(3)), return_exceptions=True)
    assert [type(item) for item in found] == [TaskError] * 3
    await sessions.close()
