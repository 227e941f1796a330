"""Redis ends, hangs or dies, and goes on elsewhere, under running rollouts: nothing is lost, nothing runs twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import address_file
from tests.faults.tools import SHORT, Workers, eventually, starts, trainer
from tests.published import Keepers, freeze, keepers, thaw
from tests.services import require

AWAY = [pytest.param(3.0), pytest.param(13.0, marks=pytest.mark.ci)]
"""Seconds without any server: longer than a lease; as long as a job that Slurm requeues is away."""


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Keepers]:
    require("redis-server")
    with keepers(tmp_path) as found:
        yield found


@pytest.fixture
def workers(kept: Keepers, tmp_path: Path) -> Iterator[Workers]:
    processes = Workers(kept.config.changed(SHORT).changed(kept.settings), tmp_path)
    yield processes
    processes.stop()


def server_of(kept: Keepers, address: address_file.Address) -> int:
    from pipeline.connection import connect_sync

    with connect_sync(kept.config) as client:
        return int(client.info("server")["process_id"])


@pytest.mark.parametrize("away", AWAY)
async def test_ended_and_begun_elsewhere(workers: Workers, kept: Keepers, tmp_path: Path, away: float) -> None:
    """200 rollouts are in work: some end while Redis is away, some after it. It comes back at another address, with
    another password; workers and trainer are not told, and not started again."""
    log = tmp_path / "starts"
    keeper = kept.started()
    before = address_file.read(kept.file)
    async with trainer(workers.config) as us:
        workers.line(200)
        ids: list[str] = []
        for number in range(10):
            ids += await us.put(20, handler="fault_handlers:Recorded", sleep=2.0 + away / 10 * number, starts=str(log))
        await eventually(lambda: len(starts(log)) == 200, 60.0, "that all run")
        await us.collect(1, 10.0)
        keeper.terminate()
        assert await asyncio.to_thread(keeper.wait, 20) == 0
        await asyncio.sleep(away)
        await asyncio.to_thread(kept.started)
        after = address_file.read(kept.file)
        assert (after.epoch, after.url != before.url, after.password != before.password) == (2, True, True)
        await us.collect(200, 60.0)
        us.check_scored(ids)
        assert set(starts(log).values()) == {1}, "none was executed twice"
        assert {rollout.losses for rollout in us.got.values()} == {0}
        assert len(workers.living()) == 3
        workers.stop()
        await us.check_empty()


@pytest.mark.ci
@pytest.mark.parametrize("how", ["suspended", "killed"])
async def test_its_job_hangs_or_dies_and_another_follows(
    workers: Workers, kept: Keepers, tmp_path: Path, how: str
) -> None:
    """The second keeper waits already. What is suspended wakes up later, and nobody speaks to it any more."""
    log = tmp_path / "starts"
    first = kept.started()
    kept.start()
    async with trainer(workers.config) as us:
        workers.line(120)
        ids: list[str] = []
        for number in range(10):
            ids += await us.put(12, handler="fault_handlers:Recorded", sleep=1.0 + 0.8 * number, starts=str(log))
        await eventually(lambda: len(starts(log)) == 120, 60.0, "that all run")
        await us.collect(1, 10.0)
        frozen = freeze(first) if how == "suspended" else []
        if how == "killed":
            first.kill()
            await asyncio.to_thread(first.wait)
        await asyncio.to_thread(kept.published, 1)
        await us.turn(40, 60.0)  # a pop of its own: a short one ends with RedisUnavailable
        thaw(frozen)
        await us.collect(120, 60.0)
        us.check_scored(ids)
        assert set(starts(log).values()) == {1}
        assert len(workers.living()) == 3
        workers.stop()
        await us.check_empty()


@pytest.mark.ci
async def test_the_server_dies_again_and_again(workers: Workers, kept: Keepers) -> None:
    """Its keeper starts it anew, each time at another address."""
    kept.started()
    async with trainer(workers.config) as us:
        workers.line(16)
        ids = await us.put(300, sleep=0.1)
        for number in range(1, 4):
            await us.collect(60 * number, 60.0)
            pid = await asyncio.to_thread(server_of, kept, address_file.read(kept.file))
            os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(kept.published, number)
        await us.collect(300, 60.0)
        us.check_scored(ids)
        assert len(workers.living()) == 3
        workers.stop()
        await us.check_empty()


async def test_workers_and_trainer_come_before_redis(workers: Workers, kept: Keepers) -> None:
    """Jobs start in any order."""
    workers.line(8)
    await eventually(lambda: workers.logs().count("waiting for Redis: no Redis has published") == 3, 20.0, "the wait")
    opening = asyncio.create_task(_play(workers))
    await asyncio.to_thread(kept.started)
    await opening


async def _play(workers: Workers) -> None:
    async with trainer(workers.config) as us:
        ids = await us.put(40)
        await us.collect(40, 30.0)
        us.check_scored(ids)
        workers.stop()
        await us.check_empty()
