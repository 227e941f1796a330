"""Many SWE evaluations at once: a real instance (pipdeptree), every second one with its gold patch, one EVAL worker.

Beside it, what one evaluation costs without a line and without a grader: `apptainer exec` of the same tests.
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import threading
import time
from typing import Any

import psutil

from benchmarks.harness import Bench, bench, median
from handlers.swe import Swe, SweTask
from pipeline import inspect
from pipeline.client import RolloutClient
from pipeline.envelope import Task
from pipeline.interfaces import Message
from tests import swe_task
from workers.policy import scripted
from workers.policy.tokenizer import make
from workers.sandbox.images.cache import Cache

PLAIN = 5
"""Plain runs of the tests, of which the median counts."""


def measure(count: int) -> dict[str, Any]:
    """Figures of `count` evaluations that wait at once. Raises AssertionError where one has the wrong score."""
    with bench() as made, tempfile.TemporaryDirectory(prefix="rs-") as root:
        made.change(
            images__cache=str(swe_task.IMAGES), sandbox__driver="apptainer", sandbox__root=f"{root}/s",
            sandbox__max_live=8,
        )  # fmt: skip
        instance = swe_task.make_image(made.config)
        return {**asyncio.run(_measure(made, instance, count)), "swe_plain_s": _plain(made)}


def _plain(made: Bench) -> float:
    """Seconds of the tests in a container, without anything of ours (median)."""
    cache = Cache.of(made.config)
    image = cache.image(cache.digest_of(swe_task.IMAGE) or "")
    assert image is not None
    tests = "tests/_models/test_dag.py tests/render/test_text.py"
    command = f"cd {swe_task.WORKDIR} && {swe_task.PRELUDE} && pytest -q {tests}"
    options = ["--containall", "--no-mount", "home", "--writable-tmpfs", *(f"--bind={bind}" for bind in image.binds)]
    argv = ["apptainer", "exec", *options, str(image.path), "bash", "-c", command]
    seconds = []
    for _ in range(PLAIN):
        began = time.monotonic()
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert " passed in " in done.stdout, done
        seconds.append(time.monotonic() - began)
    return median(seconds)


async def _measure(made: Bench, instance: swe_task.Instance, count: int) -> dict[str, Any]:
    handler, nothing = Swe(), _submit()
    rows = [
        {**instance.row, "problem_statement": f"Number {n}. {instance.row['problem_statement']}"} for n in range(count)
    ]
    gold = handler.gold(SweTask.model_validate(instance.row)) or []
    answers: dict[str, Any] = {
        handler.question(SweTask.model_validate(row)): nothing if n % 2 else gold for n, row in enumerate(rows)
    }
    tokens = make(made.folder / "tokens")
    server = await scripted.start(scripted.Options(tokenizer=tokens, answers=answers, p_correct=1.0))
    made.change(
        policy__url=server.url, policy__tokenizer=str(made.folder / "tokens"), policy__renderer="qwen3",
    )  # fmt: skip
    try:
        async with RolloutClient(config=made.config) as client:
            await client.enqueue([Task(handler="swe", data=row, id=f"swe-{n}") for n, row in enumerate(rows)])
            ahead = made.worker("init", 8), made.worker("run", 16)
            while (await inspect.counts(client.queue)).get("committed:run", 0) < count:
                assert all(process.poll() is None for process in ahead), "a worker ended before its work"
                await asyncio.sleep(0.2)
            made.end(*reversed(ahead))
            began = time.monotonic()
            worker = made.worker("eval", 4)
            with Memory(worker.pid) as memory:
                batch = await client.pop(count, timeout=1800)
            wall = time.monotonic() - began
            await client.ack(batch)
    finally:
        await server.stop()
    wrong = [rollout for rollout in batch if rollout.reward != 1.0 - int(rollout.group.removeprefix("swe-")) % 2]
    assert not wrong, wrong
    last = [item for rollout in batch for item in rollout.attempts if item["stage"] == "eval"]
    return {
        "swe_evals_at_once": count, "swe_wall_s": wall, "swe_peak_rss_mb": memory.peak / 1e6,
        "swe_eval_median_s": median([item["seconds"] for item in last]),
        "swe_eval_slowest_s": max(item["seconds"] for item in last), "swe_attempts": len(last),
    }  # fmt: skip


def _submit() -> list[Message]:
    call = {"type": "function", "function": {"name": "submit", "arguments": {}}}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}]


class Memory:
    """Looks twice a second what a process and all below it have in memory, shared pages counted once (PSS, bytes)."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.peak = 0

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            found = 0
            for process in [self._process, *self._process.children(recursive=True)]:
                try:
                    found += process.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue  # it has just ended
            self.peak = max(self.peak, found)
