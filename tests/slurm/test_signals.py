"""Workers as jobs on the real Slurm, which signals every process of a job here: what is cut off is a loss, no more."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline import inspect
from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from pipeline.results import Rollout
from tests.faults.tools import SHORT
from tests.services import RedisService, redis_client, redis_server, redis_service, require, session_redis
from tests.slurm.cluster import ROOT, Cluster, Row

__all__ = ["redis_client", "redis_server", "redis_service", "session_redis"]

WAITS = ("InRun", "InInit", "InFresh", "InChild", "InWorker")
"""Where rollouts wait (tests/faults/signal_handlers.py): in sandboxes of the INIT host, and below the EVAL worker."""


class Jobs:
    """The stages of one line as jobs of partition `low`, on Slurm's nodes or on one of them."""

    def __init__(self, cluster: Cluster, config: Config, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "config.yaml").write_text(json.dumps(config.model_dump()), "utf-8")

    def submit(self, stage: str, *options: str, partition: str = "low") -> str:
        """One task; returns its id."""
        job = self.cluster.submit(
            ROOT / "sbatch" / f"{stage}.sbatch", "--array=1", f"--partition={partition}", "--cpus-per-task=1",
            "--mem=100M", f"--output={self.folder}/{stage}-%A.out", *options, cwd=self.folder,
            LINE_CONFIG=str(self.folder / "config.yaml"), LINE_HOME=str(self.folder),
            LINE_PROGRAM=str(Path(sys.executable).with_name("rollout")),
        )  # fmt: skip
        return f"{job}_1"

    def row(self, task: str) -> Row:
        (row,) = self.cluster.rows(task)
        return row

    def said(self, task: str) -> str:
        stage_files = self.folder.glob(f"*-{task.partition('_')[0]}.out")
        return "".join(path.read_text("utf-8", "replace") for path in stage_files)

    def logs(self) -> str:
        return "".join(f"{path.name}:\n{path.read_text('utf-8', 'replace')}" for path in self.folder.glob("*.out"))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, which holds sandboxes with their sockets."""
    with tempfile.TemporaryDirectory(prefix="sg-") as name:
        yield Path(name)


@pytest.fixture
def config(redis_service: RedisService, folder: Path) -> Config:
    require("bwrap")
    return redis_service.config.changed(
        {
            **SHORT, "limits.grace": 20.0, "sandbox.root": str(folder / "b"), "sandbox.max_live": 8,
            "sandbox.driver": "bubblewrap", "sandbox.sweep": 2.0, "line.name": f"sig-{random.randrange(10**6)}",
        }
    )  # fmt: skip


@pytest.fixture
def jobs(cluster: Cluster, config: Config, folder: Path) -> Jobs:
    return Jobs(cluster, config, folder)


async def until(true: Callable[[], object], seconds: float, what: str, jobs: Jobs) -> None:
    """Wait for something, with this event loop turning."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not await asyncio.to_thread(true):
        assert loop.time() < end, f"waited {seconds:g} s for {what}\n{jobs.cluster.rows()}\n{jobs.logs()[-8000:]}"
        await asyncio.sleep(0.1)


def sleepers(seconds: str) -> int:
    """Living processes `sleep SECONDS`, also where the command of another one says so in passing."""
    found = 0
    for process in psutil.process_iter(["cmdline", "status"]):
        with suppress(psutil.Error):
            found += process.info["cmdline"] == ["sleep", seconds] and process.info["status"] != psutil.STATUS_ZOMBIE
    return found


def deed(what: str, cluster: Cluster, tasks: list[str]) -> None:
    """What happens to the jobs of INIT and EVAL, which share node n1."""
    if what == "cancel":
        cluster.call("scancel", *tasks)
    elif what == "cancel-full":
        cluster.call("scancel", "--full", "--signal=TERM", *tasks)
    elif what == "requeue":
        for task in tasks:
            cluster.requeue(task)
    elif what == "preempt":
        cluster.preempt("n1", seconds=2)
    elif what == "kill-node":
        cluster.kill_node("n1")
    elif what == "down-node":
        cluster.down_node("n1")


DEEDS = ("cancel", "preempt", "kill-node")
MORE = ("cancel-full", "requeue", "down-node", "time-limit")


