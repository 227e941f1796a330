"""The Redis job of a line, requeued onto another node in mid-run: nothing is lost, nothing runs twice."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from pipeline import address_file
from pipeline.config import Config
from tests.faults.tools import HERE as FAULTS, starts, trainer
from tests.services import require
from tests.slurm.cluster import ROOT, Cluster

KINDS = {"init": 1, "run": 2, "eval": 1}
SETTINGS = {
    "redis.socket_timeout": 1.0, "redis.connect_timeout": 1.0, "limits.grace": 3.0, "handlers.path": str(FAULTS),
    "slurm.signal": 60, "retry.backoff": 0.05,
}  # fmt: skip


async def until(true: object, seconds: float, what: str) -> None:
    """As the cluster's own, with the event loop going on."""
    end = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        await asyncio.sleep(0.2)


@pytest.mark.timeout(300)
async def test_requeued_onto_another_node_in_mid_run(cluster: Cluster, tmp_path: Path) -> None:
    """12 s and more without a server; 96 rollouts are in work; the trainer and all workers stay as they are."""
    require("redis-server")
    folder = tmp_path / "line"
    file, log = folder / address_file.NAME, tmp_path / "starts"
    config = Config().changed({**SETTINGS, "slurm.folder": str(folder)})
    settings = {f"ROLLOUT_{name.upper().replace('.', '__')}": str(value) for name, value in SETTINGS.items()}
    program = tmp_path / "rollout"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m workers.cli "$@"\n')
    program.chmod(0o755)
    about = {
        **settings, "LINE_FOLDER": str(folder), "LINE_PROGRAM": str(program), "PYTHONPATH": str(ROOT),
        "LINE_HOME": str(tmp_path),
    }  # fmt: skip
    options = ("--mem=100M", "--cpus-per-task=1", "--time=30")
    jobs = {
        kind: cluster.submit(ROOT / "sbatch" / f"{kind}.sbatch", f"--array=1-{count}", *options, **about)
        for kind, count in KINDS.items()
    }
    redis = cluster.submit(ROOT / "sbatch" / "redis.sbatch", *options, ROLLOUT_NETWORK__INTERFACE="127.0.0.1", **about)
    await until(file.exists, 60.0, "the address")
    before = address_file.read(file)
    (first,) = cluster.until_running(redis)
    assert before.job == redis
    async with trainer(config) as us:
        ids: list[str] = []
        for number in range(8):
            ids += await us.put(12, handler="fault_handlers:Recorded", sleep=6.0 + 2.0 * number, starts=str(log))
        await until(lambda: len(starts(log)) == 96, 60.0, "that all run")
        running = {row.id for job in jobs.values() for row in cluster.rows(job) if row.state == "RUNNING"}
        cluster.call("scontrol", "requeuehold", redis)
        began = time.monotonic()
        await until(lambda: cluster.rows(redis)[0].state == "PENDING", 20.0, "the end of Redis")
        cluster.call("scontrol", "update", f"JobId={redis}", f"ExcNodeList={first.node}")
        await asyncio.sleep(max(0.0, began + 12.0 - time.monotonic()))  # as long as it takes without short settings
        cluster.call("scontrol", "release", redis)
        await until(lambda: address_file.last_epoch(file) > before.epoch, 90.0, "the next address")
        assert time.monotonic() - began > 12.0
        after = address_file.read(file)
        await us.collect(96, 60.0)
        us.check_scored(ids)
        assert set(starts(log).values()) == {1}, "none was executed twice"
        assert {rollout.losses for rollout in us.got.values()} == {0}
        (second,) = cluster.until_running(redis)
        assert second.node != first.node and second.restarts == 1
        assert after.password != before.password
        assert {row.id for job in jobs.values() for row in cluster.rows(job) if row.state == "RUNNING"} == running
        for job in jobs.values():
            cluster.cancel(job, "--signal=TERM", "--batch")
        for job in jobs.values():
            await until(lambda job=job: all(row.over for row in cluster.rows(job)), 40.0, "the workers' end")
        await us.check_empty()
    cluster.cancel(redis, "--signal=TERM", "--batch")
    cluster.until(lambda: cluster.rows(redis)[0].over, 30.0, "the end of Redis")
    assert '"released"' in next((folder / "redis").glob("lock.*")).read_text()
    assert not [name for name in os.listdir(folder / "redis") if name.endswith(".part")]
