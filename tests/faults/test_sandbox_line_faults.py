"""Workers with sandboxes that are killed, frozen, stopped or starved, and handlers that make the worst of it."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.audit import audit
from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Stage, Task
from pipeline.results import Rollout
from tests.faults.chaos_handlers import STEPS
from tests.faults.test_sandbox_chaos import marked, nothing_left
from tests.faults.tools import SHORT, Workers, eventually, freeze, thaw
from tests.services import RedisService
from workers.loop import Worker
from workers.trial import play

NUMBERS = [str(number) for number in range(1, STEPS + 1)]
SLOW = 0.3
"""Seconds that each command naps where the test needs time to hit it."""


@pytest.fixture
def config(redis_service: RedisService, root: Path) -> Config:
    return redis_service.config.changed({**SHORT, "sandbox.root": str(root), "sandbox.max_live": 4,
                                         "handlers.load": ["chaos_handlers:Tally"]})  # fmt: skip


@pytest.fixture
def crew(config: Config, tmp_path: Path, root: Path) -> Iterator[Workers]:
    workers = Workers(config, tmp_path)
    yield workers
    workers.stop()
    assert not marked(root)


def task(handler: str, **data: Any) -> Task:
    return Task(handler=f"chaos_handlers:{handler}", data=data)


async def collected(client: RolloutClient, count: int, timeout: float = 60.0) -> list[Rollout]:
    batch = await client.pop(count, timeout=timeout)
    await client.ack(batch)
    return batch


def whole(rollout: Rollout, crew: Workers) -> None:
    """Scored, with each number once and in order."""
    assert rollout.outcome == "scored", f"{rollout.failure} {rollout.attempts}\n{crew.logs()[-4000:]}"
    assert rollout.evidence["tally"] == NUMBERS
    seen = rollout.evidence["seen"]  # None: no sandbox in EVAL; a sentence: a fresh one
    assert seen is None or seen[:STEPS] == NUMBERS or "No" in seen


def tallied(root: Path) -> int:
    return sum(len(path.read_text().split()) for path in root.glob("*/*/*/home/tally"))


@pytest.mark.parametrize("handler", ["Swallows", pytest.param("Translates", marks=pytest.mark.slow)])
async def test_a_handler_can_not_go_on_without_its_sandbox(
    config: Config, crew: Workers, root: Path, handler: str
) -> None:
    host, *_ = [crew.start(stage) for stage in ("init", "run", "eval")]
    async with RolloutClient(config=config) as client:
        await client.enqueue([task(handler, nap=SLOW)])
        await eventually(lambda: tallied(root) >= 2, 20.0, "that it acts")
        crew.kill(host)
        (rollout,) = await collected(client, 1)
    whole(rollout, crew)
    assert rollout.losses == 1


@pytest.mark.slow
async def test_a_handler_that_asks_other_things_starts_over(config: Config, crew: Workers, root: Path) -> None:
    _, run, _ = [crew.start(stage) for stage in ("init", "run", "eval")]
    async with RolloutClient(config=config) as client:
        await client.enqueue([task("Wanders", nap=SLOW)])
        await eventually(lambda: tallied(root) >= 2, 20.0, "that it acts")
        crew.kill(run)
        (rollout,) = await collected(client, 1)
    whole(rollout, crew)
    assert any("can't be replayed" in str(item) for item in rollout.attempts), rollout.attempts


@pytest.mark.ci
async def test_what_a_handler_leaves_behind_is_fenced(config: Config, crew: Workers) -> None:
    crew.line()
    async with RolloutClient(config=config) as client:
        await client.enqueue([task("Lingers")] * 4)
        for rollout in await collected(client, 4):
            whole(rollout, crew)
    assert "Traceback" not in crew.logs() and "never retrieved" not in crew.logs()


@pytest.mark.ci
async def test_a_host_that_was_frozen_discards_what_went_on_without_it(
    config: Config, crew: Workers, root: Path
) -> None:
    host, *_ = [crew.start(stage) for stage in ("init", "run", "eval")]
    async with RolloutClient(config=config) as client:
        await client.enqueue([task("TallySame", nap=SLOW)] * 3)
        await eventually(lambda: tallied(root) >= 3, 20.0, "that they act")
        freeze(host.pid)
        try:
            crew.start("init")
            for rollout in await collected(client, 3):
                whole(rollout, crew)
                assert rollout.losses == 1
        finally:
            thaw(host.pid)
        await eventually(lambda: not list(root.glob("*/*/*/home")), 20.0, "that both hosts discard their sandboxes")
        assert host.poll() is None
        await client.enqueue([task("TallySame")] * 8)
        for rollout in await collected(client, 8):
            whole(rollout, crew)
        assert await audit(client.queue) == []


@pytest.mark.ci
@pytest.mark.parametrize(
    "handler",
    ["TallyFresh", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Tally", "TallySame", "TallyAnew"))],
)
async def test_one_that_must_run_alone_has_its_sandbox_too(config: Config, crew: Workers, handler: str) -> None:
    async with RolloutClient(config=config) as client:
        ids = await client.enqueue([task(handler)])
        await client.queue.execute("HSET", client.queue.key("r", ids[0]), "alone", "1")
        crew.line()
        (rollout,) = await collected(client, 1)
        whole(rollout, crew)
    assert crew.logs().count("it runs alone in a child process") >= 3


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_one_that_runs_alone_and_loses_its_host_counts_a_loss(
    config: Config, crew: Workers, root: Path, how: str
) -> None:
    async with RolloutClient(config=config) as client:
        ids = await client.enqueue([task("TallySame", nap=SLOW)])
        await client.queue.execute("HSET", client.queue.key("r", ids[0]), "alone", "1")
        host, *_ = [crew.start(stage) for stage in ("init", "run", "eval")]
        await eventually(lambda: tallied(root) >= 2, 20.0, "that it acts")
        if how == "killed":
            crew.kill(host)
        else:
            freeze(host.pid)
            crew.start("init")
        try:
            (rollout,) = await collected(client, 1)
        finally:
            if how == "frozen":
                thaw(host.pid)
        whole(rollout, crew)
        assert rollout.losses == 1 and "sandbox" in {item.get("kind") for item in rollout.attempts}


@pytest.mark.ci
async def test_a_host_that_is_told_to_stop_serves_what_it_has(config: Config, crew: Workers, root: Path) -> None:
    host, *_ = [crew.start(stage) for stage in ("init", "run", "eval")]
    async with RolloutClient(config=config) as client:
        await client.enqueue([task("TallySame", nap=SLOW)] * 3)
        await eventually(lambda: tallied(root) >= 3, 20.0, "that they act")
        host.send_signal(signal.SIGTERM)
        for rollout in await collected(client, 3):
            whole(rollout, crew)
            assert rollout.losses == 0
        assert await asyncio.to_thread(host.wait, 20) == 0
        await client.enqueue([task("TallySame", nap=0.8)] * 2)
        second = crew.start("init", limits__grace=0.2)
        await eventually(lambda: tallied(root) >= 2, 20.0, "that they act")
        second.send_signal(signal.SIGTERM)
        await asyncio.to_thread(second.wait, 20)
        crew.start("init")
        for rollout in await collected(client, 2):
            whole(rollout, crew)
            assert rollout.losses == 1
    crew.stop()
    await nothing_left(root)


@pytest.mark.ci
async def test_a_burst_lasts_until_what_came_back_to_init_is_done(config: Config, crew: Workers) -> None:
    async with RolloutClient(config=config) as client:
        await client.enqueue([task("Breaks")] * 3)
        crew.start("run")
        crew.start("eval")
        worker = Worker(config.changed({"limits.loop_dead": 3600.0}), Stage.INIT, 4, burst=True)
        async with asyncio.timeout(60):
            await worker.run()
        for rollout in await collected(client, 3, 20.0):
            whole(rollout, crew)


@pytest.mark.slow
async def test_a_full_host_leaves_the_rest_to_the_other(config: Config, crew: Workers) -> None:
    async with RolloutClient(config=config) as client:
        await client.enqueue([task("Tally", nap=0.2)] * 12)
        crew.start("init", sandbox__max_live=1)
        crew.start("init", sandbox__max_live=4)
        crew.start("run", 16)
        crew.start("eval")
        batch = await collected(client, 12)
        makers = {item["worker"] for rollout in batch for item in rollout.attempts if item["stage"] == "init"}
        for rollout in batch:
            whole(rollout, crew)
        assert len(makers) == 2


SMALL_DISK = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
              'mount -t tmpfs -o size=3m none "$0" && exec "$@"']  # fmt: skip
"""Everything under the folder that is named next lies on a disk of 3 MB, for this process alone."""


async def test_a_host_whose_disk_is_full_says_so(config: Config, crew: Workers, root: Path) -> None:
    probe = await asyncio.create_subprocess_exec(*SMALL_DISK, str(root), "true", stderr=asyncio.subprocess.PIPE)
    _, said = await probe.communicate()
    if probe.returncode != 0:
        pytest.skip(f"this machine lets nobody mount a tmpfs in a namespace: {said.decode()}")
    async with RolloutClient(config=config) as client:
        crew.start("init", prefix=[*SMALL_DISK, str(root)], sandbox__listen="127.0.0.4")
        crew.start("run")
        crew.start("eval")
        await client.enqueue([task("Fills")])
        (rollout,) = await collected(client, 1)
        assert rollout.outcome == "failed" and rollout.failure is not None, (rollout, crew.logs())
        assert "No space left on device" in rollout.failure.why and rollout.failure.kind == "sandbox"
        await client.enqueue([task("TallySame")] * 2)  # its place and its disk are free again
        for rollout in await collected(client, 2):
            whole(rollout, crew)


async def test_a_host_without_its_driver_ends_with_a_sentence(config: Config, crew: Workers, tmp_path: Path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    for name in ("sh", "bash", "env", "unshare"):
        found = shutil.which(name)
        if found:
            (bare / name).symlink_to(found)
    async with RolloutClient(config=config) as client:
        ids = await client.enqueue([task("Tally")] * 2)
        bereft = crew.start("init", prefix=["env", f"PATH={bare}"], sandbox__driver="apptainer")
        assert await asyncio.to_thread(bereft.wait, 30) != 0
        assert "can't make sandboxes (sandbox.driver is 'apptainer')" in crew.logs()
        assert (await client.status())["stages"]["init"]["ready"]["train"] == 2  # for a host that can
        await client.cancel(ids)


async def test_a_trial_with_one_place_frees_it_for_eval(config: Config, root: Path) -> None:
    async with asyncio.timeout(30):
        trial = await play(config.changed({"sandbox.max_live": 1}), task("TallyFresh"), None, loud=False)
    assert trial.reward is not None, trial.failed
    assert not list(root.glob("*/*"))


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_two_places_and_one_slot_end_150_rollouts(config: Config, crew: Workers, root: Path) -> None:
    """Fifty of each kind of eval_sandbox, half of them cancelled at random."""
    chance = random.Random(11)
    async with RolloutClient(config=config) as client:
        crew.start("init", 8, sandbox__max_live=2)
        crew.start("run", 8)
        crew.start("eval", 1, sandbox__max_live=2)
        kinds = ("Tally", "TallySame", "TallyFresh")
        ids = await client.enqueue([task(kind, nap=chance.uniform(0.0, 0.05)) for kind in kinds for _ in range(50)])
        doomed = chance.sample(ids, len(ids) // 2)
        for id in doomed:
            await client.cancel([id])
            await asyncio.sleep(chance.uniform(0.0, 0.3))
        got = await collected(client, len(ids), 600.0)
        assert {rollout.id for rollout in got} == set(ids)
        for rollout in got:
            if rollout.id not in doomed or rollout.outcome == "scored":
                whole(rollout, crew)
        await eventually(lambda: not list(root.glob("*/*/*/home")), 20.0, "that the host discards its sandboxes")
        assert await audit(client.queue) == []
