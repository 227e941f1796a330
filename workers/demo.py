"""`rollout demo`: the whole line on this machine. A private Redis, a scripted policy and one worker process a stage.

All processes belong to this one: they are ended and waited for, however the demo ends.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import yaml

import handlers
from pipeline import server
from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.connection import connect_sync
from pipeline.envelope import WORKING, Task
from pipeline.errors import Incomplete, LineError
from pipeline.inspect import counts
from pipeline.results import Group
from pipeline.task_lines import parse
from workers import interrupt
from workers.policy import scripted, tokenizer
from workers.view import Progress
from workers.workshop import handlers_path

log = logging.getLogger(__name__)

FAMILY = "gsm_symbolic"
WAIT = 0.2
"""Seconds between two looks at the processes, while rollouts are waited for."""
STALL = 120.0
"""Seconds without a single finished rollout after which the demo gives up."""
END = 5.0
"""Seconds that a worker has to end by itself."""


@dataclass(kw_only=True)
class Plan:
    """What the demo does. `policy`: URL of a real server; empty starts the scripted one."""

    config: Config
    handler: str
    tasks: list[Task]
    samples: int
    workers: int = 1
    policy: str = ""
    keep: bool = False


@dataclass(kw_only=True)
class Outcome:
    """What came of it. `tokenizer`: a decoder's folder, valid until the demo's folder is removed."""

    groups: list[Group]
    seconds: float
    started: float
    tokenizer: str
    kept: str = ""
    processes: list[str] = field(default_factory=list)


class WorkerFailed(LineError):
    """A process of the demo ended before its time."""


def example_tasks(handler: str, count: int) -> list[Task]:
    """The demo's own tasks for a built-in handler; none for others, which bring a file."""
    if handler == "reason":
        return [
            Task(handler=handler, id=f"{FAMILY}-{at}", data={"family": FAMILY, "seed": 1, "index": at})
            for at in range(count)
        ]
    if handler == "echo":
        return [
            Task(handler=handler, id=f"echo-{at}", data={"text": f"hello {at}", "tokens": 64}) for at in range(count)
        ]
    if handler == "math":
        return [
            Task(
                handler=handler,
                id=f"sum-{at}",
                data={"question": f"What is {at} + {at * 7}?", "expected_answer": str(at * 8)},
            )
            for at in range(count)
        ]
    return _beside(handler)[:count]


def _beside(handler: str) -> list[Task]:
    """A built-in family's own examples: `tasks.jsonl` in its package, else its lines of the one in `handlers`."""
    home = Path(handlers.__file__).parent
    files = [file for file in (home / handler / "tasks.jsonl", home / "tasks.jsonl") if file.is_file()]
    found = (parse(line, None) for file in files for line in file.read_text().splitlines())
    return [task for task in found if task.handler == handler]


