"""What the task families cost and whether they are right, on real tasks.

Mathematics: each right answer of 128 competition problems, in several spellings, and the answer of its neighbour, which
is wrong; four checks at a time, each in a child process as in EVAL. `math_slowest_s` is by the clock, fork included.
Software: 64 evaluations of a real instance that wait at once, for one EVAL worker (see swe_evals.py).
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests.data: where the tasks come from

from benchmarks import swe_evals
from benchmarks.harness import machine, median, write
from handlers.math import Math
from pipeline.config import Config
from pipeline.envelope import Envelope, Payload, Stage, Task
from pipeline.interfaces import Context
from pipeline.log import AttemptLog
from tests.data import compmath
from tests.spellings import spellings
from workers.children import Children
from workers.job import Job

AT_ONCE = 4
SWE_AT_ONCE = 64


def math_cases() -> list[tuple[str, str, float]]:
    """(right answer, reply, what it is worth)."""
    golds = [str(row["expected_answer"]) for row in compmath()]
    cases = []
    for at, gold in enumerate(golds):
        neighbour = next(other for other in golds[at + 1 :] + golds if other != gold)
        cases += [(gold, reply, 1.0) for reply in spellings(gold)]
        cases += [(gold, reply, 0.0) for reply in spellings(neighbour)]
    return cases


async def math_figures() -> dict[str, Any]:
    """How many checks, how many of them wrong, and how long the slowest took."""
    children = Children(Config(), None, Math.preload)
    places, seconds, wrong = asyncio.Semaphore(AT_ONCE), [], []

    async def check(gold: str, reply: str, worth: float) -> None:
        ctx = context(children, gold, reply)
        async with places:
            began = time.monotonic()
            reward = await Math().eval(ctx)
            seconds.append(time.monotonic() - began)
        if reward.value != worth:
            wrong.append((gold, reply, reward.evidence["why"]))

    try:
        await Math().eval(context(children, "1", "2"))  # the child server's imports are no check's time
        async with asyncio.TaskGroup() as group:
            for case in math_cases():
                group.create_task(check(*case))
    finally:
        children.close()
    for case in wrong:
        sys.stderr.write(f"wrong: {case}\n")
    return {
        "math_checks": len(seconds), "math_wrong": len(wrong), "math_slowest_s": max(seconds),
        "math_p50_s": median(seconds),
    }  # fmt: skip


def context(children: Children, gold: str, reply: str) -> Context:
    """What EVAL gives the handler."""
    task = Task(handler="handlers.math:Math", data={"question": "?", "expected_answer": gold})
    envelope = Envelope(id="bench.0", group="bench", handler=task.handler)
    log = AttemptLog(logging.getLogger("bench"), rollout=envelope.id)
    job = Job(
        stage=Stage.EVAL, id=envelope.id, token="1", attempt=1, envelope=envelope, task=task, payload=Payload()
    )  # fmt: skip
    return Context(
        id=job.id, group="bench", sample=0, lane="train", attempt=1, task=Math.Task.model_validate(task.data), log=log,
        state={"answer": reply}, _compute=functools.partial(children.function, job, log),
    )  # fmt: skip


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "math": lambda: asyncio.run(math_figures()),
    "swe": lambda: swe_evals.measure(SWE_AT_ONCE),
}
"""Each part's figures, by its name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file, one flat object")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="measure only this part (repeatable)")
    options = parser.parse_args()
    figures = machine()
    for part in options.only or PARTS:
        figures |= PARTS[part]()
    write(figures, options.json)
    sys.exit(1 if figures.get("math_wrong") else 0)


if __name__ == "__main__":
    main()
