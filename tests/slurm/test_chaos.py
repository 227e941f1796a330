"""The whole line as jobs on Slurm while nodes fail, jobs are preempted, requeued and cancelled, and Redis moves.

Every rollout comes once, scored, with the reward of its own task; each stage counted once; nothing is left anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest

from pipeline import address_file, server_files
from pipeline.audit import audit
from pipeline.client import RolloutClient
from pipeline.envelope import Task
from pipeline.errors import Incomplete, RedisUnavailable
from pipeline.results import Rollout
from tests import line
from tests.boxes import PROGRAMS, marked
from tests.services import require
from tests.slurm import traced_handlers as traced
from tests.slurm.chaos import Chaos
from tests.slurm.cluster import Cluster
from tests.slurm.line_jobs import LineJobs, line_folder
from workers.policy import scripted
from workers.policy.tokenizer import Tokenizer
from workers.sandbox.boxes import orphans

SAMPLES = 4


@pytest.fixture
def folder() -> Iterator[Path]:
    """The line's; asked for before the cluster, so that it goes after it: no job runs on without its folder."""
    with line_folder() as folder:
        (folder / "trace").mkdir()
        yield folder


@contextlib.asynccontextmanager
async def line_of(
    cluster: Cluster, tokens: Tokenizer, folder: Path, sizes: Mapping[str, int], driver: str
) -> AsyncIterator[LineJobs]:
    """The jobs of a line, not yet submitted, beside a scripted policy server that knows all questions."""
    for program in ("redis-server", *PROGRAMS[driver]):
        require(program)
    answers = traced.answers(range(1000))
    options = scripted.Options(tokenizer=tokens, answers=answers, p_correct=1.0, drift=0.0, latency=0.15)
    policy = await scripted.start(options)
    settings = {
        "policy": {"url": policy.url, "tokenizer": tokens.name_or_path},
        "sandbox": {"driver": driver},
        "images": {"cache": str(folder / "images")},
    }
    try:
        yield LineJobs(cluster, folder, sizes, settings)
    finally:
        await policy.stop()


