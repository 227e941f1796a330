"""Hand-over: long trajectories lie done in Redis, and a trainer's process pops them as numpy arrays."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import Bench

from pipeline.client import RolloutClient
from pipeline.envelope import Task

READER = Path(__file__).with_name("trainer_reader.py")
SAMPLES = 8


async def fill(line: Bench, groups: int, tokens: int, turns: int) -> None:
    """Let real workers play these rollouts until all are done, and end the workers."""
    tasks = [
        Task(handler="trainer_families:Long", id=f"g{at}", data={"group": at, "tokens": tokens, "turns": turns})
        for at in range(groups)
    ]
    async with RolloutClient(config=line.config) as client:
        await client.enqueue(tasks, samples=SAMPLES)
        for stage in ("init", "run", "eval"):
            worker = line.worker(stage, 32, "--burst")
            await asyncio.to_thread(worker.wait)


def read(line: Bench, way: str, groups: int) -> dict[str, Any]:
    """What a fresh process says of its pop; it hands everything back as it ends."""
    command = [sys.executable, "-P", str(READER), str(line.file), way, str(groups)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["rollouts"] == groups * SAMPLES, told
    return told