@contextmanager
def running(plan: Plan) -> Iterator[tuple[Config, list[Process], Path]]:
    """The line's processes, for the length of the block; afterwards nothing of them is left."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="rollout-demo-"))
        if not plan.keep:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        config = stack.enter_context(_redis(plan, folder))
        config = stack.enter_context(_policy(plan, config, folder))
        file = _write_config(config, folder, {task.handler for task in plan.tasks})
        processes: list[Process] = []
        stack.callback(_end, processes)
        for stage in WORKING:
            for number in range(plan.workers):
                processes.append(Process(f"{stage.value}-{number}", stage.value, file, folder))
        yield config, processes, folder


async def play(plan: Plan, config: Config, processes: list[Process]) -> list[Group]:
    """Enqueue, wait for every group, acknowledge. Raises WorkerFailed, Incomplete."""
    wanted = len(plan.tasks)
    groups: list[Group] = []
    async with RolloutClient(config=config) as client:
        with Progress(wanted * plan.samples, "rollouts") as bar:
            await client.enqueue(plan.tasks, samples=plan.samples)
            last = time.monotonic()
            while len(groups) < wanted:
                try:
                    found = await client.pop_groups(wanted - len(groups), timeout=WAIT)
                except Incomplete as error:
                    found = error.batch
                    if not found and time.monotonic() - last > STALL:
                        raise WorkerFailed(
                            f"no rollout has ended for {STALL:g} s: {error}{_tails(processes)}"
                        ) from None
                for process in processes:
                    process.check()
                if found:
                    last = time.monotonic()
                    groups.extend(found)
                    await client.ack(found)
                so_far = await counts(client.queue)
                ended = {name: so_far.get(name, 0) for name in ("scored", "failed", "cancelled")}
                bar.at(sum(ended.values()), ended)
    order = {task.id: at for at, task in enumerate(plan.tasks)}
    return sorted(groups, key=lambda group: order.get(group.id, 0))


class Process:
    """One worker process; its log lies in `folder`. It ends with its standard input, so that it never outlives us."""

    def __init__(self, name: str, stage: str, config: Path, folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-P", "-m", "workers.cli", "--config", str(config), "work", stage, "--tied"]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True, env=_environment()
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raise WorkerFailed, with the end of its log, when it has ended."""
        code = self._process.poll()
        if code is not None:
            raise WorkerFailed(f"worker {self.name} ended with exit code {code}:\n{self.tail()}")

    def tail(self, size: int = 2000) -> str:
        return self.log.read_bytes()[-size:].decode("utf-8", "replace").strip()

    def ask(self) -> None:
        """Ask it to end: SIGTERM, which also makes it the last that it hears from us."""
        if self._process.poll() is None:
            self._process.terminate()

    def end(self) -> None:
        stdin: IO[bytes] | None = self._process.stdin
        if stdin is not None:
            stdin.close()
        try:
            self._process.wait(END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _end(processes: list[Process]) -> None:
    for process in processes:
        process.ask()
    for process in processes:
        process.end()


def _tails(processes: list[Process]) -> str:
    return "".join(f"\n-- {process.name}:\n{process.tail(600)}" for process in processes)


def _environment() -> dict[str, str]:
    """Ours without the settings in it: they are in the config file already, and that one must win."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ROLLOUT_")}


@contextmanager
def _redis(plan: Plan, folder: Path) -> Iterator[Config]:
    """The user's URL, with a line name of the demo's own; else a private server that ends with the demo."""
    config = plan.config
    if config.redis.url:
        config = config.changed({"line.name": f"demo-{os.urandom(3).hex()}"})
        try:
            yield config
        finally:
            if not plan.keep:
                _forget(config)
        return
    home = folder / "redis" if plan.keep else None
    with server.start(home, keep=plan.keep, fraction=config.redis.maxmemory_fraction) as started:
        yield started.configured(config)


def _forget(config: Config) -> None:
    """Remove the demo's line from a Redis that is not ours."""
    with connect_sync(config) as client:
        keys = list(client.scan_iter(match=f"{{{config.line.name}}}:*", count=1000))
        for at in range(0, len(keys), 500):
            client.unlink(*keys[at : at + 500])


@contextmanager
def _policy(plan: Plan, config: Config, folder: Path) -> Iterator[Config]:
    """The policy's URL and tokenizer in the configuration."""
    if plan.policy:
        yield config.changed({"policy.url": plan.policy})
        return
    place = folder / "tokenizer"
    made = tokenizer.make(place)
    answers = folder / "answers.json"
    answers.write_text(json.dumps(answers_of(plan.tasks, config)), encoding="utf-8")
    launched = scripted.launch(
        folder, "--tokenizer", str(place), "--answers", str(answers), "--model", config.policy.model
    )
    try:
        yield config.changed(
            {"policy.url": launched.url, "policy.tokenizer": made.name_or_path, "policy.renderer": "qwen3"}
        )
    finally:
        launched.stop()


def answers_of(tasks: list[Task], config: Config) -> dict[str, Any]:
    """Question -> right answer, for the scripted policy. Handlers of several names may be among the tasks."""
    path = handlers_path(config)
    answers: dict[str, Any] = {}
    for task in tasks:
        handler = handlers.load(task.handler, path)
        checked = handlers.check_task(handler, task.data)
        gold = handler.gold(checked)
        ask = getattr(handler, "question", None)
        question = ask(checked) if callable(ask) else task.data.get("question", "")
        if gold is None or not question:
            continue
        if answers.setdefault(question, gold) != gold:
            log.warning(
                "tasks with the same prompt have different right answers; the scripted policy knows a task by its "
                "prompt and gives all of them the first one's: %.80r",
                question,
            )
    return answers


def _write_config(config: Config, folder: Path, used: set[str]) -> Path:
    """All settings in a file that only this user may read: a URL may hold a password."""
    absolute = {
        name: str(config.path_of(value))
        for name, value in (
            ("redis.password_file", config.redis.password_file),
            ("policy.tokenizer", config.policy.tokenizer),
            ("sandbox.root", config.sandbox.root),
        )
        if value
    }
    names = sorted({*config.handlers.load, *(name for name in used if ":" in name)})
    changes: dict[str, Any] = {
        **absolute, "handlers.path": handlers_path(config), "handlers.load": names, "limits.grace": 1.0,
        "redis.data": "",
    }  # fmt: skip
    file = folder / "config.yaml"
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        yaml.safe_dump(config.changed(changes).model_dump(), out, sort_keys=False)
    return file


@contextmanager
def run(plan: Plan) -> Iterator[Outcome]:
    """Play the demo; the block runs while the tokenizer's folder still is there."""
    started = time.monotonic()
    with running(plan) as (config, processes, folder):
        began = time.monotonic()
        groups = interrupt.run(play(plan, config, processes), (signal.SIGINT, signal.SIGTERM))
        yield Outcome(
            groups=groups, seconds=time.monotonic() - began, started=began - started,
            tokenizer=config.policy.tokenizer, kept=str(folder) if plan.keep else "",
            processes=[f"{process.name} (pid {process.pid})" for process in processes],
        )  # fmt: skip
