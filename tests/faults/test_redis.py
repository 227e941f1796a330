"""Redis killed, frozen, away and full, under running rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.faults.tools import Workers, eventually, freeze, starts, thaw, trainer
from tests.services import RedisService


class Killable:
    """The test's own server, which may be killed and started again on the same data and the same socket."""

    def __init__(self, service: RedisService) -> None:
        self.service = service
        self.pid = service.pid
        self.process: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def start(self) -> None:
        state = self.service.server.state
        conf = Path(state.folder) / "redis.conf"
        self.process = subprocess.Popen(
            [state.binary, str(conf)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=state.folder
        )
        self.pid = self.process.pid

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def server(redis_server: RedisService) -> Iterator[Killable]:
    killable = Killable(redis_server)
    yield killable
    with contextlib.suppress(ProcessLookupError):
        thaw(killable.pid)
    killable.stop()


def records(path: Path) -> list[int]:
    return list(starts(path).values())


@pytest.mark.parametrize("kills", [3, pytest.param(7, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_killed_with_aof_nothing_is_lost_or_doubled(own_workers: Workers, server: Killable, kills: int) -> None:
    async with trainer(own_workers.config) as us:
        own_workers.line(16)
        ids = await us.put(100 * kills, sleep=0.1)
        for number in range(1, kills + 1):
            await us.collect(60 * number, 60.0)
            server.kill()
            await asyncio.sleep(0.3)
            server.start()
        await us.collect(len(ids), 60.0)
        us.check_scored(ids)
        assert len(own_workers.living()) == 3, "no worker ends because Redis was away"
        own_workers.stop()
        await us.check_empty()


@pytest.mark.ci
async def test_frozen_for_a_moment_nothing_runs_twice(own_workers: Workers, server: Killable, tmp_path: Path) -> None:
    """1.5 s are most of a lease of 2 s, and longer than a client waits for a reply."""
    log = tmp_path / "starts"
    async with trainer(own_workers.config) as us:
        own_workers.line(32)
        ids = await us.put(120, handler="fault_handlers:Recorded", sleep=0.5, starts=str(log))
        for number in range(3):
            await us.collect(20 * number + 1, 30.0)
            freeze(server.pid)
            await asyncio.sleep(1.5)
            thaw(server.pid)
        await us.collect(len(ids), 60.0)
        us.check_scored(ids)
        assert set(records(log)) == {1}
        own_workers.stop()
        await us.check_empty()


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_away_for_three_leases_nothing_runs_twice(
    own_workers: Workers, server: Killable, tmp_path: Path, how: str
) -> None:
    """200 rollouts are in work: some end while Redis is away, some after it."""
    log = tmp_path / "starts"
    async with trainer(own_workers.config) as us:
        own_workers.line(200)
        ids: list[str] = []
        for number in range(10):
            ids += await us.put(20, handler="fault_handlers:Recorded", sleep=3.0 + 0.8 * number, starts=str(log))
        await eventually(lambda: len(starts(log)) == 200, 20.0, "that all run")
        await us.collect(1, 10.0)
        server.kill() if how == "killed" else freeze(server.pid)
        await asyncio.sleep(3 * own_workers.config.lease.seconds)
        server.start() if how == "killed" else thaw(server.pid)
        await us.collect(200, 60.0)
        us.check_scored(ids)
        assert set(records(log)) == {1}, "none was executed twice"
        assert {rollout.losses for rollout in us.got.values()} == {0}
        own_workers.stop()
        await us.check_empty()


@pytest.mark.ci
async def test_full_with_50_finished_rollouts_in_hand(own_workers: Workers, server: Killable, tmp_path: Path) -> None:
    """They wait for longer than a lease, and longer than their limit; all are delivered when there is room again."""
    log = tmp_path / "starts"
    async with trainer(own_workers.config) as us:
        own_workers.line(64, limits__run=2.0)
        ids = await us.put(52, handler="fault_handlers:Recorded", sleep=1.5, starts=str(log))
        await eventually(lambda: len(starts(log)) == 52, 20.0, "that all run")
        with own_workers_client(own_workers) as client:
            client.config_set("maxmemory", 1)
            until = time.monotonic() + 10.0
            while time.monotonic() < until:
                assert client.zcard("{rollout}:lease:run") == 52
                await asyncio.sleep(0.5)
            client.config_set("maxmemory", 0)
        await us.collect(len(ids), 30.0)
        us.check_scored(ids)
        assert set(records(log)) == {1}
        own_workers.stop()
        await us.check_empty()


def own_workers_client(workers: Workers) -> redis.Redis:
    from pipeline.connection import connect_sync

    return connect_sync(workers.config)
