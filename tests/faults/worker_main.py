"""A worker process for the fault tests: `python -m tests.faults.worker_main STAGE SLOTS SETTINGS [FAULT]`.

SETTINGS is a JSON map of settings. FAULT is "GAP" or "GAP:N": this process kills itself with SIGKILL the Nth time (the
first, else) that it comes to that gap. The product has no hooks for this: the methods are wrapped here.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from pipeline import log, scripts
from pipeline.config import Config
from pipeline.envelope import Stage
from pipeline.payload_files import PayloadFiles
from pipeline.queue import Queue
from workers.attempt import Attempt
from workers.loop import Worker
from workers.upkeep import Upkeep

GAPS = (
    "claim-sent", "claimed", "working", "done", "written", "commit-sent", "committed", "after", "fail-sent", "beat",
    "tick",
)  # fmt: skip

LAID = "laid"
"""The gap between a payload's file and its key: only where `payload.dir` is set."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at(gap: str, nth: int) -> Callable[[str], None]:
    """A function that is called at each gap with its name, and kills at the chosen one."""
    numbers = itertools.count(1)

    def reach(name: str) -> None:
        if name == gap and next(numbers) == nth:
            die()

    return reach


def wrap(owner: type, method: str, *, before: str = "", after: str = "", reach: Callable[[str], None]) -> None:
    """Have `owner.method` reach a gap before or after it runs."""
    original = getattr(owner, method)

    if asyncio.iscoroutinefunction(original):

        async def wrapped(*args: Any, **about: Any) -> Any:
            reach(before)
            result = await original(*args, **about)
            reach(after)
            return result

    else:

        def wrapped(*args: Any, **about: Any) -> Any:
            reach(before)
            result = original(*args, **about)
            reach(after)
            return result

    setattr(owner, method, wrapped)


def cut_replies(reach: Callable[[str], None], gap: str) -> None:
    """For VERB-sent: send the command, then die before its reply is read."""
    verb = gap.removesuffix("-sent")
    original = scripts.Pipeliner._round_trip

    async def round_trip(self: scripts.Pipeliner, commands: list[scripts.Command]) -> list[Any]:
        if any(command[:2] == ("EVALSHA", scripts.sha(verb)) for command in commands):
            connection = await self._client.connection_pool.get_connection()
            for command in commands:
                await connection.send_command(*command)
            await asyncio.sleep(0.05)  # the server has run it by now
            reach(gap)
            for _ in commands:
                await connection.read_response()
            await self._client.connection_pool.release(connection)
        return await original(self, commands)

    scripts.Pipeliner._round_trip = round_trip  # type: ignore[method-assign]


def set_fault(fault: str) -> None:
    gap, _, nth = fault.partition(":")
    if gap not in (*GAPS, LAID):
        raise SystemExit(f"unknown gap {gap!r} (known: {', '.join((*GAPS, LAID))})")
    reach = at(gap, int(nth or 1))
    if gap.endswith("-sent"):
        cut_replies(reach, gap)
    wrap(Worker, "_begin", before="claimed", reach=reach)
    wrap(Attempt, "_process", before="working", after="done", reach=reach)
    wrap(Queue, "write_payload", after="written", reach=reach)
    wrap(PayloadFiles, "write", after=LAID, reach=reach)
    wrap(Attempt, "commit", after="committed", reach=reach)
    wrap(Worker, "_release", after="after", reach=reach)
    wrap(Upkeep, "beat", after="beat", reach=reach)
    wrap(Upkeep, "_look_at_memory", before="tick", reach=reach)


async def cold(self: Worker) -> None:
    """No child server at the start: it takes a second of a processor to import what these tests do not need."""


async def serve(config: Config, stage: str, slots: int) -> None:
    Worker._warm_children = cold  # type: ignore[method-assign]
    worker = Worker(config, Stage(stage), slots)
    worker.install_signals()
    await worker.run()


def main() -> None:
    stage, slots, settings, *fault = sys.argv[1:]
    log.set_up("info")
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    if fault and fault[0]:
        set_fault(fault[0])
    asyncio.run(serve(Config().changed(json.loads(settings)), stage, int(slots)))


if __name__ == "__main__":
    main()
