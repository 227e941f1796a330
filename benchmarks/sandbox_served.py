"""The process that owns the sandboxes in `sandbox.py`, as the INIT worker does: orders on stdin, answers on stdout.

One JSON object a line. The other side is the RUN worker: it opens the sandboxes through `workers.sandbox.client`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pipeline.config import Config, load
from pipeline.connection import connect
from pipeline.queue import Queue
from workers.sandbox import processes
from workers.sandbox.box import Spec
from workers.sandbox.boxes.apptainer import Apptainer
from workers.sandbox.host import Host, sandbox_root
from workers.sandbox.live import Live
from workers.sandbox.tools.session import Session

Answer = dict[str, Any]


class Served:
    """A sandbox host, and rollouts in Redis that hold its sandboxes in their RUN stage."""

    def __init__(self, config: Config, host: Host, queue: Queue) -> None:
        self.config, self.host, self.queue = config, host, queue
        self.made = 0

    async def prepare(self, count: int, together: bool = False, spec: dict[str, Any] | None = None) -> Answer:
        """Make sandboxes, one after the other or all together: ms until each one's shell answered, and s for all."""
        times: list[float] = []
        references: list[Answer] = []

        async def one() -> None:
            id, token = f"bench.{self.made}", f"init-{self.made}"
            self.made += 1
            key = self.queue.key("r", id)
            await self.queue.execute("HSET", key, "token", token, "stage", "init", "state", "leased")
            began = time.perf_counter()
            live = await self.host.stock.prepare(spec or {}, id=id, token=token, lane="train")
            times.append((time.perf_counter() - began) * 1e3)
            await self.queue.execute("HSET", key, "token", f"run-{id}", "stage", "run", "sandbox", live.text)
            references.append({"id": id, "token": f"run-{id}", "reference": live.reference})

        began = time.perf_counter()
        if together:
            await asyncio.gather(*(one() for _ in range(count)))
        else:
            for _ in range(count):
                await one()
        return {"ms": times, "seconds": time.perf_counter() - began, "sandboxes": references}

    async def discard(self) -> Answer:
        """End all sandboxes, one after the other: ms each. Comes back when their folders are removed too."""
        times = []
        for name in list(self.host.stock.live):
            began = time.perf_counter()
            await self.host.stock.discard(name)
            times.append((time.perf_counter() - began) * 1e3)
        await self.host.stock.wait_until_empty()
        return {"ms": times}

    async def pss(self) -> Answer:
        """MB (10^6 bytes) of each sandbox: all its processes on this machine, shared pages by share."""
        return {"mb": [sum(_pss(pid) for pid in _pids(live)) / 1e6 for live in self.host.stock.live.values()]}

    async def instances(self, count: int) -> Answer:
        """The other way: sandboxes that are Apptainer instances, ms until each one's shell answered."""
        driver = Apptainer(self.config, sandbox_root(self.config) / "instances", way="instance")
        times = []
        for number in range(count):
            began = time.perf_counter()
            box = await driver.create(Spec(), f"instance-{number}")
            session = Session(box, self.config.sandbox)
            await session.start()
            times.append((time.perf_counter() - began) * 1e3)
            await session.close()
            await box.discard()
        return {"ms": times}


def _pids(live: Live) -> set[int]:
    """What runs inside, and what of this process's children keeps it: Apptainer's own process, the way in."""
    inside = {item.pid for item in live.box.processes()} | ({live.box.pid} if live.box.pid else set())
    found = set(inside)
    for pid in inside:
        while pid not in (os.getpid(), 1):
            found.add(pid)
            above = processes.look(pid)
            pid = above.parent if above is not None else 1
    return found


def _pss(pid: int) -> int:
    share = processes.proportional(pid)
    if share is None:
        raise ValueError(f"the kernel does not tell the memory of process {pid}")
    return share


async def main() -> None:
    config = load(Path(sys.argv[1]))
    redis = connect(config)
    queue = Queue(redis, config, patience=5.0)
    host = await Host.open(config, "bench", queue)
    served = Served(config, host, queue)
    verbs: dict[str, Callable[..., Awaitable[Answer]]] = {
        "prepare": served.prepare, "discard": served.discard, "pss": served.pss, "instances": served.instances,
    }  # fmt: skip
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            print(json.dumps(await verbs[order.pop("do")](**order)), flush=True)
    finally:
        await host.close()
        await redis.aclose()


if __name__ == "__main__":
    asyncio.run(main())
