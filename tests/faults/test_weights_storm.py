"""Weights that change while trainer, policy servers, RUN workers and Redis are killed and frozen.

The servers tell by each token's logprob which weights really sampled it (true_policy). Whatever happens: each rollout
comes once and scored, no token bears the version of weights that did not sample it, and none that was asked for after
an update is of older weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.audit import audit
from pipeline.backends import Backend, Backends
from pipeline.errors import Incomplete, RedisUnavailable
from pipeline.results import Rollout
from tests.faults.test_redis import Killable
from tests.faults.tools import ROOT, SHORT, Trainer, Workers, _flat, eventually, trainer
from tests.faults.true_policy import lies
from tests.services import RedisService
from workers.policy.tokenizer import Tokenizer

SETTINGS: dict[str, Any] = SHORT | {
    "policy.backend_lease": 1.5, "policy.probe_every": 0.4, "policy.probe_timeout": 1.0,
    "policy.update_timeout": 3.0, "policy.request_timeout": 30.0, "limits.policy_wait": 60.0, "retry.attempts": 3,
}  # fmt: skip
PAUSE_HOLDS = 1.5
"""Seconds for which a silent trainer's pause holds; the consumer's own leases hold for longer."""

FIRST = 3
"""The run's first version: none that a fresh server may have by chance."""


