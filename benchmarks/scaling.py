"""How does the line scale with nodes? On a real Slurm of this machine, as arrays from the project's own batch scripts.

    python benchmarks/scaling.py [--json FILE] [--driver apptainer] [--nodes 1,2,4,8] [--short]

Each node has 8 slots: a RUN worker with 8, an INIT worker that holds up to 12 sandboxes (so that the next rollout's is
ready when a slot gets free), an EVAL worker. A rollout is 12 turns of 0.6 s of model time (`sink.py`, which computes
nothing) and a command of 0.1 s (`sleep 0.1`) in a sandbox of its own; every slot plays 10. The workers run and are
registered before the clock starts: `rollouts_per_s_N` is all rollouts over the seconds from the first enqueue to the
last pop, so the first sandboxes and the last, half-empty seconds count. `efficiency_N` is rollouts_per_s_N over N times
rollouts_per_s_1. All nodes share this machine's cores: `cpu_use_N` is the share of them that was busy, whoever used it.

The control plane alone: 6,000 rollouts of 1 KB (110 made-up tokens) without model and sandbox through the same arrays,
from the first enqueue to the last pop as well; on 1 and on 2 nodes, of which the better figure is told (more workers
than this are more switches on two cores).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests.slurm: the cluster

from benchmarks.harness import machine, wait_until, write
from benchmarks.scaling_usage import Usage
from pipeline import inspect
from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from tests.slurm.cluster import Cluster
from workers.policy.tokenizer import make
from workers.slurm.text import Place, text

HERE = Path(__file__).parent
SLOTS = 8
STAGES = ("init", "run", "eval")
KINDS = (*STAGES, "redis")
PUBLISHED = {1: 0.35, 2: 0.65, 4: 1.12, 8: 1.65}
"""Rollouts/s on so many real nodes, of another system with its own tasks (arXiv 2603.18815): 59 % of linear at 8."""


@dataclass(frozen=True)
class Plan:
    """What is played. Times in s; `ahead`: sandboxes that an INIT worker may hold, in shares of the slots."""

    nodes: tuple[int, ...] = (1, 2, 4, 8)
    per_slot: int = 10
    turns: int = 12
    model: float = 0.6
    tool: float = 0.1
    driver: str = "bubblewrap"
    ahead: float = 1.5
    empty: int = 6000
    empty_nodes: tuple[int, ...] = (1, 2)

    @property
    def ideal(self) -> float:
        """Rollouts per second of one node whose slots are never empty and never late."""
        return SLOTS / (self.turns * (self.model + self.tool))


class Line:
    """One Slurm, one line on it with Redis as a job, and a policy server that computes nothing."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self.cluster, self.plan = cluster, plan
        self.folder = cluster.folder / "line"
        (self.folder / "logs").mkdir(parents=True)
        self.file = self.folder / "config.yaml"
        self.config = self._settings()
        self._children: list[subprocess.Popen[bytes]] = []

    def _settings(self) -> Config:
        tokenizer = self.folder / "tokenizer"
        make(tokenizer)
        cores = {"init": 8, "run": 4, "eval": 2, "redis": 2}  # 16 together: one of each kind fits on a node
        return Config().changed({
            "slurm.folder": str(self.folder), "network.interface": "127.0.0.1", "handlers.path": str(HERE),
            "policy.tokenizer": str(tokenizer), "policy.context": 65_536, "sandbox.driver": self.plan.driver,
            "sandbox.max_live": round(SLOTS * self.plan.ahead), "workers.run.slots": SLOTS, "line.max_length": 0,
            **{f"slurm.{kind}.cpus": count for kind, count in cores.items()},
            **{f"slurm.{kind}.memory_mb": 4096 for kind in KINDS},
        })  # fmt: skip

    def write(self, **changes: Any) -> None:
        """Settings for the jobs that are submitted from now on."""
        self.config = self.config.changed({name.replace("__", "."): value for name, value in changes.items()})
        self.file.touch(mode=0o600)
        self.file.write_text(yaml.safe_dump(self.config.model_dump()))

    def sink(self) -> None:
        port = self.folder / "port"
        command = [
            sys.executable, "-P", str(HERE / "sink.py"), "--port-file", str(port), "--tokens", "64", "--even",
            "--hold", str(self.plan.model),
        ]  # fmt: skip
        self._children.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        wait_until(port.exists, 30, "the policy server")
        self.write(policy__url=f"http://127.0.0.1:{port.read_text()}")

    def submit(self, kind: str, count: int) -> str:
        """An array of `count` tasks, on the first `count` nodes; the job's id."""
        config = self.config.changed({f"slurm.{kind}.jobs": count})
        place = Place(
            folder=str(self.folder), config=str(self.file), home=str(self.folder), program=str(self.program())
        )
        nodes = self.cluster.nodes[count:] if kind != "redis" else self.cluster.nodes[1:]
        return self.cluster.submit(
            text(config, kind, place),
            *([f"--exclude={','.join(nodes)}"] if nodes else []),
            f"--output={self.folder}/logs/%x-%A_%a.out",
        )

    def program(self) -> Path:
        """`rollout`; as root, with the node's own host name, so that nodes reach each other's sandboxes by TLS over TCP
        as real nodes do, and not by a Unix socket."""
        path = self.folder / "rollout"
        rollout = f"{shlex.quote(sys.executable)} -P -m workers.cli"
        if os.geteuid() == 0:
            rollout = f'unshare --uts sh -c \'hostname "$SLURMD_NODENAME"; exec {rollout} "$@"\' rollout'
        path.write_text(f'#!/bin/sh\nexec {rollout} "$@"\n')
        path.chmod(0o755)
        return path

    def end(self) -> None:
        for child in self._children:
            child.terminate()
            child.wait()


