"""What does a fleet of workers cost the line's one Redis? `python benchmarks/fleet.py --json FILE`.

A worker process keeps three connections to Redis: one for its verbs, one that waits at the stage's doorbell, one for
its heartbeat thread. Here a few processes hold the connections of many workers and send what an idle worker sends, by
the line's own verbs: a claim after each second at the doorbell, a tick a second, a beat every lease.beat. Measured are
Redis's own processor time and, on a connection of its own, how long a hop (enqueue, claim, commit) takes meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
import uuid
from typing import Any

from harness import bench, machine, median, quantile, wait_until, write

from pipeline.config import Config
from pipeline.connection import connect, connect_sync
from pipeline.envelope import WORKING, Envelope, Task, encode, encode_compressed, rollout_id
from pipeline.queue import Queue

SECONDS = 15.0
"""For which each size is looked at."""

A_PROCESS = 250
"""Workers whose connections one process holds: more, and that process is what is measured."""

PROBES = 300


async def one_worker(config: Config, stage: str, name: str) -> None:
    """What an idle worker sends, for ever."""
    client, bell, upkeep = connect(config), connect(config, blocking=True), connect(config, blocking=True)
    queue, beats = Queue(client, config, patience=60.0), Queue(upkeep, config, patience=60.0)
    await client.ping()
    about = {"stage": stage, "host": "fleet", "pid": 1, "slots": 8, "running": 0, "version": "0", "stopping": False}

    async def claims() -> None:
        while True:
            await queue.claim_at_bell(bell, 1.0, stage, 8, name, uuid.uuid4().hex)

    async def upkeeps() -> None:
        beaten = float("-inf")
        while True:
            await upkeep.execute_command("BLPOP", queue.key("bell", "worker", name), config.lease.tick)
            if time.monotonic() - beaten >= config.lease.beat:
                await beats.verb("beat", *beats.beat_arguments(name, about, []))
                beaten = time.monotonic()
            await beats.verb("tick", *beats.tick_arguments(name))
            if stage == "init":
                await upkeep.info("memory")

    await asyncio.gather(claims(), upkeeps())


async def hold(config: Config, first: int, count: int) -> None:
    stages = [stage.value for stage in WORKING]
    async with asyncio.TaskGroup() as group:
        for number in range(first, first + count):
            stage = stages[number % len(stages)]
            group.create_task(one_worker(config, stage, f"{stage}-fleet-{number}"))
            await asyncio.sleep(1.0 / count)  # real workers do not begin in one moment either


def hops(config: Config) -> list[float]:
    """Seconds of enqueue, claim and commit, one after another, in a lane that no worker of the fleet serves."""
    alone, run_name = config.changed({"line.lanes": {"probe": 1}}), uuid.uuid4().hex

    async def run() -> list[float]:
        found = []
        async with connect(alone) as client:
            queue = Queue(client, alone, patience=60.0)
            task = encode_compressed(Task(handler="echo"), queue.schema)
            for number in range(PROBES):
                group = f"{run_name}-{number}"
                id = rollout_id(group, 0)
                envelope = encode(Envelope(id=id, group=group, handler="echo", lane="probe"), queue.schema)
                began = time.perf_counter()
                await queue.enqueue(group, task, [(id, envelope)], lane="probe")
                (claim,) = await queue.claim("init", 1, "prober")
                await queue.commit("init", id, claim.token, "run", claim.envelope)
                found.append(time.perf_counter() - began)
                await asyncio.sleep(SECONDS / PROBES / 2)
        return found

    return asyncio.run(run())


def measure(workers: int) -> dict[str, Any]:
    with bench() as line, connect_sync(line.config) as client:
        line.change(line__lanes={"train": 4, "eval": 1})
        for first in range(0, workers, A_PROCESS):
            count = min(A_PROCESS, workers - first)
            line.start([sys.executable, __file__, "--hold", str(line.file), str(first), str(count)])
        name = "{" + line.config.line.name + "}:workers"
        wait_until(lambda: client.hlen(name) >= workers, 120.0, "the fleet is not there")
        hops(line.config)
        client.config_resetstat()
        before, began = client.info("cpu"), time.monotonic()
        found = hops(line.config)
        time.sleep(max(0.0, SECONDS - (time.monotonic() - began)))
        wall, after = time.monotonic() - began, client.info("cpu")
        spent = sum(after[key] - before[key] for key in ("used_cpu_user", "used_cpu_sys"))
        about = client.info()
        return {
            f"redis_cpu_{workers}": spent / wall,
            f"redis_cpu_us_per_worker_s_{workers}": 1e6 * spent / wall / workers,
            f"commands_per_worker_s_{workers}": _sent(client) / wall / workers,
            f"connections_{workers}": about["connected_clients"],
            f"redis_memory_mb_{workers}": about["used_memory"] / 1e6,
            f"hop_p50_ms_{workers}": 1000 * median(found), f"hop_p99_ms_{workers}": 1000 * quantile(found, 0.99),
        }  # fmt: skip


def _sent(client: Any) -> int:
    """Commands that clients sent: those that scripts call are no round trips."""
    stats = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "blpop", "info", "ping"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--workers", type=int, nargs="+", default=[30, 300, 1000])
    parser.add_argument("--hold", nargs=3, metavar=("CONFIG", "FIRST", "COUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold:
        from pathlib import Path

        from pipeline.config import load

        file, first, count = options.hold
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(hold(load(Path(file)), int(first), int(count)))
        return
    figures: dict[str, Any] = {**machine()}
    for workers in options.workers:
        sys.stderr.write(f"{workers} idle workers on one Redis\n")
        figures |= measure(workers)
    figures["load"] = os.getloadavg()[0]
    write(figures, options.json)


if __name__ == "__main__":
    main()
