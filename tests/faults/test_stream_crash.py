"""A trainer with a stream is killed between its steps, its acks and its checkpoints, and goes on from the checkpoint.

Within one line of weights each task is trained on once, whatever the order; what the crash costs depends on it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from tests import line
from tests.faults.stream_trainer import BATCH, SAMPLES, TASKS
from tests.faults.tools import ROOT, SHORT, starts
from tests.integration.crew import configured, serving
from tests.services import RedisService


@pytest.fixture
def config(redis_service: RedisService) -> Config:
    short = {name.replace(".", "__"): value for name, value in SHORT.items()} | {"lease__done_seconds": 1.5}
    return configured(redis_service, **short)


async def life(config: Config, folder: Path, order: str, point: str = "") -> dict[str, Any]:
    """One life of the trainer; what it says at its end, empty where it was killed."""
    about = {
        "redis.url": config.redis.url, "redis.password_file": config.redis.password_file,
        "lease.done_seconds": config.lease.done_seconds, "lease.tick": config.lease.tick,
    }  # fmt: skip
    trainer = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.faults.stream_trainer", json.dumps(about), str(folder), order, point,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        said, _ = await asyncio.wait_for(trainer.communicate(), 60)
    finally:
        if trainer.returncode is None:
            trainer.kill()
            await trainer.wait()
    assert trainer.returncode == (-9 if point else 0)
    return dict(json.loads(said)) if said else {}


async def check(config: Config, weights: list[str]) -> None:
    assert sorted(weights, key=int) == [str(number) for number in range(TASKS)], "each task was trained on once"
    async with RolloutClient(config=config) as client:
        assert await line.leftovers(client.queue) == []


@pytest.mark.parametrize(
    ("point", "anew"),
    [
        # after the checkpoint of step 2: what step 3 had is popped again
        pytest.param("trained:3", 0, marks=pytest.mark.ci),
        ("acked:3", BATCH),  # the ack of step 3 is for weights that are lost
        pytest.param("saved:4", 0, marks=pytest.mark.ci),
        pytest.param("acked:1", BATCH, marks=pytest.mark.ci),  # there is no checkpoint: its name tells what it fed
    ],
)
async def test_acked_after_the_step(config: Config, tmp_path: Path, point: str, anew: int) -> None:
    """It costs the rollouts that were acked after the checkpoint: they run anew, under a new id."""
    async with serving(config):
        assert await life(config, tmp_path, "step", point) == {}
        said = await life(config, tmp_path, "step")
    await check(config, said["weights"])
    assert said["again"] == anew
    ran = starts(tmp_path / "starts")
    assert set(ran.values()) == {1}, "what was in the line did not run a second time"
    assert len(ran) == (TASKS + anew) * SAMPLES
    assert sum("~1." in id for id in ran) == anew * SAMPLES


@pytest.mark.parametrize(
    "point",
    [
        # two steps since the checkpoint: their groups are still leased
        pytest.param("trained:4", marks=pytest.mark.ci),
        "saved:4",  # the checkpoint has them in its weights, and they come once more
        pytest.param("saved:2", marks=pytest.mark.ci),
        pytest.param("trained:3", marks=pytest.mark.ci),
    ],
)
async def test_acked_after_the_checkpoint(config: Config, tmp_path: Path, point: str) -> None:
    """It costs no rollout: what the lost weights were trained on is popped again, what the saved ones were is not."""
    async with serving(config):
        assert await life(config, tmp_path, "checkpoint", point) == {}
        said = await life(config, tmp_path, "checkpoint")
    await check(config, said["weights"])
    assert said["again"] == 0
    ran = starts(tmp_path / "starts")
    assert (len(ran), set(ran.values())) == (TASKS * SAMPLES, {1})


async def test_killed_in_the_middle_of_an_ack_the_group_runs_anew_as_a_whole(config: Config, tmp_path: Path) -> None:
    tasks = [Task(handler="echo", data={"text": "a"})]
    async with serving(config):
        async with RolloutClient(config=config) as client:
            stream = client.stream(tasks, samples=3, batch=1, ahead=0, epochs=1, name="s")
            state = stream.state_dict()
            (group,) = await anext(stream)
            await client.ack(group.rollouts[0])
        async with RolloutClient(config=config) as client:
            stream = client.stream(tasks, samples=3, batch=1, ahead=0, epochs=1)
            stream.load_state_dict(state)
            (group,) = await anext(stream)
            assert (group.id, len(group.rollouts), stream.stats.again) == ("s-0-0~1", 3, 1)
            await client.ack(group)
            assert await line.leftovers(client.queue) == []
