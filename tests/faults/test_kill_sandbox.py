"""RUN workers and sandbox hosts that are killed while a policy acts: no turn is asked twice, no command runs twice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from pipeline.results import Rollout
from tests.faults.sandbox_handlers import TURNS, counting
from tests.faults.tools import SHORT, Workers
from tests.services import RedisService
from workers.policy import scripted, tokenizer

KILLED_AT = 30


@pytest.fixture
async def policy(tmp_path: Path) -> AsyncIterator[scripted.Running]:
    """Plays TURNS bash calls, one a turn, at 30 ms each."""
    made = tokenizer.make(tmp_path)
    answers: dict[str, Any] = {counting("one"): _turns("one"), counting("two"): _turns("two")}
    options = scripted.Options(tokenizer=made, answers=answers, p_correct=1.0, drift=0.0, latency=0.03)
    server = await scripted.start(options)
    yield server
    await server.stop()


def _turns(word: str) -> list[dict[str, Any]]:
    command = f"echo {word} >> count; wc -l < count"
    call = {"type": "function", "function": {"name": "bash", "arguments": {"command": command}}}
    return [{"role": "assistant", "content": "", "tool_calls": [call]} for _ in range(TURNS)] + [
        {"role": "assistant", "content": str(TURNS)}
    ]


@pytest.fixture
def config(redis_service: RedisService, policy: scripted.Running, tmp_path: Path, root: Path) -> Config:
    return redis_service.config.changed(
        {
            **SHORT, "policy.url": policy.url, "policy.tokenizer": str(tmp_path), "sandbox.root": str(root),
            "sandbox.max_live": 4, "handlers.load": ["sandbox_handlers:Counting"],
        }
    )  # fmt: skip


async def popped(client: RolloutClient, word: str) -> Rollout:
    await client.enqueue([Task(handler="sandbox_handlers:Counting", data={"word": word}, sampling={"seed": 7})])
    (rollout,) = batch = await client.pop(1, timeout=60)
    await client.ack(batch)
    return rollout


def lines(root: Path) -> int:
    """Commands that have run in the one sandbox there is."""
    return sum(len(path.read_text().splitlines()) for path in root.glob("*/*/*/home/count"))


async def until_lines(root: Path, count: int) -> None:
    async with asyncio.timeout(40):
        while lines(root) < count:
            await asyncio.sleep(0.01)


async def test_a_killed_run_worker_is_gone_on_with(
    config: Config, policy: scripted.Running, tmp_path: Path, root: Path
) -> None:
    workers = Workers(config, tmp_path)
    try:
        workers.start("init")
        workers.start("eval")
        run = workers.start("run")
        async with RolloutClient(config=config) as client:
            undisturbed = await popped(client, "one")
            before = policy.engine.counts["finished stop"]
            assert before == TURNS + 1
            pop = asyncio.create_task(popped(client, "one"))
            await asyncio.sleep(0)
            await until_lines(root, KILLED_AT)
            workers.kill(run)
            disturbed = await pop
        asked = policy.engine.counts["finished stop"] - before
        assert disturbed.outcome == undisturbed.outcome == "scored", workers.logs()[-3000:]
        assert disturbed.reward == undisturbed.reward == float(TURNS)  # EVAL counts the lines that are there
        assert asked <= TURNS + 2, f"{asked} calls of the policy: more than the turn that was lost"
        assert same(disturbed, undisturbed)
    finally:
        workers.stop()
    assert not list(root.glob("*/*/*/home"))


def same(one: Rollout, two: Rollout) -> bool:
    first, second = (rollout.trajectory.sequences for rollout in (one, two))
    return len(first) == len(second) and all(
        a.token_ids.tolist() == b.token_ids.tolist()
        and a.loss_mask.tolist() == b.loss_mask.tolist()
        and a.logprobs.tolist() == b.logprobs.tolist()
        and a.versions == b.versions
        for a, b in zip(first, second, strict=True)
    )


OTHER_NODE = ["unshare", "--uts", "--map-root-user", "sh", "-c", 'hostname node-2; exec "$@"', "sh"]
"""A process with a host name of its own takes this machine for another one: it uses TCP, and not the host's socket."""


@pytest.mark.ci
async def test_on_other_nodes_the_result_is_the_same(
    config: Config, policy: scripted.Running, tmp_path: Path, root: Path
) -> None:
    workers = Workers(config, tmp_path)
    try:
        async with RolloutClient(config=config) as client:
            here = [workers.start("init", sandbox__listen="127.0.0.2"), workers.start("run"), workers.start("eval")]
            near = await popped(client, "one")
            for process in here[1:]:
                process.terminate()
                process.wait(20)
            workers.start("run", prefix=OTHER_NODE)
            workers.start("eval", prefix=OTHER_NODE)
            far = await popped(client, "one")
        assert near.outcome == far.outcome == "scored" and near.reward == far.reward == float(TURNS), workers.logs()[
            -3000:
        ]
        assert same(near, far)
        assert "node-2" in workers.logs()
    finally:
        workers.stop()


async def test_a_stalled_run_worker_that_comes_back_is_fenced(config: Config, tmp_path: Path, root: Path) -> None:
    workers = Workers(config, tmp_path)
    try:
        workers.start("init")
        workers.start("eval")
        stalled = workers.start("run")
        async with RolloutClient(config=config) as client:
            pop = asyncio.create_task(popped(client, "two"))
            await until_lines(root, 5)
            stalled.send_signal(signal.SIGSTOP)
            workers.start("run")
            await until_lines(root, 10)
            stalled.send_signal(signal.SIGCONT)
            rollout = await pop
        assert rollout.outcome == "scored" and rollout.reward == float(TURNS), workers.logs()[-3000:]
    finally:
        workers.stop()


async def test_a_killed_host_sends_its_rollouts_back_to_init(config: Config, tmp_path: Path, root: Path) -> None:
    workers = Workers(config, tmp_path)
    try:
        host = workers.start("init")
        workers.start("run")
        workers.start("eval")
        async with RolloutClient(config=config) as client:
            pop = asyncio.create_task(popped(client, "two"))
            await until_lines(root, 5)
            workers.kill(host)
            rollout = await pop
        assert rollout.outcome == "scored" and rollout.reward == float(TURNS), workers.logs()[-3000:]
        assert rollout.losses == 1
        async with asyncio.timeout(20):
            while len(list(root.glob("*/*/owner"))) > 1:
                await asyncio.sleep(0.1)
    finally:
        workers.stop()
