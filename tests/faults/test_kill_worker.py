"""SIGKILL of workers: of each kind at every gap between two steps of its work, and of any at random moments."""

from __future__ import annotations

import random
import signal
import time

import pytest

from tests.faults.tools import STAGES, Workers, trainer
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


@pytest.mark.parametrize(
    ("rollouts", "kills"),
    [
        pytest.param(600, 40, marks=pytest.mark.timeout(180)),
        pytest.param(4000, 150, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
async def test_killed_at_random_nothing_is_lost_or_doubled(workers: Workers, rollouts: int, kills: int) -> None:
    """Two workers of each kind. Enqueueing goes on while workers die, so that the kills hit a working line."""
    async with trainer(workers.config) as us:
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
        assert sum(process.returncode == -signal.SIGKILL for process in workers.all) == kills
        await us.check_empty()
