"""Slurm's early signal goes to the batch script's own process alone: the script must have become the worker by then."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil

from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from tests.faults.test_job_signals import popped, runs
from tests.faults.tools import ROOT, SHORT, Workers, eventually
from tests.services import RedisService

STAGES = ("init", "run", "eval")
GRACE = 4.0


def batch_script(stage: str, config: Config, folder: Path) -> subprocess.Popen[bytes]:
    """bash runs this stage's script, as Slurm does; what it says is in `STAGE.log`."""
    settings = folder / "config.yaml"
    settings.write_text(json.dumps(config.model_dump()), "utf-8")
    program = Path(sys.executable).with_name("rollout")
    variables = {"LINE_CONFIG": str(settings), "LINE_PROGRAM": str(program), "LINE_HOME": str(folder)}
    with open(folder / f"{stage}.log", "wb") as log:
        return subprocess.Popen(
            ["bash", ROOT / "sbatch" / f"{stage}.sbatch"], cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={"PATH": os.environ["PATH"], "HOME": str(folder), **variables},
        )  # fmt: skip


async def test_a_signal_to_the_script_drains_its_worker(
    redis_service: RedisService, tmp_path: Path, root: Path
) -> None:
    """Field report H12, in all three stages at once: told in 2 s, out in the grace, and others finish its rollouts."""
    config = redis_service.config.changed(
        {**SHORT, "limits.grace": GRACE, "sandbox.root": str(root), "sandbox.driver": "local",
         "handlers.load": ["signal_handlers:Pausing"], "line.name": f"h12-{random.randrange(10**6)}"}
    )  # fmt: skip
    second, jobs = Workers(config, tmp_path), {stage: batch_script(stage, config, tmp_path) for stage in STAGES}
    logs = {stage: tmp_path / f"{stage}.log" for stage in STAGES}
    try:
        async with RolloutClient(config=config) as client:
            for stage in STAGES:
                await client.enqueue([pausing(stage, tmp_path)])
            await eventually(lambda: all((tmp_path / stage).exists() for stage in STAGES), 60, "one pause a stage")
            family = [child.pid for job in jobs.values() for child in psutil.Process(job.pid).children(recursive=True)]
            second.line()
            await eventually(lambda: second.logs().count(" serves ") == 6, 30, "the second workers")
            told = time.monotonic()
            for job in jobs.values():
                job.terminate()  # the script's own pid, and nothing else
            await eventually(
                lambda: all("asked to stop (SIGTERM)" in log.read_text() for log in logs.values()), 2.0, "a log line"
            )
            later = await client.enqueue([pausing("none", tmp_path)], samples=4)
            found = {rollout.id: rollout for rollout in await popped(client, 7)}
            await eventually(lambda: all(job.poll() is not None for job in jobs.values()), 15, "the jobs' end")
            assert time.monotonic() - told < GRACE + 6.0
        assert [job.returncode for job in jobs.values()] == [0, 0, 0]
        assert {rollout.reward for rollout in found.values()} == {1.0}
        assert [found[id].losses for id in found if id not in later] == [1, 1, 1]
        hosts = {item["worker"].rsplit("-", 2)[1] for id in later for item in found[id].attempts}
        assert not hosts & {str(job.pid) for job in jobs.values()}, "a worker took a rollout after its signal"
        assert not any(map(runs, family))
    finally:
        second.stop()
        for job in jobs.values():
            if job.poll() is None:
                job.kill()
                job.wait()


def pausing(stage: str, folder: Path) -> Task:
    return Task(handler="signal_handlers:Pausing", data={"stage": stage, "seen": str(folder / stage)})
