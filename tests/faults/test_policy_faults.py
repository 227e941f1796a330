"""Policy servers that die, hang, lose replies or are all gone: calls are repeated elsewhere, and no rollout fails."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.backends import SHARE_SECONDS, Backends, Load
from pipeline.client import RolloutClient
from pipeline.envelope import Task
from pipeline.errors import PolicyError
from pipeline.queue import Queue
from pipeline.results import Rollout
from tests.faults.tools import Workers
from tests.integration.crew import all_of, configured, serving
from tests.policies import PROMPT, QUICK, QUICK_CONFIG, calls_of, client, known, register, servers, until
from tests.services import RedisService
from workers.clock import WorkingClock
from workers.policy import scripted
from workers.policy.client import VllmPolicy
from workers.policy.tokenizer import Tokenizer

CHAT = "policy_handlers:Chat"


@pytest.fixture
async def queue(redis_service: RedisService) -> AsyncIterator[Queue]:
    async with redis_service.client() as connection:
        yield Queue(connection, redis_service.config)


def outcomes(rollouts: list[Rollout]) -> Counter[str]:
    return Counter(rollout.outcome for rollout in rollouts)


def attempts(rollouts: list[Rollout], stage: str = "run") -> int:
    return max(sum(record["stage"] == stage for record in rollout.attempts) for rollout in rollouts)


async def in_flight(policy: VllmPolicy, count: int, **about: Any) -> list[asyncio.Task[Any]]:
    await policy.ready()
    await until(lambda: all(server.state == "up" for server in policy.pool.fleet.servers.values()))
    calls = [asyncio.create_task(policy.bound(**about).generate(PROMPT, {})) for _ in range(count)]
    await until(lambda: policy.pool.about()["calls"] == count)
    return calls


@pytest.mark.ci
async def test_a_server_that_is_killed_with_calls_in_flight_costs_no_rollout(
    redis_service: RedisService, tokens: Tokenizer, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    pace = ("--tokenizer", tokens.name_or_path, "--latency-per-token", "0.03")
    first, second = await asyncio.gather(*(asyncio.to_thread(scripted.launch, folder, *pace) for folder in folders))
    config = configured(redis_service, **QUICK_CONFIG, policy__url=f"{first.url},{second.url}")
    try:
        async with serving(config, slots=32) as crew, RolloutClient(config=config) as trainer:
            playing = asyncio.create_task(all_of(trainer, [Task(handler=CHAT, data={"turns": 3})], samples=24))

            def calls_at_first() -> int:
                servers = crew["run"].shop.policy.pool.fleet.servers.values()
                return sum(len(server.calls) for server in servers if server.about.url == first.url)

            await until(lambda: crew["run"].running and calls_at_first() >= 6)
            first.process.kill()
            rollouts = await playing
            counts = crew["run"].shop.policy.pool.fleet.counts
    finally:
        first.stop()
        second.stop()
    assert outcomes(rollouts) == {"scored": 24} and attempts(rollouts) == 1
    lost = counts["repeats lost"] + counts["repeats refused"]  # refused: it still asked for the weights' version
    assert lost >= 4 and counts["ejections dead"] == 1


async def test_a_server_that_hangs_while_its_health_says_200_costs_no_rollout(
    redis_service: RedisService, queue: Queue, tokens: Tokenizer
) -> None:
    config = configured(redis_service, **QUICK_CONFIG, policy__tokenizer=tokens.name_or_path)
    async with servers(tokens, {}, {}, latency_per_token=0.02) as (a, b):
        await register(queue, "a", a)
        await register(queue, "b", b)
        async with serving(config, slots=32) as crew, RolloutClient(config=config) as trainer:
            playing = asyncio.create_task(all_of(trainer, [Task(handler=CHAT, data={"turns": 3})], samples=24))
            await until(lambda: len(a.engine.calls) >= 4)
            a.face.hang()
            rollouts = await playing
            counts = crew["run"].shop.policy.pool.fleet.counts
            (listed,) = [item for item in (await Backends(queue).view()).backends if item.id == "a"]
            a.face.hang(False)
            await until(lambda: len(crew["run"].shop.policy.pool.fleet.usable()) == 2)
    assert outcomes(rollouts) == {"scored": 24} and attempts(rollouts) == 1
    assert counts["repeats hang"] >= 4 and counts["ejections hang"] == 1
    assert "it hangs" in listed.why


async def test_the_last_server_keeps_its_calls_though_it_hangs(tokens: Tokenizer) -> None:
    clock = WorkingClock(100.0)
    async with servers(tokens, {}, latency_per_token=0.02) as (only,), client(tokens, only) as policy:
        calls = await in_flight(policy, 3, clock=clock)
        only.face.hang()
        await until(lambda: known(policy, "down"))
        before = clock.elapsed
        late = asyncio.create_task(policy.bound(clock).generate(PROMPT, {}))
        await until(lambda: policy.pool.waiting == 1)
        assert "it hangs" in clock.why and clock.elapsed == before, "nobody works meanwhile"
        only.face.hang(False)
        assert {done.finish_reason for done in await asyncio.gather(*calls, late)} == {"stop"}
        assert calls_of(only) == 4, "none was sent twice"


async def test_a_hang_of_the_last_server_has_an_end(tokens: Tokenizer) -> None:
    patience = replace(QUICK, wait=2.0)
    async with (
        servers(tokens, {}, latency_per_token=60.0) as (only,),
        client(tokens, only, patience=patience) as policy,
    ):
        calls = await in_flight(policy, 2)
        only.face.hang()
        for ended in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(ended, PolicyError) and "for 2 s" in str(ended) and "it hangs" in str(ended)


async def test_a_paused_server_does_not_hang(tokens: Tokenizer) -> None:
    async with servers(tokens, {}, {}, latency_per_token=0.02) as (a, b), client(tokens, a, b) as policy:
        calls = await in_flight(policy, 4)
        await a.engine.pause("keep")
        await until(lambda: any(server.paused for server in policy.pool.fleet.servers.values()))
        await policy.generate(PROMPT, {})
        a.engine.resume()
        assert {done.finish_reason for done in await asyncio.gather(*calls)} == {"stop"}
        assert policy.pool.fleet.counts["ejections hang"] == 0 and calls_of(a) + calls_of(b) == 5


async def test_with_all_servers_away_calls_wait_and_the_clock_stands(tokens: Tokenizer) -> None:
    clock = WorkingClock(100.0)
    async with servers(tokens, {}, {}) as (a, b), client(tokens, a, b) as policy:
        await in_flight(policy, 0)
        await a.stop()
        await b.stop()
        call = asyncio.create_task(policy.bound(clock).generate(PROMPT, {}))
        await until(lambda: policy.pool.waiting == 1 and known(policy, "down", "down"))
        before = clock.elapsed
        assert clock.why == "no usable policy server"
        again = await scripted.start(scripted.Options(tokenizer=tokens), int(a.url.rsplit(":", 1)[1]))
        assert (await call).finish_reason == "stop" and clock.elapsed - before < 0.5
        await again.stop()


async def test_after_policy_wait_the_error_names_every_server(tokens: Tokenizer) -> None:
    patience = replace(QUICK, wait=0.5)
    async with servers(tokens, {}, {}) as (a, b), client(tokens, a, b, patience=patience) as policy:
        await in_flight(policy, 0)
        await a.stop()
        await b.stop()
        began = time.monotonic()
        with pytest.raises(PolicyError) as caught:
            await policy.generate(PROMPT, {})
        assert time.monotonic() - began < 5
    said = str(caught.value)
    assert "for 0.5 s (limits.policy_wait)" in said and said.lower().count("cannot connect") == 2
    assert a.url.removeprefix("http://") in said and b.url.removeprefix("http://") in said


async def test_a_call_that_kills_its_servers_is_stopped_after_two(tokens: Tokenizer) -> None:
    async with servers(tokens, {}, {}, {}, {}, poison="die") as four, client(tokens, *four) as policy:
        await in_flight(policy, 0)
        with pytest.raises(PolicyError, match="2 policy servers went down with this call, which is not sent again"):
            await policy.generate(policy.render([{"role": "user", "content": "die"}]), {})
        assert sum(server.engine.dead for server in four) == 2
        assert (await policy.generate(PROMPT, {})).finish_reason == "stop"


async def test_lost_replies_cost_no_rollout(redis_service: RedisService, queue: Queue, tokens: Tokenizer) -> None:
    config = configured(redis_service, **QUICK_CONFIG, policy__tokenizer=tokens.name_or_path)
    async with servers(tokens, {}, {}, faults="drop:0.1", latency_per_token=0.001) as (a, b):
        await register(queue, "a", a)
        await register(queue, "b", b)
        async with serving(config, slots=16) as crew, RolloutClient(config=config) as trainer:
            rollouts = await all_of(trainer, [Task(handler=CHAT, data={"turns": 4})], samples=16)
            counts = crew["run"].shop.policy.pool.fleet.counts
    assert outcomes(rollouts) == {"scored": 16} and attempts(rollouts) == 1 and counts["repeats lost"] > 0


async def test_a_slow_reply_is_waited_for_and_asked_for_once(tokens: Tokenizer) -> None:
    slow = {"latency_per_token": 0.06}
    async with servers(tokens, slow, slow) as (a, b), client(tokens, a, b) as policy:
        calls = await in_flight(policy, 2)
        assert {done.finish_reason for done in await asyncio.gather(*calls)} == {"stop"}
        assert min(done.result().seconds for done in calls) > 3 * QUICK.probe_every, "long enough to be asked meanwhile"
        assert calls_of(a) + calls_of(b) == 2 and policy.pool.fleet.counts["ejections hang"] == 0


@pytest.mark.ci
async def test_a_dead_worker_takes_its_share_of_the_load_with_it(
    queue: Queue, workers: Workers, tokens: Tokenizer
) -> None:
    async def calls_at_a(count: int) -> bool:
        return (await Backends(queue).view()).loads.get("a", Load()).calls == count

    async with servers(tokens, {}, latency_per_token=60.0) as (server,):
        await register(queue, "a", server, tokenizer=tokens.name_or_path)
        workers.start("init")
        run = workers.start("run")
        async with RolloutClient(config=workers.config) as trainer:
            await trainer.enqueue([Task(handler=CHAT)], samples=3)
            await until(lambda: calls_at_a(3), 30)
            workers.kill(run, again=False)
            await until(lambda: calls_at_a(0), SHARE_SECONDS + 3)
            await until(lambda: not server.engine.calls)
