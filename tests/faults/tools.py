"""What the fault tests share: worker processes that may be killed, and a trainer that checks what it is given."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from handlers.echo import signature
from pipeline.audit import audit
from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from pipeline.errors import Incomplete
from pipeline.queue import Queue
from pipeline.results import Rollout
from tests import line

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
STAGES = ("init", "run", "eval")
TOKENS = 2048
"""Length of the trajectories: above payload.inline_bytes, so that they are written by a command of their own."""

# Short leases: a lost rollout is given out again within two seconds.
SHORT: dict[str, Any] = {
    "lease.seconds": 2.0, "lease.beat": 0.4, "lease.tick": 0.2, "lease.done_seconds": 5.0, "retry.backoff": 0.05,
    "redis.socket_timeout": 1.0, "redis.connect_timeout": 1.0, "limits.grace": 5.0, "handlers.path": str(HERE),
}  # fmt: skip


class Workers:
    """Worker processes of a test, all ended with it. Their logs lie in `folder`."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.all: list[subprocess.Popen[bytes]] = []
        self.kinds: dict[int, tuple[str, int]] = {}

    def start(
        self, stage: str, slots: int = 8, fault: str = "", prefix: Sequence[str] = (), **changes: Any
    ) -> subprocess.Popen[bytes]:
        """One process that serves `stage`; `fault` as in worker_main; `prefix` stands before its command line."""
        config = self.config.changed({name.replace("__", "."): value for name, value in changes.items()})
        settings = json.dumps(_flat(config.model_dump()))
        with open(self.folder / f"{stage}-{len(self.all)}.log", "wb") as log:
            command = [*prefix, sys.executable, "-m", "tests.faults.worker_main", stage, str(slots), settings, fault]
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.all.append(process)
        self.kinds[process.pid] = (stage, slots)
        return process

    def line(self, slots: int = 8, **changes: Any) -> None:
        """One process for each stage."""
        for stage in STAGES:
            self.start(stage, slots, **changes)

    def living(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.all if process.poll() is None]

    def kill(self, process: subprocess.Popen[bytes], again: bool = True) -> None:
        """SIGKILL, and another one of its kind in its place."""
        process.kill()
        process.wait()
        if again:
            self.start(*self.kinds[process.pid])

    def revive(self, **changes: Any) -> int:
        """Start another for each that has died since the last call, as a supervisor does; how many."""
        dead = [process for process in self.all if process.poll() is not None and process.pid in self.kinds]
        for process in dead:
            self.start(*self.kinds.pop(process.pid), **changes)
        return len(dead)

    def logs(self) -> str:
        return "".join(path.read_text("utf-8", "replace") for path in sorted(self.folder.glob("*.log")))

    def stop(self) -> None:
        for process in self.living():
            process.terminate()
        for process in self.all:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            if process.poll() is None:
                process.kill()
                process.wait()


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """{"redis.url": ...}; what is no section's own field (a map of lanes) stays whole."""
    flat: dict[str, Any] = {}
    for section, values in settings.items():
        for name, value in values.items():
            if isinstance(value, dict) and set(value) == {"slots"}:
                flat[f"{section}.{name}.slots"] = value["slots"]
            else:
                flat[f"{section}.{name}"] = value
    return flat


class Trainer:
    """Enqueues, pops and acks; checks that each trajectory is its rollout's own and comes once."""

    def __init__(self, client: RolloutClient) -> None:
        self.client = client
        self.queue: Queue = client.queue
        self.got: dict[str, Rollout] = {}

    async def put(self, count: int, samples: int = 4, handler: str = "echo", **data: Any) -> list[str]:
        tasks = [Task(handler=handler, data={"tokens": TOKENS, **data}) for _ in range(count // samples)]
        return await self.client.enqueue(tasks, samples=samples)

    async def collect(self, count: int, seconds: float, each: Callable[[], Any] | None = None) -> None:
        """Pop and ack until `count` rollouts in all are there. `each` is called with every turn."""
        until = time.monotonic() + seconds
        while len(self.got) < count:
            if time.monotonic() > until:
                raise AssertionError(f"{len(self.got)} of {count} came in {seconds:g} s; {await self.why()}")
            await self.turn(min(64, count - len(self.got)), 0.5)
            if each is not None:
                each()

    async def turn(self, n: int, seconds: float) -> None:
        """Pop and ack what comes within `seconds`, n at most."""
        try:
            batch = await self.client.pop(n, timeout=seconds)
        except Incomplete as error:
            batch = error.batch
        for rollout in batch:
            assert rollout.id not in self.got, f"{rollout.id} was delivered again after its ack"
            self.got[rollout.id] = rollout
        await self.client.ack(batch)

    async def why(self) -> str:
        try:
            await self.client.pop(1, timeout=0.0)
        except Incomplete as error:
            return str(error)
        return "one more is there"

    def outcomes(self) -> Counter[str]:
        return Counter(rollout.outcome for rollout in self.got.values())

    def check_scored(self, ids: list[str]) -> None:
        """All of these came, scored, each with its own trajectory."""
        missing = set(ids) - self.got.keys()
        assert not missing, f"{len(missing)} rollouts never came"
        for id in ids:
            rollout = self.got[id]
            assert rollout.outcome == "scored", f"{id} ended {rollout.outcome}: {rollout.failure} {rollout.attempts}"
            assert rollout.trajectory is not None
            tokens = tuple(int(token) for token in rollout.trajectory.sequences[0].token_ids[:8])
            assert tokens == signature(id), f"{id} carries the trajectory of another rollout"

    async def check_empty(self) -> None:
        """Nothing is lost, nothing is left; every committed stage was committed once."""
        findings = await audit(self.queue)
        assert not findings, findings
        left = await line.leftovers(self.queue)
        assert not left, f"left: {left}"
        counted = [await line.count(self.queue, name) for name in ("live", "acked", "enqueued")]
        assert counted == [0, len(self.got), len(self.got)], f"live, acked, enqueued: {counted}"


@contextlib.asynccontextmanager
async def trainer(config: Config) -> AsyncIterator[Trainer]:
    async with RolloutClient(config=config) as client:
        yield Trainer(client)


def starts(path: Path) -> Counter[str]:
    """How often each rollout's `run` was started."""
    if not path.exists():
        return Counter()
    return Counter(text.split()[0] for text in path.read_text("utf-8").splitlines())


async def eventually(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until a condition of another process holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what} did not happen within {seconds:g} s"
        await asyncio.sleep(0.02)


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def thaw(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
