"""The command line on a real server: a task's way in and out, what is said when it fails, and the exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipeline.config import load
from tests.services import RedisService
from workers.cli.app import rollout
from workers.cli.base import line as line_of
from workers.policy import scripted, tokenizer

MINE = """
from pydantic import BaseModel
from pipeline import AgentHandler


class Mine(AgentHandler):
    class Task(BaseModel):
        wrong: bool = False

    async def run(self, ctx):
        if ctx.task.wrong:
            raise KeyError("merge")

    async def eval(self, ctx):
        return 0.5
"""
GOOD, BAD = '{"handler": "mine:Mine", "data": {}}\n', '{"handler": "mine:Mine", "data": {"wrong": true}}\n'


class Line:
    """The commands, on one line."""

    def __init__(self, service: RedisService, folder: Path) -> None:
        self.folder = folder
        self.words = [f"--set=redis.url={service.url}", f"--set=redis.password_file={service.password_file}"]
        self.words += [
            "--set=lease.seconds=3.0",
            "--set=lease.beat=0.5",
            "--set=lease.tick=0.2",
            "--set=retry.backoff=0.01",
        ]

    def call(self, *words: str, text: str = "") -> Result:
        return CliRunner().invoke(rollout, [*self.words, *words], input=text)

    def ok(self, *words: str, text: str = "") -> str:
        result = self.call(*words, text=text)
        assert result.exit_code == 0, result.output
        return result.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self.ok(*words, "--json"))

    def process(self, *words: str, **about: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "workers.cli", *self.words, *words]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **about,
        )

    def work(self) -> None:
        """Empty each stage, one after the other."""
        for stage in ("init", "run", "eval"):
            worker = self.process("work", stage, "--burst")
            _, said = worker.communicate(timeout=60)
            assert worker.returncode == 0, said


@pytest.fixture
def line(redis_service: RedisService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "mine.py").write_text(MINE)
    monkeypatch.chdir(folder)
    return Line(redis_service, folder)


@pytest.fixture
def workers(line: Line) -> Iterator[list[subprocess.Popen[str]]]:
    """One worker a stage, ended with the test."""
    started = [line.process("work", stage, stdin=subprocess.PIPE) for stage in ("init", "run", "eval")]
    yield started
    for worker in started:
        worker.terminate()
    for worker in started:
        worker.communicate(timeout=30)
        assert worker.returncode == 0


def test_in_and_out(line: Line) -> None:
    assert "2 tasks x 2 samples = 4" in line.ok("enqueue", "-", "--samples", "2", text=GOOD + BAD)
    assert line.json("depth")["init"]["ready"]["train"] == 4
    (first, *rest) = line.json("ls", "init")
    assert len(rest) == 3
    assert "no live worker serves it" in line.ok("show", first["id"])
    line.work()
    (wrong, _) = line.json("dead")
    assert wrong["kind"] == "handler" and "KeyError: 'merge'" in wrong["why"]
    assert "KeyError" in line.ok("logs", wrong["id"]) and "run" in line.ok("show", wrong["id"])
    rows = [json.loads(text) for text in line.ok("pop", "2", "--groups").splitlines()]
    assert sorted(str(row["reward"]) for row in rows) == ["0.5", "0.5", "None", "None"]
    assert {row["outcome"] for row in rows} == {"scored", "failed"}
    assert line.json("audit") == []
    assert line.json("depth")["done"]["ready"]["train"] == 0


@pytest.mark.ci
def test_requeue_makes_a_new_rollout(line: Line) -> None:
    line.ok("enqueue", "-", text='{"handler": "mine:Mine", "id": "a", "data": {"wrong": true}}')
    line.work()
    assert line.json("show", "a.0")["outcome"] == "failed"
    line.ok("pop", "1")
    new = line.json("requeue", "a.0")["requeued"]["a.0"]
    assert new.startswith("a-retry-")
    assert line.call("requeue", "a.0").exit_code == 1
    assert "no dead letters to requeue" in line.ok("requeue", "--all")
    shown = line.json("show", new)
    assert shown["retry_of"] == "a.0" and shown["task"] == {"wrong": True}
    assert line.json("show", "a.0")["requeued"] == new
    line.work()
    assert json.loads(line.ok("pop", "1"))["retry_of"] == "a.0"
    assert line.json("audit") == []


def test_less_than_asked_for_is_never_a_success(line: Line) -> None:
    """H07 (b): 7 of 8, and which one is missing and why."""
    line.ok(
        "enqueue", "-", text="".join(f'{{"handler": "mine:Mine", "id": "t{at}", "data": {{}}}}\n' for at in range(7))
    )
    line.work()
    line.ok("enqueue", "-", text='{"handler": "mine:Mine", "id": "late", "data": {}}')
    result = line.call("pop", "8", "--timeout", "0.5")
    assert result.exit_code == 1
    assert "7 of 8" in result.stderr and "late.0: waits" in result.stderr and "no live worker" in result.stderr
    rows = [json.loads(text) for text in result.stdout.splitlines()]
    assert len(rows) == 7 and all(row["outcome"] == "scored" for row in rows)


def test_no_ack_gives_back_and_arrays_are_lists(line: Line) -> None:
    line.ok("enqueue", "-", text='{"handler": "echo", "id": "e", "data": {"tokens": 16}}')
    line.work()
    looked = json.loads(line.ok("pop", "1", "--no-ack"))
    assert looked["trajectory"]["sequences"][0]["token_ids"] == 16
    taken = json.loads(line.ok("pop", "1", "--arrays"))["trajectory"]["sequences"][0]
    assert len(taken["token_ids"]) == len(taken["logprobs"]) == 16 and sum(taken["loss_mask"]) == 8
    gone = line.call("show", "e.0")
    assert gone.exit_code == 1 and "acknowledged" in gone.stderr


def test_a_run_is_paused_and_resumed(line: Line) -> None:
    line.ok("run", "pause", "--why", "the cluster is wanted")
    for view in (("depth",), ("watch", "--once")):
        assert "paused" in (said := line.ok(*view)) and "the cluster is wanted" in said
    assert line.json("run", "pause")["paused"].startswith("the run of lane train is paused")
    assert line.json("run", "resume") == {"lane": "train", "paused": ""}
    assert "paused" not in line.ok("depth")
    assert line.json("run", "end") == {"ended": False}
    assert line.call("run", "pause", "--lane", "nope").exit_code == 2


def test_pop_takes_all_that_there_is(line: Line) -> None:
    assert line.ok("pop", "--all") == ""
    line.ok("enqueue", "-", "--samples", "3", "--unchecked", text=GOOD)
    line.ok("cancel", "--all")
    assert len(line.ok("pop", "--all").splitlines()) == 3
    assert line.call("pop", "3", "--all").exit_code == 2


def test_cancel(line: Line) -> None:
    line.ok(
        "enqueue",
        "-",
        "--samples",
        "3",
        text='{"handler": "echo", "id": "a", "data": {}}\n{"handler": "echo", "id": "b", "data": {}}',
    )
    assert line.json("cancel", "a.0")["counts"]["REMOVED"] == 1
    assert line.json("cancel", "--group", "a")["counts"] == {"REMOVED": 2, "ASKED": 0, "DONE": 1, "NONE": 0}
    assert line.json("cancel", "--lane", "eval")["replies"] == {}
    assert line.json("cancel", "--all")["counts"]["REMOVED"] == 3
    assert line.call("cancel", "nope.0").exit_code == 1
    assert line.call("cancel", "--group", "nope").exit_code == 1
    assert {json.loads(text)["outcome"] for text in line.ok("pop", "6").splitlines()} == {"cancelled"}


def test_one_bad_line_and_nothing_is_in(line: Line) -> None:
    result = line.call("enqueue", "-", text=GOOD + '{"handler": "mine:Mine", "data": {"wrong": "maybe"}}\n')
    assert result.exit_code == 1 and "stdin, line 2" in result.stderr
    assert line.json("depth")["init"]["ready"]["train"] == 0


def test_the_page_of_a_trajectory(line: Line, tmp_path: Path) -> None:
    line.ok("enqueue", "-", text='{"handler": "echo", "id": "e", "data": {"tokens": 16}}')
    line.work()
    line.ok("show", "e.0", "--html", str(tmp_path / "e.html"))
    assert 'class="sampled"' in (tmp_path / "e.html").read_text()


def test_watch_and_workers_see_the_living(line: Line, workers: list[subprocess.Popen[str]]) -> None:
    until = time.monotonic() + 30
    while len(line.json("workers")) < 3:
        assert time.monotonic() < until
    assert {item["stage"] for item in line.json("watch", "--once")["workers"]} == {"init", "run", "eval"}
    assert "serving" in line.ok("watch", "--once")


def test_a_worker_called_from_python_ends_no_child_of_the_caller(line: Line) -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        line.ok("work", "run", "--burst")
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


# H13: what the shell sees.


def test_waiting_for_a_success_is_0_and_for_a_failure_1(line: Line, workers: list[subprocess.Popen[str]]) -> None:
    good = line.call("enqueue", "-", "--wait", "--timeout", "60", text=GOOD)
    assert good.exit_code == 0, good.output
    assert "1 scored" in good.stdout
    bad = line.call("enqueue", "-", "--wait", "--timeout", "60", text=BAD)
    assert bad.exit_code == 1
    assert "1 failed" in bad.stdout and "rollout show" in bad.stderr


def test_a_wait_that_is_over_is_1(line: Line) -> None:
    result = line.call("enqueue", "-", "--wait", "--timeout", "0.2", text=GOOD)
    assert result.exit_code == 1 and "1 of 1 rollouts had not ended" in result.stderr


def test_an_interrupted_wait_is_130(line: Line) -> None:
    (line.folder / "t.jsonl").write_text(BAD)
    waiting = line.process("enqueue", "t.jsonl", "--wait")
    until = time.monotonic() + 30
    while not line.json("ls", "init"):
        assert time.monotonic() < until
    os.killpg(waiting.pid, signal.SIGINT)
    _, said = waiting.communicate(timeout=30)
    assert waiting.returncode == 130
    assert "interrupted" in said and "Traceback" not in said


def test_a_worker_that_is_interrupted_is_130_and_one_that_is_terminated_0(line: Line) -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 0)):
        worker = line.process("work", "run")
        assert worker.stderr is not None
        assert any("serves run" in text for text in iter(worker.stderr.readline, ""))
        worker.send_signal(number)
        worker.communicate(timeout=30)
        assert worker.returncode == code


def test_a_worker_without_its_redis_ends_with_1_in_time(line: Line) -> None:
    started = time.monotonic()
    worker = line.process("--set=redis.url=redis://127.0.0.1:1", "--set=redis.password_file=", "work", "run")
    out, said = worker.communicate(timeout=30)
    assert worker.returncode == 1 and not out
    assert "can't be reached" in said and "Traceback" not in said
    assert time.monotonic() - started < 10


def test_a_worker_with_a_wrong_password_says_so(line: Line, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("wrong\n")
    worker = line.process(f"--set=redis.password_file={tmp_path / 'wrong'}", "work", "run")
    _, said = worker.communicate(timeout=30)
    assert worker.returncode == 1 and "refused the password" in said


def test_a_server_that_may_lose_the_line_is_warned_of(redis_server: RedisService, tmp_path: Path) -> None:
    line = Line(redis_server, tmp_path)
    with redis_server.client_sync() as client:
        client.config_set("appendonly", "no")
        client.config_set("maxmemory-policy", "allkeys-lru")
    result = line.process("enqueue", "-", stdin=subprocess.PIPE)
    _, said = result.communicate('{"handler": "echo", "data": {}}', timeout=30)
    assert result.returncode == 0
    assert "set `appendonly yes`" in said and "set `maxmemory-policy noeviction`" in said
    warned = [item for item in line.json("doctor") if item["name"] == "redis" and item["grade"] == "warn"]
    assert {item["mend"] for item in warned} == {"set `appendonly yes`", "set `maxmemory-policy noeviction`"}


def test_a_worker_with_a_broken_handler_does_not_start(line: Line) -> None:
    (line.folder / "broken.py").write_text("import nothing_like_this\n")
    worker = line.process("work", "run", "--handler", "broken:Mine")
    _, said = worker.communicate(timeout=30)
    assert worker.returncode == 1 and "nothing_like_this" in said


def test_metrics_are_served_and_a_taken_port_is_told(line: Line) -> None:
    import socket
    import urllib.request

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        worker = line.process("work", "eval", "--metrics", str(port))
        _, said = worker.communicate(timeout=30)
        assert worker.returncode == 1 and f"metrics port {port}" in said
    worker = line.process("work", "eval", "--metrics", str(port))
    assert worker.stderr is not None
    assert any("serves eval" in text for text in iter(worker.stderr.readline, ""))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    assert b'rollout_taken_total{stage="eval"} 0.0' in opener.open(f"http://127.0.0.1:{port}/metrics", timeout=5).read()
    worker.terminate()
    worker.communicate(timeout=30)


def test_head_is_quiet_and_what_was_not_written_comes_back(line: Line) -> None:
    line.ok("enqueue", "-", "--samples", "50", text='{"handler": "echo", "id": "e", "data": {"tokens": 4000}}')
    line.work()
    reader = line.process("pop", "50", "--arrays")
    assert reader.stdout is not None and reader.stderr is not None
    reader.stdout.readline()
    reader.stdout.close()
    assert reader.wait(30) == 1
    with reader.stderr:
        assert reader.stderr.read() == ""
    left = line.json("depth")["done"]["ready"]["train"]
    assert 40 <= left < 50


def test_a_private_server_that_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> Result:
        return CliRunner().invoke(rollout, list(words))

    assert call("redis", "status").exit_code == 1
    assert call("redis", "start").exit_code == 0
    try:
        assert call("redis", "start").exit_code == 1
        assert json.loads(call("redis", "status", "--json").stdout)["aof"] is True
        assert call("depth").exit_code == 0
    finally:
        assert call("redis", "stop").exit_code == 0
    assert call("redis", "stop").exit_code == 1


def test_a_server_in_the_foreground_ends_with_its_signal(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "workers.cli",
        "redis",
        "start",
        "--foreground",
        "--bind",
        "127.0.0.1",
        "--data",
    ]
    server = subprocess.Popen([*command, str(tmp_path / "line")], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert server.stdout is not None
    assert server.stdout.readline().startswith("redis://127.0.0.1:")
    assert (tmp_path / "line" / "url").read_text().startswith("redis://") and (tmp_path / "line" / "password").is_file()
    server.terminate()
    server.communicate(timeout=30)
    assert server.returncode == 0
    assert not (tmp_path / "line" / "url").exists()


def test_doctor_on_a_sound_line(line: Line) -> None:
    found = line.json("doctor")
    assert {item["name"] for item in found} >= {
        "python",
        "packages",
        "redis",
        "latency",
        "handlers",
        "sandbox",
        "policy",
    }
    assert not [item for item in found if item["grade"] == "fail"]


def test_doctor_fails_on_a_redis_that_is_not_there(line: Line) -> None:
    result = line.call("--set=redis.url=redis://127.0.0.1:1", "doctor", "--json")
    assert result.exit_code == 1
    assert any(item["name"] == "redis" and item["grade"] == "fail" for item in json.loads(result.stdout))


def test_ls_says_who_waits_for_a_place_and_why(line: Line) -> None:
    assert line.ok("ls", "init", "--state", "place") == "nothing waits for a place in init\n"

    async def put_one() -> None:
        config = load(overrides=[word.removeprefix("--set=") for word in line.words], environ={})
        async with line_of(config) as queue:
            await queue.note_place("mine:Mine", True)

    asyncio.run(put_one())
    line.ok("enqueue", "-", text=GOOD)
    (row,) = line.json("ls", "init", "--state", "place")
    assert row["why"].startswith("waits ") and "in init: no live worker serves it" in row["why"]
    assert row["why"][-40:] in line.ok("ls", "init", "--state", "place")


def test_doctor_asks_each_policy_server_for_a_token(line: Line, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    tokenizer.make(folder)
    server = scripted.launch(tmp_path, "--tokenizer", str(folder))
    try:
        urls = f"--set=policy.url={server.url},http://127.0.0.1:1"
        result = line.call(urls, f"--set=policy.tokenizer={folder}", "doctor", "--json")
    finally:
        server.stop()
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    policy = {item["grade"]: item["text"] for item in found if item["name"] == "policy"}
    assert "generates" in policy["ok"] and "version 0" in policy["ok"]
    assert policy["fail"].startswith("127.0.0.1:1: ")
    (about,) = [item for item in found if item["name"] == "tokenizer"]
    assert about["grade"] == "ok" and "chat format qwen3" in about["text"]
