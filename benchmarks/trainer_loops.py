"""Training loops over the same line, rollouts and times: coupled (one batch after the other), decoupled, early close.

A step of training is a pause of stated length, then new weights go to the policy server through the line.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness import Bench, wait_until
from trainer_families import Times

from pipeline.client import RolloutClient
from pipeline.envelope import Task
from pipeline.groups import GroupPolicy
from pipeline.results import Group
from workers.policy.tokenizer import make

SERVER = Path(__file__).with_name("trainer_policy.py")
PATIENCE = 120.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A batch is `groups` x `samples` rollouts; the policy server runs `slots` calls at once; a step takes `step` s.

    The decoupled loop allows `staleness` updates; its first `warm` batches, while the line fills, are not counted.
    """

    times: Times = field(default_factory=Times)
    groups: int = 4
    samples: int = 8
    slots: int = 16
    step: float = 2.2
    staleness: int = 3
    coupled: int = 5
    warm: int = 3
    decoupled: int = 10
    early: int = 5
    extra: int = 2

    @property
    def batch(self) -> int:
        return self.groups * self.samples

    def tasks(self, first: int, count: int) -> list[Task]:
        return [
            Task(handler="trainer_families:Drawn", id=f"g{at}", data={"group": at, "times": asdict(self.times)})
            for at in range(first, first + count)
        ]

    def described(self) -> dict[str, float]:
        """What the drawn rollouts look like, without a line: of 2,000."""
        drawn = [self.times.seconds(at, 0) for at in range(2000)]
        whole = sorted(seconds for _, seconds in drawn)
        logs = [math.log(seconds) for seconds in whole]
        mean = sum(logs) / len(logs)
        return {
            "rollout_median_s": whole[len(whole) // 2], "rollout_p99_s": whole[int(0.99 * len(whole))],
            "rollout_log_sigma": math.sqrt(sum((value - mean) ** 2 for value in logs) / len(logs)),
            "policy_s_per_batch": sum(busy for busy, _ in drawn) / len(drawn) * self.batch / self.slots,
        }  # fmt: skip


@dataclass
class Line:
    """A running line with its policy server, and the trainer's client."""

    client: RolloutClient
    meter: str
    weights: Path
    version: int = 0

    async def slot_seconds(self) -> tuple[float, float]:
        """Busy slot-seconds so far, and the server's clock."""

        def ask() -> dict[str, float]:
            with urllib.request.urlopen(self.meter, timeout=10) as answer:
                return dict(json.load(answer))

        told = await asyncio.to_thread(ask)
        return told["slot_seconds"], told["clock"]

    async def train(self, groups: list[Group], step: float) -> None:
        """One step, new weights, and the line forgets the batch."""
        failed = [rollout.failure for group in groups for rollout in group.rollouts if rollout.outcome == "failed"]
        assert not failed, failed[:1]
        await asyncio.sleep(step)
        self.version += 1
        await self.client.update_weights(self.version, path=self.weights)
        await self.client.ack(groups)


@contextlib.asynccontextmanager
async def playing(line: Bench, plan: Plan) -> AsyncIterator[Line]:
    """Three workers, one policy server with `plan.slots` slots, a client."""
    folder, ports, weights = line.folder / "tokenizer", line.folder / "ports", line.folder / "weights"
    weights.mkdir()
    (weights / "model.safetensors").touch()
    make(folder)
    line.start([
        sys.executable, "-P", str(SERVER), "--tokenizer", str(folder), "--slots", str(plan.slots),
        "--per-token", str(plan.times.per_token), "--port-file", str(ports),
    ])  # fmt: skip
    await asyncio.to_thread(wait_until, ports.exists, 60, "the policy server")
    told = json.loads(ports.read_text())
    line.change(policy__url=told["policy"], policy__tokenizer=str(folder), policy__max_staleness=-1)
    workers = [line.worker(stage, slots) for stage, slots in (("init", 16), ("run", 256), ("eval", 16))]
    async with RolloutClient(config=line.config) as client:
        await client.register_backend(told["policy"])
        ready = Line(client, told["meter"], weights)
        await client.enqueue([Task(handler="trainer_families:Drawn", id="warm-up", data=plan.tasks(0, 1)[0].data)])
        await client.ack(await client.pop_groups(1, timeout=PATIENCE))
        yield ready
    await asyncio.to_thread(line.end, *workers)  # before the policy server: what is cut must not look for another


class Window:
    """Time and use of the policy's slots from `begin` on."""

    def __init__(self, line: Line, slots: int) -> None:
        self._line, self._slots = line, slots

    async def begin(self) -> None:
        self._busy, self._clock = await self._line.slot_seconds()
        self._began = time.perf_counter()

    async def told(self, steps: int) -> dict[str, float]:
        seconds = time.perf_counter() - self._began
        busy, clock = await self._line.slot_seconds()
        return {
            "seconds": seconds, "steps_per_hour": steps / seconds * 3600,
            "utilisation": (busy - self._busy) / ((clock - self._clock) * self._slots),
        }  # fmt: skip


async def coupled(line: Bench, plan: Plan) -> dict[str, float]:
    """Rollouts inside the training loop: start a batch, wait for all of it, train, begin again.

    The groups are those that the decoupled loop is measured with.
    """
    async with playing(line, plan) as running:
        await running.client.start_run(0, path=running.weights)
        window, trained = Window(running, plan.slots), Trained()
        await window.begin()
        for step in range(plan.coupled):
            await running.client.enqueue(
                plan.tasks((plan.warm + step) * plan.groups, plan.groups), samples=plan.samples
            )
            groups = await running.client.pop_groups(plan.groups, timeout=PATIENCE)
            trained.add(groups)
            await running.train(groups, plan.step)
        return await window.told(plan.coupled) | trained.told()


async def decoupled(line: Bench, plan: Plan) -> dict[str, float]:
    """The line is kept full as far as the bound on staleness allows, and each batch is trained on as it comes."""
    async with playing(line, plan) as running:
        client = running.client
        await client.start_run(0, path=running.weights, batch=plan.batch, max_staleness=plan.staleness)
        steps = plan.warm + plan.decoupled
        ids = await client.enqueue(plan.tasks(0, (steps + plan.staleness + 2) * plan.groups), samples=plan.samples)
        window, trained = Window(running, plan.slots), Trained()
        for step in range(steps):
            if step == plan.warm:
                await window.begin()
            groups = await client.pop_groups(plan.groups, timeout=PATIENCE)
            if step >= plan.warm:
                trained.add(groups)
            await running.train(groups, plan.step)
        told = await window.told(plan.decoupled)
        await client.cancel(ids)
        return told | trained.told()


class Trained:
    """What was trained on: lengths and ages, so that a bias shows."""

    def __init__(self) -> None:
        self._sampled: list[int] = []
        self._ages: list[int] = []

    def add(self, groups: list[Group]) -> None:
        rollouts = [rollout for group in groups for rollout in group.scored]
        self._sampled += [rollout.sampled for rollout in rollouts]
        self._ages += [rollout.staleness or 0 for rollout in rollouts]

    def told(self) -> dict[str, float]:
        return {
            "rollouts": len(self._sampled), "mean_tokens": sum(self._sampled) / len(self._sampled),
            "mean_staleness": sum(self._ages) / len(self._ages),
        }  # fmt: skip


async def early(line: Bench, plan: Plan) -> dict[str, float]:
    """Seconds to a full batch: wait for all, against `plan.extra` samples more and the group closed when full.

    The same groups in both, in turns; the lengths of all that was started come from the model, not from who came first.
    """
    seconds: dict[str, list[float]] = {"whole": [], "early": []}
    kept: list[int] = []
    cut: list[int] = []
    async with playing(line, plan) as running:
        client = running.client
        for turn, (way, policy) in itertools.product(
            range(plan.early), (("whole", GroupPolicy()), ("early", GroupPolicy(extra=plan.extra)))
        ):
            tasks = [
                Task(handler=task.handler, id=f"{way}-{task.id}", data=task.data)
                for task in plan.tasks(turn * plan.groups, plan.groups)
            ]
            began = time.perf_counter()
            await client.enqueue(tasks, samples=plan.samples, groups=policy)
            groups = await client.pop_groups(plan.groups, timeout=PATIENCE)
            seconds[way].append(time.perf_counter() - began)
            assert all(len(group.scored) >= plan.samples for group in groups)
            if way == "early":
                kept += [rollout.sampled for group in groups for rollout in group.scored]
                cut += [rollout.sampled for group in groups for rollout in group.cut]
            await client.ack(groups)
    return early_told(plan, seconds, kept, cut)


def early_told(plan: Plan, seconds: dict[str, list[float]], kept: list[int], cut: list[int]) -> dict[str, float]:
    started = [
        sum(plan.times.drawn(group, sample)[0])
        for group in range(plan.early * plan.groups) for sample in range(plan.samples + plan.extra)
    ]  # fmt: skip
    whole, closed = (sum(seconds[way]) / plan.early for way in ("whole", "early"))
    return {
        "ratio": whole / closed, "whole_s": whole, "early_s": closed, "cut_rollouts": len(cut), "cut_tokens": sum(cut),
        "cut_share": sum(cut) / max(1, sum(cut) + sum(kept)),
        "kept_mean_tokens": sum(kept) / len(kept), "all_mean_tokens": sum(started) / len(started),
        "kept_over_all": sum(kept) / len(kept) / (sum(started) / len(started)),
    }  # fmt: skip
