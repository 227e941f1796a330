"""SIGKILL of workers: of each kind at every gap between two steps of its work, and of any at random moments."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.faults.tools import STAGES, Trainer, Workers, eventually, freeze, starts, thaw, trainer
from tests.faults.worker_main import GAPS


@pytest.mark.parametrize("gap", GAPS)
async def test_killed_at_a_gap_nothing_is_lost_or_doubled(workers: Workers, gap: str) -> None:
    """One worker of each kind dies at this gap, and another takes its place."""
    handler = "fault_handlers:Flaky" if gap == "fail-sent" else "echo"
    async with trainer(workers.config) as us:
        ids = await us.put(24, handler=handler)
        for stage in STAGES:
            workers.start(stage, 4, gap)
        await us.collect(24, 60.0, workers.revive)
        us.check_scored(ids)
        workers.stop()
        died = sum(process.returncode == -signal.SIGKILL for process in workers.all)
        assert died == (1 if gap == "written" else 3), "each kind died once; only RUN writes payload by itself"
        await us.check_empty()


async def test_a_worker_that_stalls_and_comes_back_is_fenced(workers: Workers, tmp_path: Path) -> None:
    """SIGSTOP for two leases: its rollouts are done elsewhere, and what it then wants to commit is refused."""
    log = tmp_path / "starts"
    async with trainer(workers.config) as us:
        ids = await us.put(8, handler="fault_handlers:Recorded", starts=str(log), sleep=1.0)
        workers.start("init", 8)
        workers.start("eval", 8)
        stalled = workers.start("run", 8)
        await eventually(lambda: len(starts(log)) == 8, 20.0, "that all run")
        freeze(stalled.pid)
        workers.start("run", 8)
        await us.collect(8, 30.0)
        thaw(stalled.pid)
        await eventually(lambda: workers.logs().count("its lease is no longer ours") == 8, 10.0, "its refusal")
        us.check_scored(ids)
        assert set(starts(log).values()) == {2}
        assert {rollout.losses for rollout in us.got.values()} == {1}, "it ran eight at once: no attempt of any of them"
        assert stalled.poll() is None
        workers.stop()
        await us.check_empty()


class Reaper:
    """Kills a worker at random moments, of a timer of its own; each is replaced at once."""

    def __init__(self, workers: Workers, kills: int, seconds: float) -> None:
        self.workers = workers
        self.left = kills
        self.pause = seconds
        self.random = random.Random(7)
        self.next = time.monotonic() + 1.0

    def __call__(self) -> None:
        now = time.monotonic()
        if self.left and now >= self.next:
            self.left -= 1
            self.next = now + self.random.uniform(0.5, 1.5) * self.pause
            self.workers.kill(self.random.choice(self.workers.living()))


async def killed_at_random(us: Trainer, workers: Workers, rollouts: int, kills: int) -> None:
    """Two workers of each kind. Enqueueing goes on while workers die, so that the kills hit a working line."""
    ids: list[str] = []
    for stage in STAGES:
        for _ in range(2):
            workers.start(stage, 8)
    reaper = Reaper(workers, kills, 0.5)
    while reaper.left:
        if len(ids) - len(us.got) < 64 and len(ids) < rollouts:
            ids += await us.put(min(16, rollouts - len(ids)), sleep=0.1)
        await us.turn(16, 0.1)
        reaper()
    while len(ids) < rollouts:
        ids += await us.put(min(200, rollouts - len(ids)))
    await us.collect(rollouts, 120.0, workers.revive)
    us.check_scored(ids)
    workers.stop()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("rollouts", "kills"),
    [
        pytest.param(600, 40, marks=pytest.mark.timeout(180)),
        pytest.param(4000, 150, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
async def test_killed_at_random_nothing_is_lost_or_doubled(workers: Workers, rollouts: int, kills: int) -> None:
    async with trainer(workers.config) as us:
        await killed_at_random(us, workers, rollouts, kills)
        assert sum(process.returncode == -signal.SIGKILL for process in workers.all) == kills
        await us.check_empty()