@pytest.mark.parametrize("what", [*DEEDS, *(pytest.param(what, marks=pytest.mark.slow) for what in MORE)])
async def test_what_is_cut_off_is_a_loss(jobs: Jobs, config: Config, folder: Path, what: str) -> None:
    """H09: where Slurm sends SIGTERM to all of a job, and where it is SIGKILL, the rollouts go on in other jobs."""
    seconds, seen = f"{random.randint(10**4, 10**6)}", dict[str, Path]()
    limit = ["--time=1", "--signal=B:TERM@1"] if what == "time-limit" else []
    first = [jobs.submit(stage, "-w", "n1", *limit) for stage in ("init", "eval")]
    jobs.submit("run", "-w", "n2")
    async with RolloutClient(config=config) as client:
        for wait in WAITS:
            task = Task(handler=f"signal_handlers:{wait}", data={"seen": str(folder / wait), "seconds": seconds})
            (id,) = await client.enqueue([task])
            seen[id] = folder / wait
        await until(lambda: sleepers(seconds) == len(WAITS), 60, "all waits", jobs)
        for stage in ("init", "eval"):
            jobs.submit(stage, "-w", "n3")
        await until(lambda: jobs.logs().count(" serves ") == 5, 60, "the others", jobs)
        await asyncio.to_thread(deed, what, jobs.cluster, first)
        batch = await client.pop(len(WAITS), timeout=120)
        await client.ack(batch)
    for rollout in batch:
        check(rollout, seen[rollout.id], jobs, killed=what == "kill-node")
    await until(lambda: not sleepers(seconds), 20, "the end of what had run", jobs)
    if what in ("preempt", "requeue"):  # Slurm brings them back by itself
        await until(lambda: jobs.logs().count(" serves ") == 7, 60, "the first jobs, back", jobs)
        assert [jobs.row(task).restarts for task in first] == [1, 1]


def check(rollout: Rollout, seen: Path, jobs: Jobs, killed: bool) -> None:
    """It was done again, as if the first time had not been; a RUN attempt elsewhere was told nothing of the first.

    A worker that is killed with one rollout alone counts as an attempt of that one: it may have been its doing.
    """
    told = f"{rollout.attempts}\n{seen.read_text()}\n{jobs.logs()[-8000:]}"
    assert rollout.outcome == "scored" and rollout.reward == 1.0, told
    bad = [item for item in rollout.attempts if item["outcome"] != "committed"]
    assert len(bad) == 1 and (rollout.losses == 1 or (killed and bad[0]["outcome"] == "lost")), told
    said = seen.read_text().splitlines()
    assert said.count("begun") == 2 and said[-1] == "ended 0", told
    assert seen.name != "InRun" or len(said) == 3, told


async def test_a_drained_job_says_so_gives_back_in_time_and_ends_well(jobs: Jobs, config: Config, folder: Path) -> None:
    """Only the worker is told (--batch, as for Slurm's early signal). Its grace ends before Slurm's KillWait would."""
    first, others = jobs.submit("run", "-w", "n1"), [jobs.submit(stage, "-w", "n2") for stage in ("init", "eval")]
    async with RolloutClient(config=config) as client:
        about = {"stage": "run", "seen": str(folder / "run")}
        await client.enqueue([Task(handler="signal_handlers:Pausing", data=about)])
        await until((folder / "run").exists, 60, "its run", jobs)
        others.append(jobs.submit("run", "-w", "n3"))
        await until(lambda: jobs.logs().count(" serves ") == 4, 60, "the others", jobs)
        await until(lambda: "KillWait" in jobs.said(first), 20, "what Slurm told it", jobs)
        began = time.monotonic()
        jobs.cluster.cancel(first, "--signal=TERM", "--batch")
        workers: list[dict[str, Any]] = []
        while not any(item.get("stopping") for item in workers) and time.monotonic() < began + 2.0:
            workers = await inspect.workers(client.queue, None)
        (draining,) = [item["why_stopping"] for item in workers if item.get("stopping")]
        assert draining == f"SIGTERM, Slurm job {first}"
        (rollout,) = batch = await client.pop(1, timeout=60)
        await client.ack(batch)
    assert (rollout.reward, rollout.losses) == (1.0, 1)
    await until(lambda: jobs.row(first).state == "COMPLETED", 20, "its job's good end", jobs)
    assert time.monotonic() - began < config.limits.grace
    assert f"Slurm job {first}" in jobs.said(first)


async def test_nothing_is_left_where_a_worker_is_killed(jobs: Jobs, config: Config, folder: Path) -> None:
    """H17: SIGKILL to the worker alone; its job ends while children run. What is left goes with Slurm, or a sweep."""
    seconds, seen = f"{random.randint(10**4, 10**6)}", folder / "seen"
    first = [jobs.submit(stage, "-w", "n1") for stage in ("init", "run", "eval")]
    async with RolloutClient(config=config) as client:
        for wait in ("InRun", "InChild"):
            task = Task(handler=f"signal_handlers:{wait}", data={"seen": f"{seen}-{wait}", "seconds": seconds})
            await client.enqueue([task])
        await until(lambda: sleepers(seconds) == 2, 60, "both waits", jobs)
        for stage in ("init", "eval"):
            jobs.submit(stage, "-w", "n3")
        await until(lambda: jobs.logs().count(" serves ") == 5, 60, "the others", jobs)
        dead = [int(jobs.said(task).partition("worker ")[2].split("-")[3]) for task in (first[0], first[2])]
        for pid in dead:
            os.kill(pid, signal.SIGKILL)
        batch = await client.pop(2, timeout=60)
        await client.ack(batch)
    assert [rollout.reward for rollout in batch] == [1.0, 1.0]
    await until(lambda: not sleepers(seconds), 20, "the end of what had run", jobs)
    await until(lambda: not jobs.cluster.processes("n1") or jobs.row(first[0]).over, 20, "the end on its node", jobs)
    await until(lambda: len(list(folder.glob("b/*/*/owner"))) == 1, 20, "a sweep of the dead host's folder", jobs)
