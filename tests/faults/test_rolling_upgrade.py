"""An upgrade of a running line: two versions of the package side by side under load, then the schema is raised."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.audit import audit
from pipeline.envelope import SCHEMA
from pipeline.queue import Queue
from tests import line
from tests.faults.tools import HERE, ROOT, SHORT, STAGES
from tests.services import RedisService
from tests.waiting import until

PACKAGES = ("pipeline", "workers", "handlers")
FIRST = "e162485"
"""The last version whose messages have schema 1 alone; a clone without its history skips what needs it."""
OLD = "0.0.9"


@dataclass
class Installation:
    """A version of the package in a folder of its own, and the processes that run it."""

    folder: Path
    scratch: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """`python WORDS` of this version; its output goes to `log(process)`."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "ROLLOUT_CONFIG": str(self.scratch / "line.yaml")}
        with (self.scratch / f"{self.folder.name}-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=self.scratch,
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        self.processes.append(process)
        return process

    def rollout(self, *words: str) -> subprocess.Popen[bytes]:
        return self.start("-m", "workers.cli", *words)

    def trainer(self, name: str) -> subprocess.Popen[bytes]:
        """It stops when the file NAME.stop is there; what it popped is in NAME.popped."""
        return self.start(str(HERE / "upgrade_trainer.py"), name, f"{name}.popped", f"{name}.stop")

    def log(self, process: subprocess.Popen[bytes]) -> str:
        number = self.processes.index(process)
        return (self.scratch / f"{self.folder.name}-{number}.log").read_text("utf-8", "replace")

    def ended(self, process: subprocess.Popen[bytes], seconds: float = 120.0) -> int:
        """Its exit code, once it has ended."""
        until(lambda: process.poll() is not None, seconds)
        return int(process.returncode)

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()


def _copied(folder: Path) -> None:
    """This version as it would be without schema 2: it reads and writes 1 alone, and says so."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    messages = folder / "pipeline" / "envelope.py"
    text, count = re.subn(r"^SCHEMA = \d+$", "SCHEMA = 1", messages.read_text("utf-8"), flags=re.MULTILINE)
    assert count == 1
    messages.write_text(text, "utf-8")


def _of_history(folder: Path) -> None:
    """The last version before schema 2, as it was: with its own Lua, and deaf to a raise."""
    found = subprocess.run(["git", "archive", FIRST, *PACKAGES], cwd=ROOT, capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"the history of this clone lacks {FIRST}: {found.stderr.decode().strip()}")
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=found.stdout, check=True)


@pytest.fixture(params=[_copied, _of_history], ids=["copy", "history"])
def versions(request: pytest.FixtureRequest, redis_service: RedisService, tmp_path: Path, root: Path) -> Iterator[Any]:
    """(the older version, this one); both read the same settings."""
    payloads = tmp_path / "payloads"
    payloads.mkdir()
    settings = {
        **SHORT, "redis.url": redis_service.url, "redis.password_file": redis_service.password_file,
        "payload.dir": str(payloads), "payload.inline_max": 1000, "limits.grace": 60.0,
        "redis.socket_timeout": 10.0, "lease.seconds": 10.0,
        "sandbox.root": str(root), "sandbox.max_live": 16,
    }  # fmt: skip
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    (tmp_path / "line.yaml").write_text(yaml.safe_dump(sections), "utf-8")
    older, this = Installation(tmp_path / "older", tmp_path), Installation(ROOT, tmp_path)
    request.param(older.folder)
    facts = older.folder / f"rollout_line-{OLD}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rollout-line\nVersion: {OLD}\n", "utf-8")
    yield older, this
    for installation in (older, this):
        installation.stop()


def popped(folder: Path, *names: str) -> list[dict[str, Any]]:
    """What these trainers have popped so far."""
    files = [folder / f"{name}.popped" for name in names]
    return [json.loads(text) for file in files if file.exists() for text in file.read_text("utf-8").splitlines()]


def listed(service: RedisService) -> dict[str, dict[str, Any]]:
    """Workers on the line's list, by name."""
    with service.client_sync() as client:
        told: Any = client.hgetall("{rollout}:workers")
    return {name.decode(): json.loads(about) for name, about in told.items()}


def files(folder: Path) -> list[str]:
    """Payload files; folders come and go meanwhile."""
    return [name for _, _, names in os.walk(folder / "payloads") for name in names]


@pytest.mark.ci
@pytest.mark.timeout(600)
async def test_an_upgrade_under_load(
    versions: tuple[Installation, Installation], redis_service: RedisService, tmp_path: Path
) -> None:
    """0 lost, 0 delivered twice, while each worker and the trainer are replaced, and while the schema is raised."""
    older, this = versions

    def more(name: str, count: int) -> None:
        wanted = len(popped(tmp_path, name)) + count
        until(lambda: len(popped(tmp_path, name)) >= wanted, 120)

    def key() -> int:
        with redis_service.client_sync() as client:
            return int(client.get("{rollout}:schema"))  # type: ignore[arg-type]

    # A line of the older version, under load; workers of this one join it, and the older ones are drained one by one.
    crew = {stage: older.rollout("work", stage, "--slots", "8") for stage in STAGES}
    trainer = older.trainer("old")
    more("old", 40)
    assert key() == 1
    for stage in STAGES:
        this.rollout("work", stage, "--slots", "8")
    until(lambda: len(listed(redis_service)) == 6, 120)
    more("old", 40)
    for stage in reversed(STAGES):  # INIT last: the others reach the sandboxes that it hosts
        crew[stage].send_signal(signal.SIGTERM)
        assert older.ended(crew[stage], 120) == 0, older.log(crew[stage])
        more("old", 20)
    (tmp_path / "old.stop").touch()
    assert older.ended(trainer, 120) == 0, older.log(trainer)
    after = this.trainer("new")
    more("new", 24)
    assert key() == 1 and not files(tmp_path), "the line's number counts, whoever writes"

    # One older worker is left when the schema is raised: that is refused, and then forced.
    late = older.rollout("work", "run", "--slots", "8")
    until(lambda: any(about["pid"] == late.pid and about["running"] for about in listed(redis_service).values()), 120)
    name = next(name for name, about in listed(redis_service).items() if about["pid"] == late.pid)
    refused = this.rollout("schema", "raise")
    assert this.ended(refused) == 1
    assert name in this.log(refused) and "not raised" in this.log(refused)
    assert key() == 1
    forced = this.rollout("schema", "raise", "--force")
    assert this.ended(forced) == 0, this.log(forced)
    raised = time.time()
    assert key() == SCHEMA
    until(lambda: bool(files(tmp_path)), 120)
    assert older.ended(late, 120) == 1, "too old, it ends by itself"
    more("new", 40)

    # Whoever of the older version begins now says what to do, and takes nothing.
    for process in (older.rollout("work", "run"), older.trainer("late")):
        assert older.ended(process) == 1
        assert "upgrade this installation" in older.log(process)
    more("new", 24)
    (tmp_path / "new.stop").touch()
    assert this.ended(after, 120) == 0, this.log(after)

    told = popped(tmp_path, "old", "new", "late")
    _check(told, name, raised)
    heard = older.folder.joinpath("pipeline", "line_schema.py").exists()
    if heard:
        lost = [
            item for item in told for attempt in item["attempts"] if attempt["worker"] == name and "error" in attempt
        ]
        assert not lost, "who hears of the raise finishes what it has"
        assert "upgrade this installation" in older.log(late)
    async with redis_service.client() as client:
        queue = Queue(client, redis_service.config.changed({"payload.dir": str(tmp_path / "payloads")}))
        assert await audit(queue) == []
        assert await line.leftovers(queue) == []


def _check(told: list[dict[str, Any]], late: str, raised: float) -> None:
    """All were scored, once, each with its own trajectory; by both versions, after the raise by this one alone."""
    assert len(told) >= 200
    ids = [item["id"] for item in told]
    assert len(ids) == len(set(ids)), "delivered twice"
    wrong = [item for item in told if item["outcome"] != "scored" or not item["own"]]
    assert not wrong, wrong
    for name in ("old", "new"):
        numbers = sorted(int(id.removeprefix(f"{name}-").partition(".")[0]) for id in ids if id.startswith(f"{name}-"))
        assert sorted(set(numbers)) == list(range(numbers[-1] + 1)), "a group never came"
        assert len(numbers) == 4 * (numbers[-1] + 1), "a rollout never came"
    attempts = [attempt for item in told for attempt in item["attempts"] if "version" in attempt]
    for stage in STAGES:
        ran = {attempt["version"] == OLD for attempt in attempts if attempt["stage"] == stage}
        assert ran == {True, False}, f"{stage} was served by one version alone"
    assert any(attempt["worker"] == late for attempt in attempts)
    assert not [attempt for attempt in attempts if attempt["version"] == OLD and attempt["started"] > raised]
