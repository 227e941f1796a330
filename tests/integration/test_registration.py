"""A server is kept in the registry by a thread, whatever the event loop of its process does."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pipeline.backends import Backend, Backends
from pipeline.config import Config
from pipeline.engine import Engine, EngineError
from pipeline.errors import ConfigError
from pipeline.queue import Queue
from pipeline.registration import Registration, register
from tests import policies
from tests.services import RedisService
from tests.waiting import until
from workers.policy import scripted
from workers.policy.scripted import Options, Running
from workers.policy.tokenizer import Tokenizer


@pytest.fixture
async def server(tokens: Tokenizer) -> AsyncIterator[Running]:
    running = await scripted.start(Options(tokenizer=tokens))
    yield running
    await running.stop()


@pytest.fixture
def config(redis_service: RedisService) -> Config:
    return redis_service.config.changed({"policy.backend_lease": 1.0, "policy.probe_timeout": 2.0})


@pytest.fixture
async def backends(config: Config, redis_service: RedisService) -> AsyncIterator[Backends]:
    async with redis_service.client() as client:
        yield Backends(Queue(client, config))


async def ids(backends: Backends) -> list[str]:
    return [found.id for found in (await backends.view()).backends]


async def lists(backends: Backends, *wanted: str) -> bool:
    return await ids(backends) == [*wanted]


async def test_a_blocked_loop_does_not_lose_the_lease(
    config: Config, redis_service: RedisService, backends: Backends, server: Running
) -> None:
    registration = await register(config, server.url, "trainer", id="mine", version=3)
    assert server.engine.label == "3"  # it was told
    (found,) = (await backends.view()).backends
    assert (found.owner, found.version, found.endpoint, found.model) == ("trainer", 3, "generate", "policy")
    with redis_service.client_sync() as client:

        def end() -> float:
            return float(client.zscore("{rollout}:backends", "mine") or 0)

        first = end()
        until(lambda: end() > first + 1000)  # ms: longer than a lease, and this loop stands still
    await registration.close()
    await registration.close()
    assert await ids(backends) == []


async def test_a_new_redis_gets_it_again_with_the_weights_that_it_has(
    config: Config, redis_service: RedisService, backends: Backends, server: Running
) -> None:
    registration = await register(config, server.url, "trainer", id="mine")
    try:
        async with Engine(server.url) as engine:
            await engine.relabel(8)
        with redis_service.client_sync() as client:
            client.flushall()
        await policies.until(lambda: lists(backends, "mine"))
        (found,) = (await backends.view()).backends
        assert (found.owner, found.version) == ("trainer", 8)
    finally:
        await registration.close()


async def test_what_is_dead_is_struck_off(config: Config, backends: Backends, server: Running) -> None:
    alive = [True]
    registration = await register(config, server.url, "trainer", id="mine", alive=lambda: alive[0])
    assert await ids(backends) == ["mine"]
    alive[0] = False
    await policies.until(lambda: lists(backends))
    await registration.close()


async def test_an_owner_that_begins_anew_changes_nothing(config: Config, backends: Backends) -> None:
    about = Backend(id="n:1", url="http://n:1")
    first = await Registration(config, about, "serve").open()
    await backends.note("n:1", drained=True)
    second = await Registration(config, about, "serve").open()
    (found,) = (await backends.view()).backends
    assert found.drained, "it is renewed, not added"
    await first.close()
    await second.close()
    assert await ids(backends) == []


async def test_what_can_not_be_registered(config: Config, backends: Backends, server: Running) -> None:
    with pytest.raises(EngineError, match="cannot connect"):
        await register(config, "http://127.0.0.1:9", "trainer")
    await backends.add(Backend(id="mine", url=server.url))
    with pytest.raises(ConfigError, match="registered already, by hand"):
        await register(config, server.url, "trainer", id="mine")
    with pytest.raises(ConfigError, match="kind 'sglang'"):
        await register(config, server.url, "trainer", kind="sglang")


async def test_a_paused_one_is_not_asked_for_a_token(config: Config, backends: Backends, server: Running) -> None:
    async with Engine(server.url) as engine:
        await engine.pause("keep")
        registration = await register(config, server.url, "trainer")
        assert registration.backend.endpoint == ""
        await registration.close()
        await engine.resume()