class Storm:
    """A line with policy servers and a trainer that updates, all in processes of their own."""

    def __init__(self, workers: Workers, folder: Path, tokenizer: str) -> None:
        self.workers, self.folder, self.tokenizer = workers, folder, tokenizer
        self.config = workers.config
        self.events = folder / "events"
        self.servers: dict[int, tuple[subprocess.Popen[bytes], tuple[str, ...]]] = {}
        self.trainer: subprocess.Popen[bytes] | None = None
        self.ended: list[subprocess.Popen[bytes]] = []

    def serve(self, port: int = 0, *about: str) -> int:
        """A server; on a port on which one was killed it is a fresh one, with base weights."""
        if not port:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        command = [sys.executable, "-m", "tests.faults.true_policy", self.tokenizer, str(port), *about]
        self.servers[port] = (self._run(command, "server"), about)
        return port

    def train(self, modes: str) -> None:
        held = [line.split() for line in self.told() if line.startswith("holds")]
        settings = json.dumps(_flat(self.config.changed({"lease.done_seconds": PAUSE_HOLDS}).model_dump()))
        version = held[-1][1] if held else str(FIRST)
        command = [sys.executable, "-m", "tests.faults.storm_trainer", settings, str(self.folder), version, modes]
        self.trainer = self._run([*command, str(self.events)], "trainer")

    def _run(self, command: list[str], what: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{what}.out", "ab") as out:
            return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    def told(self) -> list[str]:
        return self.events.read_text().splitlines() if self.events.exists() else []

    def updates(self) -> int:
        return sum(line.startswith("holds") for line in self.told())

    async def updated(self, by: int = 1, seconds: float = 40.0) -> None:
        """Wait for so many updates more."""
        wanted, until = self.updates() + by, time.monotonic() + seconds
        while self.updates() < wanted:
            assert time.monotonic() < until, f"no update any more: {self.said('trainer')[-3000:]}"
            await asyncio.sleep(0.02)

    def said(self, what: str) -> str:
        path = self.folder / f"{what}.out"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def stop(self) -> None:
        every = [process for process, _ in self.servers.values()] + ([self.trainer] if self.trainer else [])
        for process in every + self.ended:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    # -- what happens to them ------------------------------------------------------------------------------------------

    async def trainer_killed(self) -> None:
        assert self.trainer is not None
        self.trainer.kill()
        self.trainer.wait()
        self.train("keep,wait,abort")

    async def trainer_frozen(self, seconds: float = 3.0) -> None:
        """For longer than its pause holds: others go on meanwhile, and it goes on where it was."""
        assert self.trainer is not None
        await frozen(self.trainer, seconds)

    async def server_killed(self) -> None:
        port = random.choice(list(self.servers))
        process, about = self.servers[port]
        process.kill()
        process.wait()
        await asyncio.sleep(random.choice((0.0, 1.0)))
        self.serve(port, *about)

    async def server_frozen(self) -> None:
        await frozen(random.choice([process for process, _ in self.servers.values()]), random.uniform(0.5, 4.0))

    def run_worker(self) -> subprocess.Popen[bytes]:
        return random.choice([item for item in self.workers.living() if self.workers.kinds[item.pid][0] == "run"])

    async def worker_killed(self) -> None:
        self.workers.kill(self.run_worker())

    async def worker_frozen(self) -> None:
        """For longer than its share of the load holds: an update does not wait for it."""
        await frozen(self.run_worker(), 6.0)

    # -- what must hold ------------------------------------------------------------------------------------------------

    def check_versions(self, rollouts: list[Rollout]) -> None:
        found = lies(rollouts)
        assert not found, f"{len(found)} runs bear a wrong version: {found[:5]}"
        old = self.older(rollouts)
        assert not old, f"{len(old)} actions are of older weights than those in force: {old[:5]}"

    def older(self, rollouts: list[Rollout]) -> list[str]:
        """Actions that were asked for when newer weights were in force than some of their tokens are of."""
        steps = [
            (float(when), int(version) if what == "holds" else 0) for what, version, when in map(str.split, self.told())
        ]
        out = []
        for rollout in rollouts:
            for sequence in rollout.trajectory.sequences if rollout.trajectory else ():
                for turn in sequence.turns:
                    if turn.kind == "action":
                        least = next((floor for since, floor in reversed(steps) if since < turn.started), 0)
                        oldest = min(
                            run.version for run in sequence.versions if run.start < turn.end and turn.start < run.end
                        )
                        if oldest < least:
                            out.append(f"{rollout.id}: {oldest}, {least} was in force at {turn.started}")
        return out


async def frozen(process: subprocess.Popen[bytes], seconds: float) -> None:
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(seconds)
    process.send_signal(signal.SIGCONT)


async def storm_of(us: Trainer, storm: Storm, count: int, *happens: Callable[[], Awaitable[None]]) -> None:
    """Rollouts flow while these things happen, each at a random moment after an update."""
    ids = await us.put(count, handler="storm_handlers:Talk", turns=3)
    playing = asyncio.create_task(collected(us, count))
    for thing in happens:
        await asyncio.sleep(random.uniform(0.0, 0.6))
        await thing()
        if playing.done():
            break
    await playing
    await storm.updated(1)
    assert us.outcomes() == {"scored": count}, [item.failure for item in us.got.values() if item.failure][:3]
    assert us.got.keys() == set(ids)
    storm.check_versions(list(us.got.values()))
    findings = await audit(us.queue)
    assert not findings, findings


async def collected(us: Trainer, count: int) -> None:
    """Pop and ack all, through a Redis that goes and comes."""
    until = time.monotonic() + 240.0
    while len(us.got) < count:
        assert time.monotonic() < until, f"{len(us.got)} of {count} came; {await us.why()}"
        try:
            batch = await us.client.pop(min(64, count - len(us.got)), timeout=1.0)
        except Incomplete as error:
            batch = error.batch
        except RedisUnavailable:
            continue
        await us.client.ack(batch)
        for rollout in batch:
            assert rollout.id not in us.got, f"{rollout.id} came again after its ack"
            us.got[rollout.id] = rollout


@pytest.fixture
def storm(own_workers: Workers, tmp_path: Path, tokens: Tokenizer) -> Iterator[Storm]:
    own_workers.config = own_workers.config.changed({**SETTINGS, "policy.tokenizer": tokens.name_or_path})
    storm = Storm(own_workers, tmp_path, tokens.name_or_path)
    yield storm
    storm.stop()


async def begin(us: Trainer, storm: Storm, servers: int, modes: str, *about: str) -> None:
    backends = Backends(us.queue)
    for number in range(servers):
        port = storm.serve(0, "--load", "0.1", "--per-token", "0.02", *about)
        await backends.add(Backend(id=f"s{number}", url=f"http://127.0.0.1:{port}", model="policy"))
    await eventually(lambda: storm.said("server").count("http://") == servers, 30.0, "that all servers listen")
    for stage, slots in (("init", 64), ("run", 32), ("run", 32), ("eval", 64)):
        storm.workers.start(stage, slots)
    storm.train(modes)
    await storm.updated(2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
async def test_a_storm(storm: Storm, redis_server: RedisService, seed: int) -> None:
    random.seed(seed)
    redis = Killable(redis_server)

    async def redis_killed() -> None:
        redis.kill()
        await asyncio.sleep(0.5)
        redis.start()

    things = [
        storm.trainer_killed, storm.trainer_frozen, storm.server_killed, storm.server_frozen, storm.worker_killed,
        storm.worker_frozen, redis_killed,
    ] * 2  # fmt: skip
    random.shuffle(things)
    try:
        async with trainer(storm.config) as us:
            await begin(us, storm, 3, "keep,wait,abort")
            await storm_of(us, storm, 400, *things)
    finally:
        storm.workers.stop()
        storm.stop()
        redis.stop()
