"""The worker's side of the policy servers: who gets a call, what a pause, a drain and a missed update do to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from pipeline.backends import Backend, Backends
from pipeline.client import RolloutClient
from pipeline.envelope import Task
from pipeline.errors import ContextFull, PolicyError
from pipeline.queue import Queue
from pipeline.weights import Weights
from tests.integration.crew import all_of, configured, serving
from tests.policies import PROMPT, QUICK, QUICK_CONFIG, calls_of, client, known, register, servers, until
from tests.services import RedisService
from workers.children import Children
from workers.clock import WorkingClock
from workers.policy.backend import Call
from workers.policy.client import VllmPolicy
from workers.policy.reply import Repeat
from workers.policy.scripted import Running
from workers.policy.tokenizer import Tokenizer

SLOW = {"latency_per_token": 60.0}


@pytest.fixture
async def queue(redis_service: RedisService) -> AsyncIterator[Queue]:
    async with redis_service.client() as connection:
        yield Queue(connection, redis_service.config)


async def play(policy: VllmPolicy, name: str, turns: int = 4, **sampling: Any) -> list[str]:
    """One rollout's calls, one after the other; which server took each."""
    view, took = policy.bound(name=name), []
    for _ in range(turns):
        await view.generate(PROMPT, sampling)
        took.append(view._sticky)
    return took


async def running(policy: VllmPolicy, count: int = 1, **about: Any) -> list[asyncio.Task[Any]]:
    """So many calls in flight, at whatever server."""
    calls = [asyncio.create_task(policy.bound(**about).generate(PROMPT, {})) for _ in range(count)]
    await until(lambda: sum(len(item.calls) for item in policy.pool.fleet.servers.values()) == count)
    return calls


async def listed(queue: Queue) -> tuple[Backend, ...]:
    """What the registry has."""
    return (await Backends(queue).view()).backends


async def drop(*calls: asyncio.Task[Any]) -> None:
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def both_at_4(queue: Queue, policy: VllmPolicy, a: Running, b: Running, folder: Path) -> None:
    """Two servers, `a` and `b`, that were given weights 4."""
    await register(queue, "a", a)
    await register(queue, "b", b)
    policy.pool.start()
    await Weights(Backends(queue), "trainer").update(4, path=folder)
    await until(lambda: len(policy.pool.fleet.usable()) == 2)


@pytest.fixture
def weights_at(tmp_path: Path) -> Path:
    """A folder with weights in it, as far as a scripted server looks."""
    (tmp_path / "model.safetensors").touch()
    return tmp_path


# -- who gets a call ---------------------------------------------------------------------------------------------------


async def test_a_slow_server_gets_its_share_and_no_more(tokens: Tokenizer) -> None:
    fast, slow = {"latency_per_token": 0.001, "slots": 4}, {"latency_per_token": 0.008, "slots": 4}
    async with servers(tokens, fast, fast, slow) as three, client(tokens, *three) as policy:
        await policy.ready()
        await until(lambda: known(policy, "up", "up", "up"))
        await asyncio.gather(*(play(policy, f"r{n}", turns=6) for n in range(40)))
        counts = [calls_of(server) for server in three]
    assert sum(counts) == 240 and counts[2] < 240 / 6, counts
    assert abs(counts[0] - counts[1]) < 60, counts


async def test_a_rollout_stays_with_its_server_and_its_prefix(tokens: Tokenizer) -> None:
    async with servers(tokens, {}, {}, {}, latency_per_token=0.001) as three, client(tokens, *three) as policy:
        await policy.ready()
        await until(lambda: known(policy, "up", "up", "up"))
        took = await asyncio.gather(*(play(policy, f"r{n}") for n in range(12)))
        assert sum(len(set(row)) == 1 for row in took) >= 10 and len({row[0] for row in took}) == 3