@contextlib.contextmanager
def line(plan: Plan) -> Iterator[Line]:
    """A Slurm of as many nodes as are needed; nothing of it is left afterwards."""
    cluster = Cluster(max(*plan.nodes, *plan.empty_nodes))
    made: Line | None = None
    try:
        cluster.start()
        made = Line(cluster, plan)
        made.sink()
        cluster.until_running(made.submit("redis", 1))
        wait_until((made.folder / "address.json").exists, 30, "the address of Redis")
        yield made
    finally:
        if made is not None:
            made.end()
        for left in cluster.stop():
            sys.stderr.write(f"killed at the end: {left}\n")


async def _until_registered(client: RolloutClient, nodes: int) -> None:
    until = time.monotonic() + 120
    while True:
        alive = Counter(item["stage"] for item in await inspect.workers(client.queue))
        if all(alive[stage] == nodes for stage in STAGES):
            return
        if time.monotonic() > until:
            raise TimeoutError(f"not all workers of {nodes} nodes came within 120 s: {dict(alive)}")
        await asyncio.sleep(0.2)


async def measure(
    on: Line, nodes: int, task: Task, count: int, page: int = SLOTS
) -> tuple[float, float, dict[str, float]]:
    """(rollouts/s from the first enqueue to the last pop, share of the CPUs, cores by kind)."""
    jobs = [on.submit(stage, nodes) for stage in STAGES]
    try:
        async with RolloutClient(config=on.config) as client:
            await _until_registered(client, nodes)
            usage = Usage(on.cluster, (await client.queue.redis.info("server"))["process_id"])
            began = time.perf_counter()

            async def feed() -> None:
                for _ in range(count // SLOTS):
                    await client.enqueue([Task(handler=task.handler, data=task.data)], samples=SLOTS)

            feeding = asyncio.create_task(feed())
            got = 0
            while got < count:
                batch = await client.pop(min(page, count - got), timeout=600)
                failed = [rollout.failure for rollout in batch if rollout.outcome != "scored"]
                if failed:
                    raise RuntimeError(f"a rollout failed: {failed[0]}")
                got += len(batch)
                last = time.perf_counter()
                await client.ack(batch)
            await feeding
            return count / (last - began), usage.share(), usage.cores()
    finally:
        for job in jobs:
            on.cluster.cancel(job)
        on.cluster.until(lambda: all(row.over for job in jobs for row in on.cluster.rows(job)), 90, "that workers end")


def figures(plan: Plan, only: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with line(plan) as on:
        if only in ("", "turns"):
            found |= scaling(on, plan)
        if only in ("", "control"):
            found |= control_plane(on, plan)
        found["nodes_have_own_host_names"] = os.geteuid() == 0
    return found


def scaling(on: Line, plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = {"driver": plan.driver, "ideal_rollouts_per_s_1": plan.ideal}
    task = Task(handler="scaling_families:Agent", data={"turns": plan.turns, "command": f"sleep {plan.tool:g}"})
    for nodes in plan.nodes:
        rate, cpu, cores = asyncio.run(measure(on, nodes, task, nodes * SLOTS * plan.per_slot))
        found |= {f"rollouts_per_s_{nodes}": rate, f"cpu_use_{nodes}": cpu}
        if nodes > 1:
            found[f"efficiency_{nodes}"] = rate / nodes / found["rollouts_per_s_1"]
        said = ", ".join(f"{kind} {count:.2f}" for kind, count in cores.items())
        sys.stderr.write(
            f"{nodes} nodes: {rate:.2f} rollouts/s, {rate / nodes / plan.ideal:.3f} of the ideal, CPU {cpu:.0%} "
            f"(cores: {said})\n"
        )
        if nodes == plan.nodes[-1]:
            found |= {f"cores_{nodes}_{kind}": count for kind, count in cores.items()}
    found |= {
        f"published_efficiency_{nodes}": rate / nodes / PUBLISHED[1] for nodes, rate in PUBLISHED.items() if nodes > 1
    }
    return found


def control_plane(on: Line, plan: Plan) -> dict[str, Any]:
    """The better of the figures on `empty_nodes`."""
    on.write(workers__run__slots=32, workers__init__slots=32, workers__eval__slots=32)
    task = Task(handler="families:Stamp", data={"tokens": 110})
    found: dict[str, Any] = {"control_plane_rollouts_per_s": 0.0}
    for nodes in plan.empty_nodes:
        rate, cpu, cores = asyncio.run(measure(on, nodes, task, plan.empty // SLOTS * SLOTS, page=64))
        said = ", ".join(f"{kind} {count:.2f}" for kind, count in cores.items())
        sys.stderr.write(f"control plane alone, {nodes} nodes: {rate:.0f} rollouts/s, CPU {cpu:.0%} (cores: {said})\n")
        if rate > found["control_plane_rollouts_per_s"]:
            about = {"rollouts_per_s": rate, "nodes": nodes, "cpu_use": cpu}
            about |= {f"cores_{kind}": count for kind, count in cores.items()}
            found = {f"control_plane_{name}": value for name, value in about.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file, one flat object")
    parser.add_argument("--driver", default="bubblewrap", choices=["bubblewrap", "apptainer", "local"])
    parser.add_argument("--nodes", default="1,2,4,8", help="numbers of nodes, 1 among them")
    parser.add_argument("--per-slot", type=int, default=10, help="rollouts that each slot plays")
    parser.add_argument("--ahead", type=float, default=1.5, help="sandboxes of a node over its slots")
    parser.add_argument("--only", default="", choices=["turns", "control"])
    parser.add_argument("--short", action="store_true", help="small sizes: does it run at all?")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that its Slurm is ended
    nodes = tuple(sorted(map(int, options.nodes.split(","))))
    plan = Plan(nodes=nodes, per_slot=options.per_slot, driver=options.driver, ahead=options.ahead)
    if options.short:
        plan = replace(plan, nodes=(1, 2), per_slot=1, turns=2, empty=200)
    write(machine() | figures(plan, options.only), options.json)


if __name__ == "__main__":
    main()
