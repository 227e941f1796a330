"""Limits, all enforced from outside the handler: a stage, the whole rollout, deaf coroutines, plain methods."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.audit import audit
from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from tests.integration.crew import all_of, configured, serving
from tests.services import RedisService


@pytest.fixture
def config(redis_service: RedisService) -> Config:
    return configured(redis_service, limits__swallow=0.3)


def task(name: str, log: Path, limits: dict[str, float], **data: Any) -> Task:
    return Task(handler=f"fault_handlers:{name}", data={"starts": str(log), **data}, limits=limits)


async def test_a_stage_s_limit_is_an_attempt_that_failed(config: Config, tmp_path: Path) -> None:
    log = tmp_path / "starts"
    async with RolloutClient(config=config) as client, serving(config):
        (rollout,) = await all_of(client, [task("Recorded", log, {"run": 0.3}, sleep=30.0)])
        assert (rollout.outcome, rollout.reward) == ("failed", None)
        assert rollout.failure is not None
        assert (rollout.failure.kind, rollout.failure.stage) == ("limit", "run")
        assert rollout.failure.why == "run worked for 0.3 s, its limit (limits.run)"
        assert len(log.read_text().splitlines()) == 3
        assert 0.9 <= rollout.worked < 3.0
        assert await audit(client.queue) == []


async def test_the_config_s_limit_holds_where_the_task_has_none(redis_service: RedisService, tmp_path: Path) -> None:
    config = configured(redis_service, limits__run=0.3, retry__attempts=1)
    async with RolloutClient(config=config) as client, serving(config):
        (rollout,) = await all_of(client, [task("Recorded", tmp_path / "starts", {}, sleep=30.0)])
        assert rollout.failure is not None
        assert rollout.failure.kind == "limit"


async def test_the_whole_rollout_s_limit_ends_it_at_once(config: Config, tmp_path: Path) -> None:
    log = tmp_path / "starts"
    async with RolloutClient(config=config) as client, serving(config):
        (rollout,) = await all_of(client, [task("Recorded", log, {"total": 0.4}, sleep=30.0)])
        assert rollout.failure is not None
        assert rollout.failure.kind == "limit"
        assert rollout.failure.why == "its 0.4 s of work over all stages are over (limits.total)"
        assert len(log.read_text().splitlines()) == 1, "no second attempt can help"


@pytest.mark.ci
async def test_work_of_earlier_attempts_counts_to_the_total(config: Config, tmp_path: Path) -> None:
    log = tmp_path / "starts"
    async with RolloutClient(config=config) as client, serving(config):
        (rollout,) = await all_of(client, [task("Recorded", log, {"total": 1.0, "run": 0.7}, sleep=30.0)])
        assert rollout.failure is not None
        assert "limits.total" in rollout.failure.why
        assert len(log.read_text().splitlines()) == 2
        assert rollout.worked == pytest.approx(1.0, abs=0.4)


async def test_a_coroutine_that_swallows_its_cancel_is_fenced_and_counted(config: Config, tmp_path: Path) -> None:
    """Its slot is opened again: one slot is enough for the next attempt and for another rollout."""
    log = tmp_path / "starts"
    async with RolloutClient(config=config) as client, serving(config, slots=1) as crew:
        deaf = task("Swallower", log, {"run": 0.3}, seconds=6.0, tokens=64)
        began = time.monotonic()
        first, second = await all_of(client, [deaf, Task(handler="echo")])
        assert time.monotonic() - began < 5.0
        assert (first.outcome, second.outcome) == ("scored", "scored")
        run = [record["outcome"] for record in first.attempts if record["stage"] == "run"]
        assert run == ["failed", "committed"]
        metrics = crew["run"].metrics.registry
        assert metrics.get_sample_value("rollout_swallowed_total", {"stage": "run"}) == 1
        assert await audit(client.queue) == []
        await asyncio.sleep(
            max(0.0, began + 7.0 - time.monotonic())
        )  # the deaf one ends; its result must change nothing
        assert await audit(client.queue) == []
        assert (await client.status())["counts"]["scored"] == 2


async def test_a_plain_method_is_killed_with_its_whole_process_group(config: Config, tmp_path: Path) -> None:
    log = tmp_path / "starts"
    async with RolloutClient(config=config) as client, serving(config):
        await all_of(client, [task("Hanging", tmp_path / "first", {})])  # the child server's start takes its time
        (rollout,) = await all_of(client, [task("Hanging", log, {"run": 1.0}, seconds=300.0)])
        assert rollout.failure is not None
        assert rollout.failure.kind == "limit"
        pids = [int(pid) for text in Path(f"{log}.pids").read_text().splitlines() for pid in text.split()]
        assert len(pids) == 6, "three attempts, each a child and its child"
        await gone(pids)


async def test_a_cancelled_plain_method_is_killed(config: Config, tmp_path: Path) -> None:
    log = tmp_path / "starts"
    async with RolloutClient(config=config) as client, serving(config):
        (id,) = await client.enqueue([task("Hanging", log, {}, seconds=300.0)])
        pids = Path(f"{log}.pids")
        for _ in range(500):
            if pids.exists() and pids.read_text().endswith("\n"):
                break
            await asyncio.sleep(0.02)
        await client.cancel([id])
        (rollout,) = await client.pop(1, timeout=10)
        assert rollout.outcome == "cancelled"
        await client.ack([rollout])
        await gone([int(pid) for pid in pids.read_text().split()])


def alive(pid: int) -> bool:
    """Neither gone nor a zombie; a process may go between two looks."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def gone(pids: list[int]) -> None:
    for _ in range(200):
        if not any(alive(pid) for pid in pids):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"of {pids} some live on")