class Trainer:
    """Enqueues groups at the pace of the storm, pops and acks; one client for the whole time."""

    def __init__(self, client: RolloutClient, trace: Path) -> None:
        self.client, self.trace = client, trace
        self.numbers: dict[str, int] = {}
        self.got: dict[str, Rollout] = {}
        self.acked: set[str] = set()

    async def put(self, count: int) -> None:
        """So many rollouts more, in groups of SAMPLES."""
        first = len(self.numbers)
        for number in range(first, first + count, SAMPLES):
            kind = traced.KINDS[number // SAMPLES % len(traced.KINDS)]
            task = Task(handler=f"traced_handlers:{kind}", data={"number": number, "trace": str(self.trace)})
            ids = await self.client.enqueue([task], samples=SAMPLES)
            self.numbers.update(dict.fromkeys(ids, number))

    async def play(self, count: int, chaos: Chaos, blows: int) -> None:
        """Until all of `count` are acked; some more are enqueued with each blow."""
        while len(self.acked) < count:
            await self.put(max(0, paced(count, len(chaos.did), blows) - len(self.numbers)))
            await self.turn(0.5)

    async def turn(self, seconds: float) -> None:
        """Pop and ack what comes within `seconds`."""
        try:
            batch = await self.client.pop(16, timeout=seconds)
        except Incomplete as error:
            batch = error.batch
        except RedisUnavailable:  # for longer than `seconds`
            return
        for rollout in batch:
            assert rollout.id not in self.acked, f"{rollout.id} was delivered again after its ack"
            self.got[rollout.id] = rollout
        await self.client.ack(batch)
        self.acked.update(rollout.id for rollout in batch)


def check(us: Trainer) -> None:
    """Each came once, scored, with its own reward; the executions that counted are one chain, and left their traces."""
    assert us.acked == us.numbers.keys()
    for id, rollout in us.got.items():
        number = us.numbers[id]
        assert rollout.outcome == "scored", f"{id}: {rollout.outcome} {rollout.failure} {rollout.attempts}"
        evidence = rollout.evidence
        assert rollout.reward == traced.reward_of(number), f"{id}, {number}: {rollout.reward} {evidence}"
        assert evidence["run_after"] == evidence["init"], f"{id}: {evidence}"
        traces = (us.trace / id.replace("/", "_")).read_text().splitlines()
        for stage in ("init", "run", "eval"):
            assert f"{stage} {evidence[stage]} end" in traces, (
                f"{id}: {stage} {evidence[stage]} left no trace: {traces}"
            )
        if "made" in evidence:
            assert evidence["made"] == [id, evidence["init"]], f"{id}: {evidence}"
            heard = [f"wrote {number + step}" for step in range(traced.STEPS)]
            assert [text.strip() for text in evidence["heard"]] == heard, f"{id} heard {evidence['heard']}"


def is_blamed(rollout: Rollout) -> bool:
    """Whether an attempt of it failed, rather than was lost."""
    return any(record["outcome"] == "failed" for record in rollout.attempts)


async def check_empty(us: Trainer) -> None:
    """Nothing is lost, nothing is left; each rollout's end was committed once, and no failure was put down to it."""
    queue, count = us.client.queue, len(us.numbers)
    blamed = {name: await line.count(queue, name) for name in ("attempt:init", "attempt:run", "attempt:eval")}
    assert not any(blamed.values()), (blamed, [rollout.attempts for rollout in us.got.values() if is_blamed(rollout)])
    assert await audit(queue) == []
    assert await line.leftovers(queue) == []
    counted = {
        name: await line.count(queue, name) for name in ("live", "acked", "enqueued", "scored", "committed:eval")
    }
    assert counted == {"live": 0, **dict.fromkeys(("acked", "enqueued", "scored", "committed:eval"), count)}


def check_nodes(cluster: Cluster, folder: Path) -> None:
    """No process of a job or of a sandbox, no sandbox's folder, no mount. What a node's death left is swept there."""
    until = time.monotonic() + 20.0
    left: list[object] = ["nobody has looked"]
    while left:
        assert time.monotonic() < until, f"left: {left}"
        for root in folder.glob("n*/*"):
            orphans.sweep(root)
        for root in folder.glob("tmp/*"):
            server_files.sweep_runtime(root)
        mounts = [text for text in Path("/proc/self/mountinfo").read_text().splitlines() if str(folder) in text]
        files = [*folder.glob("n*/*/*"), *folder.glob("tmp/*/*")]
        left = [*cluster.processes(jobs=True), *marked(folder), *files, *mounts]
        time.sleep(0.2)


def paced(count: int, done: int, blows: int) -> int:
    """How many rollouts are enqueued after so many blows: two groups are kept for the time after the last one."""
    if done == blows:
        return count
    return min(count - 2 * SAMPLES, count * (done + 1) // (blows + 1) + 2 * SAMPLES) // SAMPLES * SAMPLES


async def blow(chaos: Chaos, blows: int, pause: float) -> None:
    """So many bad things, beside the trainer: it may well wait for a Redis that only `mend` brings back."""
    next_ = asyncio.get_running_loop().time() + pause
    while True:
        if len(chaos.did) < blows and asyncio.get_running_loop().time() >= next_:
            await asyncio.to_thread(chaos.step)
            next_ = asyncio.get_running_loop().time() + pause * chaos.chance.uniform(0.5, 1.5)
        await asyncio.to_thread(chaos.mend)
        await asyncio.sleep(0.3)


async def storm(jobs: LineJobs, chaos: Chaos, count: int, blows: int, pause: float, seconds: float) -> None:
    """`count` rollouts under `blows` bad things, one every `pause` s or so; all are there within `seconds`."""
    try:
        await asyncio.to_thread(jobs.up)
        async with asyncio.timeout(seconds), RolloutClient(config=jobs.config) as client:
            us = Trainer(client, jobs.folder / "trace")
            async with asyncio.TaskGroup() as group:
                blowing = group.create_task(blow(chaos, blows, pause))
                await us.play(count, chaos, blows)
                blowing.cancel()
            check(us)
            await check_empty(us)
        assert len(chaos.did) == blows
        assert address_file.read(jobs.line / address_file.NAME).epoch > 1, "Redis never moved"
        await asyncio.to_thread(chaos.mend, all_=True)
        await asyncio.to_thread(jobs.down)
        await asyncio.to_thread(check_nodes, jobs.cluster, jobs.folder)
    except BaseException as error:
        error.add_note(f"seed {chaos.seed}, did {chaos.did}\n{jobs.rows()}\n{jobs.logs()[-30_000:]}")
        raise


SHORT = {"redis": 1, "init": 2, "run": 3, "eval": 2, "maint": 2}
FULL = {"redis": 1, "init": 4, "run": 4, "eval": 3, "maint": 2}
FULL_8 = {"redis": 1, "init": 6, "run": 8, "eval": 5, "maint": 3}


@pytest.mark.timeout(420)
async def test_a_storm_over_the_line(folder: Path, cluster: Cluster, tokens: Tokenizer) -> None:
    async with line_of(cluster, tokens, folder, SHORT, "bubblewrap") as jobs:
        await storm(jobs, Chaos(cluster, jobs, seed=1), count=60, blows=10, pause=2.0, seconds=240.0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("driver", ["bubblewrap", "apptainer"])
async def test_five_hundred_rollouts_on_four_nodes(
    folder: Path, cluster: Cluster, tokens: Tokenizer, driver: str
) -> None:
    async with line_of(cluster, tokens, folder, FULL, driver) as jobs:
        await storm(jobs, Chaos(cluster, jobs, seed=4), count=500, blows=50, pause=4.0, seconds=1500.0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_five_hundred_rollouts_on_eight_nodes(folder: Path, cluster8: Cluster, tokens: Tokenizer) -> None:
    async with line_of(cluster8, tokens, folder, FULL_8, "bubblewrap") as jobs:
        chaos = Chaos(cluster8, jobs, seed=8, most_away=2)
        await storm(jobs, chaos, count=500, blows=50, pause=4.0, seconds=1500.0)