async def test_a_server_without_the_token_path_is_asked_on_the_other_one(tokens: Tokenizer) -> None:
    async with servers(tokens, {"scale_out": False}) as (server,), client(tokens, server) as policy:
        server.engine.relabel("step-7")
        done = await policy.generate(PROMPT, {"max_tokens": 5})
        assert len(done.ids) == len(done.logprobs) == 5 and done.versions == [(7, 0, 5)]
        assert done.finish_reason == "length" and all(value < 0 for value in done.logprobs)
        await policy.bound(name="r1").generate(PROMPT, {"max_tokens": 5})
        assert server.engine.counts["finished length"] == 2 + 1, "and the probe's token"


async def test_a_call_on_the_other_path_is_aborted_by_its_own_id(tokens: Tokenizer) -> None:
    async with servers(tokens, {"scale_out": False}, **SLOW) as (server,), client(tokens, server) as policy:
        calls = await running(policy, name="r1")
        await until(lambda: server.engine.calls)
        assert list(server.engine.calls) == ["cmpl-r1-1-0"]
        await drop(*calls)
        await until(lambda: not server.engine.calls)


async def test_a_server_that_is_full_is_left_alone_for_a_while(tokens: Tokenizer) -> None:
    async with servers(tokens, {}, {}) as (full, free), client(tokens, full, free) as policy:
        await policy.ready()
        await until(lambda: known(policy, "up", "up"))
        full.faults.set("429")
        await asyncio.gather(*(play(policy, f"r{n}") for n in range(10)))
        assert calls_of(free) == 40 and policy.pool.fleet.counts["repeats overload"] < 30


async def test_a_server_that_serves_another_model_says_so(tokens: Tokenizer) -> None:
    async with servers(tokens, {"model": "other"}) as (server,):
        quick = VllmPolicy(server.url, "policy", tokens, policy_wait=0.5)
        with pytest.raises(PolicyError, match=r"for 0.5 s .*The model `policy` does not exist"):
            await quick.generate(PROMPT, {})
        await quick.close()


async def test_windows_are_the_servers_own(tokens: Tokenizer) -> None:
    small, large = {"max_model_len": 60}, {"max_model_len": 200}
    async with servers(tokens, small, large) as (narrow, wide), client(tokens, narrow, wide) as policy:
        await policy.ready()
        await until(lambda: known(policy, "up", "up"))
        assert policy.context == 200
        await policy.generate(list(range(10, 110)), {"max_tokens": 500})
        assert wide.engine.counts["prompt"] > 100 and narrow.engine.counts["prompt"] <= 10
        with pytest.raises(ContextFull, match="has 300 tokens, the window 200"):
            await policy.generate([10] * 300, {})


async def test_an_error_is_repeated_but_the_third_one_is_the_calls_own(tokens: Tokenizer) -> None:
    async with servers(tokens, {}, {}) as pair, client(tokens, *pair) as policy:
        await policy.ready()
        await until(lambda: known(policy, "up", "up"))
        for each in pair:
            each.faults.set("500*1")
        await play(policy, "r1", turns=2)
        call, pool = Call(prompt=50, most=5), policy.pool
        with pytest.raises(PolicyError, match=r"there were 3 errors with this call.* the last was .*HTTP 500: x"):
            for _ in range(4):
                server = await pool.admit(call)
                pool.done(server, call, None)
                pool.failed(server, call, Repeat("error", "HTTP 500: x"))
        assert not pool.about()["calls"]


# -- the registry ------------------------------------------------------------------------------------------------------


async def test_servers_are_added_drained_and_struck_off(queue: Queue, tokens: Tokenizer) -> None:
    backends = Backends(queue)
    async with servers(tokens, {}, {}, latency_per_token=0.08) as (a, b), client(tokens, queue=queue) as policy:
        await register(queue, "a", a)
        calls = await running(policy, 3)
        await register(queue, "b", b)
        await backends.note("a", drained=True)
        await until(lambda: known(policy, "up", "up") and policy.pool.fleet.servers["a"].barred)
        assert {row[0] for row in await asyncio.gather(*(play(policy, f"r{n}", 1) for n in range(3)))} == {"b"}
        assert all(done.finish_reason == "stop" for done in await asyncio.gather(*calls)), "what runs ends there"
        await backends.remove("b")
        await until(lambda: "b" not in policy.pool.fleet.servers)
        assert "a: drained" in policy.pool.about()["why"]


