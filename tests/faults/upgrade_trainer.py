"""A trainer of any version: `python upgrade_trainer.py NAME OUT STOP`, on the installation that PYTHONPATH names.

It keeps some groups in the line until the file STOP is there, then pops the rest and ends. Each popped rollout is a
line of OUT: JSON, written before its ack. Only what every version of the package has is used here.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from pipeline import RolloutClient, Task
from pipeline.config import load

TALLY = "chaos_handlers:TallySame"
SAMPLES, AHEAD, STEPS = 4, 6, 3


def told(rollout: Any) -> str:
    """What the test checks of a rollout; `own`: its trajectory, or what it did in its sandbox, is its own."""
    words = hashlib.sha256(rollout.id.encode()).digest()
    tokens = [int(token) for token in rollout.trajectory.sequences[0].token_ids[:8]] if rollout.trajectory else []
    own = [int.from_bytes(words[at : at + 4], "little") % 150_000 for at in range(0, 32, 4)] == tokens
    if rollout.handler == TALLY:
        steps = [str(number) for number in range(1, STEPS + 1)]
        own = rollout.evidence == {"made": rollout.id, "tally": steps, "seen": steps}
    failure = f"{rollout.failure}" if rollout.failure else ""
    about = {"id": rollout.id, "outcome": rollout.outcome, "own": own, "failure": failure, "losses": rollout.losses}
    return json.dumps({**about, "attempts": rollout.attempts})


async def main(name: str, out: Path, stop: Path) -> None:
    kinds = itertools.cycle([("echo", {"tokens": 2048, "sleep": 0.7})] * 5 + [(TALLY, {"steps": STEPS, "nap": 0.2})])
    tasks = (Task(handler=kind, id=f"{name}-{at}", data=data) for at, (kind, data) in enumerate(kinds))
    expected = 0
    with out.open("a", encoding="utf-8") as file:
        async with RolloutClient(config=load()) as line:
            while expected or not stop.exists():
                while expected < AHEAD and not stop.exists():
                    await line.enqueue([next(tasks)], samples=SAMPLES)
                    expected += 1
                groups = await line.pop_groups(1, timeout=60)
                for rollout in (rollout for group in groups for rollout in group.rollouts):
                    file.write(told(rollout) + "\n")
                    file.flush()
                await line.ack(groups)
                expected -= len(groups)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
