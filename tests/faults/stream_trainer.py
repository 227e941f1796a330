"""A trainer that feeds a stream and is killed: `python -m tests.faults.stream_trainer SETTINGS FOLDER ORDER POINT`.

Its weights are the list of what it was trained on; a checkpoint (FOLDER/checkpoint.json) holds them with the stream's
state, every second step. ORDER: ack after the "step", or after the "checkpoint". POINT: "trained:N", "acked:N" or
"saved:N", where it kills itself; empty: it goes on to the end of its tasks.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from pipeline import Group, RolloutClient, Task
from pipeline.config import Config

TASKS, SAMPLES, BATCH, EVERY = 12, 2, 2, 2


def tasks(folder: Path) -> list[Task]:
    data = {"tokens": 16, "starts": str(folder / "starts")}
    return [Task(handler="fault_handlers:Recorded", data={**data, "text": str(n)}) for n in range(TASKS)]


async def main(settings: str, place: str, order: str, point: str) -> None:
    folder = Path(place)
    checkpoint = folder / "checkpoint.json"
    weights: list[str] = []
    unacked: list[Group] = []

    def reach(name: str, number: int) -> None:
        if point == f"{name}:{number}":
            os.kill(os.getpid(), signal.SIGKILL)

    async with RolloutClient(config=Config().changed(json.loads(settings))) as line:
        stream = line.stream(tasks(folder), samples=SAMPLES, batch=BATCH, ahead=1, seed=5, epochs=1, name="run")
        if checkpoint.exists():
            saved = json.loads(checkpoint.read_text())
            weights = saved["weights"]
            stream.load_state_dict(saved["stream"])
        step = 0
        async for groups in stream:
            step += 1
            weights += [group.rollouts[0].state["answer"] for group in groups]
            unacked += groups
            reach("trained", step)
            if order == "step":
                await line.ack(unacked)
                unacked = []
                reach("acked", step)
            if step % EVERY == 0:
                checkpoint.with_suffix(".new").write_text(
                    json.dumps({"weights": weights, "stream": stream.state_dict()})
                )
                checkpoint.with_suffix(".new").rename(checkpoint)
                reach("saved", step)
                await line.ack(unacked)
                unacked = []
        await line.ack(unacked)
        print(json.dumps({"weights": weights, "again": stream.stats.again}))  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