async def test_the_urls_of_the_configuration_are_registered_and_kept(queue: Queue, tokens: Tokenizer) -> None:
    async with servers(tokens, {}) as (server,), client(tokens, server, queue=queue) as policy:
        await policy.generate(PROMPT, {})
        await until(lambda: all(item.registered for item in policy.pool.fleet.servers.values()))
        (about,) = await listed(queue)
        assert (about.url, about.owner, about.endpoint, about.window) == (server.url, "config", "generate", 32_768)
        await Backends(queue).remove(about.id)
        await until(lambda: listed(queue))


async def test_each_worker_sees_what_the_others_have_in_flight(queue: Queue, tokens: Tokenizer) -> None:
    async with servers(tokens, {}, {}, **SLOW) as (a, b):
        await register(queue, "a", a)
        async with client(tokens, queue=queue, worker="one") as one:
            calls = await running(one, 5)
            await register(queue, "b", b)
            async with client(tokens, queue=queue, worker="two") as two:
                two.pool.start()
                await until(lambda: known(two, "up", "up") and two.pool.fleet.servers["a"].others.calls == 5)
                more = await running(two, 4)
                assert [len(two.pool.fleet.servers[id].calls) for id in "ab"] == [0, 4]
                await drop(*more)
            assert list((await Backends(queue).view()).workers) == ["one"], "who leaves takes its share away"
            await drop(*calls)


async def test_a_call_without_a_server_says_what_to_do(queue: Queue, tokens: Tokenizer) -> None:
    async with client(tokens, queue=queue, patience=replace(QUICK, wait=0.3)) as policy:
        with pytest.raises(PolicyError, match="none is registered: `rollout serve` starts one"):
            await policy.generate(PROMPT, {})


# -- pauses and weights ------------------------------------------------------------------------------------------------


async def test_in_a_pause_calls_wait_and_every_clock_stands_still(queue: Queue, tokens: Tokenizer) -> None:
    weights, clock = Weights(Backends(queue), "trainer"), WorkingClock(100.0)
    async with servers(tokens, {}, latency_per_token=0.01) as (server,), client(tokens, queue=queue) as policy:
        await register(queue, "a", server)
        calls = await running(policy, 2, clock=clock)
        await weights.pause(moving=False)
        await until(lambda: policy.pool.fleet.policy.paused)
        before = clock.elapsed
        calls += [asyncio.create_task(policy.bound(clock).generate(PROMPT, {})) for _ in range(2)]
        await until(lambda: policy.pool.waiting == 2)
        assert clock.why.startswith("the policy is paused") and server.engine.paused
        await until(lambda: policy.pool.fleet.stood > 0.5)
        assert clock.elapsed == before
        await weights.resume()
        assert all(done.finish_reason == "stop" for done in await asyncio.gather(*calls))
        assert not clock.why and clock.elapsed > before
        assert policy.pool.fleet.counts["ejections hang"] == 0, "what is paused does not hang"


async def test_a_pause_is_no_part_of_the_time_that_a_call_may_take(queue: Queue, tokens: Tokenizer) -> None:
    weights = Weights(Backends(queue), "trainer")
    patience = replace(QUICK, request=2.0, wait=0.2)
    async with servers(tokens, {}, latency_per_token=0.01) as (server,):
        async with client(tokens, queue=queue, patience=patience) as policy:
            await register(queue, "a", server)
            calls = await running(policy)
            await weights.pause(moving=False)
            await until(lambda: policy.pool.fleet.policy.paused)
            calls.append(asyncio.create_task(policy.bound().generate(PROMPT, {})))
            await until(lambda: policy.pool.fleet.stood > 2.1)
            await weights.resume()
            assert all(done.finish_reason == "stop" for done in await asyncio.gather(*calls))


