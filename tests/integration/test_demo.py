"""`rollout demo` and the first hour, as a stranger would type them; afterwards nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.services import RedisService, require
from workers.policy import scripted, tokenizer

COMMAND = [sys.executable, "-P", "-m", "workers.cli"]


class Place:
    """A folder to type commands in; `t` holds its temporary files, so that left-overs show."""

    def __init__(self, root: Path) -> None:
        self.root, self.here, self.t = root, root / "here", root / "t"
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> subprocess.Popen[str]:
        environ = {**os.environ, "TMPDIR": str(self.t), "XDG_RUNTIME_DIR": ""}
        process = subprocess.Popen(
            [*COMMAND, *words], cwd=self.here, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._started.append(process)
        return process

    def end(self) -> None:
        """After a test that failed: nothing of it stays."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    require("redis-server")
    for name in ("here", "t"):
        (tmp_path / name).mkdir()
    made = Place(tmp_path)
    yield made
    made.end()


def children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def test_the_whole_line(place: Place) -> None:
    demo = place.start("demo", "--json")
    out, said = demo.communicate(timeout=100)
    assert demo.returncode == 0, said
    told = json.loads(out.splitlines()[-1])
    assert list(told)[:5] == ["groups", "rollouts", "scored", "failed", "seconds"]
    assert (told["groups"], told["rollouts"], told["scored"], told["failed"]) == (32, 128, 128, 0)
    assert 0.2 < told["mean_reward"] < 0.9, "rewards vary"
    assert list((place.t).iterdir()) == []


@pytest.mark.ci
def test_for_people(place: Place) -> None:
    demo = place.start("demo", "--handler", "math", "--count", "3", "--samples", "2", "--workers", "2")
    out, said = demo.communicate(timeout=100)
    assert demo.returncode == 0, said
    assert "scripted policy: nobody's model" in out and "3 groups, 6 rollouts, 6 scored, 0 failed" in out
    assert "⟦" in out and "<|im_start|>user" in out


@pytest.mark.ci
def test_in_a_folder_with_packages_of_our_names(place: Place) -> None:
    """Every process of the line imports ours: the current folder is on nobody's path before them."""
    for name in ("pipeline", "workers", "handlers"):
        (place.here / name).mkdir()
        (place.here / name / "__init__.py").write_text("raise RuntimeError('another project')")
    demo = place.start("demo", "--handler", "math", "--count", "1", "--samples", "2", "--json")
    out, said = demo.communicate(timeout=100)
    assert demo.returncode == 0, said
    assert json.loads(out.splitlines()[-1])["scored"] == 2


@pytest.mark.ci
def test_a_task_file(place: Place) -> None:
    (place.here / "t.jsonl").write_text('{"id": "x", "question": "What is 2+2?", "expected_answer": "4"}\n')
    demo = place.start("demo", "--handler", "math", "--tasks", "t.jsonl", "--samples", "2", "--json")
    out, said = demo.communicate(timeout=100)
    assert demo.returncode == 0, said
    assert json.loads(out.splitlines()[-1])["rollouts"] == 2


def test_a_folder_of_ones_own(place: Place) -> None:
    """The README's second step: init, change a line, try it, see it run."""
    made = place.start("init", ".")
    made.communicate(timeout=30)
    assert made.returncode == 0
    code = place.here / "sums.py"
    code.write_text(code.read_text().replace('SIGN, RIGHT = "+", operator.add', 'SIGN, RIGHT = "*", operator.mul'))
    tried = place.start("try", "sums:Sums")
    out, said = tried.communicate(timeout=60)
    assert tried.returncode == 0, said
    assert "What is 2 * 2?" in out and "reward" in out
    demo = place.start("demo", "--handler", "sums:Sums", "--samples", "2", "--json")
    out, said = demo.communicate(timeout=100)
    assert demo.returncode == 0, said
    assert json.loads(out.splitlines()[-1])["scored"] == 16


def test_a_worker_that_does_not_start_is_told_with_its_log(place: Place) -> None:
    (place.here / "broken.py").write_text("import nothing_like_this\n")
    demo = place.start("demo", "--handler", "echo", "--set", "handlers.load=['broken:Mine']")
    _, said = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "ended with exit code 1" in said and "nothing_like_this" in said
    assert list((place.t).iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_end_before_time_leaves_nothing(place: Place, number: signal.Signals) -> None:
    demo = place.start("demo", "--handler", "echo", "--tasks", str(sleepers(place)))
    until = time.monotonic() + 30
    while len(started := children(demo.pid)) < 5:
        assert time.monotonic() < until and demo.poll() is None
        time.sleep(0.05)
    demo.send_signal(number)
    demo.communicate(timeout=30)
    assert demo.returncode == (130 if number == signal.SIGINT else 143)
    assert psutil.wait_procs(started, timeout=10)[1] == []
    assert list((place.t).iterdir()) == []


@pytest.mark.ci
def test_a_policy_of_the_users(place: Place) -> None:
    tokenizer.make(place.root / "tokens")
    launched = scripted.launch(place.root, "--tokenizer", str(place.root / "tokens"))
    try:
        words = ["demo", "--handler", "math", "--count", "2", "--samples", "2", "--policy", launched.url]
        without = place.start(*words)
        _, said = without.communicate(timeout=60)
        assert without.returncode == 1 and "policy.tokenizer is empty" in said
        demo = place.start(*words, "--set", f"policy.tokenizer={place.root / 'tokens'}")
        out, said = demo.communicate(timeout=60)
        assert demo.returncode == 0, said
        assert "4 rollouts, 4 scored" in out and "nobody's model. It looks" not in out
    finally:
        launched.stop()


def test_its_processes_do_not_outlive_a_kill(place: Place) -> None:
    demo = place.start("demo", "--handler", "echo", "--tasks", str(sleepers(place)))
    until = time.monotonic() + 30
    while len(started := children(demo.pid)) < 5:
        assert time.monotonic() < until and demo.poll() is None
        time.sleep(0.05)
    demo.kill()
    demo.communicate(timeout=30)
    assert psutil.wait_procs(started, timeout=20)[1] == []


def sleepers(place: Place) -> Path:
    file = place.root / "sleepers.jsonl"
    file.write_text('{"handler": "echo", "data": {"sleep": 600}}\n')
    return file


@pytest.mark.ci
def test_on_a_redis_of_the_users_it_leaves_no_key(place: Place, redis_service: RedisService) -> None:
    words = ["--set", f"redis.url={redis_service.url}", "--set", f"redis.password_file={redis_service.password_file}"]
    demo = place.start(*words, "demo", "--handler", "echo", "--count", "2", "--json")
    _, said = demo.communicate(timeout=60)
    assert demo.returncode == 0, said
    with redis_service.client_sync() as client:
        assert client.keys("*") == []


@pytest.mark.ci
def test_the_password_is_in_no_argument_and_no_environment(place: Place) -> None:
    demo = place.start("demo", "--handler", "echo", "--tasks", str(sleepers(place)), "--keep")
    until = time.monotonic() + 30
    while len(started := children(demo.pid)) < 5:
        assert time.monotonic() < until and demo.poll() is None
        time.sleep(0.05)
    (secret,) = (place.t).glob("rollout-demo-*/redis/password")
    password = secret.read_text().split()[0]
    for process in started:
        assert password not in " ".join(process.cmdline()) and password not in str(process.environ())
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=30)
