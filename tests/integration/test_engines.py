"""A trainer's own engines, offered to the line: scripted servers, a real Redis, rollouts that play on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pipeline import RolloutClient, Task
from pipeline.adapters.engines import offered, weights_moved
from pipeline.config import Config
from pipeline.errors import PolicyError
from tests import policies
from tests.integration.crew import all_of, serving
from tests.services import RedisService
from workers.policy.scripted import Running
from workers.policy.tokenizer import Tokenizer

ASK = Task(handler="weight_handlers:Ask", data={"question": "What is 6 x 7?"})


@pytest.fixture
def config(redis_service: RedisService, tokens: Tokenizer) -> Config:
    return redis_service.config.changed(
        {
            "handlers.path": str(Path(__file__).parent), "policy.tokenizer": tokens.name_or_path, "limits.grace": 1.0,
            "policy.update_timeout": 5.0, "policy.request_timeout": 10.0, "policy.probe_every": 0.3,
        }
    )  # fmt: skip


@pytest.fixture
async def engines(tokens: Tokenizer) -> AsyncIterator[list[Running]]:
    """One with vLLM's control side, and one as verl starts it: without."""
    async with policies.servers(tokens, {}, {"dev_mode": False}, says="forty-two, I believe") as running:
        yield running


def addresses(engines: list[Running]) -> list[str]:
    """As verl tells them."""
    return [engine.url.removeprefix("http://") for engine in engines]


async def versions(client: RolloutClient) -> dict[str, int | None]:
    return {backend.url: backend.version for backend in (await client.policy()).backends}


async def test_rollouts_play_on_a_trainers_engines_and_bear_the_version_that_it_says(
    config: Config, engines: list[Running]
) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        async with offered(client, addresses(engines)) as ids:
            assert len(ids) == 2 and set(await versions(client)) == {engine.url for engine in engines}
            await client.start_run(3)
            before = await all_of(client, [ASK], samples=8)
            async with weights_moved(client, 4) as servers:
                assert {server.url for server in servers} == {engine.url for engine in engines}
                assert engines[0].engine.paused
            after = await all_of(client, [ASK], samples=8)
        assert await versions(client) == {}
    assert {rollout.versions for rollout in before} == {(3, 3)}
    assert {rollout.versions for rollout in after} == {(4, 4)}
    assert all(engine.engine.counts["prompt"] for engine in engines)


async def test_an_error_while_weights_move_leaves_no_server_with_a_version(
    config: Config, engines: list[Running]
) -> None:
    async with RolloutClient(config=config) as client, offered(client, addresses(engines)):
        await client.start_run(3)
        with pytest.raises(ConnectionError, match="a rank died"):
            async with weights_moved(client, 4):
                raise ConnectionError("a rank died")
        view = await client.policy()
        assert (view.policy.version, view.policy.paused) == (3, "")
        assert set((await versions(client)).values()) == {None}
        async with weights_moved(client, 5):
            pass
        assert set((await versions(client)).values()) == {5}


async def test_a_cancelled_move_and_a_version_that_does_not_rise(config: Config, engines: list[Running]) -> None:
    async with RolloutClient(config=config) as client, offered(client, addresses(engines)):
        await client.start_run(3)
        began = asyncio.Event()

        async def moving() -> None:
            async with weights_moved(client, 4):
                began.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(moving())
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await client.policy()).policy.paused == ""
        with pytest.raises(PolicyError, match="versions only rise"):
            async with weights_moved(client, 3):
                pytest.fail("nothing may move")


async def test_all_engines_are_offered_or_none(config: Config, engines: list[Running]) -> None:
    async with RolloutClient(config=config) as client:
        with pytest.raises(PolicyError):
            async with offered(client, [*addresses(engines), "127.0.0.1:1"]):
                pytest.fail("one of them does not answer")
        assert await versions(client) == {}
        with pytest.raises(PolicyError, match="no engine to offer"):
            async with offered(client, []):
                pytest.fail("there is none")
