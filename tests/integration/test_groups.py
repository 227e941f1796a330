"""Group policies on a real line: what is cut is cut at once, its sandbox is freed, and the trainer is told how much."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.audit import audit
from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from pipeline.errors import TaskError
from pipeline.groups import GroupPolicy, has_scored, has_spread
from pipeline.results import Group, Rollout
from tests import boxes, line, policies
from tests.integration.crew import configured, serving
from tests.services import RedisService, require
from tests.waiting import sleepers
from workers.policy.scripted import Running
from workers.policy.tokenizer import Tokenizer

QUICK_POLICY = {name.replace("__", "."): value for name, value in policies.QUICK_CONFIG.items()}


@pytest.fixture
def config(redis_service: RedisService) -> Config:
    return configured(redis_service)


def uneven(**data: object) -> Task:
    """Its samples 0 and 1 end at once, the others in ten minutes."""
    return Task(handler="group_handlers:Uneven", data={"fast": 2, **data})


async def test_a_group_closes_with_the_wanted_number_and_cuts_the_rest(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        ids = await client.enqueue([uneven()], samples=2, groups=GroupPolicy(extra=2))
        assert len(ids) == 4
        (group,) = await client.pop_groups(1, timeout=20)
        assert (group.wanted, group.closed, group.partial, group.late) == (2, "usable", False, False)
        assert sorted(rollout.sample for rollout in group.scored) == [0, 1]
        assert sorted(rollout.sample for rollout in group.cut) == [2, 3]
        for rollout in group.cut:
            assert rollout.failure is not None and "its group had its 2 scored members" in rollout.failure.why
            assert rollout.sampled == 7 and rollout.worked > 0
        await client.ack(group)
        assert await audit(client.queue) == []
        assert await line.leftovers(client.queue) == []


@pytest.mark.parametrize("driver", ["local", "bubblewrap"])
async def test_what_is_cut_is_cut_at_once(config: Config, tokens: Tokenizer, tmp_path: Path, driver: str) -> None:
    """One member waits for a reply, another for a command: the call is aborted, the command and the sandboxes go."""
    for program in boxes.PROGRAMS[driver]:
        require(program)
    with tempfile.TemporaryDirectory(prefix="rs-") as root:
        config = config.changed({**QUICK_POLICY, "sandbox.driver": driver, "sandbox.root": root, "sandbox.max_live": 4})
        slow: dict[str, Any] = {"latency_per_token": 0.02, "says": "so far so good " * 500}
        async with policies.servers(tokens, slow) as (server,), RolloutClient(config=config) as client:
            await client.register_backend(server.url, tokenizer=str(tokens.name_or_path))
            async with serving(config) as crew:
                sleep, go = f"{600 + random.random():.6f}", tmp_path / "go"
                task = Task(handler="group_handlers:Busy", data={"go": str(go), "sleep": sleep})
                await client.enqueue([task], samples=1, groups=GroupPolicy(extra=2))
                await policies.until(lambda: sleepers(sleep) and len(server.engine.calls) == 1 and calls(server) == 3)
                go.touch()
                await policies.until(lambda: line.count(client.queue, "scored"))
                began = time.monotonic()
                (group,) = await client.pop_groups(1, timeout=20)
                assert time.monotonic() - began < 5.0
                assert (len(group.scored), len(group.cut)) == (1, 2)
                assert all(rollout.sampled == 4 for rollout in group.cut)
                await policies.until(lambda: not server.engine.calls and not sleepers(sleep))
                host = crew["init"].hosting.host
                assert host is not None
                async with asyncio.timeout(10):
                    await host.stock.wait_until_empty()
                await client.ack(group)
                assert await audit(client.queue) == []


def calls(server: Running) -> int:
    """Calls of `Busy` that have ended."""
    return int(server.engine.counts["prompt"]) // 40


async def test_the_rest_may_go_on_and_come_later_marked_stale(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        policy = GroupPolicy(extra=1, rest="later")
        await client.enqueue([uneven(slow=1.0)], samples=2, groups=policy)
        (group,) = await client.pop_groups(1, timeout=20)
        assert sorted(rollout.sample for rollout in group.rollouts) == [0, 1]
        await client.ack(group)
        (rest,) = await client.pop_groups(1, timeout=20)
        (late,) = rest.rollouts
        assert (rest.id, rest.late, late.late, late.stale, late.outcome) == (group.id, True, True, True, "scored")
        await client.ack(rest)


async def test_the_rest_is_late_too_after_the_server_came_back_empty(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        await client.enqueue([uneven(slow=0.5)], samples=2, groups=GroupPolicy(extra=1, rest="later"))
        (group,) = await client.pop_groups(1, timeout=20)
        await client.ack(group)
        await client.queue.execute("FLUSHALL")
        assert await client.restore() == 1
        (rest,) = await client.pop_groups(1, timeout=20)
        assert (rest.id, rest.late, rest.closed, len(rest.scored)) == (group.id, True, "usable", 1)
        await client.ack(rest)


async def test_a_deadline_gives_a_partial_group(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        await client.enqueue([uneven()], samples=4, groups=GroupPolicy(deadline=1.0))
        (group,) = await client.pop_groups(1, timeout=20)
        assert (group.wanted, group.closed, group.partial, len(group.scored), len(group.cut)) == (
            4,
            "deadline",
            True,
            2,
            2,
        )


async def test_the_settings_say_how_groups_close_and_leave_the_eval_lane_alone(config: Config) -> None:
    config = config.changed({"groups.extra": 1})
    async with RolloutClient(config=config) as client, serving(config):
        assert len(await client.enqueue([uneven()], samples=2)) == 3
        assert len(await client.enqueue([uneven(slow=0.1)], samples=3, lane="eval")) == 3
        (train,), (eval,) = await client.pop_groups(1, 20), await client.pop_groups(1, 20, "eval")
        assert (len(train.scored), len(train.cut)) == (2, 1)
        assert (len(eval.scored), len(eval.cut), eval.closed) == (3, 0, "")
        with pytest.raises(TaskError, match="lane 'eval' is always whole"):
            await client.enqueue([uneven()], samples=2, lane="eval", groups=GroupPolicy(extra=1))
        with pytest.raises(TaskError, match="closes with 9 usable members has 2 samples and 1 extra"):
            await client.enqueue([uneven()], samples=2, groups=GroupPolicy(extra=1, usable=9))


async def test_a_run_is_paused_and_resumed(config: Config) -> None:
    async with RolloutClient(config=config) as client, serving(config):
        await client.pause_run("maintenance")
        await client.enqueue([uneven()], samples=1)
        assert "maintenance" in (await client.status())["stages"]["init"]["paused"]["train"]
        await client.resume_run()
        (group,) = await client.pop_groups(1, timeout=20)
        assert len(group.scored) == 1


def member(reward: float | None) -> Rollout:
    outcome = "scored" if reward is not None else "failed"
    return Rollout(id="g.0", group="g", sample=0, samples=1, lane="train", outcome=outcome, reward=reward)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rewards", "scored", "spread"),
    [
        ([1, 0], True, True),
        ([1, 1], True, False),
        ([1], True, False),
        ([None, None], False, False),
        ([0, None], True, False),
    ],
)
def test_filters(rewards: list[float | None], scored: bool, spread: bool) -> None:
    group = Group("g", tuple(member(reward) for reward in rewards))
    assert (has_scored(group), has_spread(group)) == (scored, spread)
