"""A trainer is never left waiting without a word: whatever keeps the line from going on is in its log within 10 s.

The times are those of the log's records; workers have the default beat (10 s), which is too slow to be waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.client import RolloutClient
from pipeline.envelope import Task
from pipeline.errors import Incomplete
from tests.faults.tools import STAGES, Workers, freeze, thaw
from tests.integration.crew import configured, serving
from tests.services import RedisService
from workers.policy.tokenizer import Tokenizer

LIMIT = 10.0

DEFAULTS: dict[str, Any] = {
    "lease.seconds": 30.0, "lease.beat": 10.0, "lease.tick": 1.0, "redis.socket_timeout": 5.0,
    "redis.connect_timeout": 5.0,
}  # fmt: skip


async def named(caplog: pytest.LogCaptureFixture, text: str, since: float) -> None:
    """Wait until the log says it, and hold that it did within LIMIT seconds of `since` (time.time())."""
    while not (found := [record for record in caplog.records if text in record.getMessage()]):
        assert time.time() - since < LIMIT + 5.0, f"nobody said {text!r}: {caplog.messages}"
        await asyncio.sleep(0.05)
    assert found[0].levelno == logging.WARNING
    assert found[0].name == "pipeline.waiting"
    assert found[0].created - since <= LIMIT


@contextlib.asynccontextmanager
async def waiting(client: RolloutClient, *, groups: bool = False) -> AsyncIterator[asyncio.Task[Any]]:
    """A pop without a time-out goes on meanwhile."""
    pop = client.pop_groups(2) if groups else client.pop(2)
    task = asyncio.create_task(pop)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def in_run(client: RolloutClient, count: int) -> None:
    """Wait until so many are in work in RUN."""
    while int(await client.queue.execute("ZCARD", client.queue.key("lease", "run"))) < count:
        await asyncio.sleep(0.05)


def slow(seconds: float = 120.0) -> Task:
    return Task(handler="echo", data={"sleep": seconds})


async def test_no_workers_and_nothing_in_flight(redis_service: RedisService, caplog: pytest.LogCaptureFixture) -> None:
    async with RolloutClient(config=redis_service.config.changed(DEFAULTS)) as client:
        since = time.time()
        async with waiting(client):
            await named(caplog, "nothing is in flight: what is waited for was never enqueued", since)
            since = time.time()
            await client.enqueue([slow(0.0)], samples=2)
            await named(
                caplog, "2 rollouts wait in init, and no live worker serves it (start one: rollout work init)", since
            )
            said = [message for message in caplog.messages if "that is over" in message]
            assert any("nothing is in flight" in message for message in said)


async def test_workers_killed_in_the_middle(
    redis_service: RedisService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their rollouts are leased for 30 s more: the line looks busy."""
    workers = Workers(redis_service.config.changed(DEFAULTS), tmp_path)
    try:
        async with RolloutClient(config=workers.config) as client:
            for stage in STAGES:
                workers.start(stage)
            await client.enqueue([slow()], samples=2)
            await in_run(client, 2)
            async with waiting(client, groups=True):
                await asyncio.sleep(6.0)  # long rollouts alone are not told
                assert not [record for record in caplog.records if record.name == "pipeline.waiting"]
                since = time.time()
                workers.kill(workers.all[1], again=False)
                await named(
                    caplog, "rollouts are left in run, and no live worker serves it: the last one was heard", since
                )
    finally:
        workers.stop()


async def test_no_policy_server(
    redis_service: RedisService, tokens: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(redis_service, policy__tokenizer=str(tokens.name_or_path)).changed(DEFAULTS)
    async with RolloutClient(config=config) as client, serving(config, "init", "run", "eval"):
        await client.enqueue([Task(handler="math", data={"question": "1+1?", "expected_answer": "2"})], samples=2)
        await in_run(client, 2)
        async with waiting(client):
            await named(caplog, "rollouts in run wait for the policy, and no server of it is usable", time.time())
        with pytest.raises(Incomplete, match=r"0 of 2 rollouts .* no server of it is usable: .*rollout serve"):
            await client.pop(2, timeout=0.0)


@pytest.mark.ci
async def test_paused_policy_and_paused_run(redis_service: RedisService, caplog: pytest.LogCaptureFixture) -> None:
    config = configured(redis_service).changed(DEFAULTS)
    async with RolloutClient(config=config) as client, serving(config, "run"):
        await client.pause_run("the cluster moves")
        await client.enqueue([slow()], samples=2)
        async with waiting(client):
            await named(caplog, "the cluster moves", time.time())


async def test_redis_is_silent(redis_server: RedisService, caplog: pytest.LogCaptureFixture) -> None:
    async with RolloutClient(config=redis_server.config.changed(DEFAULTS)) as client:
        await client.enqueue([slow(0.0)], samples=2)
        stream = client.stream([slow(0.0)], batch=1, ahead=0)
        asking = asyncio.create_task(anext(stream))
        try:
            await asyncio.sleep(0.5)
            since = time.time()
            freeze(redis_server.pid)
            try:
                await named(caplog, "Redis does not answer within 3 s", since)
            finally:
                thaw(redis_server.pid)
            while not any("that is over" in text and "Redis" in text for text in caplog.messages):
                assert time.time() - since < 30.0
                await asyncio.sleep(0.05)
        finally:
            asking.cancel()
            await asyncio.wait({asking})


@pytest.mark.ci
async def test_redis_is_full(redis_server: RedisService, caplog: pytest.LogCaptureFixture) -> None:
    async with RolloutClient(config=redis_server.config.changed(DEFAULTS)) as client:
        await client.enqueue([slow(0.0)], samples=2)
        async with waiting(client), redis_server.client() as plain:
            since = time.time()
            await plain.config_set("maxmemory", 1)
            await named(caplog, "above memory.high = 0.75: INIT begins nothing", since)


@pytest.mark.ci
async def test_a_stream_that_cannot_be_fed_is_told_why(
    redis_server: RedisService, caplog: pytest.LogCaptureFixture
) -> None:
    async with RolloutClient(config=redis_server.config.changed(DEFAULTS)) as client, redis_server.client() as plain:
        await plain.config_set("maxmemory", 1)
        asking = asyncio.create_task(anext(client.stream([slow(0.0)], batch=1)))
        try:
            await named(caplog, "above memory.high = 0.75: INIT begins nothing and nothing is enqueued", time.time())
            assert "nothing is in flight" not in caplog.text
        finally:
            asking.cancel()
            await asyncio.wait({asking})


@pytest.mark.ci
async def test_a_bound_that_waits_for_the_trainer_itself(
    redis_service: RedisService, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(redis_service).changed(DEFAULTS)
    async with RolloutClient(config=config) as client, serving(config):
        await client.start_run(1, batch=1, max_staleness=0)
        await client.enqueue([slow(0.0), slow(0.0)])
        async with waiting(client):
            await named(caplog, "1 rollouts wait in init for new weights, and nothing else is on its way", time.time())


@pytest.mark.ci
async def test_a_trainer_that_asks_for_a_moment_at_a_time_is_told_too(
    redis_service: RedisService, caplog: pytest.LogCaptureFixture
) -> None:
    async with RolloutClient(config=redis_service.config.changed(DEFAULTS)) as client:
        since = time.time()
        while time.time() - since < LIMIT and not any("nothing is in flight" in text for text in caplog.messages):
            with contextlib.suppress(Incomplete):
                await client.pop(1, timeout=0.4)
        await named(caplog, "nothing is in flight", since)
        assert len([text for text in caplog.messages if "waiting in lane" in text]) == 1
