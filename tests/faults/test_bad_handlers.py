"""Handlers that kill their process, keep it busy, or block its event loop; and a worker that dies under its rollout."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from pipeline.client import RolloutClient
from pipeline.envelope import Task
from pipeline.results import Rollout
from tests.faults.tools import STAGES, Workers, eventually, starts, trainer


@pytest.mark.parametrize(("slots", "fewest", "most"), [(1, 3, 3), (16, 3, 5)])
async def test_a_poison_pill_ends_failed_and_harms_nobody(
    workers: Workers, tmp_path: Path, slots: int, fewest: int, most: int
) -> None:
    """H10: it kills whatever process runs it. Dead workers are restarted; 20 healthy rollouts stand beside it."""
    log = tmp_path / "starts"
    async with trainer(workers.config) as us:
        before = await us.put(4, handler="fault_handlers:Recorded", starts=str(log), sleep=0.3)
        (pill,) = await us.put(1, 1, "fault_handlers:Poison", starts=str(log))
        after = await us.put(16, handler="fault_handlers:Recorded", starts=str(log), sleep=0.3)
        workers.start("init", 8)
        workers.start("eval", 8)
        for _ in range(2):
            workers.start("run", slots)
        await us.collect(21, 90.0, workers.revive)

        rollout = us.got.pop(pill)
        assert (rollout.outcome, rollout.reward) == ("failed", None)
        assert rollout.failure is not None
        assert (rollout.failure.kind, rollout.failure.stage) == ("worker", "run")
        if slots == 1:
            assert "was not heard of" in rollout.failure.why
            assert "attempt 3 of 3" in rollout.failure.why
        assert fewest <= starts(log)[pill] <= most
        assert len([record for record in rollout.attempts if record["stage"] == "run"]) == starts(log)[pill]
        us.check_scored(before + after)
        workers.revive()
        assert len(workers.living()) == 4, "whoever died was replaced, and stays alive now"
        us.got[pill] = rollout
        workers.stop()
        await us.check_empty()


async def test_after_two_deaths_in_company_a_pill_runs_alone_in_a_child(workers: Workers, tmp_path: Path) -> None:
    """The worker outlives it from then on. Company is made sure: long neighbours run beside it all the time."""
    log = tmp_path / "starts"
    async with trainer(workers.config) as us:
        (pill,) = await us.put(1, 1, "fault_handlers:Poison", starts=str(log))
        neighbours = await us.put(8, handler="fault_handlers:Recorded", starts=str(log), sleep=1.0)
        workers.start("init", 16)
        workers.start("eval", 16)
        await until_waiting(us.client, "run", 9)
        run = [workers.start("run", 16)]

        def again() -> None:
            if run[-1].poll() is not None:
                run.append(workers.start("run", 16))

        await us.collect(9, 60.0, again)

        rollout = us.got[pill]
        assert rollout.failure is not None
        assert (rollout.failure.kind, rollout.failure.exit_code) == ("worker", "-9")
        assert "ran this rollout alone was killed by SIGKILL" in rollout.failure.why
        assert starts(log)[pill] == 5, "twice in company, three times alone"
        assert [process.poll() for process in run] == [-9, -9, None], "alone in a child it kills no worker"
        assert rollout.losses == 2
        assert "it runs alone in a child process" in workers.logs()
        us.check_scored(neighbours)
        workers.stop()
        await us.check_empty()


async def until_waiting(client: RolloutClient, stage: str, count: int) -> None:
    until = time.monotonic() + 20.0
    while (await client.status())["stages"][stage]["ready"]["train"] < count:
        assert time.monotonic() < until


@pytest.mark.parametrize("stage", STAGES)
async def test_a_killed_worker_s_rollout_starts_again_elsewhere_within_a_lease(workers: Workers, stage: str) -> None:
    """H09: its limit is an hour; a second worker stands idle."""
    config = workers.config.lease
    async with trainer(workers.config) as us:
        victim = workers.start(stage, 1, "working")
        (id,) = await us.put(1, samples=1)
        for other in STAGES:
            if other != stage:
                workers.start(other, 1)
        await eventually(lambda: victim.poll() is not None, 20.0, "its death")
        workers.start(stage, 1)
        died = time.monotonic()
        await us.collect(1, 20.0)
        took = time.monotonic() - died

        us.check_scored([id])
        records = [record for record in us.got[id].attempts if record["stage"] == stage]
        assert [record["outcome"] for record in records] == ["lost", "committed"]
        assert records[1]["attempt"] == 2
        assert took < config.seconds + config.tick + 3.0, "lease + sweep (and the start of a process)"
        await us.check_empty()


@pytest.mark.ci
async def test_a_long_job_that_never_yields_runs_once(workers: Workers, tmp_path: Path) -> None:
    """H11: 7 s of work that holds the event loop, under leases of 2 s; a second worker stands idle."""
    log = tmp_path / "starts"
    async with trainer(workers.config) as us:
        (id,) = await us.put(1, 1, "fault_handlers:Busy", starts=str(log), seconds=7.0)
        workers.line(2)
        workers.start("run", 2)
        await us.collect(1, 30.0)
        us.check_scored([id])
        assert starts(log) == {id: 1}
        assert [record["attempt"] for record in us.got[id].attempts] == [1, 1, 1]
        workers.stop()
        await us.check_empty()


async def test_a_blocked_loop_is_named_then_ended_and_its_rollouts_go_on(workers: Workers, tmp_path: Path) -> None:
    log = tmp_path / "starts"
    async with trainer(workers.config) as us:
        (blocker,) = await us.put(1, 1, "fault_handlers:Blocker", starts=str(log), seconds=60.0)
        neighbours = await us.put(4, handler="fault_handlers:Recorded", starts=str(tmp_path / "others"), sleep=0.5)
        workers.start("init", 8)
        workers.start("eval", 8)
        stuck = workers.start("run", 8, limits__loop_stall=1.0, limits__loop_dead=2.5)
        await eventually(lambda: stuck.poll() is not None, 20.0, "its end")
        assert stuck.returncode == 1, "it ends itself"
        said = workers.logs()
        assert "the event loop has not turned for 1 s" in said
        assert "fault_handlers.py" in said, "the stack that holds it is named"
        assert "time.sleep" in said
        assert "this process ends, its rollouts are given out again" in said
        workers.start("run", 8)
        await us.collect(5, 30.0)
        us.check_scored([blocker, *neighbours])
        assert starts(log) == {blocker: 2}
        workers.stop()
        await us.check_empty()


async def test_told_to_end_a_worker_finishes_or_gives_back(workers: Workers, tmp_path: Path) -> None:
    """SIGTERM: nothing more is taken, what ends within the grace time is kept, the rest goes to the next worker."""
    log = tmp_path / "starts"
    async with trainer(workers.config) as us:
        short = await us.put(2, 2, "fault_handlers:Recorded", starts=str(log), sleep=1.0)
        long = await us.put(2, 2, "fault_handlers:Recorded", starts=str(log), sleep=4.0)
        later = await us.put(8, 8, "fault_handlers:Recorded", starts=str(log))
        workers.start("init", 16)
        workers.start("eval", 16)
        first = workers.start("run", 4, limits__grace=2.0)
        await eventually(lambda: len(starts(log)) == 4, 20.0, "that four run")
        asked = time.monotonic()
        first.send_signal(signal.SIGTERM)
        await eventually(
            lambda: "asked to stop (SIGTERM): nothing more is claimed, 4 rollouts in work" in workers.logs(),
            2.0,
            "word",
        )
        await eventually(lambda: first.poll() is not None, 10.0, "its end")
        assert first.returncode == 0
        assert time.monotonic() - asked < 2.0 + 2.0
        assert len(starts(log)) == 4
        workers.start("run", 16)
        await us.collect(12, 30.0)

        us.check_scored(short + long + later)
        assert {starts(log)[id] for id in short + later} == {1}
        assert {starts(log)[id] for id in long} == {2}
        assert {losses(us.got[id]) for id in long} == {(1, "failed", "worker")}
        workers.stop()
        await us.check_empty()


def losses(rollout: Rollout) -> tuple[int, str, str]:
    record = next(record for record in rollout.attempts if record["stage"] == "run")
    return rollout.losses, record["outcome"], record["kind"]


async def test_a_task_that_names_no_handler_ends_failed(workers: Workers) -> None:
    async with trainer(workers.config) as us:
        (id,) = await us.client.enqueue([Task(handler="nowhere:Nobody")])
        workers.line(2)
        await us.collect(1, 20.0)
        failure = us.got[id].failure
        assert failure is not None
        assert (failure.kind, failure.stage) == ("handler", "init")
        assert "unknown handler 'nowhere:Nobody'" in failure.why
