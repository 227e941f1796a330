"""SIGTERM to every process of a worker's job at once: no observation, attempt or reward comes of it, only a loss."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from pipeline.results import Rollout
from tests.faults.tools import SHORT, Workers, eventually
from tests.services import RedisService
from tests.waiting import sleepers

WAITS = {"init": ("InRun", "InInit"), "eval": ("InFresh", "InChild", "InWorker")}
"""Stage whose worker's job is signalled, and where rollouts wait below it (signal_handlers.py)."""


@pytest.fixture
def config(redis_service: RedisService, root: Path) -> Config:
    return redis_service.config.changed(
        {**SHORT, "limits.grace": 20.0, "sandbox.root": str(root), "sandbox.max_live": 8, "sandbox.driver": "local"}
    )


def below(pid: int) -> list[int]:
    """The process and all below it; the deepest of the first child come first, as proctrack/linuxproc signals them."""
    with suppress(psutil.Error):
        children = sorted(child.pid for child in psutil.Process(pid).children())
        return [*(item for child in children for item in below(child)), pid]
    return [pid]


def shuffled(pid: int) -> list[int]:
    return random.sample(found := below(pid), len(found))


def signal_all(pids: list[int]) -> None:
    """As fast as Slurm does it."""
    subprocess.run(["kill", "-TERM", *map(str, pids)], check=False, stderr=subprocess.DEVNULL)


def runs(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


async def popped(client: RolloutClient, count: int = 1) -> list[Rollout]:
    batch = await client.pop(count, timeout=60)
    await client.ack(batch)
    return list(batch)


def check(rollout: Rollout, seen: Path, logs: str) -> None:
    """It was done again, as if the first time had not been; a RUN attempt elsewhere was told nothing of the first."""
    assert rollout.outcome == "scored" and rollout.reward == 1.0, f"{rollout.attempts}\n{seen.read_text()}\n{logs}"
    bad = [item for item in rollout.attempts if item["outcome"] != "committed"]
    assert rollout.losses == len(bad) == 1, bad
    said = seen.read_text().splitlines()
    assert said.count("begun") == 2 and said[-1] == "ended 0", said
    assert not seen.name.startswith("InRun") or len(said) == 3, said


async def signalled(
    config: Config,
    stage: str,
    waits: tuple[str, ...],
    folder: Path,
    order: Callable[[int], list[int]] = below,
) -> None:
    """Signal the job of `stage`'s worker while a rollout waits in each of these; another worker is there."""
    workers, seconds = Workers(config, folder), f"{random.randint(10**4, 10**6)}"
    hit = {item: workers.start(item) for item in ("init", "run", "eval")}[stage]
    seen: dict[str, Path] = {}
    try:
        async with RolloutClient(config=config) as client:
            for number, wait in enumerate(waits):
                file = folder / f"{wait}-{number}"
                task = Task(handler=f"signal_handlers:{wait}", data={"seen": str(file), "seconds": seconds})
                (id,) = await client.enqueue([task])
                seen[id] = file
            await eventually(lambda: len(sleepers(seconds)) == len(waits), 40, "that all of them wait")
            workers.start(stage)
            pids = order(hit.pid)
            signal_all(pids)
            for rollout in await popped(client, len(waits)):
                check(rollout, seen[rollout.id], workers.logs()[-6000:])
        await eventually(lambda: hit.poll() is not None and not any(map(runs, pids)), 10, "the end of all that it had")
        assert hit.returncode == 0
        assert not sleepers(seconds)
    finally:
        workers.stop()


@pytest.mark.parametrize("stage", WAITS)
async def test_a_signal_to_the_whole_job_is_a_loss(config: Config, stage: str, tmp_path: Path) -> None:
    await signalled(config, stage, WAITS[stage], tmp_path)


@pytest.mark.ci
@pytest.mark.parametrize("driver", ["bubblewrap", "apptainer"])
async def test_in_each_kind_of_sandbox(config: Config, driver: str, tmp_path: Path) -> None:
    config = config.changed({"sandbox.driver": driver})
    for stage, waits in (("init", ("InRun", "InInit")), ("eval", ("InFresh",))):
        folder = tmp_path / stage
        folder.mkdir()
        await signalled(config, stage, waits, folder)


@pytest.mark.ci
@pytest.mark.parametrize("stage", WAITS)
async def test_in_any_order_where_slurm_signals_all(
    config: Config, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known of the order there, so results are held for a moment."""
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        await signalled(config, stage, WAITS[stage] * 2, folder, shuffled)


@pytest.mark.ci
@pytest.mark.parametrize("driver", ["local", "bubblewrap"])
async def test_ctrl_c_does_not_reach_what_runs_in_a_sandbox(config: Config, driver: str, tmp_path: Path) -> None:
    """A terminal sends it to the worker's whole process group; what is in work may end."""
    config, seconds = config.changed({"sandbox.driver": driver}), f"3.{random.randint(1, 10**6)}"
    workers, seen = Workers(config, tmp_path), tmp_path / "seen"
    try:
        host = workers.start("init", prefix=["setsid", "-w"])
        workers.start("run")
        workers.start("eval")
        async with RolloutClient(config=config) as client:
            await client.enqueue([Task(handler="signal_handlers:InRun", data={"seen": str(seen), "seconds": seconds})])
            await eventually(lambda: bool(sleepers(seconds)), 30, "the command")
            os.killpg(host.pid, signal.SIGINT)
            (rollout,) = await popped(client)
        assert (rollout.reward, rollout.losses) == (1.0, 0), workers.logs()[-4000:]
        assert seen.read_text().splitlines() == ["begun", "ended 0"]
    finally:
        workers.stop()


async def test_a_second_signal_gives_back_at_once(config: Config, tmp_path: Path) -> None:
    config = config.changed({"limits.grace": 600.0, "slurm.signal": 700, "slurm.overlap": 900.0})
    workers, seen = Workers(config, tmp_path), tmp_path / "seen"
    try:
        workers.start("init")
        first = workers.start("run")
        workers.start("eval")
        async with RolloutClient(config=config) as client:
            await client.enqueue([Task(handler="signal_handlers:Pausing", data={"stage": "run", "seen": str(seen)})])
            await eventually(seen.exists, 30, "its run")
            workers.start("run")
            told = time.monotonic()
            first.terminate()
            await eventually(lambda: "asked to stop" in workers.logs(), 5, "the first signal")
            await eventually(lambda: time.monotonic() > told + 1.2, 5, "a second signal that is not the first")
            first.terminate()
            (rollout,) = await popped(client)
        assert (rollout.reward, rollout.losses) == (1.0, 1), workers.logs()[-4000:]
        assert first.wait(10) == 0
    finally:
        workers.stop()