async def test_a_server_that_is_behind_gets_no_call_until_it_is_brought_up(
    queue: Queue, tokens: Tokenizer, weights_at: Path
) -> None:
    weights = Weights(Backends(queue), "trainer")
    async with servers(tokens, {}, {}) as (a, b), client(tokens, queue=queue) as policy:
        await register(queue, "a", a)
        await weights.update(4, path=weights_at)
        assert (await policy.generate(PROMPT, {})).versions[0][0] == 4
        await register(queue, "b", b, version=3)
        await until(lambda: "b" in policy.pool.fleet.servers)
        versions = [(await policy.generate(PROMPT, {})).versions[0][0] for _ in range(5)]
        await until(lambda: len(policy.pool.fleet.usable()) == 2)
        assert b.engine.loaded == [str(weights_at)] and (b.engine.label, set(versions)) == ("4", {4})
        await asyncio.gather(*(play(policy, f"r{n}", 1) for n in range(20)))
        assert calls_of(b) > 3


async def test_a_server_that_comes_back_with_other_weights_is_found_out(
    queue: Queue, tokens: Tokenizer, weights_at: Path
) -> None:
    async with servers(tokens, {}, {}) as (a, b), client(tokens, queue=queue) as policy:
        await both_at_4(queue, policy, a, b, weights_at)
        b.engine.die()
        await asyncio.gather(*(play(policy, f"r{n}", 1) for n in range(10)))
        b.engine.relabel("default")  # as a process that was started anew
        b.engine.die(False)
        done = []
        while len(b.engine.loaded) < 2:
            done.append(await policy.bound().generate(PROMPT, {}))
        await until(lambda: len(policy.pool.fleet.usable()) == 2)
        assert {span[0] for one in done for span in one.versions} == {4} and b.engine.label == "4"


async def test_tokens_of_old_weights_are_refused_and_sampled_elsewhere(
    queue: Queue, tokens: Tokenizer, weights_at: Path
) -> None:
    async with servers(tokens, {}, {}) as (a, b), client(tokens, queue=queue) as policy:
        await both_at_4(queue, policy, a, b, weights_at)
        b.engine.relabel("3")  # it says so in its replies, and the registry does not know
        done = await asyncio.gather(*(policy.bound().generate(PROMPT, {}) for _ in range(20)))
        assert {span[0] for one in done for span in one.versions} == {4}
        assert policy.pool.fleet.counts["repeats behind"] > 0
        await until(lambda: b.engine.label == "4" and len(policy.pool.fleet.usable()) == 2)


@pytest.mark.parametrize("options", [{"scale_out": False}, {"dev_mode": False}])
async def test_h06_what_does_not_label_its_tokens_gets_the_version_at_dispatch(
    queue: Queue, tokens: Tokenizer, options: dict[str, Any]
) -> None:
    """H06: version 4 at dispatch, 5 while the server works: the turn is labelled 4, the next one 5."""
    weights = Weights(Backends(queue), "trainer")
    external = {"move": _nothing, "mode": "keep"}
    async with servers(tokens, options, latency_per_token=0.02) as (server,), client(tokens, queue=queue) as policy:
        await register(queue, "a", server)
        policy.pool.start()
        await until(lambda: known(policy, "up"))
        await weights.update(4, **external)
        await until(policy.pool.fleet.usable)
        (call,) = await running(policy)
        if options.get("dev_mode") is False:  # it can't be paused: the update waits until its calls are over
            await asyncio.gather(weights.update(5, **external), call)
        else:
            await weights.update(5, **external)
        assert {span[0] for span in (await call).versions} == {4}
        assert {span[0] for span in (await policy.generate(PROMPT, {})).versions} == {5}


async def _nothing(servers: object) -> None:
    """The trainer's own way to move weights; here they are where they should be."""


# -- in the line -------------------------------------------------------------------------------------------------------


