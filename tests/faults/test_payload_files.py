"""SIGKILL of workers that keep payloads in files: nothing is lost or doubled, and after the sweep no file is left."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pipeline import payload_sweep
from pipeline.config import Config
from pipeline.payload_sweep import sweep
from pipeline.queue import Queue
from tests.faults.test_kill_worker import killed_at_random
from tests.faults.tools import STAGES, Trainer, Workers, eventually, freeze, starts, thaw, trainer
from tests.faults.worker_main import LAID


@pytest.fixture
def workers(workers: Workers, tmp_path: Path) -> Workers:
    """Everything above 50 bytes lies in files: each task, and each payload that does not say nothing."""
    (tmp_path / "shared").mkdir()
    workers.config = workers.config.changed({"payload.dir": str(tmp_path / "shared"), "payload.inline_max": 50})
    return workers


def files(config: Config) -> list[Path]:
    return [path for path in Path(config.payload.dir).rglob("*") if path.is_file()]


async def check_no_file(us: Trainer, config: Config, monkeypatch: pytest.MonkeyPatch) -> int:
    """What the sweep removed: all that was left, once the keys of attempts that never committed have expired."""
    queue: Queue = us.queue
    for key in await queue.execute("KEYS", f"{queue.prefix}:p:*"):
        assert await queue.execute("TTL", key) > 0
        await queue.execute("DEL", key)
    monkeypatch.setattr(payload_sweep, "OLD", -config.limits.outage)
    await queue.remove_due(kept=0.0)
    removed = await sweep(queue)
    assert files(config) == []
    return removed


@pytest.mark.parametrize(
    "gap", [LAID, *(pytest.param(gap, marks=pytest.mark.ci) for gap in ("written", "commit-sent", "committed"))]
)
async def test_killed_at_a_gap_no_file_is_lost_or_left(
    workers: Workers, gap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trainer(workers.config) as us:
        ids = await us.put(24)
        assert len(files(workers.config)) == 6
        for stage in STAGES:
            workers.start(stage, 4, gap)
        await us.collect(24, 60.0, workers.revive)
        us.check_scored(ids)
        workers.stop()
        assert -signal.SIGKILL in [process.returncode for process in workers.all]
        await us.check_empty()
        removed = await check_no_file(us, workers.config, monkeypatch)
        if gap not in ("commit-sent", "committed"):  # there Redis may have, or has, what the killed worker wrote
            assert removed > 0, "what the killed worker had written"


@pytest.mark.ci
async def test_a_worker_that_stalls_can_not_change_the_winners_file(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP for two leases: another one commits; what the first then writes is a file of its own, and refused."""
    log = tmp_path / "starts"
    async with trainer(workers.config) as us:
        ids = await us.put(4, handler="fault_handlers:Recorded", starts=str(log), sleep=0.5)
        workers.start("init", 4)
        stalled = workers.start("run", 4)
        await eventually(lambda: len(starts(log)) == 4, 20.0, "that all run")
        freeze(stalled.pid)
        workers.start("run", 4)
        await eventually(lambda: set(starts(log).values()) == {2}, 20.0, "that all run a second time")
        thaw(stalled.pid)
        await eventually(lambda: workers.logs().count("its lease is no longer ours") == 4, 10.0, "its refusal")
        workers.start("eval", 4)
        await us.collect(4, 30.0)
        us.check_scored(ids)
        workers.stop()
        await us.check_empty()
        await check_no_file(us, workers.config, monkeypatch)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("rollouts", "kills"),
    [
        pytest.param(300, 20, marks=pytest.mark.timeout(180)),
        pytest.param(4000, 150, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
async def test_killed_at_random_nothing_is_lost_doubled_or_left(
    workers: Workers, rollouts: int, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers of each kind; enqueueing goes on while they die."""
    async with trainer(workers.config) as us:
        await killed_at_random(us, workers, rollouts, kills)
        await us.check_empty()
        await check_no_file(us, workers.config, monkeypatch)
