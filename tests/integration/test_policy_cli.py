"""`rollout policy` on a real server, with scripted policies behind it: add, ls, drain, rm, pause, resume, scripted."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from click.testing import CliRunner, Result

from pipeline import server
from pipeline.backends import Backends, Load
from pipeline.config import Config
from pipeline.queue import Queue
from tests.services import RedisService, require
from tests.waiting import until
from workers import address
from workers.cli.app import rollout
from workers.policy import scripted
from workers.policy.scripted import Options
from workers.policy.tokenizer import Tokenizer

T = TypeVar("T")


@pytest.fixture(scope="module")
def servers(tokens: Tokenizer) -> Iterator[list[str]]:
    """URLs of two scripted policies, which live in a thread of this process."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(20)

    started = [run(scripted.start(Options(tokenizer=tokens))) for _ in range(2)]
    yield [one.url for one in started]
    for one in started:
        run(one.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class Line:
    """The commands, on one line."""

    def __init__(self, service: RedisService) -> None:
        self.service = service
        self.words = [f"--set=redis.url={service.url}", f"--set=redis.password_file={service.password_file}"]
        self.words += ["--set=policy.backend_lease=2", "--set=policy.probe_timeout=2"]

    def call(self, *words: str) -> Result:
        return CliRunner().invoke(rollout, [*self.words, *words])

    def ok(self, *words: str) -> str:
        result = self.call(*words)
        assert result.exit_code == 0, result.output
        return result.stdout

    def said(self, *words: str) -> Any:
        return json.loads(self.ok(*words, "--json"))

    def wrong(self, *words: str) -> str:
        result = self.call(*words)
        assert result.exit_code == 1 and not result.stdout, result.output
        return result.stderr

    def backends(self, work: Callable[[Backends], Coroutine[Any, Any, T]]) -> T:
        """What a process beside the command line does to the registry."""

        async def main() -> T:
            async with self.service.client() as client:
                return await work(Backends(Queue(client, self.service.config)))

        return asyncio.run(main())


@pytest.fixture
def line(redis_service: RedisService) -> Line:
    return Line(redis_service)


def test_add_asks_first_and_ls_shows(line: Line, servers: list[str]) -> None:
    assert "no policy server is registered: `rollout policy add URL`" in line.ok("policy", "ls")
    line.ok("policy", "add", servers[0], "--id", "one")
    added = line.said("policy", "add", servers[1], "--id", "two", "--tokenizer", "folder", "--kind", "openai")
    assert added["tokenizer"] == str(Path.cwd() / "folder") and added["endpoint"] == "completions"
    line.backends(lambda all: all.exchange("w", {"one": Load(300, 3, 100.0), "two": Load(50, 1)}))
    found = line.said("policy", "ls")
    assert found["admission"] is None and found["workers"] == ["w"]
    one, two = found["backends"]
    assert (one["id"], one["state"], one["version"], one["endpoint"]) == ("one", "ready", 0, "generate")
    assert (one["model"], one["window"], one["lease"]) == ("policy", 32_768, None)
    assert (one["calls"], one["tokens"], one["rate"], one["wait"]) == (3, 300, 100.0, 3.0)
    assert (two["rate"], two["wait"]) == (None, 0.5)  # as fast as the best one, until it is known
    text = line.ok("policy", "ls")
    assert text.startswith("no trainer has named a version")
    assert [row.split()[:3] for row in text.splitlines()[2:]] == [["one", "ready", "0"], ["two", "ready", "0"]]


def test_add_refuses_what_does_not_answer_unless_forced(line: Line, servers: list[str]) -> None:
    nobody = "http://127.0.0.1:9"
    assert "It was not added; --force adds it all the same" in line.wrong("policy", "add", nobody)
    assert "serves no model called 'other' (it serves: policy)" in line.wrong(
        "policy", "add", servers[0], "--model", "other"
    )
    assert "is no URL" in line.wrong("policy", "add", "node1:8000")
    assert line.said("policy", "ls")["backends"] == []
    assert "127.0.0.1:9: model not known" in line.ok("policy", "add", nobody, "--force")
    assert line.said("policy", "rm", "127.0.0.1:9") == {"removed": "127.0.0.1:9"}
    assert "no policy server is registered as http://127.0.0.1:9 (there are: none)" in line.wrong(
        "policy", "rm", nobody
    )


def test_servers_of_another_policy_stand_apart(line: Line, servers: list[str]) -> None:
    line.ok("policy", "add", servers[0], "--id", "mine")
    assert line.said("policy", "add", servers[1], "--id", "theirs", "--policy", "judge")["id"] == "theirs"
    found = line.said("policy", "ls")
    assert [[one["id"] for one in each] for each in (found["backends"], found["others"]["judge"])] == [
        ["mine"],
        ["theirs"],
    ]
    assert "policy judge\n" in line.ok("policy", "ls")
    assert "registered as theirs (there are: mine)" in line.wrong("policy", "drain", "theirs")
    line.ok("policy", "drain", "theirs", "--policy", "judge")
    assert line.said("policy", "ls")["others"]["judge"][0]["state"] == "drained"
    line.ok("policy", "rm", "theirs", "--policy", "judge")
    assert line.said("policy", "ls")["others"] == {}
    said = line.wrong("policy", "add", servers[1], "--policy", "jury")
    assert "no policy is named 'jury' (known: policy, judge)" in said and "rollout serve MODEL --policy jury" in said


def test_add_with_a_version_tells_the_server(line: Line, servers: list[str]) -> None:
    line.ok("policy", "add", servers[0], "--version", "12")
    assert line.said("policy", "add", servers[0])["version"] == 12  # it says so itself by now
    line.ok("policy", "add", servers[0], "--version", "0")


def test_drain_waits_for_the_calls_in_flight(line: Line, servers: list[str]) -> None:
    line.ok("policy", "add", servers[0], "--id", "one")
    assert line.said("policy", "drain", servers[0]) == {"id": "one", "drained": True}
    assert line.said("policy", "ls")["backends"][0]["state"] == "drained"
    assert line.ok("policy", "drain", "one", "--off") == "one gets calls again\n"
    assert line.said("policy", "ls")["backends"][0]["state"] == "ready"
    line.backends(lambda all: all.exchange("w", {"one": Load(10, 1)}))
    ended = threading.Thread(target=last_call_ends, args=(line,))
    ended.start()
    assert line.ok("policy", "drain", "one", "--wait") == "one has no call in flight\n"
    ended.join()
    assert line.said("policy", "ls")["backends"][0]["calls"] == 0
    assert line.call("policy", "drain", "one", "--wait", "--off").exit_code == 2


def last_call_ends(line: Line) -> None:
    until(lambda: line.backends(Backends.view).backends[0].drained)
    line.backends(lambda all: all.exchange("w", {}))


def test_pause_stays_until_resume(line: Line, servers: list[str]) -> None:
    """One that is not there any more holds nobody up."""
    assert "the policy is not paused" in line.wrong("policy", "resume")
    line.ok("policy", "add", servers[0], "--id", "one")
    line.ok("policy", "add", "http://127.0.0.1:9", "--id", "gone", "--force")
    assert line.said("policy", "pause", "--mode", "abort") == {"paused": ["one"]}
    found = line.said("policy", "ls")
    assert found["policy"]["mode"] == "abort" and "rollout policy pause" in found["policy"]["paused"]
    states = {one["id"]: one["state"] for one in found["backends"]}
    assert states["one"] == "paused"
    assert paused(servers[0])
    resumed = line.said("policy", "resume", "--version", "5")
    assert (resumed["version"], resumed["updated"], [*resumed["ejected"]]) == (5, ["one"], ["gone"])
    assert not paused(servers[0])
    states = {one["id"]: (one["state"], one["version"]) for one in line.said("policy", "ls")["backends"]}
    assert states["one"] == ("ready", 5) and states["gone"][0] == "behind"
    line.ok("policy", "pause")
    assert line.ok("policy", "resume") == "the policy goes on, with the weights that it had: version 5\n"
    assert line.ok("policy", "ls").startswith("version 5; ")


def paused(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/is_paused", timeout=10) as reply:
        return bool(json.loads(reply.read())["is_paused"])


def test_a_scripted_policy_in_the_line(line: Line) -> None:
    command = [sys.executable, "-m", "workers.cli", *line.words, "policy", "scripted", "--count=5", "--register"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("export ROLLOUT_POLICY__URL=http://127.0.0.1:")
        folder = process.stdout.readline().strip().partition("=")[2]
        (found,) = line.said("policy", "ls")["backends"]
        assert (found["state"], found["tokenizer"], found["model"]) == ("ready", folder, "policy")
        assert 0 < found["lease"] <= 2
        assert "is kept registered by scripted-" in line.wrong("policy", "rm", found["id"])
        before = line.backends(Backends.view).backends[0].ends
        until(lambda: line.backends(Backends.view).backends[0].ends > before)  # it is renewed
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert line.said("policy", "ls")["backends"] == []
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def reached() -> Iterator[tuple[Line, str]]:
    """A line whose Redis other machines could reach too, and the address of this machine that it has."""
    found = [own.ip for own in address._all() if not own.ip.is_loopback and own.ip.version == 4]
    if not found:
        pytest.skip("this machine has no address but loopback ones")
    require("redis-server")
    with server.start(tcp=(str(found[0]), 0)) as started:
        yield Line(RedisService(started, started.configured(Config()))), str(found[0])


def scripted_in(line: Line, *words: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "workers.cli",
        *line.words,
        "policy",
        "scripted",
        "--says=42",
        "--register",
        *words,
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *words], stdout=pipe, stderr=pipe, text=True, cwd=Path(__file__).parents[2])


def ended(process: subprocess.Popen[str]) -> str:
    """What it said on stderr, after SIGTERM."""
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=10)[1]
    assert process.returncode == 0, said
    return said


def test_other_machines_reach_a_scripted_policy_and_read_its_tokenizer(
    reached: tuple[Line, str], tmp_path: Path
) -> None:
    line, own = reached
    process = scripted_in(line, f"--set=slurm.folder={tmp_path / 'line'}")
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip().partition("=")[2]
        (found,) = line.said("policy", "ls")["backends"]
        assert url.startswith(f"http://{own}:") and found["url"] == url and found["id"] in url
        assert not paused(url), "it answers there"
        folder = Path(found["tokenizer"])
        assert folder.parent == tmp_path / "line" and (folder / "tokenizer.json").is_file()
        assert ended(process) == ""
        assert not folder.exists()
    finally:
        process.kill()
        process.communicate()


def test_what_other_machines_can_not_use_is_said(reached: tuple[Line, str], servers: list[str]) -> None:
    """A loopback address, by `scripted --host` and by `add`; a tokenizer in this machine's own folder."""
    line, own = reached
    process = scripted_in(line, "--host=127.0.0.1")
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip().partition("=")[2]
        assert url.startswith("http://127.0.0.1:")
        added = line.call("policy", "add", servers[0])
        assert added.exit_code == 0, added.stderr
        assert f"{servers[0]} reaches this machine from here alone" in added.stderr and f"at {own}," in added.stderr
        said = ended(process)
        assert f"{url} reaches this machine from here alone" in said
        assert "can't read the tokenizer in" in said and "set slurm.folder, or TMPDIR" in said
    finally:
        process.kill()
        process.communicate()
    assert "belong to --register" in line.call("policy", "scripted", "--host=127.0.0.1").stderr


def test_serve_says_what_is_wrong_before_anything_starts(line: Line, servers: list[str]) -> None:
    assert "no-such-vllm is no program here" in line.wrong("serve", "m", "--vllm", "no-such-vllm")
    port = servers[0].rpartition(":")[2]
    assert f"can't listen on 127.0.0.1, port {port}" in line.wrong(
        "serve", "m", "--vllm", sys.executable, "--port", port
    )
    assert "Give it as --advertise URL" in line.wrong("serve", "m", "--host", "0.0.0.0")