async def test_a_worker_without_policy_url_takes_servers_and_tokenizer_from_the_registry(
    redis_service: RedisService, queue: Queue, tokens: Tokenizer
) -> None:
    config = configured(redis_service, **QUICK_CONFIG)
    async with servers(tokens, {}) as (server,), serving(config) as crew, RolloutClient(config=config) as trainer:
        (echo,) = await all_of(trainer, [Task(handler="echo", data={"text": "x"})])
        assert echo.outcome == "scored", "who needs no policy is not held up"
        ids = await trainer.enqueue([Task(handler="policy_handlers:Chat", data={"turns": 3})])
        await until(lambda: any(item.clock.why for item in crew["run"].running.values()))
        assert crew["run"].about()["policy"]["why"].startswith("none is registered")
        await register(queue, "a", server, tokenizer=tokens.name_or_path)
        batch = await trainer.pop(len(ids), timeout=20)
        await trainer.ack(batch)
        assert [rollout.outcome for rollout in batch] == ["scored"]
        about = crew["run"].about()["policy"]
        shop, metrics = crew["run"].shop, generate_latest(crew["run"].metrics.registry).decode()
        assert isinstance(shop.children, Children)
        alone = shop.children._alone().policy
    assert alone.tokenizer == tokens.name_or_path, "a child that runs one alone is told"
    assert 'rollout_policy_calls_total{stage="run"} 3.0' in metrics
    assert 'rollout_policy_usable{stage="run"} 1.0' in metrics
    assert about["usable"] == 1 and about["why"] == "" and about["calls"] == 0
    trajectory = batch[0].trajectory
    assert trajectory is not None and trajectory.turns == 3


async def test_h08_a_policy_that_refuses_connections_at_turn_2_is_no_reward(
    redis_service: RedisService, queue: Queue, tokens: Tokenizer
) -> None:
    """H08: true rewards 1, 0, 1, and a fourth whose server is gone at its second turn."""
    config = configured(redis_service, **QUICK_CONFIG, limits__policy_wait=1.0, retry__attempts=1)
    async with servers(tokens, {}) as (server,):
        await register(queue, "a", server, tokenizer=tokens.name_or_path)
        async with serving(config), RolloutClient(config=config) as trainer:
            task = Task(handler="policy_handlers:Leaving", data={"turns": 2, "stop": f"{server.url}/scripted/state"})
            ids = await trainer.enqueue([task], samples=4)
            (group,) = await trainer.pop_groups(1, timeout=30)
            await trainer.ack([group])
    rollouts = sorted(group.rollouts, key=lambda rollout: ids.index(rollout.id))
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0, 1.0, None]
    assert rollouts[3].outcome == "failed" and rollouts[3].failure.kind == "policy"
    assert "no usable policy server for 1 s" in str(rollouts[3].failure)


async def test_h05_a_turn_that_leaves_no_room_is_truncated_and_not_retried(
    redis_service: RedisService, queue: Queue, tokens: Tokenizer
) -> None:
    """H05: a window of 64; the prompt of 40 asks for 24 of the 32 that are allowed; later 70 ids come in."""
    config = configured(redis_service, **QUICK_CONFIG, policy__context=64, policy__max_tokens=64)
    async with servers(tokens, {}, max_model_len=64) as (server,):
        await register(queue, "a", server, tokenizer=tokens.name_or_path)
        async with serving(config), RolloutClient(config=config) as trainer:
            data = {"turns": 3, "prompt": 40, "max_tokens": 32, "observation": 70}
            (rollout,) = await all_of(trainer, [Task(handler="policy_handlers:Chat", data=data)])
    assert rollout.outcome == "scored" and rollout.truncated == "context" and rollout.trajectory is not None
    (sequence,) = rollout.trajectory.sequences
    assert len(sequence.token_ids) <= 64 and [record["stage"] for record in rollout.attempts].count("run") == 1
    asked = [turn.sampling["max_tokens"] for turn in sequence.turns if turn.kind == "action"]
    assert asked == [24]
